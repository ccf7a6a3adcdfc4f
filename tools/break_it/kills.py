"""Kill -9 at random moments: what continues from there ends as if nothing had happened.

Streams get SIGTERM and Ctrl-C between the kills, too; of two processes all are killed, or one.

What is killed is a copy (`os.fork`) of a process that has imported everything and started nothing: a machine
imports JAX once, not four hundred times. Moments are of the work that a process has done itself, not of the
clock, which says little on a machine with other work: its user and system time.

Two numbers in three continue where they were, and not a bit may differ from a run left alone. Every third
continues under other policies and numbers of devices, drawn for each start: floats within a tolerance of
their array's largest (or of 1), all else the same. Two numbers in six find no compiled programs at their
first start.
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

# What is killed: flags, under which a run is some seconds of work, and writes thirty checkpoints.
# Step sizes are at most 1e-3: with 1e-2 a last digit of the first parameters, or a sum in another order,
# grows to 1e-5 and more within sixty iterations, on one device too, and would hide what is looked for.
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
    """What is killed.

    Attributes:
      flags: of the run; one device unless they say so.
      first: further flags of its first start, which a resumed run does not take.
      elsewhere: placements under which it continues as well.
      in_float64: where it continues elsewhere: tokens that are drawn hang on the last digits.
      signals: what each number gets, one after the other.
      processes: of the run.
      alone: whether one process of several gets a signal, drawn for each, or all do.
    """

    flags: str
    elsewhere: Sequence[str] = _ANYWHERE
    in_float64: bool = False
    first: str = ""
    signals: Sequence[signal.Signals] = (signal.SIGKILL,) * 3
    processes: int = 1
    alone: bool = False

    @property
    def words(self) -> list[str]:
        return f"{self.flags}{'' if '--devices' in self.flags else ' --devices 1'}".split()


KILLED: Mapping[str, Killed] = {
    "ppo": Killed(_SMALL),
    "dqn": Killed(
        "--algo dqn --num-envs 4 --hidden 8 --total-steps 1920 --learning-starts 300 --buffer-size 1000"
    ),
    # A minibatch of it is one environment of four, which no learners divide among themselves.
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
        f"--algo {words} {_TEXT.replace('counted', 'counted?max_response=12')} --group-size 2"
        " --total-steps 480",
        (),
        first="--preset none",
        signals=_ALL,
        processes=processes,
        alone=processes > 1,
    )
    for name, processes, words in (
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
_MANY = 16  # processes of one machine, a host device each
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
_PATIENCE = 600.0  # seconds of the clock, after which a process that does not end hangs


def kills(number: int, kinds: Mapping[str, Killed] = KILLED, check: str = "kills") -> str | None:
    """A run killed at random moments, and resumed each time: its last state is that of one left alone."""
    kind = list(kinds)[number % len(kinds)]
    killed, cold = kinds[kind], number % 6 > 3
    moves = bool(killed.elsewhere) and number % 3 == 2
    float64 = moves and killed.in_float64
    programs = KEPT / "programs"
    whole = KEPT / "whole" / f"{kind.replace(' ', '-')}{'-float64' * float64}"
    work: Any = _left_alone(killed, whole, programs, float64)
    if isinstance(work, str):
        return f"{kind}, left alone: {work}"
    draw, left = random.Random(number), list(killed.signals)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        if cold:
            programs, work = Path(folder, "programs"), 2 * work  # compiling is half of it
        while True:
            placed = _placed(killed, run, draw.choice(killed.elsewhere) if moves else "")
            end = Ending(left[0], draw.uniform(0.0, work)) if left else None
            if end and killed.alone:
                end = dataclasses.replace(end, to=draw.randrange(killed.processes))
            status, worked_for = _started(placed, programs, end, float64)
            if status not in (0, *(end.statuses if end else ())):
                return f"{kind}, {placed}, at {end}: status {status}"
            if not left:
                break
            if status:
                how = "" if end.signal == signal.SIGKILL else f"{end.signal.name}, "
                note(check, number, f"{how}{_met(run)}{', moved' * moves}", kind=kind, cold=cold)
                left.pop(0)
            else:
                work = worked_for  # what is left is less than that
                if (run / "summary.json").exists():
                    shutil.rmtree(run)
        tolerance = (1e-12 if float64 else 1e-5) if moves else 0.0
        differing = forked(lambda: wrong(run.absolute(), whole.absolute(), tolerance))
    return f"{kind}, {'moved, ' * moves}killed: {differing}"[:2000] if differing else None


def _left_alone(killed: Killed, whole: Path, programs: Path, float64: bool) -> float | str:
    """The work of a run that nobody kills, once its programs are there; or what went wrong."""
    if not (whole / "work.json").exists():
        work = 0.0
        for _ in range(2):
            shutil.rmtree(whole, ignore_errors=True)
            status, work = _started(_placed(killed, whole, ""), programs, None, float64)
            if status:
                return f"status {status}"
        (whole / "work.json").write_text(json.dumps(work))
    return float(json.loads((whole / "work.json").read_text()))


def _placed(killed: Killed, run: Path, elsewhere: str) -> list[list[str]]:
    """The words of each process that begins a run, or continues it (`elsewhere`, if that is said)."""
    from fdg.processes.ports import free_port

    exists = (run / "config.json").exists()
    if exists and elsewhere:
        return [["--resume", str(run), "--eval-episodes", "0", "--trust", *elsewhere.split()]]
    where = ["--trust", "--resume"] if exists else [*killed.first.split(), "--out"]
    common = [*killed.words, *COMMON, *where, str(run)]
    if (count := killed.processes) == 1:
        return [common]
    cluster = ["--coordinator-address", f"localhost:{free_port('localhost')}", "--num-processes", str(count)]
    return [[*common, *cluster, "--process-id", str(i)] for i in range(count)]


def _met(run: Path) -> str:
    """What a process that was killed was at, by what it left."""
    if not (run / "config.json").exists():
        return "before the run began"
    left = [path.suffix for path in (run / "checkpoints").glob("*")]
    if ".writing" in left:
        return "a checkpoint half written"
    if ".removed" in left:
        return "a checkpoint half removed"
    return "between checkpoints" if left else "before the first checkpoint"


@dataclasses.dataclass(frozen=True)
class Ending:
    """What a run gets.

    Attributes:
      signal: as the operating system has it.
      moment: seconds of work, on the mean of its processes, before that.
      to: which process; None for all, as of a machine that loses its power.
    """

    signal: signal.Signals
    moment: float
    to: int | None = None

    @property
    def statuses(self) -> tuple[int, ...]:
        """Of the process that got it: ended by the system, or, if it may look at the signal, by itself."""
        return (-self.signal,) if self.signal == signal.SIGKILL else (-self.signal, 128 + self.signal)


def _started(
    groups: Sequence[Sequence[str]], programs: Path, end: Ending | None, float64: bool
) -> tuple[int, float]:
    """Runs `fdg.train` in copies of this process, which may be ended.

    Returns:
      The status of the first that got the signal and failed, else of the first that failed, or 0; -1 where
      one hangs; and the seconds of work.
    """
    cache = ["--program-cache", str(programs.absolute())]
    children = [_copy([*words, *cache], float64) for words in groups]
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


def _copy(words: Sequence[str], float64: bool) -> int:
    """A copy of this process that becomes `fdg.train`; its id."""
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
        os._exit(cli.train_main(words))
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(70)
