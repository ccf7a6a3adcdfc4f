"""Fleets: host environments in workers on a Ray cluster (docs.ray.io).

`envs.make("ray:envpool:HalfCheetah-v4", workers=8)`, for every name that makes a `HostEnvironment`. Each
worker is a Ray actor with an equal share of the instances, and Ray distributes the workers over the hosts.
Seeds belong to instances, so results are those of the same environment without a fleet, for any number of
workers.

If a worker dies, hangs or raises, only the running episodes of its instances are lost: they are truncated,
and the worker is restarted, or its share moves to another worker if no host has room.
"""

import dataclasses
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from envs import satellites
from envs.adapters import check_count
from envs.environment import Forwarding
from envs.host import HostEnvironment
from envs.pools import Failure, FreshRows, Pool, Segment, Source, Transition, wire_space
from envs.spaces import Space
from fdg import ray_cluster
from fdg.arguments import check_options
from fdg.errors import FdgError, HostError, one_line, raised

PREFIX = "ray:"
RESTARTS = 100  # failures that a fleet survives, by default

_START_SECONDS = 300.0  # limit for all workers of a fleet to start; each imports this package
_ROOM_SECONDS = 20.0  # time in which Ray must have room for a restarted worker
_COMPILE_SECONDS = 60.0  # additional time for a segment: a worker compiles its first one
_GRACE_SECONDS = 10.0  # time for a worker's answer beyond the limit of the step


Key = tuple[int, int]  # a share's (number of its pool, index in the pool)


def make(name: str, make_one: Callable[..., Any], **overrides: Any) -> HostEnvironment:
    """A fleet of the environment `name`.

    Args:
      name: the name of a host environment for `envs.make`.
      make_one: makes that environment.
      **overrides: `workers` (None: the cluster's free CPUs); `cpus` of each (1); `timeout` and `restarts`
      (100) of `HostEnvironment`; the environment's own.

    Raises:
      FdgError: Ray is not installed, the environment is not a host environment, or a number is out of range.
    """
    ray_cluster.module()
    workers, cpus = overrides.pop("workers", None), overrides.pop("cpus", 1)
    acts = overrides.pop("acts", False)
    fields = {
        "restarts": RESTARTS,
        **{k: overrides.pop(k) for k in HostEnvironment.FIELDS & overrides.keys()},
    }
    check_options(
        f"environment '{PREFIX}{name}'", FleetSource, {"workers": workers, "cpus": cpus, "acts": acts}
    )
    check_count(f"environment '{PREFIX}{name}'", "workers", 1 if workers is None else workers)
    if acts and workers is None:
        raise FdgError(
            f"environment '{PREFIX}{name}': acts=True needs the number of workers, for whose shares programs"
            " are compiled: give workers=8 (--env-workers 8)"
        )
    if not 0 < cpus < float("inf"):
        raise FdgError(f"environment '{PREFIX}{name}': cpus={cpus!r} must be above 0")
    inner = make_one(name, **overrides)
    if not isinstance(inner, HostEnvironment):
        raise FdgError(
            f"environment '{PREFIX}{name}': '{name}' is compiled into the program and needs no workers: leave"
            f" out {PREFIX}, or name a host environment, such as {PREFIX}gymnasium:CartPole-v1"
        )
    if isinstance(inner.source, FleetSource):
        raise FdgError(f"environment '{PREFIX}{name}': write the prefix {PREFIX} once")
    return HostEnvironment(FleetSource(inner.source, workers, float(cpus), acts), **fields)


