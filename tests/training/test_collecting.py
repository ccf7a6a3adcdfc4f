"""`fdg collect`: written steps, replay and labels match the environment; data sets can be extended."""

import dataclasses
import json
import resource
import shutil
from pathlib import Path
from typing import Any

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import algos
import envs
import fdg
from algos.offline import minari
from algos.offline.minari import DataSet, Writer
from algos.rollout import Actor, empty_memory
from fdg import files
from fdg.__main__ import main
from fdg.errors import FdgError
from fdg.training.collecting import collect, collect_replay
from fdg.training.data_copies import copied_dataset
from fdg.training.run import Run
from tests.algos.offline.data import random_steps, write_as_minari
from tests.refusing import refuses
from tests.training.own import Guesser


class Constant:
    """Always takes one action when greedy, and its negative when sampling."""

    def __init__(self, action, env="Pendulum-v1"):
        self.env, self.action = envs.make(env) if isinstance(env, str) else env, action

    def init(self, key):
        return {}

    def iterate(self, state):
        return state, {}

    def actor(self, state):
        def act(memory, observation, start, keys, greedy):
            sign = 1.0 if greedy else -1.0
            return jnp.full((len(keys), 1), sign * self.action), memory

        return Actor(empty_memory, act)


def constant_run(action, env="Pendulum-v1"):
    return Run(Constant(action, env), {}, 0)


def read_steps(path):
    env = envs.make("Pendulum-v1")
    return DataSet(str(path)).steps(env.observation_space, env.action_space)


def test_steps_match_the_environment(tmp_path):
    text = collect(constant_run(0.5), tmp_path / "x", 1_202, num_envs=2, greedy=True)
    assert (
        "1,202 steps of Pendulum-v1 written, in 8 episodes, mean return -" in text and "of the 6 that" in text
    )
    steps = read_steps(tmp_path / "x")
    assert len(steps.reward) == 1_202 and np.all(steps.action == 0.5) and not steps.terminated.any()
    # Each of the two environments takes 601 steps: three episodes of 200 steps, and one step.
    assert np.flatnonzero(steps.truncated).tolist()[-1] == 1_201 and steps.truncated.sum() == 8
    inside = ~steps.truncated[:-1]
    np.testing.assert_array_equal(steps.final_observation[:-1][inside], steps.observation[1:][inside])
    env = envs.make("Pendulum-v1")
    # Pendulum's reward, computed from the observed angle and velocity.
    angle = np.arctan2(steps.observation[:, 1], steps.observation[:, 0])
    expected = -(angle**2 + 0.1 * steps.observation[:, 2] ** 2 + 0.001 * 0.5**2)
    np.testing.assert_allclose(steps.reward, expected, atol=1e-3)
    assert env.max_episode_steps == 200


@pytest.mark.parametrize(
    ("buffer_size", "settings", "stored"),
    [
        (300, {}, 300),  # a full ring buffer: the oldest steps are overwritten
        (10_000, {"memory": "gru", "memory_size": 4, "num_steps": 8, "sequence_length": 4}, 480),
    ],
)
def test_replay_is_written_as_episodes(tmp_path, buffer_size, settings, stored):
    algorithm = algos.SAC(
        env=envs.make("Pendulum-v1"), num_envs=2, total_steps=480, buffer_size=buffer_size,
        batch_size=2, learning_starts=16, hidden=(8,), **settings,
    )  # fmt: skip
    run = fdg.fit(algorithm, seed=3, eval_episodes=0, out=tmp_path / "run", progress=False)
    collect_replay(run, tmp_path / "x")
    steps = read_steps(tmp_path / "x")
    assert len(steps.reward) == stored and not steps.terminated.any()
    inside = ~steps.truncated[:-1]
    np.testing.assert_array_equal(steps.final_observation[:-1][inside], steps.observation[1:][inside])
    angle = np.arctan2(steps.observation[:, 1], steps.observation[:, 0])
    # Actions are torques of the environment (at most 2), although replay holds them in [-1, 1].
    expected = -(angle**2 + 0.1 * steps.observation[:, 2] ** 2 + 0.001 * steps.action[:, 0] ** 2)
    np.testing.assert_allclose(steps.reward, expected, atol=1e-3)
    # Each environment took 240 steps, in episodes of 200; the ring buffer keeps the last ones.
    kept = stored // 2
    ends = np.flatnonzero(steps.truncated).tolist()
    assert ends == [kept - 41, kept - 1, 2 * kept - 41, 2 * kept - 1]


def test_run_without_replay_is_refused(tmp_path):
    with pytest.raises(FdgError, match="Constant has no replay of steps"):
        collect_replay(constant_run(0.5), tmp_path / "x")


