"""Checkpoints of an engine's state: whole, atomic, sealed, and readable on other devices.

    checkpoints/
      120/                  the state after iteration 120
        arrays/             Orbax's: arrays and JSON, nothing that could be run
        manifest.json       the run that it is of, and the checksum of every other file; written last
      140.writing/          what is being written, or what a killed process left
      160.damaged/          what could not be read, once a new 160 took its place
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

KEEP = 3  # number of newest checkpoints; older ones are removed once a newer one is complete
_SHARE = 0.01  # most of a run's time that automatic checkpoints may take
_ARRAYS, _MANIFEST = "arrays", "manifest.json"
_MANIFEST_BYTES = 64 << 20


class OtherStateError(FdgError):
    """A checkpoint that is of another state than the one to restore."""


class Checkpoints:
    """The checkpoints of one run, one directory an iteration.

    Each is written under a temporary name, sealed with a manifest of checksums, and renamed. So a crash while
    writing leaves earlier checkpoints intact, and later corruption is detected before anything is loaded.
    Writing is asynchronous. With several processes, all call `save` and process 0 writes; each process
    restores the shards of its devices.

    The manifest also names the run, by the `id` in the `config.json` of the run directory around it: a
    checkpoint of another run is not used. A copy of a run directory has the same id.

    Args:
      directory: made when the first checkpoint is written.
      keep: how many of the newest stay.
    """

    def __init__(self, directory: Path, keep: int = KEEP):
        self._directory, self._keep = directory.absolute(), keep
        self._noted = self._directory.with_name(f".{self._directory.name}")
        self._config = self._directory.with_name("config.json")
        self._is_of_run, self._run = self._config.exists(), _id_of(self._directory.parent)
        self._whole: set[int] = set()  # looked at before, and found undamaged
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._begun, self._seconds = -math.inf, 0.0  # of the latest: when, and how long it took to write

    def iterations(self) -> list[int]:
        """Those that have a checkpoint, damaged or not, in ascending order."""
        if not self._directory.is_dir():
            return []
        return sorted(int(path.name) for path in self._directory.iterdir() if path.name.isdecimal())

    def latest(self) -> int | None:
        """Iteration of the newest checkpoint that is undamaged, None where there is none at all.

        Warns (`FdgWarning`) of newer ones that are damaged or of another run, or were removed.

        Raises:
          FdgError: there are checkpoints, and none can be used; or there were some, and all are gone.
        """
        refused: list[str] = []
        there, newest = self.iterations(), self._newest()
        if newest >= 0 and not there:  # something else than a run that had none yet
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
        """What is wrong with a checkpoint, in words that follow its name, None if nothing is.

        Compares all checksums, and the run.
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
        """Whether the manifest of a checkpoint names this run; no checksum is compared."""
        try:
            manifest = read_bytes(self._directory / str(iteration) / _MANIFEST, _MANIFEST_BYTES)
            return bool(json.loads(manifest).get("run") == self._run)
        except (ValueError, AttributeError, RecursionError):  # also `FdgError`
            return False

    def are_cheap(self) -> bool:
        """Whether writing the latest one took at most 1% of the time since; true if there is none yet.

        With several processes, process 0 decides, since it writes. A collective.
        """
        busy = self._writing is not None and not self._writing.done()
        cheap = not busy and self._seconds <= _SHARE * (time.monotonic() - self._begun)
        return bool(distributed.exchange(cheap)[0])

    def save(self, iteration: int, state: Any) -> None:
        """Starts to write `state`; it may be donated as soon as this returns.

        Raises:
          RunError: this checkpoint or the one before cannot be written.
        """
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
        """Keeps a checkpoint from being removed when newer ones are written."""
        files.open_to_append(self._directory / f"{iteration}.keep").close()

    def last_finite(self) -> int | None:
        """The newest undamaged checkpoint without a not-a-number in it, None if there is none."""
        self._wait()
        for iteration in reversed(self.iterations()):
            if self.damage(iteration) is None and not any(map(_has_nan, self.arrays(iteration).values())):
                return iteration
        return None

    def arrays(self, iteration: int) -> dict[str, np.ndarray]:
        """All that a checkpoint holds, by name, as NumPy arrays; keys are their words.

        Raises:
          FdgError: it is damaged.
        """
        with self._reader(iteration) as (reader, where):
            return {name: np.asarray(value) for name, value in reader.restore(where).items()}

    def restore(self, iteration: int, target: Any) -> Any:
        """The state at `iteration`.

        Args:
          iteration: of a complete checkpoint.
          target: pytree of `jax.ShapeDtypeStruct` with shardings, for instance `engine.state_shape`; the
            devices may be others than those that the checkpoint was written on. A node with a method
            `resized(shape)`, such as a replay buffer, may be stored smaller than it is here.

        Raises:
          OtherStateError: the checkpoint holds the state of something else.
          FdgError: it is damaged.
        """
        stored_target = jax.tree.map(_stored_shape, _arrays_by_name(target))
        expected = {name: _shape(leaf) for name, leaf in stored_target.items()}
        with self._reader(iteration) as (reader, where):
            metadata = reader.metadata(where)
            metadata = getattr(metadata, "item_metadata", metadata)
            found = {name: _shape(leaf) for name, leaf in metadata.items()}
            if found == expected:
                # As NumPy arrays: some devices of the shardings may be in other processes.
                stored = reader.restore(where, args=_orbax().args.StandardRestore(
                    jax.tree.map(_numpy_shape, stored_target)
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
        """Waits until everything is written.

        Raises:
          RunError: the last checkpoint could not be written.
        """
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                self._wait()
            finally:
                writer.shutdown()

    # --- parts ---

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
            files.replace(temporary / _MANIFEST, _manifest(iteration, _checksums(temporary), self._run))
            if os.path.lexists(final):  # damaged, or this run would not be here again
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
        except Exception as error:  # Orbax and TensorStore raise many types, none of them their own
            is_gone = not self._config.exists() and (self._is_of_run or isinstance(error, FileNotFoundError))
            self._clear(temporary, is_gone)
            why = error.strerror if isinstance(error, OSError) and error.strerror else _first_line(error)
            what = f"cannot write a checkpoint in {self._directory}"
            raise unwritable(self._directory.parent, what, why, is_gone, "make room there") from error

    def _clear(self, temporary: Path, is_gone: bool) -> None:
        """Removes what is half written; of a directory that is gone, what writing has made again."""
        for _ in range(20):
            shutil.rmtree(temporary, ignore_errors=True)
            if not is_gone:
                return
            with contextlib.suppress(OSError):
                self._directory.rmdir()
                self._directory.parent.rmdir()
            if not self._directory.parent.exists():
                return
            time.sleep(0.1)  # TensorStore's threads still make folders

    def _note(self, iteration: int) -> None:
        """Records the newest iteration next to the directory; if that fails, removal goes undetected."""
        with contextlib.suppress(OSError):
            files.replace(self._noted, f"{iteration}\n".encode())

    def _newest(self) -> int:
        """The iteration that was noted, -1 where none was."""
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
        """What reads a checkpoint, and where its arrays are; checks its files first."""
        where = self._directory / str(iteration)
        reason = self.damage(iteration) if where.is_dir() else "is damaged (there is none)"
        if reason is None:
            try:
                yield _checkpointer(), where / _ARRAYS
                return
            except FdgError:
                raise
            except Exception as error:  # Orbax and TensorStore raise many types, none of them their own
                reason = f"is damaged ({_first_line(error)})"
        others = [other for other in self.iterations() if other != iteration]
        fix = f"go on from iteration {max(others)}" if others else "there is no other one"
        raise FdgError(f"checkpoint {where} {reason}: {fix}")


def _id_of(run: Path) -> str | None:
    """The id of the run in a directory, None where it has none."""
    try:
        found = read_config(run).get("id")
    except FdgError:
        return None
    return found if isinstance(found, str) else None


def _orbax() -> Any:
    # Here, because importing Orbax takes as long as importing JAX.
    import orbax.checkpoint

    logging.getLogger("absl").addFilter(_is_no_echo)  # added again, it stays one
    return orbax.checkpoint


def _checkpointer() -> Any:
    # Each process for itself: Orbax would otherwise wait for the others at every step.
    orbax, me = _orbax(), jax.process_index()
    alone = orbax.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
    )
    handler = orbax.StandardCheckpointHandler(multiprocessing_options=alone)
    return orbax.Checkpointer(handler, multiprocessing_options=alone)


def _checksums(directory: Path) -> dict[str, str]:
    """SHA-256 of every file below a directory, by its path there, but of the manifest.

    Raises:
      FdgError: there is something else than folders and regular files: reading would follow it, or wait.
    """
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
    """The manifest's bytes: the same files make the same bytes, so none of them can change unnoticed."""
    named = {} if run is None else {"run": run}
    return (json.dumps({"iteration": iteration, **named, "files": checksums}, indent=1) + "\n").encode()


def _has_nan(array: np.ndarray) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating)) and bool(np.isnan(array.astype(np.float32)).any())


