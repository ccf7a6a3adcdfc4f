"""Reads and writes data sets in the format of Minari 0.5: episodes in HDF5.

A data set is a folder with `data/metadata.json`, which has the numbers of episodes and steps and the spaces,
and `data/main_data.hdf5`, with a group for each episode (https://minari.farama.org, "Dataset standards"). An
episode of T steps has `observations [T + 1, *obs]` (parts of a dictionary by name, of a tuple as `_index_0`,
...), `actions [T, *action]`, and `rewards`, `terminations` and `truncations [T]`.
"""

import contextlib
import dataclasses
import importlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from algos.replay import Step
from envs import Box, Discrete, MultiDiscrete, composite
from envs.composite import ObservationSpace
from envs.spaces import Space
from fdg.errors import FdgError, one_line
from fdg.reading import json_object, open_regular, read_json

# --- arrays of untrusted HDF5 files (docs/security.md): declarations are checked before data is read ---
#
# HDF5 can name other files in three ways (external links, external storage, virtual data sets), load
# decompression plugins, and declare arrays far larger than the file. All of this is refused here.

# At most `_ALLOWED_BYTES` + `_MAX_EXPANSION` * (file size) bytes are decompressed.
_MAX_EXPANSION = 64
_ALLOWED_BYTES = 256 << 20
_MAX_CHUNK_BYTES = 256 << 20  # HDF5 decompresses a chunk whole
_FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32"}  # built into HDF5; others may be plugins
_KINDS = "biuf"  # NumPy's kinds of dtypes: booleans, integers, floats


def import_h5py() -> Any:
    """Imports `h5py`."""
    try:
        return importlib.import_module("h5py")
    except ImportError as error:
        raise FdgError(f"data sets need h5py ({error}): pip install 'fdg[data]'") from None


@contextlib.contextmanager
def open_arrays(path: str | os.PathLike[str]) -> Iterator["Arrays"]:
    """Opens the arrays of an HDF5 file; errors in the file become one-line errors."""
    h5py = import_h5py()
    with open_regular(path) as content:
        size = os.fstat(content.fileno()).st_size
        try:
            with h5py.File(content, "r") as file:
                yield Arrays(h5py, file, path, size)
        except FdgError:
            raise
        # h5py has no exception class of its own: HDF5's errors are any of these.
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError, OverflowError) as error:
            raise FdgError(
                f"{path}: is not a readable HDF5 file: truncated or damaged? ({one_line(error):.120})"
            ) from None


class Arrays:
    """The arrays of an open HDF5 file, by path within it.

    Attributes:
      read_bytes: bytes of all arrays read so far.
    """

    def __init__(self, h5py: Any, file: Any, path: str | os.PathLike[str], size: int):
        self._h5py, self._file, self._path = h5py, file, path
        self._max_bytes = _ALLOWED_BYTES + _MAX_EXPANSION * size
        self.read_bytes = 0

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array."""
        return self._checked(name).shape

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """An array of numbers, of this shape."""
        array = self._checked(name)
        if array.shape != shape:
            raise self._error(name, f"has shape {list(array.shape)}, expected {list(shape)}")
        self.read_bytes += math.prod(shape) * array.dtype.itemsize
        if self.read_bytes > self._max_bytes:
            raise self._error(
                name,
                f"brings the arrays to over {self._max_bytes >> 20} MiB, too much for a file of its size",
            )
        return np.asarray(array[()])

    def _checked(self, name: str) -> Any:
        """Checks that an array's data is in this file, and of a size that can be read."""
        node, h5py = self._file, self._h5py
        for part in name.split("/"):
            if not isinstance(node, h5py.Group):
                raise self._error(name, "is not in a group")
            # The low-level interface, since `part in node` would follow links.
            if not node.id.links.exists(part.encode()):
                raise self._error(name, "does not exist")
            if not isinstance(node.get(part, getlink=True), h5py.HardLink):
                raise self._error(name, "is a link, and links are not followed")
            node = node[part]
        if not isinstance(node, h5py.Dataset):
            raise self._error(name, "is not an array")
        if node.is_virtual or node.external:
            raise self._error(name, "has its data in another file, which is not read")
        if node.dtype.kind not in _KINDS or node.shape is None:
            raise self._error(name, f"has dtype {node.dtype!s:.40}: it must be of numbers")
        properties = node.id.get_create_plist()
        filters = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
        if unknown := [number for number in filters if number not in _FILTERS]:
            raise self._error(name, f"has filter {unknown[0]}: only {', '.join(_FILTERS.values())} are read")
        if node.chunks and math.prod(node.chunks) * node.dtype.itemsize > _MAX_CHUNK_BYTES:
            raise self._error(name, f"has chunks of over {_MAX_CHUNK_BYTES >> 20} MiB")
        return node

    def _error(self, name: str, why: str) -> FdgError:
        return FdgError(f"{self._path}: {name:.80} {why}")


