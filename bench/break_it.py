"""Trying to break it: random command lines, kills, Ctrl-C and damaged files, each by its number.

    python -m bench.break_it flags --count 10000     in process: each is a run, or one clear line and status 2
    python -m bench.break_it kills --count 34        kill -9, three times each, resumed: not a bit differs
    python -m bench.break_it losses --count 24       one of two processes lost: named, none left, resumed
    python -m bench.break_it interrupts --count 50   Ctrl-C from the first moment on: status 130 in 2 s
    python -m bench.break_it bytes                   one bit in each file of a run: nothing is loaded silently
    python -m bench.break_it configs --count 50      config.json edited by hand: one clear line, or a run

What was done is in build/break_it/: started again, each goes on where it was. `--only 17` replays one.
"""

import argparse
import contextlib
import gc
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.extend.backend import clear_backends

from bench.break_it_interrupts import interrupts
from bench.break_it_kills import KEPT, kills, kills_told
from bench.break_it_losses import losses
from fdg.commands import calibrate, cli, launch, using
from fdg.costs import machine
from fdg.launching import on_ray
from fdg.launching.ending import Ending

_UNSAID = getattr(jax.config, "jax_num_cpu_devices")  # noqa: B009 - not declared by every version
SECONDS = 120  # of work, in which a command line is done


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
    if arguments.what == "kills":
        print(kills_told())
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
    with tempfile.TemporaryDirectory() as folder, _inside(folder), _at_once(folder):
        if any(word in str(words) for word in ("run", "damaged")):
            lay_out(Path(folder), finished)
        with contextlib.redirect_stdout(streams.out), contextlib.redirect_stderr(streams.err):
            if command == "train":
                _as_if_new()
            for which in (signal.SIGPROF, signal.SIGALRM):
                signal.signal(which, _hangs)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.alarm(20 * SECONDS)  # what waits for ever
            try:
                wrong = outcome(_main_of(command), words, streams)
            except TimeoutError:
                wrong = f"it was not done in {SECONDS} s of work"
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.alarm(0)
        configs = [path for path in Path(folder).rglob("config.json") if path.parent.name != "damaged"]
        left = [str(path) for path in configs if not (path.parent / "summary.json").exists()]
        if wrong is None and left:
            wrong = f"half a run is left: {left}"
    return None if wrong is None else f"{command} {words}: {wrong}"[:2000]


def _main_of(command: str) -> Callable[[list[str]], int]:
    mains = {"train": cli.train_main, "plan": cli.plan_main, "evaluate": using.evaluate_main}
    mains |= {"play": using.play_main, "export": using.export_main, "plot": using.plot_main}
    mains |= {"launch": launch.main, "calibrate": calibrate.calibrate_main}
    return mains[command]


def _as_if_new() -> None:
    """Has each command line make the host devices that it asks for."""
    gc.collect()
    if not jax.live_arrays():
        clear_backends()
        jax.config.update("jax_num_cpu_devices", _UNSAID)


class _PlansOnly:
    """An engine of `fdg launch` that plans what it should run."""

    def __init__(self, *_: Any):
        pass

    def reserve(self, first: bool) -> int:
        return 2 if first else 1

    def run(self, words: Sequence[str]) -> Ending:
        return Ending(cli.plan_main(words))

    def close(self) -> None:
        pass


def _rough(*_: Any) -> machine.Calibration:
    """What stands in for two minutes of measuring."""
    kind, here = machine.REFERENCE, machine.fingerprint("cpu")
    return machine.Calibration(here, kind, machine.SHARED_MEMORY, machine.SOCKETS, 2)


@contextlib.contextmanager
def _at_once(folder: str) -> Iterator[None]:
    """Nothing is started or measured, and what is kept for a user is kept in a folder."""
    with (
        mock.patch.object(launch, "Here", _PlansOnly),
        mock.patch.object(on_ray, "OnRay", _PlansOnly),
        mock.patch.object(calibrate, "calibrate", _rough),
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder}),
    ):
        yield


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


# --- damaged files ---


def _finished() -> Path:
    run = KEPT / "finished"
    if not (run / "summary.json").exists():
        shutil.rmtree(run, ignore_errors=True)
        words = (
            f"--devices 1 --num-envs 4 --num-steps 32 --total-steps 2560 --checkpoint-every 10 --out {run}"
        )
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
        command = [sys.executable, "-m", "fdg.train", *words.split(), "--eval-episodes", "0"]
        subprocess.run(command, env=environment, check=True, capture_output=True)
    return run


def _resumed(change: Callable[[Path], str], silent: Callable[[Path, str], bool]) -> str | None:
    """A finished run without its summary, something changed, is resumed in this process."""
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
    "losses": losses,
    "interrupts": interrupts,
    "bytes": bytes_,
    "configs": configs,
}

if __name__ == "__main__":
    raise SystemExit(main())
