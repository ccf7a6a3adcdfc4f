"""The environment interface, and `vectorize`, which makes a batched environment from a single instance.

Shapes: `B` environments, `A` agents. The axis `A` exists only in multi-agent environments
(`num_agents` is a number).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from envs import composite, foreign
from envs.checking import check_spec, read_attribute, unpack_reset, unpack_step
from envs.composite import Dict, ObservationSpace, Tuple
from envs.joined import Joined
from envs.observations import MaskedObservation, Observation, features_and_mask
from envs.spaces import Box, Discrete, MultiDiscrete, Space
from envs.unlike import Alike
from fdg.arguments import check_arguments, checked_names, quoted
from fdg.errors import Elsewhere, FdgError, NotIterableError, kind_of, listed
from fdg.keys import is_key
from fdg.tracing.unchanged import check_unchanged

State: TypeAlias = Any  # any pytree of arrays


class TimeStep(NamedTuple):
    """The result of one step of a batch of environments; every field has the leading axis `B`.

    In a multi-agent environment, an episode begins and ends for all agents together.

    Attributes:
      observation: `[B, (A,) *observation_space.shape]`, the next input of the actor; after the end of an
        episode, the first observation of the new one.
      reward: `[B, (A)] float32`.
      terminated: `[B] bool`, a terminal state was reached, whose value is 0.
      truncated: `[B] bool`, the episode was cut by a time limit: bootstrap from `final_observation`; False
        where `terminated` is True.
      final_observation: `[B, (A,) *observation_space.shape]`, the observation before the auto-reset; equals
        `observation` while the episode continues.
      episode_return: `[B] float32`, undiscounted return of the episode that ended (mean over agents), else 0;
        a wrapper that changes rewards does not change it.
      episode_length: `[B] int32`, steps of the episode that ended, else 0.
      episode_info: `[B] float32` by name: the requested `info` of the episode that ended, else 0; NaN if
        unknown.
    """

    observation: Observation
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_observation: Observation
    episode_return: jax.Array
    episode_length: jax.Array
    episode_info: dict[str, jax.Array] = {}  # noqa: RUF012

    @property
    def done(self) -> jax.Array:
        """Whether the episode ended at this step, `[B] bool`."""
        return self.terminated | self.truncated


class EnvironmentSpec(Protocol):
    """The attributes of every environment, single or batched. Reading them allocates no array."""

    @property
    def name(self) -> str:
        """Name in messages and logs; also the name for `envs.make`, if it has one."""

    @property
    def observation_space(self) -> ObservationSpace:
        """Space of one observation (of one agent, without `B`)."""

    @property
    def action_space(self) -> Space:
        """Space of one action (of one agent, without `B`)."""

    @property
    def max_episode_steps(self) -> int | None:
        """Steps after which an episode is truncated; `None` for no limit."""


class Environment(EnvironmentSpec, Protocol):
    """A batch of auto-resetting environments; algorithms use this interface.

    A frozen, hashable value without arrays; its methods are pure and can be traced by `jit` and `scan`. Each
    element of the batch depends only on its own key, state and action, so splitting the batch over devices
    changes no number. Actions are not clipped to their space.
    """

    @property
    def num_agents(self) -> int | None:
        """Number of agents that act at the same time; `None` for a single agent, without the axis `A`.

        Use `envs.num_agents(env)`: a single-agent environment need not have this attribute.
        """

    def reset(self, keys: jax.Array) -> tuple[State, Observation]:
        """Starts an episode for each key.

        Args:
          keys: `[B]` typed PRNG keys, such as `jax.random.split(jax.random.key(0), B)`.

        Returns:
          `(state, observation [B, (A,) *observation_space.shape])`; a `MaskedObservation` if some actions may
          be invalid. Every leaf of `state` has the leading axis `B`.
        """

    def step(self, keys: jax.Array, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        """Steps every environment, and resets those whose episode ends; returns `(state, step)`.

        Args:
          keys: `[B]` typed PRNG keys, new ones at every step.
          state: from `reset` or the previous step.
          action: `[B, (A,) *action_space.shape]`.
        """


class SingleEnvironment(EnvironmentSpec, Protocol):
    """A single instance without auto-reset: you write it, and `vectorize` makes a batch of it.

    A hashable value (such as a frozen dataclass) with pure methods. The observation has the shape of its
    space and is cast to its dtype; it may be a `MaskedObservation`. Reward and the two flags are scalars of
    any numeric dtype. The state is any pytree; `step` keeps its structure, shapes and dtypes. `vectorize`
    truncates after `max_episode_steps`.

    A multi-agent environment has an attribute `num_agents`. All agents have the same two spaces;
    observations, actions and rewards have a leading axis `A`; the two flags stay scalars. If agents' spaces
    differ, both spaces are an `envs.Tuple` with one space per agent, and observations and actions are tuples
    (`envs.Alike`). In a single-agent environment, an `action_space` that is an `envs.Dict` or `envs.Tuple`
    (all discrete, or all continuous) is joined into one space for algorithms, and `step` gets the parts.
    """

    def reset(self, key: jax.Array) -> tuple[State, Observation]:
        """Starts an episode: `(state, observation)`."""

    def step(
        self, key: jax.Array, state: State, action: jax.Array
    ) -> tuple[State, Observation, jax.Array, jax.Array, jax.Array]:
        """Takes one step: `(state, observation, reward, terminated, truncated)`.

        A sixth result may be a dictionary of scalars: `vectorize(single, info=("is_success",))` reports its
        entry of that name at the end of each episode.
        """


class EpisodeState(NamedTuple):
    """State of a vectorized environment; every leaf has the leading axis `B`."""

    inner: State  # of the single environment
    running_return: jax.Array  # [B] float32: undiscounted return of the episode so far, mean over agents
    running_length: jax.Array  # [B] int32: steps of the episode so far
    # with `repeat_start`: the first state and observation of every episode; else None
    start: tuple[State, Observation] | None = None


class Forwarding:
    """Base class: agents, spaces and limit are those of the attribute whose name is `_forwards_to`."""

    _forwards_to: ClassVar[str]

    @property
    def num_agents(self) -> int | None:
        """Number of agents that act at the same time; `None` for a single agent, without an axis."""
        return num_agents(getattr(self, self._forwards_to))

    @property
    def observation_space(self) -> ObservationSpace:
        """Space of one observation."""
        return getattr(self, self._forwards_to).observation_space

    @property
    def action_space(self) -> Space:
        """Space of one action."""
        return getattr(self, self._forwards_to).action_space

    @property
    def max_episode_steps(self) -> int | None:
        """Steps after which an episode is truncated."""
        return getattr(self, self._forwards_to).max_episode_steps


class EnvironmentBase(Forwarding):
    """Base class of environments.

    Reading an attribute that only other libraries' environments have raises an error that names ours.
    """

    with_reward = Elsewhere("a subclass of envs.Wrapper whose step changes rewards (docs/how-to/wrappers.md)")
    unwrapped = Elsewhere("env.single of a JAX environment, or env.env of a wrapper")
    sample_action = Elsewhere("env.action_space.sample(key)")
    spec = Elsewhere("env.name, env.max_episode_steps, env.observation_space and env.action_space")
    default_params = Elsewhere("envs.make(name, gravity=9.8): parameters are arguments")

    @property
    def name(self) -> str:
        """Name in messages and logs."""
        return getattr(self, self._forwards_to).name

    def __iter__(self) -> NoReturn:
        raise NotIterableError(
            f"environment '{self.name}' does not unpack into environment and parameters: write env ="
            " envs.make(...); parameters are arguments, envs.make(name, gravity=9.8)"
        )


@dataclasses.dataclass(frozen=True)
class Vectorized(EnvironmentBase):
    """A batch of one `SingleEnvironment`; see `vectorize`."""

    _forwards_to: ClassVar[str] = "single"

    single: Any  # a SingleEnvironment
    repeat_start: bool = False  # every episode of an environment starts in its first start state
    info: tuple[str, ...] = ()  # names of episode metrics, in the sixth result of `step`

    @checked_names
    def reset(self, keys: jax.Array) -> tuple[EpisodeState, Observation]:
        """Starts an episode for each key; see `Environment.reset`."""
        check_keys(self.name, keys)
        return jax.vmap(self._reset_one)(keys)

    @checked_names
    def step(self, keys: jax.Array, state: EpisodeState, action: jax.Array) -> tuple[EpisodeState, TimeStep]:
        """Steps every environment; see `Environment.step`."""
        check_keys(self.name, keys)
        check_state(self.name, state, len(keys))
        action = actions(self.name, action, self.action_space, keys.shape + self._agents_axis)
        return jax.vmap(self._step_one)(keys, state, action)

    def _reset_one(self, key: jax.Array) -> tuple[EpisodeState, Observation]:
        inner, observation = start = self._start(key)
        return EpisodeState(
            inner, jnp.float32(0), jnp.int32(0), start if self.repeat_start else None
        ), observation

    def _step_one(
        self, key: jax.Array, state: EpisodeState, action: jax.Array
    ) -> tuple[EpisodeState, TimeStep]:
        step_key, reset_key = jax.random.split(key)
        with check_unchanged(self.single, f"environment '{self.name}': step", warns=False):
            result = self.single.step(step_key, state.inner, action)
        inner, final_observation, reward, terminated, truncated, info = unpack_step(self.name, result)
        inner = jax.tree.map(_strongly_typed, inner)
        final_observation = self._checked_observation(final_observation, "step")
        reward = self._checked_result(reward, "reward", jnp.float32, self._agents_axis)
        terminated = self._checked_result(terminated, "terminated", jnp.bool_)
        truncated = self._checked_result(truncated, "truncated", jnp.bool_)

        episode_return = state.running_return + jnp.mean(reward)
        episode_length = state.running_length + 1
        if self.max_episode_steps is not None:
            truncated |= episode_length >= self.max_episode_steps
        # A terminal state needs no bootstrap, even at the time limit: termination takes precedence.
        truncated &= ~terminated
        done = terminated | truncated

        first_state, first_observation = self._start(reset_key) if state.start is None else state.start
        _check_same_types(self.name, first_state, inner)

        def where_done(new, old):
            return jax.tree.map(lambda new, old: jnp.where(done, new, old), new, old)

        next_state = EpisodeState(
            where_done(first_state, inner),
            jnp.where(done, 0, episode_return),
            jnp.where(done, 0, episode_length),
            state.start,
        )
        return next_state, TimeStep(
            observation=where_done(first_observation, final_observation),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            final_observation=final_observation,
            episode_return=jnp.where(done, episode_return, 0),
            episode_length=jnp.where(done, episode_length, 0),
            episode_info={name: jnp.where(done, self._info_entry(name, info), 0) for name in self.info},
        )

    def _start(self, key: jax.Array) -> tuple[State, Observation]:
        """The state and observation at the start of an episode."""
        with check_unchanged(self.single, f"environment '{self.name}': reset", warns=False):
            result = self.single.reset(key)
        inner, observation = unpack_reset(self.name, result)
        return jax.tree.map(_strongly_typed, inner), self._checked_observation(observation, "reset")

    def _checked_observation(self, observation: Any, method: str) -> Observation:
        """An observation in its space's dtypes, and its mask; raises an `FdgError` if one does not fit."""
        space = self.observation_space
        features, mask = features_and_mask(observation)
        subject = f"environment '{self.name}': {method} gives"
        features = composite.fit_observation(space, features, self._agents_axis, subject)
        if mask is None:
            return features
        if isinstance(self.action_space, Box) and not getattr(self.single, "masks_components", False):
            raise FdgError(
                f"environment '{self.name}': {method} gives an action_mask, but its action space is"
                f" {self.action_space}; only discrete actions can be masked: return no mask, or use Discrete"
            )
        expected = self._agents_axis + _mask_shape(self.action_space)
        if jnp.shape(mask) != expected:
            raise FdgError(
                f"environment '{self.name}': {method} gives an action_mask of shape {jnp.shape(mask)},"
                f" but for {self.action_space} it must be {expected}"
            )
        return MaskedObservation(features, jnp.asarray(mask, jnp.bool_))

    def _info_entry(self, name: str, info: Mapping[str, Any]) -> jax.Array:
        if name not in info:
            problem = (
                f"the sixth result of step has only {listed(info, 'and')}: add it, or correct info"
                if info
                else "step returns none: return a dictionary with it as sixth result"
            )
            raise FdgError(f"environment '{self.name}': info asks for '{name}', but {problem}")
        return self._checked_result(info[name], f"info['{name}']", jnp.float32)

    def _checked_result(self, value: Any, what: str, dtype: Any, shape: tuple[int, ...] = ()) -> jax.Array:
        """A result of the single environment, `[*shape]` of `dtype`; `what` names it in messages."""
        if jnp.shape(value) != shape:
            expected = f"{shape}, one an agent" if shape else "a scalar"
            raise FdgError(
                f"environment '{self.name}': step gives {what} of shape {jnp.shape(value)}, expected"
                f" {expected}: write step for one environment, without a batch axis"
            )
        return jnp.asarray(value, dtype)

    @property
    def _agents_axis(self) -> tuple[int, ...]:
        """The leading axis of agents, `(A,)`, or `()`."""
        return () if self.num_agents is None else (self.num_agents,)


