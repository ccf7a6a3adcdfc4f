"""Ctrl-C of a command in a subprocess: exits promptly with status 130, and says how to resume."""

import os
import signal
import subprocess
import sys
import time

import pytest

WALK = ["--algo", "tests.tiny:Walk", "--devices", "1", "--num-envs", "4000", "--checkpoint-every", "500"]


def start(*words):
    command = [sys.executable, "-m", "fdg.train", *words]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **streams)


def interrupt(process):
    """Sends SIGINT: the exit status, the seconds until exit, and the remaining output."""
    start_time = time.monotonic()
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, time.monotonic() - start_time, out + err


def test_interrupt_during_import():
    process = start()
    time.sleep(0.4)
    status, seconds, output = interrupt(process)
    assert status == 130 and output == "interrupted: nothing was begun\n" and seconds < 2


@pytest.mark.parametrize("after", ["compiling ...", "10%"])
def test_interrupt_during_compilation_and_training(after, tmp_path):
    run = tmp_path / "run"
    process = start(*WALK, "--total-steps", "32000", "--out", str(run))
    for line in process.stdout:
        if after in line:
            break
    status, seconds, output = interrupt(process)
    assert status == 130 and "Traceback" not in output and seconds < 3, output  # the tests share two cores
    assert f"go on with --resume {run}" in output


def test_other_signals_are_not_ctrl_c():
    """Other signals interrupt nothing, whatever the grace period; an import installs no handler."""
    code = """
import os, signal, sys, time
import fdg
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
sys.modules["__main__"].__dict__["__spec__"] = None
from fdg import ctrl_c
ctrl_c.install()
signal.signal(signal.SIGUSR1, lambda *_: None)
for patience in (0, None, 5):
    ctrl_c.set_grace_period(patience)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.1)
ctrl_c.set_grace_period(None)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(0.1)
print("it goes on")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "it goes on\n"), done.stderr
