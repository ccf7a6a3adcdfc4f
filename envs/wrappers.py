"""Wrappers: frame stack, action repeat, hidden parts, time-aware observations, and your own.

A wrapper contains a batched `envs.Environment` of any source, and is itself an `envs.Environment`. Your own
is a subclass of `Wrapper`.

Shapes: `B` environments, `A` agents, `K` frames.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs import composite
from envs.adapters import check_count
from envs.checking import check_observation, check_wrapped
from envs.composite import Dict, ObservationSpace, Tuple
from envs.environment import EnvironmentBase, State, TimeStep
from envs.native import Native, leaves
from envs.observations import MaskedObservation, Observation, features_and_mask
from envs.spaces import Box, Discrete, MultiDiscrete, Space, bound
from fdg.arguments import check_options, check_takes
from fdg.errors import FdgError, kind_of, listed
from fdg.kinds import as_python, make_fields_python


class WrapperState(NamedTuple):
    """State of a wrapper that has `after`; every leaf has the leading axis `B`."""

    env_state: State  # of the environment inside
    kept: Any  # the results of `begin` and `after`

    @property
    def inner(self) -> State:
        """The state of the single environment, as in `EpisodeState`."""
        return self.env_state.inner

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"WrapperState has no attribute '{name}': the inner environment's state is state.env_state. If"
            " your wrapper has `after` and its own step, call super().step(keys, state, action) there, not"
            " self.env.step"
        )


@dataclasses.dataclass(frozen=True)
class Wrapper(EnvironmentBase):
    """An environment with changed observations. The base class changes nothing.

    A subclass is a frozen dataclass with `observation_space`, `begin` and `after`: pure functions of a batch,
    in which each row depends only on itself. They get and return observations without masks: arrays or parts
    `[B, (A,) *shape]`. Masks stay unchanged. Without `after`, the wrapper has no state, and `begin` maps each
    observation.

    A wrapper that changes rewards, actions or ends of episodes overrides `step` and calls
    `super().step(keys, state, action)` (without `after`, `self.env.step` works too). `episode_return` and
    `episode_length` stay those of the inner environment.

    >>> class Clipped(Wrapper):
    ...     def step(self, keys, state, action):
    ...         state, step = super().step(keys, state, action)
    ...         return state, step._replace(reward=jnp.clip(step.reward, -1.0, 1.0))
    """

    _forwards_to: ClassVar[str] = "env"

    env: Any  # an envs.Environment

    def __post_init__(self) -> None:
        check_wrapped(self)
        make_fields_python(self)
        if getattr(self.env, "acts", False):
            raise FdgError(
                f"acts=True does not work with the wrapper {type(self).__name__}: leave out one of them"
            )
        for method, takes in (("begin", ("observation",)), ("after", ("kept", "observation"))):
            check_takes(getattr(self, method), takes, f"{method} of wrapper {type(self).__name__}")

    def begin(self, observation: Any) -> tuple[Any, Any]:
        """The state to keep (`[B, ...]` leaves) and the output, for the first observation of episodes."""
        return (), observation

    def after(self, kept: Any, observation: Any) -> tuple[Any, Any]:
        """The new state and the output, for the observation after a step."""
        return self.begin(observation)

    @property
    def info(self) -> tuple[str, ...]:
        """Names of episode metrics."""
        return getattr(self.env, "info", ())

    @property
    def single(self) -> Any:
        """The single environment inside, if there is one: it renders states."""
        return self.env.single

    @property
    def native(self) -> Native:
        """The library's observations and actions; this wrapper is part of `apply_wrappers`.

        Raises:
          AttributeError: the environment inside is a JAX environment, or this wrapper changes a space by
            other methods than `begin` and `after`; `envs.native.native` then uses the wrapper's spaces.
        """
        inside: Native = self.env.native
        if self.action_space != self.env.action_space or (
            type(self).reset is not Wrapper.reset and self.observation_space != self.env.observation_space
        ):
            raise AttributeError(f"environment '{self.name}' does not have the spaces of its library")

        def apply_wrappers(memory: Any, start: jax.Array, observation: Any) -> tuple[Any, Any]:
            inner_state, state = memory
            inner_state, observation = inside.apply_wrappers(inner_state, start, observation)
            at_start = _apply_to_features(self.begin, observation)
            state, output = _select(
                start, at_start, _apply_to_features(lambda x: self.after(state, x), observation)
            )
            return (inner_state, state), output

        def initial_memory(count: int) -> Any:
            arrays = [
                jax.ShapeDtypeStruct((count, *leaf["shape"][1:]), leaf["jax_dtype"])
                for _, leaf in leaves(inside.observation)
            ]
            start, before = jax.ShapeDtypeStruct((count,), jnp.bool_), inside.initial_memory(count)

            def first(start: jax.Array, before: Any, *arrays: jax.Array) -> Any:
                _, observation = inside.apply_wrappers(before, start, inside.encode(arrays, None))
                return _apply_to_features(self.begin, observation)[0]

            shapes = jax.eval_shape(first, start, before, *arrays)
            return before, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        return inside._replace(apply_wrappers=apply_wrappers, initial_memory=initial_memory)

    @property
    def _has_state(self) -> bool:
        return type(self).after is not Wrapper.after

    def reset(self, keys: jax.Array) -> tuple[State, Observation]:
        """Starts an episode for each key; see `Environment.reset`."""
        state, observation = self.env.reset(keys)
        kept, output = _apply_to_features(self.begin, observation)
        check_observation(self, "begin", output, len(keys))
        return WrapperState(state, kept) if self._has_state else state, output

    def step(self, keys: jax.Array, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        """Takes one step in every environment; see `Environment.step`."""
        env_state, kept = state if self._has_state else (state, ())
        return self._after(kept, *self.env.step(keys, env_state, action))

    @property
    def send(self) -> Callable[..., Any]:
        """The first half of `step` (`envs.rings`); absent if `step` is overridden."""
        if type(self).step is not Wrapper.step or not hasattr(self.env, "send"):
            raise AttributeError(f"environment '{self.name}' has no send and recv")

        def send(keys: jax.Array, state: State, action: jax.Array) -> Any:
            env_state, kept = state if self._has_state else (state, ())
            return self.env.send(keys, env_state, action), kept

        return send

    def recv(self, sent: Any) -> tuple[State, TimeStep]:
        """Waits for the step that `send` started; `sent` is what `send` returned."""
        return self._after(sent[1], *self.env.recv(sent[0]))

    @property
    def ready(self) -> Callable[..., jax.Array]:
        """Waits for one of several sent steps; absent without `send`."""
        return self.send is not None and (lambda sent, waiting: self.env.ready(sent[0], waiting))

    def _after(self, before: Any, env_state: State, step: TimeStep) -> tuple[State, TimeStep]:
        """The state and output after a step of the inner environment; `before` was kept at the last step."""
        kept, final = _apply_to_features(lambda x: self.after(before, x), step.final_observation)
        kept_at_start, first = _apply_to_features(self.begin, step.observation)
        for method, features in (("after" if self._has_state else "begin", final), ("begin", first)):
            check_observation(self, method, features, len(step.reward))
        kept, output = _select(step.done, (kept_at_start, first), (kept, final))
        step = step._replace(observation=output, final_observation=final)
        return WrapperState(env_state, kept) if self._has_state else env_state, step


@dataclasses.dataclass(frozen=True)
class FrameStack(Wrapper):
    """Stacks the last `frames` observations, oldest first; an episode starts with copies of its first one.

    Stacks along the last axis; images of two axes become channels: `[H, W, C]` becomes `[H, W, frames * C]`,
    `[D]` becomes `[frames * D]`, `[H, W]` becomes `[H, W, frames]`. Each part of a `Dict` or `Tuple` is
    stacked.

    >>> from envs import make
    >>> FrameStack(make("CartPole-v1"), 4).observation_space.shape
    (16,)
    """

    frames: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(f"environment '{self.name}': FrameStack", "frames", self.frames)

    @property
    def observation_space(self) -> ObservationSpace:
        """Space of the stacked frames."""
        return _map_spaces(self._stacked_space, self.env.observation_space)

    def begin(self, observation: Any) -> tuple[Any, Any]:
        """Repeats the first observation."""
        stacked = self._map(lambda new: jnp.concatenate([new] * self.frames, axis=-1), observation)
        return stacked, stacked

    def after(self, kept: Any, observation: Any) -> tuple[Any, Any]:
        """Drops the oldest observation, and appends the new one."""

        def shift(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.concatenate([old[..., new.shape[-1] :], new], axis=-1)

        stacked = self._map(shift, observation, kept)
        return stacked, stacked

    def _map(self, function: Callable[..., jax.Array], observation: Any, *others: Any) -> Any:
        """Applies `function` to the arrays of each part; a flat `observation` gets a last axis first."""

        def of_part(part: Space, new: jax.Array, *rest: jax.Array) -> jax.Array:
            return function(new[..., None] if _is_flat(part) else new, *rest)

        return composite.map_parts(of_part, self.env.observation_space, observation, *others)

    def _stacked_space(self, part: Space) -> Space:
        match part:
            case Discrete(n):
                return MultiDiscrete((n,) * self.frames)
            case MultiDiscrete(nvec):
                return MultiDiscrete(nvec * self.frames)
        limits = [x[..., None] if _is_flat(part) else x for x in (part.low_array, part.high_array)]
        low, high = (np.concatenate([x] * self.frames, axis=-1) for x in limits)
        return Box(bound(low), bound(high), low.shape, part.dtype)


@dataclasses.dataclass(frozen=True)
class ActionRepeat(Wrapper):
    """Repeats every action `times` times, or to the end of the episode, and sums the rewards.

    Steps and the time limit count actions. For JAX environments only; host environments have their own
    options (EnvPool's `frame_skip`) or their library's wrappers.
    """

    times: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(f"environment '{self.name}': ActionRepeat", "times", self.times)
        inside = self.env
        while isinstance(inside, Wrapper):
            inside = inside.env
        if hasattr(inside, "source"):
            raise FdgError(
                f"environment '{self.name}': it runs on the host, where ActionRepeat cannot stop when an"
                " episode ends: repeat actions inside it, with an option or a wrapper of its own library"
            )

    @property
    def max_episode_steps(self) -> int | None:
        """Actions after which an episode is truncated."""
        limit = self.env.max_episode_steps
        return None if limit is None else -(-limit // self.times)

    def step(self, keys: jax.Array, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        """Takes up to `times` steps in every environment."""

        def repeat(i: jax.Array, so_far: Any) -> Any:
            before, step = so_far
            new_keys = jax.vmap(lambda key: jax.random.fold_in(key, i))(keys)
            after, new = self.env.step(new_keys, before, action)
            new = new._replace(reward=step.reward + new.reward)
            return _select(step.done, so_far, (after, new))

        state, step = jax.lax.fori_loop(1, self.times, repeat, self.env.step(keys, state, action))
        steps = -(-step.episode_length // self.times)
        return state, step._replace(episode_length=steps)


@dataclasses.dataclass(frozen=True)
class HideObservations(Wrapper):
    """Removes parts of observations: of a `Dict` by name, of a `Tuple` by position.

    From vectors (a `Box` of one axis, a `MultiDiscrete`) it removes components by position. Used to test
    memories and frame stacks.

    >>> from envs import make
    >>> HideObservations(make("CartPole-v1"), (1, 3)).observation_space.shape  # the velocities
    (2,)
    """

    hidden: tuple[str | int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        hidden = self.hidden if isinstance(self.hidden, tuple | list | np.ndarray) else (self.hidden,)
        hidden = as_python(tuple(hidden))
        object.__setattr__(self, "hidden", hidden)
        space, part_names = self.env.observation_space, self._part_names
        kind = f"environment '{self.name}': HideObservations"
        if not part_names:
            raise FdgError(f"{kind}: an observation of {space} has no parts to hide: leave it out")
        if unknown := [name for name in hidden if isinstance(name, bool) or name not in part_names]:
            raise FdgError(
                f"{kind}: there is no part {unknown[0]!r}, but {listed(map(repr, part_names), 'and')}"
            )
        if set(hidden) >= set(part_names):
            raise FdgError(f"{kind}: all parts are hidden: leave one")

    @property
    def observation_space(self) -> ObservationSpace:
        """Space of the remaining parts or components."""
        space = self.env.observation_space
        match space:
            case Dict(privileged=privileged):
                visible = self._visible(dict(space.spaces))
                return Dict(visible, [name for name in privileged if name in visible])
            case Tuple(spaces=parts):
                return Tuple(self._visible(parts))
            case MultiDiscrete(nvec=nvec):
                return MultiDiscrete(self._visible(nvec))
        low, high = (self._visible(end) for end in (space.low_array, space.high_array))
        return Box(bound(low), bound(high), low.shape, space.dtype)

    def begin(self, observation: Any) -> tuple[Any, Any]:
        """The remaining parts."""
        return (), self._visible(observation)

    @property
    def _part_names(self) -> list[Any]:
        space = self.env.observation_space
        match space:
            case Dict(spaces=spaces):
                return [name for name, _ in spaces]
            case Tuple(spaces=parts):
                return [*range(len(parts))]
        return [*range(space.shape[0])] if len(space.shape) == 1 else []

    def _visible(self, parts: Any) -> Any:
        """The remaining parts of a dictionary or tuple, or components of an array's last axis."""
        keys = [key for key in self._part_names if key not in self.hidden]
        if isinstance(parts, dict):
            return {key: parts[key] for key in keys}
        return tuple(parts[key] for key in keys) if isinstance(parts, tuple) else parts[..., np.array(keys)]


@dataclasses.dataclass(frozen=True)
class TimeAware(Wrapper):
    """Adds the elapsed fraction of the time limit, from 0 to 1, to observations.

    With a time limit, a state's value depends on the remaining time (Pardo et al. 2018, arXiv 1712.00378). A
    float32 vector gets a last component, a dictionary a part `time`; any other observation becomes a
    dictionary with the parts `observation` and `time`.

    >>> from envs import make
    >>> TimeAware(make("CartPole-v1")).observation_space.shape
    (5,)
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.env.max_episode_steps is None:
            raise FdgError(
                f"environment '{self.name}' has no time limit for TimeAware: give it max_episode_steps"
            )
        space = self.env.observation_space
        if isinstance(space, Dict) and "time" in dict(space.spaces):
            raise FdgError(
                f"environment '{self.name}': its observation has a part 'time' already: leave TimeAware out,"
                " or rename that part"
            )

    @property
    def observation_space(self) -> ObservationSpace:
        """Space including the time."""
        space = self.env.observation_space
        if self._is_vector:
            low, high = (np.append(end, x) for end, x in ((space.low_array, 0.0), (space.high_array, 1.0)))
            return Box(bound(low), bound(high), low.shape)
        time = {"time": Box(0.0, 1.0, (1,))}
        if isinstance(space, Dict):
            return Dict({**dict(space.spaces), **time}, space.privileged)
        return Dict({"observation": space, **time})

    def begin(self, observation: Any) -> tuple[Any, Any]:
        """The first observation with time 0."""
        steps = jnp.zeros(jax.tree.leaves(observation)[0].shape[0], jnp.int32)
        return steps, self._with_time(steps, observation)

    def after(self, kept: jax.Array, observation: Any) -> tuple[Any, Any]:
        """The next step's time, added to its observation; `kept` is the number of steps so far, `[B]`."""
        return kept + 1, self._with_time(kept + 1, observation)

    def _with_time(self, steps: jax.Array, observation: Any) -> Any:
        agents = () if self.num_agents is None else (self.num_agents,)
        elapsed = steps.astype(jnp.float32) / self.env.max_episode_steps
        shape = (steps.shape[0], *agents, 1)
        time = jnp.broadcast_to(elapsed.reshape(-1, *(1,) * (len(shape) - 1)), shape)
        if self._is_vector:
            return jnp.concatenate([observation, time], axis=-1)
        parts = observation if isinstance(self.env.observation_space, Dict) else {"observation": observation}
        return {**parts, "time": time}

    @property
    def _is_vector(self) -> bool:
        space = self.env.observation_space
        return isinstance(space, Box) and len(space.shape) == 1 and space.dtype == "float32"


# Wrapper parameters of `envs.make`, from the innermost to the outermost: the class, and the field that the
# value sets; None if the value is a flag that adds the wrapper.
_WRAPPERS: dict[str, tuple[type[Wrapper], str | None]] = {
    "action_repeat": (ActionRepeat, "times"),
    "hide_observations": (HideObservations, "hidden"),
    "time_aware": (TimeAware, None),
    "frame_stack": (FrameStack, "frames"),
}
PARAMETERS = tuple(_WRAPPERS)  # of `envs.make` that add a wrapper


def apply_wrappers(env: Any, parameters: Mapping[str, Any]) -> Any:
    """Wraps the environment as `parameters` say; ignores parameters that belong to no wrapper."""
    for name, (cls, field) in _WRAPPERS.items():
        if field is None:
            check_options(f"environment '{env.name}'", {name: False}, parameters)
        if parameters.get(name, False) is not False:
            env = cls(env) if field is None else cls(env, **{field: parameters[name]})
    return env


def unwrapped(env: Any) -> tuple[Any, dict[str, Any]]:
    """The environment inside all wrappers, and the wrappers' parameters, the innermost first.

    >>> from envs import make
    >>> unwrapped(FrameStack(make("CartPole-v1"), 4))[1]
    {'frame_stack': 4}
    """
    for name, (cls, field) in _WRAPPERS.items():
        if type(env) is cls:
            inside, parameters = unwrapped(env.env)
            return inside, {**parameters, name: True if field is None else getattr(env, field)}
    return env, {}


def keeps_rewards(env: Any) -> bool:
    """True if rewards add up to `episode_return`: no wrapper of a user overrides `step`."""
    while isinstance(env, Wrapper):
        if type(env).step.__module__ != __name__:
            return False
        env = env.env
    return True


def _apply_to_features(
    function: Callable[[Any], tuple[Any, Any]], observation: Observation
) -> tuple[Any, Any]:
    """Applies `begin` or `after` to the features of an observation; a mask is unchanged."""
    features, mask = features_and_mask(observation)
    pair = function(features)
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise FdgError(f"begin and after of a wrapper return (state to keep, output), not {kind_of(pair)}")
    kept, output = pair
    return kept, output if mask is None else MaskedObservation(output, mask)


def _select(chosen: jax.Array, new: Any, old: Any) -> Any:
    """Selects between two pytrees of arrays `[B, ...]` by row: `new` where `chosen [B]`, else `old`."""
    return jax.vmap(lambda c, x, y: jax.tree.map(lambda a, b: jnp.where(c, a, b), x, y))(chosen, new, old)


def _map_spaces(function: Callable[[Space], Space], space: ObservationSpace) -> ObservationSpace:
    match space:
        case Dict(spaces=spaces, privileged=privileged):
            return Dict({name: _map_spaces(function, part) for name, part in spaces}, privileged)
        case Tuple(spaces=parts):
            return Tuple(tuple(_map_spaces(function, part) for part in parts))
    return function(space)


def _is_flat(part: Space) -> bool:
    """True if frames need a new last axis: a number, or an image with two axes."""
    if not isinstance(part, Box) or len(part.shape) != 2:
        return not part.shape
    return part.dtype == "uint8" or part.is_image
