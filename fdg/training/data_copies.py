"""Copies a run's data files into its directory, so that the run can be moved."""

import hashlib
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import envs
from algos.offline.minari import ARRAYS, METADATA, DataSet
from envs.wrappers import unwrapped
from fdg.errors import FdgError
from fdg.reading import open_regular, read_bytes
from fdg.training.run_directory import DATA, RunDirectory

_MOST = 64 << 20  # the largest file that is copied, in bytes


def copy_data_files(run: RunDirectory, algorithm: Any) -> None:
    """Copies an algorithm's data files into the directory of its run.

    Only the digest of a file above 64 MiB is kept. Missing files are skipped: they were not read.
    """
    for field, path in _files(algorithm).items():
        if not os.path.isfile(path):
            continue
        kept, fix = _copy(run.path, field, path), "put the copy {kept} in its place"
        if os.path.getsize(path) <= _MOST:
            content = read_bytes(path, _MOST)
        else:
            kept, fix = kept.with_name(f"{kept.name}.sha256"), "bring back that of {kept}"
            with open_regular(path) as file:
                content = hashlib.file_digest(file, "sha256").hexdigest().encode()
        if not os.path.lexists(kept):
            run.publish(f"{DATA}/{kept.name}", operator.methodcaller("write", content))
        elif read_bytes(kept, _MOST) != content:
            raise FdgError(
                f"{path} has changed since the run in {run.path} began: {fix.format(kept=kept)}, or start a"
                " new run"
            )


def copied_env_files(directory: Path, name: str, parameters: Mapping[str, Any]) -> dict[str, str]:
    """An environment's file parameters, replaced by the copies in a run's directory."""
    found = {}
    for field, path in envs.files_of(name, parameters).items():
        copy = _copy(directory, field, path)
        if os.path.lexists(copy):
            found[field] = str(copy)
        elif not os.path.lexists(path):
            raise FdgError(
                f"{directory / 'config.json'} names {path}, which is not there: put it back, or write its new"
                " place into that file (env)"
            )
    return found


def copied_dataset(directory: Path, values: Mapping[str, Any]) -> dict[str, str]:
    """An algorithm's `dataset`, replaced by the copy in a run's directory.

    The copy of a data set above 64 MiB has only metadata, which suffices to act and resume; it is used if the
    data set is missing or changed.
    """
    kept, given = directory / DATA, values.get("dataset")
    if given is None or not os.path.lexists(kept / METADATA):
        return {}
    there = DataSet(given).folder / METADATA
    may_be_read = not os.path.lexists(kept / ARRAYS) and os.path.isfile(there)
    if may_be_read and read_bytes(there, _MOST) == read_bytes(kept / METADATA, _MOST):
        return {}
    return {"dataset": os.path.abspath(directory)}


def _files(algorithm: Any) -> Mapping[str, str]:
    """Paths of the environment's and the data set's files, by field."""
    algorithm = getattr(algorithm, "algorithm", algorithm)
    env, _ = unwrapped(getattr(algorithm, "env", None))
    of_data = getattr(getattr(algorithm, "data", None), "files", {})
    return {**getattr(getattr(env, "problem", None), "files", {}), **of_data}


def _copy(directory: Path, field: str, path: str) -> Path:
    return directory / DATA / (field + os.path.splitext(path)[1])
