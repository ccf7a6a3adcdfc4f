"""A minimal algorithm with an environment on the host, and a policy that places it on the last device."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import fdg
from fdg import Group


@dataclasses.dataclass(frozen=True)
class Hosted:
    env: Any
    num_envs: int = 2
    steps_per_iteration: ClassVar[int] = 2

    def init(self, key):
        key, reset = jax.random.split(key)
        env_state, observation = self.env.reset(jax.random.split(reset, self.num_envs))
        return env_state, observation, jnp.float32(0.5), key

    def iterate(self, state):
        env_state, observation, weight, key = state
        key, step = jax.random.split(key)
        keys = jax.random.split(step, self.num_envs)
        env_state, observation, reward = self.step(keys, env_state, self.act(weight, observation))
        weight = self.learn(weight, observation)
        return (env_state, observation, weight, key), {"reward": jnp.mean(reward), "weight": weight}

    @fdg.fragment("environment")
    def step(self, keys, env_state, action):
        env_state, step = self.env.step(keys, env_state, action)
        return env_state, step.observation, step.reward

    @fdg.fragment("actor", in_axes=(None, 0))
    def act(self, weight, observation):
        return (observation[:, 0] * weight > 0).astype(jnp.int32)

    @fdg.fragment("learner", in_axes=(None, 0), out_axes=None)
    def learn(self, weight, observation):
        return weight + jnp.mean(observation)


@dataclasses.dataclass(frozen=True)
class WorkersLast:
    def place(self, devices):
        learners, workers = Group("learners", (0,)), Group("workers", (1,))
        return {"environment": workers, "actor": learners, "learner": learners}
