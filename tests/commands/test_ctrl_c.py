"""Ctrl-C of a command, as a process: at once, with status 130, and a word on how to go on."""

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
    """Sends Ctrl-C; gives status, seconds until the end, and what is said on standard error."""
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    try:
        out, said = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, time.monotonic() - begun, out + said


def test_while_it_is_imported():
    process = start()
    time.sleep(0.4)
    status, seconds, said = interrupt(process)
    assert status == 130 and said == "interrupted: nothing was begun\n" and seconds < 2


@pytest.mark.parametrize("after", ["compiling ...", "10%"])
def test_while_it_compiles_and_while_it_trains(after, tmp_path):
    run = tmp_path / "run"
    process = start(*WALK, "--total-steps", "32000", "--out", str(run))
    for line in process.stdout:
        if after in line:
            break
    status, seconds, said = interrupt(process)
    assert status == 130 and "Traceback" not in said and seconds < 3, said  # the tests share two cores
    assert f"go on with --resume {run}" in said


def test_another_signal_is_not_ctrl_c():
    """One that another handles: what is guarded goes on, whatever its patience; an import guards nothing."""
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
