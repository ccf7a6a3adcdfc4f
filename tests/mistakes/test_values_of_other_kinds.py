"""Arguments of types that no function accepts: modules, keys, classes, objects without a repr."""

import contextlib
import dataclasses
import math
import typing

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


class WithoutRepr:
    """Its `repr` raises, as for an array of a closed file."""

    def __repr__(self):
        raise RuntimeError("closed")


def nested_list():
    made = []
    for _ in range(3000):
        made = [made]
    return made


def deleted_key():
    key = jax.random.key(0)
    key.delete()
    return key


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: fdg.trace(jnp), "jax.numpy is a module, not an algorithm"),
        (lambda: fdg.place(policies, policies.GPUOnly()), "policies is a module, not an algorithm"),
        (lambda: fdg.compile(PPO, jnp), "jax.numpy is a module, not a policy"),
        (lambda: fdg.compile(PPO, policies.GPUOnly(), KEY), "give a number (8) or a list of devices"),
        (lambda: fdg.compile(PPO, policies.GPUOnly(), jnp.arange(2)), "devices[0] is Array(0, dtype=int32)"),
        (lambda: fdg.load(KEY), "give a string or a path"),
        (lambda: fdg.load(nested_list()), "load(path=<list object"),
        (lambda: fdg.load(WithoutRepr()), "give a string or a path"),
        (
            lambda: fdg.compile(PPO, policies.GPUOnly()).init(deleted_key()),
            "give an integer below 2**63, such as init(0)",
        ),
        (lambda: fdg.host_devices(nested_list()), "give an integer from 1"),
        (lambda: envs.make(nested_list()), "give a name, such as"),
        (lambda: algos.PPO(env=ENV, learning_rate=KEY), "it must be a number"),
        (lambda: algos.PPO(env=ENV, learning_rate=WithoutRepr()), "it must be a number"),
        (lambda: algos.make("PPO", None), "environment NoneType()"),
        (lambda: algos.make("PPO", envs), "environment module()"),
        (lambda: algos.make(dict, ENV), "it has no method iterate"),
        (lambda: algos.make("math:pi.x", ENV), "unknown algorithm in math 'pi.x'"),
        (lambda: fdg.compare(["x" * 5000]), "File name too long"),
        (lambda: fdg.compare(["\ud800"]), "run directories cannot be found"),
        (lambda: curves.plot_runs(None), "plot_runs(paths=None)"),
        (lambda: curves.plot_runs([None]), "run directories cannot be found"),
        (lambda: HuggingFaceTokenizer(None), "give the directory of a checkpoint"),
        (lambda: CharacterTokenizer().encode(None), "encode(None): give a string"),
        (lambda: CharacterTokenizer().decode("abc"), "give the numbers of tokens"),
        (lambda: CharacterTokenizer().decode([math.inf]), "give the numbers of tokens"),
    ],
)
def test_arguments_of_invalid_types(call, text):
    with refuses(text):
        call()


REQUIRED = {
    **{name: {"env": ENV} for name in ("ppo", "dqn", "vdn", "muzero", "iql", "redq")},
    **{name: {} for name in policies.names()},
}


@pytest.mark.parametrize("name", REQUIRED)
def test_field_values_without_repr(name):
    """Numbers, switches and strings cannot be deleted arrays or objects whose `repr` raises; others may."""
    cls = policies.get(name) if name in policies.names() else algos.get(name)
    for field in dataclasses.fields(cls):
        is_plain = (set(typing.get_args(field.type)) or {field.type}) <= {bool, int, float, str, type(None)}
        for value in (WithoutRepr(), deleted_key()):
            with refuses(f"{field.name}=") if is_plain else contextlib.suppress(fdg.FdgError):
                made = cls(**{**REQUIRED[name], field.name: value})
                if name in policies.names():
                    fdg.place(PPO, made, 4)  # checks the fields


def test_names_that_are_not_strings():
    for call in (algos.get, algos.PPO.preset, envs.make, policies.get):
        for value in (WithoutRepr(), deleted_key(), 3, None):
            with pytest.raises(fdg.FdgError):
                call(value)
