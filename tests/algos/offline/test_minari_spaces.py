"""Minari datasets with Gymnasium spaces are converted as by the environment's adapter."""

import json
from pathlib import Path

import h5py
import jax
import numpy as np
import pytest
from gymnasium import spaces

import envs
from algos.offline import minari
from algos.offline.minari import DataSet
from envs import Box, Discrete, MultiDiscrete, gymnasium_codec, gymnasium_parts, gymnasium_spaces
from fdg.errors import FdgError
from tests.algos.offline.data import decoded, encoded, write_as_minari

VECTOR = spaces.Box(-1, 1, (2,))
IMAGE = spaces.Box(0, 255, (9, 8, 3), np.uint8)
TEXT = spaces.Text(5)
THREE, FROM_FIVE = spaces.Discrete(3), spaces.Discrete(3, start=5)
OURS = Box(-1.0, 1.0, (2,))
NESTED = spaces.Dict({"b": spaces.Discrete(3, start=5), "a": spaces.Tuple((spaces.MultiBinary(2), VECTOR))})
OBSERVATIONS = [
    VECTOR,
    spaces.Box(-1, 1, (2,), np.float64),
    spaces.Box(0, 255, (4,), np.uint8),
    spaces.Box(2, 7, (3,), np.int64),
    spaces.Box(0, 1, (3,), bool),
    spaces.Discrete(4),
    spaces.Discrete(4, start=-2),
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiDiscrete([[3, 4], [2, 5]], start=[[1, 2], [3, 4]]),
    spaces.MultiBinary(3),
    spaces.MultiBinary([2, 3]),
    TEXT,
    IMAGE,
    spaces.Box(0, 255, (9, 8), np.uint8),
    NESTED,
    spaces.Dict({"camera": IMAGE, "text": TEXT, "where": spaces.MultiDiscrete([2, 3], start=[1, 1])}),
    spaces.Dict({"action_mask": spaces.MultiBinary(3), "seen": VECTOR}),
]
ACTIONS = [
    VECTOR,
    spaces.Box(-1, 1, (2, 3), np.float64),
    spaces.Box(2, 7, (3,), np.int64),
    spaces.Discrete(3),
    spaces.Discrete(3, start=5),
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiDiscrete([[3, 4], [2, 5]], start=[[1, 2], [3, 4]]),
    spaces.MultiBinary(3),
    spaces.Dict({"z": VECTOR, "a": spaces.Box(-2, 2, ())}),
    spaces.Dict({"z": spaces.Discrete(2, start=7), "a": spaces.Tuple((spaces.MultiBinary(2),))}),
    spaces.Tuple(
        (spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 2]), spaces.Box(0, 3, (2,), np.int8))
    ),
]


def sample(space, count):
    """Samples of a space, batched as in Minari's buffers."""
    space.seed(3)
    return batched(space, [space.sample() for _ in range(count)])


def batched(space, elements):
    match type(space).__name__:
        case "Dict":
            return {k: batched(part, [x[k] for x in elements]) for k, part in space.spaces.items()}
        case "Tuple":
            return tuple(batched(part, [x[i] for x in elements]) for i, part in enumerate(space.spaces))
        case "Text":
            return elements
    return np.array(elements)


def as_stored(values):
    if isinstance(values, np.ndarray) and values.dtype == np.uint8 and values.ndim > 2:
        return np.stack([decoded(frame) for frame in values])
    return values


def spaces_of(obs, act):
    """fdg's spaces for a Gymnasium environment, and its conversion of observations."""

    class Source(gymnasium_parts.LibrarySource):
        name = "gymnasium:Mine-v0"
        facts = gymnasium_parts.facts("gymnasium:Mine-v0", obs, act, None)

    source = Source()
    encode = gymnasium_codec.encode_parts if gymnasium_parts.has_parts(obs) else gymnasium_spaces.encode
    return source.observation_space, source.action_space, encode


