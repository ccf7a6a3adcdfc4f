"""Times reference jobs for calibration, to fit overheads (`costs/fitting.py`).

    python -m fdg.training.reference_jobs 2 JOB JOB ...     on 2 host devices: one round per input line

On CPUs, jobs run in child processes. A child has only the host devices that its jobs use, since a program's
time depends on the number of devices in its process. All children stay alive and run in turns, so that a slow
minute of a shared machine affects all jobs equally.
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
from fdg.costs.fitting import JobSample, fit_overheads
from fdg.costs.machine import Calibration
from fdg.errors import FdgError
from fdg.placing.place import place
from fdg.profiling.measuring import Iterations
from fdg.running.host_devices import environment_of_a_child, make_host_devices

Say = Callable[[str], None]
_CHILD_SECONDS = 600  # seconds until a child is killed
_ROUNDS = 6  # times that each job is measured; the fastest counts


@dataclasses.dataclass(frozen=True)
class ReferenceJob:
    """An algorithm in an environment under a policy, on a number of devices."""

    algorithm: str  # the name of its class
    env: str  # a name for `envs.make`
    fields: tuple[tuple[str, Any], ...]  # the algorithm's fields
    policy: str  # the name of its class
    policy_fields: tuple[tuple[str, Any], ...]  # the policy's fields
    devices: int  # the number of devices

    @classmethod
    def of_key(cls, key: str) -> "ReferenceJob":
        """The inverse of `key`."""
        algorithm, env, fields, policy, policy_fields, devices = json.loads(key)
        return cls(algorithm, env, _as_pairs(fields), policy, _as_pairs(policy_fields), devices)

    @property
    def key(self) -> str:
        """The job as JSON."""
        return json.dumps(dataclasses.astuple(self))

    def build(self) -> tuple[Any, Any]:
        """The algorithm and the policy."""
        cls = getattr(algos, self.algorithm)
        algorithm = cls(env=envs.make(self.env), **dict(self.fields), total_steps=10**9)
        return algorithm, getattr(policies, self.policy)(**dict(self.policy_fields))

    def __str__(self) -> str:
        words = ", ".join(f"{name}={value}" for name, value in (*self.fields, *self.policy_fields))
        return f"{self.algorithm} {self.env} {self.policy} on {self.devices} ({words})"


def _as_pairs(items: Iterable[Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in items)


def _rollout_fields(num_envs: int, num_steps: int, width: int = 0) -> tuple[tuple[str, Any], ...]:
    """An algorithm's fields; `width` is that of both hidden layers (0: the default layers)."""
    sizes = (("num_envs", num_envs), ("num_steps", num_steps))
    return (*sizes, ("hidden", (width, width))) if width else sizes


def _decoder_fields(prompts: int, micro_batches: int, width: int, layers: int) -> tuple[tuple[str, Any], ...]:
    """Fields of an algorithm that trains a language model."""
    sizes = (("num_prompts", prompts), ("micro_batches", micro_batches), ("group_size", 4))
    return (*sizes, ("hidden_size", width), ("num_layers", layers), ("num_heads", 4))


# Policies with their fields; below them, algorithms with an environment and their fields.
_GPU_ONLY = ("GPUOnly", ())
_COARSE = ("SingleLearnerCoarse", (("staleness", 0),))
_STALE = ("SingleLearnerCoarse", (("staleness", 1),))
_FINE = ("SingleLearnerFine", ())
_CENTRAL = ("Central", ())
_SPLIT = ("Split", ())
_TINY = ("PPO", "CartPole-v1", _rollout_fields(16, 32))
_CARTPOLE = ("PPO", "CartPole-v1", _rollout_fields(256, 32))
_PENDULUM = ("PPO", "Pendulum-v1", _rollout_fields(128, 64, 256))
_CAR = ("PPO", "MountainCar-v0", _rollout_fields(512, 64))
_A2C = ("A2C", "CartPole-v1", _rollout_fields(512, 8))
_A2C_ACROBOT = ("A2C", "Acrobot-v1", _rollout_fields(2048, 8, 128))
_A2C_PENDULUM = ("A2C", "Pendulum-v1", _rollout_fields(64, 32, 256))
_DQN = ("DQN", "CartPole-v1", (("num_envs", 64), ("learning_starts", 1000)))
_PQN = ("PQN", "Acrobot-v1", _rollout_fields(1024, 16))
_SORTING = ("GRPO", "text:sorting", _decoder_fields(64, 1, 64, 2))
_ADDITION = ("GRPO", "text:addition", _decoder_fields(16, 2, 32, 1))
_SPREAD = ("IPPO", "MPE_simple_spread_v3", _rollout_fields(64, 25))
# (algorithm, policy, number of devices). Each class of operations dominates some of these jobs, and each
# overhead dominates others. All of them are in the half of the cells of `bench.costs` to which the model is
# fitted; the other half tests it.
_JOBS: Sequence[tuple[tuple[str, str, Any], tuple[str, Any], int]] = (
    *((job, _GPU_ONLY, 1) for job in (_TINY, _CARTPOLE, _PENDULUM, _A2C, _SPREAD)),
    *((job, _GPU_ONLY, 1) for job in (_DQN, _CAR, _A2C_PENDULUM, _PQN, _SORTING, _ADDITION)),
    *((_TINY, policy, 2) for policy in (_GPU_ONLY, _FINE)),
    *((_CARTPOLE, policy, 2) for policy in (_GPU_ONLY, _COARSE, _CENTRAL)),
    (_PENDULUM, _STALE, 2),
    *((job, _SPLIT, 2) for job in (_SORTING, _ADDITION)),
    (_SPREAD, _GPU_ONLY, 2),
    *((_A2C, policy, 2) for policy in (_COARSE, _STALE, _CENTRAL)),
    *((_CARTPOLE, policy, 4) for policy in (_GPU_ONLY, _FINE)),
    (_SPREAD, _COARSE, 4),
    (_A2C_ACROBOT, _STALE, 4),
)
REFERENCE_JOBS: Sequence[ReferenceJob] = tuple(
    ReferenceJob(*job, *policy, devices) for job, policy, devices in _JOBS
)


