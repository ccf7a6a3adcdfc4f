"""Runs random command lines in this process: each must succeed, or fail with one line and status 2."""

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
from tools.break_it.processes import FOLDER

_DEFAULT_DEVICES = getattr(jax.config, "jax_num_cpu_devices")  # noqa: B009 - some versions lack it
SECONDS = 120  # limit of CPU time for a command line
# The function of each command; it takes arguments and returns the exit status.
MAINS: Mapping[str, Callable[[list[str]], int]] = {
    "train": cli.train_main,
    "plan": cli.plan_main,
    "launch": launch_processes.main,
    "calibrate": calibrate_machine.main,
    **using.COMMANDS,
}


def run_random_command(try_number: int) -> str | None:
    """Runs a random command line; returns what went wrong, or None."""
    from tests.commands.any_flags import draw_line, lay_out, outcome

    command, arguments = draw_line(random.Random(try_number))
    out, errors = io.StringIO(), io.StringIO()
    run = _finished_run().absolute()
    # Replaces pytest's `capsys`; `outcome` reads the errors from it.
    captured = types.SimpleNamespace(readouterr=lambda: types.SimpleNamespace(err=errors.getvalue()))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), _without_work(folder):
        if any(name in str(arguments) for name in ("run", "damaged")):
            lay_out(Path(folder), run)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            if command == "train":
                _reset_devices()
            for timer_signal in (signal.SIGPROF, signal.SIGALRM):
                signal.signal(timer_signal, _raise_timeout)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.alarm(20 * SECONDS)  # for commands that wait and use no CPU time
            try:
                failure = outcome(MAINS[command], arguments, captured)
            except TimeoutError:
                failure = f"it was not done after {SECONDS} s of CPU time"
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.alarm(0)
        configs = [path for path in Path(folder).rglob("config.json") if path.parent.name != "damaged"]
        unfinished = [str(path) for path in configs if not (path.parent / "summary.json").exists()]
        if failure is None and unfinished:
            failure = f"unfinished runs are left: {unfinished}"
    return None if failure is None else f"{command} {arguments}: {failure}"[:2000]


def _finished_run() -> Path:
    """The folder of a finished run, trained once."""
    run = FOLDER / "finished"
    if not (run / "summary.json").exists():
        shutil.rmtree(run, ignore_errors=True)
        flags = "--devices 1 --num-envs 4 --num-steps 32 --total-steps 2560 --checkpoint-every 10"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
        command = [sys.executable, "-m", "fdg.train", *flags.split(), "--eval-episodes", "0", "--out", run]
        subprocess.run(command, env=environment, check=True, capture_output=True)
    return run


def _reset_devices() -> None:
    """Clears JAX's backends, so that each command line can set its number of host devices."""
    gc.collect()
    if not jax.live_arrays():
        clear_backends()
        jax.config.update("jax_num_cpu_devices", _DEFAULT_DEVICES)


class _PlansOnly:
    """Replaces a launcher of `fdg launch` (`Here`, `OnRay`); it plans, but starts no processes."""

    def __init__(self, *_: Any):
        pass

    def reserve(self, first: bool) -> int:
        return 2 if first else 1

    def run(self, flags: Sequence[str]) -> Ending:
        return Ending(cli.plan_main(flags))

    def close(self) -> None:
        pass


def _fake_calibration(*_: Any) -> machine.Calibration:
    """Replaces a calibration, which takes two minutes."""
    kind, here = machine.UNCALIBRATED_CPU, machine.fingerprint("cpu")
    return machine.Calibration(here, kind, machine.SHARED_MEMORY, machine.SOCKETS, 2)


@contextlib.contextmanager
def _without_work(folder: str) -> Iterator[None]:
    """In this context, commands launch and measure nothing, and the user's cache is in `folder`."""
    with (
        mock.patch.object(launch_processes, "Here", _PlansOnly),
        mock.patch.object(on_ray, "OnRay", _PlansOnly),
        mock.patch.object(calibrate_machine, "calibrate", _fake_calibration),
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder}),
    ):
        yield


def _raise_timeout(*_: Any) -> None:
    raise TimeoutError