@checked_names
def vectorize(single: Any, repeat_start: bool = False, info: tuple[str, ...] = ()) -> Vectorized:
    """Makes a batched `Environment` from a `SingleEnvironment`.

    Adds the batch axis, auto-reset, returns and lengths of finished episodes, and truncation after
    `single.max_episode_steps`.

    Args:
      single: a `SingleEnvironment`, or an environment written for gymnax, brax, MuJoCo Playground or Jumanji.
      repeat_start: start all episodes of an environment from its first start state. Otherwise every step
        computes a reset for each environment, which is expensive in physics simulators. Costs memory (one
        more state per environment) and variety (as many start states as environments).
      info: names of episode metrics: entries of the dictionary that `single.step` returns as its sixth
        result, read at the last step of each episode.

    Returns:
      A frozen value; equal if the single environments are equal. `reset` and `step` raise `FdgError` if
      results do not fit the spaces, or the state changes its type.

    Raises:
      FdgError: `single` is not an environment (`envs.check_spec`).

    >>> import jax
    >>> from envs.probe import Discount
    >>> env = vectorize(Discount())
    >>> keys = jax.random.split(jax.random.key(0), 2)
    >>> state, observation = env.reset(keys)
    >>> state, step = env.step(keys, state, jax.numpy.zeros(2, "int32"))
    >>> state, step = env.step(keys, state, jax.numpy.zeros(2, "int32"))
    >>> step.terminated.tolist(), step.episode_return.tolist(), step.episode_length.tolist()
    ([True, True], [1.0, 1.0], [2, 2])
    """
    check_arguments(vectorize, {"repeat_start": repeat_start})
    if isinstance(single, Vectorized):
        raise FdgError(f"environment '{single.name}' is already vectorized: leave out envs.vectorize")
    # Only a user's spaces are checked here: reading those of our adapters may import a library.
    is_ours = type(single).__module__.partition(".")[0] == __name__.partition(".")[0]
    single = foreign.as_single_environment(single)
    check_spec(single, single=True)
    return Vectorized(single if is_ours else _with_one_action(single), repeat_start, named_info(info))


