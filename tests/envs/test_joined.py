"""Composite actions: algorithms use one array; environments and users of a policy get the parts."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envs
from envs import Box, Dict, Discrete, MultiDiscrete, Tuple, composite
from envs.native import native
from fdg.errors import FdgError


@dataclasses.dataclass(frozen=True)
class Echo:
    """Observes the last action, flattened in the order of its parts; the reward is its sum."""

    action_space: Any
    name: ClassVar[str] = "echo"
    max_episode_steps: ClassVar[int] = 5

    @property
    def observation_space(self):
        size = sum(int(np.prod(part.shape)) for _, part in composite.parts(self.action_space))
        return Box(-9.0, 9.0, (size,))

    def reset(self, key):
        return jnp.int32(0), jnp.zeros(self.observation_space.shape)

    def step(self, key, state, action):
        assert composite.has_parts_of(self.action_space, action)
        for (_, part), value in zip(composite.parts(self.action_space), jax.tree.leaves(action), strict=True):
            assert value.shape == part.shape and value.dtype == part.dtype
        seen = jnp.concatenate([jnp.ravel(x).astype(jnp.float32) for x in jax.tree.leaves(action)])
        return state + 1, seen, jnp.sum(seen), False, False


def nested(leaves):
    """Nested dictionaries and tuples of `leaves`."""
    part = st.one_of(leaves, st.lists(leaves, min_size=1, max_size=2).map(lambda x: Tuple(tuple(x))))
    return st.one_of(
        st.dictionaries(st.sampled_from("abc"), part, min_size=1).map(Dict),
        st.lists(part, min_size=1, max_size=3).map(lambda x: Tuple(tuple(x))),
    )


CATEGORIES = st.sampled_from([Discrete(3), Discrete(2), MultiDiscrete((2, 4))])
FLOATS = st.sampled_from(
    [Box(-1.0, 1.0, (2,)), Box(0.0, (1.0, 5.0), (2,)), Box(-2.0, 2.0, (1, 3)), Box(0.0, 1.0, ())]
)


@settings(max_examples=2, deadline=None, derandomize=True)
@given(st.one_of(nested(CATEGORIES), nested(FLOATS)))
def test_composite_actions_are_joined(space):
    """The joined space contains the parts, flattened in order; `native` decodes actions into parts."""
    env = envs.vectorize(Echo(space))
    drawn = [composite.sample(space, key) for key in jax.random.split(jax.random.key(0), 2)]
    flat = jnp.stack([jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(one)]) for one in drawn])
    assert all(env.action_space.contains(row) for row in flat)
    assert env.action_space.shape == flat.shape[1:]
    keys = jax.random.split(jax.random.key(1), 2)
    _, step = env.step(keys, env.reset(keys)[0], flat)
    np.testing.assert_allclose(step.final_observation, flat)
    acted = native(env).decode(flat)
    for i, one in enumerate(drawn):
        for given_out, part in zip(acted, jax.tree.leaves(one), strict=True):
            np.testing.assert_array_equal(given_out[i], part)


def test_discrete_and_float_actions_together_are_refused():
    with pytest.raises(FdgError, match="categories and floats together: make all discrete or all floats"):
        envs.check(envs.vectorize(Echo(Tuple((Discrete(2), Box(0.0, 1.0, (1,)))))))
