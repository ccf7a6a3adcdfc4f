"""Data files of a run: copies in its directory, so that it can be used wherever it and they are moved."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.text import FILES
from fdg.errors import FdgError
from fdg.reading import read_bytes
from fdg.training.run_directory import DATA, RunDirectory

_MOST = 64 << 20  # bytes of a file that is copied


def keep_data(run: RunDirectory, algorithm: Any) -> None:
    """Copies the files that an algorithm's problems are read from into the directory of its run.

    Raises:
      FdgError: they are other than the copies that an earlier sitting of the run has made.
    """
    for field, path in _files(algorithm).items():
        if os.path.getsize(path) > _MOST:
            continue
        content, copy = read_bytes(path, _MOST), _copy(run.path, field, path)
        if not os.path.lexists(copy):
            run.publish(f"{DATA}/{copy.name}", functools.partial(_write, content=content))
        elif read_bytes(copy, _MOST) != content:
            raise FdgError(
                f"{path} has changed since the run in {run.path} began: put the copy {copy} in its place, or"
                " start a new run"
            )


def kept_data(directory: Path, name: str, parameters: Mapping[str, Any]) -> dict[str, str]:
    """Parameters of an environment that are files, as a run's directory has copies of them.

    Raises:
      FdgError: a file that the run names is not there, nor a copy.
    """
    found = {}
    for field in FILES if name.startswith("text:") else ():
        path = parameters.get(field)
        if not isinstance(path, str) or not path:
            continue
        copy = _copy(directory, field, path)
        if os.path.lexists(copy):
            found[field] = str(copy)
        elif not os.path.lexists(path):
            raise FdgError(
                f"{directory / 'config.json'} names {path}, which is not there: put it back, or write its new"
                " place into that file (env)"
            )
    return found


def _files(algorithm: Any) -> Mapping[str, str]:
    """The files by field: of a sweep, those of what is swept."""
    env = getattr(getattr(algorithm, "algorithm", algorithm), "env", None)
    return getattr(getattr(env, "problem", None), "files", {})


def _write(file: Any, content: bytes) -> None:
    file.write(content)


def _copy(directory: Path, field: str, path: str) -> Path:
    return directory / DATA / (field + os.path.splitext(path)[1])
