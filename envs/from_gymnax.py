"""Every environment registered with gymnax 1.0.1 (github.com/RobertTLange/gymnax).

Differences from gymnax:

- Observations are float32 arrays; discrete observations (FrozenLake's) are one-hot, `[n] float32`.
- All actions, and the observations of users' classes, are converted as Gymnasium's (`gymnasium_spaces`):
images stay uint8.
- gymnax's `step` includes a reset, so this module calls `step_env` and `reset_env`, and `vectorize` resets.
- `terminated` is what `step_env` returns, `truncated` is gymnax's time limit, `max_steps_in_episode`.
- Making an environment allocates nothing, although gymnax allocates arrays on import and in constructors:
gymnax is imported on first use, and its constants are NumPy arrays that become literals of a program.

As in gymnax, MountainCarContinuous keeps its velocity at the left wall, where Gymnasium stops the car (a test
compares the other classic-control dynamics, which agree); MemoryChain's observation lags one step behind its
state; SimpleBandit samples new arms every episode, so no arm is best; CartPole's `total_mass` and
`polemass_length` do not follow overrides of masses and length.

Keys are split as in gymnax (step, then reset), so for equal keys, results equal those of gymnax's `step`.
"""

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs import gymnasium_parts, gymnasium_spaces, gymnax_frames
from envs.adapters import Override, Overrides, check_count, checked_overrides, converting_errors
from envs.composite import ObservationSpace
from envs.environment import Vectorized, vectorize
from envs.lazy_plotting import without_plotting
from envs.library import LibraryEnvironment
from envs.literals import as_arrays, literals, replace_pytree_arrays
from fdg.errors import FdgError

# Copied from gymnax's registry, and compared with it in a test, because importing gymnax starts JAX's
# backend.
NAMES = (
    "CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0",
    "Asterix-MinAtar", "Breakout-MinAtar", "Freeway-MinAtar", "Seaquest-MinAtar", "SpaceInvaders-MinAtar",
    "Catch-bsuite", "DeepSea-bsuite", "MemoryChain-bsuite", "UmbrellaChain-bsuite", "DiscountingChain-bsuite",
    "MNISTBandit-bsuite", "SimpleBandit-bsuite", "FourRooms-misc", "MetaMaze-misc", "PointRobot-misc",
    "BernoulliBandit-misc", "GaussianBandit-misc", "Reacher-misc", "Swimmer-misc", "Pong-misc",
    "FrozenLake-misc",
)  # fmt: skip

DOWNLOADS = ("MNISTBandit-bsuite",)  # these download a data set when first made

# Observations of these exceed gymnax's bounds: MemoryChain's contain a context of -1, those of the other two
# the last reward. Their observation space is unbounded here.
_WRONG_BOUNDS = ("MemoryChain-bsuite", "MetaMaze-misc", "GaussianBandit-misc")


