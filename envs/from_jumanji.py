"""Jumanji 1.1 (Bonnet et al. 2024, arXiv 2306.09884): puzzles, packing, routing.

`jumanji:Snake-v1`, and everything else that Jumanji registers. Differences from Jumanji:

- An observation with several parts becomes one float32 vector, `[sum of sizes]`, in Jumanji's order; a single
array keeps its shape. Integer codes (`envs.Box.codes`: contents of a cell, a node, a machine) become one-hot;
a map of codes that is the only part becomes an image with one channel for each code.
- `action_mask` becomes our mask. If it masks *combinations* of choices (Tetris: rotation and column), the
action becomes one choice among all combinations; if it masks each choice separately, the action keeps several
choices. Where it forbids everything, as in some last states of episodes, our mask allows everything.
- Agents that Jumanji moves together (Cleaner, Connector) become one agent with several choices; their rewards
are added.
- An episode that ends with a discount of zero is terminated, else truncated. Some environments end at
`time_limit` with a discount of zero; their observations show the elapsed time, so these ends stay
terminations.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from envs.adapters import SCALARS, Overrides, check_names, checked_overrides, converting_errors, importing
from envs.environment import MaskedObservation, Observation, Vectorized, vectorize
from envs.library import Facts, LibraryEnvironment, with_dtypes_of
from envs.literals import replace_arrays, replace_module_arrays
from envs.quiet import quietly, relaxed_checks
from envs.spaces import Box, Discrete, MultiDiscrete, Space, bound
from fdg.arguments import check_options
from fdg.errors import FdgError, one_line

PREFIX = "jumanji:"  # of its names for `envs.make`

# Copied from Jumanji's registry, and compared with it in a test, because importing it takes seconds.
NAMES = (
    "Game2048-v1", "GraphColoring-v1", "Minesweeper-v0", "RubiksCube-v0", "RubiksCube-partly-scrambled-v0",
    "Sudoku-v0", "Sudoku-very-easy-v0", "BinPack-v2", "FlatPack-v0", "JobShop-v0", "Knapsack-v1", "Tetris-v0",
    "Cleaner-v0", "Connector-v3", "MMST-v0", "CVRP-v1", "MultiCVRP-v0", "Maze-v0", "RobotWarehouse-v0",
    "Snake-v1", "TSP-v1", "Sokoban-v0", "PacMan-v1", "SlidingTilePuzzle-v0", "LevelBasedForaging-v0",
    "SearchAndRescue-v0",
)  # fmt: skip

DOWNLOADS = (PREFIX + "Sokoban-v0",)  # these download levels when first made

_MAX_COMBINATIONS = 2**16  # outputs of the network; beyond it, choices stay separate
_MAX_FEATURES = 2**12  # of one part as one-hot; beyond it, codes stay numbers

Codes: TypeAlias = tuple[int, int]  # (lowest code, number of codes)


@dataclasses.dataclass(frozen=True)
class JumanjiEnvironment(LibraryEnvironment):
    """A `SingleEnvironment` of Jumanji: its registered name and overrides."""

    registered: Any  # Jumanji's name, or an environment with its interface
    overrides: Overrides = ()

    @property
    def name(self) -> str:
        """`jumanji:NAME`."""
        is_registered = isinstance(self.registered, str)
        return PREFIX + self.registered if is_registered else type(self.registered).__name__

    @property
    def facts(self) -> "_Facts":
        """Its properties, from Jumanji's specs and a trace of its reset."""
        return _facts(self)

    def reset(self, key: jax.Array) -> tuple[Any, Observation]:
        """Starts an episode."""
        with relaxed_checks():
            state, time_step = _jumanji_environment(self).reset(key)
        return state, self._observe(time_step.observation)

    def step(
        self, key: jax.Array, state: Any, action: jax.Array
    ) -> tuple[Any, Observation, jax.Array, jax.Array, jax.Array]:
        """One step without reset: `(state, observation, reward, terminated, truncated)`.

        It ignores `key`: Jumanji keeps the episode's key in its state.
        """
        facts = self.facts
        if facts.combined_choices is not None:
            action = jnp.stack(jnp.unravel_index(action, facts.combined_choices))
        action = action.reshape(facts.lowest_action.shape).astype(facts.lowest_action.dtype)
        with relaxed_checks():
            new, time_step = _jumanji_environment(self).step(state, action + facts.lowest_action)
        new = with_dtypes_of(new, state)
        is_last = time_step.last()
        no_future = jnp.all(jnp.asarray(time_step.discount) == 0)
        reward = jnp.sum(jnp.asarray(time_step.reward, jnp.float32))
        return new, self._observe(time_step.observation), reward, is_last & no_future, is_last & ~no_future

    def _observe(self, observation: Any) -> Observation:
        """Features and mask of Jumanji's observation."""
        facts = self.facts
        parts = jax.tree.leaves(_without_mask(observation, facts.is_masked))
        parts = [_as_features(part, codes) for part, codes in zip(parts, facts.codes, strict=True)]
        features = parts[0] if len(parts) == 1 else jnp.concatenate([part.reshape(-1) for part in parts])
        if not facts.is_masked:
            return features
        mask = jnp.asarray(observation.action_mask, bool)
        if not isinstance(facts.action_space, MultiDiscrete):
            mask = mask.reshape(-1)
        mask |= ~mask.any(-1, keepdims=True)
        return MaskedObservation(features, mask.reshape(-1))


