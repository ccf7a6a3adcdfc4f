"""Datasets: reading what was written, and one-line errors about invalid files."""

import json
import os
import types

import h5py
import numpy as np
import pytest

import envs
from algos.offline import minari
from algos.offline.minari import DataSet
from envs import Box, Dict, Discrete, MultiDiscrete, Tuple
from fdg.errors import FdgError
from tests.algos.offline.data import episode, random_steps, write
from tests.refusing import refuses


class Spaces:
    name = "parts"
    observation_space = Dict(
        {"a": Box(-1.0, 1.0, (2,)), "b": Tuple((Discrete(3), Box(0, 255, (1,), "uint8")))}
    )
    action_space = Discrete(4)


def scalar_episodes():
    """An environment with scalar observations and two episodes: 0 1 2, terminated, and 5 6, truncated."""
    env = envs.make("probe:continuous")
    column = lambda *x: np.array(x, np.float32)[:, None]  # noqa: E731
    return env, [
        episode(column(0, 1, 2), column(0.5, -0.5), [1.0, 2.0], terminated=True),
        episode(column(5, 6), column(1.0), [3.0]),
    ]


def steps_of(path, env):
    return DataSet(path).steps(env.observation_space, env.action_space)


def test_steps_by_hand(tmp_path):
    env, episodes = scalar_episodes()
    steps = steps_of(write(tmp_path / "x", env, episodes), env)
    assert steps.observation.ravel().tolist() == [0, 1, 5]
    assert steps.final_observation.ravel().tolist() == [1, 2, 6]
    assert steps.action.ravel().tolist() == [0.5, -0.5, 1.0] and steps.reward.tolist() == [1, 2, 3]
    assert steps.terminated.tolist() == [False, True, False]
    assert steps.truncated.tolist() == [False, False, True]


def test_metadata_without_spaces(tmp_path):
    """Minari then takes the spaces of the environment."""
    env, episodes = scalar_episodes()
    path = write(tmp_path / "x", env, episodes)
    file = tmp_path / "x/data/metadata.json"
    metadata = json.loads(file.read_text())
    file.write_text(json.dumps({name: x for name, x in metadata.items() if not name.endswith("_space")}))
    DataSet(path).check_spaces(env.observation_space, env.action_space, env.name)
    assert steps_of(path, env).reward.tolist() == [1, 2, 3]
    with refuses("episode_0/observations has shape [3, 1], expected [3, 2]"):
        DataSet(path).steps(Box(-1.0, 1.0, (2,)), env.action_space)


def test_nested_observations(tmp_path):
    observed = {"a": np.ones((3, 2), np.float32), "b": (np.array([0, 1, 2]), np.full((3, 1), 200, np.uint8))}
    path = write(tmp_path / "x", Spaces, [episode(observed, np.array([3, 0]), [0.0, 0.0])])
    DataSet(path).check_spaces(Spaces.observation_space, Spaces.action_space, "parts")
    steps = steps_of(path, Spaces)
    assert steps.observation["b"][0].tolist() == [0, 1] and steps.final_observation["b"][0].tolist() == [1, 2]
    assert steps.observation["b"][1].dtype == np.uint8 and steps.action.tolist() == [3, 0]
    with h5py.File(tmp_path / "x/data/main_data.hdf5") as file:  # Minari's layout
        assert file["episode_0/observations/b/_index_1"].shape == (3, 1)
        assert dict(file["episode_0"].attrs) == {"id": 0, "total_steps": 2}


@pytest.mark.parametrize(
    ("name", "values", "dtype", "says"),
    [
        (
            "observations/b/_index_1",
            [[0.5], [1.0], [2.0]],
            np.float32,
            "a value that does not fit uint8 at step 0",
        ),
        ("observations/b/_index_1", [[9], [256], [9]], np.int64, "a value that does not fit uint8 at step 1"),
        ("observations/b/_index_0", [0, 1, 1.5], np.float64, "a value that does not fit int32 at step 2"),
        ("observations/a", [[0, 0], [0, 1e300], [0, 0]], np.float64, "is not finite at step 1"),
        ("actions", [3, 2.5], np.float32, "a value that does not fit int32 at step 1"),
        ("terminations", [0, 0.5], np.float32, "a value that does not fit int8 at step 1"),
        ("rewards", [0, 1e39], np.float64, "is not finite at step 1"),
    ],
)
def test_values_that_do_not_fit_dtype(tmp_path, name, values, dtype, says):
    observed = {"a": np.ones((3, 2), np.float32), "b": (np.array([0, 1, 2]), np.full((3, 1), 200, np.uint8))}
    path = write(tmp_path / "x", Spaces, [episode(observed, np.array([3, 0]), [0.0, 0.0])])
    with h5py.File(tmp_path / "x/data/main_data.hdf5", "a") as file:
        del file[f"episode_0/{name}"]
        file[f"episode_0/{name}"] = np.array(values, dtype)
    with pytest.raises(FdgError, match=f"episode_0/{name} .*{says}"):
        steps_of(path, Spaces)