@dataclasses.dataclass(frozen=True)
class GymnaxEnvironment(LibraryEnvironment):
    """A `SingleEnvironment` of gymnax: its registered name and overrides.

    Overrides are fields of the environment's `EnvParams`, or arguments of its constructor.
    """

    name: str
    overrides: Overrides = ()
    instance: Any = None  # the environment itself, if gymnax does not register it

    @property
    def facts(self) -> gymnasium_parts.Facts:
        """Its properties, from gymnax's spaces and parameters."""
        return _facts(self)

    @property
    def observation_space(self) -> ObservationSpace:
        """A `Box`, or parts; no part is taken as an action mask."""
        return self.facts.encoded_space

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """Starts an episode."""
        env, params = _environment_and_parameters(self)
        with jax.numpy_rank_promotion("allow"), as_arrays(env):  # gymnax needs rank promotion
            observation, state = env.reset_env(key, params)
        return state, self._encode(observation)

    def step(
        self, key: jax.Array, state: Any, action: jax.Array
    ) -> tuple[Any, jax.Array, jax.Array, jax.Array, jax.Array]:
        """One step without reset: `(state, observation, reward, terminated, truncated)`."""
        env, params = _environment_and_parameters(self)
        actions = gymnasium_spaces.decode(self.facts.library_action_space, jnp.asarray(action)[None])
        action = gymnasium_spaces.select(actions, 0)
        with jax.numpy_rank_promotion("allow"), as_arrays(env):
            observation, new, reward, terminated, _ = env.step_env(key, state, action, params)
            if self.instance is None:  # with 64 bits, some resets make wider numbers than steps
                new = jax.tree.map(lambda x, old: jnp.asarray(x, jnp.result_type(old)), new, state)
            truncated = env.is_truncated(new, params)
        return new, self._encode(observation), reward, terminated, truncated

    def frames(self, states: Sequence[Any]) -> Any:
        """Images of states, `[H, W, 3]` uint8 each, by gymnax's renderer; None if it has none."""
        env, params = _environment_and_parameters(self)
        with jax.numpy_rank_promotion("allow"), as_arrays(env):
            return gymnax_frames.frames(self.name, env, params, states)

    def _encode(self, observation: Any) -> Any:
        """An observation, `[...]` or with parts, in `observation_space`."""
        batch = jax.tree.map(lambda x: jnp.asarray(x)[None], observation)
        encoded = gymnasium_parts.encode_observation(self.facts.library_observation_space, batch)
        return jax.tree.map(lambda x: x[0], encoded)


def factories() -> dict[str, Callable[..., Vectorized]]:
    """Factories by name, for the registry."""
    return {name: functools.partial(_make, name) for name in NAMES}


def adapt(env: Any, **parameters: Any) -> GymnaxEnvironment:
    """Wraps a user's gymnax `Environment`; `parameters` are fields of its `EnvParams`."""
    params, where = env.default_params, f"environment '{env.name}'"
    defaults = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    defaults = {name: () if getattr(value, "ndim", 0) else value for name, value in defaults.items()}
    return GymnaxEnvironment(env.name, _checked_overrides(where, parameters, lambda: defaults), env)


def _make(name: str, **overrides: Any) -> Vectorized:
    """Makes the environment `name`."""
    checked = _checked_overrides(f"environment '{name}'", overrides, lambda: _defaults(name))
    if checked:
        arguments = _constructor_arguments(_registry()[name])
        _check_memory(name, {field: value for field, value in checked if field in arguments})
    return vectorize(GymnaxEnvironment(name, checked))


def _checked_overrides(
    where: str, overrides: dict[str, Any], defaults_of: Callable[[], dict[str, Any]]
) -> Overrides:
    """As `adapters.checked_overrides`; also checks the time limit."""
    # JAX does not mix integers and floats everywhere (BernoulliBandit's limit is a float).
    checked = checked_overrides(where, overrides, defaults_of, converts=True)
    check_count(where, "max_steps_in_episode", overrides.get("max_steps_in_episode", 1))
    return checked


def _defaults(name: str) -> dict[str, Any]:
    """Arguments of an environment's constructor (None), and fields of its `EnvParams` with their defaults.

    A tuple overrides an array, so an array's default is ().
    """
    factory = _registry()[name]
    parameters = {
        field.name: () if field.default is dataclasses.MISSING else field.default  # arrays have a factory
        for field in dataclasses.fields(sys.modules[factory.__module__].EnvParams)
    }
    return {**dict.fromkeys(_constructor_arguments(factory)), **parameters}


def _check_memory(name: str, arguments: dict[str, Override]) -> None:
    """Refuses sizes beyond this machine's memory: XLA ends the process if an allocation fails."""

    def arrays() -> list[jax.Array]:
        return [x for x in vars(_registry()[name](**arguments)).values() if isinstance(x, jax.Array)]

    try:
        size = sum(x.size * x.dtype.itemsize for x in jax.eval_shape(arrays))
    except Exception:  # the constructor fails while traced; `_construct` raises errors about its arguments
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory // 4:  # JAX computes these arrays from others of equal size
        text = ", ".join(f"{argument}={value!r}" for argument, value in arguments.items())
        raise FdgError(
            f"environment '{name}': {text} makes arrays of {size / 1e9:.0f} GB, and this machine has"
            f" {memory / 1e9:.0f} GB: use smaller numbers"
        )


