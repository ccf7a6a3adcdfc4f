"""The one interface of environments, and `vectorize`, which makes a batched one from a single instance.

Letters in shapes: `B` environments.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from envs.spaces import Space
from fdg.errors import FdgError

State: TypeAlias = Any


class TimeStep(NamedTuple):
    """What one step of a batch of environments gives; every field has the leading axis `B`."""

    observation: jax.Array  # [B, *observation_space.shape] what the actor sees next: where an episode has
    # just ended, the first observation of the new one
    reward: jax.Array  # [B] float32
    terminated: jax.Array  # [B] bool: a terminal state was reached, whose value is 0
    truncated: jax.Array  # [B] bool: cut off by a time limit, so bootstrap from `final_observation`; never
    # true where `terminated` is
    final_observation: jax.Array  # [B, *observation_space.shape] the observation before the auto-reset;
    # equals `observation` where the episode goes on
    episode_return: jax.Array  # [B] float32: undiscounted return of the episode that ended here, else 0
    episode_length: jax.Array  # [B] int32: steps in the episode that ended here, else 0

    @property
    def done(self) -> jax.Array:
        """Whether the episode ended at this step, `[B] bool`."""
        return self.terminated | self.truncated


class Environment(Protocol):
    """A batch of environments that reset themselves; what algorithms use.

    A frozen, hashable value: it holds no arrays, and its methods are pure, so that they trace under `jit`
    and `scan`. Every element of the batch draws from its own key and from nothing else: splitting the
    batch over devices changes no number.
    """

    @property
    def name(self) -> str:
        """Name that `envs.make` knows it by."""

    @property
    def observation_space(self) -> Space:
        """Space of one observation (without `B`)."""

    @property
    def action_space(self) -> Space:
        """Space of one action (without `B`). Actions are not clipped to it."""

    @property
    def max_episode_steps(self) -> int | None:
        """Steps after which an episode is truncated; `None` where there is no limit."""

    def reset(self, keys: jax.Array) -> tuple[State, jax.Array]:
        """Start one episode a key.

        Args:
          keys: `[B]` typed PRNG keys, as of `jax.random.split(jax.random.key(0), B)`.

        Returns:
          `(state, observation [B, *observation_space.shape])`; every leaf of `state` has the leading axis
          `B`.
        """

    def step(self, keys: jax.Array, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        """Take one step in every environment; where an episode ends, start the next.

        Args:
          keys: `[B]` typed PRNG keys, new ones at every step.
          state: of `reset` or of the step before.
          action: `[B, *action_space.shape]`.
        """


class SingleEnvironment(Protocol):
    """One instance that does not reset itself; what a user writes, and `vectorize` takes.

    A value that hashes (a frozen dataclass, say) and pure methods. The observation has the shape of its
    space and is cast to the dtype of its space; the reward and the two flags are scalars of any numeric
    dtype. The state is any pytree whose structure, shapes and dtypes `step` keeps.
    """

    @property
    def name(self) -> str:
        """Name in messages and logs."""

    @property
    def observation_space(self) -> Space:
        """Space of the observation."""

    @property
    def action_space(self) -> Space:
        """Space of the action."""

    @property
    def max_episode_steps(self) -> int | None:
        """Time limit that `vectorize` enforces as truncation; `None` for none."""

    def reset(self, key: jax.Array) -> tuple[State, jax.Array]:
        """Start an episode: `(state, observation)`."""

    def step(
        self, key: jax.Array, state: State, action: jax.Array
    ) -> tuple[State, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Take one step: `(state, observation, reward, terminated, truncated)`."""


class EpisodeState(NamedTuple):
    """State of a vectorized environment; every leaf has the leading axis `B`."""

    inner: State  # of the single environment
    running_return: jax.Array  # [B] float32: undiscounted return of the episode so far
    running_length: jax.Array  # [B] int32: steps of the episode so far


