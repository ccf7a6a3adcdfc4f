"""Octax 0.1 (Radji et al. 2025, arXiv 2510.01764): CHIP-8 arcade games.

`octax:brix`, `octax:cavern3` and others. Differences from Octax:

- An observation is the screen in the last frames, `[32, 64, frame_skip]` uint8, 255 where a pixel is lit.
Octax has frames first, and width before height.
- `terminated` and `truncated` are Octax's: the game's end, and `max_num_steps_per_episodes`.
- A game's start-up, some hundred instructions, is computed once, as in Octax, and kept on the host.

The machine's randomness (instruction CXNN) comes from the key of the episode's start.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs.adapters import check_count, check_names, importing
from envs.environment import Vectorized, vectorize
from envs.library import Facts, LibraryEnvironment, with_dtypes_of
from envs.literals import replace_arrays, replace_module_arrays
from envs.quiet import relaxed_checks
from envs.spaces import Box, Discrete
from fdg.errors import FdgError, one_line

PREFIX = "octax:"  # of its names for `envs.make`

# Copied from Octax's modules, and compared with them in a test; a number in a name is a level.
GAMES = (
    "airplane", "blinky", "brix", "cavern1", "cavern2", "cavern3", "cavern5", "cavern6", "deep", "filter",
    "flight_runner", "missile", "pong", "rocket", "shooting_stars",
    *(f"space_flight{level}" for level in range(1, 11)),
    "spacejam", "squash", "submarine", "tank", "target_shooter1", "target_shooter2", "target_shooter3",
    "tetris", "ufo", "vertical_brix", "wipe_off", "worm",
)  # fmt: skip

# Parameters of the emulator, with Octax's defaults.
_DEFAULTS = {"max_num_steps_per_episodes": 4500, "frame_skip": 4, "instruction_frequency": 700, "fps": 60}
_WIDTH, _HEIGHT = 64, 32  # pixels of the screen


@dataclasses.dataclass(frozen=True)
class OctaxEnvironment(LibraryEnvironment):
    """A `SingleEnvironment` of Octax: its game and overrides of the emulator."""

    game: str
    overrides: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """`octax:GAME`."""
        return PREFIX + self.game

    @property
    def facts(self) -> Facts:
        """Its properties, from the emulator's parameters; an action is a key of the game, or no key."""
        parameters = {**_DEFAULTS, **dict(self.overrides)}
        observations = Box(0.0, 255.0, (_HEIGHT, _WIDTH, parameters["frame_skip"]), "uint8")
        actions = Discrete(int(_octax_environment(self).num_actions))
        return Facts(observations, actions, parameters["max_num_steps_per_episodes"])

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """Starts a game."""
        with relaxed_checks():
            state, frames, _ = _octax_environment(self).reset.__wrapped__(_octax_environment(self), key)
        return jax.tree.map(jnp.asarray, state), _image(frames)

    def step(
        self, key: jax.Array, state: Any, action: jax.Array
    ) -> tuple[Any, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Holds a key for `frame_skip` frames, without reset."""
        with relaxed_checks():
            new, frames, reward, terminated, truncated, _ = _octax_environment(self).step.__wrapped__(
                _octax_environment(self), state, action
            )
        return with_dtypes_of(new, state), _image(frames), reward, jnp.asarray(terminated, bool), truncated

    def frames(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Images of states, `[H, W, 3]` uint8 each."""
        for state in states:
            lit = np.asarray(state.display).T.astype(np.uint8) * 255
            # Each pixel of the screen is drawn as 6 x 6 pixels of three equal colours.
            yield np.repeat(np.repeat(lit, 6, axis=0), 6, axis=1)[..., None].repeat(3, axis=2)


def _image(frames: Any) -> jax.Array:
    """Frames `[T, W, H]` bool as `[H, W, T]` uint8."""
    return jnp.asarray(jnp.transpose(jnp.asarray(frames), (2, 1, 0)), jnp.uint8) * jnp.uint8(255)


def factories() -> dict[str, Callable[..., Vectorized]]:
    """Factories of games by name, for the registry."""
    return {PREFIX + game: functools.partial(_make, game) for game in GAMES}


def _make(game: str, **overrides: Any) -> Vectorized:
    """Makes the environment of the game `game`."""
    where = f"environment '{PREFIX}{game}'"
    check_names(where, overrides, sorted(_DEFAULTS))
    for name, value in overrides.items():
        check_count(where, name, value)
    return vectorize(OctaxEnvironment(game, tuple(sorted(overrides.items()))))


@contextlib.contextmanager
def _without_opencv() -> Iterator[None]:
    """A context for importing Octax: an empty module replaces an absent OpenCV, which only drawing needs."""
    is_absent = importlib.util.find_spec("cv2") is None
    if is_absent:
        sys.modules["cv2"] = types.ModuleType("cv2")
    try:
        yield
    finally:
        if is_absent:
            del sys.modules["cv2"]


@functools.cache
def _octax_environment(single: OctaxEnvironment) -> Any:
    """Octax's environment, with its arrays on the host; imports Octax, also while JAX traces."""
    try:
        with importing(f"environment '{single.name}' needs", "Octax", "octax"), _without_opencv():
            from octax.environments import create_environment

            replace_module_arrays("octax")
            env, _ = create_environment(single.game, render_mode=None, **dict(single.overrides))
            replace_arrays(env, "octax")
    except OSError as error:
        raise FdgError(
            f"environment '{single.name}': its game cannot be loaded ({one_line(error)})"
        ) from error
    return env
