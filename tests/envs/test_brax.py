"""brax: the contract, equality with brax's own wrappers, and names.

Only two fast environments, because brax compiles slowly.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs import from_brax
from envs.quiet import quietly
from tests.envs.conformance import assert_conforms
from tests.lazy_module import LazyModule

brax_envs = LazyModule("brax.envs")

LIMIT = 7  # steps per episode: truncates three times within a rollout


def test_names_match_brax():
    with quietly():
        theirs = importlib.import_module("brax.envs")._envs
    assert list(from_brax.ENVIRONMENTS) == list(theirs)


class BraxStep:
    """brax's own wrappers: batch, time limit, and reset to the first initial state."""

    def __init__(self, name, **arguments):
        with quietly():
            single = brax_envs.get_environment(name, **arguments)
        self.env = brax_envs.training.wrap(single, episode_length=LIMIT)

    def reset(self, keys):
        with from_brax._relaxed_for_brax():
            # brax's wrappers infer the batch size from the shape of raw keys.
            state = jax.tree.map(strong, self.env.reset(jax.random.key_data(keys)))
        return state, state.obs

    def step(self, keys, state, action):
        with from_brax._relaxed_for_brax():
            state = jax.tree.map(strong, self.env.step(state, action))
        return state, (state.obs, state.reward, state.done, state.info["truncation"])


def strong(x):
    x = jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype)


# Steps of a tenth of a second: long enough for some pendulums to fall within the time limit.
PENDULUM = {"backend": "spring", "n_frames": 20}


@pytest.mark.parametrize(("name", "arguments"), [("fast", {}), ("inverted_pendulum", PENDULUM)])
def test_matches_brax(name, arguments):
    env = envs.make(f"brax:{name}", episode_length=LIMIT, **arguments)
    rollout = assert_conforms(env, beside=BraxStep(name, **arguments))
    step = rollout.step
    observation, reward, done, truncated = rollout.other_results
    assert step.truncated.any() and step.terminated.any() == (name != "fast")
    np.testing.assert_array_equal(step.truncated | step.terminated, done)
    np.testing.assert_array_equal(step.truncated, truncated)
    np.testing.assert_allclose(step.reward, reward, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(step.observation, observation, rtol=1e-4, atol=1e-5)


def test_name_contains_backend():
    assert envs.make("brax:ant", backend="spring") == envs.make("brax:ant:spring")
    assert envs.make("brax:ant:spring").name == "brax:ant:spring"
    assert envs.make("brax:ant", backend="generalized") == envs.make("brax:ant")
    assert envs.make("brax:ant:spring") != envs.make("brax:ant")
    assert envs.make("brax:ant").max_episode_steps == 1000
    assert envs.make("brax:ant").repeat_start and not envs.make("brax:ant", repeat_start=False).repeat_start