# --- data sets ---

ARRAYS, METADATA = "main_data.hdf5", "metadata.json"
FILES = (ARRAYS, METADATA)
FORMAT_VERSION = "0.5.3"  # the Minari version whose layout is written
_MAX_STEPS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A data set in a folder, as a value; it reads metadata on demand, and arrays in `steps`."""

    path: str  # the folder with `metadata.json`, or its parent

    @property
    def folder(self) -> Path:
        """The folder with the two files."""
        inner = Path(self.path) / "data"
        return inner if os.path.lexists(inner / METADATA) else Path(self.path)

    @property
    def num_steps(self) -> int:
        """Steps of all episodes."""
        return self._count("total_steps")

    @property
    def num_episodes(self) -> int:
        """Episodes, of which the last may be unfinished."""
        return self._count("total_episodes")

    def check_spaces(self, observation_space: ObservationSpace, action_space: Space, name: str) -> None:
        """Raises unless the data has an environment's spaces, bounds of actions included."""
        for what, space in (("observation", observation_space), ("action", action_space)):
            text = self._metadata.get(f"{what}_space")
            stored = json_object(text.encode(), self._file, any_number=True) if isinstance(text, str) else {}
            expected = description(space)
            if not _fits(stored, expected, check_bounds=what == "action"):
                raise FdgError(
                    f"{self.path}: has {what}s {_short(stored)}, and {name} has {_short(expected)}:"
                    " give data of this environment"
                )

    def steps(self, observation_space: ObservationSpace, action_space: Space) -> Step:
        """All steps, concatenated: a `Step` of NumPy arrays `[num_steps, ...]` in the spaces' dtypes.

        Episodes are ordered by number. The last step of an unfinished episode counts as truncated.
        """
        count, episodes = self.num_steps, []
        file = self.folder / ARRAYS
        with open_arrays(file) as arrays:
            remaining = count
            for number in range(self.num_episodes):
                episode = _read_episode(
                    arrays, f"episode_{number}", remaining, observation_space, action_space, file
                )
                remaining -= len(episode.reward)
                episodes.append(episode)
        if remaining:
            raise FdgError(f"{file}: has {count - remaining} steps, but {METADATA} says {count}")
        return jax.tree.map(lambda *parts: np.concatenate(parts), *episodes)

    def _count(self, name: str) -> int:
        value = self._metadata.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_STEPS:
            raise FdgError(f"{self._file}: {name} is {value!r:.40}: it must be from 1 to {_MAX_STEPS}")
        return value

    @property
    def _file(self) -> Path:
        return self.folder / METADATA

    @property
    def _metadata(self) -> dict[str, Any]:
        if not os.path.lexists(self._file):
            raise FdgError(
                f"{self.path}: is not a data set: it has no {METADATA}; give a folder of fdg collect, or of"
                " Minari"
            )
        values = read_json(self._file, any_number=True)
        if values.get("data_format", "hdf5") != "hdf5":
            raise FdgError(f"{self._file}: data_format is {values['data_format']!r:.40}: only hdf5 is read")
        return values


