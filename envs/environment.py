"""The one interface of environments, and `vectorize`, which makes a batched one from a single instance.

Letters in shapes: `B` environments, `A` agents. Shapes with `A` are those of environments of several agents,
whose `num_agents` is a number; in all others (`num_agents` None, or not there) that axis is missing.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from envs import composite, foreign
from envs.checking import check_spec, unpacked_reset, unpacked_step
from envs.composite import Dict, ObservationSpace, Tuple
from envs.joined import Joined
from envs.observations import MaskedObservation, Observation, features_and_mask
from envs.spaces import Box, Discrete, MultiDiscrete, Space
from envs.unlike import Alike
from fdg.arguments import check_arguments, checked_names
from fdg.errors import FdgError, NotIterableError, kind_of, listed
from fdg.tracing.unchanged import unchanged

State: TypeAlias = Any


class TimeStep(NamedTuple):
    """What one step of a batch of environments gives; every field has the leading axis `B`.

    An episode begins and ends for all agents of an environment together.

    Attributes:
      observation: `[B, (A,) *observation_space.shape]`, what the actor sees next: where an episode has just
        ended, the first observation of the new one.
      reward: `[B, (A)] float32`.
      terminated: `[B] bool`, a terminal state was reached, whose value is 0.
      truncated: `[B] bool`, cut off by a time limit, so bootstrap from `final_observation`; never true where
        `terminated` is.
      final_observation: `[B, (A,) *observation_space.shape]`, the observation before the auto-reset; equals
        `observation` where the episode continues.
      episode_return: `[B] float32`, undiscounted return of the episode that ended here, the mean over agents,
        else 0; around a wrapper that changes rewards, of the environment inside.
      episode_length: `[B] int32`, steps in the episode that ended here, else 0.
      episode_info: `[B] float32` each, of the episode that ended here what else was requested by name
        (`info`), else 0; not-a-number where nothing is known.
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
    """What every environment says of itself, of one instance or batched; it allocates nothing to say it."""

    @property
    def name(self) -> str:
        """Name in messages and logs, and that `envs.make` knows it by, if it does."""

    @property
    def observation_space(self) -> ObservationSpace:
        """Space of one observation (of one agent, without `B`)."""

    @property
    def action_space(self) -> Space:
        """Space of one action (of one agent, without `B`)."""

    @property
    def max_episode_steps(self) -> int | None:
        """Steps after which an episode is truncated; `None` where there is no limit."""


