"""The process that runs programs, isolated because programs may hang or crash."""

import faulthandler
import os
import signal
import sys
import time
from importlib.metadata import version
from typing import Any


def environment(x64: bool = False) -> dict[str, str]:
    """Environment variables to set before JAX is imported, as in tests/conftest.py."""
    flags = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
    if version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return {
        "XLA_FLAGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1" if x64 else "0",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def run_worker(connection: Any, x64: bool, breakage: str | None, log: str) -> None:
    """Answers each task (program, placements) with (verdict, seconds) of each placement, then None.

    A task may be a seed: the answer begins with its (program, placements).
    """
    os.environ.update(environment(x64))
    log_file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log_file, 1)
    os.dup2(log_file, 2)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent waits for the current program

    import jax

    # Unpickling the process's arguments may have imported JAX already, which reads the environment only once.
    jax.config.update("jax_enable_x64", x64)
    jax.config.update("jax_numpy_rank_promotion", "raise")

    from tests.oracle.breakage import BREAKAGES
    from tests.oracle.compare import Expected, Verdict, check
    from tests.oracle.generate import generate

    if breakage:
        BREAKAGES[breakage]()
    tolerance = 1e-9 if x64 else 1e-5
    connection.send("ready")
    done = 0
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        if isinstance(task, int):
            algorithm, placements = generate(task)
            program = algorithm.program
            connection.send((program, placements))
        else:
            program, placements = task
        expected = Expected(program)
        for placement in placements:
            started = time.perf_counter()
            try:
                verdict = check(program, placement, expected, tolerance)
            except Exception as error:  # in the oracle itself
                verdict = Verdict("oracle", f"{type(error).__name__}: {str(error)[:300]}")
            connection.send((verdict, time.perf_counter() - started))
        connection.send(None)
        done += 1
        if done % 10 == 0:
            jax.clear_caches()
