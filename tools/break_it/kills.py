"""Kills runs (SIGKILL) at random moments and resumes them: they must end like an undisturbed run.

Runs that stream responses also get SIGTERM and Ctrl-C between the kills. If a run has several processes, a
signal goes to all of them, or to one.

Each process is a fork of this process, which has imported all modules but started no JAX backend, so that JAX
is imported only once. Moments are measured in CPU time of the process, which other work on the machine hardly
affects.

An environment on the host begins new episodes in a resumed run, which hence differs from an undisturbed one.
Such a run must equal the undisturbed one up to the checkpoint before the first kill, and a second resumption
of its last killed state in all bits. If a worker of the environment is killed, the run must go on and count
the episodes of this worker.

Two tries in three resume on the same devices, and all bits must be equal. Every third try resumes with random
policies and numbers of devices: floats must be equal within a tolerance, relative to the largest value of
their array (or to 1), and all other values exactly. Two tries in six start with an empty compilation cache.
"""

import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.forks import forked
from tools.break_it.comparing import describe_difference, rows_differ
from tools.break_it.processes import FOLDER, cpu_seconds_of, descendants, record_circumstances

# Flags of runs with some seconds of CPU time, and thirty checkpoints. Learning rates are at most 1e-3: with
# 1e-2, a rounding difference grows beyond 1e-5 within sixty iterations, and would hide errors.
_SMALL = "--num-envs 4 --num-steps 8 --hidden 8 --total-steps 1920"
_PLACEMENTS = (
    "--devices 2",
    "--policy multi_learner --devices 4",
    "--policy single_learner_coarse --devices 3",
    "--policy single_learner_fine --devices 2",
    "--policy environments --devices 3",
    "--policy central --devices 2",
)


@dataclasses.dataclass(frozen=True)
class KillableRun:
    """A run to kill.

    Attributes:
      flags: flags of `fdg.train`; `--devices 1` is added if they have no `--devices`.
      placements: flags of other placements in which the run may resume.
      in_float64: whether a try with other placements uses float64, because sampled tokens depend on the last
        digits.
      first_flags: further flags of the first start, which a resumed run does not accept.
      signals: the signals, in order.
      processes: number of processes of the run.
      to_one_process: whether a signal goes to one random process, not to all.
      rows_per_worker: number of environments of a worker of the environment, which gets the only signal; 0 if
        signals go to the run's processes.
    """

    flags: str
    placements: Sequence[str] = _PLACEMENTS
    in_float64: bool = False
    first_flags: str = ""
    signals: Sequence[signal.Signals] = (signal.SIGKILL,) * 3
    processes: int = 1
    to_one_process: bool = False
    rows_per_worker: int = 0

    @property
    def begins_new_episodes(self) -> bool:
        """Whether a resumed run begins new episodes, because its environments are on the host."""
        return "gymnasium:" in self.flags

    @property
    def all_flags(self) -> list[str]:
        return f"{self.flags}{'' if '--devices' in self.flags else ' --devices 1'}".split()


