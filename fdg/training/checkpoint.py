"""Checkpoints of an engine's state: atomic, with checksums, and restorable on other devices.

    checkpoints/
      120/                  the state after iteration 120
        arrays/             written by Orbax: arrays and JSON, no code
        manifest.json       the run's id and the checksum of every other file; written last
      120.keep              an empty file: 120 stays when newer checkpoints are written
      140.writing/          incomplete: being written, or left by a killed process
      160.damaged/          an unreadable checkpoint that a new 160 replaced
    .checkpoints            the newest iteration, to detect that its checkpoint was removed

See docs/decisions/028-checkpoints-are-sealed.md; 081-nothing-is-written-through-a-link.md explains the id.
"""

import contextlib
import functools
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
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdg import files, keys
from fdg.errors import FdgError, FdgWarning, kind_of
from fdg.processes import distributed
from fdg.reading import open_regular, read_bytes, read_json
from fdg.running.leaves import typed_like, unique_names
from fdg.training.run_directory import MAX_JSON_BYTES, unwritable_error

KEEP = 3  # newest checkpoints to keep; older ones are removed once a newer one is complete
_MAX_TIME_FRACTION = 0.01  # automatic checkpoints take at most this fraction of a run's time
_ARRAYS, _MANIFEST = "arrays", "manifest.json"
_COMMIT_NOTE = f"{_ARRAYS}/commit_success.txt"  # Orbax's note, with the path of the run; not read
_MAX_MANIFEST_BYTES = 64 << 20


def _precision_fix(in_checkpoint: str, in_target: str) -> str:
    """The fix (": set JAX_ENABLE_X64=1") if two descriptions of arrays differ only in precision; else ""."""
    in_32_bits = functools.partial(re.sub, r"\b(float|u?int)64\b", r"\g<1>32")
    if in_32_bits(in_checkpoint) == in_32_bits(in_target):
        return f": set JAX_ENABLE_X64={int(in_checkpoint != in_32_bits(in_checkpoint))}"
    return ""


class OtherStateError(FdgError):
    """The state in the checkpoint has other leaves or shapes than the state to restore."""


