"""Writes into untrusted folders: follows no symlink, and opens no FIFO or device.

A run directory contains only regular files and real directories; the run directory itself may be a symlink.
`fdg.reading` is the counterpart for reading. `writing` and the functions after it are for output files that a
user names, which may be links or devices; call the checks before the work that makes such a file.
"""

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from fdg.errors import FdgError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the errors of a full disk, a quota and a limit
_PARTIAL = ".partial-"  # the beginning of the name of the temporary folder of `filling`


def check_own(path: Path, is_folder: bool = False) -> None:
    """Raises if `path` exists and is not a regular file (or, with `is_folder`, not a real directory)."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    expected = "directory" if is_folder else "regular file"
    if stat.S_ISLNK(mode):
        problem = f"it is a link, and fdg does not write through links: replace it by a {expected}"
        raise OSError(errno.ELOOP, problem, str(path))
    if not (stat.S_ISDIR(mode) if is_folder else stat.S_ISREG(mode)):
        raise OSError(errno.EINVAL, f"it is not a {expected}: remove it", str(path))


def refusal(path: Path) -> OSError | None:
    """The error, with its fix, if an existing file or folder is not writable; None if it is writable.

    >>> refusal(Path("."))
    """
    if os.access(path, os.W_OK | (os.X_OK if path.is_dir() else 0)):
        return None
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return OSError(errno.EROFS, f"{os.strerror(errno.EROFS)}: give another path")
    return OSError(errno.EACCES, f"no permission to write in {path}: make it writable, or give another path")


def make_folder(path: Path) -> Path:
    """Creates a folder unless it exists, and returns it; its parent must exist."""
    check_own(path, is_folder=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    return path


def open_to_append(path: Path) -> IO[bytes]:
    """Opens a regular file for appending; creates it if it is missing."""
    check_own(path)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "ab")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A context with a new file that atomically replaces `path` at its end; on failure nothing is left."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "x+b") as file:
            yield file
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is None:  # a failed write
            error.filename = str(path)
        raise


def write(path: Path, content: bytes) -> None:
    """Writes a file atomically, replacing one of the same name."""
    with replacing(path) as file:
        file.write(content)


def is_free(path: Path) -> bool:
    """Whether `path` is missing, or a folder that is empty except for remains of a killed `filling`."""
    if not os.path.lexists(path):
        return True
    return path.is_dir() and all(entry.name.startswith(_PARTIAL) for entry in path.iterdir())


@contextlib.contextmanager
def filling(path: Path) -> Iterator[Path]:
    """A context with a folder whose contents move into `path` at its end; if the body fails, none do.

    `path` must be free (`is_free`); it is created if it is missing.
    """
    is_new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    for remains in path.glob(f"{_PARTIAL}*"):
        remove(remains)
    folder = Path(tempfile.mkdtemp(dir=path, prefix=_PARTIAL))
    try:
        yield folder
        for entry in sorted(folder.iterdir()):
            os.replace(entry, path / entry.name)
        folder.rmdir()
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
            if is_new:
                path.rmdir()
        raise


def remove(path: Path) -> None:
    """Removes a file, a folder with its contents, or a symlink (not its target)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """A context with a new file that replaces `path` at its end; on failure nothing is left.

    Creates the folder, and keeps the permissions of an earlier file. Follows a link. Writes into what cannot
    be replaced: a device, a file in a folder that is not writable, or another user's in a sticky one.
    Turns an OSError into an `FdgError`.
    """
    check_writable(path)
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        target, exists = path.resolve(), path.exists()
        if exists and (not path.is_file() or refusal(target.parent) or _is_kept_by_others(target)):
            # No O_CREAT: Linux refuses it for another user's file in a sticky folder (fs.protected_regular).
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                yield file
            return
        with replacing(target) as file:
            if exists:
                shutil.copymode(target, file.name)
            yield file


def _is_kept_by_others(path: Path) -> bool:
    """Whether a file may be written but not replaced: another user's, in a sticky folder such as /tmp."""
    folder = path.parent.stat()
    is_sticky = bool(folder.st_mode & stat.S_ISVTX)
    return is_sticky and os.geteuid() not in (0, folder.st_uid, path.stat().st_uid)


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
            check_own(path)
        candidates = [path, *path.absolute().parents]
        existing = next(p for p in candidates if os.path.lexists(p) and p.stat())
        if existing is path:
            if path.is_dir():
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            if path.is_fifo() or path.is_socket():
                raise OSError(errno.EINVAL, "it is not a regular file")
        elif not existing.is_dir():
            raise OSError(errno.ENOTDIR, f"{existing} is not a folder")
        if error := refusal(existing):
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
