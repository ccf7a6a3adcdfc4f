"""Kill -9 at random moments, for `bench.break_it`: what goes on from there ends as if nothing had happened.

What is killed is a copy (`os.fork`) of a process that has imported everything and started nothing: a machine
imports JAX once, not four hundred times. Moments are of the work that a process has done itself, not of the
clock, which says little on a machine with other work: its user and system time.

Two numbers in three go on where they were, and not a bit may differ from a run left alone. Every third goes
on under other policies and numbers of devices, drawn for each start: floats within 1e-5 of their array's
largest (or of 1), all else the same. Two numbers in six find no compiled programs at their first start. What
each kill met is in build/break_it/killed.jsonl.
"""

import collections
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

KEPT = Path("build", "break_it")
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


class Killed:
    """What is killed.

    Attributes:
      flags: of the run.
      elsewhere: placements under which it goes on as well.
    """

    def __init__(self, flags: str, elsewhere: Sequence[str] = _ANYWHERE):
        self.flags = flags if "--devices" in flags else f"{flags} --devices 1"
        self.elsewhere = elsewhere


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
    "processes": Killed(f"--devices 2 {_SMALL}", ("--devices 1", "--devices 4", *_ANYWHERE[2:])),
}
KILLS = 3  # of each number
COMMON = ("--eval-episodes", "0", "--checkpoint-every", "2")
_CLOSE = 1e-5
_PATIENCE = 600.0  # seconds of the clock, after which a process that does not end hangs
_TICK = os.sysconf("SC_CLK_TCK")


def kills(number: int) -> str | None:
    """A run killed at random moments, and resumed each time: its last state is that of one left alone."""
    kind = list(KILLED)[number % len(KILLED)]
    moves, cold = number % 3 == 2, number % 6 > 3
    programs = KEPT / "programs"
    whole, work = _left_alone(kind, programs)
    if isinstance(work, str):
        return work
    draw = random.Random(number)
    told, killed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        if cold:
            programs, work = Path(folder, "programs"), 2 * work  # compiling is half of it
        while killed < KILLS:
            placed = _placed(kind, run, draw.choice(KILLED[kind].elsewhere) if moves else "")
            moment = draw.uniform(0.0, work)
            status, worked_for = _started(placed, programs, moment)
            if status not in (0, -signal.SIGKILL):
                return f"{kind}, {placed}, to be killed after {moment:.2f} s: status {status}"
            if status:
                killed += 1
                told.append({"number": number, "kind": kind, "cold": cold, "moves": moves, "after": moment})
                told[-1]["met"] = _met(run)
            else:
                work = worked_for  # what is left is less than that
                if (run / "summary.json").exists():
                    shutil.rmtree(run)
        placed = _placed(kind, run, draw.choice(KILLED[kind].elsewhere) if moves else "")
        status, _ = _started(placed, programs, None)
        if status:
            return f"{kind}, {placed}, at last: status {status}"
        differing = in_a_copy(difference, run.absolute(), whole.absolute(), _CLOSE if moves else 0.0)
    with (KEPT / "killed.jsonl").open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in told)
    return f"{kind}, {'moved, ' * moves}killed: {differing}"[:2000] if differing else None


def kills_told() -> str:
    """How many kills there were, and what they met."""
    with contextlib.suppress(FileNotFoundError):
        told = [json.loads(line) for line in (KEPT / "killed.jsonl").read_text().splitlines()]
        met = collections.Counter(f"{one['met']}{', moved' * one['moves']}" for one in told)
        return f"{len(told)} kills: " + "; ".join(f"{n} {what}" for what, n in sorted(met.items()))
    return "no kills"


def _left_alone(kind: str, programs: Path) -> tuple[Path, Any]:
    """The run that nobody kills, and the work that it is once its programs are there; or what went wrong."""
    whole = KEPT / "whole" / kind
    if not (whole / "work.json").exists():
        work = 0.0
        for _ in range(2):
            shutil.rmtree(whole, ignore_errors=True)
            status, work = _started(_placed(kind, whole, ""), programs, None)
            if status:
                return whole, f"{kind}, left alone: status {status}"
        (whole / "work.json").write_text(json.dumps(work))
    return whole, json.loads((whole / "work.json").read_text())


def _placed(kind: str, run: Path, elsewhere: str) -> list[list[str]]:
    """The words of each process that begins a run, or goes on with it (`elsewhere`, if that is said)."""
    exists = (run / "config.json").exists()
    if exists and elsewhere:
        return [["--resume", str(run), "--eval-episodes", "0", *elsewhere.split()]]
    common = [*KILLED[kind].flags.split(), *COMMON, "--resume" if exists else "--out", str(run)]
    if kind != "processes":
        return [common]
    joined = ["--coordinator-address", f"localhost:{_free_port()}", "--num-processes", "2", "--process-id"]
    return [[*common, *joined, str(i)] for i in range(2)]