class Checkpoints:
    """The checkpoints of a run, one directory per saved iteration.

    A checkpoint is written under a temporary name, sealed with a manifest of checksums, and renamed. So a
    crash while writing leaves earlier checkpoints intact, and later corruption is detected before loading.
    Writing is asynchronous. With several processes, all processes call `save` and process 0 writes; each
    process restores the shards of its devices.

    The manifest also stores the run's `id`, from the `config.json` in the parent directory: a checkpoint with
    another id is not used. A copy of a run directory has the same id.
    """

    def __init__(self, directory: Path):
        self._directory = directory.absolute()
        self._newest_file = self._directory.with_name(f".{self._directory.name}")
        self._config = self._directory.with_name("config.json")
        self._has_config = self._config.exists()
        self._run_id: str | None = None
        with contextlib.suppress(FdgError):
            run_id = read_json(self._config, MAX_JSON_BYTES).get("id")
            self._run_id = run_id if isinstance(run_id, str) else None
        self._undamaged: set[int] = set()  # iterations whose checkpoints were checked and are undamaged
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending_write: Future[None] | None = None
        self._write_start, self._write_seconds = -math.inf, 0.0  # start and duration of the latest write

    def iterations(self) -> list[int]:
        """The iterations that have a checkpoint (damaged ones too), ascending."""
        if not self._directory.is_dir():
            return []
        return sorted(int(path.name) for path in self._directory.iterdir() if path.name.isdecimal())

    def latest(self) -> int | None:
        """The iteration of the newest usable checkpoint; None if there never was one.

        Warns (`FdgWarning`) about newer checkpoints that are damaged, from another run, or removed. Raises
        `FdgError` if no usable one is left.
        """
        problems: list[str] = []
        stored, newest = self.iterations(), -1
        with contextlib.suppress(ValueError):  # `FdgError` if there is no such file
            newest = int(read_bytes(self._newest_file, 20))
        if newest >= 0 and not stored:
            raise FdgError(
                f"all checkpoints in {self._directory} were removed (the newest was of iteration"
                f" {newest:,}): restore them from a copy, or start a new run with another --out"
            )
        if newest > max(stored, default=newest):
            problems.append(f"checkpoint {self._directory / str(newest)}, the newest, was removed")
        for iteration in reversed(stored):
            reason = self.damage(iteration)
            if reason is None:
                if problems:
                    unused = "" if problems[-1].endswith("removed") else "it is not used, "
                    text = f"{'; '.join(problems)}: {unused}going on from iteration {iteration}"
                    warnings.warn(text, FdgWarning, stacklevel=2)
                return iteration
            problems.append(f"checkpoint {self._directory / str(iteration)} {reason}")
        if problems:
            raise FdgError(
                f"{problems[0]}, and so is every other checkpoint in {self._directory}: restore one from a"
                " copy, or start a new run"
            )
        return None

    def damage(self, iteration: int) -> str | None:
        """Why a checkpoint cannot be used (all checksums and the run's id are compared); None if it can."""
        if iteration in self._undamaged:
            return None
        folder = self._directory / str(iteration)
        if not (folder / _MANIFEST).exists():
            return f"is damaged (it has no {_MANIFEST})"
        try:
            manifest, checksums = read_bytes(folder / _MANIFEST, _MAX_MANIFEST_BYTES), _checksums(folder)
        except OSError as error:
            return f"is damaged ({error.filename}: {error.strerror})"
        except FdgError as error:
            return f"is damaged ({error})"
        if manifest == _manifest(iteration, checksums, self._run_id):
            self._undamaged.add(iteration)
            return None
        try:
            content = json.loads(manifest)
            expected, stored_id = content["files"], content.get("run")
            differing = sorted(set(expected.items()) ^ set(checksums.items()))
            if not differing and stored_id != self._run_id:
                stored_text, run_text = stored_id or "one without an id", self._run_id or "one without"
                return f"is of another run ({stored_text}, and this is {run_text})"
            name = differing[0][0]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return f"is damaged (its {_MANIFEST} cannot be read)"
        if name not in checksums:
            return f"is damaged ({name} is missing)"
        return f"is damaged ({name} {'is not what was written' if name in expected else 'was added'})"

    def completed(self) -> int:
        """The newest iteration that has a checkpoint of this run, by its manifest; 0 if there never was one.

        Raises `FdgError` if all of this run's checkpoints were removed, or are damaged.
        """
        saved = list(filter(self._is_own, self.iterations()))
        return max(saved) if saved else self.latest() or 0

    def _is_own(self, iteration: int) -> bool:
        """Whether a checkpoint's manifest names this run."""
        try:
            manifest = read_bytes(self._directory / str(iteration) / _MANIFEST, _MAX_MANIFEST_BYTES)
            return bool(json.loads(manifest).get("run") == self._run_id)
        except (ValueError, AttributeError, RecursionError):  # `FdgError` is a ValueError
            return False

    def are_cheap(self) -> bool:
        """Whether the latest checkpoint is written, and writing took at most 1% of the time since its start.

        A collective: process 0 decides for all, since it writes.
        """
        has_written = self._pending_write is None or self._pending_write.done()
        limit = _MAX_TIME_FRACTION * (time.monotonic() - self._write_start)
        return bool(distributed.exchange(has_written and self._write_seconds <= limit)[0])

    def save(self, iteration: int, state: Any) -> None:
        """Writes a checkpoint asynchronously; `state` may be donated as soon as this returns."""
        # Random keys are saved as their key data. Empty arrays are left out, because Orbax refuses them.
        leaves = zip(_names(state), jax.tree.leaves(state), strict=True)
        arrays: Any = {name: keys.to_data(leaf) for name, leaf in leaves if leaf.size}
        if distributed.count() > 1:
            arrays = distributed.fetch(arrays)
            if arrays is None:
                return
        else:
            # Copy: on a CPU the writer would read the buffers in place, and the next `run` overwrites them.
            # `device_put` copies without compiling a program per shape.
            arrays = jax.device_put(arrays, may_alias=False)
        self._wait()
        self._undamaged.discard(iteration)
        self._write_start = time.monotonic()
        self._pending_write = self._writer.submit(self._write, iteration, arrays)

    def protect(self, iteration: int) -> None:
        """Marks a checkpoint so that it is not removed when newer ones are written."""
        files.open_to_append(self._directory / f"{iteration}.keep").close()

    def remove_after(self, iteration: int) -> None:
        """Removes the checkpoints of later iterations, which a resumed run computes again."""
        stored = self.iterations()
        later = [i for i in stored if i > iteration]
        if not later:
            return
        if len(later) < len(stored):
            files.write(self._newest_file, f"{stored[-len(later) - 1]}\n".encode())
        else:
            self._newest_file.unlink(missing_ok=True)
        for i in later:
            os.rename(self._directory / str(i), self._directory / f"{i}.removed")
        self._remove_leftovers()

    def last_finite(self) -> int | None:
        """The iteration of the newest undamaged checkpoint without NaN, or None."""
        self._wait()
        for iteration in reversed(self.iterations()):
            if self.damage(iteration) is None:
                floats = (x for x in self.arrays(iteration).values() if jnp.issubdtype(x.dtype, jnp.floating))
                if not any(np.isnan(x.astype(np.float32)).any() for x in floats):
                    return iteration
        return None

    def arrays(self, iteration: int) -> dict[str, np.ndarray]:
        """The arrays of a checkpoint by name, as NumPy arrays; random keys as their key data (`uint32`)."""
        with self._reader(iteration) as (reader, folder):
            return {name: np.asarray(value) for name, value in reader.restore(folder).items()}

    def restore(self, iteration: int, target: Any) -> Any:
        """Restores the state at `iteration`.

        `target` is a pytree of `jax.ShapeDtypeStruct` with shardings, such as `engine.state_shape`; its
        devices may differ from the devices at saving. A node with a method `resized(shape)`, such as a replay
        buffer, may be smaller in the checkpoint. Raises `OtherStateError` for other leaves or shapes.
        """
        leaves, structure = jax.tree.flatten(target)
        # NumPy arrays with one element in memory, because shardings may name devices of other processes.
        stored_shapes = [keys.data_shape(leaf.shape, leaf.dtype) for leaf in leaves]
        placeholders = [np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in stored_shapes]
        stored_target = {name: x for name, x in zip(_names(target), placeholders, strict=True) if x.size}
        expected = _describe_arrays(stored_target)
        with self._reader(iteration) as (reader, folder):
            metadata = reader.metadata(folder)
            actual = _describe_arrays(getattr(metadata, "item_metadata", metadata))
            if actual == expected:
                stored = reader.restore(folder, args=_orbax().args.StandardRestore(stored_target))
            elif actual.keys() == expected.keys():
                stored = _resize_nodes(reader.restore(folder), target)
                actual = _describe_arrays(stored)
        for name in sorted(actual | expected):
            in_checkpoint, in_target = (texts.get(name, "absent") for texts in (actual, expected))
            if in_checkpoint != in_target:
                fix = _precision_fix(in_checkpoint, in_target)
                raise OtherStateError(
                    f"checkpoint {folder.parent} belongs to another state: '{name}' is {in_checkpoint} in the"
                    f" checkpoint and {in_target} here{fix}"
                )
        restored = []
        for name, zeros, leaf in zip(_names(target), placeholders, leaves, strict=True):
            array = _place(stored.get(name, zeros), leaf.sharding)  # arrays without elements are not stored
            restored.append(keys.from_data(array, leaf))
        return jax.tree.unflatten(structure, typed_like(leaves, restored))

    def close(self) -> None:
        """Waits until the last checkpoint is written."""
        try:
            self._wait()
        finally:
            self._writer.shutdown()

    def _wait(self) -> None:
        pending, self._pending_write = self._pending_write, None
        if pending is not None:
            pending.result()

    def _write(self, iteration: int, arrays: dict[str, Any]) -> None:
        """Writes a checkpoint, then removes older checkpoints; runs in the writer's thread."""
        final, temporary = (self._directory / f"{iteration}{end}" for end in ("", ".writing"))
        try:
            checkpointer, start = _checkpointer(), time.monotonic()
            if not self._has_config:
                self._directory.parent.mkdir(parents=True, exist_ok=True)
            files.make_folder(self._directory)
            self._remove_leftovers()
            files.make_folder(temporary)
            checkpointer.save(temporary / _ARRAYS, args=_orbax().args.StandardSave(jax.device_get(arrays)))
            files.write(temporary / _MANIFEST, _manifest(iteration, _checksums(temporary), self._run_id))
            if os.path.lexists(final):  # a damaged one: the run would have resumed from an undamaged one
                damaged = self._directory / f"{iteration}.damaged"
                if os.path.lexists(damaged):
                    files.remove(damaged)
                os.rename(final, damaged)
            os.rename(temporary, final)
            with contextlib.suppress(OSError):  # without this file, removal goes undetected
                files.write(self._newest_file, f"{iteration}\n".encode())
            # Checkpoints of later iterations do not count: the run would have resumed from a usable one.
            for older in [i for i in self.iterations() if i <= iteration][:-KEEP]:
                if not os.path.lexists(self._directory / f"{older}.keep"):
                    os.rename(self._directory / str(older), self._directory / f"{older}.removed")
            self._remove_leftovers()
            self._write_seconds = time.monotonic() - start
        except Exception as error:  # Orbax and TensorStore raise many built-in types
            is_gone = not self._config.exists() and (self._has_config or isinstance(error, FileNotFoundError))
            self._remove_incomplete(temporary, is_gone)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else _first_line(error)
            problem = f"cannot write a checkpoint in {self._directory}"
            raise unwritable_error(
                self._directory.parent, problem, reason, is_gone, "make room there"
            ) from error

    def _remove_incomplete(self, temporary: Path, is_gone: bool) -> None:
        """Removes an incomplete checkpoint; if the run was removed (`is_gone`), also recreated folders."""
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

    def _remove_leftovers(self) -> None:
        """Deletes `.writing` and `.removed` folders, and all `.damaged` folders but the newest.

        Only the writer calls this: other processes may be reading checkpoints.
        """
        paths = list(self._directory.iterdir())
        damaged = [path for path in paths if path.suffix == ".damaged" and path.stem.isdecimal()]
        older = sorted(damaged, key=lambda path: int(path.stem))[:-1]
        for path in [*older, *(path for path in paths if path.suffix in (".writing", ".removed"))]:
            files.remove(path)

    @contextlib.contextmanager
    def _reader(self, iteration: int) -> Iterator[tuple[Any, Path]]:
        """Checks a checkpoint's files; yields Orbax's reader and the folder of its arrays."""
        folder = self._directory / str(iteration)
        reason = self.damage(iteration) if folder.is_dir() else "is damaged (it does not exist)"
        if reason is None:
            try:
                yield _checkpointer(), folder / _ARRAYS
                return
            except FdgError:
                raise
            except Exception as error:  # Orbax and TensorStore raise many built-in types
                reason = f"is damaged ({_first_line(error)})"
        remaining = [i for i in self.iterations() if i != iteration]
        fix = f"go on from iteration {max(remaining)}" if remaining else "there is no other checkpoint"
        raise FdgError(f"checkpoint {folder} {reason}: {fix}")