def test_extend_and_label(tmp_path):
    out = tmp_path / "x"
    collect(constant_run(0.5), out, 20, num_envs=2)
    own = {"env_spec": "{}", "dataset_id": "mine/pendulum-v3", "author_email": ["a@b"]}  # of Minari
    content = json.loads((out / "data/metadata.json").read_text())
    before = json.dumps({**content, **own}).encode()
    for _ in range(2):  # as if killed once before the metadata was written
        (out / "data/metadata.json").write_bytes(before)
        collect(constant_run(0.25), out, 10, num_envs=1, labels=constant_run(1.0))
    steps, data = read_steps(out), DataSet(str(out))
    assert (data.num_steps, data.num_episodes) == (30, 3)
    assert steps.action.ravel().tolist() == [-0.5] * 20 + [1.0] * 10  # labels are greedy actions
    info = json.loads((out / "data/metadata.json").read_text())
    assert (
        info["data_format"] == "hdf5" and info["total_steps"] == 30 and info["environment"] == "Pendulum-v1"
    )
    assert info.items() >= own.items()
    # The student acts, not the teacher: without labels the observations are the same.
    collect(constant_run(0.25), tmp_path / "y", 10, num_envs=1)
    np.testing.assert_array_equal(steps.observation[20:], read_steps(tmp_path / "y").observation)


class RandomActions(Constant):
    """Takes random actions."""

    def __init__(self, env):
        super().__init__(None, env)

    def actor(self, state):
        def act(memory, observation, start, keys, greedy):
            return jax.vmap(self.env.action_space.sample)(keys), memory

        return Actor(empty_memory, act)


SCALAR, BINARY = envs.Box(-1.0, 1.0, (1,)), envs.Discrete(2)


@dataclasses.dataclass(frozen=True)
class AnySpaces:
    """Random observations of any space and actions of any space, in episodes of one step."""

    observation_space: Any = SCALAR
    action_space: Any = BINARY
    name = "sees"
    max_episode_steps = 4

    def reset(self, key):
        return key, envs.composite.sample(self.observation_space, key)

    def step(self, key, state, action):
        seen = envs.composite.sample(self.observation_space, key)
        return state, seen, jnp.float32(0.0), jnp.bool_(True), jnp.bool_(False)


def collect_and_read(env, out, monkeypatch):
    """Collects steps, checks that they are read as written; the stored action space, dtypes and values."""
    written = []
    add = Writer.add
    monkeypatch.setattr(
        Writer, "add", lambda self, seen, steps: (written.append((seen, steps)), add(self, seen, steps))
    )
    collect(Run(RandomActions(env), {}, 0), out, 24, num_envs=2)
    read = DataSet(str(out)).steps(env.observation_space, env.action_space)
    concatenate = lambda *parts: np.concatenate(parts)  # noqa: E731
    seen = jax.tree.map(lambda *x: concatenate(*(y[:-1] for y in x)), *(seen for seen, _ in written))
    jax.tree.map(np.testing.assert_array_equal, read.observation, seen)
    np.testing.assert_array_equal(read.action, concatenate(*(steps.action for _, steps in written)))
    assert read.action.dtype == env.action_space.dtype
    metadata = json.loads((out / "data/metadata.json").read_text())
    with h5py.File(out / "data/main_data.hdf5") as file:
        group = file["episode_0/actions"]
        stored = {}
        if isinstance(group, h5py.Dataset):
            stored[""] = concatenate(*(file[name]["actions"][()] for name in file))
        else:
            group.visititems(lambda name, x: stored.update(
                {name: concatenate(*(file[f"{one}/actions/{name}"][()] for one in file))}
                if isinstance(x, h5py.Dataset) else {}
            ))  # fmt: skip
    return json.loads(metadata["action_space"]), {
        name: (x.dtype.name, {*x.ravel().tolist()}) for name, x in stored.items()
    }


LOCAL = "gymnasium:tests.training.gymnasium_envs:"


