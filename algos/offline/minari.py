"""Reads and writes data sets in the format of Minari 0.5: episodes in HDF5.

A data set is a folder with `data/metadata.json`, which has the numbers of episodes and steps and the spaces,
and `data/main_data.hdf5`, with a group for each episode (https://minari.farama.org, "Dataset standards"). An
episode of T steps has `observations [T + 1, *obs]` (parts of a dictionary by name, of a tuple as `_index_0`,
...), `actions [T, *action]`, and `rewards`, `terminations` and `truncations [T]`.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from algos.offline import minari_spaces
from algos.offline.minari_spaces import Leaf, Stored, description
from algos.replay import Step
from envs.composite import ObservationSpace
from envs.spaces import Space
from fdg.errors import FdgError, one_line
from fdg.reading import cached_by_stamp, json_object, open_regular, read_json

# --- arrays of untrusted HDF5 files (docs/security.md): declarations are checked before data is read ---
#
# An HDF5 file can refer to other files in three ways (external links, external storage, virtual data sets),
# load decompression plugins, and declare arrays far larger than itself. All of this is refused here.

# At most `_ALLOWED_BYTES` + `_MAX_EXPANSION` * (file size) bytes are decompressed.
_MAX_EXPANSION = 64
_ALLOWED_BYTES = 256 << 20
_MAX_CHUNK_BYTES = 256 << 20  # HDF5 decompresses a chunk whole
_FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32"}  # built into HDF5; others may be plugins
_PNG_SIGNATURE = b"\x89PNG"
_STRINGS_PER_READ = 64  # byte strings that are read at once
MAX_METADATA_BYTES = 64 << 20  # Minari writes the bounds of each element of a space
_NUMBER_KINDS = "biuf"  # NumPy's kinds of dtypes: booleans, integers, floats


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
      read_bytes: bytes of all arrays read so far, without pictures and texts.
    """

    def __init__(self, h5py: Any, file: Any, path: str | os.PathLike[str], size: int):
        self._h5py, self._file, self._path = h5py, file, path
        self._max_bytes = _ALLOWED_BYTES + _MAX_EXPANSION * size
        self.read_bytes, self._string_bytes, self._size = 0, 0, size

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array."""
        return self._checked_array(name).shape

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """An array of numbers, of this shape."""
        array = self._checked_array(name)
        if array.shape != shape:
            raise self._error(name, f"has shape {list(array.shape)}, expected {list(shape)}")
        self.read_bytes += math.prod(shape) * array.dtype.itemsize
        if self.read_bytes > self._max_bytes:
            raise self._error(
                name,
                f"makes the arrays larger than {self._max_bytes >> 20} MiB, too much for a file of this size",
            )
        return np.asarray(array[()])

    def has_byte_strings(self, name: str, axes: int) -> bool:
        """True if each element is a byte string of any length; False if it is an array with `axes` axes."""
        array = self._checked_array(name, strings=True)
        return array.dtype.kind == "O" or (array.dtype == np.uint8 and array.ndim == 2 != 1 + axes)

    def byte_strings(self, name: str, count: int) -> Iterator[bytes]:
        """Yields `count` byte strings: encoded pictures, or texts; together no larger than the file."""
        array = self._checked_array(name, strings=True)
        if array.shape[:1] != (count,):
            raise self._error(name, f"has {[*array.shape, 0][0]} elements, expected {count}")
        self._add_string_bytes(name, math.prod(array.shape) if array.ndim == 2 else 0)
        for start in range(0, count, _STRINGS_PER_READ):  # few at once: all may refer to the same bytes
            for element in array[start : start + _STRINGS_PER_READ]:
                content = element if isinstance(element, bytes) else np.asarray(element, np.uint8).tobytes()
                self._add_string_bytes(name, len(content) if array.ndim == 1 else 0)
                yield content

    def _add_string_bytes(self, name: str, count: int) -> None:
        self._string_bytes += count
        if self._string_bytes > self._size:
            raise self._error(name, "makes the pictures and texts larger than the file")

    def _checked_array(self, name: str, strings: bool = False) -> Any:
        """An array of numbers, or with `strings` also of byte strings.

        Raises an `FdgError` if its data is not in this file, or its chunks are too large.
        """
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
        is_strings = h5py.check_vlen_dtype(node.dtype) == np.uint8 or h5py.check_string_dtype(node.dtype)
        if not (node.dtype.kind in _NUMBER_KINDS or (strings and is_strings)) or node.shape is None:
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

ARRAYS, METADATA = "main_data.hdf5", "metadata.json"  # names of the files of a data set
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
        folder = Path(os.path.expanduser(self.path))
        return folder / "data" if os.path.lexists(folder / "data" / METADATA) else folder

    @property
    def num_steps(self) -> int:
        """Steps of all episodes."""
        return self._count("total_steps")

    @property
    def num_episodes(self) -> int:
        """Episodes, of which the last may be unfinished."""
        return self._count("total_episodes")

    def check_spaces(self, observation_space: ObservationSpace, action_space: Space, name: str) -> None:
        """Raises unless the data has an environment's spaces, including the bounds of actions.

        Gymnasium's spaces are first converted to fdg's, as for `gymnasium:` environments.
        """
        self._stored_spaces(observation_space, action_space, name)

    def check_appendable(self, observations: Stored, actions: Stored) -> None:
        """Raises an `FdgError` unless the data set stores its spaces as `fdg collect` would."""
        for what, expected in (("observation", observations), ("action", actions)):
            stored, check_bounds = self._space(what, expected.description), what == "action"
            if not minari_spaces.fits(stored, expected.description, check_bounds):
                has, writes = minari_spaces.difference(stored, expected.description, check_bounds, f"{what}s")
                raise FdgError(f"{self.path}: has {has}, and fdg collect writes {writes}: give a new folder")

    def steps(self, observation_space: ObservationSpace, action_space: Space) -> Step:
        """All steps, concatenated: a `Step` of NumPy arrays `[num_steps, ...]` in the spaces' dtypes.

        Episodes are ordered by number. The last step of an unfinished episode counts as truncated.
        """
        stored = self._stored_spaces(observation_space, action_space, "the environment")
        count, episodes = self.num_steps, []
        file = self.folder / ARRAYS
        with open_arrays(file) as arrays:
            remaining = count
            for number in range(self.num_episodes):
                episode = _read_episode(arrays, f"episode_{number}", remaining, *stored, file)
                remaining -= len(episode.reward)
                episodes.append(episode)
        if remaining:
            raise FdgError(f"{file}: has {count - remaining} steps, but {METADATA} says {count}")
        return jax.tree.map(lambda *parts: np.concatenate(parts), *episodes)

    def _stored_spaces(
        self, observation_space: ObservationSpace, action_space: Space, name: str
    ) -> tuple[Stored, Stored]:
        """How observations and actions are stored; raises if they are of other spaces."""
        observations = self._space("observation", description(observation_space))
        actions = self._space("action", description(action_space))
        stored = (
            minari_spaces.find_observation(observations, actions, observation_space, name),
            minari_spaces.find_action(actions, action_space),
        )
        for what, found, file_space, space in (
            ("observations", stored[0], observations, observation_space),
            ("actions", stored[1], actions, action_space),
        ):
            if found is None:
                has, expected = minari_spaces.difference(
                    file_space, description(space), what == "actions", what
                )
                raise FdgError(
                    f"{self.path}: has {has}, and {name} has {expected}: give data of this environment"
                )
        return stored  # type: ignore[return-value]

    def _space(self, what: str, default: Any) -> Any:
        """A stored description; `default`, of the environment's space, if the metadata names no space."""
        text, file = self.metadata.get(f"{what}_space", default), self.folder / METADATA
        return json_object(text.encode(), file, any_number=True) if isinstance(text, str) else text

    def _count(self, name: str) -> int:
        """A number of the metadata, which must be from 1 to `_MAX_STEPS`."""
        value = self.metadata.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_STEPS:
            file = self.folder / METADATA
            raise FdgError(f"{file}: {name} is {value!r:.40}: it must be from 1 to {_MAX_STEPS}")
        return value

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The contents of `metadata.json`."""
        file = self.folder / METADATA
        if not os.path.lexists(file):
            raise FdgError(
                f"{self.path}: is not a data set: it has no {METADATA}; give a folder of fdg collect, or of"
                " Minari"
            )
        return _read_metadata(file)


@cached_by_stamp
def _read_metadata(file: Path) -> Mapping[str, Any]:
    """The contents of a `metadata.json`."""
    values = read_json(file, MAX_METADATA_BYTES, any_number=True)
    if values.get("data_format", "hdf5") != "hdf5":
        raise FdgError(f"{file}: data_format is {values['data_format']!r:.40}: only hdf5 is read")
    return values


def _read_episode(
    arrays: Arrays, name: str, max_steps: int, observations: Stored, actions: Stored, file: Path
) -> Step:
    """Reads one episode, and checks its values: a `Step` of arrays `[T, ...]`, with T up to `max_steps`."""
    shape = arrays.shape(f"{name}/rewards")
    if not shape:
        raise FdgError(f"{file}: {name}/rewards is one number, expected one for each step, [T]")
    count = shape[0]
    if count == 0:
        raise FdgError(f"{file}: {name} has no steps: leave this episode out")
    if count > max_steps:
        raise FdgError(
            f"{file}: {name} has {count} steps, but of total_steps in {METADATA} only {max_steps} are left:"
            " write the number of steps of all episodes as total_steps"
        )

    def read(where: str, length: int, leaf: Leaf) -> Any:
        x: Any = _read_leaf(arrays, f"{name}/{where}", length, leaf, file)
        if leaf.shape is None:
            return x
        with np.errstate(over="ignore", invalid="ignore"):  # values that do not fit are reported below
            cast = x.astype(leaf.dtype)
        exact = cast == x if cast.dtype.kind in "iu" else np.ones(x.shape, bool)
        checks = [
            (np.isfinite(x) & np.isfinite(cast), "is not finite"),
            (exact, f"has a value that does not fit {leaf.dtype}"),
        ]
        if leaf.low is not None:
            checks.append(((x >= leaf.low) & (x <= leaf.high), f"has a category outside {leaf.name:.200}"))
        for valid, problem in checks:
            bad = np.flatnonzero(~valid.reshape(length, -1).all(axis=1))
            if len(bad):
                raise FdgError(f"{file}: {name}/{where} {problem} at step {bad[0]}: leave this episode out")
        return cast

    def read_all(what: str, length: int, stored: Stored) -> Any:
        return stored.to_env(_map_named(lambda leaf, where: read(where, length, leaf), stored.leaves, what))

    all_observations = read_all("observations", count + 1, observations)
    terminated, truncated = (
        read(x, count, Leaf("flags", (), "int8")) > 0 for x in ("terminations", "truncations")
    )
    truncated[-1] |= not terminated[-1]
    return Step(
        observation=jax.tree.map(lambda x: x[:-1], all_observations),
        action=read_all("actions", count, actions),
        reward=read("rewards", count, Leaf("rewards", (), "float32")),
        terminated=terminated,
        truncated=truncated & ~terminated,
        final_observation=jax.tree.map(lambda x: x[1:], all_observations),
    )


def _read_leaf(arrays: Arrays, where: str, length: int, leaf: Leaf, file: Path) -> np.ndarray | list[str]:
    """An array `[length, *leaf.shape]`, or a list of texts."""
    if leaf.shape is None:
        texts = []
        for step, content in enumerate(arrays.byte_strings(where, length)):
            try:
                texts.append(content.decode())
            except UnicodeDecodeError:
                fix = "leave this episode out"
                raise FdgError(f"{file}: {where} is not UTF-8 at step {step}: {fix}") from None
        return texts
    mode = minari_spaces.picture_mode(leaf.shape) if leaf.dtype in ("uint8", "int64") else None
    if mode is None or not arrays.has_byte_strings(where, len(leaf.shape)):
        return arrays.read(where, (length, *leaf.shape))
    pictures = []
    for step, content in enumerate(arrays.byte_strings(where, length)):
        if leaf.is_codes and not content.startswith(_PNG_SIGNATURE):
            raise FdgError(
                f"{file}: {where} stores codes of categories as JPEG, which is lossy: record these"
                " observations as integers of another dtype than uint8"
            )
        pictures.append(_decode_picture(content, leaf.shape, mode, f"{file}: {where} at step {step}"))
    return np.stack(pictures)


def _decode_picture(content: bytes, shape: tuple[int, ...], mode: str, where: str) -> np.ndarray:
    """A picture `[H, W]` or `[H, W, C]`; its size is checked before its pixels are decoded."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as image:
            size = f"{image.height} x {image.width} {image.mode}"
            if size == f"{shape[0]} x {shape[1]} {mode}":
                return np.asarray(image)
    except Exception as error:  # Pillow raises anything for damaged files
        raise FdgError(f"{where} is not a readable picture ({one_line(error):.120})") from None
    raise FdgError(f"{where} is a picture of {size}, expected {shape[0]} x {shape[1]} {mode}")