def _with_one_action(single: Any) -> Any:
    """A `SingleEnvironment` whose action is one array, if the action has parts; else the same object."""
    if not isinstance(space := read_attribute(single, "action_space"), Dict | Tuple):
        return single
    is_team = isinstance(space, Tuple) and num_agents(single) is not None
    return Alike(single) if is_team else Joined(single)


def named_info(info: Any) -> tuple[str, ...]:
    """The names of episode metrics, from one name or several.

    >>> named_info("is_success"), named_info(["a", "b"])
    (('is_success',), ('a', 'b'))
    """
    names = (info,) if isinstance(info, str) else info
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) and name for name in names):
        raise FdgError(f"info={quoted(info)}: give names of entries of info, such as ('is_success',)")
    return tuple(dict.fromkeys(names))


def num_agents(env: Any) -> int | None:
    """The number of agents in an environment; None for a single agent, without an axis of agents.

    >>> from envs.probe import Value
    >>> print(num_agents(vectorize(Value())))
    None
    """
    return getattr(env, "num_agents", None)


def _mask_shape(action_space: Space) -> tuple[int]:
    """The shape of an action mask, without the axis of agents."""
    match action_space:
        case Discrete(n=n):
            return (n,)
        case MultiDiscrete(nvec=nvec):
            return (sum(nvec),)
    return (math.prod(action_space.shape),)  # a Box: `Alike` masks components


