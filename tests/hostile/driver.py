"""Runs a call under an audit hook and limits, and lists actions that no option allows.

    found = attempt(lambda: fdg.load(path), writable=[out])
    assert not found.faults, found

A fault is: an import of a module in `FOREIGN`, or of a file outside this repository and the installed
packages; a process, a socket, a library or code from such a file; a write, removal or renaming outside
`writable`; an exception other than `FdgError`; more time or memory than allowed.
"""

import contextlib
import dataclasses
import io
import os
import signal
import site
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fdg.errors import FdgError, FdgWarning

SECONDS = 60.0  # time limit of a call
MEMORY = 1 << 30  # memory limit in bytes, in addition to the size of the files
FOREIGN = ("evilmod", "evilpkg", "evil")  # modules in the current folder that hostile files name

_REPOSITORY = Path(__file__).resolve().parents[2]
_INSTALLED = tuple(
    str(Path(path).resolve())
    for path in {
        *sysconfig.get_paths().values(),
        *site.getsitepackages(),
        *(entry for entry in sys.path if "site-packages" in entry),
        sys.base_prefix,
        _REPOSITORY,
    }
)
# Allowed processes: `git describe`, Gymnasium's workers, and `uname` (from `platform.processor`).
_OURS = ("git", "worker_process.py", "uname")
# Actions of environment libraries on import: glfw (of MuJoCo) queries a library's version in a process, and
# urllib3 (of Jumanji) binds a socket to test for IPv6.
_ON_IMPORT = {"subprocess.Popen": "glfw/library.py", "socket.bind": "urllib3/util/connection.py"}
_MADE_ON_IMPORT = ("/tmp/envpool-jumanji-matplotlib",)  # by EnvPool's import
_SYSTEM = ("/usr/lib", "/lib", "/etc/ld")  # folders of system libraries
_PROCESSES = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "pty.spawn",
)
_SOCKETS = (
    *("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"),
    *("urllib.Request", "http.client.connect", "ftplib.connect", "smtplib.connect", "webbrowser.open"),
)
# Per event, the indices of arguments that are paths written to.
_WRITES = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown"), (0,)),
    **dict.fromkeys(("os.utime", "os.setxattr", "os.removexattr", "os.mkfifo", "os.mknod"), (0,)),
    **dict.fromkeys(("os.rename", "shutil.move"), (0, 1)),
    **dict.fromkeys(
        ("os.link", "os.symlink", "shutil.copyfile", "shutil.copytree", "shutil.unpack_archive"), (1,)
    ),
    **dict.fromkeys(("shutil.rmtree", "shutil.chown", "tempfile.mkdtemp", "tempfile.mkstemp"), (0,)),
}
# Events whose last arguments are descriptors of the folders that paths are relative to.
_RELATIVE = ("os.remove", "os.rmdir", "os.mkdir", "os.rename", "os.link", "os.symlink")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclasses.dataclass
class Found:
    """The observed behaviour of a call.

    Attributes:
      faults: actions that no option allows, one line each.
      status: the call's return value, or exit status; None after an error.
      said: the error message, or the last line of standard error.
      seconds: the time taken.
      grown: bytes of memory added, at the peak.
    """

    faults: list[str] = dataclasses.field(default_factory=list)
    status: Any = None
    said: str = ""
    seconds: float = 0.0
    grown: int = 0


class TookTooLong(BaseException):
    """Not an `Exception`, so that the call does not catch it."""


@dataclasses.dataclass
class _Watch:
    writable: tuple[str, ...]
    faults: list[str]
    thread: int


_watch: _Watch | None = None
_hooked = False