@pytest.mark.parametrize(
    ("env", "metadata", "stored"),
    [
        (
            LOCAL + "MixedSpaces-v0",
            {
                "type": "Dict",
                "subspaces": {
                    "go": {"type": "Discrete", "dtype": "int64", "start": 10, "n": 3},
                    "stop": {"type": "MultiBinary", "n": 1},
                },
            },
            {"go": ("int64", {10, 11, 12}), "stop": ("int8", {0, 1})},
        ),
        (
            LOCAL + "NonZeroStart-v0",
            {"type": "MultiDiscrete", "dtype": "int64", "nvec": [2, 3], "start": [1, -1]},
            {"": ("int64", {1, 2, -1, 0})},
        ),
        (
            AnySpaces(action_space=envs.MultiDiscrete((2, 3))),
            {"type": "MultiDiscrete", "dtype": "int32", "nvec": [2, 3], "start": [0, 0]},
            {"": ("int32", {0, 1, 2})},
        ),
        (
            AnySpaces(action_space=envs.Dict({"b": envs.Discrete(2), "a": envs.MultiDiscrete((3,))})),
            {
                "type": "Dict",
                "subspaces": {
                    "a": {"type": "MultiDiscrete", "dtype": "int32", "nvec": [3], "start": [0]},
                    "b": {"type": "Discrete", "dtype": "int64", "start": 0, "n": 2},
                },
            },
            {"a": ("int32", {0, 1, 2}), "b": ("int64", {0, 1})},
        ),
        (
            AnySpaces(action_space=envs.Box(5, 6, (1,), "int32")),
            {"type": "Box", "dtype": "int32", "shape": [1], "low": [5], "high": [6]},
            {"": ("int32", {5, 6})},
        ),
    ],
    ids=["a mixed space", "a start", "several choices", "a mapping", "integers"],
)
def test_actions_are_stored_in_the_library_space(tmp_path, monkeypatch, env, metadata, stored):
    env = envs.make(env) if isinstance(env, str) else envs.vectorize(env)
    assert collect_and_read(env, tmp_path / "x", monkeypatch) == (metadata, stored)


def test_float64_bounds_are_exact(tmp_path):
    env = envs.make(LOCAL + "Float64Bounds-v0")
    algorithm = Constant(0.1, env)
    bounds = jnp.array([[0.1, -3.1]])
    algorithm.actor = lambda state: Actor(empty_memory, lambda memory, *_: (jnp.repeat(bounds, 2, 0), memory))
    collect(Run(algorithm, {}, 0), tmp_path / "x", 2, num_envs=2)
    with h5py.File(tmp_path / "x/data/main_data.hdf5") as file:
        assert file["episode_0/actions"][()].tolist() == [[0.1, -3.1]]


@pytest.mark.parametrize("shape", [(33, 32, 3), (32, 33), (32, 32, 2), (8, 8, 3)])
def test_image_round_trip(tmp_path, monkeypatch, shape):
    env = envs.vectorize(AnySpaces(envs.Dict({"x": envs.Box(0.0, 255.0, shape, "uint8")})))
    collect_and_read(env, tmp_path / "x", monkeypatch)
    with h5py.File(tmp_path / "x/data/main_data.hdf5") as file:
        # Minari decodes images of at least 32 x 32 pixels, and reads others as arrays.
        row = file["episode_0/observations/x"][0]
        assert row.tobytes().startswith(b"\x89PNG") == (shape in ((33, 32, 3), (32, 33)))


@pytest.mark.parametrize("name", ["", ".", "a/b", "/", "a\0b"])
@pytest.mark.parametrize("what", ["observation_space", "action_space"])
def test_names_invalid_in_hdf5_are_refused(tmp_path, monkeypatch, what, name):
    space = envs.Dict({"ok": envs.Discrete(2), "inner": envs.Dict({name: envs.Discrete(2)})})
    env = envs.vectorize(AnySpaces(**{what: space}))
    monkeypatch.setattr(RandomActions, "actor", lambda *_: Actor(empty_memory, None))  # must not be called
    with refuses(match="sees: (observations|actions) have a part named .*: rename it"):
        collect(Run(RandomActions(env), {}, 0), tmp_path / "x", 2, num_envs=2)
    assert not (tmp_path / "x").exists()


def test_spaces_too_large_for_the_metadata_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(minari, "MAX_METADATA_BYTES", 100)
    with refuses("Pendulum-v1: metadata.json with the bounds of each element"):
        collect(constant_run(0.5), tmp_path / "x", steps=4, num_envs=1)
    assert not (tmp_path / "x").exists()


