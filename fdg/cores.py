"""How many cores this process has, and how many processes of the run have the same ones."""

import contextlib
import math
import os
from pathlib import Path

_processes = 1


def share_among(processes: int) -> None:
    """Says that so many processes of the run share cores (`processes.distributed` does)."""
    global _processes
    _processes = processes


def sharing() -> int:
    """How many processes of the run share cores; 1 unless said otherwise."""
    return _processes


def usable_cores() -> int:
    """Cores that this process may use: of those there are, by its affinity and its control group's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # not Linux, no control groups, or "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)
