"""Connects to a Ray cluster (docs.ray.io): a running one, or one on this machine.

Ray is imported on use and logs only errors.
"""

import contextlib
import importlib.util
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fdg.addresses import split_address
from fdg.errors import FdgError, one_line

_CONNECT_TIMEOUT_S = 5.0  # time limit of a connection to a cluster's address
_LOCAL_STORE_BYTES = 512 * 2**20  # size of a new local cluster's object store

# Variables of a machine or session: each host keeps its own values.
_HOST_VARIABLES = frozenset(
    "HOME USER LOGNAME SHELL HOSTNAME PWD OLDPWD SHLVL TERM TMPDIR PATH _ VIRTUAL_ENV DISPLAY LS_COLORS"
    " CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES TPU_VISIBLE_CHIPS JAX_LOCAL_DEVICE_IDS"
    " PYTHONHOME PYTHONEXECUTABLE".split()
)
_HOST_PREFIXES = ("RAY_", "SSH_", "XDG_", "DBUS_", "SLURM_", "PMI", "OMPI_", "KUBERNETES_", "CONDA_")


def connect(address: str | None = None, local_cpus: int | None = None) -> Any:
    """Connects to a cluster and returns the module `ray`.

    `address` is HOST:PORT of the cluster's head. None means RAY_ADDRESS, or else the cluster of this machine,
    or else a new local cluster with `local_cpus` CPUs, which ends with this process.
    """
    ray = module()
    if ray.is_initialized():
        return ray
    target = address or os.environ.get("RAY_ADDRESS") or None
    source = f"--ray-address {address}" if address else f"RAY_ADDRESS={target}"
    if target in (None, "auto"):
        running = _running_address()
        if running is None and target == "auto":
            raise FdgError(f"{source}: this machine is not in a Ray cluster: join one with `ray start`")
        target = running or "local"
    elif target != "local":
        _check_listens(target, source)
    logging_options = {"log_to_driver": False, "logging_level": logging.ERROR}
    with _without_side_effects():
        try:
            if target != "local":
                ray.init(address=target, **logging_options)
                return ray
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            local_options = {"include_dashboard": False, "object_store_memory": _LOCAL_STORE_BYTES}
            ray.init(address="local", num_cpus=local_cpus, **local_options, **logging_options)
            return ray
        except Exception as error:  # Ray raises many types
            if target == "local":
                raise FdgError(f"a local Ray cluster cannot be started: {one_line(error)}") from error
            raise FdgError(
                f"the Ray cluster at {target} cannot be joined ({one_line(error)}): it must"
                f" have the same versions of Python and Ray as this machine"
            ) from error


def module() -> Any:
    """The module `ray`."""
    if importlib.util.find_spec("ray") is None:
        raise FdgError("Ray is not installed: pip install 'fdg[ray]'")
    # Processes without reserved accelerators keep seeing all accelerators.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with _without_side_effects():
        import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    return ray


def inherited_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that processes on other hosts inherit from this process.

    >>> inherited_variables({"XLA_FLAGS": "--x", "HOME": "/", "SLURM_JOB_ID": "3", "WANDB_MODE": "offline"})
    {'XLA_FLAGS': '--x', 'WANDB_MODE': 'offline'}
    """
    return {
        name: value
        for name, value in environment.items()
        if name not in _HOST_VARIABLES and not name.startswith(_HOST_PREFIXES)
    }


def _running_address() -> str | None:
    """The address of the running cluster of this machine, or None.

    Ray's own search would wait for minutes if the cluster was killed.
    """
    candidates = []
    with contextlib.suppress(OSError):
        folder = os.environ.get("RAY_TMPDIR", "/tmp")
        candidates.append(Path(folder, "ray", "ray_current_cluster").read_text().strip())
    with contextlib.suppress(Exception):  # this private function of Ray finds clusters by command lines
        from ray._private.services import find_gcs_addresses

        candidates += sorted(find_gcs_addresses())
    for address in candidates:
        with contextlib.suppress(FdgError):
            _check_listens(address, "")
            return address
    return None


def _check_listens(address: str, source: str) -> None:
    """Raises an `FdgError` if nothing listens at `address`, which the setting `source` gives."""
    if "://" in address:
        raise FdgError(
            f"{source}: addresses of Ray Client (with ://) are not supported: run this on a machine of the"
            " cluster, and give HOST:PORT of the cluster's head"
        )
    host, port = split_address(address, source, "10.0.0.1:6379")
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise FdgError(
            f"{source}: connection failed ({error.strerror or error}): start a cluster with"
            f" `ray start --head --port {port}`, or leave the address out"
        ) from error


@contextlib.contextmanager
def _without_side_effects() -> Iterator[None]:
    """Restores the signal handlers that Ray replaces, and silences JAX's warning that Ray forks a process."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(signal_number) for signal_number in signals]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if is_main_thread:
            for signal_number, handler in zip(signals, handlers, strict=True):
                if handler is not None:
                    signal.signal(signal_number, handler)