def test_bounds_of_many_elements_are_read(tmp_path):
    """Minari writes the bounds of each element, here more than 8 MiB of text."""
    shape = (420_000,)
    pictures = types.SimpleNamespace(
        name="pictures", observation_space=Box(-np.inf, np.inf, shape), action_space=Discrete(2)
    )
    observed = np.zeros((2, *shape), np.float32)
    path = write(tmp_path / "x", pictures, [episode(observed, np.array([1]), [0.0])])
    assert (tmp_path / "x/data/metadata.json").stat().st_size > 8 << 20
    assert DataSet(path).num_steps == 1


def test_metadata_are_read_once_until_they_change(tmp_path, monkeypatch):
    env, episodes = scalar_episodes()
    path, reads = write(tmp_path / "x", env, episodes), []
    original = minari.read_json
    monkeypatch.setattr(
        minari, "read_json", lambda *given, **more: reads.append(1) or original(*given, **more)
    )
    for _ in range(2):
        assert DataSet(path).num_steps == 3 and DataSet(path).num_episodes == 2
        DataSet(path).check_spaces(env.observation_space, env.action_space, env.name)
    assert len(reads) == 1
    file = tmp_path / "x/data/metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "total_steps": 40}))
    assert DataSet(path).num_steps == 40


def test_descriptions_match_minari():
    assert minari.description(Box((0.0, -1.0), (1.0, 2.0), (2,))) == {
        "type": "Box", "dtype": "float32", "shape": [2], "low": [0.0, -1.0], "high": [1.0, 2.0]
    }  # fmt: skip
    assert minari.description(Tuple((Discrete(2),)))["subspaces"][0]["n"] == 2
    assert minari.description(MultiDiscrete((2, 5))) == {
        "type": "MultiDiscrete", "dtype": "int64", "nvec": [2, 5], "start": [0, 0]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("observation", "action", "says"),
    [
        (
            Box(-1.0, 1.0, (3,)),
            None,
            r"observations Box\[1\] .*, and maze has Box\[3\] from -1 to 1: give data of",
        ),
        (None, Discrete(2), r"actions Box\[1\] from -1 to 1, and maze has Discrete\(2\)"),
        (None, Box(-2.0, 2.0, (1,)), r"actions Box\[1\] from -1 to 1, and maze has Box\[1\] from -2 to 2"),
    ],
)
def test_different_spaces(observation, action, says):
    env = envs.make("probe:continuous")
    with pytest.raises(FdgError, match=says):
        DataSet(random_steps("probe:continuous")).check_spaces(
            observation or env.observation_space, action or env.action_space, "maze"
        )


def refused(tmp_path, change, says, metadata=None):
    """Expects an error for a dataset with a changed HDF5 file or changed metadata."""
    env, episodes = scalar_episodes()
    path = write(tmp_path / "x", env, episodes)
    file = tmp_path / "x/data/main_data.hdf5"
    if metadata is not None:
        metadata_file = tmp_path / "x/data/metadata.json"
        metadata_file.write_text(json.dumps({**json.loads(metadata_file.read_text()), **metadata}))
    if change is not None:
        with h5py.File(file, "r+") as content:
            change(content)
    with refuses(match=says):
        steps_of(path, env)


def replaced(name, **data):
    def change(file):
        del file[name]
        file.create_dataset(name, **data)

    return change


def linked(link):
    def change(file):
        del file["episode_1/rewards"]
        file["episode_1/rewards"] = link

    return change


def external_storage(file):
    del file["episode_1/rewards"]
    file.create_dataset("episode_1/rewards", (1,), "f4", external=[("/etc/hostname", 0, 4)])


def virtual(file):
    del file["episode_1/rewards"]
    layout = h5py.VirtualLayout((1,), "f4")
    layout[:] = h5py.VirtualSource("/etc/hostname", "x", (1,))
    file.create_virtual_dataset("episode_1/rewards", layout)


