"""Values of kinds that no argument takes: modules, keys, classes, and what cannot be written as text."""

import contextlib
import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

import algos
import envs
import fdg
import policies
from envs.text import CharacterTokenizer, HuggingFaceTokenizer
from fdg.training import curves
from tests.refusing import refuses

ENV = envs.make("CartPole-v1")
PPO = algos.PPO(env=ENV, num_envs=4)
KEY = jax.random.key(0)


class Unwritten:
    """As arrays of a file that was closed: its text cannot be made."""

    def __repr__(self):
        raise RuntimeError("closed")


def deep():
    made = []
    for _ in range(3000):
        made = [made]
    return made


def deleted():
    key = jax.random.key(0)
    key.delete()
    return key


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: fdg.trace(jnp), "jax.numpy is a module, not an algorithm"),
        (lambda: fdg.place(policies, policies.GPUOnly()), "policies is a module, not an algorithm"),
        (lambda: fdg.compile(PPO, jnp), "jax.numpy is a module, not a policy"),
        (lambda: fdg.compile(PPO, policies.GPUOnly(), KEY), "give a number (8) or a list of devices"),
        (lambda: fdg.compile(PPO, policies.GPUOnly(), jnp.arange(2)), "devices[0] is Array(0, dtype=int32)"),
        (lambda: fdg.load(KEY), "give a string or a path"),
        (lambda: fdg.load(deep()), "load(path=<list object"),
        (lambda: fdg.load(Unwritten()), "give a string or a path"),
        (
            lambda: fdg.compile(PPO, policies.GPUOnly()).init(deleted()),
            "give an integer below 2**63, such as init(0)",
        ),
        (lambda: fdg.host_devices(deep()), "give an integer from 1"),
        (lambda: envs.make(deep()), "give a name, such as"),
        (lambda: algos.PPO(env=ENV, learning_rate=KEY), "it must be a number"),
        (lambda: algos.PPO(env=ENV, learning_rate=Unwritten()), "it must be a number"),
        (lambda: algos.make("PPO", None), "environment NoneType()"),
        (lambda: algos.make("PPO", envs), "environment module()"),
        (lambda: algos.make(dict, ENV), "it has no method iterate"),
        (lambda: algos.make("math:pi.x", ENV), "unknown algorithm in math 'pi.x'"),
        (lambda: fdg.compare(["x" * 5000]), "File name too long"),
        (lambda: fdg.compare(["\ud800"]), "run directories cannot be found"),
        (lambda: curves.compare(None), "compare(paths=None)"),
        (lambda: curves.compare([None]), "run directories cannot be found"),
        (lambda: HuggingFaceTokenizer(None), "give the directory of a checkpoint"),
        (lambda: CharacterTokenizer().encode(None), "encode(None): give a string"),
        (lambda: CharacterTokenizer().decode("abc"), "give the numbers of tokens"),
        (lambda: CharacterTokenizer().decode([math.inf]), "give the numbers of tokens"),
    ],
)
def test_values_of_other_kinds_are_named(call, said):
    with refuses(said):
        call()


GIVEN = {
    **{name: {"env": ENV} for name in ("ppo", "dqn", "vdn", "muzero", "iql", "redq")},
    **{name: {} for name in policies.names()},
}


@pytest.mark.parametrize("name", GIVEN)
def test_every_field_refuses_what_has_no_text(name):
    """Deleted arrays (donated ones, too), and objects whose text cannot be made: in every field, or taken."""
    cls = policies.get(name) if name in policies.names() else algos.get(name)
    for field in dataclasses.fields(cls):
        for value in (Unwritten(), deleted()):
            with contextlib.suppress(fdg.FdgError):
                cls(**{**GIVEN[name], field.name: value})


def test_names_that_are_no_texts():
    for call in (algos.get, algos.PPO.preset, envs.make, policies.get):
        for value in (Unwritten(), deleted(), 3, None):
            with pytest.raises(fdg.FdgError):
                call(value)
