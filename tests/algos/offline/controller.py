"""A hand-written controller of Pendulum-v1, with optional noise, for offline datasets."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import envs
from algos.rollout import Actor, empty_memory


@dataclasses.dataclass(frozen=True)
class SwingUp:
    """Adds energy until the pole is near the top and then holds it; its returns are about -200.

    Attributes:
      noise: standard deviation of the noise on torques, which are at most 2.
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
            # For a rod of mass and length 1, the energy is 15 * cos at rest, and 15 upright.
            missing = 15.0 - (15.0 * cosine + 0.5 * speed**2)
            pump = jnp.where(speed >= 0, 1.0, -1.0) * missing
            torque = jnp.where(cosine > 0.9, -10.0 * angle - 2.0 * speed, pump)
            sample = jax.vmap(jax.random.normal)(keys)
            noise = 0.0 if greedy else self.noise * sample
            return jnp.clip(torque + noise, -2.0, 2.0)[:, None], memory

        return Actor(empty_memory, act)
