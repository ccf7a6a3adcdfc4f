"""The persistent compilation cache: a second start of a job compiles nothing."""

import contextlib
import glob
import hashlib
import os
import platform
import re
from pathlib import Path

import jax

from fdg.arguments import checked
from fdg.errors import FdgError

MAX_BYTES = 2 << 30  # the size above which the oldest cached programs are removed
OFF = "off"  # the name that stands for no cache directory


@checked
def keep_programs(directory: str | None = None) -> str | None:
    """Turns on JAX's persistent compilation cache. Call it before anything is compiled.

    JAX's own settings take precedence: `JAX_COMPILATION_CACHE_DIR`, `JAX_ENABLE_COMPILATION_CACHE`,
    `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS`. JAX's key covers the program, the devices, XLA's flags and
    the versions of JAX and XLA. If the default directory is not writable, nothing is cached.

    Args:
      directory: the cache directory; None for `default_directory()`, "off" for no cache.

    Returns:
      The cache directory; None without a cache.

    Raises:
      FdgError: `directory` is not writable, or its name (or the name in JAX's setting) is not UTF-8, which
        XLA requires.
    """
    if directory == OFF:
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    if not getattr(jax.config, "jax_enable_compilation_cache", True):
        return None
    jax_directory = getattr(jax.config, "jax_compilation_cache_dir", None)
    if directory is None and jax_directory:
        if not _is_utf8(jax_directory):
            raise FdgError(
                f"JAX_COMPILATION_CACHE_DIR={jax_directory!r} is not UTF-8: give another directory"
            )
        return jax_directory
    if directory is not None and not _is_utf8(directory):
        raise FdgError(f"--program-cache {directory!r} is not UTF-8: give another directory, or '{OFF}'")
    path = default_directory() if directory is None else Path(directory)
    if path is None or not _is_usable(path):
        if directory is not None:
            raise FdgError(f"--program-cache {directory} is not writable: give another directory, or '{OFF}'")
        return None
    _remove_oldest(path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # Cache programs that compile fast, too, because there are many.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return str(path)


def cache_directory() -> Path | None:
    """The cache directory, set by this module or by JAX's own settings; None without a cache."""
    directory = getattr(jax.config, "jax_compilation_cache_dir", None)
    is_enabled = getattr(jax.config, "jax_enable_compilation_cache", True)
    return Path(directory) if directory and is_enabled else None


def remove_corrupt_entry(warning: str) -> str | None:
    """Removes a cache entry that JAX could not read; returns a line to print instead of JAX's warning.

    JAX compiles the program again, but does not replace a corrupt entry, such as one that a killed process
    left incomplete. Returns None if `warning`, JAX's text, is not about the cache.

    >>> remove_corrupt_entry("something else")
    """
    match = re.match(
        r"Error (reading|writing) persistent compilation cache entry for '([^']*)': (.*)", warning
    )
    if match is None:
        return None
    operation, name, reason = match.groups()
    if operation == "writing":
        return f"compiled programs cannot be cached ({reason:.100}): the next start compiles them again"
    directory = cache_directory()
    for path in directory.glob(f"{glob.escape(name)}-*-cache") if directory else ():
        with contextlib.suppress(OSError):
            path.unlink()
    return f"the cached program {name} cannot be read: it is compiled again"


def default_directory() -> Path | None:
    """A directory for this processor in the user's cache; None for a user without a home directory.

    Machines with different processors may share a home directory. JAX's key does not contain the processor,
    so code that was compiled for another processor would be loaded and could fail.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification says to ignore relative paths
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(base, "fdg", "programs", _processor())


def _processor() -> str:
    """A digest of this machine's processor features."""
    features = f"{platform.machine()} {platform.processor()}"
    with contextlib.suppress(OSError):
        lines = set(Path("/proc/cpuinfo").read_text().splitlines())
        names = "model name", "flags", "Features", "CPU part"
        features += "".join(sorted(line for line in lines if line.startswith(names)))
    return hashlib.sha256(features.encode()).hexdigest()[:12]


def _is_utf8(name: str) -> bool:
    """Whether a file name is UTF-8 (Python decodes other bytes to lone surrogates)."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_usable(path: Path) -> bool:
    """Whether the directory exists or can be created, and is readable and writable."""
    if not _is_utf8(str(path)):
        return False
    try:
        # Cached programs are executed, so only the user may write here.
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.R_OK | os.W_OK | os.X_OK)


def _remove_oldest(path: Path) -> None:
    """Removes the oldest entries until the cache has at most `MAX_BYTES`."""
    entries = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(path):
            if entry.name.endswith("-cache"):  # the suffix of JAX's entries
                stat = entry.stat()
                entries.append((stat.st_mtime, stat.st_size, entry.path))
    total_bytes = sum(size for _, size, _ in entries)
    for _, size, entry_path in sorted(entries):
        if total_bytes <= MAX_BYTES:
            return
        with contextlib.suppress(OSError):  # another process has removed it
            os.remove(entry_path)
        total_bytes -= size