def attempt(
    call: Callable[[], Any],
    writable: Sequence[str | Path] = (),
    seconds: float = SECONDS,
    memory: int = MEMORY,
) -> Found:
    """Runs a call and reports its behaviour.

    Args:
      call: a command's `main`, or any function; its output is captured.
      writable: folders and files that it may write to, in addition to the caches and `/dev/null`.
      seconds: time limit.
      memory: limit of added memory, in bytes.
    """
    global _watch
    _hook()
    found, errors = Found(), io.StringIO()
    caches = [
        os.environ.get(name) for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME", "MPLCONFIGDIR")
    ]
    allowed = [str(Path(path).resolve()) for path in (*writable, *caches) if path is not None]
    before, modules, begun = _resident(reset=True), set(sys.modules), time.monotonic()
    watch = _Watch((*allowed, *_MADE_ON_IMPORT, "/dev/null"), found.faults, threading.get_ident())
    try:
        with (
            _quietly(),
            _limited(seconds),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(errors),
        ):
            _watch = watch
            found.status = call()
    except FdgError as error:
        found.said = str(error)
        if "\n" in found.said:
            found.faults.append(f"an error of several lines: {found.said!r:.200}")
    except TookTooLong:
        found.faults.append(f"took longer than {seconds:g} s")
    except SystemExit as error:
        found.status = error.code
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = " ".join(str(error).split())
        found.faults.append(
            f"traceback: {type(error).__name__}: {what:.160} ({where.filename}, line {where.lineno})"
        )
    finally:
        _watch = None
    found.seconds = time.monotonic() - begun
    found.grown = max(0, _peak() - before)
    if found.grown > memory:
        found.faults.append(f"took {found.grown / 1e9:.2f} GB")
    lines = errors.getvalue().strip().splitlines()
    found.said = found.said or (lines[-1] if lines else "")
    if len([line for line in lines if line.startswith("error: ")]) > 1 or "Traceback" in errors.getvalue():
        found.faults.append(f"printed more than a line: {errors.getvalue()!r:.300}")
    if found.status not in (None, 0, 1, 2) and isinstance(found.status, int):
        found.faults.append(f"status {found.status}")
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str) and not _below(file, _INSTALLED):
            found.faults.append(f"import of {name} from {file}")
    found.faults[:] = dict.fromkeys(found.faults)
    return found


def report(rows: Sequence[dict[str, Any]]) -> int:
    """Prints a table of all tries and a list of all faults; returns the exit status."""
    tried: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for name, found in row["tries"].items():
            tried.setdefault(name, []).append(found)
    print("                  tries  refused  worked  faults  s/try  most s  most MB")
    for name, found in tried.items():
        faults = sum(bool(one["faults"]) for one in found)
        worked = sum(not one["faults"] and (one.get("status") == 0 or not one.get("said")) for one in found)
        seconds, grown = ([one.get(key, 0) for one in found] for key in ("seconds", "grown"))
        print(
            f"{name:16} {len(found):6} {len(found) - faults - worked:8} {worked:7} {faults:7}"
            f" {sum(seconds) / len(found):6.2f} {max(seconds):7.1f} {max(grown) / 1e6:7.0f}"
        )
    bad = [
        f"{row.get('kind', '')} {row['number']} {name}: {fault} | {row['changes']}".strip()
        for row in rows
        for name, found in row["tries"].items()
        for fault in found["faults"]
    ]
    print(f"{len(rows)} tried, {len(bad)} faults", *bad, sep="\n")
    return 1 if bad else 0


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths (tuples of keys) of all values nested in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inner for place in ((*at, key), *places(item, (*at, key)))]


def files_size(*paths: str | Path) -> int:
    """Total size in bytes of all files in folders."""
    return sum(one.stat().st_size for path in paths for one in Path(path).rglob("*") if one.is_file())


def _hook() -> None:
    global _hooked
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    watch = _watch
    if watch is None:
        return
    if fault := _fault(event, arguments, watch):
        caller = traceback.extract_stack(limit=12)[:-2]
        ours = [
            frame
            for frame in caller
            if str(_REPOSITORY) in frame.filename and "hostile" not in frame.filename
        ]
        where = f" ({Path(ours[-1].filename).name}, line {ours[-1].lineno})" if ours else ""
        if not any(frame.filename.endswith(_ON_IMPORT.get(event, "\0")) for frame in caller):
            watch.faults.append(fault + where)