@dataclasses.dataclass(frozen=True)
class Vectorized:
    """A batch of one `SingleEnvironment`; see `vectorize`."""

    single: Any  # a SingleEnvironment, whose hash and equality this value takes on

    @property
    def name(self) -> str:
        """Name of the single environment."""
        return self.single.name

    @property
    def observation_space(self) -> Space:
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

    def reset(self, keys: jax.Array) -> tuple[EpisodeState, jax.Array]:
        """Start one episode a key; see `Environment.reset`."""
        check_keys(self.name, keys)
        return jax.vmap(self._reset_one)(keys)

    def step(self, keys: jax.Array, state: EpisodeState, action: jax.Array) -> tuple[EpisodeState, TimeStep]:
        """Take one step in every environment; see `Environment.step`."""
        check_keys(self.name, keys)
        expected = keys.shape + self.action_space.shape
        if jnp.shape(action) != expected:
            raise FdgError(
                f"environment '{self.name}': action has shape {jnp.shape(action)}, expected {expected}"
            )
        return jax.vmap(self._step_one)(keys, state, action)

    def _reset_one(self, key: jax.Array) -> tuple[EpisodeState, jax.Array]:
        inner, observation = self.single.reset(key)
        state = EpisodeState(jax.tree.map(_strong, inner), jnp.float32(0), jnp.int32(0))
        return state, self._observation(observation, "reset")

    def _step_one(
        self, key: jax.Array, state: EpisodeState, action: jax.Array
    ) -> tuple[EpisodeState, TimeStep]:
        step_key, reset_key = jax.random.split(key)
        inner, final_observation, reward, terminated, truncated = self.single.step(
            step_key, state.inner, jnp.asarray(action, self.action_space.dtype)
        )
        inner = jax.tree.map(_strong, inner)
        final_observation = self._observation(final_observation, "step")
        reward = self._scalar(reward, "reward", jnp.float32)
        terminated = self._scalar(terminated, "terminated", jnp.bool_)
        truncated = self._scalar(truncated, "truncated", jnp.bool_)

        episode_return = state.running_return + reward
        episode_length = state.running_length + 1
        if self.max_episode_steps is not None:
            truncated |= episode_length >= self.max_episode_steps
        # A terminal state needs no bootstrap, whatever the clock says: termination wins.
        truncated &= ~terminated
        done = terminated | truncated

        fresh, first_observation = self._reset_one(reset_key)
        stepped = EpisodeState(inner, episode_return, episode_length)
        _check_same_types(self.name, fresh.inner, inner)
        next_state = jax.tree.map(lambda new, old: jnp.where(done, new, old), fresh, stepped)
        return next_state, TimeStep(
            observation=jnp.where(done, first_observation, final_observation),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            final_observation=final_observation,
            episode_return=jnp.where(done, episode_return, 0),
            episode_length=jnp.where(done, episode_length, 0),
        )

    def _observation(self, observation: Any, method: str) -> jax.Array:
        space = self.observation_space
        if jnp.shape(observation) != space.shape:
            raise FdgError(
                f"environment '{self.name}': {method} gives an observation of shape {jnp.shape(observation)},"
                f" but its observation_space has {space.shape}; make the two agree"
            )
        return jnp.asarray(observation, space.dtype)

    def _scalar(self, value: Any, what: str, dtype: Any) -> jax.Array:
        if jnp.shape(value) != ():
            raise FdgError(
                f"environment '{self.name}': step gives {what} of shape {jnp.shape(value)}, expected a"
                " scalar; a single environment does not see the batch"
            )
        return jnp.asarray(value, dtype)


def vectorize(single: Any) -> Vectorized:
    """Make a batched `Environment` from a `SingleEnvironment`.

    Adds what every environment needs: the batch, auto-reset, the return and length of finished episodes,
    and truncation after `single.max_episode_steps` where the environment does not truncate itself.

    Args:
      single: a `SingleEnvironment`.

    Returns:
      A frozen value, equal to another where the two singles are equal. Its `reset` and `step` raise
      `FdgError` where the single one's results do not fit its spaces, or its state changes type.

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
    return Vectorized(single)


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
