"""Calls of the values that a user gives an algorithm: bonuses and transforms. Their results are checked."""

from typing import Any

import jax
import jax.numpy as jnp

import fdg
from algos.checks import check_two
from algos.values import by_name
from envs import Observation, TimeStep, features_and_mask
from fdg.arguments import check_takes
from fdg.settings.given import check_same


def first_bonus(self: Any, observation: Observation) -> Any:
    """The initial state of an algorithm's bonus for `observation [B, *obs]`."""
    return by_name("--bonus", self.bonus).init(features_and_mask(observation)[0])


def paid(self: Any, state: Any, time_step: TimeStep) -> tuple[Any, TimeStep, dict[str, jax.Array]]:
    """The bonus's state after a rollout `[T, B]`, the rollout with the bonus added, and metrics."""
    state, time_step, mean = _pay.__get__(self)(state, time_step)
    return state, time_step, {"bonus": mean}


@fdg.fragment("learner", in_axes=(None, 1), out_axes=(None, 1, None), name="pay")
def _pay(self, state, time_step):
    """The bonus's state after a rollout `[T, B]`, the rollout with the bonus, and its mean."""
    axes = time_step.terminated.ndim  # A3C has one more axis: workers
    rows = jax.tree.map(lambda x: x.reshape(len(x), -1, *x.shape[axes:]), time_step)
    before = state
    found = by_name("--bonus", self.bonus).apply(state, rows)
    state, reward = check_two("apply of bonus", found, "give a pair, (state, reward)")
    check_same("apply of bonus gives state", before, state)
    check_same("apply of bonus gives reward", rows.reward, reward, dtypes=False)
    reward = reward.reshape(time_step.reward.shape)
    return state, time_step._replace(reward=time_step.reward + reward), jnp.mean(reward)


def transformed(transform: Any, rows: Any, parameters: Any, key: jax.Array) -> Any:
    """The rows of an `algos.Transform`."""
    function: Any = by_name("--transform", transform)
    check_takes(function, ("rows", "parameters", "key"), "transform")

    @fdg.fragment("buffer", in_axes=(1, None, None), out_axes=1, name="transform")
    def apply(rows: Any, parameters: Any, key: jax.Array) -> Any:
        after, how = (
            function(rows, parameters, key),
            "rows of the structure that it is given (rows._replace(...))",
        )
        check_same("transform gives rows", rows, after, how)
        return after

    return apply(rows, parameters, jax.random.fold_in(key, 1))
