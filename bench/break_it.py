"""Trying to break it: random command lines, kills, Ctrl-C and damaged files, each by its number.

    python -m bench.break_it flags --count 10000     in process: each is a run, or one clear line and status 2
    python -m bench.break_it kills --count 100       kill -9, resumed: not a bit differs
    python -m bench.break_it interrupts --count 50   Ctrl-C from the first moment on: status 130 within 2 s
    python -m bench.break_it bytes                   one bit in each file of a run: nothing is loaded silently
    python -m bench.break_it configs --count 50      config.json edited by hand: one clear line, or a run

What was done is in build/break_it/: started again, each goes on where it was. `--only 17` replays one.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KEPT = Path("build", "break_it")
# What is killed: flags, under which a run takes a few seconds.
KILLED = {
    "ppo": "--total-steps 51200 --num-steps 32",
    "dqn": "--algo dqn --total-steps 12800 --learning-starts 1000 --buffer-size 5000",
    "recurrent": "--algo recurrent_ppo --total-steps 12800 --num-steps 16 --memory-size 16 --hidden 16",
    "stale": "--policy single_learner_coarse --devices 2 --staleness 1 --total-steps 12800 --num-steps 16",
    "agents": "--num-seeds 3 --total-steps 12800 --num-steps 16",
    "sweep": "--sweep lr=1e-3,1e-2 --num-seeds 2 --total-steps 12800 --num-steps 16",
    "population": "--sweep lr=log:1e-4..1e-2x4 --exploit-every 20 --total-steps 12800 --num-steps 16",
    "processes": "--total-steps 12800 --num-steps 16",
}
SECONDS = 120


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=CHECKS)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--only", type=int)
    arguments = parser.parse_args()
    if arguments.only is not None:
        print(CHECKS[arguments.what](arguments.only) or "nothing is wrong")
        return 0
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{arguments.what}.jsonl"
    done = {}
    if path.exists():
        done = {row["number"]: row["wrong"] for row in map(json.loads, path.read_text().splitlines())}
    with path.open("a") as file:
        for number in range(arguments.count):
            if number in done:
                continue
            done[number] = CHECKS[arguments.what](number)
            file.write(json.dumps({"number": number, "wrong": done[number]}) + "\n")
            file.flush()
            if done[number]:
                print(f"{number}: {done[number]}", flush=True)
    wrong = {number: text for number, text in done.items() if text and number < arguments.count}
    print(f"{arguments.what}: {len(wrong)} of {min(len(done), arguments.count)} went wrong ({path})")
    return int(bool(wrong))


# --- command lines ---


class _Streams:
    """pytest's `capsys`, outside of pytest."""

    def __init__(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()

    def readouterr(self) -> Any:
        said = argparse.Namespace(out=self.out.getvalue(), err=self.err.getvalue())
        for stream in (self.out, self.err):
            stream.seek(0)
            stream.truncate()
        return said


def flags(number: int) -> str | None:
    """One random command line: planned, or where it is short, run; or one that uses a finished run."""
    from tests.commands.any_flags import draw_line, lay_out, outcome

    command, words = draw_line(random.Random(number))
    streams = _Streams()
    finished = _finished().absolute()
    with tempfile.TemporaryDirectory() as folder, _inside(folder):
        if any(word in str(words) for word in ("run", "damaged")):
            lay_out(Path(folder), finished)
        with contextlib.redirect_stdout(streams.out), contextlib.redirect_stderr(streams.err):
            signal.signal(signal.SIGALRM, _hangs)
            signal.alarm(SECONDS)
            try:
                wrong = outcome(_main_of(command), words, streams)
            except TimeoutError:
                wrong = f"it was not done in {SECONDS} s"
            finally:
                signal.alarm(0)
        configs = [path for path in Path(folder).rglob("config.json") if path.parent.name != "damaged"]
        left = [str(path) for path in configs if not (path.parent / "summary.json").exists()]
        if wrong is None and left:
            wrong = f"half a run is left: {left}"
    return None if wrong is None else f"{command} {words}: {wrong}"[:2000]


def _main_of(command: str) -> Callable[[list[str]], int]:
    from fdg.commands import cli, using

    mains = {"train": cli.train_main, "plan": cli.plan_main, "evaluate": using.evaluate_main}
    mains |= {"play": using.play_main, "export": using.export_main, "plot": using.plot_main}
    return mains[command]


def _hangs(*_: Any) -> None:
    raise TimeoutError


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# --- processes ---


def _command(kind: str, *more: str) -> list[str]:
    module = (
        ["fdg.launch", "--num-processes", "2", "--devices", "2"] if kind == "processes" else ["fdg.train"]
    )
    common = ["--eval-episodes", "0", "--checkpoint-every", "10"]
    devices = [] if kind in ("processes", "stale") else ["--devices", "1"]
    return [sys.executable, "-m", *module, *KILLED[kind].split(), *common, *devices, *more]


def _environment() -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}


def _arrays(run: Path) -> dict[str, bytes]:
    from fdg.training.checkpoint import Checkpoints

    checkpoints = Checkpoints(run / "checkpoints")
    latest = checkpoints.latest()
    assert latest is not None
    return {name: value.tobytes() for name, value in checkpoints.arrays(latest).items()}