RUNS: Mapping[str, KillableRun] = {
    "ppo": KillableRun(_SMALL),
    "dqn": KillableRun(
        "--algo dqn --num-envs 4 --hidden 8 --total-steps 1920 --learning-starts 300 --buffer-size 1000"
    ),
    # Each of the four minibatches is one environment, which several learners cannot divide.
    "recurrent": KillableRun(
        f"--algo recurrent_ppo {_SMALL} --memory-size 8", (_PLACEMENTS[0], *_PLACEMENTS[2:])
    ),
    "stale": KillableRun(
        f"--policy single_learner_coarse --devices 2 --staleness 1 {_SMALL}",
        ("--devices 1", "--devices 3", "--learners 2 --devices 4"),
    ),
    "agents": KillableRun(f"--num-seeds 3 {_SMALL}", ("--devices 3", "--policy multi_learner --devices 3")),
    "sweep": KillableRun(f"--sweep lr=1e-4,1e-3 --num-seeds 2 {_SMALL}", ("--devices 2", "--devices 4")),
    "population": KillableRun(
        f"--sweep lr=log:1e-4..1e-3x4 --exploit-every 5 {_SMALL}", ("--devices 2", "--devices 4")
    ),
    "processes": KillableRun(
        f"--devices 2 {_SMALL}", ("--devices 1", "--devices 4", *_PLACEMENTS[2:]), processes=2
    ),
}
# With 6 problems and 4 prompts per iteration, epochs end within iterations.
_TEXT = (
    "--env tools.break_it.language:counted --num-prompts 4 --dataset-size 6 --hidden-size 8"
    " --num-layers 1 --num-heads 2"
)
_TEXT_PLACEMENTS = (
    "--policy colocated --devices 2",
    "--policy split --actors 2 --learners 1 --devices 3",
    "--policy standalone --actors 1 --learners 2 --references 1 --devices 4",
)
LANGUAGE: Mapping[str, KillableRun] = {
    algo: KillableRun(
        f"--algo {algo} {_TEXT} {sizes}", _TEXT_PLACEMENTS, in_float64=True, first_flags="--preset none"
    )
    for algo, sizes in (
        ("sft", "--total-steps 240"),
        ("dpo", "--group-size 2 --total-steps 480"),
        ("grpo", "--group-size 2 --total-steps 480"),
        ("ppo_rlhf", "--group-size 2 --total-steps 480"),
    )
}
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGKILL)
STREAMS: Mapping[str, KillableRun] = {
    name: KillableRun(
        f"--algo {flags} {_TEXT.replace('counted', 'counted?max_response=12')} --group-size 2"
        " --total-steps 480",
        (),
        first_flags="--preset none",
        signals=_SIGNALS,
        processes=processes,
        to_one_process=processes > 1,
    )
    for name, processes, flags in (
        ("grpo ahead", 1, "grpo --ahead 2 --slots 3 --micro-batches 2"),
        ("ppo_rlhf ahead", 1, "ppo_rlhf --ahead 1 --slots 5 --order prompt"),
        ("dpo ahead", 1, "dpo --respondent policy --ahead 2 --slots 4 --micro-batches 2"),
        (
            "grpo ahead in processes", 2,
            "grpo --ahead 1 --slots 4 --micro-batches 2 --late mask --policy split --lag 1 --devices 2",
        ),
        (
            "ppo_rlhf ahead in processes", 2,
            "ppo_rlhf --ahead 2 --slots 3 --micro-batches 2 --policy split --devices 2",
        ),
        (
            "grpo lag 1", 1,
            "grpo --ahead 2 --slots 4 --micro-batches 2 --policy standalone --lag 1 --devices 3",
        ),
        ("ppo_rlhf lag M", 1, "ppo_rlhf --micro-batches 2 --policy split --lag 2 --devices 2"),
    )
} | {
    name: KillableRun(
        f"--env gymnasium:CartPole-v1?restarts=2 --env-workers 2 {_SMALL} --algo {flags}",
        (),
        first_flags="--preset none",
        signals=(signal.SIGKILL, signal.SIGINT, signal.SIGKILL),
        processes=processes,
        to_one_process=processes > 1,
        rows_per_worker=rows_per_worker,
    )
    for name, processes, rows_per_worker, flags in (
        ("impala workers", 1, 0, "impala --policy workers --devices 3 --lag 1"),
        ("ppo coarse", 1, 0, "ppo --policy single_learner_coarse --devices 2 --lag 8"),
        ("impala rings", 1, 0, "impala --policy workers --devices 3 --rings 2 --staleness 1"),
        ("impala in processes", 2, 0, "impala --policy single_learner_coarse --devices 2 --lag 1"),
        ("ppo, a worker", 1, 2, "ppo --policy workers --devices 3 --lag 1"),
        ("impala, a worker", 1, 2, "impala --policy single_learner_coarse --devices 2 --lag 8"),
        ("impala rings, a worker", 1, 1, "impala --policy workers --devices 3 --rings 2 --staleness 1"),
        ("impala in processes, a worker", 2, 2, "impala --policy workers --devices 4 --learners 2 --lag 1"),
    )
}  # fmt: skip
_MANY = 16  # number of processes on one machine, each with one host device
MANY: Mapping[str, KillableRun] = {
    name: KillableRun(
        f"{flags} --devices {_MANY} --num-envs {_MANY} --num-steps 8 --hidden 8 --total-steps {80 * _MANY}",
        ("--devices 1",),
        signals=(signal.SIGKILL,),
        processes=_MANY,
        to_one_process=True,
    )
    for name, flags in (
        ("ppo in many processes", "--policy gpu_only"),
        (
            "impala in many processes",
            "--algo impala --policy single_learner_coarse --learners 8 --staleness 1",
        ),
    )
}
COMMON_FLAGS = ("--eval-episodes", "0", "--checkpoint-every", "2")
_PATIENCE = 600.0  # seconds of wall time after which a process counts as hanging