@pytest.mark.parametrize("obs", OBSERVATIONS, ids=str)
def test_observations_match_environment(tmp_path, obs):
    act = THREE
    values = sample(obs, 5)
    path = write_as_minari(tmp_path / "x", obs, act, values, np.array([0, 2, 1, 0]))
    observation_space, action_space, encode = spaces_of(obs, act)
    DataSet(path).check_spaces(observation_space, action_space, "Mine-v0")
    steps = DataSet(path).steps(observation_space, action_space)
    stored = jax.tree.map(as_stored, values, is_leaf=lambda x: isinstance(x, list))
    expected = encode(obs, stored)
    if isinstance(expected, dict):
        expected.pop("action_mask", None)
    for got, part in ((steps.observation, slice(0, 4)), (steps.final_observation, slice(1, 5))):
        jax.tree.map(np.testing.assert_array_equal, got, jax.tree.map(lambda x, part=part: x[part], expected))
        given = jax.tree.map(lambda x: (str(x.dtype), x.shape[1:]), got)
        leaves = [(space.dtype, space.shape) for _, space in envs.composite.parts(observation_space)]
        assert jax.tree.leaves(given, is_leaf=lambda x: type(x) is tuple and type(x[0]) is str) == leaves


@pytest.mark.parametrize("act", ACTIONS, ids=str)
def test_actions_match_environment(tmp_path, act):
    values = sample(act, 4)
    path = write_as_minari(tmp_path / "x", VECTOR, act, sample(VECTOR, 5), values)
    observation_space, action_space, _ = spaces_of(VECTOR, act)
    DataSet(path).check_spaces(observation_space, action_space, "Mine-v0")
    action = DataSet(path).steps(observation_space, action_space).action
    assert action.dtype == action_space.dtype and action.shape == (4, *action_space.shape)
    assert all(action_space.contains(one) for one in action)
    back = gymnasium_spaces.decode(act, action)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), back, values)


@pytest.mark.parametrize(
    ("act", "stored", "read"),
    [
        (spaces.Discrete(3, start=5), [5, 7], [0, 2]),
        (spaces.MultiDiscrete([3, 4], start=[1, -1]), [[1, 2], [3, -1]], [[0, 3], [2, 0]]),
        (spaces.MultiBinary(2), [[0, 1], [1, 1]], [[0, 1], [1, 1]]),
        (spaces.Box(2, 7, (1,), np.int64), [[2], [7]], [[0], [5]]),
    ],
)
def test_actions_start_at_zero(tmp_path, act, stored, read):
    path = write_as_minari(tmp_path / "x", VECTOR, act, sample(VECTOR, 3), np.array(stored))
    observation_space, action_space, _ = spaces_of(VECTOR, act)
    assert DataSet(path).steps(observation_space, action_space).action.tolist() == read


