"""Fleets: host environments in workers on a Ray cluster (docs.ray.io).

`envs.make("ray:envpool:HalfCheetah-v4", workers=8)`, for every name that makes a `HostEnvironment`. Each
worker is a Ray actor with an equal share of the instances, and Ray distributes the workers over the hosts.
Seeds belong to instances, so results are those of the same environment without a fleet, for any number of
workers.

If a worker dies, hangs or raises, only the running episodes of its instances are lost: they are truncated,
and the worker is restarted, or another worker takes over its share if no host has room.
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
from envs.host import HostEnvironment
from envs.pools import (
    ActorInputs,
    Failure,
    InTwoHalves,
    Pool,
    Recreated,
    Segment,
    Source,
    Transition,
    wire_space,
)
from fdg import ray_cluster
from fdg.arguments import check_options
from fdg.errors import FdgError, HostError, one_line, raised

PREFIX = "ray:"
RESTARTS = 100  # failures that a fleet survives, by default

_START_SECONDS = 300.0  # until all workers of a fleet have started; each imports this package
_ROOM_SECONDS = 20.0  # wait for free CPUs before another worker takes over a share
_COMPILE_SECONDS = 60.0  # additional time for a worker's first segment
_LATE_SECONDS = 10.0  # additional time, beyond its own limit, for a worker's answer
_REPLACED = "has replaced the worker that had these instances"


ShareKey = tuple[int, int]  # (number of the pool, index of the share in the pool)


def make(name: str, make_one: Callable[..., Any], **overrides: Any) -> HostEnvironment:
    """A fleet of the environment `name`.

    Args:
      name: the name of a host environment for `envs.make`.
      make_one: makes that environment.
      **overrides: `workers` (None: the cluster's free CPUs); `cpus` of each worker (1); `acts` (False; True:
      the workers also compute the actions); `timeout` and `restarts` (100) of `HostEnvironment`; the
      environment's own parameters.

    Raises:
      FdgError: Ray is not installed, the environment is not a host environment, or a number is out of range.
    """
    ray_cluster.module()
    workers, cpus = overrides.pop("workers", None), overrides.pop("cpus", 1)
    acts = overrides.pop("acts", False)
    given = HostEnvironment.FIELDS & overrides.keys()
    limits = {"restarts": RESTARTS, **{field: overrides.pop(field) for field in given}}
    check_options(
        f"environment '{PREFIX}{name}'", FleetSource, {"workers": workers, "cpus": cpus, "acts": acts}
    )
    check_count(f"environment '{PREFIX}{name}'", "workers", 1 if workers is None else workers)
    if acts and workers is None:
        raise FdgError(
            f"environment '{PREFIX}{name}': acts=True needs the number of workers, since programs are"
            " compiled for their shares: give workers=8 (--env-workers 8)"
        )
    if not 0 < cpus < float("inf"):
        raise FdgError(f"environment '{PREFIX}{name}': cpus={cpus!r} must be above 0 and finite")
    inner = make_one(name, **overrides)
    if not isinstance(inner, HostEnvironment):
        raise FdgError(
            f"environment '{PREFIX}{name}': '{name}' is compiled into the program and needs no workers: leave"
            f" out {PREFIX}, or name a host environment, such as {PREFIX}gymnasium:CartPole-v1"
        )
    if isinstance(inner.source, FleetSource):
        raise FdgError(f"environment '{PREFIX}{name}': write {PREFIX} once")
    return HostEnvironment(FleetSource(inner.source, workers, float(cpus), acts), **limits)


@dataclasses.dataclass(frozen=True)
class FleetSource:
    """A `pools.Source` whose instances are divided among workers; otherwise as `source`."""

    source: Any  # a Source
    workers: int | None = None
    cpus: float = 1.0
    acts: bool = False  # the workers also act, for whole segments (`envs.satellites`)

    trace_actor: ClassVar[Any] = staticmethod(satellites.trace)

    def shares(self, size: int) -> list[int]:
        """The number of instances of each worker, for a pool of `size`."""
        return [len(share) for share in np.array_split(np.arange(size), min(size, self.workers or 1))]

    @property
    def name(self) -> str:
        """The name for `envs.make`."""
        return PREFIX + self.source.name

    def start(self, size: int) -> "FleetPool":
        """A pool of `size` instances; pools of one source share this process's workers."""
        return FleetPool(self, size, fleet(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)  # spaces, limit, and optional attributes such as `info`


class Worker:
    """A Ray actor with pools of shares of instances."""

    def __init__(self, environment: Mapping[str, str]):
        os.environ.update(environment)
        self._pools: dict[ShareKey, Pool] = {}
        self._observations: dict[ShareKey, np.ndarray] = {}  # the last observations of each share

    def where(self) -> str:
        """The worker's host and process, for errors."""
        return f"host {socket.gethostname()}, process {os.getpid()}"

    def reset(
        self,
        key: ShareKey,
        new_pool: tuple[Source, int] | None,
        rows: np.ndarray,
        seeds: np.ndarray,
        timeout: float,
    ) -> np.ndarray:
        """Recreates all instances in a new pool (source and size), or some instances of the existing pool."""
        if new_pool is not None:
            self.close(key)
            source, size = new_pool
            self._pools[key] = source.start(size)
        observation = self._pools[key].reset(rows, seeds, timeout)
        self._observations[key] = observation if new_pool is not None else self._observations[key].copy()
        self._observations[key][rows] = observation
        return observation

    def step(self, key: ShareKey, action: np.ndarray, timeout: float) -> Transition | None:
        """Steps a pool; None if this worker replaced one that had the pool."""
        pool = self._pools.get(key)
        if pool is None:
            return None
        result = pool.step(action, timeout)
        self._observations[key] = result.observation
        return result

    def segment(
        self,
        key: ShareKey,
        program: Any,
        num_steps: int,
        fixed: Sequence[np.ndarray],
        per_step: Sequence[np.ndarray],
        recreated: Recreated | None,
        timeout: float,
    ) -> Segment | None:
        """Acts and steps `num_steps` times; None if this worker replaced one that had the pool."""
        pool = self._pools.get(key)
        if pool is None:
            return None
        inputs = ActorInputs(fixed, per_step)
        result, self._observations[key] = satellites.run_segment(
            program, pool, self._observations[key], num_steps, inputs, recreated, timeout
        )
        return result

    def close(self, key: ShareKey) -> None:
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
        name, requested = f"environment '{source.name}'", source.workers or 0
        try:
            local_cpus = max(os.cpu_count() or 1, int(requested * source.cpus + 1))
            self._ray = ray = ray_cluster.connect(local_cpus=local_cpus)
        except FdgError as error:
            raise HostError(f"{name}: {error}") from error
        total = ray.cluster_resources().get("CPU", 0)
        free = ray.available_resources().get("CPU", 0)
        count = source.workers or max(1, int(free / source.cpus))
        if count * source.cpus > total:
            num_fitting = int(free / source.cpus)
            fewer = f"--env-workers {num_fitting}, or " if num_fitting else ""
            raise HostError(
                f"{name}: {count} workers of {source.cpus:g} CPUs: the Ray cluster has {total:g} CPUs,"
                f" {free:g} of them free: use {fewer}?cpus={int(1000 * total / count) / 1000:g}"
            )
        self._workers = [self._start() for _ in range(count)]
        self._locations: dict[Any, str] = {}
        pending = {worker.where.remote(): worker for worker in self._workers}
        started, missing = ray.wait(list(pending), num_returns=count, timeout=_START_SECONDS)
        if missing:
            for worker in self._workers:
                ray.kill(worker)
            raise HostError(
                f"{name}: {len(missing)} of {count} workers have not started in {_START_SECONDS:g} s: the Ray"
                f" cluster has {total:g} CPUs, {free:g} of them free: use --env-workers"
                f" {max(1, len(started))}"
            )
        self._locations = {pending[ref]: where for ref, where in zip(started, ray.get(started), strict=True)}

    def __len__(self) -> int:
        return len(self._workers)

    def worker(self, i: int) -> Any:
        """The actor of worker `i`; changes after `replace`."""
        return self._workers[i]

    def where(self, i: int) -> str:
        """The number, host and process of worker `i`, for errors."""
        return f"worker {i} ({self._locations.get(self._workers[i], 'its host')})"

    def replace(self, i: int, dead: Any) -> None:
        """Replaces worker `i`, whose actor is dead or hangs, unless another thread has replaced it.

        A new actor starts where Ray has room; otherwise another worker takes over the share.
        """
        with self._lock:
            if self._workers[i] is not dead:
                return
            self._ray.kill(dead)
            end = time.monotonic() + _ROOM_SECONDS
            others = [worker for worker in self._workers if worker is not dead]
            # The actor's CPU becomes free shortly after its end, but never if its host is gone.
            while others and self._free_cpus() < self._source.cpus and time.monotonic() < end:
                time.sleep(0.2)
            if others and self._free_cpus() < self._source.cpus:
                self._workers[i] = others[i % len(others)]
                return
            worker = self._start()
            self._workers = [worker if actor is dead else actor for actor in self._workers]
        try:
            self._locations[worker] = self._ray.get(worker.where.remote(), timeout=_START_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise HostError(
                f"environment '{self._source.name}': worker {i} cannot be started again: {one_line(error)}"
            ) from error

    def _free_cpus(self) -> float:
        return self._ray.available_resources().get("CPU", 0)

    def _start(self) -> Any:
        return (
            self._ray.remote(Worker)
            .options(num_cpus=self._source.cpus, max_restarts=0, scheduling_strategy="SPREAD")
            .remote(ray_cluster.inherited_variables(os.environ))
        )


class FleetPool(InTwoHalves):
    """A `pools.Pool` whose instances are in a fleet's workers."""

    def __init__(self, source: FleetSource, size: int, fleet: Fleet):
        self._size, self._fleet, self._pool_number = size, fleet, next(_pool_numbers)
        cores = max(1, int(source.cpus))
        with_cores = getattr(source.source, "with_cores", None)
        self._source: Source = source.source if with_cores is None else with_cores(cores)
        self._name, self._space = source.name, wire_space(source)
        self._num_info = len(getattr(source, "info", ()))
        self._shares = np.array_split(np.arange(size), min(size, len(fleet)))
        self._actors: list[Any] = [None] * len(self._shares)  # by share
        self._pending: list[tuple[int, Any]] = []  # (share, reference to its result) of the running step
        self._programs: dict[Any, Any] = {}  # references in Ray's object store
        import ray

        self._ray = ray

    def reset(self, rows: np.ndarray, seeds: np.ndarray, timeout: float) -> np.ndarray:
        """Recreates the instances `rows`; if they are a whole share, in a new pool of the share's worker."""
        pending = []
        for i, share in enumerate(self._shares):
            chosen = np.isin(share, rows)
            if not chosen.any():
                continue
            new_pool = (self._source, len(share)) if chosen.all() else None
            if new_pool is not None:
                self._actors[i] = self._fleet.worker(i)
            share_seeds = seeds[np.isin(rows, share)]
            actor = self._actors[i]
            pending.append(
                (i, actor.reset.remote(self._key(i), new_pool, np.flatnonzero(chosen), share_seeds, timeout))
            )
        observations = []
        for observation, reason in self._answers(pending, timeout):
            if observation is None:
                raise HostError(f"environment '{self._name}': at its start, {reason}")
            observations.append(observation)
        return np.concatenate(observations)

    def send(self, action: np.ndarray, timeout: float) -> None:
        """Makes all shares start a step."""
        self._pending = [
            (i, self._actors[i].step.remote(self._key(i), action[share], timeout))
            for i, share in enumerate(self._shares)
        ]

    def ready(self) -> bool:
        """True if all shares have stepped."""
        sent = [ref for _, ref in self._pending]
        return len(self._ray.wait(sent, num_returns=len(sent), timeout=0)[0]) == len(sent)

    def recv(self, timeout: float) -> Transition:
        """Waits for the running step, at most about `timeout` seconds; its result names lost instances."""
        transition = Transition.empty(self._size, self._space, self._num_info)
        failures: list[Failure] = []
        for i, (part, reason) in enumerate(self._answers(self._pending, timeout)):
            share = self._shares[i]
            if part is None:
                failures.append(Failure(share, reason or f"{self._fleet.where(i)} {_REPLACED}"))
                continue
            for array, share_array in zip(transition.arrays, part.arrays, strict=True):
                array[share] = share_array
            failures += [
                Failure(share[failure.rows], f"{self._fleet.where(i)}: {failure.reason}")
                for failure in part.failures
            ]
        return transition._replace(failures=failures)

    def segment(
        self,
        program: Any,
        num_steps: int,
        inputs: ActorInputs[np.ndarray],
        rows: np.ndarray,
        recreated: Recreated | None,
        timeout: float,
    ) -> Segment:
        """Steps of some rows: the workers of their shares act and step.

        Args:
          program: a `satellites.Program`, which computes the actions; put into Ray's object store once.
          num_steps: T.
          inputs: of all rows; the fixed ones are put into the object store for each segment.
          rows: `[n]` in order, whole shares.
          recreated: given if `rows` have just replaced lost instances.
          timeout: seconds per step.
        """
        if program not in self._programs:
            self._programs[program] = self._ray.put(program)
        fixed, pending = self._ray.put(inputs.fixed), []
        for i, share in enumerate(self._shares):
            if share[0] not in rows:
                continue
            share_recreated = None if recreated is None else recreated.select(np.searchsorted(rows, share))
            per_step = [values[:, share] for values in inputs.per_step]
            arguments = self._programs[program], num_steps, fixed, per_step, share_recreated, timeout
            pending.append((i, self._actors[i].segment.remote(self._key(i), *arguments)))
        failures: list[Failure] = []
        parts: list[Segment | None] = []
        for (i, _), (part, reason) in zip(
            pending, self._answers(pending, timeout * num_steps + _COMPILE_SECONDS), strict=True
        ):
            parts.append(part)
            if part is None:
                failures.append(Failure(self._shares[i], reason or f"{self._fleet.where(i)} {_REPLACED}"))
        return Segment.concatenate(parts, [len(self._shares[i]) for i, _ in pending], failures)

    def close(self) -> None:
        """Closes the shares; the workers stay for other pools until the process ends."""
        if self._ray.is_initialized():
            for i, actor in enumerate(self._actors):
                if actor is not None:
                    actor.close.remote(self._key(i))

    def _key(self, i: int) -> ShareKey:
        """The key of a share; after a failure, one worker may have two shares of a pool."""
        return self._pool_number, i

    def _answers(self, pending: Sequence[tuple[int, Any]], timeout: float) -> list[tuple[Any, str]]:
        """The answer of each share's worker, or None and why it failed. Replaces dead or hanging workers."""
        end = time.monotonic() + timeout + _LATE_SECONDS
        answers: list[tuple[Any, str]] = []
        for i, ref in pending:
            actor, where = self._actors[i], self._fleet.where(i)
            try:
                answers.append((self._ray.get(ref, timeout=max(0.1, end - time.monotonic())), ""))
                continue
            except self._ray.exceptions.GetTimeoutError:
                reason = f"{where} was not done in {timeout:g} s"
            except self._ray.exceptions.RayTaskError as error:  # the worker raised, but lives
                cause = error.cause if isinstance(error.cause, Exception) else error
                text = str(cause) if isinstance(cause, HostError) else raised(cause)
                answers.append((None, f"{where}: {text}"))
                continue
            except self._ray.exceptions.RayError:
                reason = f"{where} died"
            self._fleet.replace(i, actor)
            answers.append((None, reason))
        return answers


def fleet(source: FleetSource) -> Fleet:
    """The workers of a source in this process, started on the first call."""
    with _fleets_lock:
        if source not in _fleets:
            _fleets[source] = Fleet(source)
        return _fleets[source]


_fleets: dict[FleetSource, Fleet] = {}
_fleets_lock = threading.Lock()
_pool_numbers = itertools.count()