def _fault(event: str, arguments: tuple[Any, ...], watch: _Watch) -> str | None:
    if event == "import":
        name = str(arguments[0])
        return f"import of {name}" if name.partition(".")[0] in FOREIGN else None
    if event in ("exec", "compile"):
        file = getattr(arguments[0], "co_filename", None) if event == "exec" else arguments[1]
        file = os.fsdecode(file) if isinstance(file, str | bytes) else "<none>"
        is_file = os.path.isabs(file) or os.path.exists(file)
        return f"{event} of {file}" if is_file and not _below(file, _INSTALLED) else None
    if event.startswith(_PROCESSES):
        return None if _is_ours(event, arguments) else f"{event}: {arguments[:2]!r:.200}"
    if event in _SOCKETS:
        return f"{event} {arguments[1:]!r:.100}"
    if event == "ctypes.dlopen":
        name = str(arguments[0])
        return f"{event} {name}" if "/" in name and not _below(name, (*_INSTALLED, *_SYSTEM)) else None
    if event == "builtins.input":
        return "waits for input"
    if event == "pickle.find_class":
        return (
            None
            if str(arguments[0]).partition(".")[0] in ("numpy", "builtins", "collections")
            else (f"unpickles {arguments[0]}.{arguments[1]}")
        )
    if event == "open":
        path, mode, flags = arguments
        nameless = isinstance(flags, int) and flags & os.O_TMPFILE == os.O_TMPFILE
        if nameless or (isinstance(path, str) and os.path.isdir(path)):  # as in `tempfile.TemporaryFile`
            return None
        writes = bool(set(mode) & set("wax+")) if isinstance(mode, str) else bool((flags or 0) & _WRITING)
        return _written(event, path, watch) if writes else None
    for i in _WRITES.get(event, ()):
        path = arguments[i] if i < len(arguments) else None
        if event in _RELATIVE and isinstance(path, str | bytes):  # relative to an open folder
            at = arguments[-2 + i] if len(_WRITES[event]) == 2 else arguments[-1]
            folder = os.readlink(f"/proc/self/fd/{at}") if isinstance(at, int) and at >= 0 else os.getcwd()
            path = os.path.join(folder, os.fsdecode(path))
        if fault := _written(event, path, watch):
            return fault
    return None


def _is_ours(event: str, arguments: tuple[Any, ...]) -> bool:
    words = arguments[1] if len(arguments) > 1 and isinstance(arguments[1], list | tuple) else ()
    return any(Path(str(word)).name in _OURS for word in words[:3])


def _written(event: str, path: Any, watch: _Watch) -> str | None:
    if not isinstance(path, str | bytes | os.PathLike):  # a descriptor that was opened before
        return None
    real = os.path.realpath(os.fsdecode(path))
    return (
        None if _below(real, watch.writable) or "__pycache__" in real else f"{event} of {os.fsdecode(path)}"
    )


def _below(path: str, folders: Sequence[str]) -> bool:
    real = os.path.realpath(path)
    return any(real == folder or real.startswith(folder.rstrip("/") + "/") for folder in folders)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FdgWarning)
        yield


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Interrupts the main thread after `seconds`, unless it waits for a core that other processes use."""

    begun, worked = time.monotonic(), time.process_time()

    def over(*_: Any) -> None:
        share = (time.process_time() - worked) / (time.monotonic() - begun)
        if time.process_time() - worked > seconds or share < 0.02:
            raise TookTooLong
        signal.setitimer(signal.ITIMER_REAL, seconds / 2)  # other processes use the cores

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _resident(reset: bool = False) -> int:
    """Resident memory of this process in bytes; `reset` also resets its peak."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def scratch(prefix: str = "fdg-hostile-") -> Path:
    """A new temporary folder, with a path without symbolic links."""
    return Path(tempfile.mkdtemp(prefix=prefix)).resolve()
