"""CPU cores of this process, and cores shared between the processes of a run."""

import contextlib
import math
import os
from pathlib import Path

# Set by `set_core_sharing`.
_sharing_processes = 1
_min_cores: int | None = None


def set_core_sharing(processes: int, cores: int | None = None) -> None:
    """Records how the processes of a run share cores (called by `processes.distributed`).

    `processes` is the largest number of processes on one host that share cores; `cores` is the smallest
    number of usable cores of any process.
    """
    global _sharing_processes, _min_cores
    _sharing_processes, _min_cores = processes, cores


def min_cores_per_process() -> int:
    """The smallest number of usable cores of any process.

    Programs that span processes are compiled for this number, so that all processes compile the same program.
    """
    return usable_cores() if _min_cores is None else _min_cores


def processes_sharing_cores() -> int:
    """The largest number of processes that share cores on any host; the same value in all processes."""
    return _sharing_processes


def affinity() -> set[int]:
    """The indices of the cores on which the operating system lets this process run."""
    get_affinity = getattr(os, "sched_getaffinity", None)
    return get_affinity(0) if get_affinity else set(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """The number of cores that this process may use, by its affinity and its control group's quota."""
    cores = len(affinity())
    with contextlib.suppress(OSError, ValueError):  # not Linux, no control groups, or "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)
