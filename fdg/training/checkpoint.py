"""Checkpoints of an engine's state: whole, atomic, readable on other devices than they were written on."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdg import keys
from fdg.errors import FdgError
from fdg.processes import distributed

KEEP = 3  # the newest; older ones are removed once a newer one is complete


class Checkpoints:
    """The checkpoints of one run, one directory an iteration.

    Orbax writes each into a temporary directory and renames it when it is complete, so that a process that
    dies while writing leaves the earlier ones as they were. Writing goes on in the background.
    Of several processes, all call `save`, and the first one writes; each restores what its devices hold.

    Args:
      directory: made when the first checkpoint is written.
    """

    def __init__(self, directory: Path):
        # Here, because importing Orbax takes as long as importing JAX.
        import orbax.checkpoint

        self._orbax = orbax.checkpoint
        self._directory = directory.absolute()
        self._writer: Any = None

    def latest(self) -> int | None:
        """Iteration of the newest complete checkpoint, None where there is none."""
        if not self._directory.is_dir():
            return None
        with self._manager(read_only=True) as reader:
            return reader.latest_step()

    def save(self, iteration: int, state: Any) -> None:
        """Starts to write `state`; it may be donated as soon as this returns."""
        arrays = _arrays_by_name(state)
        if distributed.count() > 1:
            arrays = distributed.fetch(arrays)
            if arrays is None:
                return
        else:
            # Orbax reads host memory in place, and that is where a CPU keeps the buffers that the next call
            # of `run` will overwrite.
            arrays = jax.tree.map(jnp.copy, arrays)
        try:
            if self._writer is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                # What a killed process left half written goes; only here, for readers may come at any time.
                self._writer = self._manager(max_to_keep=KEEP, cleanup_tmp_directories=True)
            self._writer.save(iteration, args=self._orbax.args.StandardSave(arrays), force=True)
        except Exception as error:
            raise self._unwritable(error) from error

    def restore(self, iteration: int, target: Any) -> Any:
        """The state at `iteration`.

        Args:
          iteration: of a complete checkpoint.
          target: pytree of `jax.ShapeDtypeStruct` with shardings, for instance `engine.state_shape`; the
            devices may be others than those that the checkpoint was written on.

        Raises:
          FdgError: the checkpoint cannot be read, or holds the state of something else.
        """
        where = self._directory / str(iteration)
        stored_target = jax.tree.map(_stored_shape, _arrays_by_name(target))
        expected = {name: _shape(leaf) for name, leaf in stored_target.items()}
        try:
            with self._manager(read_only=True) as reader:
                found = {name: _shape(leaf) for name, leaf in reader.item_metadata(iteration).items()}
                if found == expected:
                    # As NumPy arrays: some devices of the shardings may be in other processes.
                    arrays = jax.tree.map(_numpy_shape, stored_target)
                    stored = reader.restore(iteration, args=self._orbax.args.StandardRestore(arrays))
        except Exception as error:  # Orbax and TensorStore raise many types, none of them their own
            complete = (int(path.name) for path in self._directory.iterdir() if path.name.isdigit())
            others = [step for step in complete if step != iteration]
            fix = f"remove it to go on from iteration {max(others)}" if others else "there is no other one"
            raise FdgError(f"checkpoint {where} cannot be read ({_first_line(error)}): {fix}") from error
        differing = [name for name in sorted(found | expected) if found.get(name) != expected.get(name)]
        if differing:
            name = differing[0]
            raise FdgError(
                f"checkpoint {where} is of another state: '{name}' is {_text(found.get(name))} there"
                f" and {_text(expected.get(name))} here"
            )
        leaves, structure = jax.tree.flatten(target)
        restored = []
        for name, leaf in zip(_names(target), leaves, strict=True):
            shape = _stored_shape(leaf)
            array = _place(
                stored[name] if name in stored else np.zeros(shape.shape, shape.dtype), leaf.sharding
            )
            made_by = keys.implementation(leaf.shape, leaf.dtype)
            restored.append(array if made_by is None else jax.random.wrap_key_data(array, impl=made_by[0]))
        return jax.tree.unflatten(structure, restored)

    def close(self) -> None:
        """Waits until everything is written."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        try:
            writer.close()
        except Exception as error:
            raise self._unwritable(error) from error

    def _manager(self, **options: Any) -> Any:
        # Each process for itself: Orbax would otherwise wait for the others at every step.
        me = jax.process_index()
        alone = self._orbax.options.MultiprocessingOptions(
            primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
        )
        return self._orbax.CheckpointManager(
            self._directory,
            options=self._orbax.CheckpointManagerOptions(
                create=False, multiprocessing_options=alone, **options
            ),
            item_handlers=self._orbax.StandardCheckpointHandler(multiprocessing_options=alone),
        )

    def _unwritable(self, error: Exception) -> FdgError:
        return FdgError(f"cannot write a checkpoint in {self._directory} ({_first_line(error)})")


def _numpy_shape(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)  # of the shape, and without its memory


def _place(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """A global array of which each process holds what is its own, possibly nothing."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index], dtype=array.dtype)


def _names(tree: Any) -> list[str]:
    """Names of the leaves, such as `train/params/kernel`, in order.

    >>> _names({"a": (1, 2), "b": {"c": 3}})
    ['a/0', 'a/1', 'b/c']
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") or "state" for path, _ in paths]
    seen: dict[str, int] = {}
    for i, name in enumerate(names):  # {"a/b": 1, "a": {"b": 2}} is legal
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            names[i] = f"{name}#{seen[name]}"
    return names


def _arrays_by_name(tree: Any) -> dict[str, Any]:
    """The leaves that are stored: keys as their data, and no arrays without elements (Orbax refuses them)."""
    leaves = zip(_names(tree), jax.tree.leaves(tree), strict=True)
    stored = {name: leaf for name, leaf in leaves if leaf.size}
    return {
        name: jax.random.key_data(leaf) if keys.is_key(leaf.dtype) and isinstance(leaf, jax.Array) else leaf
        for name, leaf in stored.items()
    }


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


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
