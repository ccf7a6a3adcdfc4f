"""What random actions are worth in an environment: the level that a trained agent has to leave."""

from typing import Any

import jax
import numpy as np

import envs
from algos.rollout import Actor, empty_memory, evaluate


def random_returns(env: Any, episodes: int, seed: int = 0) -> np.ndarray:
    """Returns of whole episodes with actions drawn uniformly from the action space: `[episodes]` float32.

    Of several agents the mean over them, as after training. Components without bounds are drawn as
    `env.action_space.sample` does.

    >>> random_returns(envs.make("CartPole-v1"), 2).shape
    (2,)
    """
    several = envs.num_agents(env)

    def draw(key: jax.Array) -> jax.Array:
        if several is None:
            return env.action_space.sample(key)
        return jax.vmap(env.action_space.sample)(jax.random.split(key, several))

    def act(memory: Any, observation: Any, start: Any, keys: jax.Array, greedy: bool) -> Any:
        return jax.vmap(draw)(keys), memory

    actor = Actor(empty_memory, act)
    return np.asarray(
        jax.jit(lambda key: evaluate(env, actor, key, episodes)["returns"])(jax.random.key(seed))
    )