def kills(number: int) -> str | None:
    """A run killed three times at random moments, and resumed: its last state is that of one left alone."""
    kind = list(KILLED)[number % len(KILLED)]
    whole = KEPT / "whole" / kind
    if not (whole / "summary.json").exists():
        shutil.rmtree(whole, ignore_errors=True)
        subprocess.run(
            _command(kind, "--out", str(whole)), env=_environment(), check=True, capture_output=True
        )
    draw = random.Random(number)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        for _ in range(3):
            go_on = ["--resume", str(run)] if (run / "config.json").exists() else ["--out", str(run)]
            silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            words = _command(kind, *go_on)
            started = subprocess.Popen(words, env=_environment(), start_new_session=True, **silent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(draw.uniform(0.5, 20.0))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()
        go_on = ["--resume", str(run)] if (run / "config.json").exists() else ["--out", str(run)]
        last = subprocess.run(_command(kind, *go_on), env=_environment(), capture_output=True, text=True)
        if last.returncode:
            return f"{kind}: {last.stderr[-500:]}"
        mine, theirs = _arrays(run), _arrays(whole)
        differing = [name for name in theirs if mine.get(name) != theirs[name]]
        return f"{kind}: {differing[:3]} differ" if differing or mine.keys() != theirs.keys() else None


def interrupts(number: int) -> str | None:
    """Ctrl-C at a random moment of the first ten seconds: status 130 within two, and how to go on."""
    draw = random.Random(number)
    with tempfile.TemporaryDirectory() as folder:
        command = _command("ppo", "--num-envs", str(4 + number), "--out", str(Path(folder, "run")))
        environment = {**_environment(), "JAX_COMPILATION_CACHE_DIR": folder}  # so that it compiles
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        moment = draw.uniform(0.05, 10.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(moment)
            return None  # it was done before
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        try:
            said, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return f"after {moment:.2f} s: swallowed"
        seconds = time.monotonic() - begun
        # Before Python has begun to run anything of ours, the operating system ends it.
        ended = process.returncode == 130 or (process.returncode == -signal.SIGINT and moment < 0.3)
        if not ended or seconds > 2.0 or ("interrupted" not in said and process.returncode == 130):
            return f"after {moment:.2f} s: status {process.returncode} in {seconds:.2f} s: {said[-300:]}"
        if Path(folder, "run", "config.json").exists() and "go on with --resume" not in said:
            return f"after {moment:.2f} s: it does not say how to go on: {said[-300:]}"
    return None


def _finished() -> Path:
    run = KEPT / "finished"
    if not (run / "summary.json").exists():
        shutil.rmtree(run, ignore_errors=True)
        words = _command("ppo", "--total-steps", "2560", "--out", str(run))
        subprocess.run(words, env=_environment(), check=True, capture_output=True)
    return run


def _resumed(change: Callable[[Path], str], silent: Callable[[Path, str], bool]) -> str | None:
    """A finished run without its summary, something changed, is resumed in this process."""
    from fdg.commands import cli

    streams = _Streams()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        shutil.copytree(_finished(), run)
        (run / "summary.json").unlink()
        what = change(run)
        with contextlib.redirect_stdout(streams.out), contextlib.redirect_stderr(streams.err):
            try:
                status = cli.train_main(["--resume", str(run)])
            except Exception as error:
                return f"{what}: {type(error).__name__}: {error}"[:500]
        lines = streams.readouterr().err.splitlines()
        if (
            len(lines) > 1
            or status not in (0, 2)
            or (status == 2) != (lines[:1] != [] and "error" in lines[0])
        ):
            return f"{what}: status {status}: {lines}"[:500]
        return f"{what}: nothing was said" if not lines and silent(run, what) else None


def bytes_(number: int) -> str | None:
    """One bit flipped in file `number` of the newest checkpoint: it is not loaded, and that is said."""
    newest = max((_finished() / "checkpoints").iterdir(), key=lambda path: int(path.name))
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    if number >= len(files):
        return None
    name = files[number].relative_to(_finished())

    def flip(run: Path) -> str:
        content = bytearray((run / name).read_bytes())
        at = random.Random(number).randrange(len(content))
        content[at] ^= 1 << number % 8
        (run / name).write_bytes(content)
        return f"{name}, byte {at}"

    return _resumed(flip, lambda *_: True)


def configs(number: int) -> str | None:
    """One value of config.json replaced by something else."""
    draw = random.Random(number)
    odd = [
        None,
        True,
        -1,
        0,
        1.5,
        1e400,
        10**30,
        "",
        "ppo",
        "nan",
        [],
        [1, "a"],
        {},
        {"a": []},
        "\x00",
        "a:b",
    ]

    def edit(run: Path) -> str:
        path = run / "config.json"
        config = json.loads(path.read_text())
        part = draw.choice([config, config, config["hyperparameters"], config["policy_fields"]])
        key = draw.choice([*part, "strange"])
        part[key] = draw.choice(odd)
        path.write_text(json.dumps(config))
        return f"{key} = {part[key]!r}"

    return _resumed(edit, lambda *_: False)


CHECKS: dict[str, Callable[[int], str | None]] = {
    "flags": flags,
    "kills": kills,
    "interrupts": interrupts,
    "bytes": bytes_,
    "configs": configs,
}

if __name__ == "__main__":
    raise SystemExit(main())