def kill_run(try_number: int, runs: Mapping[str, KillableRun] = RUNS, check: str = "kills") -> str | None:
    """Kills one of `runs` at random moments and resumes it each time; returns what went wrong, or None.

    `check` is the name under which `record_circumstances` counts tries.
    """
    kind = list(runs)[try_number % len(runs)]
    case, has_empty_cache = runs[kind], try_number % 6 > 3
    is_moved = bool(case.placements) and try_number % 3 == 2
    float64 = is_moved and case.in_float64
    cache_folder = FOLDER / "programs"
    undisturbed = FOLDER / "undisturbed" / f"{kind.replace(' ', '-')}{'-float64' * float64}"
    cpu_seconds: Any = _undisturbed_cpu_seconds(case, undisturbed, cache_folder, float64)
    if isinstance(cpu_seconds, str):
        return f"{kind}, undisturbed: {cpu_seconds}"
    rng, signals = random.Random(try_number), list(case.signals)
    if case.rows_per_worker:
        return _kill_worker(case, kind, check, try_number, rng.uniform(0.0, cpu_seconds))
    expected, kept = undisturbed, 0
    with tempfile.TemporaryDirectory() as folder:
        run, twin = Path(folder, "run"), Path(folder, "twin")
        if has_empty_cache:
            cache_folder = Path(folder, "programs")
            cpu_seconds *= 2  # half of the CPU time is compilation
        while True:
            flags = _flags_by_process(case, run, rng.choice(case.placements) if is_moved else "")
            timed_signal = TimedSignal(signals[0], rng.uniform(0.0, cpu_seconds)) if signals else None
            if timed_signal and case.to_one_process:
                timed_signal = dataclasses.replace(timed_signal, process=rng.randrange(case.processes))
            status, used = _run(flags, cache_folder, timed_signal, float64)
            if status not in (0, *(timed_signal.statuses if timed_signal else ())):
                return f"{kind}, {flags}, {timed_signal}: status {status}"
            if not signals:
                break
            if status:
                sent = timed_signal.signal
                name = "" if sent == signal.SIGKILL else f"{sent.name}, "
                circumstances = f"{name}{_describe_moment(run)}{', moved' * is_moved}"
                record_circumstances(check, try_number, circumstances, kind=kind, cold=has_empty_cache)
                signals.pop(0)
                if case.begins_new_episodes and (run / "config.json").exists():
                    kept = kept or _last_checkpoint(run)
                    shutil.rmtree(twin, ignore_errors=True)
                    expected = shutil.copytree(run, twin)
            else:
                cpu_seconds = used  # the run ended before the signal, because a resumed run has less to do
                if (run / "summary.json").exists():
                    shutil.rmtree(run)
                    expected, kept = undisturbed, 0
        if expected == twin:
            status, _ = _run(_flags_by_process(case, twin, ""), cache_folder, None, float64)
            if status:
                return f"{kind}, resumed again: status {status}"
        tolerance = (1e-12 if float64 else 1e-5) if is_moved else 0.0
        difference = forked(lambda: describe_difference(run.absolute(), expected.absolute(), tolerance))
        if kept and not difference:
            difference = forked(lambda: rows_differ(run.absolute(), undisturbed.absolute(), kept))
    return f"{kind}, {'moved, ' * is_moved}killed: {difference}"[:2000] if difference else None


def _kill_worker(case: KillableRun, kind: str, check: str, try_number: int, moment: float) -> str | None:
    """Kills a worker of the environment; returns what went wrong, or None."""
    from fdg.training.run_directory import read_summary

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        timed_signal = TimedSignal(signal.SIGKILL, moment, to_worker=True)
        status, _ = _run(_flags_by_process(case, run, ""), FOLDER / "programs", timed_signal, False)
        metrics = run / "metrics.jsonl"
        if status == 1 and not (metrics.exists() and metrics.read_bytes()):
            record_circumstances(check, try_number, "a worker at its start", kind=kind)
            return None  # a worker that cannot start ends the run
        if status:
            return f"{kind}: status {status}"
        lost = (read_summary(run) or {}).get("lost_episodes")
    record_circumstances(check, try_number, f"a worker, {lost} episodes lost", kind=kind)
    # A worker that is killed after its last step loses nothing.
    return None if lost in (0, case.rows_per_worker) else f"{kind}: {lost} episodes are lost"


def _last_checkpoint(run: Path) -> int:
    """The iteration of the last checkpoint of a run; 0 without one."""
    from fdg.training.checkpoint import Checkpoints

    return forked(lambda: Checkpoints((run / "checkpoints").absolute()).latest() or 0)


def _undisturbed_cpu_seconds(
    case: KillableRun, undisturbed: Path, cache_folder: Path, float64: bool
) -> float | str:
    """CPU seconds of an undisturbed run that finds its programs in the cache; or what went wrong."""
    if not (undisturbed / "cpu_seconds.json").exists():
        cpu_seconds = 0.0
        for _ in range(2):  # the first run fills the cache
            shutil.rmtree(undisturbed, ignore_errors=True)
            status, cpu_seconds = _run(_flags_by_process(case, undisturbed, ""), cache_folder, None, float64)
            if status:
                return f"status {status}"
        (undisturbed / "cpu_seconds.json").write_text(json.dumps(cpu_seconds))
    return float(json.loads((undisturbed / "cpu_seconds.json").read_text()))