def _numpy_shape(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)  # of the shape, and without its memory


def _place(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """A global array; each process creates only its addressable shards, possibly none."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index], dtype=array.dtype)


def _names(tree: Any) -> list[str]:
    """Names of the leaves, such as `train/params/kernel`, in order.

    >>> _names({"a": (1, 2), "b": {"c": 3}})
    ['a/0', 'a/1', 'b/c']
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return unique_names(
        jax.tree_util.keystr(path, simple=True, separator="/") or "state" for path, _ in paths
    )


def _arrays_by_name(tree: Any) -> dict[str, Any]:
    """The leaves that are stored: keys as their data, and no arrays without elements (Orbax refuses them)."""
    leaves = zip(_names(tree), jax.tree.leaves(tree), strict=True)
    stored = {name: leaf for name, leaf in leaves if leaf.size}
    return {
        name: jax.random.key_data(leaf) if keys.is_key(leaf.dtype) and isinstance(leaf, jax.Array) else leaf
        for name, leaf in stored.items()
    }


def _resized(stored: dict[str, Any], target: Any) -> dict[str, Any]:
    """The stored arrays by name, each node of `target` with a method `resized` as it returns them."""
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
    made_by = keys.implementation(leaf.shape, leaf.dtype)
    if made_by is None:
        return leaf
    _, words = made_by
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
    if of_the_system := re.search(r": ([A-Z][^:]*) \[os_error_code", str(error)):  # as TensorStore says it
        return of_the_system[1]
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
