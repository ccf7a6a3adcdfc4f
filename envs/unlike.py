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

    An observation has the parts `agent [A, A]`, the agent's one-hot index, and `seen`, or if the agents'
    spaces differ `seen_0`, `seen_1`, ..., one for each kind. Actions are `Discrete` or `MultiDiscrete` with
    the largest number of choices of any agent; or a `Box` with the largest number of components, in [-1, 1],
    rescaled to each agent's bounds.

    Raises:
      FdgError: (when a space is read) there are not `A` spaces, or some actions are discrete and some
        continuous.
    """

    masks_components: ClassVar[bool] = True  # masks of a Box mark the components that the agent has

    single: Any

    @property
    def observation_space(self) -> ObservationSpace:
        """The space of one agent: its index, and a part for each kind of observation."""
        kinds = self._team.kinds
        return Dict({"agent": Box(0.0, 1.0, (self.num_agents,)), **self._name_parts(kinds)})

    @property
    def action_space(self) -> Space:
        """The common action space: the largest number of choices or components of any agent."""
        return self._team.action_space

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        """Starts an episode."""
        state, observations = self.single.reset(key)
        return state, self.together(observations, "reset")

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, Any, Any, Any, Any]:
        """Takes one step; `action [A, *action_space.shape]`."""
        state, observations, reward, *flags = self.single.step(key, state, self.apart(action))
        if isinstance(reward, tuple | list):
            reward = jnp.stack([jnp.asarray(value, jnp.float32) for value in reward])
        return state, self.together(observations, "step"), reward, *flags

    def together(self, observations: Any, method: str = "together") -> Any:
        """Converts a tuple of observations, one per agent, to uniform ones: parts `[A, ...]`.

        Raises:
          FdgError: there are not `A` observations, or one has another shape than its agent's space.
        """
        label = f"environment '{self.name}': {method} gives"
        if not isinstance(observations, tuple | list) or len(observations) != self.num_agents:
            raise FdgError(
                f"{label} a {kind_of(observations)}: give a tuple of {self.num_agents} observations"
            )
        team = self._team
        features, masks = zip(*map(features_and_mask, observations), strict=True)
        cast = [
            composite.cast_to_space(space, value, (), f"{label} agent {a}")
            for a, (space, value) in enumerate(zip(team.observation_spaces, features, strict=True))
        ]
        parts = {
            name: jax.tree.map(
                lambda *rows: jnp.stack(rows),
                *(
                    value if team.observation_spaces[a] == kind else composite.zeros(kind)
                    for a, value in enumerate(cast)
                ),
            )
            for name, kind in self._name_parts(team.kinds).items()
        }
        observation = {"agent": jnp.eye(self.num_agents), **parts}
        if team.has_all_actions and all(mask is None for mask in masks):
            return observation
        return MaskedObservation(
            observation, jnp.stack([self._mask(a, mask) for a, mask in enumerate(masks)])
        )

    def apart(self, action: jax.Array) -> tuple[jax.Array, ...]:
        """Splits uniform actions `[A, ...]` into each agent's action."""
        return tuple(_agent_action(space, action[a]) for a, space in enumerate(self._team.action_spaces))

    def _mask(self, agent: int, mask: Any) -> jax.Array:
        """The actions that an agent has and may take: `[n]` bool."""
        existing = self._team.masks[agent]
        if mask is None:
            return jnp.asarray(existing)
        # Choices that the agent lacks follow its own choices; each has one allowed answer.
        space = self._team.action_spaces[agent]
        size = space.n if isinstance(space, Discrete) else sum(getattr(space, "nvec", ()))
        if jnp.shape(mask) != (size,):
            raise FdgError(
                f"environment '{self.name}': agent {agent} has an action_mask of shape {jnp.shape(mask)}, but"
                f" for {space} it is {(size,)}"
            )
        return jnp.asarray(existing).at[np.flatnonzero(existing)[:size]].set(jnp.asarray(mask, bool))

    def _name_parts(self, kinds: tuple[Any, ...]) -> dict[str, Any]:
        return {"seen": kinds[0]} if len(kinds) == 1 else {f"seen_{i}": kind for i, kind in enumerate(kinds)}

    @property
    def _team(self) -> "_Team":
        return _make_team(self.name, self.num_agents, self.single.observation_space, self.single.action_space)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "single":
            raise AttributeError(name)
        return getattr(self.single, name)  # name, rendering, ...


