"""The tests, a folder at a time, each with a limit of time."""

import collections
import importlib.util
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from bench.gpu.measuring import Figures, Measurement, Settings

_ROOT = Path(__file__).parents[2]
_ON_DEVICE = ("algos", "language", "rlhf", "envs", "profiling")
_ON_CPU = ("lowering", "placing", "batch", "tracing", "running", "conformance", "oracle", "policies", "costs")
_LIMIT = 100.0


def measurements(settings: Settings) -> list[Measurement]:
    """What needs one device, on the GPU; what counts host devices, on the CPU of that machine."""
    slices = [(folder, "") for folder in _ON_DEVICE] + [(folder, "cpu") for folder in _ON_CPU]
    slices = settings.size(slices, [("test_values.py", "cpu")])
    seconds = settings.size(_LIMIT, 60.0)
    return [
        Measurement(
            "Tests",
            f"tests/{folder}{' on the CPU' * bool(platform)}",
            partial(tested, f"tests/{folder}", platform, seconds),
            seconds=seconds,  # or what it started would outlive it
            limit=seconds + 20,
        )
        for folder, platform in slices
    ]


def tested(folder: str, platform: str, seconds: float) -> Figures:
    """What pytest says of each test until the time is over; the first names of those that fail are kept."""
    words = [sys.executable, "-m", "pytest", "-v", "--tb=line", "-p", "no:cacheprovider", folder]
    if importlib.util.find_spec("xdist"):
        words += ["-n", str(min(8, os.cpu_count() or 1)), "--dist", "loadscope"]
    environment = {**os.environ, **({"JAX_PLATFORMS": platform} if platform else {})}
    process = subprocess.Popen(
        words, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, finished = process.communicate(timeout=seconds)[0], True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, finished = process.communicate()[0], False
    return {**counted(said), "finished": finished, "status": process.returncode if finished else None}


def counted(said: str) -> Figures:
    """Of pytest's verbose output, with and without xdist.

    >>> counted("tests/a.py::b PASSED [ 50%]\\n[gw1] [ 90%] FAILED tests/a.py::c[1-x y]\\n")
    {'passed': 1, 'failed': 1, 'skipped': 0, 'failures': ['tests/a.py::c[1-x y]'], 'last': [...]}
    """
    outcomes: dict[str, list[str]] = collections.defaultdict(list)
    for line in said.splitlines():
        by_worker = re.match(r"\[gw\d+\].*?(PASSED|FAILED|ERROR|SKIPPED|XFAIL) (\S.*?)\s*$", line)
        alone = re.match(r"(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", line)
        if by_worker:
            outcomes[by_worker[1]].append(by_worker[2])
        elif alone:
            outcomes[alone[2]].append(alone[1])
    failures = outcomes["FAILED"] + outcomes["ERROR"]
    return {
        "passed": len(outcomes["PASSED"]) + len(outcomes["XFAIL"]),
        "failed": len(failures),
        "skipped": len(outcomes["SKIPPED"]),
        "failures": failures[:50],
        "last": said.splitlines()[-30:],
    }
