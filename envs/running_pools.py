"""The pools of this process: looked up by their tickets, replaced and closed."""

import atexit
import collections
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from envs import gymnasium_worker
from envs.pools import ActorInputs, DiedAtStartError, Recreated, Segment, SendRecv, Transition
from fdg.errors import HostError

_log = logging.getLogger(__name__)

_START_TIMEOUT = 300.0  # seconds until all instances are made and reset: they may load models
_POLL_SECONDS = 1e-4  # between checks for a ready pool
_MAX_POOLS = 4  # pools of one environment and size at the same time: training, evaluation, and a few more


class Losses(NamedTuple):
    """Failures and lost episodes of all pools in this process."""

    failures: int
    episodes: int  # lost while running, counted as truncated


_losses = Losses(0, 0)


def losses() -> Losses:
    """The losses so far."""
    return _losses


class _RunningPool:
    """A pool that tickets refer to: one of `parts` pools of a batch, for `seeds [B]`."""

    def __init__(self, environment: Any, seeds: np.ndarray, parts: int = 1):
        self.number = secrets.randbelow(2**31)  # so that no ticket of another process matches
        self.environment, self.size, self.parts = environment, len(seeds), parts
        self.steps, self.num_restarts = 0, 0
        self.sent: np.ndarray | None = None  # seeds of the running step, if any
        self.is_new = False  # True if that step starts new episodes
        self.lock = threading.Lock()
        self.pool = environment.source.start(self.size)
        self._send_recv = SendRecv(self.pool)
        try:
            self.first_observation = self._reset(np.arange(self.size), seeds)
        except BaseException:
            self.close()
            raise

    def step(self, seeds: np.ndarray, action: np.ndarray) -> tuple[Transition, np.ndarray]:
        """Steps every instance; returns a transition, and the mask of rows that were lost and restarted."""
        self.steps += 1
        return self._with_replacements(self.pool.step(action, self.environment.timeout), seeds)

    def send(self, seeds: np.ndarray, action: np.ndarray) -> None:
        """Starts a step."""
        self.steps, self.sent = self.steps + 1, seeds
        self._send_recv.send(action, self.environment.timeout)

    def recv(self) -> tuple[Transition, np.ndarray]:
        """Waits for the running step; returns what `step` returns."""
        assert self.sent is not None
        seeds, self.sent, is_new, self.is_new = self.sent, None, self.is_new, False
        return (
            self.first_step()
            if is_new
            else self._with_replacements(self._send_recv.recv(self.environment.timeout), seeds)
        )

    def ready(self) -> bool:
        """True if `recv` would return at once."""
        return self.sent is None or self.is_new or self._send_recv.ready()

    def first_step(self) -> tuple[Transition, np.ndarray]:
        """The first step after all instances have been restarted."""
        first = self.first_observation
        return Recreated(first, first, len(self.environment.info)).step(), np.ones(self.size, np.bool_)

    def segment(
        self,
        program: Any,
        num_steps: int,
        inputs: ActorInputs[np.ndarray],
        seeds: np.ndarray,
        last_observation: np.ndarray,
        is_new: bool,
    ) -> tuple[Any, Transition, np.ndarray]:
        """T steps for which workers act: the actor's results, the steps, and the mask of lost
        instances `[T, B]`.

        Lost instances are recreated and repeat the whole segment.
        """
        lost, info, merged = np.zeros((num_steps, self.size), np.bool_), len(self.environment.info), None
        rows, recreated = np.arange(self.size), None
        if is_new:
            lost[0], recreated = True, Recreated(last_observation, self.first_observation, info)
        while len(rows):
            part = self.pool.segment(program, num_steps, inputs, rows, recreated, self.environment.timeout)
            merged = _merge(merged, part, rows)
            rows = np.sort(np.concatenate([x.rows for x in part.steps.failures] or [np.zeros(0, np.int64)]))
            for failure in part.steps.failures:
                self._count_failure(failure.rows, failure.reason, len(failure.rows))
            if len(rows):
                recreated = Recreated(last_observation[rows], self._reset(rows, seeds[rows]), info)
                lost[0, rows] = True
        assert merged is not None
        self.steps += num_steps
        steps = merged.steps._replace(
            truncated=merged.steps.truncated & ~merged.steps.terminated, failures=()
        )
        return merged.extras, steps, lost

    def results(self, step: tuple[Transition, np.ndarray] | None = None) -> Any:
        """The ticket `[B]` and the arrays of a step."""
        ticket = np.full(self.size, self.number, np.int32), np.full(self.size, self.steps, np.int32)
        return ticket if step is None else (*ticket, step[0][:6], step[1])

    def segment_results(self, extras: Any, steps: Transition, lost: np.ndarray) -> tuple[Any, ...]:
        """The arrays of a segment, with the ticket after each step `[T, B]`."""
        number, last = self.results()
        counts = last[None] + np.arange(1 - len(lost), 1, dtype=np.int32)[:, None]
        return (*extras, np.broadcast_to(number, lost.shape), counts, *steps.arrays, lost)

    def close(self) -> None:
        """Ends the pool."""
        self._send_recv.close()
        self.pool.close()

    def _with_replacements(self, transition: Transition, seeds: np.ndarray) -> tuple[Transition, np.ndarray]:
        lost = np.zeros(self.size, np.bool_)
        for rows, reason in transition.failures:
            self._replace(transition, rows, reason, seeds)
            lost[rows] = True
        # A terminal state needs no bootstrap, even at the time limit: termination takes precedence.
        return transition._replace(truncated=transition.truncated & ~transition.terminated, failures=()), lost

    def _replace(self, transition: Transition, rows: np.ndarray, reason: str, seeds: np.ndarray) -> None:
        """Recreates lost instances; their step becomes a truncation with reward 0."""
        self._count_failure(rows, reason, len(rows))
        transition.observation[rows] = self._reset(rows, seeds[rows])
        # The program replaces these final observations by the last ones before the loss.
        transition.final_observation[rows] = transition.observation[rows]
        transition.reward[rows], transition.terminated[rows], transition.truncated[rows] = 0, False, True
        for metric in transition.info:
            metric[rows] = np.nan

    def _reset(self, rows: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Creates and resets instances; a worker that dies meanwhile counts as a failure, and is replaced."""
        while True:
            try:
                return self.pool.reset(rows, seeds, _START_TIMEOUT)
            except DiedAtStartError as error:
                self._count_failure(rows, f"at its start, {error}", 0)

    def _count_failure(self, rows: np.ndarray, reason: str, episodes: int) -> None:
        """Counts a failure and the running episodes that it ended; raises after too many failures."""
        limit, name = self.environment.restarts, self.environment.name
        if self.num_restarts >= limit:
            fix = f"all {limit} restarts are used up" if limit else "restarts=N of envs.make would survive it"
            hint = "" if gymnasium_worker.is_wrong_answer(reason) and not limit else f" ({fix})"
            raise HostError(f"environment '{name}': {reason}{hint}")
        self.num_restarts += 1
        global _losses
        _losses = Losses(_losses.failures + 1, _losses.episodes + episodes)
        _log.warning(
            "environment '%s': %s; %d of its %d instances start anew (restart %d of %d)",
            name, reason, len(rows), self.size, self.num_restarts, limit,
        )  # fmt: skip


def _merge(merged: Segment | None, part: Segment, rows: np.ndarray) -> Segment | None:
    """Writes the rows of `part` into `merged`, unless `part` lost them all; the first `part` is `merged`."""
    if not part.steps.reward.size:
        return merged
    if merged is None:
        return part
    for x, y in zip(merged.arrays, part.arrays, strict=True):
        x[:, rows] = y
    return merged


def _seeds_and_actions(environment: Any, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Copies of the seeds and actions of a step."""
    space, packed = environment.action_space, packed[:, 2:].copy()
    return packed[:, 0], packed[:, 1:].copy().view(space.dtype).reshape(-1, *space.shape)


class _Pools:
    """The pools of this process by number. Beyond `_MAX_POOLS`, the least recently used pool is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_number: collections.OrderedDict[int, _RunningPool] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._by_number)

    def reset(self, environment: Any, parts: int, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Starts a pool; returns its number `[B]` and the first observations."""
        running = self._start(environment, seeds, parts)
        return running.results()[0], running.first_observation

    def step(
        self, environment: Any, parts: int, packed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, tuple, np.ndarray]:
        """Steps the pool of a ticket, or a new pool if it is gone.

        A row of `packed [B, ...]` int32 has the ticket (number of the pool, steps so far), a seed, and the
        bits of the action. Returns the two arrays of the new ticket, `[B]` each; the arrays of the
        `Transition`; and the mask `[B]` of instances that were lost and restarted.
        """
        with self._locked_pool(environment, packed[0, 0], packed[0, 1], len(packed)) as running:
            if running is not None:
                return running.results(running.step(*_seeds_and_actions(environment, packed)))
        running = self._start_again(environment, packed[:, 2], parts)
        return running.results(running.first_step())

    def send(self, environment: Any, parts: int, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Starts a step of the ticket's pool; returns the ticket for `recv`."""
        with self._locked_pool(environment, packed[0, 0], packed[0, 1], len(packed)) as running:
            if running is not None:
                running.send(*_seeds_and_actions(environment, packed))
                return running.results()
        running = self._start_again(environment, packed[:, 2], parts)
        running.sent, running.is_new = packed[:, 2].copy(), True
        return running.results()

    def recv(
        self, environment: Any, parts: int, packed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, tuple, np.ndarray]:
        """Waits for the step that `send` started; `packed` has pool and steps.

        Raises:
          HostError: the ticket has no running step.
        """
        number, steps = packed[0]
        with self._locked_pool(environment, number, steps, len(packed), sent=True) as running:
            if running is not None:
                return running.results(running.recv())
        raise HostError(
            f"environment '{environment.name}': recv of step {steps}, which was not sent or was already"
            " received: call recv once per send, and send the state that recv returned"
        )

    def ready(self, environment: Any, parts: int, packed: np.ndarray) -> np.ndarray:
        """Waits for one of several pools; `packed` has pool, steps, and whether the pool is a candidate.

        Of several ready pools, returns the one with the fewest steps, then the first. After the environment's
        timeout, returns a pool that is not ready, whose `recv` then raises.
        """
        waiting = np.flatnonzero(packed[:, 2])
        fewest = waiting[np.argsort(packed[waiting, 1], kind="stable")]
        pools = [(i, self._find(int(packed[i, 0]))) for i in fewest]
        end = time.monotonic() + environment.timeout
        while time.monotonic() < end:
            for i, running in pools:
                if running is None or running.ready():
                    return np.array(i, np.int32)
            time.sleep(_POLL_SECONDS)
        return np.array(fewest[0], np.int32)

    def segment(
        self,
        environment: Any,
        actor: tuple[Any, int, int],
        packed: np.ndarray,
        last_observation: np.ndarray,
        *inputs: np.ndarray,
    ) -> tuple[Any, ...]:
        """T steps of a ticket's pool for which workers act: the actor's results, and steps as from `step`.

        `actor` is the program, T, and the number of fixed `inputs`, which come first; `packed` is `[B, 3]`:
        pool, steps and seed.
        """
        (program, num_steps, num_fixed), seeds = actor, packed[:, 2].copy()
        arguments = (
            program,
            num_steps,
            ActorInputs(list(inputs[:num_fixed]), list(inputs[num_fixed:])),
            seeds,
            last_observation,
        )
        with self._locked_pool(environment, packed[0, 0], packed[0, 1], len(packed)) as running:
            if running is not None:
                return running.segment_results(*running.segment(*arguments, False))
        running = self._start_again(environment, seeds, 1)
        return running.segment_results(*running.segment(*arguments, True))

    def close(self) -> None:
        """Ends all pools."""
        with self._lock:
            pools, self._by_number = list(self._by_number.values()), collections.OrderedDict()
        for running in pools:
            running.close()

    @contextlib.contextmanager
    def _locked_pool(
        self, environment: Any, number: int, steps: int, size: int, sent: bool = False
    ) -> Iterator[_RunningPool | None]:
        """A context with the locked pool of a ticket, closed if the body raises; None if no pool matches.

        `sent`: True if a step must be running.
        """
        running = self._find(int(number))
        if running is None:
            yield None
            return
        with running.lock:
            is_same = running.environment is environment or running.environment == environment
            if not is_same or (running.size, running.steps, running.sent is not None) != (size, steps, sent):
                yield None
                return
            try:
                yield running
            except BaseException:
                with self._lock:
                    self._by_number.pop(running.number, None)
                running.close()
                raise

    def _start_again(self, environment: Any, seeds: np.ndarray, parts: int) -> _RunningPool:
        _log.warning(
            "environment '%s': the instances that this state was made with are gone (no checkpoint holds"
            " them): %d new episodes start here", environment.name, len(seeds),
        )  # fmt: skip
        return self._start(environment, seeds, parts)

    def _find(self, number: int) -> _RunningPool | None:
        with self._lock:
            if number in self._by_number:
                self._by_number.move_to_end(number)
            return self._by_number.get(number)

    def _start(self, environment: Any, seeds: np.ndarray, parts: int) -> _RunningPool:
        """Starts a pool, and closes the least recently used ones of its environment and size."""
        running = _RunningPool(environment, seeds, parts)
        with self._lock:
            self._by_number[running.number] = running
            same_kind = [
                n for n, r in self._by_number.items() if (r.environment, r.size) == (environment, len(seeds))
            ]
            max_pools = _MAX_POOLS * max(self._by_number[n].parts for n in same_kind)
            excess = [self._by_number.pop(n) for n in same_kind[:-max_pools]]
        for old in excess:
            with old.lock:
                old.close()
        return running


POOLS = _Pools()


@atexit.register
def close() -> None:
    """Ends all pools of this process. The next step of a state whose pool ended starts new episodes."""
    POOLS.close()


def running() -> int:
    """The number of pools in this process."""
    return len(POOLS)
