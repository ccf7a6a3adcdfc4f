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

_ANSWER_SECONDS = 5.0  # time limit for an answer at a cluster's address
_LOCAL_STORE = 512 * 2**20  # bytes for the objects of a cluster that is started here

# Variables of a machine or session, not of a run: hosts keep their own.
_THEIRS = frozenset(
    "HOME USER LOGNAME SHELL HOSTNAME PWD OLDPWD SHLVL TERM TMPDIR PATH _ VIRTUAL_ENV DISPLAY LS_COLORS"
    " CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES TPU_VISIBLE_CHIPS JAX_LOCAL_DEVICE_IDS"
    " PYTHONHOME PYTHONEXECUTABLE".split()
)
_THEIR_PREFIXES = ("RAY_", "SSH_", "XDG_", "DBUS_", "SLURM_", "PMI", "OMPI_", "KUBERNETES_", "CONDA_")


def connect(address: str | None = None, local_cpus: int | None = None) -> Any:
    """Connects to a cluster and returns the module `ray`.

    `address` is HOST:PORT of the cluster's head; None for RAY_ADDRESS, a cluster that this machine is part
    of, or a new one of `local_cpus` that ends with this process.
    """
    ray = module()
    if ray.is_initialized():
        return ray
    given = address or os.environ.get("RAY_ADDRESS") or None
    named = f"--ray-address {address}" if address else f"RAY_ADDRESS={given}"
    if given in (None, "auto"):
        found = _of_this_machine()
        if found is None and given == "auto":
            raise FdgError(f"{named}: this machine is in no Ray cluster: join one with `ray start`")
        given = found or "local"
    elif given != "local":
        _check_listens(given, named)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    with _aside():
        try:
            if given != "local":
                ray.init(address=given, **quiet)
                return ray
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            here = {"include_dashboard": False, "object_store_memory": _LOCAL_STORE}
            ray.init(address="local", num_cpus=local_cpus, **here, **quiet)
            return ray
        except Exception as error:  # Ray raises many kinds
            if given == "local":
                raise FdgError(f"no Ray cluster can be started here: {one_line(error)}") from error
            raise FdgError(
                f"the Ray cluster at {given} cannot be joined ({one_line(error)}): it must"
                f" have the same versions of Python and Ray as this machine"
            ) from error


def module() -> Any:
    """The module `ray`."""
    if importlib.util.find_spec("ray") is None:
        raise FdgError("Ray is not installed: pip install 'fdg[ray]'")
    # Processes without reserved accelerators keep seeing all accelerators.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with _aside():
        import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    return ray


def inherited_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that processes on other hosts inherit from the driver.

    >>> inherited_variables({"XLA_FLAGS": "--x", "HOME": "/", "SLURM_JOB_ID": "3", "WANDB_MODE": "offline"})
    {'XLA_FLAGS': '--x', 'WANDB_MODE': 'offline'}
    """
    return {
        name: value
        for name, value in environment.items()
        if name not in _THEIRS and not name.startswith(_THEIR_PREFIXES)
    }


def _of_this_machine() -> str | None:
    """The address of the running cluster that this machine is part of, or None.

    Ray itself would wait minutes for one that was killed.
    """
    candidates = []
    with contextlib.suppress(OSError):
        folder = os.environ.get("RAY_TMPDIR", "/tmp")
        candidates.append(Path(folder, "ray", "ray_current_cluster").read_text().strip())
    with contextlib.suppress(Exception):  # Ray's private function finds running ones by their command lines
        from ray._private.services import find_gcs_addresses

        candidates += sorted(find_gcs_addresses())
    for address in candidates:
        with contextlib.suppress(FdgError):
            _check_listens(address, "")
            return address
    return None


def _check_listens(address: str, named: str) -> None:
    if "://" in address:
        raise FdgError(f"{named}: start this on a machine of the cluster, and give HOST:PORT of its head")
    host, port = split_address(address, named, "10.0.0.1:6379")
    try:
        socket.create_connection((host, port), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise FdgError(
            f"{named}: nobody answers there ({error.strerror or error}): start a cluster with"
            f" `ray start --head --port {port}`, or leave the address out"
        ) from error


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Undoes Ray's SIGTERM handler, and silences JAX's warning that Ray forks a process."""
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if main:
            for number, handler in zip(numbers, before, strict=True):
                if handler is not None:
                    signal.signal(number, handler)
