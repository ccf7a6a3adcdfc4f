"""Interrupts runs by Ctrl-C at random moments while they start."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.break_it.processes import cpu_seconds_of, record_circumstances


def interrupt_start(try_number: int) -> str | None:
    """Interrupts a run at a random moment of its start; returns what went wrong, or None.

    The run must end with status 130 within two seconds, and its output must say how to continue. The moment
    and the two seconds are measured in CPU time of the process.
    """
    # A background job of a shell ignores Ctrl-C, and its child processes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        flags = ["--devices", "1", "--num-envs", str(4 + try_number), "--out", str(run)]
        environment = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
        environment["JAX_COMPILATION_CACHE_DIR"] = folder  # an empty cache, so that the run compiles
        process = subprocess.Popen(
            [sys.executable, "-m", "fdg.train", *flags],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        moment = random.Random(try_number).uniform(0.0, 12.0)
        while cpu_seconds_of(process.pid) < moment:
            if process.poll() is not None:
                process.communicate()
                return None  # the run ended before the moment
            time.sleep(0.005)
        cpu_before, sent_at = cpu_seconds_of(process.pid), time.monotonic()
        process.send_signal(signal.SIGINT)
        cpu_after = cpu_before
        while process.poll() is None and time.monotonic() - sent_at < 60.0:
            cpu_after = max(cpu_after, cpu_seconds_of(process.pid))
            time.sleep(0.005)
        process.kill()
        output, _ = process.communicate()
        cpu_used, seconds, status = cpu_after - cpu_before, time.monotonic() - sent_at, process.returncode
        details = {"moment": moment, "work": cpu_used, "seconds": seconds}
        record_circumstances("interrupts", try_number, f"status {status}", **details)
        # Before fdg handles Ctrl-C, the signal itself ends the process.
        ended_early = status == -signal.SIGINT and moment < 0.3
        complaint = None
        if (status != 130 and not ended_early) or cpu_used > 2.0:
            complaint = f"status {status}, {cpu_used:.2f} s of CPU time, {seconds:.2f} s"
        elif status == 130 and "interrupted" not in output:
            complaint = "the output does not say that the run was interrupted"
        elif (run / "config.json").exists() and "go on with --resume" not in output:
            complaint = "the output does not say how to go on"
    return complaint and f"after {moment:.2f} s: {complaint}: {output[-300:]}"