@dataclasses.dataclass(frozen=True)
class FleetSource(Forwarding):
    """A `pools.Source` whose instances are divided among workers."""

    _inside: ClassVar[str] = "source"

    source: Any  # a Source
    workers: int | None = None
    cpus: float = 1.0
    acts: bool = False  # the workers also act, for whole segments (`envs.satellites`)

    def shares(self, size: int) -> list[int]:
        """The number of instances of each worker, for a pool of `size`."""
        return [len(share) for share in np.array_split(np.arange(size), min(size, self.workers or 1))]

    @property
    def name(self) -> str:
        """The name for `envs.make`."""
        return PREFIX + self.source.name

    @property
    def wire_space(self) -> Space:
        """The space of one row of a pool's array; see `pools.wire_space`."""
        return wire_space(self.source)

    @property
    def unpacked(self) -> Any:
        """Restores observations from rows; None if an observation is one array."""
        return getattr(self.source, "unpacked", None)

    @property
    def info(self) -> tuple[str, ...]:
        """Names of episode metrics."""
        return getattr(self.source, "info", ())

    @property
    def native(self) -> Any:
        """The library's observations and actions; None if its spaces are those of `envs`."""
        return getattr(self.source, "native", None)

    @property
    def record(self) -> Any:
        """Plays episodes in this process, if the source can; else None."""
        return getattr(self.source, "record", None)

    def start(self, size: int) -> "FleetPool":
        """A pool of `size` instances; pools of one source share this process's workers."""
        return FleetPool(self, size, fleet(self))


class Worker:
    """A Ray actor with pools of shares of instances."""

    def __init__(self, environment: Mapping[str, str]):
        os.environ.update(environment)
        self._pools: dict[Key, Pool] = {}
        self._observations: dict[Key, np.ndarray] = {}  # the last observations of each share

    def where(self) -> str:
        """Host and process, for error messages."""
        return f"host {socket.gethostname()}, process {os.getpid()}"

    def reset(
        self, key: Key, start: tuple[Source, int] | None, rows: np.ndarray, seeds: np.ndarray, timeout: float
    ) -> np.ndarray:
        """Recreates all instances in a new pool, or some of an existing one."""
        if start is not None:
            self.close(key)
            source, size = start
            self._pools[key] = source.start(size)
        observation = self._pools[key].reset(rows, seeds, timeout)
        self._observations[key] = observation if start is not None else self._observations[key].copy()
        self._observations[key][rows] = observation
        return observation

    def step(self, key: Key, action: np.ndarray, timeout: float) -> Transition | None:
        """Steps a pool; None if this worker does not have it, as it replaced one that died."""
        pool = self._pools.get(key)
        if pool is None:
            return None
        transition = pool.step(action, timeout)
        self._observations[key] = transition.observation
        return transition

    def segment(
        self,
        key: Key,
        program: Any,
        operands: Any,
        keys: np.ndarray,
        fresh_rows: FreshRows | None,
        timeout: float,
    ) -> Segment | None:
        """Acts and steps once for each key; None if this worker does not have the pool."""
        pool = self._pools.get(key)
        if pool is None:
            return None
        segment, self._observations[key] = satellites.run_segment(
            program, pool, self._observations[key], operands, keys, fresh_rows, timeout
        )
        return segment

    def close(self, key: Key) -> None:
        """Closes a pool."""
        self._observations.pop(key, None)
        if (pool := self._pools.pop(key, None)) is not None:
            pool.close()