def test_data_set_with_another_action_space_is_refused(tmp_path):
    """Actions start at 5 in the Minari file and at 0 in the environment: they cannot share a file."""
    env = envs.vectorize(AnySpaces())
    path = write_as_minari(
        tmp_path / "x", spaces.Box(-1, 1, (1,)), spaces.Discrete(2, start=5), np.zeros((2, 1)), np.array([5])
    )
    message = r"has actions Discrete\(2, start=5\), and fdg collect writes Discrete\(2\): give a new folder"
    with pytest.raises(FdgError, match=message):
        collect(Run(RandomActions(env), {}, 0), path, 2, num_envs=2)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"steps": 0}, "steps=0: give an integer of at least 1"),
        ({"num_envs": -1}, "num_envs=-1: give an integer"),
        (
            {"labels": "MountainCarContinuous-v0"},
            "labels: MountainCarContinuous-v0 has different spaces from Pendulum",
        ),
        ({"out": "full"}, "full: is neither a data set nor empty: give a new folder, or a data set"),
        ({"out": "other"}, r"other: has observations Box\[2\].*, and Pendulum-v1 has Box\[3\]"),
        ({"out": "file/x"}, "file/x cannot be written"),
        ({"out": "link"}, "link cannot be written: it is a link"),
    ],
)
def test_invalid_arguments(tmp_path, how, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/text").write_text("")
    (tmp_path / "file").write_text("")
    if how.get("out") == "other":
        collect(constant_run(0.5, "MountainCarContinuous-v0"), tmp_path / "other", 4, num_envs=1)
    if how.get("out") == "link":
        collect(constant_run(0.5), tmp_path / "link", 4, num_envs=1)
        (tmp_path / "link/data/main_data.hdf5").rename(tmp_path / "elsewhere")
        (tmp_path / "link/data/main_data.hdf5").symlink_to(tmp_path / "elsewhere")
    labels = constant_run(1.0, how["labels"]) if "labels" in how else None
    given = {"steps": 4, **how, "labels": labels, "out": tmp_path / how.get("out", "x")}
    with pytest.raises(FdgError, match=message):
        collect(constant_run(0.5), given.pop("out"), **given)


def test_incomplete_copy_falls_back_to_the_original_data(tmp_path):
    original, run = random_steps("probe:continuous"), tmp_path / "run"
    (run / "data").mkdir(parents=True)
    shutil.copy(Path(original, "data/metadata.json"), run / "data")
    assert copied_dataset(run, {"dataset": original}) == {}
    shutil.copy(Path(original, "data/main_data.hdf5"), run / "data")
    assert copied_dataset(run, {"dataset": original}) == {"dataset": str(run)}
    (run / "data/main_data.hdf5").unlink()
    assert copied_dataset(run, {"dataset": str(tmp_path / "gone")}) == {"dataset": str(run)}


def test_failed_collection_changes_no_data(tmp_path, monkeypatch):
    out = tmp_path / "x"
    collect(constant_run(0.5), out, 20, num_envs=2)
    before = {path.name: path.read_bytes() for path in (out / "data").iterdir()}

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("algos.offline.minari.Writer.add", interrupt)
    with pytest.raises(KeyboardInterrupt):
        collect(constant_run(0.5), out, 20, num_envs=2)
    assert {path.name: path.read_bytes() for path in (out / "data").iterdir()} == before
    with pytest.raises(KeyboardInterrupt):
        collect(constant_run(0.5), tmp_path / "new", 20, num_envs=2)
    assert not (tmp_path / "new").exists()


def test_full_disk_is_one_line(tmp_path):
    """HDF5 crashes if a write fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with refuses(f"{tmp_path / 'x'} cannot be written: File too large"):
            collect(constant_run(0.5), tmp_path / "x", 40_000, num_envs=100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "x").exists()


def test_repeat_after_a_kill(tmp_path):
    out = tmp_path / "x"
    killed = files.filling(out)
    (killed.__enter__() / "data").mkdir()  # never exited
    collect(constant_run(0.5), out, 20, num_envs=2)
    assert [path.name for path in out.iterdir()] == ["data"]
    (out / "data/metadata.json").unlink()
    with pytest.raises(FdgError, match="is neither a data set nor empty"):
        collect(constant_run(0.5), out, 20, num_envs=2)


def test_command_line(tmp_path, capsys):
    """Collects data from a run, trains BC on it, and loads that run after the data set is moved."""
    env = envs.make("CartPole-v1")
    fdg.fit(Guesser(), total_steps=8, eval_episodes=0, out=tmp_path / "guesser")
    words = ["collect", str(tmp_path / "guesser"), "--trust", "--steps", "50", "--num-envs", "2"]
    words += ["--out", str(tmp_path / "data")]
    assert main(words) == 0 and "50 steps of CartPole-v1 written" in capsys.readouterr().out
    assert main(words[:3]) == 2
    assert "error: --steps is missing: fdg collect RUN --steps 100000 --out DIR" in capsys.readouterr().err
    small = {"num_envs": 2, "num_steps": 1, "batch_size": 8, "hidden": (4,)}
    algorithm = algos.BC(env=env, dataset=str(tmp_path / "data"), **small)
    run = fdg.fit(algorithm, total_steps=8, out=tmp_path / "bc", eval_episodes=0)
    (tmp_path / "data").rename(tmp_path / "gone")
    again = fdg.load(tmp_path / "bc")
    jax.tree.map(np.testing.assert_array_equal, again.state.learned, run.state.learned)
    assert Path(again.algorithm.dataset) == tmp_path / "bc"  # the run's copy
    (tmp_path / "bc").rename(tmp_path / "moved")  # usable for `start_from` and as data set
    algorithm = dataclasses.replace(algorithm, dataset=str(tmp_path / "moved"))
    run = fdg.fit(
        algorithm, total_steps=8, start_from=tmp_path / "moved", out=tmp_path / "more", eval_episodes=0
    )
    assert run.finished
