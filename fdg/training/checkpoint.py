"""Checkpoints of an engine's state: atomic, with checksums, and restorable on other devices.

    checkpoints/
      120/                  the state after iteration 120
        arrays/             written by Orbax: arrays and JSON, no code
        manifest.json       the run's id and the checksum of every other file; written last
      140.writing/          incomplete: being written, or left by a killed process
      160.damaged/          an unreadable checkpoint that a new 160 replaced
    .checkpoints            the newest iteration, to detect that its checkpoint was removed

See docs/decisions/028-checkpoints-are-sealed.md, and for the run 081-nothing-is-written-through-a-link.md.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdg import files, keys
from fdg.errors import FdgError, FdgWarning
from fdg.processes import distributed
from fdg.reading import open_regular, read_bytes
from fdg.running.leaves import typed_like, unique_names
from fdg.training.run_directory import read_config, unwritable

KEEP = 3  # newest checkpoints to keep; older ones are removed once a newer one is complete
_SHARE = 0.01  # the largest share of a run's time for automatic checkpoints
_ARRAYS, _MANIFEST = "arrays", "manifest.json"
_MANIFEST_BYTES = 64 << 20


class OtherStateError(FdgError):
    """The checkpoint's state has other leaves or shapes than the one to restore."""


class Checkpoints:
    """The checkpoints of a run, one directory for each saved iteration.

    Each is written under a temporary name, sealed with a manifest of checksums, and renamed. So a crash while
    writing leaves earlier checkpoints intact, and later corruption is detected before anything is loaded.
    Writing is asynchronous. With several processes, all call `save` and process 0 writes; each process
    restores the shards of its devices.

    The manifest also names the run, by the `id` in the `config.json` of the run directory around it: a
    checkpoint of another run is not used. A copy of a run directory has the same id.
    """

    def __init__(self, directory: Path, keep: int = KEEP):
        self._directory, self._keep = directory.absolute(), keep
        self._noted = self._directory.with_name(f".{self._directory.name}")
        self._config = self._directory.with_name("config.json")
        self._is_of_run, self._run = self._config.exists(), _id_of(self._directory.parent)
        self._whole: set[int] = set()  # checked and undamaged
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._begun, self._seconds = -math.inf, 0.0  # start and duration of the latest write

    def iterations(self) -> list[int]:
        """The iterations with a checkpoint, damaged or not, ascending."""
        if not self._directory.is_dir():
            return []
        return sorted(int(path.name) for path in self._directory.iterdir() if path.name.isdecimal())

    def latest(self) -> int | None:
        """The iteration of the newest usable checkpoint; None if there never was one.

        Warns (`FdgWarning`) of newer ones that are damaged, of another run, or removed.
        """
        refused: list[str] = []
        there, newest = self.iterations(), self._newest()
        if newest >= 0 and not there:
            raise FdgError(
                f"all checkpoints in {self._directory} were removed (the newest was of iteration"
                f" {newest:,}): bring them back from a copy, or start a new run with another --out"
            )
        if newest > max(there, default=newest):
            refused.append(f"checkpoint {self._directory / str(newest)}, the newest, was removed")
        for iteration in reversed(there):
            reason = self.damage(iteration)
            if reason is None:
                if refused:
                    unused = "" if refused[-1].endswith("removed") else "it is not used, "
                    warnings.warn(
                        f"{'; '.join(refused)}: {unused}going on from iteration {iteration}",
                        FdgWarning,
                        stacklevel=2,
                    )
                return iteration
            refused.append(f"checkpoint {self._directory / str(iteration)} {reason}")
        if refused:
            raise FdgError(
                f"{refused[0]}, and so is every other one in {self._directory}: bring one back from a copy,"
                f" or start a new run"
            )
        return None

    def damage(self, iteration: int) -> str | None:
        """Why a checkpoint cannot be used, as words that follow its name; None if it can.

        Compares all checksums and the run's id.
        """
        if iteration in self._whole:
            return None
        where = self._directory / str(iteration)
        if not (where / _MANIFEST).exists():
            return f"is damaged (it has no {_MANIFEST})"
        try:
            sealed, found = read_bytes(where / _MANIFEST, _MANIFEST_BYTES), _checksums(where)
        except OSError as error:
            return f"is damaged ({error.filename}: {error.strerror})"
        except FdgError as error:
            return f"is damaged ({error})"
        here = self._run
        if sealed == _manifest(iteration, found, here):
            self._whole.add(iteration)
            return None
        try:
            content = json.loads(sealed)
            expected, run = content["files"], content.get("run")
            differing = sorted(set(expected.items()) ^ set(found.items()))
            if not differing and run != here:
                return (
                    f"is of another run ({run or 'one without an id'}, and this is {here or 'one without'})"
                )
            name = differing[0][0]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return f"is damaged (its {_MANIFEST} cannot be read)"
        if name not in found:
            return f"is damaged ({name} is missing)"
        return f"is damaged ({name} {'is not what was written' if name in expected else 'was added'})"

    def is_own(self, iteration: int) -> bool:
        """Whether a checkpoint's manifest names this run; compares no checksums."""
        try:
            manifest = read_bytes(self._directory / str(iteration) / _MANIFEST, _MANIFEST_BYTES)
            return bool(json.loads(manifest).get("run") == self._run)
        except (ValueError, AttributeError, RecursionError):  # also `FdgError`
            return False

    def are_cheap(self) -> bool:
        """Whether writing the latest checkpoint took at most 1% of the time since; True before the first.

        With several processes, process 0 decides, since it writes. A collective.
        """
        busy = self._writing is not None and not self._writing.done()
        cheap = not busy and self._seconds <= _SHARE * (time.monotonic() - self._begun)
        return bool(distributed.exchange(cheap)[0])

    def save(self, iteration: int, state: Any) -> None:
        """Writes a checkpoint asynchronously; `state` may be donated as soon as this returns."""
        arrays = _arrays_by_name(state)
        if distributed.count() > 1:
            arrays = distributed.fetch(arrays)
            if arrays is None:
                return
        else:
            # Copy: on a CPU the writer would read the buffers in place, and the next `run` overwrites them.
            # `device_put` copies without compiling a program for each shape.
            arrays = jax.device_put(arrays, may_alias=False)
        self._wait()
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._whole.discard(iteration)
        self._begun = time.monotonic()
        self._writing = self._writer.submit(self._write, iteration, arrays)

    def protect(self, iteration: int) -> None:
        """Marks a checkpoint so that it is not removed when newer ones are written."""
        files.open_to_append(self._directory / f"{iteration}.keep").close()

    def last_finite(self) -> int | None:
        """The newest undamaged checkpoint without NaN, or None."""
        self._wait()
        for iteration in reversed(self.iterations()):
            if self.damage(iteration) is None and not any(map(_has_nan, self.arrays(iteration).values())):
                return iteration
        return None

    def arrays(self, iteration: int) -> dict[str, np.ndarray]:
        """The arrays of a checkpoint by name, as NumPy arrays; random keys as their words."""
        with self._reader(iteration) as (reader, where):
            return {name: np.asarray(value) for name, value in reader.restore(where).items()}

    def restore(self, iteration: int, target: Any) -> Any:
        """Restores the state at `iteration`; `OtherStateError` if it has other leaves or shapes.

        `target` is a pytree of `jax.ShapeDtypeStruct` with shardings, such as `engine.state_shape`; the
        devices may differ from those that wrote the checkpoint. A node with a method `resized(shape)`, such
        as a replay buffer, may be smaller in the checkpoint.
        """
        stored_target = jax.tree.map(_stored_shape, _arrays_by_name(target))
        expected = {name: _shape(leaf) for name, leaf in stored_target.items()}
        with self._reader(iteration) as (reader, where):
            metadata = reader.metadata(where)
            metadata = getattr(metadata, "item_metadata", metadata)
            found = {name: _shape(leaf) for name, leaf in metadata.items()}
            if found == expected:
                # As NumPy arrays, since the shardings may have devices of other processes.
                stored = reader.restore(where, args=_orbax().args.StandardRestore(
                    jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), stored_target)
                ))  # fmt: skip
            elif found.keys() == expected.keys():
                stored = _resized(reader.restore(where), target)
                found = {name: _shape(leaf) for name, leaf in stored.items()}
        differing = [name for name in sorted(found | expected) if found.get(name) != expected.get(name)]
        if differing:
            name = differing[0]
            raise OtherStateError(
                f"checkpoint {where.parent} is of another state: '{name}' is {_text(found.get(name))} there"
                f" and {_text(expected.get(name))} here"
            )
        leaves, structure = jax.tree.flatten(target)
        restored = []
        for name, leaf in zip(_names(target), leaves, strict=True):
            shape = _stored_shape(leaf)
            array = _place(
                stored[name] if name in stored else np.zeros(shape.shape, shape.dtype), leaf.sharding
            )
            restored.append(keys.from_words(array, leaf))
        return jax.tree.unflatten(structure, typed_like(leaves, restored))

    def close(self) -> None:
        """Waits for the last write."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                self._wait()
            finally:
                writer.shutdown()

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, iteration: int, arrays: dict[str, Any]) -> None:
        final, temporary = (self._directory / f"{iteration}{end}" for end in ("", ".writing"))
        try:
            checkpointer, begun = _checkpointer(), time.monotonic()
            if not self._is_of_run:
                self._directory.parent.mkdir(parents=True, exist_ok=True)
            files.make_folder(self._directory)
            self._tidy()
            files.make_folder(temporary)
            checkpointer.save(temporary / _ARRAYS, args=_orbax().args.StandardSave(jax.device_get(arrays)))
            files.write(temporary / _MANIFEST, _manifest(iteration, _checksums(temporary), self._run))
            if os.path.lexists(final):  # damaged, or the run would have resumed from it
                damaged = self._directory / f"{iteration}.damaged"
                if os.path.lexists(damaged):
                    files.remove(damaged)
                os.rename(final, damaged)
            os.rename(temporary, final)
            self._note(iteration)
            for old in self.iterations()[: -self._keep]:
                if not os.path.lexists(self._directory / f"{old}.keep"):
                    os.rename(self._directory / str(old), self._directory / f"{old}.removed")
            self._tidy()
            self._seconds = time.monotonic() - begun
        except Exception as error:  # Orbax and TensorStore raise many built-in types
            is_gone = not self._config.exists() and (self._is_of_run or isinstance(error, FileNotFoundError))
            self._clear(temporary, is_gone)
            why = error.strerror if isinstance(error, OSError) and error.strerror else _first_line(error)
            what = f"cannot write a checkpoint in {self._directory}"
            raise unwritable(self._directory.parent, what, why, is_gone, "make room there") from error

    def _clear(self, temporary: Path, is_gone: bool) -> None:
        """Removes the incomplete checkpoint, and folders that the writer recreated in a removed run."""
        for _ in range(20):
            shutil.rmtree(temporary, ignore_errors=True)
            if not is_gone:
                return
            with contextlib.suppress(OSError):
                self._directory.rmdir()
                self._directory.parent.rmdir()
            if not self._directory.parent.exists():
                return
            time.sleep(0.1)  # TensorStore's threads may still create folders

    def _note(self, iteration: int) -> None:
        """Records the newest iteration next to the directory; if that fails, removal goes undetected."""
        with contextlib.suppress(OSError):
            files.write(self._noted, f"{iteration}\n".encode())

    def _newest(self) -> int:
        """The recorded iteration; -1 if none."""
        try:
            return int(read_bytes(self._noted, 20))
        except ValueError:  # also `FdgError`
            return -1

    def _tidy(self) -> None:
        """Removes partially written or removed checkpoints, and all damaged ones but the newest.

        Only the writer calls this, since another process may read at any time.
        """
        for path in self._directory.iterdir():
            if path.suffix in (".writing", ".removed"):
                files.remove(path)
            elif path.suffix == ".damaged" and path.stem.isdecimal():
                others = [int(p.stem) for p in self._directory.glob("*.damaged") if p.stem.isdecimal()]
                if int(path.stem) < max(others):
                    files.remove(path)

    @contextlib.contextmanager
    def _reader(self, iteration: int) -> Iterator[tuple[Any, Path]]:
        """Checks a checkpoint's files; yields Orbax's reader and the folder of its arrays."""
        where = self._directory / str(iteration)
        reason = self.damage(iteration) if where.is_dir() else "is damaged (there is none)"
        if reason is None:
            try:
                yield _checkpointer(), where / _ARRAYS
                return
            except FdgError:
                raise
            except Exception as error:  # Orbax and TensorStore raise many built-in types
                reason = f"is damaged ({_first_line(error)})"
        others = [other for other in self.iterations() if other != iteration]
        fix = f"go on from iteration {max(others)}" if others else "there is no other one"
        raise FdgError(f"checkpoint {where} {reason}: {fix}")


def _id_of(run: Path) -> str | None:
    """The id of the run in a directory, or None."""
    try:
        found = read_config(run).get("id")
    except FdgError:
        return None
    return found if isinstance(found, str) else None


def _orbax() -> Any:
    # Imported here: it takes as long as importing JAX.
    import orbax.checkpoint

    logging.getLogger("absl").addFilter(_is_no_echo)  # adding it twice has no effect
    return orbax.checkpoint


def _checkpointer() -> Any:
    # One process only: otherwise Orbax waits for all processes at every step.
    orbax, me = _orbax(), jax.process_index()
    alone = orbax.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
    )
    handler = orbax.StandardCheckpointHandler(multiprocessing_options=alone)
    return orbax.Checkpointer(handler, multiprocessing_options=alone)


def _checksums(directory: Path) -> dict[str, str]:
    """SHA-256 of every file below a directory by its relative path, without the manifest."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name, mode = path.relative_to(directory).as_posix(), path.lstat().st_mode
        if stat.S_ISDIR(mode) or name == _MANIFEST:
            continue
        if not stat.S_ISREG(mode):
            raise FdgError(f"{name} is {'a link' if stat.S_ISLNK(mode) else 'no regular file'}")
        with open_regular(path) as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _manifest(iteration: int, checksums: dict[str, str], run: str | None) -> bytes:
    """The manifest's content, a function of the files alone, so that any change shows."""
    named = {} if run is None else {"run": run}
    return (json.dumps({"iteration": iteration, **named, "files": checksums}, indent=1) + "\n").encode()


