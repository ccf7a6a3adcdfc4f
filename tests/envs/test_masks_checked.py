"""`envs.check` on action masks."""

import jax.numpy as jnp
import pytest

import envs
from envs import MaskedObservation
from fdg.errors import FdgError, FdgWarning


class Board:
    """Two actions with the mask `allows`."""

    name = "board"
    observation_space = envs.Box(0.0, 1.0, (1,))
    action_space = envs.Discrete(2)
    max_episode_steps = 4
    allows = (False, False)

    def observe(self, state):
        # Also outside of the space: the empty mask must be reported first.
        return MaskedObservation(jnp.float32([9.0]), jnp.array(self.allows))

    def reset(self, key):
        return jnp.int32(0), self.observe(0)

    def step(self, key, state, action):
        return state + 1, self.observe(state), jnp.float32(0), jnp.bool_(False), jnp.bool_(False)


class Named(Board):
    """Has an observation part named `action_mask`."""

    observation_space = envs.Dict({"at": envs.Box(0.0, 1.0, (1,)), "action_mask": envs.Box(0.0, 1.0, (2,))})

    def observe(self, state):
        return {"at": jnp.zeros(1), "action_mask": jnp.ones(2)}


def test_empty_mask_is_reported_first():
    with pytest.raises(FdgError, match="no action is allowed"):
        envs.check(envs.vectorize(Board()), steps=4)


def test_warns_of_a_part_named_action_mask():
    with pytest.warns(FdgWarning, match="forbids no action"):
        envs.check(envs.vectorize(Named()), steps=0)
