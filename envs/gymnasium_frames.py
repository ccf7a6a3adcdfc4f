"""Records episodes of Gymnasium environments with their rendered frames, in this process."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from envs import gymnasium_parts, gymnasium_spaces
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
    """Plays episodes one after the other; their `states` are rendered frames.

    If the environment draws no images, `states` is empty. `name` is an argument of
    `gymnasium_worker.make_instance`; episode `i` starts from `seed + i`. `act` is `(observation, step) ->
    action`, in the library's formats.
    """
    quiet_pygame()
    env = None
    try:
        env = _make(name, options)
        return [_play_episode(env, act, max_steps, seed + i) for i in range(episodes)]
    except FdgError:
        raise
    except Exception as error:  # the constructor, `step` and `render` may raise anything
        raise FdgError(f"environment '{name}' cannot be rendered: {one_line(error)}") from error
    finally:
        if env is not None:
            env.close()


def _make(name: str, options: dict[str, Any]) -> Any:
    """An instance that renders, if its class or function takes `render_mode`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the class's metadata may not list the mode
            return make_instance(name, render_mode="rgb_array", **options)
    except TypeError:
        return make_instance(name, **options)


def _play_episode(env: Any, act: Callable[[Any, int], Any], max_steps: int, seed: int) -> Episode:
    """Plays one episode of at most `max_steps`, and renders the state before each step."""
    steps: list[tuple[Any, ...]] = []
    instance, done = Instance(env), False
    observation = instance.reset(seed)
    while not done and len(steps) < max_steps:
        picture, action = _picture(env), act(observation, len(steps))
        after, reward, terminated, truncated = instance.step(action)
        steps.append((picture, observation, action, reward))
        observation, done = after, terminated or truncated
    pictures, observations, actions, rewards = map(list, zip(*steps, strict=True))
    return Episode(
        [] if any(picture is None for picture in pictures) else pictures,
        gymnasium_parts.encode_observation(env.observation_space, stack(observations)),
        gymnasium_spaces.encode_action(env.action_space, stack(actions)),
        np.asarray(rewards, np.float32),
        done,
    )


def _picture(env: Any) -> np.ndarray | None:
    """A copy of the rendered frame, since many renderers reuse one buffer; None if it is not an image."""
    try:
        frame = np.array(env.render())
    except NotImplementedError:
        return None
    return frame if frame.ndim in (2, 3) and frame.dtype.kind in "buif" else None
