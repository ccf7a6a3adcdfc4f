"""Reference jobs for calibration: times jobs in child processes, to fit overheads (`costs/fitting.py`).

    python -m fdg.training.reference_jobs 2 JOB JOB ...     on 2 host devices: a round for each line read

A child has as many host devices as its jobs need, since a program's time depends on the number of devices in
its process. All children stay alive and run in turns, so that a slow minute of a shared machine affects all
jobs alike.
"""

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

import algos
import envs
import policies
from fdg.costs.candidate_times import iterations_of
from fdg.costs.fitting import JobSample, fit
from fdg.costs.machine import Calibration
from fdg.errors import FdgError
from fdg.placing.place import place
from fdg.profiling.measuring import Iterations
from fdg.running.host_devices import environment_of_a_child, make_host_devices

Say = Callable[[str], None]
_PATIENCE = 600  # seconds for a child
_ROUNDS = 6  # as for a cell of `bench.costs` in two passes


@dataclasses.dataclass(frozen=True)
class ReferenceJob:
    """An algorithm in an environment under a policy."""

    algorithm: str  # the name of its class
    env: str  # as in `envs.make`
    fields: tuple[tuple[str, Any], ...]  # the algorithm's fields
    policy: str  # the name of its class
    sizes: tuple[tuple[str, Any], ...]  # the policy's fields
    devices: int  # the number of devices

    @classmethod
    def of_key(cls, key: str) -> "ReferenceJob":
        """The inverse of `key`."""
        algorithm, env, fields, policy, sizes, devices = json.loads(key)
        return cls(algorithm, env, _pairs(fields), policy, _pairs(sizes), devices)

    @property
    def key(self) -> str:
        """The job as JSON."""
        return json.dumps(dataclasses.astuple(self))

    def build(self) -> tuple[Any, Any]:
        """The algorithm and the policy."""
        cls = getattr(algos, self.algorithm)
        algorithm = cls(env=envs.make(self.env), **dict(self.fields), total_steps=10**9)
        return algorithm, getattr(policies, self.policy)(**dict(self.sizes))

    def __str__(self) -> str:
        words = ", ".join(f"{name}={value}" for name, value in (*self.fields, *self.sizes))
        return f"{self.algorithm} {self.env} {self.policy} on {self.devices} ({words})"