def _has_nan(array: np.ndarray) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating)) and bool(np.isnan(array.astype(np.float32)).any())


def _place(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """A global array; each process creates only its addressable shards, possibly none."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index], dtype=array.dtype)


def _names(tree: Any) -> list[str]:
    """The names of the leaves in order, such as `train/params/kernel`.

    >>> _names({"a": (1, 2), "b": {"c": 3}})
    ['a/0', 'a/1', 'b/c']
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return unique_names(
        jax.tree_util.keystr(path, simple=True, separator="/") or "state" for path, _ in paths
    )


def _arrays_by_name(tree: Any) -> dict[str, Any]:
    """The leaves to store: keys as their words, without empty arrays (Orbax refuses them)."""
    leaves = zip(_names(tree), jax.tree.leaves(tree), strict=True)
    stored = {name: leaf for name, leaf in leaves if leaf.size}
    return {
        name: jax.random.key_data(leaf) if keys.is_key(leaf.dtype) and isinstance(leaf, jax.Array) else leaf
        for name, leaf in stored.items()
    }


def _resized(stored: dict[str, Any], target: Any) -> dict[str, Any]:
    """The stored arrays by name, with `resized` applied to the nodes of `target` that have it."""
    structure = jax.tree.structure(target)
    names = _names(target)
    leaves = [stored.get(name, leaf) for name, leaf in zip(names, jax.tree.leaves(target), strict=True)]
    found = jax.tree.map(
        lambda here, shape: here.resized(shape) if hasattr(here, "resized") else here,
        jax.tree.unflatten(structure, leaves),
        target,
        is_leaf=lambda node: hasattr(node, "resized"),
    )
    resized = zip(names, jax.tree.leaves(found), strict=True)
    return {name: leaf for name, leaf in resized if name in stored}


def _stored_shape(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    words = keys.words_shape(leaf.shape, leaf.dtype)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=leaf.sharding)


def _shape(leaf: Any) -> tuple[tuple[int, ...], Any]:
    return tuple(leaf.shape), leaf.dtype


def _text(shape_dtype: tuple[Any, Any] | None) -> str:
    return "absent" if shape_dtype is None else f"{shape_dtype[1]}{list(shape_dtype[0])}"


def _is_no_echo(record: logging.LogRecord) -> bool:
    """Log filter: drops Orbax's log records of errors that it also raises."""
    return not any(
        words in record.getMessage() for words in ("_SignalingThread", "Metadata file does not exist")
    )


def _first_line(error: Exception) -> str:
    if system := re.search(r": ([A-Z][^:]*) \[os_error_code", str(error)):  # TensorStore's format
        return system[1]
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
