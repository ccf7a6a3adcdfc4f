"""Configures host devices (JAX's CPU devices), with enough threads that their collectives cannot deadlock.

XLA's CPU backend runs all host devices on one thread pool, with one thread per core. A device that waits in a
collective blocks a thread. With more devices than cores, the other devices may find no free thread; then XLA
aborts the process after 40 seconds. `PJRT_NPROC`, which the backend reads when it starts, sets the pool's
size: see `docs/decisions/009-two-threads-a-host-device.md`, and `069-a-thread-a-host-device.md` for programs
whose collectives are ordered.
"""

import contextlib
import os
import re
from typing import Any

import jax
from jax.extend.backend import clear_backends

from fdg import jaxprs
from fdg.arguments import checked_names, quoted
from fdg.cores import usable_cores
from fdg.errors import FdgError
from fdg.tracing.graph import FDG

THREADS_PER_DEVICE = 2  # for programs whose collectives have no fixed order
MAX_HOST_DEVICES = 1024
_ONE_THREAD_FLOPS = 12_000_000  # an operation with fewer FLOPs gains nothing from a second thread

_THREADS_VARIABLE = "PJRT_NPROC"  # sets the size of the thread pool
_set_variables: dict[str, str] = {}  # environment variables that this module has set
_command_counts: list[int] = []  # the numbers of devices that a command has configured, in order


@checked_names
def host_devices(count: int) -> None:
    """Configures JAX's CPU backend with `count` devices, which are then `jax.devices("cpu")`.

    Call it before anything runs on a device.

    Raises:
      FdgError: the backend has already started, with another number of devices.
    """
    _configure(count)


def _configure(count: int) -> bool:
    """Sets the number of devices; False if the backend has it already; an `FdgError` if it has another."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_HOST_DEVICES:
        raise FdgError(f"host_devices({quoted(count)}): give an integer from 1 to {MAX_HOST_DEVICES}")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        actual = len(jax.local_devices(backend="cpu"))
        if actual != count:
            raise FdgError(
                f"host_devices({count}): JAX has already started, with {actual} CPU devices: call it before"
                " JAX uses a device (in a notebook: restart the kernel)"
            ) from None
        return False
    reserve_threads(count)
    return True


def make_host_devices(count: int) -> bool:
    """Configures `count` devices if the backend has not started; returns whether it configured them.

    Unlike `host_devices`, raises no error if the backend already runs with another number of devices.
    """
    with contextlib.suppress(FdgError):
        if _configure(count):
            _command_counts.append(count)
            return True
    return False


def make_device_per_core() -> int | None:
    """Configures JAX's CPU backend with one device per core, so that a command can use any number of them.

    Returns the number of devices; None if a number was already configured, or the backend has started.
    """
    count = usable_cores()
    return count if _configured_count() == 1 and make_host_devices(count) else None


def restart_cpu_backend(count: int, threads: int) -> None:
    """Restarts a command's CPU backend with `count` devices and a pool of `threads` threads.

    The best numbers of devices and threads are known only after the job is traced; by then, importing
    environments has started the backend. Does nothing if a restart could lose arrays or override the user:
    if arrays are live, if there are several processes, if no command has configured the backend, or if the
    user has set the number of threads.
    """
    new_threads, old_threads = str(threads), os.environ.get(_THREADS_VARIABLE)
    if not _command_counts or (count, new_threads) == (_command_counts[-1], old_threads):
        return
    if old_threads != _set_variables.get(_THREADS_VARIABLE):  # the user has set the variable
        return
    if jax.default_backend() != "cpu" or jax.process_count() > 1 or jax.live_arrays():
        return
    clear_backends()
    jax.config.update("jax_num_cpu_devices", count)
    os.environ[_THREADS_VARIABLE] = _set_variables[_THREADS_VARIABLE] = new_threads
    _command_counts.append(count)


def reserve_threads(count: int | None = None) -> None:
    """Sizes the thread pool for `count` host devices (None: those configured), unless the user has set it."""
    count = _configured_count() if count is None else count
    if count > 1 and _THREADS_VARIABLE not in os.environ:
        os.environ[_THREADS_VARIABLE] = _set_variables[_THREADS_VARIABLE] = str(threads_for(count))


def environment_of_a_child() -> dict[str, str]:
    """The environment for a child process, without variables that this module set for this process."""
    excluded = {name for name, value in _set_variables.items() if os.environ.get(name) == value}
    return {name: value for name, value in os.environ.items() if name not in excluded}


def thread_count(graph: FDG, agents: int | None, policy: Any, devices: int) -> int:
    """Size of XLA's thread pool for a job on host devices; `graph` is of one agent.

    A program with one group is lowered so that each device waits in one collective at a time
    (`lowering.ordering`); then one thread per device is enough.

    A single device with small operations gets one thread: passing operations between threads takes longer
    than running them in parallel saves. Milliseconds per iteration of PPO on CartPole-v1, with one thread and
    with four: 1.9 and 2.4 with 4 environments, 10.5 and 12.2 with 32, 22 and 20 with 64.
    """
    if devices > 1:
        placed = {} if agents is not None else policy.place(["cpu"] * devices)
        groups = {placed[f.role] for f in graph.fragments if f.role in placed}
        # Collectives of several programs, and those of sharded parameters, have no known order.
        in_order = len(groups) <= 1 and not any(group.shards for group in groups)
        return threads_for(devices, in_order)
    largest = (agents or 1) * jaxprs.largest_cost(jaxprs.open_jaxpr(graph.jaxpr))
    return 1 if largest < _ONE_THREAD_FLOPS else usable_cores()


def threads_for(count: int, in_order: bool = False) -> int:
    """The number of threads with which `count` host devices cannot deadlock.

    `in_order`: the program orders its collectives (`lowering.ordering`), so each device waits in one
    collective at a time and blocks one thread.
    """
    return max(os.cpu_count() or 1, count if in_order else THREADS_PER_DEVICE * count)


def _configured_count() -> int:
    """The configured number of host devices (by JAX's option or `XLA_FLAGS`); 1 by default."""
    flag = re.search(r"host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return max(1, getattr(jax.config, "jax_num_cpu_devices", 1), int(flag[1]) if flag else 1)