def _constructor_arguments(factory: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a constructor's arguments."""
    parameters = inspect.signature(factory).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(parameter.name for parameter in parameters if parameter.kind in named)


@functools.cache
def _registry() -> dict[str, Callable[..., Any]]:
    """gymnax's factories by name; imports gymnax, also while JAX traces."""
    with jax.ensure_compile_time_eval(), without_plotting():
        from gymnax import registration
        from gymnax.environments.misc import frozen_lake
    # The only array in gymnax's modules: as a literal, it does not stay allocated.
    frozen_lake._DIRECTIONS = literals(frozen_lake._DIRECTIONS)
    return dict(registration._builtins)


@functools.cache
def _facts(single: GymnaxEnvironment) -> gymnasium_parts.Facts:
    """As `GymnaxEnvironment.facts`; computed once."""
    env, params = _environment_and_parameters(single)
    with jax.ensure_compile_time_eval(), as_arrays(env):
        observations, actions = map(
            _gymnasium_space, (env.observation_space(params), env.action_space(params))
        )
        max_episode_steps = int(params.max_steps_in_episode)
    if single.instance is None and type(observations).__name__ == "Box":  # gymnax's Catch declares integers
        is_wrong = single.name in _WRONG_BOUNDS
        low, high = (-np.inf, np.inf) if is_wrong else (observations.low, observations.high)
        observations = type(observations)(low, high, observations.shape, np.float32)
    return gymnasium_parts.facts(single.name, observations, actions, max_episode_steps)


def _gymnasium_space(space: Any) -> Any:
    """Gymnasium's space for one of gymnax's, or of another class with the same attributes."""
    from gymnasium import spaces

    if isinstance(parts := getattr(space, "spaces", None), Mapping):
        return spaces.Dict({name: _gymnasium_space(part) for name, part in parts.items()})
    if parts is not None:
        return spaces.Tuple(map(_gymnasium_space, parts))
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))
    low, high = (np.broadcast_to(np.asarray(limit, float), space.shape) for limit in (space.low, space.high))
    dtype: Any = np.dtype(getattr(space, "dtype", np.float32))
    if dtype.kind in "iu" and not (np.isfinite(low).all() and np.isfinite(high).all()):
        dtype = np.dtype(np.float32)  # NumPy's integers have no infinity
    return spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype)


def _environment_and_parameters(single: GymnaxEnvironment) -> tuple[Any, Any]:
    """The gymnax environment, with its arrays on the host, and its parameters."""
    arguments: tuple[str, ...] = ()
    if (env := single.instance) is None:
        arguments = _constructor_arguments(_registry()[single.name])
        env = _construct(single.name, tuple(item for item in single.overrides if item[0] in arguments))
    params = env.default_params
    values: dict[str, Any] = {field: value for field, value in single.overrides if field not in arguments}
    for field, value in values.items():
        if hasattr(default := getattr(params, field), "ndim") and isinstance(value, tuple):
            values[field] = jnp.asarray(value, jnp.result_type(jnp.asarray(value), default))
    return env, params.replace(**values)


@functools.cache
def _construct(name: str, arguments: Overrides) -> Any:
    """gymnax's environment, with its arrays on the host; equal arguments give the same object."""
    with jax.ensure_compile_time_eval():
        try:
            with converting_errors(f"environment '{name}'", "gymnax", arguments):
                env = _registry()[name](**dict(arguments))
        except OSError as error:  # MNISTBandit downloads its data set
            raise FdgError(
                f"environment '{name}': its data set could not be downloaded ({error}); connect to the"
                " network once, or see gymnax.utils.load_mnist for the files and the folder it expects"
            ) from error
        replace_pytree_arrays(env)
    if name == "MNISTBandit-bsuite":
        # gymnax reads unsigned pixels as int8, which makes bright ones negative.
        env.images = env.images.view(np.uint8)
    return env
