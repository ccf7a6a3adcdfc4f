"""Kill -9 and Ctrl-C at random moments, for `bench.break_it`.

What is killed is a copy (`os.fork`) of a process that has imported everything and started nothing: a machine
imports JAX once, not four hundred times. Moments are of the work that a process has done itself, not of the
clock, which says little on a machine with other work: its user and system time.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KEPT = Path("build", "break_it")
# What is killed: flags, under which a run is some seconds of work, and writes ten checkpoints.
_SMALL = "--num-envs 4 --num-steps 8 --hidden 8 --total-steps 1920"
KILLED = {
    "ppo": _SMALL,
    "dqn": "--algo dqn --num-envs 4 --hidden 8 --total-steps 1920 --learning-starts 300 --buffer-size 1000",
    "recurrent": f"--algo recurrent_ppo {_SMALL} --memory-size 8",
    "stale": f"--policy single_learner_coarse --devices 2 --staleness 1 {_SMALL}",
    "agents": f"--num-seeds 3 {_SMALL}",
    "sweep": f"--sweep lr=1e-3,1e-2 --num-seeds 2 {_SMALL}",
    "population": f"--sweep lr=log:1e-4..1e-2x4 --exploit-every 5 {_SMALL}",
    "processes": f"--devices 2 {_SMALL}",
}
KILLS = 3  # of each run
_PATIENCE = 600.0  # seconds of the clock, after which a process that does not end hangs
_TICK = os.sysconf("SC_CLK_TCK")


def kills(number: int) -> str | None:
    """A run killed three times at random moments, and resumed: its last state is that of one left alone."""
    kind = list(KILLED)[number % len(KILLED)]
    whole = KEPT / "whole" / kind
    if not (whole / "work.json").exists():
        for _ in range(2):  # of the second, which finds its programs compiled, the work is counted
            shutil.rmtree(whole, ignore_errors=True)
            status, work = _started(kind, ["--out", str(whole)], None)
            if status:
                return f"{kind}, left alone: status {status}"
        (whole / "work.json").write_text(json.dumps(work))
    work = json.loads((whole / "work.json").read_text())
    draw = random.Random(number)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        moments = [draw.uniform(0.0, work) for _ in range(KILLS)]
        for moment in moments:
            _started(kind, _going_on(run), moment)
        status, _ = _started(kind, _going_on(run), None)
        if status:
            return f"{kind}, killed after {moments} s: status {status}"
        mine, theirs = _apart(_arrays, run), _apart(_arrays, whole.absolute())
        differing = [name for name in theirs if mine.get(name) != theirs[name]]
        if differing or mine.keys() != theirs.keys():
            return f"{kind}, killed after {moments} s: {differing[:3]} differ"
        rows = [_rows(one) for one in (run, whole)]
        return None if rows[0] == rows[1] else f"{kind}, killed after {moments} s: metrics.jsonl differs"


def _going_on(run: Path) -> list[str]:
    return ["--resume", str(run)] if (run / "config.json").exists() else ["--out", str(run)]


def _started(kind: str, words: Sequence[str], moment: float | None) -> tuple[int, float]:
    """Runs `fdg.train` in copies of this process, killed once they have worked for `moment` seconds.

    Returns:
      The status of the first that failed, or 0, and the seconds of work.
    """
    devices = [] if "--devices" in KILLED[kind] else ["--devices", "1"]
    common = [*KILLED[kind].split(), *devices, "--eval-episodes", "0", "--checkpoint-every", "6", *words]
    groups = [common]
    if kind == "processes":
        joined = [
            "--coordinator-address",
            f"localhost:{_free_port()}",
            "--num-processes",
            "2",
            "--process-id",
        ]
        groups = [[*common, *joined, str(i)] for i in range(2)]
    children = [_copy(one) for one in groups]
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


def _apart(function: Any, *arguments: Any) -> Any:
    """What a function gives, called in a copy of this process, which starts no backend so."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException), os.fdopen(writer, "w") as file:
            json.dump(function(*arguments), file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(child, 0)
    return json.loads(said)


def _arrays(run: Path) -> dict[str, str]:
    from fdg.training.checkpoint import Checkpoints

    checkpoints = Checkpoints(run / "checkpoints")
    latest = checkpoints.latest()
    assert latest is not None
    return {name: value.tobytes().hex() for name, value in checkpoints.arrays(latest).items()}


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


def interrupts(number: int) -> str | None:
    """Ctrl-C at a random moment of a run's first work: status 130 within two seconds, and how to go on.

    The moment and the two seconds are of the process's own work; what it waits for is not counted, but must
    end all the same.
    """
    draw = random.Random(number)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = ["--devices", "1", "--num-envs", str(4 + number), "--out", str(run)]
        environment = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
        environment["JAX_COMPILATION_CACHE_DIR"] = folder  # so that it compiles
        process = subprocess.Popen(
            [sys.executable, "-m", "fdg.train", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        moment = draw.uniform(0.0, 12.0)
        while worked(process.pid) < moment:
            if process.poll() is not None:
                process.communicate()
                return None  # it was done before
            time.sleep(0.005)
        before, begun = worked(process.pid), time.monotonic()
        process.send_signal(signal.SIGINT)
        after = before
        while process.poll() is None and time.monotonic() - begun < 60.0:
            after = max(after, worked(process.pid))
            time.sleep(0.005)
        if process.returncode is None:
            process.kill()
        said, _ = process.communicate()
        work, seconds = after - before, time.monotonic() - begun
        what = f"after {moment:.2f} s: status {process.returncode}, {work:.2f} s of work, {seconds:.2f} s"
        # Before Python has begun to run anything of ours, the operating system ends it.
        early = process.returncode == -signal.SIGINT and moment < 0.3
        if (process.returncode != 130 and not early) or work > 2.0:
            return f"{what}: {said[-300:]}"
        if process.returncode == 130 and "interrupted" not in said:
            return f"{what}: it does not say so: {said[-300:]}"
        if (run / "config.json").exists() and "go on with --resume" not in said:
            return f"{what}: it does not say how to go on: {said[-300:]}"
        with (KEPT / "interrupted.txt").open("a") as file:
            file.write(f"{number}: {what}\n")
    return None
