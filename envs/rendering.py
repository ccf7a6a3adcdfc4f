"""Renders episodes: with the environment's own renderer, or as plots of the observations.

A `SingleEnvironment` may have a method `render(state) -> [H, W, 3] uint8`, or `frames(states)`, which returns
a sequence of images. Everything here runs on the host with NumPy arrays.
"""

import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from envs.environment import Environment
from fdg.errors import FdgError, one_line

_INCHES, _DPI = 4.0, 100  # of plots
_MAX_BARS = 64  # per observation; longer observations are drawn as a line


class Episode(NamedTuple):
    """A played episode of `T` steps, as NumPy arrays."""

    # T states of the single environment, each before its step; for a host environment its images, or empty
    states: Sequence[Any]
    # [T, (A,) *obs], an array or parts
    observation: Any
    action: Any  # [T, (A,) *action]
    reward: np.ndarray  # [T] float32, the mean over agents
    finished: bool  # True if the episode ended by itself

    @property
    def total(self) -> float:
        """The return."""
        return float(self.reward.sum())


def frames(env: Environment, episode: Episode) -> Iterator[np.ndarray]:
    """Images `[H, W, 3]` uint8 of an episode, one per step.

    The environment draws them; if it has no renderer, they show its observations.
    """
    single: Any = getattr(env, "single", None)
    rendered: Any = None
    if episode.states and single is None:
        yield from map(_as_rgb, episode.states)
        return
    if episode.states:
        try:
            if hasattr(single, "frames"):
                rendered = single.frames(episode.states)
            elif hasattr(single, "render"):
                rendered = map(single.render, episode.states)
            if rendered is not None:
                yield from (_as_rgb(frame) for frame in rendered)
                return
        except FdgError:
            raise
        except ImportError as error:
            raise FdgError(
                f"rendering {env.name} needs a package: {error}: pip install 'fdg[video]'"
            ) from error
        except Exception as error:  # a renderer may raise anything: no display, no OpenGL
            raise FdgError(f"{env.name} cannot be rendered: {one_line(error)}") from error
    yield from _plot_observations(env, episode)


def html(env: Environment, episode: Episode) -> str | None:
    """An interactive page of an episode; None if the library has no such viewer."""
    single: Any = getattr(env, "single", None)
    return single.html(episode.states) if hasattr(single, "html") and episode.states else None


def _as_rgb(frame: Any) -> np.ndarray:
    """An image `[H, W]` or `[H, W, C]` as `[H, W, 3]` uint8; grey, with or without alpha, if C is below 3."""
    frame = np.array(frame)  # a copy, since many renderers reuse one buffer
    if frame.ndim == 2 or frame.shape[2] < 3:
        frame = np.repeat(np.atleast_3d(frame)[..., :1], 3, axis=2)
    if frame.dtype != np.uint8:
        frame = np.clip(frame * (255 if frame.max(initial=0) <= 1 else 1), 0, 255).astype(np.uint8)
    return frame[..., :3]


def _plot_observations(env: Environment, episode: Episode) -> Iterator[np.ndarray]:
    """Plots observations: images as images, numbers as bars, with the actions below."""
    observations = _as_one_array(episode.observation)
    steps = len(observations)
    is_image = observations.ndim >= 4 or (observations.ndim == 3 and min(observations.shape[1:]) > 3)
    figure, (top, below) = drawing(rows=2)
    low, high = float(np.min(observations, initial=0.0)), float(np.max(observations, initial=0.0))
    actions = np.asarray(episode.action, np.float32).reshape(steps, -1)
    rows = _as_images(observations) if is_image else observations.reshape(steps, -1)
    for i in range(steps):
        top.clear()
        below.clear()
        if is_image:
            top.imshow(rows[i], vmin=low, vmax=max(high, low + 1e-6), cmap="viridis", interpolation="nearest")
            top.set_xticks([])
            top.set_yticks([])
        elif rows.shape[1] <= _MAX_BARS:
            top.bar(np.arange(rows.shape[1]), rows[i], color="#0072b2")
            top.set_ylim(low, max(high, low + 1e-6))
        else:
            top.plot(rows[i], color="#0072b2", linewidth=1)
            top.set_ylim(low, max(high, low + 1e-6))
        top.set_title(f"{env.name}, observation at step {i}", fontsize="small")
        for component in actions.T:
            below.plot(component, color="#cccccc", linewidth=1)
            below.plot(component[: i + 1], ".-", color="#d55e00", linewidth=1, markersize=4)
        below.set_ylabel("action", fontsize="small")
        below.set_xlim(0, max(1, steps - 1))
        yield figure_image(figure)


def _as_one_array(observation: Any) -> np.ndarray:
    """An observation `[T, ...]` with parts as one array: its first image, or all numbers concatenated."""
    parts = [np.asarray(part, np.float32) for part in jax.tree.leaves(observation)]
    images = [part for part in parts if part.ndim >= 4 or (part.ndim == 3 and min(part.shape[1:]) > 3)]
    if images or len(parts) == 1:
        return (images or parts)[0]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def _as_images(observations: np.ndarray) -> np.ndarray:
    """`[T, ..., H, W, C]` as one image per step.

    Three channels are colours; of other numbers, a pixel shows its highest nonzero channel.
    """
    if observations.ndim == 3:
        return observations
    while observations.ndim > 4:  # several agents, concatenated
        observations = np.concatenate(list(np.moveaxis(observations, 1, 0)), axis=-2)
    channels = observations.shape[-1]
    if channels == 3:
        return observations / max(1.0, float(observations.max(initial=1.0)))
    channel_numbers = np.arange(1, channels + 1, dtype=np.float32)
    return np.max(observations * channel_numbers / max(1, channels), axis=-1)


def drawing(rows: int = 1) -> tuple[Any, Any]:
    """A matplotlib figure without a window, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_INCHES, _INCHES), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    heights = {"height_ratios": [3, 1]} if rows == 2 else None
    return figure, figure.subplots(rows, gridspec_kw=heights)


def figure_image(figure: Any) -> np.ndarray:
    """A figure as an image, `[H, W, 3]` uint8."""
    canvas = figure.canvas
    canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]


def quiet_pygame() -> None:
    """Silences pygame, which renders for Gymnasium; turns off its audio and, without a display, its video.

    Environment variables that the user has set are kept.
    """
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    if not {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def import_optional(module: str, purpose: str) -> Any:
    """Imports an optional module; the error for a missing one begins with `purpose`, such as "an mp4"."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise FdgError(f"{purpose} needs {module} ({error}): pip install 'fdg[video]'") from error