def factories() -> dict[str, Callable[..., Vectorized]]:
    """Factories by name, for the registry."""
    return {PREFIX + name: functools.partial(_make, name) for name in NAMES}


def adapt(env: Any, **parameters: Any) -> JumanjiEnvironment:
    """Wraps a user's instance of Jumanji's `Environment`, which takes no parameters."""
    check_names(f"environment '{type(env).__name__}'", parameters, ())
    return JumanjiEnvironment(env)


def _make(name: str, **overrides: Any) -> Vectorized:
    """Makes the environment of the game `name`."""
    where = f"environment '{PREFIX}{name}'"
    checked = checked_overrides(where, overrides, lambda: _overridable_arguments(name), kinds=SCALARS)
    if checked:
        check_options(where, _constructor(name), overrides)  # by its annotations
    return vectorize(JumanjiEnvironment(name, checked))


@functools.cache
def _overridable_arguments(name: str) -> dict[str, None]:
    """Names of arguments that a user may override: those whose defaults are numbers, or None."""
    parameters = inspect.signature(_constructor(name)).parameters.values()
    plain_types = bool | int | float
    return {
        parameter.name: None
        for parameter in parameters
        if isinstance(parameter.default, plain_types) or "int" in str(parameter.annotation)
    }


def _constructor(name: str) -> Any:
    registration = _jumanji().registration
    return registration.load(registration._REGISTRY[name].entry_point)


@functools.cache
def _jumanji() -> Any:
    """Jumanji's package; imports it, also while JAX traces."""
    with importing(f"environments '{PREFIX}...' need", "Jumanji", "jumanji"):
        import jumanji
        import jumanji.environments
    replace_module_arrays("jumanji")
    return jumanji


@functools.cache
def _jumanji_environment(single: JumanjiEnvironment) -> Any:
    """Jumanji's environment, with its arrays on the host."""
    if not isinstance(single.registered, str):
        return single.registered
    where, jumanji = f"environment '{single.name}'", _jumanji()
    with jax.ensure_compile_time_eval(), quietly(), relaxed_checks():
        try:
            with converting_errors(where, "Jumanji", single.overrides):
                env = jumanji.make(single.registered, **dict(single.overrides))
        except OSError as error:  # Sokoban and Sudoku read their levels from a file or the network
            raise FdgError(f"{where}: its levels could not be loaded ({one_line(error)})") from error
        replace_arrays(env, "jumanji")
    return env


@dataclasses.dataclass(frozen=True)
class _Facts(Facts):
    lowest_action: np.ndarray  # in Jumanji, of integers; zeros for floats
    combined_choices: tuple[int, ...] | None  # number of options of each choice that is combined into one
    is_masked: bool
    codes: tuple[Codes | None, ...]  # of each part


