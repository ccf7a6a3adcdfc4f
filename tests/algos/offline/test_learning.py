"""Datasets as replay, offline and online: stored steps, statistics and errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
from fdg.commands.parse import parse
from fdg.errors import FdgError
from tests.algos.offline.data import episode, random_steps, write
from tests.conformance.comparison import plain

SMALL = {"num_envs": 2, "num_steps": 1, "batch_size": 8, "hidden": (8,)}


def numbered_steps(tmp_path, count=7):
    """A dataset of steps 0, 1, 2, ... with actions 0, 0.1, 0.2, ..., which may be from -2 to 2."""
    env = envs.make("Pendulum-v1")
    observations = np.repeat(np.arange(count + 1, dtype=np.float32)[:, None], 3, axis=1)
    actions = np.arange(count, dtype=np.float32)[:, None] / 10
    return env, write(tmp_path / "data", env, [episode(observations, actions, np.arange(count))])


def test_home_folder(tmp_path, monkeypatch):
    env, _ = numbered_steps(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert algos.BC(env=env, dataset="~/data", **SMALL).data.files["metadata"].startswith(str(tmp_path))
    words = "--algo bc --env Pendulum-v1 --batch-size 8 --dataset=~/data --num-envs 2".split()
    assert parse(words, "train", "").algorithm.dataset == str(tmp_path / "data")


@pytest.mark.parametrize("kind", [algos.IQL, algos.BC])
def test_environments_have_equal_parts(tmp_path, kind):
    env, path = numbered_steps(tmp_path)
    state = jax.jit(kind(env=env, dataset=path, **SMALL).init)(jax.random.key(0))
    stored = state.replay.rings.experience
    # Seven steps: three for each of two environments, one is left out. Actions are scaled to [-1, 1].
    np.testing.assert_array_equal(stored.reward[:, 0], [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_allclose(stored.action[:, 0, :, 0], [[0, 0.05, 0.1], [0.15, 0.2, 0.25]], rtol=1e-6)
    np.testing.assert_array_equal(stored.final_observation[:, 0, :, 0], [[1, 2, 3], [4, 5, 6]])
    assert state.env_state is None


def test_statistics_of_data(tmp_path):
    env, path = numbered_steps(tmp_path)
    state = algos.TD3BC(env=env, dataset=path, **SMALL).init(jax.random.key(0))
    np.testing.assert_allclose(state.observation_statistics.mean, [2.5] * 3, rtol=1e-5)
    np.testing.assert_allclose(state.observation_statistics.var, [35 / 12] * 3, rtol=1e-5)


def test_no_explorer_acts_on_data_alone(tmp_path):
    env, path = numbered_steps(tmp_path)
    explore = algos.explorers.correlated_noise()
    algorithm = algos.IQL(env=env, dataset=path, explore=explore, **SMALL)
    assert jax.eval_shape(algorithm.init, jax.random.key(0)).recollection is None


def test_online_steps_are_added(tmp_path):
    env, path = numbered_steps(tmp_path)
    algorithm = algos.IQL(env=env, dataset=path, online=True, total_steps=8, **SMALL)
    state, metrics = plain(algorithm, jax.jit(algorithm.init)(jax.random.key(0)), 2)
    stored = state.replay.rings.experience.reward[:, 0]
    np.testing.assert_array_equal(stored[:, :3], [[0, 1, 2], [3, 4, 5]])
    assert stored.shape == (2, 7) and np.all(stored[:, 3:5] < 0) and np.all(stored[:, 5:] == 0)
    assert np.all(np.isfinite(metrics["critic_loss"])) and "episode_return" in metrics


def test_offline_fragments():
    algorithm = algos.ReBRAC(
        env=envs.make("probe:continuous"), dataset=random_steps("probe:continuous"), **SMALL
    )
    graph = fdg.trace(algorithm)
    assert {fragment.role for fragment in graph.fragments} == {"buffer", "learner", "gradient", "update"}
    assert dataclasses.replace(algorithm, online=True).data.acts and not algorithm.data.acts


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"dataset": "/nowhere"}, "/nowhere: is not a data set: it has no metadata.json; give a folder of"),
        ({"num_envs": 3}, "num_envs=3 does not divide batch_size=8: use 2 or 4, or batch_size=9"),
        (
            {"num_envs": 64, "batch_size": 64},
            "num_envs=64: the data set has 80 steps, and each environment takes",
        ),
        (
            {"rings": 2},
            "rings=2 has no effect where nothing acts in training: set online=True, or leave it out",
        ),
        (
            {"bonus": algos.Bonus(jax.numpy.zeros_like, lambda state, step: (state, step.reward))},
            "bonus has no effect where nothing acts in training: set online=True, or leave it",
        ),
        ({"expectile": 1.0}, "expectile=1.0: it must be between 0 and 1"),
        ({"advantage_scale": -1.0}, "advantage_scale=-1.0: it must be 0 or more"),
        ({"env": envs.make("Pendulum-v1")}, r"has observations Box\[1\].* and Pendulum-v1 has Box\[3\]"),
    ],
)
def test_invalid_settings(fields, says):
    given = {
        "env": envs.make("probe:continuous"),
        "dataset": random_steps("probe:continuous"),
        **SMALL,
        **fields,
    }
    with pytest.raises(FdgError, match=says):
        algos.IQL(**given)


def test_cloning_with_rings():
    with pytest.raises(
        FdgError, match="BC: rings=2 has no effect where nothing acts in training: leave it out"
    ):
        algos.BC(env=envs.make("CartPole-v1"), rings=2)


def test_cloning_needs_data():
    with pytest.raises(FdgError, match="BC: dataset=None: give a folder of fdg collect, or of Minari"):
        algos.BC(env=envs.make("CartPole-v1")).init(jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class OneStepEnv:
    """An environment with a scalar observation, any action space, and episodes of one step."""

    action_space: envs.Box
    name = "acts"
    observation_space = envs.Box(-1.0, 1.0, (1,))
    max_episode_steps = 1

    def reset(self, key):
        return jnp.zeros(1), jnp.zeros(1)

    def step(self, key, state, action):
        return state, state, jnp.float32(0.0), jnp.bool_(True), jnp.bool_(False)


def stored_actions(tmp_path, space, actions):
    """Actions in replay after reading a dataset with these actions."""
    env = envs.vectorize(OneStepEnv(space))
    actions = np.array(actions, np.float32)
    path = write(
        tmp_path / "x", env, [episode(np.zeros((len(actions) + 1, 1)), actions, [0.0] * len(actions))]
    )
    state = algos.IQL(env=env, dataset=path, **{**SMALL, "num_envs": 1}).init(jax.random.key(0))
    return np.asarray(state.replay.rings.experience.action[0, 0]).tolist()


@pytest.mark.parametrize(
    ("space", "actions", "stored"),
    [
        (envs.Box((-2.0, 3.0), (2.0, 3.0), (2,)), [[1.0, 3.0], [-2.0, 3.0]], [[0.5, 0.0], [-1.0, 0.0]]),
        (envs.Box((0.0,), (4.0,), (1,)), [[0.0], [3.0]], [[-1.0], [0.5]]),
        (envs.Box(-3e38, 3e38, (1,)), [[3e38], [0.0]], [[1.0], [0.0]]),  # their difference overflows
    ],
)
@pytest.mark.filterwarnings("error")
def test_actions_are_scaled(tmp_path, space, actions, stored):
    assert stored_actions(tmp_path, space, actions) == stored


def test_warning_about_actions_out_of_bounds(tmp_path):
    says = r"x/data/main_data.hdf5: 2 of 4 actions are outside the bounds of Box.*the first at step 1 of all"
    with pytest.warns(fdg.FdgWarning, match=says) as warnings:
        actions = stored_actions(tmp_path, envs.Box(-2.0, 2.0, (1,)), [[1.0], [2.5], [-9.0], [2.0000002]])
    assert actions == [[0.5], [1.0], [-1.0], [1.0]] and len(warnings) == 1


@pytest.mark.parametrize(
    "space", [envs.Box(0, 9, (2,), "int32"), envs.Box(0, 255, (2,), "uint8"), envs.Box(0.0, np.inf, (2,))]
)
@pytest.mark.parametrize("kind", [algos.BC, algos.IQL, algos.TD3BC, algos.ReBRAC, algos.CQL])
def test_unsupported_action_spaces(kind, space):
    with pytest.raises(FdgError, match=r"cannot act in .*: give it finite bounds and a floating dtype"):
        kind(env=envs.vectorize(OneStepEnv(space)))
