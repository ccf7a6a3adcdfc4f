"""Checks that output files can be written, before the work for them starts."""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from fdg.errors import FdgError
from fdg.files import check_own, refusal


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context in which a file is written: creates its folders; an OSError becomes an `FdgError`."""
    check_writable(path)
    with refusing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield


@contextlib.contextmanager
def refusing(path: object, how: str = "written") -> Iterator[None]:
    """A context in which an OSError becomes an `FdgError`: `path` cannot be `how`."""
    try:
        yield
    except OSError as error:
        raise refused(path, error, how) from error


def check_writable(path: Path) -> None:
    """Checks that a file can be written; creates nothing.

    >>> check_writable(Path("/dev/null/video.gif"))
    Traceback (most recent call last):
    fdg.errors.FdgError: /dev/null/video.gif cannot be written: /dev/null is no folder
    """
    try:
        if path.is_symlink() and (path.parent / "config.json").exists():  # a run directory, maybe another's
            check_own(path)
        above = [path, *path.absolute().parents]
        there = next(one for one in above if os.path.lexists(one) and one.stat())
        if there is path:
            if path.is_dir():
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            if path.is_fifo() or path.is_socket():
                raise OSError(errno.EINVAL, "it is no regular file")
        elif not there.is_dir():
            raise OSError(errno.ENOTDIR, f"{there} is no folder")
        if error := refusal(there):
            raise error
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise refused(path, error) from None


def check_results(folder: Path, names: Iterable[str], what: str = "") -> None:
    """Checks that files can be written into a folder, which is no run directory; `what` ends its fix."""
    for name in names:
        check_writable(folder / name)
    if (folder / "config.json").exists():
        raise FdgError(f"--out {folder} is a run directory: give another folder{what}")


def refused(path: object, error: Exception, how: str = "written") -> FdgError:
    """The error that `path` cannot be `how`, with the system's message."""
    return FdgError(f"{path} cannot be {how}: {getattr(error, 'strerror', None) or error}")
