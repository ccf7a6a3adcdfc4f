"""A hand-written controller of Pendulum-v1, and a worse one: what data sets for learning are made by."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import envs
from algos.rollout import Actor, empty_memory


@dataclasses.dataclass(frozen=True)
class SwingUp:
    """Pumps energy until the pole is near the top, and holds it there; its returns are about -200.

    Attributes:
      noise: standard deviation of what is added to its torques, of at most 2.
    """

    noise: float = 0.0
    env: Any = dataclasses.field(default_factory=lambda: envs.make("Pendulum-v1"))

    def init(self, key):
        return {}

    def iterate(self, state):
        return state, {}

    def actor(self, state):
        def act(memory, observation, start, keys, greedy):
            cosine, sine, speed = observation.T
            angle = jnp.arctan2(sine, cosine)
            # Of a rod of mass and length one: the energy is 15 * cos at rest, and 15 upright.
            lacking = 15.0 - (15.0 * cosine + 0.5 * speed**2)
            pump = jnp.where(speed >= 0, 1.0, -1.0) * lacking
            torque = jnp.where(cosine > 0.9, -10.0 * angle - 2.0 * speed, pump)
            drawn = jax.vmap(jax.random.normal)(keys)
            noise = 0.0 if greedy else self.noise * drawn
            return jnp.clip(torque + noise, -2.0, 2.0)[:, None], memory

        return Actor(empty_memory, act)
