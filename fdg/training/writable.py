"""Checks that output files can be written, before the work for them starts."""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from fdg import files
from fdg.errors import FdgError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """A context with a new file that replaces `path` at its end; on failure nothing is left.

    Creates the folder. Follows a link, and writes into a device, which cannot be replaced. Turns an OSError
    into an `FdgError`.
    """
    check_writable(path)
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_file = path.is_file() or not path.exists()
        with files.replacing(path.resolve()) if is_file else path.open("wb") as file:
            yield file


@contextlib.contextmanager
def explain_os_errors(path: object, participle: str = "written") -> Iterator[None]:
    """A context that turns an OSError into an `FdgError` with the message "`path` cannot be `participle`"."""
    try:
        yield
    except OSError as error:
        raise path_error(path, error, participle) from error


def check_writable(path: Path) -> None:
    """Checks that a file can be written; creates nothing.

    >>> check_writable(Path("/dev/null/video.gif"))
    Traceback (most recent call last):
    fdg.errors.FdgError: /dev/null/video.gif cannot be written: /dev/null is not a folder
    """
    try:
        if path.is_symlink() and (path.parent / "config.json").exists():  # a run directory must have no links
            files.check_own(path)
        candidates = [path, *path.absolute().parents]
        existing = next(p for p in candidates if os.path.lexists(p) and p.stat())
        if existing is path:
            if path.is_dir():
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            if path.is_fifo() or path.is_socket():
                raise OSError(errno.EINVAL, "it is not a regular file")
        elif not existing.is_dir():
            raise OSError(errno.ENOTDIR, f"{existing} is not a folder")
        if error := files.refusal(existing):
            raise error
    except (OSError, ValueError) as error:  # ValueError: the path has a null character
        raise path_error(path, error) from None


def check_results(folder: Path, names: Iterable[str], suffix: str = "") -> None:
    """Checks that files can be written into a folder that is not a run directory; `suffix` ends messages."""
    for name in names:
        check_writable(folder / name)
    if (folder / "config.json").exists():
        raise FdgError(f"--out {folder} is a run directory: give another folder{suffix}")


def path_error(path: object, error: Exception, participle: str = "written") -> FdgError:
    """The error "`path` cannot be `participle`", with the system's message."""
    return FdgError(f"{path} cannot be {participle}: {getattr(error, 'strerror', None) or error}")