def time_reference_jobs(
    jobs: Sequence[ReferenceJob], devices: Sequence[jax.Device], say: Say
) -> Mapping[ReferenceJob, float]:
    """Seconds per iteration of each job that compiles and for which there are enough devices.

    Jobs on CPUs run in child processes, others on `devices`.
    """
    on_cpu = devices[0].platform == "cpu"
    best_seconds: dict[ReferenceJob, float] = {}
    with contextlib.ExitStack() as stack:
        groups: list[tuple[list[ReferenceJob], _ThisProcess | _ChildProcess]] = []
        for count in sorted({job.devices for job in jobs}):
            if count > len(devices) and not on_cpu:
                break
            same_count = [job for job in jobs if job.devices == count]
            say(f"training: {len(same_count)} jobs on {count} device{'s' if count > 1 else ''}")
            if on_cpu:
                child = _ChildProcess(same_count, count)
                groups.append((same_count, stack.enter_context(contextlib.closing(child))))
            else:
                groups.append((same_count, _ThisProcess(same_count, devices[:count])))
        for i in range(_ROUNDS):
            say(f"training: round {i + 1} of {_ROUNDS}")
            for group_jobs, timer in groups:
                times = zip(group_jobs, timer.run_round(), strict=True)
                best_seconds.update((job, seconds) for job, seconds in times if seconds is not None)
    return best_seconds


def fit_to_jobs(calibration: Calibration) -> Calibration:
    """The calibration with overheads fitted to its reference jobs; unchanged if it has none."""
    samples = []
    for key, seconds in calibration.jobs.items():
        job = ReferenceJob.of_key(key)
        samples.append(JobSample(place(*job.build(), job.devices), calibration.cluster(job.devices), seconds))
    if not samples:
        return calibration
    fitted = fit_overheads(samples)
    shares, overheads = fitted.shares_after_fusion, fitted.overheads
    kind = dataclasses.replace(calibration.kind, shares_after_fusion=shares, overheads=overheads)
    return dataclasses.replace(calibration, kind=kind)


class _ThisProcess:
    """Times jobs in this process."""

    def __init__(self, jobs: Sequence[ReferenceJob], devices: Sequence[jax.Device]):
        self._iterations: list[Iterations | None] = []
        for job in jobs:
            self._iterations.append(None)
            with contextlib.suppress(FdgError):
                self._iterations[-1] = iterations_of(*job.build(), devices)

    def run_round(self) -> Sequence[float | None]:
        """Measures once more; returns the least seconds per iteration of each job, None if it cannot run."""
        for iterations in self._iterations:
            if iterations is not None:
                iterations.measure()
        return [None if iterations is None else iterations.seconds for iterations in self._iterations]


class _ChildProcess:
    """Times jobs in a child process; all times are None if it ends early or takes too long."""

    def __init__(self, jobs: Sequence[ReferenceJob], count: int):
        keys = [job.key for job in jobs]
        command = [sys.executable, "-m", "fdg.training.reference_jobs", str(count), *keys]
        environment = {**environment_of_a_child(), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        environment.pop("JAX_NUM_CPU_DEVICES", None)
        self._process = subprocess.Popen(
            command, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._watchdog = threading.Timer(_CHILD_SECONDS, self._process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()
        self._no_times: Sequence[float | None] = [None] * len(jobs)
        self._process.stdout.readline()  # type: ignore[union-attr]  # waits until all jobs are compiled

    def run_round(self) -> Sequence[float | None]:
        requests, responses = self._process.stdin, self._process.stdout
        assert requests is not None and responses is not None
        try:
            requests.write("\n")
            requests.flush()
            return json.loads(responses.readline())
        except (OSError, ValueError):
            return self._no_times

    def close(self) -> None:
        """Ends the process."""
        self._watchdog.cancel()
        self._process.kill()
        self._process.communicate()


def run_child(count: int, keys: Sequence[str]) -> None:
    """Runs in the child: prints a line when all jobs are compiled, and a line of times after each round."""
    make_host_devices(count)
    jobs = _ThisProcess([ReferenceJob.of_key(key) for key in keys], jax.devices("cpu")[:count])
    print("compiled", flush=True)
    for _ in sys.stdin:
        print(json.dumps(jobs.run_round()), flush=True)


if __name__ == "__main__":
    run_child(int(sys.argv[1]), sys.argv[2:])