def _orbax() -> Any:
    # Imported here, since the import takes as long as JAX's.
    import orbax.checkpoint

    logging.getLogger("absl").addFilter(_is_kept_in_log)  # adding it twice has no effect
    return orbax.checkpoint


def _checkpointer() -> Any:
    # Orbax sees only this process; otherwise it waits for all processes at every step.
    orbax, process = _orbax(), jax.process_index()
    options = orbax.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process{process}"
    )
    handler = orbax.StandardCheckpointHandler(multiprocessing_options=options)
    return orbax.Checkpointer(handler, multiprocessing_options=options)


def _checksums(directory: Path) -> dict[str, str]:
    """SHA-256 of every file below a directory except the manifest, by relative path."""
    digests = {}
    for path in sorted(directory.rglob("*")):
        name, mode = path.relative_to(directory).as_posix(), path.lstat().st_mode
        if stat.S_ISDIR(mode) or name == _MANIFEST:
            continue
        if not stat.S_ISREG(mode):
            raise FdgError(f"{name} is {'a link' if stat.S_ISLNK(mode) else 'no regular file'}")
        with open_regular(path) as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copies a checkpoint to a new folder, without Orbax's note of where it was written."""
    content = json.loads(read_bytes(source / _MANIFEST, _MAX_MANIFEST_BYTES))
    content["files"].pop(_COMMIT_NOTE, None)
    for name in content["files"]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with open_regular(source / name) as reader, files.replacing(target / name) as writer:
            shutil.copyfileobj(reader, writer)
    files.write(target / _MANIFEST, _manifest(content["iteration"], content["files"], content.get("run")))


