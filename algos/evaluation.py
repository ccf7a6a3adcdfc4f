"""Evaluation of an actor: whole episodes, each in an environment of its own."""

from typing import Any

import jax
import jax.numpy as jnp

from algos.rollout import Actor
from envs import Environment


def evaluate(
    env: Environment,
    actor: Actor,
    key: jax.Array,
    episodes: int,
    greedy: bool = True,
    max_steps: int = 10_000,
) -> dict[str, Any]:
    """Plays `episodes` whole episodes at once, each in its own environment and with a new memory.

    Args:
      greedy: take the most probable actions; if False, sample actions as in training.
      max_steps: the length at which episodes are stopped if the environment has no time limit.

    Returns:
      `return`, `return_std`, `length`: statistics over the episodes, scalars. For each of `B` episodes:
      `returns` `[B]` float32, `lengths` `[B]` int32; `infos`: the environment's episode metrics by name,
      `[B]` float32, NaN for episodes that were stopped after `max_steps`. In multi-agent environments,
      returns are means over agents; with a wrapper that changes rewards, returns are those of the inner
      environment.
    """
    info_names = getattr(env, "info", ())
    limit = env.max_episode_steps or max_steps
    reset_key, run_key = jax.random.split(key)
    env_state, observation = env.reset(jax.random.split(reset_key, episodes))

    def is_any_playing(carry):
        time, _, _, _, playing, *_ = carry
        return (time < limit) & jnp.any(playing)

    def one_step(carry):
        time, env_state, observation, (memory, starts), playing, total, length, infos = carry
        keys = jax.random.split(jax.random.fold_in(run_key, time), (2, episodes))
        action, memory = actor.act(memory, observation, starts, keys[0], greedy)
        env_state, step = env.step(keys[1], env_state, action)
        total += jnp.where(playing, jnp.mean(step.reward.reshape(episodes, -1), axis=1), 0.0)
        # `episode_return` is the sum of rewards that no wrapper has changed.
        total = jnp.where(playing & step.done, step.episode_return, total)
        length += playing
        memory_and_starts = memory, step.done
        ended = playing & step.done
        infos = {name: jnp.where(ended, step.episode_info[name], old) for name, old in infos.items()}
        playing &= ~step.done
        return time + 1, env_state, step.observation, memory_and_starts, playing, total, length, infos

    start = (
        jnp.int32(0),
        env_state,
        observation,
        (actor.memory(episodes), jnp.ones(episodes, bool)),
        jnp.ones(episodes, bool),
        jnp.zeros(episodes, jnp.float32),
        jnp.zeros(episodes, jnp.int32),
        {name: jnp.full(episodes, jnp.nan, jnp.float32) for name in info_names},
    )
    *_, total, length, infos = jax.lax.while_loop(is_any_playing, one_step, start)
    return {
        "return": jnp.mean(total),
        "return_std": jnp.std(total),
        "length": jnp.mean(length.astype(jnp.float32)),
        "returns": total,
        "lengths": length,
        "infos": infos,
    }
