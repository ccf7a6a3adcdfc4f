"""MABrax: several agents move one brax body, divided as in JaxMARL 0.2 (`ant_4x2`, ...).

`envs/from_brax.py` makes the bodies. JaxMARL's mappings say which components of the observation an
agent sees and which joints it moves. Observations and actions are padded to the longest, and a one-hot agent
index precedes each observation, as with JaxMARL's `homogenisation_method="max"`. All agents get the body's
reward.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs.adapters import check_count, importing
from envs.environment import Vectorized, vectorize
from envs.from_brax import BraxEnvironment
from envs.library import Facts, LibraryEnvironment
from envs.spaces import Box
from fdg.errors import FdgError

# JaxMARL's name -> brax's name
BODIES = {
    "ant_4x2": "ant",
    "halfcheetah_6x1": "halfcheetah",
    "hopper_3x1": "hopper",
    "humanoid_9|8": "humanoid",
    "walker2d_2x3": "walker2d",
}
_BACKENDS = ("positional", "generalized", "spring", "mjx")  # the first is JaxMARL's default


@dataclasses.dataclass(frozen=True)
class BraxTeam(LibraryEnvironment):
    """A `SingleEnvironment` of several agents that move one body."""

    name: str
    body: BraxEnvironment

    @property
    def num_agents(self) -> int:
        """The number of agents that the body is divided among."""
        return len(_mappings(self.name)[0])

    @property
    def facts(self) -> Facts:
        """Its properties, from the agents' mappings, padded to the longest view and the most joints."""
        views, joints = (max(map(len, indices)) for indices in _mappings(self.name))
        observations = Box(float("-inf"), float("inf"), (self.num_agents + views,))
        return Facts(observations, Box(-1.0, 1.0, (joints,)), self.body.episode_length)

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """Starts an episode."""
        state, observation = self.body.reset(key)
        return state, self._observe(observation)

    def step(
        self, key: jax.Array, state: Any, action: jax.Array
    ) -> tuple[Any, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Takes one step, without reset; `action [A, n]`."""
        joints = _mappings(self.name)[1]
        body_action = jnp.zeros(self.body.action_space.shape)
        for i, own_indices in enumerate(joints):
            body_action = body_action.at[np.array(own_indices)].set(action[i, : len(own_indices)])
        state, observation, reward, terminated, truncated = self.body.step(key, state, body_action)
        rewards = jnp.full(self.num_agents, reward)
        return state, self._observe(observation), rewards, terminated, truncated

    def _observe(self, observation: jax.Array) -> jax.Array:
        """The agents' observations, `[A, A + n]`: each agent's one-hot index, then what it sees, padded."""
        views = _mappings(self.name)[0]
        max_size = max(len(indices) for indices in views)
        rows = [
            jnp.pad(observation[np.array(own_indices)], (0, max_size - len(own_indices)))
            for own_indices in views
        ]
        return jnp.concatenate([jnp.eye(self.num_agents), jnp.stack(rows)], axis=1)


def factories() -> dict[str, Callable[..., Vectorized]]:
    """The factory of each team by name, for the registry."""
    return {name: functools.partial(_make, name) for name in BODIES}


def _make(name: str, *, backend: str = _BACKENDS[0], episode_length: int = 1000) -> Vectorized:
    """Makes the team `name`."""
    where = f"environment '{name}'"
    if backend not in _BACKENDS:
        raise FdgError(f"{where}: backend={backend!r} must be one of {', '.join(_BACKENDS)}")
    check_count(where, "episode_length", episode_length)
    team = BraxTeam(name, BraxEnvironment(BODIES[name], backend, episode_length))
    return vectorize(team, repeat_start=True)


@functools.cache
def _mappings(name: str) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """For each agent: indices of the observation that it sees, and of the joints that it moves."""
    with importing(f"environment '{name}' needs", "JaxMARL", "jaxmarl"):
        from jaxmarl.environments.mabrax import mappings
    views, joints = mappings._agent_observation_mapping[name], mappings._agent_action_mapping[name]
    return tuple(_as_ints(views[agent]) for agent in views), tuple(_as_ints(joints[agent]) for agent in views)


def _as_ints(indices: Any) -> tuple[int, ...]:
    return tuple(int(i) for i in np.asarray(indices))
