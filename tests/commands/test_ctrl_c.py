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
