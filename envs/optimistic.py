"""Optimistic resets: if resets are expensive, a few environments share one reset per step.

Under `vmap` every environment computes a reset in every step, because each may end. If a reset costs many
times as much as a step, it takes nearly all the time. But episodes are long, and two of a few
environments rarely end in the same step: one reset per step for all of them suffices (Matthews et al. 2024,
arXiv 2402.16801, appendix, their `OptimisticResetVecEnvWrapper`).

Their wrapper assigns starts at random over the whole batch. Here neighbours share a start, which comes from
the key of the first neighbour that has ended. So an environment that ends alone among its neighbours starts
as without sharing, and results do not change when the batch is split over devices between neighbourhoods.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from envs.adapters import check_count
from envs.environment import EpisodeState, TimeStep, Vectorized


@dataclasses.dataclass(frozen=True)
class OptimisticallyReset(Vectorized):
    """A batch of one `SingleEnvironment`, where `reset_ratio` neighbours share a start per step."""

    reset_ratio: int = 1  # 1: nothing is shared

    def __post_init__(self) -> None:
        check_count(f"environment '{self.name}'", "reset_ratio", self.reset_ratio)

    def step(self, keys: jax.Array, state: EpisodeState, action: jax.Array) -> tuple[EpisodeState, TimeStep]:
        """Takes one step in every environment; see `Environment.step`.

        The number of neighbours is the greatest common divisor of `reset_ratio` and the batch size.
        """
        ratio = math.gcd(self.reset_ratio, keys.shape[0])
        if ratio == 1:
            return super().step(keys, state, action)
        # Ended environments "reset" to where they ended, so that this step computes no start ...
        _, start_types = jax.eval_shape(self._start, jax.eval_shape(lambda keys: keys[0], keys))
        zeros = jax.tree.map(lambda x: jnp.zeros((keys.shape[0], *x.shape), x.dtype), start_types)
        state_before_reset, time_step = super().step(keys, state._replace(start=(state.inner, zeros)), action)

        # ... and all neighbours get one start, from the key of the first that has ended.
        def among_neighbours(x: jax.Array) -> jax.Array:
            return x.reshape(x.shape[0] // ratio, ratio, *x.shape[1:])

        first = jnp.argmax(among_neighbours(time_step.done), axis=1)
        reset_keys = jax.vmap(lambda keys, i: keys[i])(among_neighbours(keys), first)
        starts = jax.vmap(lambda key: self._start(jax.random.split(key)[1]))(reset_keys)
        inner, observation = jax.tree.map(lambda x: jnp.repeat(x, ratio, axis=0), starts)

        def where_ended(new: jax.Array, old: jax.Array) -> jax.Array:
            done = time_step.done.reshape(-1, *[1] * (new.ndim - 1))
            return jnp.where(done, new, old)

        return state_before_reset._replace(
            inner=jax.tree.map(where_ended, inner, state_before_reset.inner), start=None
        ), time_step._replace(observation=jax.tree.map(where_ended, observation, time_step.final_observation))
