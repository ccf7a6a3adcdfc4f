"""The cache of compiled programs: hits in the next process, and what happens if it cannot be written."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest

from fdg.commands.cli import guarded
from fdg.errors import FdgError
from fdg.running import program_cache

# Runs code, and prints its status, cache requests, cache hits, and the cache directory.
COUNTED = """
import collections, sys
import jax
seen = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: seen.update([name.rpartition("/")[2]]))
{}
print(status, seen["compile_requests_use_cache"], seen["cache_hits"], jax.config.jax_compilation_cache_dir)
"""
TRAIN = """
from fdg.commands.cli import train_main
from fdg.training import loop
loop.draw_learning_curve = lambda *_, **__: None  # is slow
status = train_main(["--algo", "tests.tiny:Walk", "--devices", "1", "--total-steps", "16", *sys.argv[1:]])
"""


def run(code, *words, **variables):
    """Runs code in a new process: its status, cache requests, cache hits, cache directory, standard error."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "XDG_CACHE_HOME" and not name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))
    }
    words = [sys.executable, "-c", COUNTED.format(code), *words]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=600, check=True, env={**environment, **variables}
    )
    status, requests, hits, directory = done.stdout.splitlines()[-1].split()
    return int(status), int(requests), int(hits), directory, done.stderr


def test_second_process_compiles_nothing(tmp_path):
    cache = tmp_path / "cache"
    words = TRAIN, "--program-cache", str(cache), "--out"
    status, requests, _, directory, _ = run(*words, str(tmp_path / "first"))
    assert status == 0 and requests > 5
    assert directory == str(cache) and any(cache.iterdir())
    assert run(*words, str(tmp_path / "second"))[:3] == (0, requests, requests)


def test_directory_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FdgError, match=r"--program-cache .*file.* is not writable: give another"):
        program_cache.keep_programs(str(tmp_path / "file"))


def test_directory_that_is_not_utf8(tmp_path, monkeypatch):
    """An error if a user gave it, otherwise there is no cache."""
    odd = os.fsdecode(b"caf\xe9")
    with pytest.raises(FdgError, match=r"--program-cache 'caf\\udce9' is not UTF-8"):
        program_cache.keep_programs(odd)
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", odd)
        with pytest.raises(FdgError, match=r"JAX_COMPILATION_CACHE_DIR='caf\\udce9' is not UTF-8"):
            program_cache.keep_programs()
        jax.config.update("jax_compilation_cache_dir", None)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / odd))
        assert program_cache.keep_programs() is None and not list(tmp_path.iterdir())
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_oldest_programs_are_removed_first(tmp_path, monkeypatch):
    for age, name in enumerate(["new-cache", "middle-cache", "old-cache", "notes.txt"]):
        (tmp_path / name).write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (1_000_000 - age, 1_000_000 - age))
    monkeypatch.setattr(program_cache, "MAX_BYTES", 250)
    program_cache._remove_oldest(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["middle-cache", "new-cache", "notes.txt"]


@pytest.mark.parametrize(
    ("variable", "below"), [("/somewhere", "/somewhere"), ("", "~/.cache"), ("relative", "~/.cache")]
)
def test_default_directory(variable, below, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    directory = program_cache.default_directory()
    assert directory.is_relative_to(Path(below).expanduser() / "fdg" / "programs")


def test_corrupt_program_is_removed_with_a_warning(tmp_path, capsys):
    """JAX does not overwrite an entry, and would warn at every start."""
    for name in ("jit_train-12-cache", "jit_train-ab-atime", "jit_train_all-34-cache"):
        (tmp_path / name).write_bytes(b"")
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    entry = "persistent compilation cache entry for 'jit_train': "

    def run(_):
        warnings.simplefilter("always")
        warnings.warn(f"Error reading {entry}ZlibError: incomplete", stacklevel=1)
        warnings.warn(f"Error writing {entry}OSError: No space left on device", stacklevel=1)
        return 0

    try:
        assert guarded(run, []) == 0
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert capsys.readouterr().err.splitlines() == [
        "warning: the cached program jit_train cannot be read: it is compiled again",
        "warning: compiled programs cannot be cached (OSError: No space left on device): the next start"
        " compiles them again",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "jit_train-ab-atime",
        "jit_train_all-34-cache",
    ]