def _met(run: Path) -> str:
    """What a process that was killed was at, by what it left."""
    if not (run / "config.json").exists():
        return "before the run began"
    left = list((run / "checkpoints").glob("*")) if (run / "checkpoints").is_dir() else []
    if any(path.suffix == ".writing" for path in left):
        return "a checkpoint half written"
    if any(path.suffix == ".removed" for path in left):
        return "a checkpoint half removed"
    return "between checkpoints" if left else "before the first checkpoint"


def difference(run: Path, whole: Path, tolerance: float) -> str | None:
    """Where the state and the metrics of two runs differ by more than the tolerance; None if nowhere."""
    mine, theirs = _arrays(run), _arrays(whole)
    if mine.keys() != theirs.keys():
        return f"the arrays are others: {sorted(mine.keys() ^ theirs.keys())[:3]}"
    for name, want in theirs.items():
        have = mine[name]
        if have.dtype != want.dtype or have.shape != want.shape:
            return f"{name} is {have.dtype}{list(have.shape)}, and was {want.dtype}{list(want.shape)}"
        if have.tobytes() == want.tobytes():
            continue
        if not tolerance or not np.issubdtype(want.dtype, np.floating):
            return f"{name} differs in {np.sum(have != want)} of {want.size}"
        apart = _apart_by(have, want)
        if apart > tolerance:
            return f"{name} differs by {apart:.2g}"
    rows = [_rows(one) for one in (run, whole)]
    if len(rows[0]) != len(rows[1]):
        return f"metrics.jsonl has {len(rows[0])} rows, and had {len(rows[1])}"
    for have, want in zip(*rows, strict=True):
        for name in have.keys() | want.keys():
            values = have.get(name), want.get(name)
            floats = all(isinstance(value, float) for value in values)
            close = tolerance and floats and _apart_by(*map(np.asarray, values)) <= tolerance
            if values[0] != values[1] and not close:
                return f"metrics.jsonl, iteration {want['iteration']}: {name} is {values[0]}, was {values[1]}"
    return None


def _apart_by(have: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, of the largest element or of 1; infinite where not-a-numbers differ."""
    if (np.isnan(have) != np.isnan(want)).any():
        return float("inf")
    scale = max(1.0, float(np.nanmax(np.abs(want), initial=0.0)))
    return float(np.nanmax(np.abs(have - want), initial=0.0)) / scale


def _started(groups: Sequence[Sequence[str]], programs: Path, moment: float | None) -> tuple[int, float]:
    """Runs `fdg.train` in copies of this process, killed once they have worked for `moment` seconds.

    Returns:
      The status of the first that failed, or 0, and the seconds of work.
    """
    cache = ["--program-cache", str(programs.absolute())]
    children = [_copy([*words, *cache]) for words in groups]
    status, work, begun = 0, dict.fromkeys(children, 0.0), time.monotonic()
    running = set(children)
    while running:
        for child in [*running]:
            work[child] = max(work[child], worked(child))
            found, code = os.waitpid(child, os.WNOHANG)
            if found:
                running.discard(child)
                status = status or os.waitstatus_to_exitcode(code)
        if moment is not None and sum(work.values()) / len(work) >= moment:
            _kill(running)  # all of them in one moment, as a machine that loses its power
            moment = None
        if time.monotonic() - begun > _PATIENCE:
            _kill(running)
            status = status or -1
        time.sleep(0.005)
    return status, sum(work.values()) / len(work)


def _kill(children: set[int]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _copy(words: Sequence[str]) -> int:
    """A copy of this process that becomes `fdg.train`; its id."""
    import algos  # noqa: F401
    import envs  # noqa: F401
    from fdg.commands import cli, parse  # noqa: F401
    from fdg.training import loop  # noqa: F401

    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        with open(os.devnull, "w") as nowhere, (KEPT / "said.txt").open("a") as said:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(said.fileno(), 2)
        os._exit(cli.train_main(words))
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(70)


def in_a_copy(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives, called in a copy of this process, which starts no backend so."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(writer, "w") as file:
            try:
                json.dump(function(*arguments), file)
            except BaseException as error:
                json.dump(f"{type(error).__name__}: {error}", file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(child, 0)
    return json.loads(said)


def _arrays(run: Path) -> dict[str, np.ndarray]:
    from fdg.training.checkpoint import Checkpoints

    checkpoints = Checkpoints(run / "checkpoints")
    latest = checkpoints.latest()
    assert latest is not None
    return checkpoints.arrays(latest)


def _rows(run: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` without their times."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: x for name, x in row.items() if name not in ("wall_s", "steps_per_s")} for row in rows]


def worked(process: int) -> float:
    """Seconds of user and system time that a process has had; 0 once it is gone."""
    try:
        fields = Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICK


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])
