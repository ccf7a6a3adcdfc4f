"""A user-defined algorithm with an actor."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import envs
import fdg


@dataclasses.dataclass(frozen=True)
class Guesser:
    """Learns only a bias. Its actor draws random actions; a greedy one always takes action 1."""

    env: Any = dataclasses.field(default_factory=lambda: envs.make("CartPole-v1"))
    rate: float = 0.5
    steps_per_iteration: ClassVar[int] = 8

    def init(self, key):
        return {"bias": jnp.float32(0.0), "key": key}

    def iterate(self, state):
        key, noise = jax.random.split(state["key"])
        bias = self.learn(state["bias"], jax.random.normal(noise, ()))
        return {"bias": bias, "key": key}, {"episode_return": bias}

    @fdg.fragment("learner", in_axes=None, out_axes=None)
    def learn(self, bias, noise):
        return self.rate * (bias + noise)

    def actor(self, state):
        def act(memory, observation, start, keys, greedy):
            if greedy:
                return jnp.ones(start.shape, jnp.int32), memory
            return jax.vmap(lambda key: jax.random.randint(key, (), 0, 2))(keys), memory

        return fdg_actor(lambda count: (), act)


class fdg_actor:
    def __init__(self, memory, act):
        self.memory, self.act = memory, act
