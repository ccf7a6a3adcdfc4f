"""What `envs.check` says of masks."""

import jax.numpy as jnp
import pytest

import envs
from envs import MaskedObservation
from fdg.errors import FdgError, FdgWarning


class Board:
    """Two moves, of which a rule allows some; its observations say where it is."""

    name = "board"
    observation_space = envs.Box(0.0, 1.0, (1,))
    action_space = envs.Discrete(2)
    max_episode_steps = 4
    allows = (False, False)

    def see(self, state):
        # Outside of the space too, as it may be where no move is right.
        return MaskedObservation(jnp.float32([9.0]), jnp.array(self.allows))

    def reset(self, key):
        return jnp.int32(0), self.see(0)

    def step(self, key, state, action):
        return state + 1, self.see(state), jnp.float32(0), jnp.bool_(False), jnp.bool_(False)


class Named(Board):
    """A part that is named as a mask is."""

    observation_space = envs.Dict({"at": envs.Box(0.0, 1.0, (1,)), "action_mask": envs.Box(0.0, 1.0, (2,))})

    def see(self, state):
        return {"at": jnp.zeros(1), "action_mask": jnp.ones(2)}


def test_a_mask_that_allows_nothing_is_named_before_all_else():
    with pytest.raises(FdgError, match="no action is allowed"):
        envs.check(envs.vectorize(Board()), steps=4)


def test_a_part_that_is_only_named_a_mask_is_warned_of():
    with pytest.warns(FdgWarning, match="forbids no action"):
        envs.check(envs.vectorize(Named()), steps=0)