@functools.cache
def _facts(single: JumanjiEnvironment) -> _Facts:
    """As `JumanjiEnvironment.facts`; computed once."""
    env = _jumanji_environment(single)
    with jax.ensure_compile_time_eval(), relaxed_checks():
        action_spec, observation_spec = env.action_spec, env.observation_spec
        replace_arrays(env, "jumanji")  # the environment caches its specs
    with relaxed_checks():
        observation = jax.eval_shape(lambda: env.reset(jax.random.key(0)))[1].observation
    mask = getattr(observation, "action_mask", None)
    mask_shape = None if mask is None else mask.shape
    space, combined_choices = _action_space(single.name, action_spec, mask_shape)
    is_masked = mask is not None and _mask_fits(space, mask.shape)
    parts = jax.tree_util.tree_leaves_with_path(_without_mask(observation, is_masked))
    codes = tuple(_codes(observation_spec, path, part) for path, part in parts)
    with relaxed_checks():
        feature_types = [
            jax.eval_shape(functools.partial(_as_features, codes=part_codes), part)
            for (_, part), part_codes in zip(parts, codes, strict=True)
        ]
    shape = (
        feature_types[0].shape if len(parts) == 1 else (sum(math.prod(part.shape) for part in feature_types),)
    )
    lowest = 0 if isinstance(space, Box) else getattr(action_spec, "minimum", 0)
    lowest = np.broadcast_to(lowest, action_spec.shape)
    observations = Box(float("-inf"), float("inf"), tuple(shape))
    lowest = lowest.astype(action_spec.dtype)
    # Without a limit: Jumanji's environments end by themselves.
    return _Facts(observations, space, None, lowest, combined_choices, is_masked, codes)


def _codes(spec: Any, path: Any, part: Any) -> Codes | None:
    """Lowest code and number of codes of a part; None if it stays numbers: no codes, only two, too large."""
    for key in path:
        spec = getattr(spec, getattr(key, "name", str(key)), None)
    low, high = getattr(spec, "minimum", None), getattr(spec, "maximum", None)
    if low is None or high is None or not np.issubdtype(part.dtype, np.integer):
        return None
    codes = Box(float(np.min(low)), float(np.max(high)), (math.prod(part.shape),), "int32").codes
    if codes is None or codes[0][1] <= 2 or math.prod(part.shape) * codes[0][1] > _MAX_FEATURES:
        return None
    return codes[0]


def _as_features(part: jax.typing.ArrayLike, codes: Codes | None) -> jax.Array:
    """A part as float32: unchanged, or one-hot, as `[H, W, C]` if it has two axes or more.

    >>> _as_features(jnp.array([[-1, 1]]), (-1, 3)).tolist()
    [[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]]
    """
    part = jnp.asarray(part)  # some parts are Python numbers
    if codes is None:
        return part.astype(jnp.float32)
    lowest, count = codes
    one_hot = jax.nn.one_hot(part.astype(jnp.int32) - lowest, count)
    return one_hot.reshape(*part.shape[:2], -1) if part.ndim > 1 else one_hot.reshape(-1)


def _action_space(
    name: str, spec: Any, mask_shape: tuple[int, ...] | None
) -> tuple[Space, tuple[int, ...] | None]:
    """Our action space; and if it combines several choices, the number of options of each, else None."""
    values = getattr(spec, "num_values", None)
    low, high = (
        np.broadcast_to(np.asarray(getattr(spec, field, limit), float), spec.shape).reshape(-1)
        for field, limit in (("minimum", -np.inf), ("maximum", np.inf))
    )
    if values is None and np.issubdtype(spec.dtype, np.integer):
        if mask_shape is None and not np.isfinite(high - low).all():
            raise FdgError(
                f"environment '{name}': integer actions without bounds: give action_spec a BoundedArray"
            )
        # MultiCVRP's integers go up to its mask's size.
        values = high - low + 1 if mask_shape is None else np.full(spec.shape, mask_shape[-1])
    if values is None:
        return Box(bound(low), bound(high), (low.size,)), None
    options = tuple(int(n) for n in np.asarray(values).reshape(-1))
    if len(spec.shape) == 0:
        return Discrete(options[0]), None
    if mask_shape == options and math.prod(options) <= _MAX_COMBINATIONS:
        return Discrete(math.prod(options)), options
    return MultiDiscrete(options), None


def _mask_fits(space: Space, shape: tuple[int, ...]) -> bool:
    """True if a mask of a shape has an entry for each of our actions."""
    if isinstance(space, Discrete):
        return math.prod(shape) == space.n
    return isinstance(space, MultiDiscrete) and len(shape) == 2 and space.nvec == shape[1:] * shape[0]


def _without_mask(observation: Any, is_masked: bool) -> Any:
    """An observation without its mask: a named tuple, a chex dataclass, or without a mask any value."""
    if not is_masked:
        return observation
    is_tuple = isinstance(observation, tuple)
    return (observation._replace if is_tuple else observation.replace)(action_mask=None)
