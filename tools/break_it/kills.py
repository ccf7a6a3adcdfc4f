"""Kill -9 at random moments: the resumed run must end like an undisturbed run.

Streams also get SIGTERM and Ctrl-C between the kills; of several processes all are killed, or one.

The victims are forks of a process that has imported everything and started nothing, so that JAX is imported
once, not four hundred times. Moments are CPU times of the process: on a busy machine the clock says little.

Two tries in three resume on the same devices, and all bits must be equal. Every third resumes with random
policies and numbers of devices: floats must be equal within a tolerance relative to their array's largest (or
to 1), all else exactly. Two tries in six have no compiled programs at their first start.
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
from tools.break_it.comparing import wrong
from tools.break_it.processes import KEPT, note, worked

# Flags of runs with some seconds of CPU time, and thirty checkpoints. Learning rates are at most 1e-3: with
# 1e-2, a rounding difference grows to 1e-5 and more within sixty iterations, and would hide errors.
_SMALL = "--num-envs 4 --num-steps 8 --hidden 8 --total-steps 1920"
_ANYWHERE = (
    "--devices 2",
    "--policy multi_learner --devices 4",
    "--policy single_learner_coarse --devices 3",
    "--policy single_learner_fine --devices 2",
    "--policy environments --devices 3",
    "--policy central --devices 2",
)


@dataclasses.dataclass(frozen=True)
class Killed:
    """A run to kill.

    Attributes:
      flags: its flags; it has one device unless they name a number.
      elsewhere: placements in which it may resume.
      in_float64: whether it resumes elsewhere in float64, since sampled tokens depend on the last digits.
      first: further flags of the first start, which a resumed run does not accept.
      signals: the signals, in order.
      processes: the number of its processes.
      alone: whether a signal goes to one random process, not to all.
    """

    flags: str
    elsewhere: Sequence[str] = _ANYWHERE
    in_float64: bool = False
    first: str = ""
    signals: Sequence[signal.Signals] = (signal.SIGKILL,) * 3
    processes: int = 1
    alone: bool = False

    @property
    def all_flags(self) -> list[str]:
        return f"{self.flags}{'' if '--devices' in self.flags else ' --devices 1'}".split()


KILLED: Mapping[str, Killed] = {
    "ppo": Killed(_SMALL),
    "dqn": Killed(
        "--algo dqn --num-envs 4 --hidden 8 --total-steps 1920 --learning-starts 300 --buffer-size 1000"
    ),
    # Its minibatch is one environment of four, which several learners cannot divide.
    "recurrent": Killed(f"--algo recurrent_ppo {_SMALL} --memory-size 8", (_ANYWHERE[0], *_ANYWHERE[2:])),
    "stale": Killed(
        f"--policy single_learner_coarse --devices 2 --staleness 1 {_SMALL}",
        ("--devices 1", "--devices 3", "--learners 2 --devices 4"),
    ),
    "agents": Killed(f"--num-seeds 3 {_SMALL}", ("--devices 3", "--policy multi_learner --devices 3")),
    "sweep": Killed(f"--sweep lr=1e-4,1e-3 --num-seeds 2 {_SMALL}", ("--devices 2", "--devices 4")),
    "population": Killed(
        f"--sweep lr=log:1e-4..1e-3x4 --exploit-every 5 {_SMALL}", ("--devices 2", "--devices 4")
    ),
    "processes": Killed(f"--devices 2 {_SMALL}", ("--devices 1", "--devices 4", *_ANYWHERE[2:]), processes=2),
}
# Epochs of problems end within iterations.
_TEXT = (
    "--env tools.break_it.language:counted --num-prompts 4 --dataset-size 6 --hidden-size 8"
    " --num-layers 1 --num-heads 2"
)
_PLACEMENTS = (
    "--policy colocated --devices 2",
    "--policy split --actors 2 --learners 1 --devices 3",
    "--policy standalone --actors 1 --learners 2 --references 1 --devices 4",
)
LANGUAGE: Mapping[str, Killed] = {
    algo: Killed(f"--algo {algo} {_TEXT} {more}", _PLACEMENTS, in_float64=True, first="--preset none")
    for algo, more in (
        ("sft", "--total-steps 240"),
        ("dpo", "--group-size 2 --total-steps 480"),
        ("grpo", "--group-size 2 --total-steps 480"),
        ("ppo_rlhf", "--group-size 2 --total-steps 480"),
    )
}
_ALL = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGKILL)
STREAMS: Mapping[str, Killed] = {
    name: Killed(
        f"--algo {flags} {_TEXT.replace('counted', 'counted?max_response=12')} --group-size 2"
        " --total-steps 480",
        (),
        first="--preset none",
        signals=_ALL,
        processes=processes,
        alone=processes > 1,
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
    )
}  # fmt: skip
_MANY = 16  # processes on one machine, with a host device each
MANY: Mapping[str, Killed] = {
    name: Killed(
        f"{flags} --devices {_MANY} --num-envs {_MANY} --num-steps 8 --hidden 8 --total-steps {80 * _MANY}",
        ("--devices 1",),
        signals=(signal.SIGKILL,),
        processes=_MANY,
        alone=True,
    )
    for name, flags in (
        ("ppo in many processes", "--policy gpu_only"),
        (
            "impala in many processes",
            "--algo impala --policy single_learner_coarse --learners 8 --staleness 1",
        ),
    )
}
COMMON = ("--eval-episodes", "0", "--checkpoint-every", "2")
_PATIENCE = 600.0  # seconds of wall time after which a process counts as hanging


def kills(number: int, kinds: Mapping[str, Killed] = KILLED, check: str = "kills") -> str | None:
    """Kills a run at random moments and resumes it each time; returns what went wrong, or None."""
    kind = list(kinds)[number % len(kinds)]
    killed, cold = kinds[kind], number % 6 > 3
    moves = bool(killed.elsewhere) and number % 3 == 2
    float64 = moves and killed.in_float64
    programs = KEPT / "programs"
    whole = KEPT / "whole" / f"{kind.replace(' ', '-')}{'-float64' * float64}"
    work: Any = _undisturbed_work(killed, whole, programs, float64)
    if isinstance(work, str):
        return f"{kind}, left alone: {work}"
    draw, signals = random.Random(number), list(killed.signals)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        if cold:
            programs, work = Path(folder, "programs"), 2 * work  # half of it is compilation
        while True:
            flags = _flags_by_process(killed, run, draw.choice(killed.elsewhere) if moves else "")
            end = Ending(signals[0], draw.uniform(0.0, work)) if signals else None
            if end and killed.alone:
                end = dataclasses.replace(end, to=draw.randrange(killed.processes))
            status, worked_for = _run(flags, programs, end, float64)
            if status not in (0, *(end.statuses if end else ())):
                return f"{kind}, {flags}, at {end}: status {status}"
            if not signals:
                break
            if status:
                how = "" if end.signal == signal.SIGKILL else f"{end.signal.name}, "
                note(check, number, f"{how}{_moment(run)}{', moved' * moves}", kind=kind, cold=cold)
                signals.pop(0)
            else:
                work = worked_for  # it ended before the signal: a resumed run has less work
                if (run / "summary.json").exists():
                    shutil.rmtree(run)
        tolerance = (1e-12 if float64 else 1e-5) if moves else 0.0
        differing = forked(lambda: wrong(run.absolute(), whole.absolute(), tolerance))
    return f"{kind}, {'moved, ' * moves}killed: {differing}"[:2000] if differing else None


def _undisturbed_work(killed: Killed, whole: Path, programs: Path, float64: bool) -> float | str:
    """CPU seconds of an undisturbed run with compiled programs; or what went wrong."""
    if not (whole / "work.json").exists():
        work = 0.0
        for _ in range(2):
            shutil.rmtree(whole, ignore_errors=True)
            status, work = _run(_flags_by_process(killed, whole, ""), programs, None, float64)
            if status:
                return f"status {status}"
        (whole / "work.json").write_text(json.dumps(work))
    return float(json.loads((whole / "work.json").read_text()))


def _flags_by_process(killed: Killed, run: Path, elsewhere: str) -> list[list[str]]:
    """The flags of each process that starts or resumes a run; `elsewhere`: a resumed run's placement."""
    from fdg.processes.ports import free_port

    exists = (run / "config.json").exists()
    if exists and elsewhere:
        return [["--resume", str(run), "--eval-episodes", "0", "--trust", *elsewhere.split()]]
    where = ["--trust", "--resume"] if exists else [*killed.first.split(), "--out"]
    common = [*killed.all_flags, *COMMON, *where, str(run)]
    if (count := killed.processes) == 1:
        return [common]
    cluster = ["--coordinator-address", f"localhost:{free_port('localhost')}", "--num-processes", str(count)]
    return [[*common, *cluster, "--process-id", str(i)] for i in range(count)]


