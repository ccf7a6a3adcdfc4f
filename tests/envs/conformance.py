"""The environment contract as assertions: the rules of `envs.check`.

`test_environment.py` tests that broken environments fail them.
"""

from collections.abc import Callable
from typing import Any

import jax

from envs.contract import COMPILE_FAST, NUM_ENVS, STEPS, Rollout, problems, random_actions, random_rollouts

__all__ = ["COMPILE_FAST", "NUM_ENVS", "STEPS", "assert_conforms", "assert_tracing_allocates_nothing"]


def assert_tracing_allocates_nothing(make: Callable[[], Any]) -> None:
    """Assert that making an environment and tracing its first step allocate no array."""

    def first_step(key):
        env = make()
        keys = jax.random.split(key, NUM_ENVS)
        state, observation = env.reset(keys)
        return env.step(keys, state, random_actions(env, keys, observation))

    before = {id(array) for array in jax.live_arrays()}
    jax.eval_shape(first_step, jax.eval_shape(lambda: jax.random.key(0)))
    # JAX caches a few scalars; every array of an environment has an axis.
    left = [array for array in jax.live_arrays() if array.ndim and id(array) not in before]
    assert not left, left


def assert_conforms(env: Any, beside: Any = None) -> Rollout:
    """Assert the contract of `envs.Environment` on random steps; return the rollout."""
    rollout, backward = random_rollouts(env, beside)
    found = list(problems(env, rollout, backward))
    assert not found, found
    return rollout
