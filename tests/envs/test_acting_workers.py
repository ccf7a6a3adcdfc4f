"""Gymnasium's workers that act for whole segments (`acts=True`)."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from envs import host
from fdg.errors import FdgError
from tests.envs.test_host import COUNTING, _close_pools, _marker, keys  # noqa: F401 fixtures

T, B = 6, 5


def act(env, observation, keys):
    """Random actions, and a number of each observation."""
    total = sum(jnp.sum(x.reshape(len(x), -1), axis=1) for x in jax.tree.leaves(observation))
    return jax.vmap(env.action_space.sample)(keys), {"total": total}


@functools.cache
def program(env, by_steps=False):
    """A function that takes T steps: `(state, observation, key)` -> the same two, and results `[T, B]`."""

    def run_segment(state, observation, key):
        all_keys = jax.random.split(key, (T, 2, B))
        actor, operands = env.acting(functools.partial(act, env), all_keys)
        state, observation, extras, steps = env.segment(actor, operands, all_keys, state)
        return state, observation, (extras, steps)

    def run_steps(state, observation, key):
        def step(carry, keys):
            action, extras = act(env, carry[1], keys[0])
            state, steps = env.step(keys[1], carry[0], action)
            return (state, steps.observation), (extras, steps)

        carry, results = jax.lax.scan(step, (state, observation), jax.random.split(key, (T, 2, B)))
        return *carry, results

    return jax.jit(run_steps if by_steps else run_segment)


def run(env, modes, between=lambda: None):
    """Results of T steps, again and again, in segments or (True) step by step."""
    state, observation = jax.jit(env.reset)(keys(B))
    results = []
    for i, by_steps in enumerate(modes):
        state, observation, result = program(env, by_steps)(state, observation, jax.random.key(i))
        results.append(jax.device_get(result))
        between()
    return results


NAMES = [COUNTING, "gymnasium:tests.envs.parted:Parted-v0", "gymnasium:Pendulum-v1"]


@pytest.mark.parametrize("name", NAMES)
def test_segments_equal_steps(name):
    env = envs.make(name, workers=2, acts=True, max_episode_steps=4)
    expected, found = (run(env, modes) for modes in ([True, True, True], [False, True, False]))
    for (extras, steps), (other_extras, other_steps) in zip(expected, found, strict=True):
        jax.tree.map(np.testing.assert_array_equal, other_steps, steps)
        np.testing.assert_allclose(other_extras["total"], extras["total"], rtol=1e-5)
    assert expected[0][1].truncated.any() and not expected[0][1].truncated.all()


@pytest.mark.parametrize("fault", ["cut", "die", "hang", "raise"])
def test_lost_worker_loses_only_its_rows(fault, caplog):
    """Workers have rows 0 to 2, and 3 to 4; the first to reach its third step fails."""
    ((_, expected),) = run(envs.make(COUNTING, workers=2, acts=True), [False])
    env = envs.make(COUNTING, workers=2, acts=True, fault=fault, restarts=1, timeout=0.5)
    before = host.losses()
    ((_, steps),) = run(env, [False])
    lost = steps.truncated[0]
    assert lost.tolist() in ([True] * 3 + [False] * 2, [False] * 3 + [True] * 2)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[:, ~lost], y[:, ~lost]), steps, expected)
    losses = host.losses()
    assert (losses.failures, losses.episodes) == (before.failures + 1, before.episodes + lost.sum())
    # New episodes begin at the first step, which ends the lost ones; the segment is repeated.
    assert (steps.reward[0, lost] == 0).all()
    np.testing.assert_array_equal(steps.final_observation[0, lost][:, 1], np.zeros(lost.sum()))
    np.testing.assert_array_equal(steps.observation[:, lost, 1].T, [[0, 1, 2, 3, 4, 0]] * lost.sum())
    assert "restart 1 of 1" in caplog.text


def test_new_episodes_begin_if_the_pool_is_gone():
    env = envs.make(COUNTING, workers=2, acts=True)
    (_, first), (extras, second) = run(env, [False, False], host.close)
    assert second.truncated[0].all() and (second.reward[0] == 0).all()
    np.testing.assert_array_equal(second.final_observation[0], first.observation[-1])
    np.testing.assert_allclose(extras["total"][0], first.observation[-1].sum(1))  # of the recorded action
    np.testing.assert_array_equal(second.observation[:, 0, 1], [0, 1, 2, 3, 4, 0])


def test_workers_do_not_import_jax():
    env = envs.make("gymnasium:tests.envs.faulty:Wide", workers=1, acts=True)
    state, first = env.reset(keys(B))
    program(env)(state, first, jax.random.key(0))
    with open(f"/proc/{int(first[0, 0])}/maps") as maps:
        assert "jaxlib" not in maps.read()


class Precise(nn.Module):
    """A user's network in 64 bits."""

    num_outputs: int

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, dtype=jnp.float64, param_dtype=jnp.float64)
        x = nn.gelu(nn.LayerNorm(dtype=jnp.float64, param_dtype=jnp.float64)(dense(8)(x)))
        return dense(self.num_outputs)(x), dense(1)(x)[..., 0]


TRAININGS = {
    "discrete": (algos.IMPALA, "gymnasium:CartPole-v1", {"num_envs": B}, 1e-9),
    "continuous": (algos.PPO, "gymnasium:Pendulum-v1", {"num_envs": 4}, 1e-9),
    # The statistics of observations have 32 bits.
    "normalized": (algos.PPO, "gymnasium:Pendulum-v1", {"num_envs": 4, "normalize_observation": True}, 1e-7),
}


@pytest.fixture
def _x64():
    """64-bit types in all threads: callbacks run in others, where `jax.enable_x64` has no effect."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAININGS)
def test_training_equals_that_without_acts(kind, _x64):
    cls, name, fields, tolerance = TRAININGS[kind]
    found = []
    for acts in (False, True):
        env = envs.make(name, workers=2, acts=acts)
        algorithm = cls(env=env, num_steps=8, total_steps=1000, network=Precise(2), **fields)
        engine = fdg.compile(algorithm, policies.GPUOnly(), jax.devices()[:1])
        state, metrics = engine.run(engine.init(0), 3)
        found.append(jax.device_get((state.parameters, metrics)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), *found)
    assert all(x.dtype == np.float64 for x in jax.tree.leaves(found[0][0]))


def test_invalid_settings_are_refused():
    with pytest.raises(FdgError, match="acts"):
        envs.make("gymnasium:CartPole-v1", acts="yes")
    with pytest.raises(FdgError, match="acts=True does not work with the wrapper FrameStack"):
        envs.make("gymnasium:CartPole-v1", acts=True, frame_stack=4)
