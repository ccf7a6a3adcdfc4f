"""Replay buffers: hindsight experience replay by hand, and errors of user-defined buffers.

Hindsight experience replay is from Andrychowicz et al. 2017, arXiv 1707.01495.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
from algos import buffers
from algos.buffers import BufferSpec
from algos.replay import ReplayState, Step
from tests import user_changes

REACH = envs.make("probe:reach", dimensions=1)
SAC = {"num_envs": 2, "batch_size": 8, "hidden": (8,), "total_steps": 1000, "learning_starts": 100}


def episodes(ends, positions, goals):
    """Steps of one environment; `positions` has one more element than `goals`."""
    positions, goals = (jnp.asarray(x, jnp.float32)[:, None] for x in (positions, goals))

    def observed(position):
        return {"observation": position, "achieved_goal": position, "desired_goal": goals}

    reward = jax.vmap(REACH.single.compute_reward)(positions[1:], goals)
    no_ends = jnp.zeros(len(goals), bool)
    action = jnp.arange(len(goals))[:, None].astype(jnp.float32)
    return Step(observed(positions[:-1]), action, reward, no_ends, jnp.asarray(ends), observed(positions[1:]))


def sample(make, steps, window=1, count=400):
    spec = BufferSpec(REACH, length=len(steps.reward), num_windows=count, window=window)
    buffer = make(spec)
    state = buffer.add(buffer.init(jax.tree.map(lambda x: x[0], steps)), steps)
    return buffer.sample(state, jax.random.key(0)).rows


# Two episodes of three and four steps: each step leads from its position to the next.
STEPS = episodes(
    ends=[False, False, True, False, False, False, True],
    positions=[0.0, 0.2, 0.4, 0.0, 0.2, 0.1, 0.0, -0.2],
    goals=[0.9] * 3 + [-0.2] * 4,
)


def test_hindsight_goals_are_later_in_the_episode():
    rows = sample(functools.partial(buffers.hindsight, share=1.0, horizon=4), STEPS)
    later = {0: (0.2, 0.4, 0.0), 1: (0.4, 0.0), 2: (0.0,), 3: (0.2, 0.1, 0.0, -0.2)}  # by first step
    for step in later:  # no window of four rows starts at the last three
        rows_of_step = rows.action[:, 0, 0] == step
        goals = np.unique(np.round(rows.observation["desired_goal"][rows_of_step, 0, 0], 3))
        np.testing.assert_allclose(goals, sorted(set(later[step])), atol=1e-6)
    reached = (
        jnp.abs(rows.final_observation["achieved_goal"] - rows.observation["desired_goal"])[..., 0] <= 0.1
    )
    np.testing.assert_array_equal(rows.reward, jnp.where(reached, 0.0, -1.0))
    np.testing.assert_array_equal(rows.final_observation["desired_goal"], rows.observation["desired_goal"])


def test_hindsight_share():
    original = sample(functools.partial(buffers.hindsight, share=0.0, horizon=4), STEPS)
    np.testing.assert_array_equal(original.reward[:, 0], STEPS.reward[original.action[:, 0, 0].astype(int)])
    relabelled = sample(functools.partial(buffers.hindsight, share=0.75, horizon=4), STEPS, count=2000)
    first = relabelled.action[:, 0, 0] == 0  # its original goal, 0.9, was never reached
    share = np.mean(relabelled.observation["desired_goal"][first, 0, 0] < 0.8)
    assert share == pytest.approx(0.75, abs=0.06)


def test_window_has_one_goal():
    rows = sample(functools.partial(buffers.hindsight, share=1.0, horizon=4), STEPS, window=2)
    assert rows.reward.shape == (400, 2)
    goals = rows.observation["desired_goal"][..., 0]
    np.testing.assert_array_equal(goals[:, 0], goals[:, 1])


def test_terminated_function():
    make = functools.partial(
        buffers.hindsight,
        share=1.0,
        horizon=4,
        reward=lambda achieved, desired: jnp.where(achieved[0] == desired[0], 1.0, 0.0),
        terminated=lambda achieved, desired: achieved[0] == desired[0],
    )
    rows = sample(make, STEPS)
    np.testing.assert_array_equal(rows.terminated, rows.reward == 1.0)
    third = rows.action[:, 0, 0] == 2  # its only possible goal is its next position
    assert np.all(rows.terminated[third]) and not np.any(rows.truncated[third])


def test_original_terminal_step_ends_window():
    """Rows after the terminal step belong to another episode: n-step returns must stop there."""
    steps = STEPS._replace(terminated=STEPS.truncated, truncated=STEPS.terminated)
    make_buffer = functools.partial(buffers.hindsight, share=1.0, horizon=4, terminated=lambda *_: False)
    rows = sample(make_buffer, steps, window=2)
    assert not np.any(rows.terminated)
    np.testing.assert_array_equal(rows.truncated, steps.terminated[rows.action[..., 0].astype(int)])


def test_masked_observations():
    """Goals are replaced as without masks, which stay with their rows."""
    mask = jnp.arange(7)[:, None] % 2 == jnp.arange(2)[None]
    observation, following = (
        envs.MaskedObservation(x, mask) for x in (STEPS.observation, STEPS.final_observation)
    )
    make = functools.partial(buffers.hindsight, share=1.0, horizon=4)
    rows = sample(make, STEPS._replace(observation=observation, final_observation=following), window=2)
    without = sample(make, STEPS, window=2)
    for found, expected in zip(rows, without, strict=True):
        found, found_mask = envs.features_and_mask(found)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        if found_mask is not None:
            np.testing.assert_array_equal(found_mask, mask[rows.action[..., 0].astype(int)])


def hindsight(**settings):
    return functools.partial(buffers.hindsight, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reward": lambda achieved, desired: "far"}, "returned str: return one number"),
        ({"reward": lambda achieved, desired: achieved}, "returned float32[4]: return one number"),
        ({"reward": lambda achieved, desired: achieved[0] * 1j}, "returned complex64[]: return one number"),
        ({"terminated": lambda achieved, desired: 0.5}, "returned float: return a bool"),
    ],
)
def test_goal_functions_return_scalars(settings, words):
    algorithm = algos.SAC(envs.make("probe:reach"), **{**SAC, "replay": hindsight(**settings)})
    with pytest.raises(fdg.FdgError, match=re.escape(words)):
        fdg.trace(algorithm)


def test_full_buffer_is_ready():
    buffer = algos.DQN(envs.make("probe:memory"), memory="gru").buffer  # keeps 9,984 of 10,000 steps
    rows = jnp.int32(buffer.length)
    assert buffer.is_ready(ReplayState((), rows)) and not buffer.is_ready(ReplayState((), rows - 1))


@pytest.mark.parametrize(
    ("env", "fields", "words"),
    [
        ("Pendulum-v1", {"replay": "hindsight"}, "have no parts achieved_goal and desired_goal"),
        ("Pendulum-v1", {"replay": "hindsigt"}, "did you mean 'hindsight'?"),
        ("Pendulum-v1", {"replay": 3}, "replay=3 is int: give a name (uniform, prioritized, hindsight)"),
        ("Pendulum-v1", {"replay": lambda spec: spec}, "it must return an algos.ReplayBuffer"),
        ("Pendulum-v1", {"replay": lambda spec: 1 // 0}, "ZeroDivisionError"),
        ("Pendulum-v1", {"replay": "uniform", "priority_exponent": 0.6}, "give one of them"),
        (
            "Pendulum-v1",
            {"replay": functools.partial(buffers.prioritized, exponent=-0.6)},
            "exponent=-0.6: it must be from 0 to 1",
        ),
        ("probe:reach", {"replay": "hindsight", "learning_starts": 40}, "make it at least 50"),
        ("probe:reach", {"replay": "hindsight", "buffer_size": 40}, "hindsight looks 25 steps ahead"),
        ("probe:reach", {"replay": "hindsight", "total_steps": 40}, "raise total_steps, or lower num_envs"),
        ("probe:reach", {"replay": hindsight(share=2.0)}, "share=2.0: it must be from 0 to 1"),
        ("probe:reach", {"replay": hindsight(horizon=0)}, "horizon=0: give a whole number of rows"),
        ("probe:reach", {"replay": hindsight(horizon=2.5)}, "horizon=2.5: give a whole number of rows"),
        ("probe:reach", {"replay": hindsight(reward=3)}, "reward=3: give a function of two goals"),
        ("probe:reach", {"replay": hindsight(reward=lambda goal: 0.0)}, "reward takes (goal), but is called"),
        ("Pendulum-v1", {"n_step": 3, "learning_starts": 4}, "make it at least 6"),
        ("Pendulum-v1", {"explore": 3}, "explore=3: it must be an algos.Explorer(init, apply)"),
        ("Pendulum-v1", {"normalize": 3}, "normalize=3: it must be an algos.Normalizer(init, apply, update)"),
        (
            "Pendulum-v1",
            {"normalize": user_changes.by_largest, "normalize_observation": True},
            "give one of them",
        ),
    ],
)
def test_invalid_settings(env, fields, words):
    with pytest.raises(fdg.FdgError, match=re.escape(words)):
        algos.SAC(envs.make(env), **{**SAC, **fields})


def test_reach_probe_by_hand():
    """A goal 0.75 away is within 0.1 after four moves of 0.2, so the optimal return is -3."""
    single = envs.make("probe:reach", dimensions=2).single
    state, _ = single.reset(jax.random.key(0))
    state, rewards = {**state, "goal": jnp.array([0.75, -0.1])}, []
    for move in ([1, -1], [1, 0], [1, 0], [1, 0], [-1, 0]):
        state, observation, reward, terminated, _ = single.step(None, state, jnp.array(move, jnp.float32))
        rewards.append(float(reward))
        assert not terminated
    assert rewards == [-1, -1, -1, 0, -1]
    np.testing.assert_allclose(observation["achieved_goal"], [0.6, -0.2], atol=1e-6)
    # One dimension: one move at most with probability 0.3, two 0.5, three 0.7, four 0.9.
    assert envs.make("probe:reach", dimensions=1).single.optimal_return == pytest.approx(-1.6)


@pytest.mark.whole
@pytest.mark.parametrize("replay", [None, "hindsight"])
def test_hindsight_solves_sparse_rewards(replay):
    env = envs.make("probe:reach")
    algorithm = algos.SAC(
        env=env, replay=replay, num_envs=8, num_steps=25, hidden=(64, 64), batch_size=64, total_steps=20_000,
        learning_starts=1000, updates_per_step=0.2, discount=0.95, learning_rate=1e-3, target_rate=0.02,
        initial_temperature=0.1,
    )  # fmt: skip

    @jax.jit
    def run(key):
        state = algorithm.init(key)
        return jax.lax.scan(lambda state, _: algorithm.iterate(state), state, length=100)[0]

    found = jax.jit(algorithm.evaluate, static_argnums=2)(run(jax.random.key(0)), jax.random.key(1), 128)
    score = float(found["return"])
    assert score > env.single.optimal_return - 2.0 if replay else score < -20.0
