"""Gymnasium's environments (github.com/Farama-Foundation/Gymnasium), in worker processes.

`envs.make("gymnasium:HalfCheetah-v5")`, and every other name in `gymnasium.make`; also
`gymnasium:my_package:Mine-v0`, which imports `my_package` first, and `my_package:Mine`, a class or factory
function, registered or not. Each worker steps an equal share of the instances, with Gymnasium's same-step
auto-reset. `gymnasium_spaces` converts observations and actions; `gymnasium_parts` converts observations with
parts (Gymnasium's `Dict` and `Tuple`).

The workers replace `gymnasium.vector.AsyncVectorEnv`. There, a worker that dies or hangs cannot be replaced,
and the other workers' results of that step are lost; workers are forks of this process, of which JAX warns;
and each instance has its own process, whatever the number of cores.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import multiprocessing
import os
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from envs import gymnasium_frames, gymnasium_parts, gymnasium_spaces, numpy_actors, satellites
from envs.adapters import check_count
from envs.environment import named_info
from envs.gymnasium_worker import make_instance
from envs.host import HostEnvironment, make_from
from envs.pools import ActorInputs, DiedAtStartError, Failure, InTwoHalves, Recreated, Segment, Transition
from envs.rendering import Episode
from fdg.arguments import check_options
from fdg.errors import FdgError, HostError, nearest, raised

PREFIX = "gymnasium:"

_WORKER = Path(__file__).with_name("worker_process.py")


def make(name: str, **overrides: Any) -> HostEnvironment:
    """Gymnasium's environment `name`.

    Args:
      name: an argument of `gymnasium.make`, or `module:NAME` of a class or a factory function.
      **overrides: further arguments of `gymnasium.make` (`max_episode_steps=200`, and the environment's own);
      `timeout` and `restarts` of `HostEnvironment`; `workers`, the number of processes (None: one per core);
      `acts`, whether they also act (`GymnasiumSource.acts`); `info`, names of episode metrics in the info of
      the last step.

    Raises:
      FdgError: Gymnasium is not installed, or cannot make the environment; gives the reason.
    """
    workers, acts = overrides.pop("workers", None), overrides.pop("acts", False)
    check_options(f"environment '{PREFIX}{name}'", GymnasiumSource, {"workers": workers, "acts": acts})
    check_count(f"environment '{PREFIX}{name}'", "workers", 1 if workers is None else workers)
    info = named_info(overrides.pop("info", ()))
    env = make_from(lambda options: GymnasiumSource(PREFIX + name, options, workers, info, acts), overrides)
    _facts(env.name, env.source.options)  # raises if Gymnasium cannot make it
    return env


@dataclasses.dataclass(frozen=True)
class GymnasiumSource(gymnasium_parts.LibrarySource):
    """A `pools.Source`: a name in Gymnasium, and further arguments of `gymnasium.make`."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    workers: int | None = None
    info: tuple[str, ...] = ()
    acts: bool = False  # the workers also act, for whole segments (`envs.numpy_actors`)

    trace_actor: ClassVar[Any] = staticmethod(numpy_actors.trace)

    @property
    def facts(self) -> gymnasium_parts.Facts:
        """The specification of one instance, made in this process."""
        return _facts(self.name, self.options)

    def record(
        self, act: Callable[[Any, int], Any], episodes: int, max_steps: int, seed: int
    ) -> list[Episode]:
        """Plays episodes in this process and renders them; see `gymnasium_frames.record`."""
        name = self.name.removeprefix(PREFIX)
        return gymnasium_frames.record(name, dict(self.options), act, episodes, max_steps, seed)

    def with_cores(self, cores: int) -> "GymnasiumSource":
        """The same source with at most this many processes, unless `workers` is given."""
        return dataclasses.replace(self, workers=self.workers or cores)

    def rows_by_worker(self, size: int) -> list[np.ndarray]:
        """The instances of each worker, for a pool of `size`."""
        return np.array_split(np.arange(size), min(size, self.workers or os.cpu_count() or 1))

    def shares(self, size: int) -> list[int]:
        """The number of instances of each worker, for a pool of `size`."""
        return list(map(len, self.rows_by_worker(size)))

    def start(self, size: int) -> "WorkerPool":
        """A pool of `size` instances."""
        return WorkerPool(self, size)


class WorkerPool(InTwoHalves):
    """A `pools.Pool` of worker processes. Each steps some instances; a restart makes new instances."""

    def __init__(self, source: GymnasiumSource, size: int):
        self._source, self._size = source, size
        self._action_space = source.facts.library_action_space
        self._rows_by_worker = source.rows_by_worker(size)
        self._workers: dict[int, _Worker] = {}
        self._pending: dict[Any, int] = {}  # indices of the workers in the running step, by connection
        self._seconds_left = 0.0  # of the timeout, after the last requests were sent

    @np.errstate(over="ignore")  # a number beyond float32 becomes infinite, which the check of losses reports
    def reset(self, rows: np.ndarray, seeds: np.ndarray, timeout: float) -> np.ndarray:
        """Restarts the workers of the instances `rows`."""
        restarted = [
            i for i, worker_rows in enumerate(self._rows_by_worker) if np.isin(worker_rows, rows).any()
        ]
        for i in restarted:
            if i in self._workers:
                self._workers[i].kill()
            self._workers[i] = _Worker()
        name, options = self._source.name.removeprefix(PREFIX), dict(self._source.options)
        requests = {
            i: ("reset", (name, options, seeds[np.isin(rows, self._rows_by_worker[i])].tolist()))
            for i in restarted
        }
        replies = self._replies(self._send_requests(requests, timeout), timeout)
        for i, (ok, reply) in replies.items():
            if not ok and self._workers[i].process.poll() is not None:
                raise DiedAtStartError(reply)
            if not ok:
                raise HostError(f"environment '{self._source.name}': at its start, {reply}")
        return np.concatenate([self._source.encode(reply) for _, reply in replies.values()])

    def send(self, action: np.ndarray, timeout: float) -> None:
        """Makes every worker start a step."""
        actions = gymnasium_spaces.decode(self._action_space, action)
        requests = {
            i: ("step", ([gymnasium_spaces.select(actions, row) for row in worker_rows], self._source.info))
            for i, worker_rows in enumerate(self._rows_by_worker)
        }
        self._pending = self._send_requests(requests, timeout)

    def ready(self) -> bool:
        """True if all workers have replied."""
        return len(wait(list(self._pending), 0)) == len(self._pending)

    @np.errstate(over="ignore")  # see reset
    def recv(self, timeout: float) -> Transition:
        """The result of the running step; `failures`: workers that failed or took over `timeout` seconds."""
        transition = Transition.empty(self._size, self._source.wire_space, len(self._source.info))
        failures = []
        for i, (ok, reply) in self._replies(self._pending, timeout).items():
            rows = self._rows_by_worker[i]
            if not ok:
                failures.append(Failure(rows, reply))
                continue
            observation, final, (reward, terminated, truncated, *info) = reply
            for metric, values in zip(transition.info, info, strict=True):
                metric[rows] = values
            transition.observation[rows] = encoded = self._source.encode(observation)
            transition.final_observation[rows] = encoded if final is None else self._source.encode(final)
            transition.reward[rows] = reward
            transition.terminated[rows], transition.truncated[rows] = terminated, truncated
        return transition._replace(failures=failures)

    def segment(
        self,
        program: satellites.Program,
        num_steps: int,
        inputs: ActorInputs[np.ndarray],
        rows: np.ndarray,
        recreated: Recreated | None,
        timeout: float,
    ) -> Segment:
        """Steps of some rows, for which their workers act; see `pools.Pool`."""
        requests, fixed = {}, pickle.dumps(inputs.fixed)
        recreated_by_worker: dict[int, Recreated] = {}
        for i, worker_rows in enumerate(self._rows_by_worker):
            if worker_rows[0] not in rows:
                continue
            last_rows = None
            if recreated is not None:
                recreated_by_worker[i] = recreated.select(np.searchsorted(rows, worker_rows))
                last_rows = recreated_by_worker[i].last_observation
            has_program, self._workers[i].program = self._workers[i].program == program, program
            new_program = None if has_program else program.serialized[len(worker_rows)]
            per_step = [values[:, worker_rows] for values in inputs.per_step]
            arguments = new_program, num_steps, fixed, per_step, last_rows, self._source.info
            requests[i] = "segment", arguments
        sent = self._send_requests(requests, timeout * num_steps)
        parts: list[Segment | None] = []
        failures = []
        for i, (ok, reply) in self._replies(sent, timeout * num_steps).items():
            parts.append(_worker_segment(reply, recreated_by_worker.get(i)) if ok else None)
            if not ok:
                failures.append(Failure(self._rows_by_worker[i], reply))
        return Segment.concatenate(parts, [len(self._rows_by_worker[i]) for i in requests], failures)

    def close(self) -> None:
        """Kills the workers."""
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()

    def _send_requests(self, requests: dict[int, Any], timeout: float) -> dict[Any, int]:
        """Sends each worker its request; returns the workers' indices by connection."""
        end = time.monotonic() + timeout
        waiting: dict[Any, int] = {}
        for i, request in requests.items():
            worker = self._workers[i]
            with contextlib.suppress(OSError):  # the reply will report it
                worker.limit_waits(end)
                worker.connection.send(request)
            waiting[worker.connection] = i
        self._seconds_left = end - time.monotonic()
        return waiting

    def _replies(self, workers: dict[Any, int], timeout: float) -> dict[int, tuple[bool, Any]]:
        """Waits for workers (indices by connection); `(ok, result or reason)` by index, in their order.

        Sending the requests is part of the `timeout`.
        """
        end = time.monotonic() + self._seconds_left
        replies: dict[int, tuple[bool, Any]] = {}
        for i in workers.values():
            worker = self._workers[i]
            subject = f"worker {i} (process {worker.process.pid})"
            try:
                worker.limit_waits(end)
                ok, reply = worker.connection.recv()
                replies[i] = ok, reply if ok else f"{subject}: {reply}"
            except BlockingIOError:
                replies[i] = False, f"{subject} was not done in {timeout:g} s"
            except (EOFError, OSError):  # OSError: it ended while it sent its reply
                replies[i] = False, f"{subject} {worker.how_it_ended()}"
        return replies


@np.errstate(over="ignore")  # see WorkerPool.reset
def _worker_segment(reply: Any, recreated: Recreated | None) -> Segment:
    """The segment of a worker from its reply; `recreated`: its instances, if they have just started."""
    extras, observation, finals, numbers = reply
    reward, *info = numbers[[0, *range(3, len(numbers))]].astype(np.float32)
    terminated, truncated = numbers[1:3].astype(np.bool_)
    final_observation = observation.copy()
    for t, encoded in finals.items():
        final_observation[t] = encoded
    steps = Transition(observation, reward, terminated, truncated, final_observation, tuple(info))
    if recreated is not None:
        for array, first in zip(steps.arrays, recreated.step().arrays, strict=True):
            array[0] = first
    return Segment(extras, steps)


class _Worker:
    """A process that runs `gymnasium_worker`.

    Its standard error is shown only if it dies, since all workers may print the same.
    """

    def __init__(self) -> None:
        self.connection, worker_end = multiprocessing.Pipe()
        self.program: satellites.Program | None = None  # the actor that the process has
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 it lives as long as the process
        path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), str(worker_end.fileno())],  # -P: no imports from its folder
            pass_fds=[worker_end.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": path},
        )
        worker_end.close()
        self._limit: int | None = None  # tenths of a second that a send or receive may wait

    def limit_waits(self, end: float) -> None:
        """Makes a send or receive that waits raise a `BlockingIOError` at the time `end`, to 0.1 s."""
        tenths = max(1, math.ceil(10 * (end - time.monotonic())))
        if tenths != self._limit:
            self._limit = tenths
            # A send that cannot go on waits twice: it returns once with the number of bytes that it has sent.
            limits = {socket.SO_RCVTIMEO: tenths, socket.SO_SNDTIMEO: max(1, tenths // 2)}
            with socket.socket(fileno=os.dup(self.connection.fileno())) as connection:
                for option, wait in limits.items():
                    limit = struct.pack("ll", wait // 10, wait % 10 * 100_000)
                    connection.setsockopt(socket.SOL_SOCKET, option, limit)

    def how_it_ended(self) -> str:
        """How the process ended, and the last line that it printed."""
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
        return f"{how}, saying: {last}" if last else how

    def kill(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self._stderr.close()


# The extra of fdg that installs each extra of Gymnasium.
_EXTRAS = {"gymnasium[box2d]": "box2d", "gymnasium[mujoco]": "gymnasium"}


def all_names() -> tuple[str, ...]:
    """All names registered with Gymnasium; empty if it is not installed."""
    if importlib.util.find_spec("gymnasium") is None:
        return ()
    import gymnasium

    return tuple(gymnasium.registry)


@functools.cache
def _facts(name: str, options: tuple[tuple[str, Any], ...]) -> gymnasium_parts.Facts:
    """The spaces and the time limit of one instance, which is made and closed here."""
    if importlib.util.find_spec("gymnasium") is None:
        raise FdgError(f"'{PREFIX}...' needs Gymnasium, which is not installed: pip install 'fdg[gymnasium]'")
    import gymnasium

    check_options(f"environment '{name}'", gymnasium.make, dict(options))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # SWIG's types (Box2D) warn when made
            env = make_instance(name.removeprefix(PREFIX), **dict(options))
    except Exception as error:  # the environment's constructor may raise anything
        is_missing = isinstance(error, gymnasium.error.DependencyNotInstalled)
        if is_missing and (extras := [ours for theirs, ours in _EXTRAS.items() if theirs in str(error)]):
            raise FdgError(
                f"'{name}' needs packages that are not installed: pip install 'fdg[{extras[0]}]'"
            ) from error
        with_options = f" with {', '.join(f'{k}={v!r}' for k, v in options)}" if options else ""
        plain_name = name.removeprefix(PREFIX)
        is_unregistered = isinstance(error, gymnasium.error.UnregisteredEnv) and ":" not in plain_name
        hint = "".join(f"write {PREFIX}{one}; " for one in nearest(plain_name, gymnasium.registry, count=1))
        fix = (
            f": {hint}if a module registers it, write {PREFIX}MODULE:{plain_name}" if is_unregistered else ""
        )
        raise FdgError(f"environment '{name}'{with_options} cannot be made: {raised(error)}{fix}") from error
    try:
        check_options(f"environment '{name}'", type(env.unwrapped), dict(options))
        limit = getattr(env.spec, "max_episode_steps", None)
        return gymnasium_parts.facts(name, env.observation_space, env.action_space, limit)
    finally:
        env.close()
