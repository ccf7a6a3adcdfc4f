"""Composite observations: spaces, privileged parts, and observations that do not match their space."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs import composite, probe
from envs.spaces import Box, Discrete
from fdg.errors import FdgError

_count = itertools.count(1)  # changes at each trace, as NumPy's random numbers do
SPACE = envs.Dict(
    {
        "eye": Box(0.0, 1.0, (2,)),
        "map": envs.Tuple((Discrete(3), envs.Dict({"a": Box(0.0, 9.0, (), "int32")}))),
    },
    privileged=("map",),
)


def test_dict_is_a_value_sorted_by_name():
    other = envs.Dict(dict(reversed(SPACE.spaces)), privileged=["map"])
    assert other == SPACE and hash(other) == hash(SPACE) and other != envs.Dict(dict(SPACE.spaces))
    assert [where for where, _ in composite.parts(SPACE)] == ["['eye']", "['map'][0]", "['map'][1]['a']"]
    assert (
        eval(repr(SPACE), {"Dict": envs.Dict, "Tuple": envs.Tuple, "Box": Box, "Discrete": Discrete}) == SPACE
    )


def test_samples_are_contained():
    drawn = SPACE.sample(jax.random.key(0))
    assert SPACE.contains(drawn)
    assert not SPACE.contains({**drawn, "eye": drawn["eye"] + 2}) and not SPACE.contains(drawn["map"])


def test_privileged_parts():
    full = {"eye": jnp.ones((4, 2)), "map": (jnp.ones(4, jnp.int32), {"a": jnp.ones(4, jnp.int32)})}
    observation = composite.public_part(SPACE, full)
    assert observation.keys() == {"eye"} == composite.tree(composite.public(SPACE)).keys()
    for given in (full, observation):
        filled = composite.with_privileged_zeros(SPACE, given, (4,))
        assert composite.has_parts_of(SPACE, filled)
        assert filled["eye"] is full["eye"] and not any(x.any() for x in jax.tree.leaves(filled["map"]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: envs.Dict({}), "give parts by name"),
        (lambda: envs.Dict({1: Discrete(2)}), "give parts by name"),
        (lambda: envs.Dict({"a": (3,)}), "part 'a' is a builtins.tuple: give an envs.Box"),
        (lambda: envs.Dict({"a": Discrete(2)}, privileged=("b",)), "privileged part 'b' is none of a"),
        (lambda: envs.Dict({"a": Discrete(2)}, privileged="a"), "leave one that the actor sees"),
        (lambda: envs.Tuple(()), "give a tuple of spaces"),
        (lambda: envs.Tuple((Discrete,)), "part 0 is a envs.spaces.Discrete"),
    ],
)
def test_invalid_spaces_are_refused(make, message):
    with pytest.raises(FdgError, match=message):
        make()


@dataclasses.dataclass(frozen=True)
class Broken(probe.Parts):
    change: str = ""

    def _observe(self, state):
        observation = super()._observe(state)
        if self.change == "lacks":
            del observation["told"]
        if self.change == "shape":
            observation["told"] = (observation["told"][0], jnp.zeros(3))
        if self.change == "leaves":
            observation["bonus"] = observation["bonus"] + 5
        if self.change == "numpy":
            observation["bonus"] = jnp.asarray(np.full(1, 0.1 * next(_count) % 1), jnp.float32)
        return list(observation.values()) if self.change == "list" else observation


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "lacks",
            r"an observation of parts 'bonus', 'picture', but its .* has parts 'bonus', 'picture', 'told'",
        ),
        ("shape", r"gives observation\['told'\]\[1\] of shape \(3,\), but its observation_space has \(1,\)"),
        ("list", "gives an observation of 3 parts, but its observation_space has parts 'bonus'"),
        ("leaves", r"the first observation\['bonus'\] is outside its space: from 4 to 6"),
        ("numpy", "a different jaxpr each time that they are traced: draw random numbers from `key`"),
    ],
)
def test_check_names_the_mismatch(change, message):
    with pytest.raises(FdgError, match=message):
        envs.check(envs.vectorize(Broken(change=change)), steps=2)


def test_parts_probe_by_hand():
    env = envs.make("probe:parts")
    state, observation = env.reset(jax.random.split(jax.random.key(0), 16))
    side = np.where(np.asarray(observation["picture"])[:, 0, 3, 0] > 0, 1, -1)
    target = side * np.where(observation["told"][0] == 1, -1, 1)
    _, step = env.step(jax.random.split(jax.random.key(1), 16), state, jnp.asarray(target > 0, jnp.int32))
    np.testing.assert_array_equal(step.reward, 1 + np.asarray(observation["bonus"])[:, 0])
    assert len(set(zip(side.tolist(), target.tolist(), strict=True))) == 4 and step.terminated.all()