def _read_episode(
    arrays: Arrays, name: str, max_steps: int, observation_space: Any, action_space: Any, file: Path
) -> Step:
    (count,) = (*arrays.shape(f"{name}/rewards"), 0)[:1]
    if not 1 <= count <= max_steps:
        raise FdgError(
            f"{file}: {name} has {count} steps, but by total_steps in {METADATA} at most {max_steps} are"
            " left for it"
        )

    def read(where: str, length: int, space: Any) -> Any:
        x = arrays.read(f"{name}/{where}", (length, *space.shape))
        with np.errstate(over="ignore", invalid="ignore"):  # values that do not fit are reported below
            cast = x.astype(space.dtype)
        exact = cast == x if cast.dtype.kind in "iu" else np.ones(x.shape, bool)
        for valid, problem in (
            (np.isfinite(x) & np.isfinite(cast), "is not finite"),
            (exact, f"has a value that does not fit {space.dtype}"),
        ):
            bad = np.flatnonzero(~valid.reshape(length, -1).all(axis=1))
            if len(bad):
                raise FdgError(f"{file}: {name}/{where} {problem} at step {bad[0]}: leave this episode out")
        if isinstance(space, Discrete | MultiDiscrete):
            counts = np.asarray(space.n if isinstance(space, Discrete) else space.nvec)
            if np.any((x < 0) | (x >= counts)):
                raise FdgError(f"{file}: {name}/{where} has a category outside {space}")
        return cast

    scalar, flag = Box(-math.inf, math.inf, ()), Box(0, 1, (), "int8")
    observations = _map_named(
        lambda part, where: read(where, count + 1, part), observation_space, "observations"
    )
    terminated, truncated = (read(x, count, flag) > 0 for x in ("terminations", "truncations"))
    truncated[-1] |= not terminated[-1]
    return Step(
        observation=jax.tree.map(lambda x: x[:-1], observations),
        action=read("actions", count, action_space),
        reward=read("rewards", count, scalar),
        terminated=terminated,
        truncated=truncated & ~terminated,
        final_observation=jax.tree.map(lambda x: x[1:], observations),
    )


class Writer:
    """Writes episodes into a new HDF5 file, or appends to a copy of another data set.

    Args (construction):
      file: an open, writable `h5py.File`.
      first_episode: number of the first episode to write.
      space: the observation space.

    Attributes:
      num_episodes: episodes in the file, those before `first_episode` included.
      num_steps: steps that this writer has added.
    """

    def __init__(self, file: Any, first_episode: int, space: ObservationSpace):
        self._file, self.num_episodes, self._space = file, first_episode, space
        self.num_steps = 0

    def add(self, observations: Any, steps: Step) -> None:
        """Appends an episode: `observations [T + 1, *obs]`, and the results of T steps."""
        name = f"episode_{self.num_episodes}"
        if name in self._file:  # left by an attempt that was killed before it updated the metadata
            del self._file[name]
        group = self._file.create_group(name)
        count = len(steps.reward)
        group.attrs["id"], group.attrs["total_steps"] = self.num_episodes, count

        def write(array: str, x: Any, dtype: Any = None) -> None:
            x = np.asarray(x, dtype)
            group.create_dataset(
                array, data=x, chunks=True, maxshape=(None, *x.shape[1:]), compression="gzip"
            )

        _map_named(lambda _, where, x: write(where, x), self._space, "observations", observations)
        write("actions", steps.action)
        write("rewards", steps.reward, np.float32)
        write("terminations", steps.terminated, bool)
        write("truncations", steps.truncated, bool)
        self.num_episodes += 1
        self.num_steps += count


def metadata(
    name: str, observation_space: ObservationSpace, action_space: Space, algorithm: str, **counts: Any
) -> dict[str, Any]:
    """The contents of `metadata.json`; `counts` are its `total_episodes` and `total_steps`."""
    return {
        **counts,
        "data_format": "hdf5",
        "observation_space": json.dumps(description(observation_space)),
        "action_space": json.dumps(description(action_space)),
        "dataset_id": f"fdg/{''.join(c if c.isalnum() or c in '_-' else '-' for c in name)}-v0",
        "environment": name,
        "algorithm_name": algorithm,
        "minari_version": FORMAT_VERSION,
    }


