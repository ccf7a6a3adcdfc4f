"""Makes teams of different agents uniform, so that all agents can share parameters.

An agent sees its index and its own observation; the parts of other kinds of agents are zero. Actions that an
agent lacks are masked. This is parameter sharing with agent indication (Terry et al. 2020, "Revisiting
Parameter Sharing in Multi-Agent Deep Reinforcement Learning", arXiv 2005.13625, section 4), with separate
parts for each kind of observation instead of padding, so that no input has two meanings.

Shapes: `A` agents.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from envs import composite
from envs.composite import Dict, ObservationSpace, Tuple
from envs.observations import MaskedObservation, features_and_mask
from envs.spaces import Box, Discrete, MultiDiscrete, Space
from fdg.arguments import checked_names
from fdg.errors import FdgError, kind_of


@checked_names
@dataclasses.dataclass(frozen=True)
class Alike:
    """A team of agents with different spaces as a `SingleEnvironment` whose agents have equal spaces.

    `envs.vectorize` applies it if `action_space` is an `envs.Tuple`.

    Attributes:
      single: a `SingleEnvironment` with `num_agents`, whose two spaces are `envs.Tuple`s of `A` spaces. Its
        observations are tuples with one entry per agent (with masks or without); `step` takes a tuple of
        actions; rewards are `[A]` or a tuple.

    An observation has the parts `agent [A, A]`, the agent's one-hot index, and `seen`, the agent's own
    observation; if agents' spaces differ, `seen_0`, `seen_1`, ..., one for each space. Actions are `Discrete`
    or `MultiDiscrete` with the most choices of any agent; or a `Box` with the most components of any agent,
    in [-1, 1], rescaled to each agent's bounds.

    Raises:
      FdgError: (when a space is read) there are not `A` spaces, or some actions are discrete and some
        continuous.
    """

    masks_components: ClassVar[bool] = True  # masks of a Box: the components that the agent has

    single: Any

    @property
    def observation_space(self) -> ObservationSpace:
        """The agent's index, and a part for each kind of observation."""
        kinds = self._team.kinds
        return Dict({"agent": Box(0.0, 1.0, (self.num_agents,)), **self._by_part_name(kinds)})

    @property
    def action_space(self) -> Space:
        """The space with the most choices or components of any agent."""
        return self._team.action_space

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        """Starts an episode."""
        state, observations = self.single.reset(key)
        return state, self.together(observations, "reset")

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, Any, Any, Any, Any]:
        """Takes one step; `action [A, *action_space.shape]`."""
        state, observations, reward, *flags = self.single.step(key, state, self.split(action))
        if isinstance(reward, tuple | list):
            reward = jnp.stack([jnp.asarray(value, jnp.float32) for value in reward])
        return state, self.together(observations, "step"), reward, *flags

    def together(self, observations: Any, method: str = "together") -> Any:
        """Converts a tuple of observations, one per agent, to the common space: parts `[A, ...]`.

        Raises:
          FdgError: there are not `A` observations, or one does not fit its agent's space.
        """
        subject = f"environment '{self.name}': {method} gives"
        if not isinstance(observations, tuple | list) or len(observations) != self.num_agents:
            size = f" of {len(observations)}" if isinstance(observations, tuple | list) else ""
            raise FdgError(
                f"{subject} a {kind_of(observations)}{size}: give a tuple of {self.num_agents} observations"
            )
        team = self._team
        features, masks = zip(*map(features_and_mask, observations), strict=True)
        fitted = [
            composite.fit_observation(space, observation, (), f"{subject} agent {a}")
            for a, (space, observation) in enumerate(zip(team.observation_spaces, features, strict=True))
        ]
        seen = {
            name: jax.tree.map(
                lambda *rows: jnp.stack(rows),
                *(
                    observation if team.observation_spaces[a] == kind else composite.zeros(kind)
                    for a, observation in enumerate(fitted)
                ),
            )
            for name, kind in self._by_part_name(team.kinds).items()
        }
        together = {"agent": jnp.eye(self.num_agents), **seen}
        if team.have_all_actions and all(mask is None for mask in masks):
            return together
        return MaskedObservation(together, jnp.stack([self._mask(a, mask) for a, mask in enumerate(masks)]))

    def split(self, action: jax.Array) -> tuple[jax.Array, ...]:
        """Converts actions in the common space, `[A, ...]`, to a tuple of A, each in its agent's space."""
        return tuple(_own_action(space, action[a]) for a, space in enumerate(self._team.action_spaces))

    def _mask(self, agent: int, mask: Any) -> jax.Array:
        """The actions that an agent has and may take: `[n]` bool."""
        own_actions = self._team.masks[agent]
        if mask is None:
            return jnp.asarray(own_actions)
        # MultiDiscrete choices that the agent lacks come last, with one option each.
        space = self._team.action_spaces[agent]
        size = space.n if isinstance(space, Discrete) else sum(getattr(space, "nvec", ()))
        if jnp.shape(mask) != (size,):
            raise FdgError(
                f"environment '{self.name}': agent {agent} has an action_mask of shape {jnp.shape(mask)}, but"
                f" for {space} it must be {(size,)}"
            )
        return jnp.asarray(own_actions).at[np.flatnonzero(own_actions)[:size]].set(jnp.asarray(mask, bool))

    def _by_part_name(self, kinds: tuple[Any, ...]) -> dict[str, Any]:
        return {"seen": kinds[0]} if len(kinds) == 1 else {f"seen_{i}": kind for i, kind in enumerate(kinds)}

    @property
    def _team(self) -> "_Team":
        return _team(self.name, self.num_agents, self.single.observation_space, self.single.action_space)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "single":
            raise AttributeError(name)
        return getattr(self.single, name)  # name, rendering, ...


