"""EnvPool's environments: the contract, and equality with stepping EnvPool directly."""

import jax
import numpy as np
import pytest

import algos
import envs
from envs import from_envpool, host
from fdg.errors import FdgError, HostError, UnknownNameError
from tests.envs.conformance import assert_conforms
from tests.envs.test_gymnasium import NUM_ENVS, STEPS, random_rollout
from tests.lazy_module import LazyModule

envpool = LazyModule("envpool")


@pytest.fixture(autouse=True)
def _close_pools():
    yield
    host.close()


@pytest.mark.parametrize(("name", "limit"), [("CartPole-v1", 18), ("Hopper-v4", 12), ("CheetahRun-v1", 5)])
def test_conforms(name, limit):
    rollout = assert_conforms(envs.make(f"envpool:{name}", max_episode_steps=limit))
    assert rollout.step.truncated.any() and rollout.step.terminated.any() == (name != "CheetahRun-v1")


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")  # by EnvPool's spaces
@pytest.mark.parametrize(("name", "ends"), [("CartPole-v1", {True, False}), ("HalfCheetah-v4", {False})])
def test_matches_envpool(name, ends):
    """EnvPool itself resets ended instances in an additional step of those instances."""
    limit = 20
    env = envs.make(f"envpool:{name}", max_episode_steps=limit)
    seeds, first, actions, step = random_rollout(env)
    reference = envpool.make_gymnasium(name, num_envs=NUM_ENVS, seed=seeds.tolist(), max_episode_steps=limit)
    observation, _ = reference.reset()
    np.testing.assert_array_equal(first, observation.astype(np.float32))
    total, length, terminations = np.zeros(NUM_ENVS, np.float32), np.zeros(NUM_ENVS, int), set()
    for t in range(STEPS):
        observation, reward, terminated, truncated, info = reference.step(actions[t])
        total, length, ended = total + reward.astype(np.float32), length + 1, terminated | truncated
        np.testing.assert_array_equal(length, info["elapsed_step"])
        np.testing.assert_array_equal(step.final_observation[t], observation.astype(np.float32))
        np.testing.assert_array_equal(step.reward[t], reward.astype(np.float32))
        np.testing.assert_array_equal(step.terminated[t], terminated)
        np.testing.assert_array_equal(step.truncated[t], truncated)
        np.testing.assert_array_equal(step.episode_return[t], np.where(ended, total, 0))
        np.testing.assert_array_equal(step.episode_length[t], np.where(ended, length, 0))
        rows = np.flatnonzero(ended).astype(np.int32)
        if len(rows):
            _, reward, again, _, _ = reference.step(actions[t][rows], rows)
            assert not again.any() and not reward.any()
            terminations |= set(terminated[rows].tolist())
            total[rows], length[rows] = 0, 0
    assert terminations == ends


@pytest.mark.parametrize("name", ["MiniGrid-Empty-5x5-v0", "CVRP-v1"])
def test_composite_observations_and_masks(name):
    """Images and text are uint8, categories int32; the action mask is not part of the observation."""
    env = envs.make(f"envpool:{name}")
    keys = jax.random.split(jax.random.key(0), 2)
    _, observation = env.reset(keys)
    seeds = np.asarray(host._seeds(keys)).tolist()
    theirs, _ = envpool.make_gymnasium(name, num_envs=2, seed=seeds).reset()
    features, mask = envs.features_and_mask(observation)
    assert env.observation_space.contains(jax.tree.map(lambda x: x[0], features))
    assert set(features) | ({"action_mask"} if name == "CVRP-v1" else set()) == set(theirs)
    for part, values in features.items():
        np.testing.assert_array_equal(values, theirs[part].astype(values.dtype).reshape(values.shape))
    if name == "CVRP-v1":
        assert mask.dtype == bool and not mask.all()
        np.testing.assert_array_equal(mask, theirs["action_mask"] == 1)
    else:
        assert mask is None and features["direction"].dtype == "int32"
        assert {features[part].dtype.name for part in ("image", "mission")} == {"uint8"}
        assert env.observation_space["image"].codes == ((0, 11), (0, 6), (0, 4))


def test_sudoku_loads_its_boards():
    _, observation = envs.make("envpool:Sudoku-very-easy-v0").reset(jax.random.split(jax.random.key(0), 2))
    board = np.asarray(envs.features_and_mask(observation)[0]["board"])
    assert board.dtype == np.int32 and (board > 0).sum() > 30, "a board is half full"


def test_vizdoom_folder(tmp_path, monkeypatch):
    """ViZDoom ends the process if two instances make the folder at once, or if none can.

    ViZDoom itself is not started: it may hang while it holds the GIL, which no timeout can stop.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "_vizdoom").write_bytes(b"")
    pool = envs.make("envpool:DeadlyCorridor-v1").source.start(2)
    seeds = np.arange(2)
    with pytest.raises(HostError, match=r"into the working directory, and cannot \(.*/_vizdoom: "):
        pool.reset(seeds, seeds, 30.0)
    pool.close()
    (tmp_path / "_vizdoom").unlink()
    from_envpool._make_vizdoom_folder("DeadlyCorridor-v1")
    assert (tmp_path / "_vizdoom").is_dir()
    (tmp_path / "_vizdoom").rmdir()
    from_envpool._make_vizdoom_folder("CartPole-v1")
    assert not list(tmp_path.iterdir())


def test_names_and_parameters_are_checked():
    assert len(envpool.list_all_envs()) > 1600
    with pytest.raises(UnknownNameError, match="EnvPool 'HalfCheeta-v4': did you mean 'HalfCheetah-v4'"):
        envs.make("envpool:HalfCheeta-v4")
    with pytest.raises(
        UnknownNameError, match=r"unknown parameter .*'max_steps': did you mean 'max_episode_steps'"
    ):
        envs.make("envpool:HalfCheetah-v4", max_steps=3)
    with pytest.raises(FdgError, match="no parameter 'num_envs': it is a setting of the algorithm"):
        envs.make("envpool:HalfCheetah-v4", num_envs=3)
    with pytest.raises(FdgError, match="has 2 players"):
        envs.make("envpool:Backgammon-v1").observation_space  # noqa: B018 read from EnvPool here


def test_half_cheetah_preset():
    algorithm = algos.make("ppo", envs.make("envpool:HalfCheetah-v4"))
    assert algorithm.normalize_observation and algorithm.total_steps == 1_000_000
