"""Random command lines, in process: each is a run, or one clear line and status 2."""

import contextlib
import gc
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.extend.backend import clear_backends

from fdg.commands import calibrate_machine, cli, launch_processes, using
from fdg.costs import machine
from fdg.launching import on_ray
from fdg.launching.restarting import Ending
from tools.break_it.processes import KEPT

_UNSAID = getattr(jax.config, "jax_num_cpu_devices")  # noqa: B009 - not declared by every version
SECONDS = 120  # of work, in which a command line is done
MAINS: Mapping[str, Callable[[list[str]], int]] = {
    "train": cli.train_main,
    "plan": cli.plan_main,
    "launch": launch_processes.main,
    "calibrate": calibrate_machine.main,
    **using.COMMANDS,
    "diff": using.COMMANDS["diff"],
}


def flags(number: int) -> str | None:
    """One random command line: planned, or where it is short, run; or one that uses a finished run."""
    from tests.commands.any_flags import draw_line, lay_out, outcome

    command, words = draw_line(random.Random(number))
    out, errors = io.StringIO(), io.StringIO()
    run = _finished().absolute()
    # As pytest's `capsys`, of which `outcome` reads the errors once the command is done.
    captured = types.SimpleNamespace(readouterr=lambda: types.SimpleNamespace(err=errors.getvalue()))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), _at_once(folder):
        if any(word in str(words) for word in ("run", "damaged")):
            lay_out(Path(folder), run)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            if command == "train":
                _as_if_new()
            for which in (signal.SIGPROF, signal.SIGALRM):
                signal.signal(which, _hangs)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.alarm(20 * SECONDS)  # what waits for ever
            try:
                wrong = outcome(MAINS[command], words, captured)
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


def _finished() -> Path:
    run = KEPT / "finished"
    if not (run / "summary.json").exists():
        shutil.rmtree(run, ignore_errors=True)
        words = "--devices 1 --num-envs 4 --num-steps 32 --total-steps 2560 --checkpoint-every 10"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
        command = [sys.executable, "-m", "fdg.train", *words.split(), "--eval-episodes", "0", "--out", run]
        subprocess.run(command, env=environment, check=True, capture_output=True)
    return run


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
        mock.patch.object(launch_processes, "Here", _PlansOnly),
        mock.patch.object(on_ray, "OnRay", _PlansOnly),
        mock.patch.object(calibrate_machine, "calibrate", _rough),
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder}),
    ):
        yield


def _hangs(*_: Any) -> None:
    raise TimeoutError
