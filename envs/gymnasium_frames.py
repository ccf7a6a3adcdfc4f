"""Records episodes of Gymnasium environments with their rendered frames, in this process."""

from collections.abc import Callable
from typing import Any

import numpy as np

from envs.gymnasium_worker import Instance, make_instance, stack
from envs.rendering import Episode, quiet_pygame
from fdg.errors import FdgError, one_line


def record(
    name: str,
    options: dict[str, Any],
    act: Callable[[Any, int], Any],
    episodes: int,
    max_steps: int,
    seed: int,
) -> list[Episode]:
    """Plays episodes one after the other, and keeps a rendered frame of each step instead of its state.

    `name` is an argument of `gymnasium_worker.make_instance`; episode `i` starts from `seed + i`. `act` is
    `(observation, step) -> action`, in the library's formats.
    """
    quiet_pygame()
    try:
        env = make_instance(name, render_mode="rgb_array", **options)
    except Exception as error:  # the constructor may raise anything
        raise FdgError(f"environment '{name}' cannot be rendered: {one_line(error)}") from error
    recorded = []
    try:
        for i in range(episodes):
            recorded.append(_play_episode(env, act, max_steps, seed + i))
    except FdgError:
        raise
    except Exception as error:  # `step` and `render` may raise anything
        raise FdgError(f"environment '{name}' cannot be rendered: {one_line(error)}") from error
    finally:
        env.close()
    return recorded


def _play_episode(env: Any, act: Callable[[Any, int], Any], max_steps: int, seed: int) -> Episode:
    """Plays one episode of at most `max_steps`, and renders the state before each step."""
    pictures: list[np.ndarray] = []
    observations: list[Any] = []
    actions: list[Any] = []
    rewards: list[float] = []
    done = False
    instance = Instance(env)
    observation = instance.reset(seed)
    while not done and len(rewards) < max_steps:
        pictures.append(np.array(env.render()))  # a copy, since many renderers reuse one buffer
        observations.append(observation)
        actions.append(act(observation, len(rewards)))
        observation, reward, terminated, truncated = instance.step(actions[-1])
        done = terminated or truncated
        rewards.append(reward)
    return Episode(pictures, stack(observations), stack(actions), np.asarray(rewards, np.float32), done)