def _moment(run: Path) -> str:
    """The moment of a kill, by the files of the run."""
    if not (run / "config.json").exists():
        return "before the run began"
    suffixes = [path.suffix for path in (run / "checkpoints").glob("*")]
    if ".writing" in suffixes:
        return "a checkpoint half written"
    if ".removed" in suffixes:
        return "a checkpoint half removed"
    return "between checkpoints" if suffixes else "before the first checkpoint"


@dataclasses.dataclass(frozen=True)
class Ending:
    """A signal to a run.

    Attributes:
      signal: the signal.
      moment: CPU seconds before the signal, the mean over processes.
      to: the index of its process; None for all.
    """

    signal: signal.Signals
    moment: float
    to: int | None = None

    @property
    def statuses(self) -> tuple[int, ...]:
        """Exit statuses of the process: ended by the system, or by itself if it can handle the signal."""
        return (-self.signal,) if self.signal == signal.SIGKILL else (-self.signal, 128 + self.signal)


def _run(
    flags_by_process: Sequence[Sequence[str]], programs: Path, end: Ending | None, float64: bool
) -> tuple[int, float]:
    """Runs `fdg.train` in forks of this process, which may get a signal.

    Returns:
      The exit status and the mean CPU seconds. The status is that of the first failed victim, else of the
      first failed process, or 0; -1 if a process hangs.
    """
    cache = ["--program-cache", str(programs.absolute())]
    children = [_fork([*flags, *cache], float64) for flags in flags_by_process]
    victims = children if end is None or end.to is None else [children[end.to]]
    statuses, work, begun = {}, dict.fromkeys(children, 0.0), time.monotonic()
    hangs = False
    while len(statuses) < len(children):
        running = [child for child in children if child not in statuses]
        for child in running:
            work[child] = max(work[child], worked(child))
            ended, code = os.waitpid(child, os.WNOHANG)
            if ended:
                statuses[child] = os.waitstatus_to_exitcode(code)
        if end is not None and sum(work.values()) / len(work) >= end.moment:
            for child in set(victims) - statuses.keys():
                os.kill(child, end.signal)
            end = None
        if time.monotonic() - begun > _PATIENCE:
            hangs = True
            for child in set(children) - statuses.keys():
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    status = next((statuses[child] for child in (*victims, *children) if statuses[child]), 0)
    return -1 if hangs else status, sum(work.values()) / len(work)


def _fork(flags: Sequence[str], float64: bool) -> int:
    """Runs `fdg.train` in a fork of this process; returns its id."""
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
        with open(os.devnull, "w") as nowhere, (KEPT / "said.txt").open("a") as log:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(log.fileno(), 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        ctrl_c.install()
        os._exit(cli.train_main(flags))
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(70)