def _encode_picture(pixels: np.ndarray) -> np.ndarray:
    """Encodes a picture as PNG, which is lossless, and which Minari reads, too."""
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return np.frombuffer(content.getvalue(), np.uint8)


class Writer:
    """Writes episodes into a new HDF5 file, or appends to a copy of another data set.

    Args (construction):
      file: an open, writable `h5py.File`.
      first_episode: number of the first episode to write.
      space: the observation space.
      actions: how actions are stored (None: as they are).
      check: called after each episode; raises an error if the file could not be written.

    Attributes:
      num_episodes: episodes in the file, those before `first_episode` included.
      num_steps: steps that this writer has added.
    """

    def __init__(
        self,
        file: Any,
        first_episode: int,
        space: ObservationSpace,
        actions: Stored | None = None,
        check: Callable[[], object] = lambda: None,
    ):
        self._file, self.num_episodes, self._actions, self._check = file, first_episode, actions, check
        self._observations = minari_spaces.stored_observation(space)
        self.num_steps = 0

    def add(self, observations: Any, steps: Step) -> None:
        """Appends an episode: `observations [T + 1, *obs]`, and the results of T steps."""
        name = f"episode_{self.num_episodes}"
        if name in self._file:  # from an earlier run that was killed before it updated the metadata
            del self._file[name]
        group = self._file.create_group(name)
        count = len(steps.reward)
        group.attrs["id"], group.attrs["total_steps"] = self.num_episodes, count

        def write(array: str, x: Any, dtype: Any = None, is_picture: bool = False) -> None:
            x = np.asarray(x, dtype)
            if is_picture:
                rows = group.create_dataset(array, (len(x),), import_h5py().vlen_dtype(np.uint8))
                for i, pixels in enumerate(x):
                    rows[i] = _encode_picture(pixels)
                return
            group.create_dataset(
                array, data=x, chunks=True, maxshape=(None, *x.shape[1:]), compression="gzip"
            )

        def write_leaf(leaf: Leaf, where: str, x: Any) -> None:
            write(where, x, is_picture=leaf.is_picture)

        _map_named(write_leaf, self._observations.leaves, "observations", observations)
        if self._actions is None:
            write("actions", steps.action)
        else:
            stored_actions = self._actions.from_env(np.asarray(steps.action))
            _map_named(write_leaf, self._actions.leaves, "actions", stored_actions)
        write("rewards", steps.reward, np.float32)
        write("terminations", steps.terminated, bool)
        write("truncations", steps.truncated, bool)
        self._check()
        self.num_episodes += 1
        self.num_steps += count