@pytest.mark.parametrize(
    ("obs", "act", "observation", "action", "says"),
    [
        (spaces.Discrete(4), THREE, Box(0.0, 1.0, (5,)), Discrete(3), r"Discrete\(4\), and m has Box\[5\]"),
        (spaces.Discrete(4), THREE, Box(0.0, 2.0, (4,)), Discrete(3), r"and m has Box\[4\] from 0 to 2"),
        (VECTOR, FROM_FIVE, OURS, Discrete(4), r"actions Discrete\(3, start=5\), and m has Discrete\(4\)"),
        (
            VECTOR,
            spaces.MultiDiscrete([2, 3], start=[1, 0]),
            OURS,
            MultiDiscrete((2, 2)),
            r"actions MultiDiscrete\(\[2, 3\], start=\[1, 0\]\), and m has MultiDiscrete\(\[2, 2\]\)",
        ),
        (VECTOR, spaces.MultiBinary(3), OURS, MultiDiscrete((2, 2)), r"actions MultiBinary\(3\), and"),
        (VECTOR, spaces.Dict({"a": VECTOR, "b": THREE}), OURS, Discrete(2), r"actions Dict\(a, b\), and"),
        (
            NESTED,
            THREE,
            envs.Dict({"a": Box(0.0, 1.0, (2,)), "b": Discrete(3)}),
            Discrete(3),
            r"observations/a Tuple, and m has Box\[2\]",
        ),
        (TEXT, THREE, Box(0.0, 255.0, (4,), "uint8"), Discrete(3), r"observations Text\(5\), and m has"),
    ],
)
def test_different_spaces(tmp_path, obs, act, observation, action, says):
    path = write_as_minari(tmp_path / "x", obs, act, sample(obs, 2), sample(act, 1))
    with pytest.raises(FdgError, match=f"{says}.*: give data of this environment"):
        DataSet(path).check_spaces(observation, action, "m")


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "Discrete", "n": 2**40},
        {"type": "Discrete", "n": -1},
        {"type": "Discrete", "n": 3, "start": 2**70},
        {"type": "Discrete", "n": 4, "dtype": "O"},
        {"type": "MultiDiscrete", "nvec": [2**31, 2**31]},
        {"type": "MultiDiscrete", "nvec": [2, 3], "start": [0, 0, 0]},
        {"type": "MultiDiscrete", "nvec": []},
        {"type": "MultiBinary", "n": [2**20, 2**20]},
        {"type": "MultiBinary", "n": "3"},
        {"type": "Text", "max_length": 2**60, "charset": "a"},
        {"type": "Text", "max_length": 3, "charset": 4},
        {"type": "Box", "shape": [2**40], "low": 0, "high": 1, "dtype": "uint8"},
        {"type": "Box", "shape": [3], "low": float("nan"), "high": 1, "dtype": "float32"},
        {"type": "Box", "shape": [3], "low": 2, "high": 1, "dtype": "float32"},
        {"type": "Box", "shape": [3], "low": float("-inf"), "high": 1, "dtype": "int64"},
        {"type": "Box", "shape": [3], "low": [1, 2], "high": 1, "dtype": "int64"},
        {"type": "Box", "shape": [3], "low": 0, "high": 1, "dtype": "i4,f8"},
        {"type": "Tuple", "subspaces": [{"type": "Graph"}]},
        {"type": "Dict", "subspaces": {"a": None}},
        {"type": "Dict", "subspaces": []},
        {"type": ["Box"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("what", ["observation", "action"])
def test_invalid_descriptions(tmp_path, what, spec):
    act = THREE
    path = write_as_minari(tmp_path / "x", VECTOR, act, sample(VECTOR, 2), np.array([1]))
    file = Path(path, "data/metadata.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), f"{what}_space": json.dumps(spec)}))
    observation_space, action_space, _ = spaces_of(VECTOR, act)
    with pytest.raises(FdgError, match=f"has {what}s .*: give data of this environment"):
        DataSet(path).check_spaces(observation_space, action_space, "m")


FRAME = np.zeros((9, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "at step 1 is not a readable picture"),
        (b"text", "at step 1 is not a readable picture"),
        (encoded(FRAME, "JPEG")[:-40], "at step 1 is not a readable picture"),
        (encoded(FRAME, "GIF"), "at step 1 is not a readable picture"),
        (encoded(np.zeros((8, 9, 3), np.uint8), "JPEG"), "at step 1 is a picture of 8 x 9 RGB, expected"),
        (encoded(FRAME[..., 0], "JPEG"), "at step 1 is a picture of 9 x 8 L, expected 9 x 8 RGB"),
        (encoded(np.zeros((5000, 5000), np.uint8), "PNG"), "at step 1 is a picture of 5000 x 5000 L"),
    ],
)  # fmt: skip
def test_invalid_images(tmp_path, content, says):
    act = THREE
    path = write_as_minari(tmp_path / "x", IMAGE, act, sample(IMAGE, 3), np.array([1, 1]))
    with h5py.File(Path(path, "data", minari.ARRAYS), "r+") as file:
        file["episode_0/observations"][1] = np.frombuffer(content, np.uint8)
    observation_space, action_space, _ = spaces_of(IMAGE, act)
    with pytest.raises(FdgError, match=f"episode_0/observations {says}") as caught:
        DataSet(path).steps(observation_space, action_space)
    assert "\n" not in str(caught.value)


def test_images_with_equal_lengths(tmp_path):
    """Minari stores images like this if their encodings have equal lengths."""
    act = THREE
    frames = np.repeat(sample(IMAGE, 1), 3, axis=0)
    path = write_as_minari(tmp_path / "x", IMAGE, act, frames, np.array([1, 1]))
    with h5py.File(Path(path, "data", minari.ARRAYS), "r+") as file:
        del file["episode_0/observations"]
        file["episode_0/observations"] = [np.frombuffer(encoded(f, "JPEG"), np.uint8) for f in frames]
    observation_space, action_space, _ = spaces_of(IMAGE, act)
    obs = DataSet(path).steps(observation_space, action_space).observation
    np.testing.assert_array_equal(obs[0], decoded(frames[0]))
    assert obs.shape == (2, 9, 8, 3)


def test_images_larger_than_file(tmp_path):
    """Rows of zeros, compressed by gzip: 64 of them would be 64 MiB."""
    path = write_as_minari(tmp_path / "x", IMAGE, THREE, sample(IMAGE, 64), np.ones(63, int))
    with h5py.File(Path(path, "data", minari.ARRAYS), "r+") as file:
        del file["episode_0/observations"]
        shape = (64, 1 << 20)
        file.create_dataset("episode_0/observations", shape, "u1", chunks=(1, 1 << 20), compression="gzip")
    observation_space, action_space, _ = spaces_of(IMAGE, THREE)
    with pytest.raises(FdgError, match="makes the pictures and texts larger than the file"):
        DataSet(path).steps(observation_space, action_space)


def test_categories_out_of_range(tmp_path):
    act = FROM_FIVE
    path = write_as_minari(tmp_path / "x", VECTOR, act, sample(VECTOR, 3), np.array([5, 4]))
    observation_space, action_space, _ = spaces_of(VECTOR, act)
    with pytest.raises(FdgError, match=r"actions has a category outside Discrete\(3, start=5\) at step 1"):
        DataSet(path).steps(observation_space, action_space)


def test_minigrid(tmp_path):
    """Declared bounds are 0 to 255; the environment's name gives the codes. Only Minari limits the length of
    missions. JPEG would change codes.
    """
    image = spaces.Box(0, 255, (7, 7, 3), np.uint8)
    obs = spaces.Dict({"direction": spaces.Discrete(4), "image": image, "mission": spaces.Text(9)})
    maps = np.arange(2 * 147, dtype=np.uint8).reshape(2, 7, 7, 3) % 3
    values = {"direction": np.array([3, 0]), "image": maps, "mission": ["go", "get up"]}
    path = write_as_minari(tmp_path / "x", obs, THREE, values, np.array([1]))
    name = "gymnasium:MiniGrid-Empty-5x5-v0"
    parts = {key: gymnasium_parts.observation_space(name, part) for key, part in obs.spaces.items()}
    ours = envs.Dict({**parts, "mission": Box(0.0, 255.0, (96,), "uint8")})
    assert ours["image"].codes == ((0, 11), (0, 6), (0, 4))
    DataSet(path).check_spaces(ours, Discrete(3), name)
    with pytest.raises(FdgError, match="observations/image stores codes of categories as JPEG, which is"):
        DataSet(path).steps(ours, Discrete(3))
    with h5py.File(Path(path, "data", minari.ARRAYS), "r+") as file:
        del file["episode_0/observations/image"]
        file["episode_0/observations/image"] = maps
    read = DataSet(path).steps(ours, Discrete(3)).observation
    np.testing.assert_array_equal(read["image"], maps[:1])
    assert bytes(read["mission"][0]) == b"go" + bytes(94) and read["direction"].tolist() == [3]
