"""Multi-process runs on `jax.distributed`: joining, exchanging JSON values, gathering arrays on process 0.

All processes run the same program; only process 0 (`is_first`) writes and prints. All functions also work in
a run of a single process. Functions that all processes must call raise `LostError` if another process is
gone. See `docs/decisions/011-processes.md`.
"""

import atexit
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fdg import cores, keys
from fdg.addresses import join_address, split_address
from fdg.errors import FdgError
from fdg.jax_internals import internal
from fdg.processes import peers, ports

HEARTBEAT_SECONDS = 45  # the timeout of JAX's service, in case `peers` does not notice a lost process

_FLAGS = ("coordinator_address", "num_processes", "process_id")  # given together, or not at all
_peers: peers.Peers | None = None  # None in a run of a single process


def initialize(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins this process to a multi-process run, before JAX starts its backends; waits for all processes.

    `jax.devices()` then has the devices of all processes. When a process dies, the others end with an error
    that names it.

    Args:
      coordinator_address: HOST:PORT of process 0. All three arguments are None on a cluster that JAX detects.
      num_processes: the number of processes.
      process_id: the index of this process.

    Raises:
      FdgError: arguments contradict each other, JAX detects no cluster, or a process did not connect.
    """
    global _peers
    check_flags(dict(zip(_FLAGS, (coordinator_address, num_processes, process_id), strict=True)))
    if _peers is not None:
        raise FdgError("distributed.initialize was called before: call it once in each process")
    local_device_ids = None
    if coordinator_address is None:
        coordinator_address, num_processes, process_id, local_device_ids = _detect()
    assert coordinator_address is not None and num_processes is not None and process_id is not None
    host, _ = split_address(coordinator_address, f"--coordinator-address {coordinator_address}")
    service_port = None if process_id else ports.free_port(host)  # process 0 sends it to the others
    group = peers.Peers(coordinator_address, num_processes, process_id, service_port)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM
    # The other processes reach JAX's coordinator through a forwarding port, which outlives process 0. Without
    # this port, JAX would abort them within milliseconds after process 0 ends, before they report the error.
    port = group.notes if group.index == 0 else ports.forward_to((host, group.notes))
    service = join_address(host if group.index == 0 else "localhost", port)
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
    host_and_cores = [socket.gethostname(), sorted(cores.affinity())]
    hosts, core_counts = zip(*exchange([host_and_cores, cores.usable_cores()]), strict=True)
    cores.set_core_sharing(_max_core_sharing(hosts), min(core_counts))


def check_flags(flags: Mapping[str, Any]) -> None:
    """Raises `FdgError` if the flags of a multi-process run are incomplete, invalid or contradictory."""
    present = [name for name in _FLAGS if flags.get(name) is not None]
    as_option = lambda name: "--" + name.replace("_", "-")  # noqa: E731
    if present and flags.get("distributed"):
        raise FdgError(
            f"--distributed detects {as_option(present[0])} from the cluster: leave out one of the two"
        )
    if present and len(present) < len(_FLAGS):
        missing = next(name for name in _FLAGS if name not in present)
        raise FdgError(
            f"{as_option(missing)} is missing: {', '.join(map(as_option, _FLAGS))} must be given together"
            f" (or only --distributed, if JAX detects the cluster)"
        )
    if not present:
        return
    number, index = flags["num_processes"], flags["process_id"]
    split_address(flags["coordinator_address"], f"--coordinator-address {flags['coordinator_address']}")
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
    """All-gathers a JSON value: returns the values of all processes in order. All processes must call it."""
    return [value] if _peers is None else _peers.exchange(value)


def check_alike(digests: Mapping[str, str]) -> None:
    """Raises `FdgError` unless all processes run the same programs, or they would deadlock. All must call it.

    `digests` are digests of the parts of this process's programs, by the part's name in errors.
    """
    first_digests, *other_digests = exchange(dict(digests))
    for i, process_digests in enumerate(other_digests, 1):
        all_names = {**first_digests, **process_digests}
        names = [name for name in all_names if first_digests.get(name) != process_digests.get(name)]
        # A difference inside a fragment also changes the digests of all enclosing code.
        names = [name for name in names if name.startswith("fragment ")] or names[:1]
        if names:
            raise FdgError(
                f"process {i} has traced or planned another {', '.join(names)} than process 0: give all"
                " processes the same code, packages and environment variables"
            )


def fetch(tree: Any) -> Any:
    """Gathers arrays on process 0. All processes must call it.

    Each shard is sent directly to process 0, and no other process has the whole array. No XLA program runs,
    so arrays may belong to meshes without devices of this process. Typed keys become their key data. Returns
    NumPy arrays on process 0 (copies, since the arrays may be donated), and None on the other processes.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = [keys.to_data(leaf) for leaf in leaves]
    owners_by_array = [_owners(array) for array in arrays]
    if not is_first():
        assert _peers is not None
        own_shards = [
            np.asarray(_shard(array, index)).tobytes()
            for array, owners in zip(arrays, owners_by_array, strict=True)
            for index, owner in owners.items()
            if owner == _peers.index
        ]
        if own_shards:
            _peers.give(b"".join(own_shards))
        return None
    senders = sorted({owner for owners in owners_by_array for owner in owners.values()} - {0})
    received = {i: memoryview(_peers.take(i)) for i in senders} if _peers else {}
    results = []
    for array, owners in zip(arrays, owners_by_array, strict=True):
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
    """Gathers arrays on the first device of process 0; keys stay keys. All processes must call it.

    Returns the tree on process 0, and None on the other processes.
    """
    fetched = fetch(tree)
    if fetched is None:
        return None
    device = jax.local_devices()[0]
    return jax.tree.map(lambda data, leaf: keys.from_data(jax.device_put(data, device), leaf), fetched, tree)


def lost(seconds: float) -> peers.LostError | None:
    """The error that names a lost process, or None if no process is lost within `seconds`."""
    return None if _peers is None else _peers.wait_for_loss(seconds)


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

    `line` is printed on standard error; the other processes print `cause`, by default `line`.
    """
    if _peers is not None:
        _peers.die(line, status, line if cause is None else f"{_peers.who} {cause}")


def _at_exit() -> None:
    """Leaves the run if the program has not called `leave`; after an exception, ends the other processes."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        abandon("error: see above", 1, f"failed: {type(error).__name__}")
    try:
        leave()
    except peers.LostError as loss:
        abandon(f"error: {loss}", loss.status)


def _detect() -> tuple[str, int, int, Any]:
    """The arguments that `jax.distributed.initialize()` would detect."""
    cluster = internal("clusters", "ClusterEnv", "detect a cluster")
    address, number, index, local_device_ids = cluster.auto_detect_unset_distributed_params(
        os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, int(peers.JOIN_SECONDS)
    )
    if address is None or number is None or index is None:
        raise FdgError(
            "--distributed: JAX does not detect a cluster (SLURM, MPI, Kubernetes, TPU pod):"
            " give --coordinator-address, --num-processes and --process-id"
        )
    return address, number, index, local_device_ids


def _max_core_sharing(hosts: Sequence[Sequence[Any]]) -> int:
    """The largest number of processes that share cores with one process, which counts too.

    >>> _max_core_sharing([["a", [0, 1]], ["a", [0, 1]], ["b", [0, 1]]])
    2
    >>> _max_core_sharing([["a", [0]], ["a", [1]]])
    1
    """
    cores_by_process = [{(host, core) for core in cores} for host, cores in hosts]
    return max(sum(not cores.isdisjoint(other) for other in cores_by_process) for cores in cores_by_process)


_Index = tuple[tuple[int, int], ...]  # start and stop along each axis


def _owners(array: jax.Array) -> dict[_Index, int]:
    """For each part of an array, the first process that has the part, and so sends it."""
    owners: dict[_Index, int] = {}
    device: Any  # a jax.Device, whose attributes the type checker does not know
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        bounds = _bounds(index, array.shape)
        owners[bounds] = min(owners.get(bounds, device.process_index), device.process_index)
    return dict(sorted(owners.items()))


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> _Index:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _shard(array: jax.Array, bounds: _Index) -> Any:
    """The part of an array with these bounds, which a device of this process has."""
    return next(s.data for s in array.addressable_shards if _bounds(s.index, array.shape) == bounds)