@dataclasses.dataclass(frozen=True, eq=False)
class _Team:
    """Properties of a team of different agents."""

    observation_spaces: tuple[Any, ...]  # spaces, by agent
    action_spaces: tuple[Any, ...]  # spaces, by agent
    kinds: tuple[Any, ...]  # the distinct observation spaces
    action_space: Space  # of all agents
    masks: tuple[np.ndarray, ...]  # by agent: [n] bool, the actions (or components) that it has

    @property
    def have_all_actions(self) -> bool:
        """True if every agent has all actions."""
        return all(mask.all() for mask in self.masks)


@functools.lru_cache(maxsize=256)
def _team(name: str, agents: int, observations: Any, actions: Any) -> _Team:
    """The properties of a team, from its two `Tuple` spaces; raises an `FdgError` if agents do not fit."""
    for what, space in (("observation_space", observations), ("action_space", actions)):
        if not isinstance(space, Tuple) or len(space.spaces) != agents:
            raise FdgError(
                f"environment '{name}': its {what} must be an envs.Tuple with one space for each of its"
                f" {agents} agents, not {space!r:.100}"
            )
    kinds = tuple(dict.fromkeys(observations.spaces))
    spaces = actions.spaces
    if all(isinstance(space, Box) for space in spaces):
        max_size = max(math.prod(space.shape) for space in spaces)
        common: Space = Box(*_common_bounds(spaces, max_size), (max_size,))
        masks = [np.arange(max_size) < math.prod(space.shape) for space in spaces]
    elif all(isinstance(space, Discrete) for space in spaces):
        max_size = max(space.n for space in spaces)
        common, masks = Discrete(max_size), [np.arange(max_size) < space.n for space in spaces]
    elif all(isinstance(space, Discrete | MultiDiscrete) for space in spaces):
        nvecs = [(space.n,) if isinstance(space, Discrete) else space.nvec for space in spaces]
        max_size = max(map(len, nvecs))
        padded = [(*own, *(1,) * (max_size - len(own))) for own in nvecs]
        nvec = tuple(map(max, zip(*padded, strict=True)))
        common = MultiDiscrete(nvec)
        masks = [
            np.concatenate([np.arange(n) < own_n for n, own_n in zip(nvec, own, strict=True)])
            for own in padded
        ]
    else:
        raise FdgError(
            f"environment '{name}': some of its agents act by choices, others by numbers"
            f" ({actions!r:.200}): one network cannot do both; give all of them one kind"
        )
    return _Team(observations.spaces, spaces, kinds, common, tuple(masks))


def _common_bounds(spaces: tuple[Box, ...], max_size: int) -> tuple[Any, Any]:
    """Bounds of each component: [-1, 1], or none if the component of an agent is unbounded."""
    bounded = np.ones(max_size, bool)
    for space in spaces:
        finite = np.isfinite(space.low_array) & np.isfinite(space.high_array)
        bounded[: finite.size] &= finite.reshape(-1)
    high = tuple(np.where(bounded, 1.0, np.inf).tolist())
    return tuple(-bound for bound in high), high


def _own_action(space: Space, action: jax.Array) -> jax.Array:
    """An agent's action in its own space, from a row of the uniform actions."""
    match space:
        case Discrete():
            return action if action.ndim == 0 else action[0]
        case MultiDiscrete(nvec=nvec):
            return action[: len(nvec)]
    low, high = space.low_array, space.high_array
    finite = np.isfinite(low) & np.isfinite(high)
    components = action[: math.prod(space.shape)].reshape(space.shape)
    half_width = np.where(finite, high / 2.0 - low / 2.0, 1.0).astype(np.float32)
    middle = np.where(finite, high / 2.0 + low / 2.0, 0.0).astype(np.float32)
    rescaled = jnp.where(finite, jnp.clip(components, -1.0, 1.0), components) * half_width + middle
    return jnp.clip(rescaled, low, high).astype(space.dtype)
