"""What every environment must keep: `envs.check`'s own rules, as assertions.

`test_environment.py` shows that they fail broken environments.
"""

from collections.abc import Callable
from typing import Any

import jax

from envs.contract import COMPILE_FAST, NUM_ENVS, STEPS, Rollout, problems, random_actions, random_rollouts

__all__ = ["COMPILE_FAST", "NUM_ENVS", "STEPS", "assert_conforms", "assert_tracing_allocates_nothing"]


def assert_tracing_allocates_nothing(make: Callable[[], Any]) -> None:
    """Assert that neither making an environment nor tracing its steps leaves an array behind."""

    def first_step(key):
        env = make()
        keys = jax.random.split(key, NUM_ENVS)
        state, observation = env.reset(keys)
        return env.step(keys, state, random_actions(env, keys, observation))

    before = {id(array) for array in jax.live_arrays()}
    jax.eval_shape(first_step, jax.eval_shape(lambda: jax.random.key(0)))
    # JAX keeps a few scalars of its own; every array of an environment has an axis.
    left = [array for array in jax.live_arrays() if array.ndim and id(array) not in before]
    assert not left, left


def assert_conforms(env: Any, beside: Any = None) -> Rollout:
    """Assert the contract of `envs.Environment` on random steps, and return them."""
    rollout, backward = random_rollouts(env, beside)
    found = list(problems(env, rollout, backward))
    assert not found, found
    return rollout