def make_metadata(
    name: str,
    observation_space: ObservationSpace,
    action_space: Space | dict[str, Any],
    algorithm: str,
    **entries: Any,
) -> dict[str, Any]:
    """The contents of `metadata.json`; `entries` are further keys, such as `total_steps`.

    `action_space` may be Minari's description of a space.
    """
    actions = action_space if isinstance(action_space, dict) else description(action_space)
    return {
        **entries,
        "data_format": "hdf5",
        "observation_space": json.dumps(description(observation_space)),
        "action_space": json.dumps(actions),
        "dataset_id": f"fdg/{''.join(c if c.isalnum() or c in '_-' else '-' for c in name)}-v0",
        "environment": name,
        "algorithm_name": algorithm,
        "minari_version": FORMAT_VERSION,
    }


def check_names(stored: Stored, what: str, name: str) -> None:
    """Refuses a space with a part whose name HDF5 does not allow.

    Errors begin with the environment's `name`; `what` is "observations" or "actions".
    """

    def check(parts: Any, where: str) -> None:
        for key in parts if isinstance(parts, dict) else ():
            if key in ("", ".") or "/" in key or "\0" in key:
                raise FdgError(
                    f"{name}: {where} have a part named {key!r:.80}, which an HDF5 file cannot have: rename"
                    " it, without '/', and other than '' and '.'"
                )
        if isinstance(parts, dict) or type(parts) is tuple:
            for part in parts.values() if isinstance(parts, dict) else parts:
                check(part, where)

    check(stored.leaves, what)


def _map_named(function: Callable[..., Any], leaves: Any, where: str, *trees: Any) -> Any:
    """Applies a function to each `Leaf` of a space, its path in the file, and its array in each tree."""
    if isinstance(leaves, dict):
        return {
            name: _map_named(function, part, f"{where}/{name}", *(tree[name] for tree in trees))
            for name, part in leaves.items()
        }
    if type(leaves) is tuple:
        return tuple(
            _map_named(function, part, f"{where}/_index_{i}", *(tree[i] for tree in trees))
            for i, part in enumerate(leaves)
        )
    return function(leaves, where, *trees)
