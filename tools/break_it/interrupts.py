"""Ctrl-C at random moments."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.break_it.processes import note, worked


def interrupts(number: int) -> str | None:
    """Ctrl-C at a random moment of a run's start: it must end with status 130 within two seconds.

    The last line must say how to continue. The moment and the two seconds are the process's CPU time.
    """
    # A shell's background jobs ignore Ctrl-C, and so would their children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        flags = ["--devices", "1", "--num-envs", str(4 + number), "--out", str(run)]
        environment = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
        environment["JAX_COMPILATION_CACHE_DIR"] = folder  # so that it compiles
        process = subprocess.Popen(
            [sys.executable, "-m", "fdg.train", *flags],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        moment = random.Random(number).uniform(0.0, 12.0)
        while worked(process.pid) < moment:
            if process.poll() is not None:
                process.communicate()
                return None  # it had ended before
            time.sleep(0.005)
        before, begun = worked(process.pid), time.monotonic()
        process.send_signal(signal.SIGINT)
        after = before
        while process.poll() is None and time.monotonic() - begun < 60.0:
            after = max(after, worked(process.pid))
            time.sleep(0.005)
        process.kill()
        output, _ = process.communicate()
        work, seconds, status = after - before, time.monotonic() - begun, process.returncode
        note("interrupts", number, f"status {status}", moment=moment, work=work, seconds=seconds)
        # Until Python runs fdg's code, the operating system ends the process.
        early = status == -signal.SIGINT and moment < 0.3
        complaint = None
        if (status != 130 and not early) or work > 2.0:
            complaint = f"status {status}, {work:.2f} s of work, {seconds:.2f} s"
        elif status == 130 and "interrupted" not in output:
            complaint = "it does not say so"
        elif (run / "config.json").exists() and "go on with --resume" not in output:
            complaint = "it does not say how to go on"
    return complaint and f"after {moment:.2f} s: {complaint}: {output[-300:]}"