def _pairs(given: Iterable[Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in given)


def _small(num_envs: int, num_steps: int, width: int = 0) -> tuple[tuple[str, Any], ...]:
    sizes = (("num_envs", num_envs), ("num_steps", num_steps))
    return (*sizes, ("hidden", (width, width))) if width else sizes


_ALONE = ("GPUOnly", ())
_COARSE = ("SingleLearnerCoarse", (("staleness", 0),))
_LATE = ("SingleLearnerCoarse", (("staleness", 1),))
_FINE = ("SingleLearnerFine", ())
_CENTRAL = ("Central", ())
_TINY = ("PPO", "CartPole-v1", _small(16, 32))
_CARTPOLE = ("PPO", "CartPole-v1", _small(256, 32))
_PENDULUM = ("PPO", "Pendulum-v1", _small(128, 64, 256))
_CAR = ("PPO", "MountainCar-v0", _small(512, 64))
_A2C = ("A2C", "CartPole-v1", _small(512, 8))
_A2C_ACROBOT = ("A2C", "Acrobot-v1", _small(2048, 8, 128))
_A2C_PENDULUM = ("A2C", "Pendulum-v1", _small(64, 32, 256))
_DQN = ("DQN", "CartPole-v1", (("num_envs", 64), ("learning_starts", 1000)))
_PQN = ("PQN", "Acrobot-v1", _small(1024, 16))
_SPREAD = ("IPPO", "MPE_simple_spread_v3", _small(64, 25))
# Each class of operation weighs in some of them, each overhead in others. All are of the half of the cells
# of `bench.costs` that the model may be fitted to.
_JOBS: Sequence[tuple[tuple[str, str, Any], tuple[str, Any], int]] = (
    *((what, _ALONE, 1) for what in (_TINY, _CARTPOLE, _PENDULUM, _A2C, _SPREAD)),
    *((what, _ALONE, 1) for what in (_DQN, _CAR, _A2C_PENDULUM, _PQN)),
    *((_TINY, how, 2) for how in (_ALONE, _FINE)),
    *((_CARTPOLE, how, 2) for how in (_ALONE, _COARSE, _CENTRAL)),
    (_PENDULUM, _LATE, 2),
    (_SPREAD, _ALONE, 2),
    *((_A2C, how, 2) for how in (_COARSE, _LATE, _CENTRAL)),
    *((_CARTPOLE, how, 4) for how in (_ALONE, _FINE)),
    (_SPREAD, _COARSE, 4),
    (_A2C_ACROBOT, _LATE, 4),
)
REFERENCE_JOBS: Sequence[ReferenceJob] = tuple(
    ReferenceJob(*what, *how, devices) for what, how, devices in _JOBS
)


def time_reference_jobs(
    jobs: Sequence[ReferenceJob], devices: Sequence[jax.Device], say: Say
) -> Mapping[ReferenceJob, float]:
    """Seconds of an iteration of each job that has enough devices and compiles.

    CPU jobs run in child processes, others on the given devices.
    """
    on_cpu = devices[0].platform == "cpu"
    found: dict[ReferenceJob, float] = {}
    with contextlib.ExitStack() as ends:
        groups: list[tuple[list[ReferenceJob], _Here | _Child]] = []
        for count in sorted({job.devices for job in jobs}):
            if count > len(devices) and not on_cpu:
                break
            some = [job for job in jobs if job.devices == count]
            say(f"training: {len(some)} jobs on {count} device{'s' if count > 1 else ''}")
            if on_cpu:
                groups.append((some, ends.enter_context(contextlib.closing(_Child(some, count)))))
            else:
                groups.append((some, _Here(some, devices[:count])))
        for i in range(_ROUNDS):
            say(f"training: round {i + 1} of {_ROUNDS}")
            for some, one in groups:
                seconds = zip(some, one.round(), strict=True)
                found.update((job, taken) for job, taken in seconds if taken is not None)
    return found


def fitted_to_jobs(calibration: Calibration) -> Calibration:
    """The calibration with overheads fitted to reference jobs, if there are any."""
    samples = []
    for key, seconds in calibration.jobs.items():
        job = ReferenceJob.of_key(key)
        samples.append(JobSample(place(*job.build(), job.devices), calibration.cluster(job.devices), seconds))
    if not samples:
        return calibration
    found = fit(samples)
    kind = dataclasses.replace(calibration.kind, joined=found.joined, overheads=found.overheads)
    return dataclasses.replace(calibration, kind=kind)


class _Here:
    """Jobs in this process."""

    def __init__(self, jobs: Sequence[ReferenceJob], devices: Sequence[jax.Device]):
        self._ready: list[Iterations | None] = []
        for job in jobs:
            self._ready.append(None)
            with contextlib.suppress(FdgError):
                self._ready[-1] = iterations_of(*job.build(), devices)

    def round(self) -> Sequence[float | None]:
        """The best seconds of an iteration of each job so far; None if it cannot be timed."""
        for one in self._ready:
            if one is not None:
                one.measure()
        return [None if one is None else one.seconds for one in self._ready]


class _Child:
    """Jobs in a child process; None for each if it ends early or takes too long."""

    def __init__(self, jobs: Sequence[ReferenceJob], count: int):
        words = [sys.executable, "-m", "fdg.training.reference_jobs", str(count), *(job.key for job in jobs)]
        environment = {**environment_of_a_child(), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        environment.pop("JAX_NUM_CPU_DEVICES", None)
        self._process = subprocess.Popen(
            words, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._watchdog = threading.Timer(_PATIENCE, self._process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()
        self._nothing: Sequence[float | None] = [None] * len(jobs)
        self._process.stdout.readline()  # type: ignore[union-attr]  # until all are compiled

    def round(self) -> Sequence[float | None]:
        given, said = self._process.stdin, self._process.stdout
        assert given is not None and said is not None
        try:
            given.write("\n")
            given.flush()
            return json.loads(said.readline())
        except (OSError, ValueError):
            return self._nothing

    def close(self) -> None:
        """Ends the process."""
        self._watchdog.cancel()
        self._process.kill()
        self._process.communicate()


def run_child(count: int, keys: Sequence[str]) -> None:
    """The child: prints a line when all jobs are compiled, and one after each round."""
    make_host_devices(count)
    jobs = _Here([ReferenceJob.of_key(key) for key in keys], jax.devices("cpu")[:count])
    print("compiled", flush=True)
    for _ in sys.stdin:
        print(json.dumps(jobs.round()), flush=True)


if __name__ == "__main__":
    run_child(int(sys.argv[1]), sys.argv[2:])
