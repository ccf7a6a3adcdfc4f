"""CPU devices: as many as asked for, and enough threads that they cannot wait for each other for ever.

XLA's CPU backend runs all host devices on one pool of as many threads as there are cores. A device that
waits in a collective holds a thread; with more devices than cores the others may find none left to arrive
on, and XLA ends the process after 40 seconds. `PJRT_NPROC`, which the backend reads when it starts, sets
the size of the pool: see `docs/decisions/009-two-threads-a-host-device.md`.
"""

import contextlib
import os
import re

import jax

from fdg.cores import usable_cores

THREADS_A_DEVICE = 2


def host_devices(count: int) -> None:
    """Has JAX's CPU backend make `count` devices; without effect once the backend has started.

    Call it before anything runs on a device. The devices are then `jax.devices("cpu")`.
    """
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
        reserve_threads(count)


def device_a_core() -> int | None:
    """Has JAX's CPU backend make a device for each core, to choose some of them later.

    Returns:
      How many; None where their number was configured by someone, or the backend has started.
    """
    if _configured() != 1:
        return None
    count = usable_cores()
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return None
    reserve_threads(count)
    return count


def reserve_threads(count: int | None = None) -> None:
    """Sizes the backend's thread pool for `count` host devices (None: those configured), unless it is set."""
    count = _configured() if count is None else count
    if count > 1:
        os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, THREADS_A_DEVICE * count)))


def _configured() -> int:
    """How many host devices there are to be, as far as anybody has said; else 1."""
    flag = re.search(r"host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return max(1, getattr(jax.config, "jax_num_cpu_devices", 1), int(flag[1]) if flag else 1)
