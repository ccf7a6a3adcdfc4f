"""Damaged files of a finished run, which is resumed: nothing is loaded silently."""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fdg.commands import cli
from tools.break_it.processes import KEPT


class Streams:
    """pytest's `capsys`, outside of pytest."""

    def __init__(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()

    def readouterr(self) -> Any:
        said = argparse.Namespace(out=self.out.getvalue(), err=self.err.getvalue())
        for stream in (self.out, self.err):
            stream.seek(0)
            stream.truncate()
        return said


def finished() -> Path:
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
    streams = Streams()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        shutil.copytree(finished(), run)
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
    newest = max((finished() / "checkpoints").iterdir(), key=lambda path: int(path.name))
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    if number >= len(files):
        return None
    name = files[number].relative_to(finished())

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
