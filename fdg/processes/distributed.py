"""Multi-process runs on `jax.distributed`: joining, JSON all-gather, and gathering arrays on process 0.

All processes run the same program; only process 0 (`is_first`) writes and prints. With a single process all
functions work too. Collectives raise `LostError` if another process is gone. See
`docs/decisions/011-processes.md`.
"""

import atexit
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fdg import cores, keys
from fdg.addresses import split_address
from fdg.errors import FdgError
from fdg.jax_internals import internal
from fdg.processes import peers, ports

HEARTBEAT_SECONDS = 45  # JAX's own, in case `peers` does not notice a lost process

_peers: peers.Peers | None = None


def initialize(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins this process to a multi-process run, before JAX starts its backends; waits for all processes.

    `jax.devices()` then has the devices of all processes. When a process dies, the others end with an error
    that names it.

    Args:
      coordinator_address: HOST:PORT of process 0; None, as for the others, on a cluster that JAX detects.
      num_processes: their number.
      process_id: the index of this one.

    Raises:
      FdgError: contradictory arguments, no cluster was detected, or not all processes came.
    """
    global _peers
    given = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    check_flags(given)
    if _peers is not None:
        raise FdgError("distributed.initialize was called before")
    local_device_ids = None
    if coordinator_address is None:
        coordinator_address, num_processes, process_id, local_device_ids = _detect()
    assert coordinator_address is not None and num_processes is not None and process_id is not None
    host, _ = split_address(coordinator_address, f"--coordinator-address {coordinator_address}")
    group = peers.Peers(
        coordinator_address, num_processes, process_id, None if process_id else ports.free_port(host)
    )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM
    # The other processes reach JAX's coordinator through a separate port, which outlives process 0: otherwise
    # JAX aborts them within milliseconds, before they can report the error.
    service = (
        f"{host}:{group.notes}" if group.index == 0 else f"localhost:{ports.keep_open((host, group.notes))}"
    )
    _peers = group
    atexit.register(_at_exit)
    try:
        jax.distributed.initialize(
            service,
            num_processes,
            process_id,
            local_device_ids,
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            coordinator_bind_address=f"127.0.0.1:{group.notes}" if ports.is_local(host) else None,
        )
    except RuntimeError as error:
        raise FdgError(f"jax.distributed cannot start: {error}") from error
    everywhere = exchange([socket.gethostname(), sorted(cores.affinity()), cores.usable_cores()])
    cores.share_among(_max_core_sharing([one[:2] for one in everywhere]), min(one[2] for one in everywhere))


def check_flags(given: Mapping[str, Any]) -> None:
    """Checks the flags of a multi-process run."""
    names = ("coordinator_address", "num_processes", "process_id")
    there = [name for name in names if given.get(name) is not None]
    option = lambda name: "--" + name.replace("_", "-")  # noqa: E731
    if there and given.get("distributed"):
        raise FdgError(f"--distributed detects {option(there[0])} from the cluster: leave out one of the two")
    if there and len(there) < len(names):
        missing = next(name for name in names if name not in there)
        raise FdgError(
            f"{option(missing)} is missing: {', '.join(map(option, names))} go together"
            f" (--distributed alone where JAX detects the cluster)"
        )
    if not there:
        return
    number, index = given["num_processes"], given["process_id"]
    split_address(given["coordinator_address"], f"--coordinator-address {given['coordinator_address']}")
    if number < 1:
        raise FdgError(f"--num-processes {number}: it must be at least 1")
    if not 0 <= index < number:
        raise FdgError(f"--process-id {index}: with --num-processes {number} it is from 0 to {number - 1}")


def count() -> int:
    """The number of processes."""
    return 1 if _peers is None else _peers.count


def is_first() -> bool:
    """Whether this is process 0, which writes and prints."""
    return _peers is None or _peers.index == 0


def exchange(value: Any) -> list[Any]:
    """The values of all processes, in their order. A collective: all processes call it.

    `value` is anything that JSON can hold.
    """
    return [value] if _peers is None else _peers.exchange(value)


def check_alike(digests: Mapping[str, str]) -> None:
    """Checks that all processes run the same programs; otherwise they would deadlock. A collective.

    `digests` are those of the parts of this process's programs, by their names in errors.
    """
    first, *others = exchange(dict(digests))
    for i, other in enumerate(others, 1):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        # A difference within a fragment is also one of all enclosing code.
        names = [name for name in names if name.startswith("fragment ")] or names[:1]
        if names:
            raise FdgError(
                f"process {i} has traced or planned another {', '.join(names)} than process 0: give all the"
                " same code, packages and environment variables"
            )


def fetch(tree: Any) -> Any:
    """Gathers arrays on process 0. A collective: all processes call it.

    Each shard is sent directly to process 0, and no other process holds the whole. No XLA program runs, so
    the arrays may belong to meshes that this process has no part in. Typed keys arrive as their data. Returns
    NumPy arrays on process 0 (copies: the arrays may be donated), None on the others.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = [keys.words(leaf) for leaf in leaves]
    owned = [_owners(array) for array in arrays]
    if not is_first():
        assert _peers is not None
        mine = [
            np.asarray(_shard(array, index)).tobytes()
            for array, owners in zip(arrays, owned, strict=True)
            for index, owner in owners.items()
            if owner == _peers.index
        ]
        if mine:
            _peers.give(b"".join(mine))
        return None
    senders = sorted({owner for owners in owned for owner in owners.values()} - {0})
    received = {i: memoryview(_peers.take(i)) for i in senders} if _peers else {}
    results = []
    for array, owners in zip(arrays, owned, strict=True):
        result = np.empty(array.shape, array.dtype)
        for index, owner in owners.items():
            part = tuple(slice(*bounds) for bounds in index)
            if owner == 0:
                result[part] = np.asarray(_shard(array, index))
            elif size := result[part].nbytes:
                values = np.frombuffer(received[owner][:size], array.dtype)
                result[part] = values.reshape(result[part].shape)
                received[owner] = received[owner][size:]
        results.append(result)
    return jax.tree.unflatten(structure, results)


def gather(tree: Any) -> Any:
    """Gathers arrays on the first device of process 0; keys stay keys. A collective: all processes call it.

    Returns the tree on process 0, None on the others.
    """
    fetched = fetch(tree)
    if fetched is None:
        return None
    device = jax.local_devices()[0]
    return jax.tree.map(lambda data, leaf: keys.from_words(jax.device_put(data, device), leaf), fetched, tree)


def lost(seconds: float) -> peers.LostError | None:
    """The lost process, or None. Waits up to `seconds`, since an error may arrive before its cause."""
    return None if _peers is None else _peers.who_is_lost(seconds)


def leave() -> None:
    """Leaves the run in an orderly way: waits for the other processes, then shuts down."""
    global _peers
    if _peers is None:
        return
    exchange(None)
    jax.distributed.shutdown()
    _peers.leave()
    _peers = None


def abandon(line: str, status: int, cause: str | None = None) -> None:
    """Ends this process and all others; does nothing with a single process.

    `line` is printed on standard error; the others say `cause`, None for what is `lost` already.
    """
    if _peers is not None:
        _peers.die(line, status, line if cause is None else f"{_peers.who} {cause}")


def _at_exit() -> None:
    """For programs that do not call `leave`."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        abandon("error: see above", 1, f"failed: {type(error).__name__}")
    try:
        leave()
    except peers.LostError as gone:
        abandon(f"error: {gone}", gone.status)


def _detect() -> tuple[str, int, int, Any]:
    """What `jax.distributed.initialize()` would detect."""
    cluster = internal("clusters", "ClusterEnv", "detect a cluster")
    address, number, index, local_device_ids = cluster.auto_detect_unset_distributed_params(
        os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, int(peers.JOIN_SECONDS)
    )
    if address is None or number is None or index is None:
        raise FdgError(
            "--distributed: JAX detects no cluster here (SLURM, MPI, Kubernetes, TPU pod):"
            " give --coordinator-address, --num-processes and --process-id"
        )
    return address, number, index, local_device_ids


def _max_core_sharing(everywhere: list[list[Any]]) -> int:
    """The largest number of processes on one host whose cores overlap with those of one process (included).

    >>> _max_core_sharing([["a", [0, 1]], ["a", [0, 1]], ["b", [0, 1]]])
    2
    >>> _max_core_sharing([["a", [0]], ["a", [1]]])
    1
    """
    return max(
        sum(host == other and not set(cores).isdisjoint(others) for other, others in everywhere)
        for host, cores in everywhere
    )


_Index = tuple[tuple[int, int], ...]  # start and stop along each axis


def _owners(array: jax.Array) -> dict[_Index, int]:
    """The process that sends each part: the first that has it. Equal in all processes."""
    owners: dict[_Index, int] = {}
    device: Any  # a jax.Device, whose attributes the type checker does not know
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        bounds = _bounds(index, array.shape)
        owners[bounds] = min(owners.get(bounds, device.process_index), device.process_index)
    return dict(sorted(owners.items()))


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> _Index:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _shard(array: jax.Array, bounds: _Index) -> Any:
    return next(s.data for s in array.addressable_shards if _bounds(s.index, array.shape) == bounds)