def _flags_by_process(case: KillableRun, run: Path, placement: str) -> list[list[str]]:
    """The flags of each process that starts or resumes a run.

    `placement` has the flags of another placement for a resumed run; "" for the placement of its start.
    """
    from fdg.processes.ports import free_port

    exists = (run / "config.json").exists()
    if exists and placement:
        return [["--resume", str(run), "--eval-episodes", "0", "--trust", *placement.split()]]
    where = ["--trust", "--resume"] if exists else [*case.first_flags.split(), "--out"]
    common = [*case.all_flags, *COMMON_FLAGS, *where, str(run)]
    if (count := case.processes) == 1:
        return [common]
    cluster = ["--coordinator-address", f"localhost:{free_port('localhost')}", "--num-processes", str(count)]
    return [[*common, *cluster, "--process-id", str(i)] for i in range(count)]


def _describe_moment(run: Path) -> str:
    """The moment of a kill, as the files of the run show it."""
    if not (run / "config.json").exists():
        return "before the run began"
    suffixes = [path.suffix for path in (run / "checkpoints").glob("*")]
    if ".writing" in suffixes:
        return "a checkpoint half written"
    if ".removed" in suffixes:
        return "a checkpoint half removed"
    return "between checkpoints" if suffixes else "before the first checkpoint"


@dataclasses.dataclass(frozen=True)
class TimedSignal:
    """A signal to a run at a moment.

    Attributes:
      signal: the signal.
      moment: CPU seconds before the signal, the mean over processes.
      process: index of the process that gets the signal; None for all.
      to_worker: whether a worker of the environment gets it instead, as soon as one runs.
    """

    signal: signal.Signals
    moment: float
    process: int | None = None
    to_worker: bool = False

    @property
    def statuses(self) -> tuple[int, ...]:
        """Possible exit statuses: the signal ends the process, or the process handles the signal."""
        return (-self.signal,) if self.signal == signal.SIGKILL else (-self.signal, 128 + self.signal)


def _run(
    flags_by_process: Sequence[Sequence[str]],
    cache_folder: Path,
    timed_signal: TimedSignal | None,
    float64: bool,
) -> tuple[int, float]:
    """Runs `fdg.train` in forks of this process, and sends them the signal.

    Returns:
      The exit status, and the CPU seconds, as mean over processes. The status is that of the first failed
      process among those that got the signal, else among all processes; 0 if none failed; -1 if one hangs.
    """
    cache = ["--program-cache", str(cache_folder.absolute())]
    children = [_fork([*flags, *cache], float64) for flags in flags_by_process]
    targets = children
    if timed_signal is not None and timed_signal.process is not None:
        targets = [children[timed_signal.process]]
    statuses, cpu_seconds, start_time = {}, dict.fromkeys(children, 0.0), time.monotonic()
    hangs = False
    while len(statuses) < len(children):
        running = [child for child in children if child not in statuses]
        for child in running:
            cpu_seconds[child] = max(cpu_seconds[child], cpu_seconds_of(child))
            ended, code = os.waitpid(child, os.WNOHANG)
            if ended:
                statuses[child] = os.waitstatus_to_exitcode(code)
        used = sum(cpu_seconds.values()) / len(cpu_seconds)
        if timed_signal is not None and used >= timed_signal.moment:
            running = list(set(targets) - statuses.keys())
            receivers = _workers_of(running)[:1] if timed_signal.to_worker else running
            for receiver in receivers:
                os.kill(receiver, timed_signal.signal)
            timed_signal = None if receivers else timed_signal
        if time.monotonic() - start_time > _PATIENCE:
            hangs = True
            for child in set(children) - statuses.keys():
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    status = next((statuses[child] for child in (*targets, *children) if statuses[child]), 0)
    return -1 if hangs else status, sum(cpu_seconds.values()) / len(cpu_seconds)


def _workers_of(children: Sequence[int]) -> list[int]:
    """The process ids of the environments' workers of these processes."""
    return [
        pid
        for child in children
        for pid, line in descendants(child).items()
        if any(word.endswith("gymnasium_worker.py") for word in line)
    ]


def _fork(flags: Sequence[str], float64: bool) -> int:
    """Runs `fdg.train` in a fork of this process; returns the id of the fork."""
    import jax

    import algos  # noqa: F401
    import envs  # noqa: F401
    from fdg import ctrl_c
    from fdg.commands import cli, parse  # noqa: F401
    from fdg.training import loop  # noqa: F401

    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        jax.config.update("jax_enable_x64", float64)
        with open(os.devnull, "w") as nowhere, (FOLDER / "errors.txt").open("a") as log:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(log.fileno(), 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
        ctrl_c.install()
        os._exit(cli.train_main(flags))
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(70)
