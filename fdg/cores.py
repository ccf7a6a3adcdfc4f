"""How many cores this process has, and what the processes of a run have in common."""

import contextlib
import math
import os
from pathlib import Path

_processes = 1
_common: int | None = None


def share_among(processes: int, cores: int | None = None) -> None:
    """Says what the processes of a run have found out together (`processes.distributed` does).

    Args:
      processes: so many of them share cores, where most do.
      cores: that each of them has at least; None for one process.
    """
    global _processes, _common
    _processes, _common = processes, cores


def common_cores() -> int:
    """Cores that every process of the run may use: programs that they run together are made for so many."""
    return usable_cores() if _common is None else _common


def sharing() -> int:
    """The largest number of processes that share cores on any host; the same value in all processes."""
    return _processes


def affinity() -> set[int]:
    """The cores that the operating system lets this process run on."""
    found = getattr(os, "sched_getaffinity", None)
    return found(0) if found else set(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Cores that this process may use: of those there are, by its affinity and its control group's quota."""
    cores = len(affinity())
    with contextlib.suppress(OSError, ValueError):  # not Linux, no control groups, or "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)