def zip_bomb(file):
    """A file of some kilobytes whose second episode claims 2**30 steps."""
    for name in ("observations", "actions", "rewards", "terminations", "truncations"):
        del file[f"episode_1/{name}"]
        shape = (2**30 + (name == "observations"), *(1,) * (name in ("observations", "actions")))
        file.create_dataset(f"episode_1/{name}", shape, "f4", chunks=(2**16, *shape[1:]), compression="gzip")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (linked(h5py.ExternalLink("/etc/hostname", "/x")), "rewards is a link, and links are not followed"),
        (linked(h5py.SoftLink("/episode_0/rewards")), "rewards is a link"),
        (external_storage, "rewards has its data in another file, which is not read"),
        (virtual, "rewards has its data in another file"),
        (replaced("episode_1/rewards", data=np.array([np.nan])), "rewards is not finite at step 0: leave"),
        (
            replaced("episode_0/actions", data=np.zeros((3, 1))),
            r"actions has shape \[3, 1\], expected \[2, 1\]",
        ),
        (
            replaced("episode_0/rewards", data=[b"x", b"y"]),
            r"rewards has dtype object: it must be of numbers",
        ),
        (replaced("episode_0/rewards", data=1.0), "rewards is one number, expected one for each step"),
        (replaced("episode_0/rewards", data=np.zeros(0)), "episode_0 has no steps: leave this episode out"),
        (
            replaced("episode_0/rewards", data=np.zeros(2), compression="lzf"),
            "rewards has filter 32000: only gzip",
        ),
        (
            replaced("episode_0/rewards", shape=(2,), maxshape=(None,), chunks=(2**28,), dtype="f4"),
            "rewards has chunks of over 256 MiB",
        ),
        (lambda file: file.__delitem__("episode_1"), "episode_1/rewards does not exist"),
        (lambda file: file["episode_0"].__delitem__("actions"), "episode_0/actions does not exist"),
        (lambda file: file.move("episode_0/rewards", "episode_0/x"), "episode_0/rewards does not exist"),
    ],
)
def test_invalid_files(tmp_path, change, says):
    refused(tmp_path, change, says)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"total_steps": 4}, r"has 3 steps, but metadata.json says 4"),
        ({"total_steps": 2}, r"episode_1 has 1 steps, but of total_steps in metadata.json only 0 are"),
        ({"total_steps": "3"}, "total_steps is '3': it must be from 1 to"),
        ({"total_episodes": 0}, "total_episodes is 0"),
        ({"data_format": "arrow"}, "data_format is 'arrow': only hdf5 is read"),
    ],
)
def test_invalid_metadata(tmp_path, metadata, says):
    refused(tmp_path, None, says, metadata)


def test_zip_bomb(tmp_path):
    refused(tmp_path, zip_bomb, r"larger than \d+ MiB, too much for a file", {"total_steps": 2 + 2**30})


def test_unreadable_files(tmp_path):
    env, episodes = scalar_episodes()
    with pytest.raises(
        FdgError, match=r"nowhere: is not a data set: it has no metadata.json; give a folder of"
    ):
        steps_of(str(tmp_path / "nowhere"), env)
    path = write(tmp_path / "x", env, episodes)
    file = tmp_path / "x/data/main_data.hdf5"
    original = file.read_bytes()
    for content in (original[: len(original) // 2], b"text", b""):
        file.write_bytes(content)
        with pytest.raises(FdgError, match="is not a readable HDF5 file"):
            steps_of(path, env)
    file.unlink()
    with pytest.raises(FdgError, match="there is no such file"):
        steps_of(path, env)
    os.mkfifo(file)
    with pytest.raises(FdgError, match="is a FIFO: give a regular file"):
        steps_of(path, env)


def test_random_corruption(tmp_path):
    """Random bytes are changed: reading gives a one-line error or steps, and no other error."""
    env, episodes = scalar_episodes()
    path = write(tmp_path / "x", env, episodes)
    file, rng = tmp_path / "x/data/main_data.hdf5", np.random.default_rng(0)
    original = np.frombuffer(file.read_bytes(), np.uint8)
    outcomes = set()
    for _ in range(60):
        content = original.copy()
        positions = rng.integers(len(content), size=rng.integers(1, 30))
        content[positions] = rng.integers(256, size=len(positions))
        file.write_bytes(content.tobytes())
        try:
            outcomes.add(len(steps_of(path, env).reward))
        except FdgError as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
    assert outcomes == {"refused", 3}


def test_missing_h5py(monkeypatch):
    def missing(name):
        raise ImportError("No module named 'h5py'")

    monkeypatch.setattr(minari.importlib, "import_module", missing)
    with pytest.raises(FdgError, match=r"data sets need h5py \(No module .*\): pip install 'fdg\[data\]'"):
        steps_of(random_steps("probe:continuous"), envs.make("probe:continuous"))