@dataclasses.dataclass(frozen=True, eq=False)
class _Team:
    """Properties of a team of different agents."""

    observation_spaces: tuple[Any, ...]  # per agent
    action_spaces: tuple[Any, ...]  # per agent
    kinds: tuple[Any, ...]  # distinct observation spaces
    action_space: Space
    masks: tuple[np.ndarray, ...]  # per agent: [n] bool, the actions or components that it has

    @property
    def has_all_actions(self) -> bool:
        """True if every agent has all actions."""
        return all(mask.all() for mask in self.masks)


@functools.lru_cache(maxsize=256)
def _make_team(name: str, agents: int, observation_space: Any, action_space: Any) -> _Team:
    for attribute, space in (("observation_space", observation_space), ("action_space", action_space)):
        if not isinstance(space, Tuple) or len(space.spaces) != agents:
            raise FdgError(
                f"environment '{name}': of {agents} unlike agents, its {attribute} is an envs.Tuple of as"
                " many"
                f" spaces, and not {space!r:.100}"
            )
    kinds = tuple(dict.fromkeys(observation_space.spaces))
    spaces = action_space.spaces
    if all(isinstance(space, Box) for space in spaces):
        size = max(math.prod(space.shape) for space in spaces)
        common: Space = Box(*_shared_bounds(spaces, size), (size,))
        masks = [np.arange(size) < math.prod(space.shape) for space in spaces]
    elif all(isinstance(space, Discrete) for space in spaces):
        size = max(space.n for space in spaces)
        common, masks = Discrete(size), [np.arange(size) < space.n for space in spaces]
    elif all(isinstance(space, Discrete | MultiDiscrete) for space in spaces):
        choices = [(s.n,) if isinstance(s, Discrete) else s.nvec for s in spaces]
        size = max(map(len, choices))
        padded = [(*counts, *(1,) * (size - len(counts))) for counts in choices]
        nvec = tuple(max(counts[m] for counts in padded) for m in range(size))
        common = MultiDiscrete(nvec)
        masks = [
            np.concatenate([np.arange(n) < m for n, m in zip(nvec, counts, strict=True)]) for counts in padded
        ]
    else:
        raise FdgError(
            f"environment '{name}': some of its agents act by choices, others by numbers"
            f" ({action_space!r:.200}): one network cannot do both; give all of them one kind"
        )
    return _Team(observation_space.spaces, spaces, kinds, common, tuple(masks))


def _shared_bounds(spaces: tuple[Box, ...], size: int) -> tuple[Any, Any]:
    """Bounds per component: [-1, 1], or infinite if the component is unbounded for an agent."""
    is_bounded = np.ones(size, bool)
    for space in spaces:
        finite = np.isfinite(space.low_array) & np.isfinite(space.high_array)
        is_bounded[: finite.size] &= finite.reshape(-1)
    high = tuple(np.where(is_bounded, 1.0, np.inf).tolist())
    return tuple(-bound for bound in high), high


def _agent_action(space: Space, action: jax.Array) -> jax.Array:
    match space:
        case Discrete():
            return action if action.ndim == 0 else action[0]
        case MultiDiscrete(nvec=nvec):
            return action[: len(nvec)]
    low, high = space.low_array, space.high_array
    finite = np.isfinite(low) & np.isfinite(high)
    values = action[: math.prod(space.shape)].reshape(space.shape)
    scale = np.where(finite, high / 2.0 - low / 2.0, 1.0).astype(np.float32)
    middle = np.where(finite, high / 2.0 + low / 2.0, 0.0).astype(np.float32)
    rescaled = jnp.where(finite, jnp.clip(values, -1.0, 1.0), values) * scale + middle
    return jnp.clip(rescaled, low, high).astype(space.dtype)
