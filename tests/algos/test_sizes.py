"""Random sizes of every algorithm: given sizes are kept and the others adapt; huge sizes raise errors."""

import dataclasses
import typing

import jax
import pytest

import algos
import envs
import fdg

ENVIRONMENTS = {
    "ippo": ("MPE_simple_spread_v3",),
    "mappo": ("MPE_simple_spread_v3",),
    "vdn": ("MPE_simple_spread_v3",),
    "qmix": ("MPE_simple_spread_v3",),
    "sac": ("Pendulum-v1", "brax:ant"),
    "td3": ("Pendulum-v1",),
    "fast_td3": ("Pendulum-v1",),
    "redq": ("Pendulum-v1",),
    "droq": ("Pendulum-v1",),
    "tqc": ("Pendulum-v1",),
    "alphazero": ("game:tic_tac_toe",),
    **dict.fromkeys(("crossq", "iql", "td3_bc", "rebrac", "cql"), ("Pendulum-v1",)),
    "bc": ("CartPole-v1",),
}


def integer_fields(cls):
    """Names of integer fields, and of fields with several integers, with values that are too large."""
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        parts = {kinds[field.name], *typing.get_args(kinds[field.name])}
        if tuple[int, ...] in parts:
            yield field.name, (8, 10**17)
        elif int in parts:
            yield field.name, 10**17


@pytest.mark.parametrize("name", algos.names("environments"))
def test_sizes_too_large(name):
    cls, env = algos.get(name), envs.make(ENVIRONMENTS.get(name, ("CartPole-v1",))[0])
    fields = dict(integer_fields(cls))
    assert {"num_envs", "total_steps", "hidden"} <= set(fields)
    for field, size in fields.items():
        with pytest.raises(fdg.FdgError, match=rf"{field}=.*0\)? is too large: use"):
            algos.make(name, env, **{field: size})


def test_batch_too_large():
    class Huge:
        def init(self, key):
            return jax.numpy.zeros(10**17)

        def iterate(self, state):
            return fdg.fragment("actor")(jax.numpy.sin)(state), {}

    with pytest.raises(fdg.FdgError, match=f"'sin' .actor.: its batch has {10**17} rows"):
        fdg.trace(Huge())