def description(space: ObservationSpace) -> dict[str, Any]:
    """A space in Minari's metadata format.

    >>> description(Discrete(3))
    {'type': 'Discrete', 'dtype': 'int64', 'start': 0, 'n': 3}
    """
    match space:
        case composite.Dict(spaces=spaces):
            return {"type": "Dict", "subspaces": {name: description(part) for name, part in spaces}}
        case composite.Tuple(spaces=parts):
            return {"type": "Tuple", "subspaces": [description(part) for part in parts]}
        case Discrete(n=n):
            return {"type": "Discrete", "dtype": "int64", "start": 0, "n": n}
        case MultiDiscrete(nvec=nvec):  # Minari has no MultiDiscrete
            low, high = np.zeros(len(nvec), int), np.array(nvec) - 1
            bounds = {"low": low.tolist(), "high": high.tolist()}
            return {"type": "Box", "dtype": "int32", "shape": [len(nvec)], **bounds}
        case Box(shape=shape, dtype=dtype):
            bounds = {"low": space.low_array.tolist(), "high": space.high_array.tolist()}
            return {"type": "Box", "dtype": dtype, "shape": list(shape), **bounds}


def _fits(stored: Any, expected: dict[str, Any], check_bounds: bool) -> bool:
    """Whether a stored description has the expected type, parts and shapes (dtypes are not compared)."""
    if not isinstance(stored, dict) or stored.get("type") != expected["type"]:
        return False
    if "subspaces" in expected:
        inner, parts = _by_name(stored.get("subspaces")), _by_name(expected["subspaces"])
        return inner.keys() == parts.keys() and all(
            _fits(inner[name], part, check_bounds) for name, part in parts.items()
        )
    if "n" in expected:
        return stored.get("n") == expected["n"] and stored.get("start", 0) == 0
    if stored.get("shape") != expected["shape"]:
        return False
    return not check_bounds or all(_is_close(stored.get(name), expected[name]) for name in ("low", "high"))


def _by_name(parts: Any) -> dict[Any, Any]:
    """Parts of a space by name or, in a list, by position; empty for anything else."""
    if isinstance(parts, dict):
        return parts
    return dict(enumerate(parts)) if isinstance(parts, list) else {}


def _is_close(stored: Any, expected: Any) -> bool:
    """Whether nested lists hold the expected numbers, or one number for all of them."""
    stored, expected = _numbers(stored), _numbers(expected)
    if stored.size == 1:
        stored = np.broadcast_to(stored, expected.shape)
    return stored.shape == expected.shape and np.allclose(stored, expected, rtol=1e-4)


def _numbers(nested: Any) -> np.ndarray:
    """Flattens nested lists of numbers to an array; empty for anything else."""
    try:
        return np.asarray(nested, float).ravel()
    except (TypeError, ValueError):
        return np.zeros(0)


def _short(stored: Any) -> str:
    """A stored description, shortened for a message."""
    match stored:
        case {"type": "Discrete", "n": n}:
            return f"Discrete({n!r:.20})"
        case {"type": "Dict", "subspaces": dict(parts)}:
            return f"Dict({', '.join(map(str, parts)):.60})"
        case {"type": kind, "shape": shape, "low": low, "high": high}:
            lows, highs = _numbers(low), _numbers(high)
            limits = f" from {lows.min():g} to {highs.max():g}" if lows.size and highs.size else ""
            return f"{kind!s:.20}{shape!s:.40}{limits}"
        case {"type": kind}:
            return f"{kind!s:.20}"
    return "of an unknown space"


def _map_named(function: Callable[..., Any], space: ObservationSpace, where: str, *trees: Any) -> Any:
    """Applies `function(space of a part, its path in the file, its array of each tree)` to an observation's
    parts."""
    match space:
        case composite.Dict(spaces=spaces):
            return {
                name: _map_named(function, part, f"{where}/{name}", *(tree[name] for tree in trees))
                for name, part in spaces
            }
        case composite.Tuple(spaces=parts):
            return tuple(
                _map_named(function, part, f"{where}/_index_{i}", *(tree[i] for tree in trees))
                for i, part in enumerate(parts)
            )
    return function(space, where, *trees)