def check_keys(name: str, keys: jax.Array) -> None:
    """Raises an `FdgError` unless `keys` is one typed PRNG key per environment, `[B]`."""
    if not hasattr(keys, "dtype") or not is_key(keys.dtype) or keys.ndim != 1:
        got = f"{keys.dtype}{list(keys.shape)}" if hasattr(keys, "dtype") else repr(keys)
        raise FdgError(
            f"environment '{name}': keys must be one typed PRNG key per environment, shape [B], but are"
            f" {got}; use jax.random.split(jax.random.key(seed), B)"
        )


def check_state(name: str, state: Any, size: int | None = None) -> None:
    """Raises an `FdgError` unless `state` is the state of a batch, of `size` episodes if that is given."""
    if not hasattr(state, "inner"):
        raise FdgError(
            f"environment '{name}': step takes the state, but was given {kind_of(state)}: reset returns"
            " (state, observation), and step returns (state, step)"
        )
    if size is not None and (count := len(jax.tree.leaves(state)[0])) != size:
        raise FdgError(
            f"environment '{name}': step takes a key for each episode, and there are {size} keys for a state"
            f" of {count}: use jax.random.split(key, {count})"
        )


def actions(name: str, action: Any, space: Space, leading: tuple[int, ...]) -> jax.Array:
    """Actions `[*leading, *space.shape]`, cast to the space's dtype; raises an `FdgError` if they do not fit.

    `name` is the environment's, for messages.
    """
    expected, is_discrete = leading + space.shape, jnp.issubdtype(space.dtype, jnp.integer)
    try:
        array = jnp.asarray(action)
    except (TypeError, ValueError):  # not an array
        raise FdgError(
            f"environment '{name}': action is a value of type {kind_of(action)}: give an array of"
            f" {space.dtype}{list(expected)}"
        ) from None
    if array.shape != expected:
        raise FdgError(f"environment '{name}': action has shape {array.shape}, expected {expected}")
    kinds = (jnp.bool_, jnp.integer) if is_discrete else (jnp.bool_, jnp.integer, jnp.floating)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        fix = "choose one by jnp.argmax, or write action.astype(int)" if is_discrete else "give numbers"
        raise FdgError(
            f"environment '{name}': action is {array.dtype}, expected {space.dtype} of {space}: {fix}"
        )
    return array.astype(space.dtype)


def _strongly_typed(x: Any) -> jax.Array:
    """Converts to a strongly typed array: `scan` needs the same type at every step."""
    x = jnp.asarray(x)
    return x if is_key(x.dtype) else jax.lax.convert_element_type(x, x.dtype)


def _check_same_types(name: str, reset_state: State, step_state: State) -> None:
    """Raises unless `reset` and `step` return states of the same structure, shapes and dtypes.

    States are not cast: an integer state that `step` increments by floats would silently stay constant.
    """
    before = _leaf_types(reset_state)
    after = _leaf_types(step_state)
    if before.keys() != after.keys():
        only_reset, only_step = (sorted(a.keys() - b.keys()) for a, b in ((before, after), (after, before)))
        raise FdgError(
            f"environment '{name}': reset and step give states of different structures: only reset's has"
            f" {only_reset}, only step's has {only_step}; return the same structure from both"
        )
    for path in before:
        if before[path] != after[path]:
            raise FdgError(
                f"environment '{name}': reset gives state{path} as {before[path]}, but step as {after[path]};"
                " return the same type from both"
            )


def _leaf_types(state: State) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}
