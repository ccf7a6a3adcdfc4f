"""Craftax 1.6 (Matthews et al. 2024, arXiv 2402.16801).

`Craftax-Symbolic-v1`, `Craftax-Classic-Symbolic-v1`, and both as images (`Pixels`). Differences from Craftax:

- Craftax has only `done`: here death or victory is a termination, and its `max_timesteps` a truncation.
- Generating a world takes many times as long as a step. As with the `OptimisticResetVecEnvWrapper` of its
baselines, 16 environments share one new world per step (`reset_ratio`; see `envs/optimistic.py`).
- Making an environment allocates no array: the package's arrays are host literals.
- Textures are made only in the requested size. Craftax makes three, the largest for people (64 pixels per
block), and compresses all into a file: many minutes; the agent's size takes seconds.

A step's keys are split as in Craftax (step, then reset), so for equal keys, and unless two environments that
share a world end at the same step, results equal those of its own `step`.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from envs.adapters import check_count, check_names, check_type, importing, lists_to_tuples
from envs.environment import Vectorized
from envs.lazy_plotting import without_plotting
from envs.literals import hold_modules, literals
from envs.optimistic import vectorize_optimistically
from envs.quiet import quietly, relaxed_checks
from envs.spaces import Box, Discrete

# Name -> (it is Classic, its observations are images).
NAMES = {
    "Craftax-Symbolic-v1": (False, False),
    "Craftax-Pixels-v1": (False, True),
    "Craftax-Classic-Symbolic-v1": (True, False),
    "Craftax-Classic-Pixels-v1": (True, True),
}
RESET_RATIO = 16
_UNLIMITED_STEPS = 2**30

Scalar: TypeAlias = "bool | int | float | tuple[Any, ...]"


@dataclasses.dataclass(frozen=True)
class CraftaxEnvironment:
    """A `SingleEnvironment` of Craftax: its name and overrides.

    Overrides are fields of its `EnvParams` and `StaticEnvParams`.
    """

    name: str
    overrides: tuple[tuple[str, Scalar], ...] = ()

    @property
    def observation_space(self) -> Box:
        """Numbers in [0, 1]: a vector, or `[H, W, 3]`."""
        return _specs(self).observation_space

    @property
    def action_space(self) -> Discrete:
        """17 actions in Classic, 43 in Craftax."""
        return _specs(self).action_space

    @property
    def max_episode_steps(self) -> int:
        """Craftax's `max_timesteps`."""
        return _specs(self).max_episode_steps

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """Generates a world."""
        env, params = _env_and_params(self)
        with relaxed_checks():
            observation, state = env.reset_env(key, params)
        return state, observation

    def step(
        self, key: jax.Array, state: Any, action: jax.Array
    ) -> tuple[Any, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Takes one step, without reset."""
        env, params = _env_and_params(self)
        with relaxed_checks():
            # Without Craftax's time limit, `done` is death or victory; `vectorize` applies the limit.
            observation, state, reward, done, _ = env.step_env(
                key, state, action, params.replace(max_timesteps=_UNLIMITED_STEPS)
            )
        return state, observation, reward, done, jnp.bool_(False)

    def frames(self, states: Sequence[Any]) -> Any:
        """Images of states, `[H, W, 3]` uint8 each, by Craftax's renderer."""
        is_classic, _ = NAMES[self.name]
        constants, renderer = _drawing_modules(is_classic)
        with relaxed_checks():
            draw = jax.jit(renderer.make_craftax_pixel_renderer(constants.BLOCK_PIXEL_SIZE_IMG))
            for state in states:
                yield np.clip(np.asarray(draw(state)), 0, 255).astype(np.uint8)


def factories() -> dict[str, Callable[..., Vectorized]]:
    """Factories by name, for the registry."""
    return {name: functools.partial(_make, name) for name in NAMES}


def _make(name: str, *, reset_ratio: int = RESET_RATIO, **overrides: Any) -> Vectorized:
    # Without overrides Craftax is not imported yet.
    values = _check_overrides(name, overrides) if overrides else {}
    return vectorize_optimistically(CraftaxEnvironment(name, tuple(sorted(values.items()))), reset_ratio)


def _check_overrides(name: str, overrides: dict[str, Any]) -> dict[str, Scalar]:
    """The overrides, with lists as tuples; raises for unknown parameters and wrong types."""
    defaults = {
        **_fields(_library_env(name).default_params),
        **_fields(_library_env(name).default_static_params()),
    }
    label = f"environment '{name}'"
    check_names(label, overrides, sorted((*defaults, "reset_ratio")))
    values = {
        field: check_type(label, field, value, type(defaults[field]))
        for field, value in lists_to_tuples(label, overrides).items()
    }
    check_count(label, "max_timesteps", values.get("max_timesteps", 1))
    return values


def _fields(params: Any) -> dict[str, Any]:
    """Parameters with plain values, by name, with their defaults."""
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return {name: value for name, value in values.items() if not _contains_none(value)}


def _contains_none(value: Any) -> bool:
    return value is None or (isinstance(value, tuple) and None in value)


def _package(is_classic: bool) -> str:
    return "craftax.craftax_classic" if is_classic else "craftax.craftax"


class _Textures(dict[int, Any]):
    """Craftax's textures by size, on the host, made on first use."""

    def __init__(self, make: Callable[[int], dict[str, Any]]):
        super().__init__()
        self._make = make

    def __missing__(self, size: int) -> dict[str, Any]:
        with jax.ensure_compile_time_eval(), quietly(), relaxed_checks():
            self[size] = literals(self._make(size))
        return self[size]


@functools.cache
def _drawing_modules(is_classic: bool) -> tuple[Any, Any]:
    """Craftax's modules `constants` and `renderer`, which draw with `_Textures`."""
    constants, renderer = (
        importlib.import_module(f"{_package(is_classic)}.{module}") for module in ("constants", "renderer")
    )
    textures = _Textures(constants.load_all_textures_given_size)
    for module in (constants, renderer):
        vars(module)["load_all_textures"] = lambda: textures
    return constants, renderer


@functools.cache
def _library_env(name: str, static_overrides: tuple[tuple[str, Scalar], ...] = ()) -> Any:
    """Craftax's environment without auto-reset; imports Craftax, possibly during tracing."""
    is_classic, is_pixels = NAMES[name]
    kind = "Pixels" if is_pixels else "Symbolic"
    with importing(f"environment '{name}' needs", "Craftax", "craftax"), without_plotting():
        module = importlib.import_module(f"{_package(is_classic)}.envs.craftax_{kind.lower()}_env")
        hold_modules("craftax")
        if is_pixels:
            _drawing_modules(is_classic)
    env = getattr(module, f"Craftax{'Classic' if is_classic else ''}{kind}EnvNoAutoReset")
    with jax.ensure_compile_time_eval():
        params = env.default_static_params().replace(**dict(static_overrides))
        return env(params)


def _env_and_params(single: CraftaxEnvironment) -> tuple[Any, Any]:
    """Craftax's environment and its parameters."""
    overrides = dict(single.overrides)
    static_fields = _fields(_library_env(single.name).default_static_params())
    env = _library_env(single.name, tuple(item for item in single.overrides if item[0] in static_fields))
    return env, env.default_params.replace(
        **{name: value for name, value in overrides.items() if name not in static_fields}
    )


@dataclasses.dataclass(frozen=True)
class _Specs:
    """Spaces and time limit of an environment."""

    observation_space: Box
    action_space: Discrete
    max_episode_steps: int


@functools.cache
def _specs(single: CraftaxEnvironment) -> _Specs:
    env, params = _env_and_params(single)
    with jax.ensure_compile_time_eval():
        shape = tuple(env.observation_space(params).shape)
        actions = int(env.action_space(params).n)
    return _Specs(Box(0.0, 1.0, shape), Discrete(actions), int(params.max_timesteps))
