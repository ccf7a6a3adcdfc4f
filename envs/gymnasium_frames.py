"""Episodes of Gymnasium's environments with the pictures that they draw of themselves, in this process."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from envs import gymnasium_parts, gymnasium_spaces
from envs.gymnasium_worker import Instance, stack
from envs.rendering import Episode, quiet_pygame
from fdg.errors import FdgError, one_line


def record(
    name: str,
    options: dict[str, Any],
    facts: gymnasium_spaces.Facts,
    act: Callable[[Any, int], np.ndarray],
    episodes: int,
    max_steps: int,
    seed: int,
) -> list[Episode]:
    """Plays episodes one after the other, and keeps a picture of each step as its state.

    Args:
      name: what `gymnasium.make` takes.
      options: its further arguments.
      facts: its spaces, and ours.
      act: `(observation [*obs], or its parts, step) -> action [*action]`.
      episodes, max_steps: how many, and how long at most.
      seed: of the first episode.

    Raises:
      FdgError: the environment cannot be made with pictures, or draws none.
    """
    import gymnasium

    quiet_pygame()
    try:
        env = gymnasium.make(name, render_mode="rgb_array", disable_env_checker=True, **options)
    except Exception as error:  # whatever the environment's constructor raises
        raise FdgError(f"environment '{name}' cannot be drawn: {one_line(error)}") from error
    played = []
    try:
        for i in range(episodes):
            played.append(_one(env, facts, act, max_steps, seed + i))
    except FdgError:
        raise
    except Exception as error:  # whatever its step, or its renderer, raises
        raise FdgError(f"environment '{name}' cannot be drawn: {one_line(error)}") from error
    finally:
        env.close()
    return played


def _one(
    env: Any,
    facts: gymnasium_spaces.Facts,
    act: Callable[[Any, int], np.ndarray],
    max_steps: int,
    seed: int,
) -> Episode:
    pictures: list[np.ndarray] = []
    observations: list[Any] = []
    actions: list[np.ndarray] = []
    rewards: list[float] = []
    done = False
    in_parts = gymnasium_parts.has_parts(facts.library_observation_space)
    encode = gymnasium_parts.encode if in_parts else gymnasium_spaces.encode
    instance = Instance(env)
    seen = instance.reset(seed)
    while not done and len(rewards) < max_steps:
        encoded = encode(facts.library_observation_space, stack([seen]))
        observation = jax.tree.map(lambda x: x[0], gymnasium_parts.shown(facts, encoded))
        pictures.append(np.array(env.render()))  # a copy: many draw into one buffer
        action = act(observation, len(rewards))
        decoded = gymnasium_spaces.decode(facts.library_action_space, np.asarray(action)[None])
        theirs = gymnasium_spaces.rows(decoded, 0)
        seen, reward, terminated, truncated = instance.step(theirs)
        done = terminated or truncated
        observations.append(observation)
        actions.append(np.asarray(action))
        rewards.append(reward)
    observed = jax.tree.map(lambda *x: np.stack(x), *observations)
    return Episode(pictures, observed, np.stack(actions), np.asarray(rewards, np.float32), done)