class Environment(EnvironmentSpec, Protocol):
    """A batch of environments that reset themselves; what algorithms use.

    A frozen, hashable value: it holds no arrays, and its methods are pure, so that they trace under `jit`
    and `scan`. Every element of the batch draws from its own key and from nothing else: splitting the
    batch over devices changes no number. Actions are not clipped to their space.
    """

    @property
    def num_agents(self) -> int | None:
        """Agents that act in one environment at the same time; `None` where there is one, without an axis.

        Ask with `envs.num_agents(env)`: an environment that knows of no agents need not have it.
        """

    def reset(self, keys: jax.Array) -> tuple[State, Observation]:
        """Start one episode a key.

        Args:
          keys: `[B]` typed PRNG keys, as of `jax.random.split(jax.random.key(0), B)`.

        Returns:
          `(state, observation [B, (A,) *observation_space.shape])`, the observation a `MaskedObservation`
          where not every action is always allowed; every leaf of `state` has the leading axis `B`.
        """

    def step(self, keys: jax.Array, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        """Take one step in every environment; where an episode ends, start the next.

        Args:
          keys: `[B]` typed PRNG keys, new ones at every step.
          state: of `reset` or of the step before.
          action: `[B, (A,) *action_space.shape]`.
        """


class SingleEnvironment(EnvironmentSpec, Protocol):
    """One instance that does not reset itself; what a user writes, and `vectorize` takes.

    A value that hashes (a frozen dataclass, say) and pure methods. The observation has the shape of its
    space and is cast to the dtype of its space, and may come in a `MaskedObservation`; the reward and the two
    flags are scalars of any numeric dtype. The state is any pytree whose structure, shapes and dtypes `step`
    keeps. `vectorize` enforces its `max_episode_steps` as truncation.

    One of several agents has an attribute `num_agents`. Its spaces are those of one agent, the same for all;
    observations, actions and rewards have a leading axis `A`; the two flags stay scalars. Where agents are
    not alike, both spaces are an `envs.Tuple` of one for each, and observations and actions are tuples:
    `envs.Alike`. Of one agent, an `action_space` that is an `envs.Dict` or `envs.Tuple` (all categories, or
    all floats) is joined for algorithms, and `step` gets its parts.
    """

    def reset(self, key: jax.Array) -> tuple[State, Observation]:
        """Start an episode: `(state, observation)`."""

    def step(
        self, key: jax.Array, state: State, action: jax.Array
    ) -> tuple[State, Observation, jax.Array, jax.Array, jax.Array]:
        """Take one step: `(state, observation, reward, terminated, truncated)`.

        A dictionary of scalars may come sixth: `vectorize(single, info=("is_success",))` reports what it says
        by that name at the end of each episode.
        """


class EpisodeState(NamedTuple):
    """State of a vectorized environment; every leaf has the leading axis `B`."""

    inner: State  # of the single environment
    running_return: jax.Array  # [B] float32: undiscounted return of the episode so far, mean over agents
    running_length: jax.Array  # [B] int32: steps of the episode so far
    start: tuple[State, Observation] | None = None  # where all its episodes start, if they all start there


class Whole:
    """An environment that is one value, where other libraries give it and its parameters."""

    name: Any

    def __iter__(self) -> NoReturn:
        raise NotIterableError(
            f"environment '{self.name}' is one value, and no pair of it and its parameters: write env ="
            " envs.make(...); parameters are arguments, envs.make(name, gravity=9.8)"
        )


@dataclasses.dataclass(frozen=True)
class Vectorized(Whole):
    """A batch of one `SingleEnvironment`; see `vectorize`."""

    single: Any  # a SingleEnvironment, whose hash and equality this value takes on
    repeat_start: bool = False  # every episode of an environment starts where its first one did
    info: tuple[str, ...] = ()  # names of what is reported of each episode, of what `step` gives sixth

    @property
    def name(self) -> str:
        """Name of the single environment."""
        return self.single.name

    @property
    def num_agents(self) -> int | None:
        """Agents of the single environment; `None` where it knows of no agents."""
        return num_agents(self.single)

    @property
    def observation_space(self) -> ObservationSpace:
        """Space of one observation."""
        return self.single.observation_space

    @property
    def action_space(self) -> Space:
        """Space of one action."""
        return self.single.action_space

    @property
    def max_episode_steps(self) -> int | None:
        """Steps after which an episode is truncated."""
        return self.single.max_episode_steps

    @checked_names
    def reset(self, keys: jax.Array) -> tuple[EpisodeState, Observation]:
        """Start one episode a key; see `Environment.reset`."""
        check_keys(self.name, keys)
        return jax.vmap(self._reset_one)(keys)

    @checked_names
    def step(self, keys: jax.Array, state: EpisodeState, action: jax.Array) -> tuple[EpisodeState, TimeStep]:
        """Take one step in every environment; see `Environment.step`."""
        check_keys(self.name, keys)
        check_state(self.name, state)
        expected = keys.shape + self._agents + self.action_space.shape
        if jnp.shape(action) != expected:
            raise FdgError(
                f"environment '{self.name}': action has shape {jnp.shape(action)}, expected {expected}"
            )
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
        action = jnp.asarray(action, self.action_space.dtype)
        with unchanged(self.single, f"environment '{self.name}': step", warns=False):
            result = self.single.step(step_key, state.inner, action)
        inner, final_observation, reward, terminated, truncated, info = unpacked_step(self.name, result)
        inner = jax.tree.map(_strong, inner)
        final_observation = self._observation(final_observation, "step")
        reward = self._number(reward, "reward", jnp.float32, self._agents)
        terminated = self._number(terminated, "terminated", jnp.bool_)
        truncated = self._number(truncated, "truncated", jnp.bool_)

        episode_return = state.running_return + jnp.mean(reward)
        episode_length = state.running_length + 1
        if self.max_episode_steps is not None:
            truncated |= episode_length >= self.max_episode_steps
        # A terminal state needs no bootstrap, whatever the clock says: termination wins.
        truncated &= ~terminated
        done = terminated | truncated

        first, first_observation = self._start(reset_key) if state.start is None else state.start
        _check_same_types(self.name, first, inner)

        def begun_anew(new, old):
            return jax.tree.map(lambda new, old: jnp.where(done, new, old), new, old)

        next_state = EpisodeState(
            begun_anew(first, inner),
            jnp.where(done, 0, episode_return),
            jnp.where(done, 0, episode_length),
            state.start,
        )
        return next_state, TimeStep(
            observation=begun_anew(first_observation, final_observation),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            final_observation=final_observation,
            episode_return=jnp.where(done, episode_return, 0),
            episode_length=jnp.where(done, episode_length, 0),
            episode_info={name: jnp.where(done, self._reported(name, info), 0) for name in self.info},
        )

    def _start(self, key: jax.Array) -> tuple[State, Observation]:
        """State and observation at the beginning of an episode."""
        with unchanged(self.single, f"environment '{self.name}': reset", warns=False):
            result = self.single.reset(key)
        inner, observation = unpacked_reset(self.name, result)
        return jax.tree.map(_strong, inner), self._observation(observation, "reset")

    def _observation(self, observation: Any, method: str) -> Observation:
        space = self.observation_space
        features, mask = features_and_mask(observation)
        whose = f"environment '{self.name}': {method} gives"
        features = composite.fitting(space, features, self._agents, whose)
        if mask is None:
            return features
        if isinstance(self.action_space, Box) and not getattr(self.single, "masks_components", False):
            raise FdgError(
                f"environment '{self.name}': {method} gives an action_mask, but its action space is"
                f" {self.action_space}; only actions that can be counted can be masked"
            )
        expected = self._agents + _mask_shape(self.action_space)
        if jnp.shape(mask) != expected:
            raise FdgError(
                f"environment '{self.name}': {method} gives an action_mask of shape {jnp.shape(mask)},"
                f" but for {self.action_space} it is {expected}"
            )
        return MaskedObservation(features, jnp.asarray(mask, jnp.bool_))

    def _reported(self, name: str, info: Mapping[str, Any]) -> jax.Array:
        if name not in info:
            there = f"it gives {listed(info, 'and')}" if info else "return a dictionary with it, sixth"
            raise FdgError(f"environment '{self.name}': step gives no '{name}', which info names: {there}")
        return self._number(info[name], f"info['{name}']", jnp.float32)

    def _number(self, value: Any, what: str, dtype: Any, shape: tuple[int, ...] = ()) -> jax.Array:
        if jnp.shape(value) != shape:
            expected = f"{shape}, one an agent" if shape else "a scalar"
            raise FdgError(
                f"environment '{self.name}': step gives {what} of shape {jnp.shape(value)}, expected"
                f" {expected}: write step for one environment, without a batch axis"
            )
        return jnp.asarray(value, dtype)

    @property
    def _agents(self) -> tuple[int, ...]:
        """The axis of agents, in front of what each of them has: `(A,)`, or none."""
        return () if self.num_agents is None else (self.num_agents,)


def vectorize(single: Any, repeat_start: bool = False, info: tuple[str, ...] = ()) -> Vectorized:
    """Make a batched `Environment` from a `SingleEnvironment`.

    Adds what every environment needs: the batch, auto-reset, the return and length of finished episodes,
    and truncation after `single.max_episode_steps` where the environment does not truncate itself.

    Args:
      single: a `SingleEnvironment`; or an environment that is written for gymnax, brax, MuJoCo Playground or
        Jumanji.
      repeat_start: start every episode of an environment in the state that its first one started in. All
        environments of a batch step together, so one that may end at any step computes a reset at every
        step; where that is expensive (physics), this saves it. It costs memory, one more state an
        environment, and variety: there are as many starts as environments.
      info: names of what metrics and evaluations report of each episode: `single.step` gives a dictionary of
        scalars sixth, and what that says by these names at the episode's last step counts.

    Returns:
      A frozen value, equal to another where the two singles are equal. Its `reset` and `step` raise
      `FdgError` where the single one's results do not fit its spaces, or its state changes type.

    Raises:
      FdgError: `single` is no environment: `envs.check_spec`.

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
        raise FdgError(f"environment '{single.name}' is a batch already: leave out envs.vectorize")
    # Of the sources of this package the spaces are not asked for here: that may load a library.
    of_a_source = type(single).__module__.partition(".")[0] == __name__.partition(".")[0]
    single = foreign.single(single)
    check_spec(single, single=True)
    if not of_a_source and isinstance(space := single.action_space, Dict | Tuple):
        is_team = isinstance(space, Tuple) and num_agents(single) is not None
        single = Alike(single) if is_team else Joined(single)
    return Vectorized(single, repeat_start, named_info(info))


def named_info(info: Any) -> tuple[str, ...]:
    """Names of what is reported of episodes: one, or several.

    Raises:
      FdgError: it is something else.

    >>> named_info("is_success"), named_info(["a", "b"])
    (('is_success',), ('a', 'b'))
    """
    names = (info,) if isinstance(info, str) else info
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) and name for name in names):
        raise FdgError(f"info={info!r:.60}: give names of what step reports, such as ('is_success',)")
    return tuple(dict.fromkeys(names))


def num_agents(env: Any) -> int | None:
    """How many agents act in an environment; `None` for an ordinary one, whose arrays have no such axis.

    >>> from envs.probe import Value
    >>> print(num_agents(vectorize(Value())))
    None
    """
    return getattr(env, "num_agents", None)


def _mask_shape(action_space: Space) -> tuple[int]:
    match action_space:
        case Discrete(n=n):
            return (n,)
        case MultiDiscrete(nvec=nvec):
            return (sum(nvec),)
    return (math.prod(action_space.shape),)  # which of its components an agent has


def _is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def check_keys(name: str, keys: jax.Array) -> None:
    """Raises an `FdgError` unless `keys` is one typed PRNG key an environment, `[B]`."""
    if not hasattr(keys, "dtype") or not _is_key(keys) or keys.ndim != 1:
        got = f"{keys.dtype}{list(keys.shape)}" if hasattr(keys, "dtype") else repr(keys)
        raise FdgError(
            f"environment '{name}': keys must be one typed PRNG key per environment, shape [B], but are"
            f" {got}; use jax.random.split(jax.random.key(seed), B)"
        )


def check_state(name: str, state: Any) -> None:
    """Raises an `FdgError` unless `state` is of a batch of episodes, perhaps of a wrapper."""
    if not hasattr(state, "inner"):
        raise FdgError(
            f"environment '{name}': step takes the state, and this is a value of type {kind_of(state)}: reset"
            " gives (state, observation), in that order, and step (state, step)"
        )


def _strong(x: Any) -> jax.Array:
    """`x` as an array without weak type, which a `scan` would otherwise see change from step to step."""
    x = jnp.asarray(x)
    return x if _is_key(x) else jax.lax.convert_element_type(x, x.dtype)


def _check_same_types(name: str, reset_state: State, step_state: State) -> None:
    """Raise where `step` gives a state of another structure, shape or dtype than `reset`.

    Not cast: a state that starts at the integer 0 and steps by floats would silently stand still.
    """
    before = _leaf_types(reset_state)
    after = _leaf_types(step_state)
    if before.keys() != after.keys():
        only = sorted(before.keys() ^ after.keys())
        raise FdgError(
            f"environment '{name}': reset and step give states of two structures; only in one: {only}"
        )
    for path in before:
        if before[path] != after[path]:
            raise FdgError(
                f"environment '{name}': reset gives state{path} as {before[path]}, but step as {after[path]};"
                " start from the type that step keeps"
            )


def _leaf_types(state: State) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}
