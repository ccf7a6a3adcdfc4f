"""CPU devices: as many as asked for, and enough threads that they cannot wait for each other for ever.

XLA's CPU backend runs all host devices on one pool of as many threads as there are cores. A device that
waits in a collective holds a thread; with more devices than cores the others may find none left to arrive
on, and XLA ends the process after 40 seconds. `PJRT_NPROC`, which the backend reads when it starts, sets
the size of the pool: see `docs/decisions/009-two-threads-a-host-device.md`, and
`069-a-thread-a-host-device.md` for programs whose collectives come one after the other.
"""

import contextlib
import os
import re

import jax
from jax.extend.backend import clear_backends

from fdg.cores import usable_cores
from fdg.errors import FdgError

THREADS_A_DEVICE = 2
MOST_HOST_DEVICES = 1024

_THREADS = "PJRT_NPROC"
_reserved: dict[str, str] = {}  # what was set here
_commands: list[int] = []  # how many devices a command configured, before the backend started


def host_devices(count: int) -> None:
    """Has JAX's CPU backend make `count` devices, which are then `jax.devices("cpu")`.

    Call it before anything runs on a device.

    Raises:
      FdgError: the backend has started already, with another number of devices.
    """
    _configure(count)


def _configure(count: int) -> bool:
    """Whether there was anything to configure; raises an `FdgError` where it is too late."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_HOST_DEVICES:
        raise FdgError(f"host_devices({count!r}): give an integer from 1 to {MOST_HOST_DEVICES}")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        there = len(jax.local_devices(backend="cpu"))
        if there != count:
            raise FdgError(
                f"host_devices({count}): JAX has started already, with {there} on the CPU: call it before"
                f" anything runs on a device (in a notebook: restart the kernel)"
            ) from None
        return False
    reserve_threads(count)
    return True


def make_host_devices(count: int) -> None:
    """`host_devices`, if it is not too late; who needs so many looks at how many there are."""
    with contextlib.suppress(FdgError):
        if _configure(count):
            _commands.append(count)


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
    _commands.append(count)
    return count


def begin_anew(count: int, threads: int) -> None:
    """Has the CPU backend of a command start again, with `count` devices and a pool of so many threads.

    How many are best is known when the job is traced, and importing environments has started the backend by
    then. Nothing is done where anything would be lost: where arrays live on it, where it is not a command's
    own, or of several processes, and where somebody else has set its threads.
    """
    wanted, there = str(threads), os.environ.get(_THREADS)
    if not _commands or (count, wanted) == (_commands[-1], there) or there != _reserved.get(_THREADS):
        return
    if jax.default_backend() != "cpu" or jax.process_count() > 1 or jax.live_arrays():
        return
    clear_backends()
    jax.config.update("jax_num_cpu_devices", count)
    os.environ[_THREADS] = _reserved[_THREADS] = wanted
    _commands.append(count)


def reserve_threads(count: int | None = None) -> None:
    """Sizes the backend's thread pool for `count` host devices (None: those configured), unless it is set."""
    count = _configured() if count is None else count
    if count > 1 and _THREADS not in os.environ:
        os.environ[_THREADS] = _reserved[_THREADS] = str(threads_for(count))


def environment_of_a_child() -> dict[str, str]:
    """This process's environment without what was set here for its own devices: a child has others."""
    own = {name for name, value in _reserved.items() if os.environ.get(name) == value}
    return {name: value for name, value in os.environ.items() if name not in own}


def threads_for(count: int, in_order: bool = False) -> int:
    """Threads with which `count` host devices cannot wait for each other for ever.

    Args:
      count: how many host devices.
      in_order: whether each waits in one place at a time (`running.order`), and so holds one thread.
    """
    return max(os.cpu_count() or 1, count if in_order else THREADS_A_DEVICE * count)


def has_few_threads(count: int) -> bool:
    """Whether a command has begun with as many threads as are enough for programs that are in order only."""
    there = os.environ.get(_THREADS)
    return (
        count > 1
        and there is not None
        and there == _reserved.get(_THREADS)
        and int(there) < threads_for(count)
    )


def _configured() -> int:
    """How many host devices there are to be, as far as anybody has said; else 1."""
    flag = re.search(r"host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return max(1, getattr(jax.config, "jax_num_cpu_devices", 1), int(flag[1]) if flag else 1)