def _manifest(iteration: int, checksums: dict[str, str], run_id: str | None) -> bytes:
    """The manifest's content: equal files give equal bytes, so any change is detected."""
    run_entry = {} if run_id is None else {"run": run_id}
    return (json.dumps({"iteration": iteration, **run_entry, "files": checksums}, indent=1) + "\n").encode()


def _place(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """The global array with this sharding; each process creates only its addressable shards, maybe none."""
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


def _resize_nodes(stored: dict[str, Any], target: Any) -> dict[str, Any]:
    """The stored arrays by name, after `resized(shape)` of each node of `target` that has this method."""
    structure = jax.tree.structure(target)
    names = _names(target)
    leaves = [stored.get(name, leaf) for name, leaf in zip(names, jax.tree.leaves(target), strict=True)]
    tree = jax.tree.map(
        lambda node, shape: node.resized(shape) if hasattr(node, "resized") else node,
        jax.tree.unflatten(structure, leaves),
        target,
        is_leaf=lambda node: hasattr(node, "resized"),
    )
    resized = zip(names, jax.tree.leaves(tree), strict=True)
    return {name: leaf for name, leaf in resized if name in stored}


def _describe_arrays(arrays: Mapping[str, Any]) -> dict[str, str]:
    """The dtype and shape of each array as text, such as `float32[8, 4]`."""
    return {name: kind_of(leaf) for name, leaf in arrays.items()}


def _is_kept_in_log(record: logging.LogRecord) -> bool:
    """Log filter: drops records about errors that Orbax also raises."""
    return not any(
        text in record.getMessage() for text in ("_SignalingThread", "Metadata file does not exist")
    )


def _first_line(error: Exception) -> str:
    if match := re.search(r": ([A-Z][^:]*) \[os_error_code", str(error)):  # TensorStore's format
        return match[1]
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