class Fleet:
    """The workers of a source in this process, shared by its pools.

    Raises:
      HostError: the cluster has no room for the workers.
    """

    def __init__(self, source: FleetSource):
        self._source, self._lock = source, threading.Lock()
        name, num_workers = f"environment '{source.name}'", source.workers or 0
        try:
            local_cpus = max(os.cpu_count() or 1, int(num_workers * source.cpus + 1))
            self._ray = ray = ray_cluster.connect(local_cpus=local_cpus)
        except FdgError as error:
            raise HostError(f"{name}: {error}") from error
        total = ray.cluster_resources().get("CPU", 0)
        free = ray.available_resources().get("CPU", 0)
        count = source.workers or max(1, int(free / source.cpus))
        if count * source.cpus > total:
            max_workers = max(1, int(free / source.cpus))
            raise HostError(
                f"{name}: {count} workers of {source.cpus:g} CPUs: the Ray cluster has {total:g} CPUs,"
                f" {free:g} of them free: use --env-workers {max_workers}, or ?cpus={total / count:.2g}"
            )
        self._workers = [self._start_worker() for _ in range(count)]
        self._locations: dict[Any, str] = {}
        requests = {worker.where.remote(): worker for worker in self._workers}
        started, missing = ray.wait(list(requests), num_returns=count, timeout=_START_SECONDS)
        if missing:
            for worker in self._workers:
                ray.kill(worker)
            raise HostError(
                f"{name}: {len(missing)} of {count} workers have not started in {_START_SECONDS:g} s: the Ray"
                f" cluster has {total:g} CPUs, {free:g} of them free: use --env-workers"
                f" {max(1, len(started))}"
            )
        self._locations = {
            requests[ref]: location for ref, location in zip(started, ray.get(started), strict=True)
        }

    def __len__(self) -> int:
        return len(self._workers)

    def worker(self, i: int) -> Any:
        """The actor of worker `i`; changes after `replace`."""
        return self._workers[i]

    def where(self, i: int) -> str:
        """Worker `i` with its host, for error messages."""
        return f"worker {i} ({self._locations.get(self._workers[i], 'its host')})"

    def replace(self, i: int, dead: Any) -> None:
        """Replaces a dead or hanging actor, once.

        A new actor starts where a host has room; otherwise another worker takes over the share.
        """
        with self._lock:
            if self._workers[i] is not dead:
                return
            self._ray.kill(dead)
            deadline = time.monotonic() + _ROOM_SECONDS
            others = [worker for worker in self._workers if worker is not dead]
            # Its CPU becomes free shortly after it ended, but never if its host is gone.
            while others and self._free_cpus() < self._source.cpus and time.monotonic() < deadline:
                time.sleep(0.2)
            if others and self._free_cpus() < self._source.cpus:
                self._workers[i] = others[i % len(others)]
                return
            worker = self._start_worker()
            self._workers = [worker if actor is dead else actor for actor in self._workers]
        try:
            self._locations[worker] = self._ray.get(worker.where.remote(), timeout=_START_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise HostError(
                f"environment '{self._source.name}': worker {i} cannot be restarted: {one_line(error)}"
            ) from error

    def _free_cpus(self) -> float:
        return self._ray.available_resources().get("CPU", 0)

    def _start_worker(self) -> Any:
        return (
            self._ray.remote(Worker)
            .options(num_cpus=self._source.cpus, max_restarts=0, scheduling_strategy="SPREAD")
            .remote(ray_cluster.inherited_variables(os.environ))
        )


class FleetPool:
    """A `pools.Pool` whose instances are in a fleet's workers."""

    def __init__(self, source: FleetSource, size: int, fleet: Fleet):
        self._size, self._fleet, self._number = size, fleet, next(_numbers)
        cores = max(1, int(source.cpus))
        with_cores = getattr(source.source, "within", None)
        self._source: Source = source.source if with_cores is None else with_cores(cores)
        self._name, self._space, self._info = source.name, source.wire_space, len(source.info)
        self._shares = np.array_split(np.arange(size), min(size, len(fleet)))
        self._actors: list[Any] = [None] * len(self._shares)  # the actor of each share
        self._pending: list[tuple[int, Any]] = []  # a step's (share, future result)
        self._programs: dict[Any, Any] = {}  # program -> its reference in Ray's object store
        import ray

        self._ray = ray

    def reset(self, rows: np.ndarray, seeds: np.ndarray, timeout: float) -> np.ndarray:
        """Recreates instances; all of a share if its worker is new."""
        requests = []
        for i, share in enumerate(self._shares):
            is_reset = np.isin(share, rows)
            if not is_reset.any():
                continue
            start = (self._source, len(share)) if is_reset.all() else None
            if start is not None:
                self._actors[i] = self._fleet.worker(i)
            share_seeds = seeds[np.isin(rows, share)]
            actor = self._actors[i]
            requests.append(
                (i, actor.reset.remote(self._key(i), start, np.flatnonzero(is_reset), share_seeds, timeout))
            )
        observations = []
        for observation, reason in self._receive_answers(requests, timeout):
            if observation is None:
                raise HostError(f"environment '{self._name}': failed to start: {reason}")
            observations.append(observation)
        return np.concatenate(observations)

    def step(self, action: np.ndarray, timeout: float) -> Transition:
        """Steps all shares at once."""
        self.send(action, timeout)
        return self.recv(timeout)

    def send(self, action: np.ndarray, timeout: float) -> None:
        """Makes all shares start a step."""
        self._pending = [
            (i, self._actors[i].step.remote(self._key(i), action[share], timeout))
            for i, share in enumerate(self._shares)
        ]

    def ready(self) -> bool:
        """True if all shares have stepped."""
        references = [ref for _, ref in self._pending]
        return len(self._ray.wait(references, num_returns=len(references), timeout=0)[0]) == len(references)

    def recv(self, timeout: float) -> Transition:
        """Waits for the running step and returns its result."""
        transition = Transition.empty(self._size, self._space, self._info)
        failures: list[Failure] = []
        for i, (part, reason) in enumerate(self._receive_answers(self._pending, timeout)):
            share = self._shares[i]
            if part is None:
                failures.append(Failure(share, reason or f"{self._fleet.where(i)} is new"))
                continue
            for array, values in zip(
                [*transition[:5], *transition.info], [*part[:5], *part.info], strict=True
            ):
                array[share] = values
            failures += [
                Failure(share[failure.rows], f"{self._fleet.where(i)}: {failure.reason}")
                for failure in part.failures
            ]
        return transition._replace(failures=failures)

    def segment(
        self,
        program: Any,
        operands: Any,
        keys: np.ndarray,
        rows: np.ndarray,
        fresh_rows: FreshRows | None,
        timeout: float,
    ) -> Segment:
        """T steps of the shares of some rows; their workers also act.

        Args:
          program, operands: the actor. The program goes through Ray's object store once, operands once per
          segment. keys: `[T, B, k]`. rows: `[n]` in order, whole shares. fresh_rows: the rows that have just
          been reset; else None. timeout: seconds per step.
        """
        if program not in self._programs:
            self._programs[program] = self._ray.put(program)
        parameters, requests = self._ray.put(operands), []
        for i, share in enumerate(self._shares):
            if share[0] not in rows:
                continue
            share_rows = None if fresh_rows is None else fresh_rows.select_rows(np.searchsorted(rows, share))
            arguments = self._programs[program], parameters, keys[:, share], share_rows, timeout
            requests.append((i, self._actors[i].segment.remote(self._key(i), *arguments)))
        failures: list[Failure] = []
        parts: list[Segment | None] = []
        for (i, _), (part, reason) in zip(
            requests, self._receive_answers(requests, timeout * len(keys) + _COMPILE_SECONDS), strict=True
        ):
            parts.append(part)
            if part is None:
                failures.append(Failure(self._shares[i], reason or f"{self._fleet.where(i)} is new"))
        return Segment.concatenate(parts, [len(self._shares[i]) for i, _ in requests], failures)

    def close(self) -> None:
        """Closes the shares; the workers stay for other pools until the process ends."""
        if self._ray.is_initialized():
            for i, actor in enumerate(self._actors):
                if actor is not None:
                    actor.close.remote(self._key(i))

    def _key(self, i: int) -> Key:
        """A worker's key for a share; a worker may have two shares of a pool, after another has failed."""
        return self._number, i

    def _receive_answers(self, requests: Sequence[tuple[int, Any]], timeout: float) -> list[tuple[Any, str]]:
        """`(answer, "")` of each share's worker, or `(None, reason)`; replaces workers that failed."""
        deadline = time.monotonic() + timeout + _GRACE_SECONDS
        answers: list[tuple[Any, str]] = []
        for i, ref in requests:
            actor, label = self._actors[i], self._fleet.where(i)
            try:
                answers.append((self._ray.get(ref, timeout=max(0.1, deadline - time.monotonic())), ""))
                continue
            except self._ray.exceptions.GetTimeoutError:
                reason = f"{label} was not done in {timeout:g} s"
            except self._ray.exceptions.RayTaskError as error:  # it raised, but lives
                cause = error.cause if isinstance(error.cause, Exception) else error
                text = str(cause) if isinstance(cause, HostError) else raised(cause)
                answers.append((None, f"{label}: {text}"))
                continue
            except self._ray.exceptions.RayError:
                reason = f"{label} died"
            self._fleet.replace(i, actor)
            answers.append((None, reason))
        return answers


def fleet(source: FleetSource) -> Fleet:
    """The workers of a source in this process, started on the first call."""
    with _starting:
        if source not in _fleets:
            _fleets[source] = Fleet(source)
        return _fleets[source]


def forget() -> None:
    """Drops the handles of all workers, so that Ray ends them."""
    _fleets.clear()


_fleets: dict[FleetSource, Fleet] = {}
_starting = threading.Lock()
_numbers = itertools.count()
