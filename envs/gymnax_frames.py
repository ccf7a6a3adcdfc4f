"""Renders gymnax environments with the functions behind gymnax's `Visualizer`.

The class itself is not used: it opens figures with pyplot, which may select a GUI backend, and makes a new
Gymnasium environment for every frame.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from envs.rendering import drawing, figure_image, import_optional, quiet_pygame

_CATCH, _POINT = "Catch-bsuite", "PointRobot-misc"  # names of environments
_MAZES = ("MetaMaze-misc", "FourRooms-misc")


def frames(name: str, env: Any, params: Any, states: Sequence[Any]) -> Iterator[np.ndarray] | None:
    """An image `[H, W, 3]` uint8 of each state (one or more); None if gymnax cannot draw the environment."""
    if name in ("Acrobot-v1", "CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0"):
        return _classic_control(name, params, states)
    if name.endswith("-MinAtar") or name == "Pong-misc":
        return _draw("vis_minatar", "minatar", env, params, states)
    if name == _CATCH:
        return _draw("vis_catch", "catch", env, params, states)
    if name == _POINT:
        return _draw("vis_circle", "circle", env, params, states)
    return _draw("vis_maze", "maze", env, params, states) if name in _MAZES else None


def _classic_control(name: str, params: Any, states: Sequence[Any]) -> Iterator[np.ndarray]:
    """Renders with Gymnasium's own environments, set to each state, as gymnax does."""
    quiet_pygame()
    import_optional("pygame", f"drawing {name}")
    gymnasium = import_optional("gymnasium", f"drawing {name}")
    visualizer = import_optional("gymnax.visualize.vis_gym", f"drawing {name}")
    gym_env = gymnasium.make(name, render_mode="rgb_array", disable_env_checker=True)
    try:
        gym_env.reset()
        inner = gym_env.unwrapped
        visualizer.set_gym_params(inner, name, params)
        for state in states:
            inner.state = visualizer.get_gym_state(state, name)
            if name == "Pendulum-v1":
                inner.last_u = np.asarray(state.last_u, np.float64)
            yield np.asarray(inner.render())
    finally:
        gym_env.close()


def _draw(module: str, kind: str, env: Any, params: Any, states: Sequence[Any]) -> Iterator[np.ndarray]:
    """Renders with a pair of gymnax's functions that draw into matplotlib axes."""
    visualizer = import_optional(f"gymnax.visualize.{module}", f"drawing {env.name}")
    figure, axes = drawing()
    image = getattr(visualizer, f"init_{kind}")(axes, env, states[0], params)
    axes.set_aspect("equal")
    for state in states:
        arguments = (image, env, state, params) if kind == "minatar" else (image, env, state)
        # Some update functions return the drawing, others change it in place.
        image = getattr(visualizer, f"update_{kind}")(*arguments) or image
        yield figure_image(figure)
