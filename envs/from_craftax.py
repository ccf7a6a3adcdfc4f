"""Craftax 1.6 (Matthews et al. 2024, arXiv 2402.16801).

`Craftax-Symbolic-v1`, `Craftax-Classic-Symbolic-v1`, and both as images (`Pixels`). Differences from Craftax:

- Craftax only has `done`: here death or victory is a termination, and its `max_timesteps` a truncation.
- Generating a world takes many times as long as a step. As with the `OptimisticResetVecEnvWrapper` of its
baselines, 16 environments share one new world per step (`reset_ratio`; see `envs/optimistic.py`).
- Making an environment allocates nothing: the package's arrays are host literals.
- Textures are made only in the requested size. Craftax makes three sizes, the largest for people (64 pixels
per block), and compresses all into a file, which takes many minutes; the agent's size takes seconds.

Keys are split as in Craftax (step, then reset). So for equal keys, results equal those of Craftax's `step`,
unless two environments that share a world end at the same step.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs.adapters import Overrides, check_count, checked_overrides, importing
from envs.environment import Vectorized
from envs.lazy_plotting import without_plotting
from envs.library import Facts, LibraryEnvironment
from envs.literals import literals, replace_module_arrays
from envs.optimistic import OptimisticallyReset
from envs.quiet import quietly, relaxed_checks
from envs.spaces import Box, Discrete

# Name: whether it is Classic, and whether observations are images.
NAMES = {
    "Craftax-Symbolic-v1": (False, False),
    "Craftax-Pixels-v1": (False, True),
    "Craftax-Classic-Symbolic-v1": (True, False),
    "Craftax-Classic-Pixels-v1": (True, True),
}
RESET_RATIO = 16  # default number of environments that share a new world
_NO_LIMIT = 2**30  # steps


@dataclasses.dataclass(frozen=True)
class CraftaxEnvironment(LibraryEnvironment):
    """A `SingleEnvironment` of Craftax: its name and overrides.

    Overrides are fields of its `EnvParams` and `StaticEnvParams`.
    """

    name: str
    overrides: Overrides = ()

    @property
    def facts(self) -> Facts:
        """Its properties, from Craftax's spaces and parameters."""
        return _facts(self)

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """Generates a world."""
        env, params = _environment_and_parameters(self)
        with relaxed_checks():
            observation, state = env.reset_env(key, params)
        return state, observation

    def step(
        self, key: jax.Array, state: Any, action: jax.Array
    ) -> tuple[Any, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Takes one step, without reset."""
        env, params = _environment_and_parameters(self)
        with relaxed_checks():
            # Without Craftax's time limit, `done` is death or victory; `vectorize` applies the limit.
            observation, state, reward, done, _ = env.step_env(
                key, state, action, params.replace(max_timesteps=_NO_LIMIT)
            )
        return state, observation, reward, done, jnp.bool_(False)

    def frames(self, states: Sequence[Any]) -> Any:
        """Images of states, `[H, W, 3]` uint8 each, by Craftax's renderer."""
        classic, _ = NAMES[self.name]
        constants, renderer = _drawing_modules(classic)
        with relaxed_checks():
            draw = jax.jit(renderer.make_craftax_pixel_renderer(constants.BLOCK_PIXEL_SIZE_IMG))
            for state in states:
                yield np.clip(np.asarray(draw(state)), 0, 255).astype(np.uint8)


def factories() -> dict[str, Callable[..., Vectorized]]:
    """Factories by name, for the registry."""
    return {name: functools.partial(_make, name) for name in NAMES}


def _make(name: str, *, reset_ratio: int = RESET_RATIO, **overrides: Any) -> Vectorized:
    """Makes the environment `name`, in which `reset_ratio` instances share one new world per step."""

    def defaults_of() -> dict[str, Any]:
        env = _craftax_environment(name)
        return {**_defaults(env.default_params), **_defaults(env.default_static_params())}

    where = f"environment '{name}'"
    checked = checked_overrides(where, overrides, defaults_of, ("reset_ratio",), converts=True)
    check_count(where, "max_timesteps", overrides.get("max_timesteps", 1))
    return OptimisticallyReset(CraftaxEnvironment(name, checked), reset_ratio=reset_ratio)


def _defaults(params: Any) -> dict[str, Any]:
    """Default values of parameters by name, without those that contain None."""
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return {k: v for k, v in values.items() if v is not None and not (isinstance(v, tuple) and None in v)}


def _module_prefix(classic: bool) -> str:
    return "craftax.craftax_classic" if classic else "craftax.craftax"


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
def _drawing_modules(classic: bool) -> tuple[Any, Any]:
    """Craftax's modules `constants` and `renderer`, changed to draw with `_Textures`."""
    constants, renderer = (
        importlib.import_module(f"{_module_prefix(classic)}.{module}") for module in ("constants", "renderer")
    )
    textures = _Textures(constants.load_all_textures_given_size)
    for module in (constants, renderer):
        vars(module)["load_all_textures"] = lambda: textures
    return constants, renderer


@functools.cache
def _craftax_environment(name: str, static_overrides: Overrides = ()) -> Any:
    """Craftax's environment without auto-reset; imports Craftax, also while JAX traces."""
    classic, pixels = NAMES[name]
    kind = "Pixels" if pixels else "Symbolic"
    with importing(f"environment '{name}' needs", "Craftax", "craftax"), without_plotting():
        module = importlib.import_module(f"{_module_prefix(classic)}.envs.craftax_{kind.lower()}_env")
        replace_module_arrays("craftax")
        if pixels:
            _drawing_modules(classic)
    env_class = getattr(module, f"Craftax{'Classic' if classic else ''}{kind}EnvNoAutoReset")
    with jax.ensure_compile_time_eval():
        params = env_class.default_static_params().replace(**dict(static_overrides))
        return env_class(params)


def _environment_and_parameters(single: CraftaxEnvironment) -> tuple[Any, Any]:
    """Craftax's environment and its parameters."""
    overrides = dict(single.overrides)
    static = _defaults(_craftax_environment(single.name).default_static_params())
    env = _craftax_environment(single.name, tuple(item for item in single.overrides if item[0] in static))
    return env, env.default_params.replace(
        **{name: value for name, value in overrides.items() if name not in static}
    )


@functools.cache
def _facts(single: CraftaxEnvironment) -> Facts:
    """As `CraftaxEnvironment.facts`; computed once."""
    env, params = _environment_and_parameters(single)
    with jax.ensure_compile_time_eval():
        shape = tuple(env.observation_space(params).shape)
        actions = int(env.action_space(params).n)
    return Facts(Box(0.0, 1.0, shape), Discrete(actions), int(params.max_timesteps))
