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

_MAX_BYTES = 64 << 20  # files above this size in bytes are not copied


def copy_data_files(run: RunDirectory, algorithm: Any) -> None:
    """Copies an algorithm's data files into the directory of its run.

    For a file above 64 MiB only its SHA-256 is stored. Missing files are skipped, since nothing read them.
    Raises `FdgError` if a file differs from an earlier copy.
    """
    for field, path in _data_files(algorithm).items():
        if not os.path.isfile(path):
            continue
        copy, fix = _copy_path(run.path, field, path), "put the copy {copy} in its place"
        if os.path.getsize(path) <= _MAX_BYTES:
            content = read_bytes(path, _MAX_BYTES)
        else:
            copy, fix = (
                copy.with_name(f"{copy.name}.sha256"),
                "bring back the file whose checksum is in {copy}",
            )
            with open_regular(path) as file:
                content = hashlib.file_digest(file, "sha256").hexdigest().encode()
        if not os.path.lexists(copy):
            run.publish(f"{DATA}/{copy.name}", operator.methodcaller("write", content))
        elif read_bytes(copy, _MAX_BYTES) != content:
            raise FdgError(
                f"{path} has changed since the run in {run.path} began: {fix.format(copy=copy)}, or start a"
                " new run"
            )


def copied_env_files(directory: Path, name: str, parameters: Mapping[str, Any]) -> dict[str, str]:
    """Maps parameters of an environment that name files to the files' copies in a run's directory, if any."""
    copies = {}
    for field, path in envs.files_of(name, parameters).items():
        copy = _copy_path(directory, field, path)
        if os.path.lexists(copy):
            copies[field] = str(copy)
        elif not os.path.lexists(path):
            raise FdgError(
                f"{directory / 'config.json'} names {path}, which does not exist: restore it, or write its"
                " new path into that file (env)"
            )
    return copies


def copied_dataset(directory: Path, values: Mapping[str, Any]) -> dict[str, str]:
    """`{"dataset": folder}` if the copy in the run's directory replaces the original data set; else `{}`.

    The copy of a data set above 64 MiB has only metadata, which suffices to act and resume. The copy is used
    if the original is missing or has changed.
    """
    copies, dataset = directory / DATA, values.get("dataset")
    if dataset is None or not os.path.lexists(copies / METADATA):
        return {}
    original = DataSet(dataset).folder / METADATA
    may_use_original = not os.path.lexists(copies / ARRAYS) and os.path.isfile(original)
    if may_use_original and read_bytes(original, _MAX_BYTES) == read_bytes(copies / METADATA, _MAX_BYTES):
        return {}
    return {"dataset": os.path.abspath(directory)}


def _data_files(algorithm: Any) -> Mapping[str, str]:
    """Paths of the files of an algorithm's environment and data set, by field."""
    algorithm = getattr(algorithm, "algorithm", algorithm)
    env, _ = unwrapped(getattr(algorithm, "env", None))
    dataset_files = getattr(getattr(algorithm, "data", None), "files", {})
    return {**getattr(getattr(env, "problem", None), "files", {}), **dataset_files}


def _copy_path(directory: Path, field: str, path: str) -> Path:
    return directory / DATA / (field + os.path.splitext(path)[1])
