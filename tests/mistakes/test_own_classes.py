"""Errors in user-defined algorithms and wrappers: one line, which names the source line of a faulty class."""

import dataclasses
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

import algos
import envs
import fdg
from fdg.commands.cli import train_main
from fdg.errors import FdgError
from tests.refusing import refused


@dataclasses.dataclass(frozen=True)
class Valid:
    """Has the methods that a class named by `--algo` needs; they are never called."""

    env: Any
    rate: float = 0.1
    total_steps: int = 8
    steps_per_iteration = 1

    def init(self, key):
        raise NotImplementedError

    def iterate(self, state):
        raise NotImplementedError


class UnknownField(Valid):
    @classmethod
    def preset(cls, env_name):
        return {"rat": 0.1}


class NoClassMethod(Valid):
    def preset(self, env_name):
        return {"rate": 0.1}


class Raises(Valid):
    @classmethod
    def preset(cls, env_name):
        return {}[env_name]


class NoDict(Valid):
    @staticmethod
    def preset(env_name):
        return ["rate"]


class Tuned(Valid):
    @classmethod
    def preset(cls, env_name):
        return {"rate": 0.5, "total_steps": 16}


class NoSteps(Valid):
    @property
    def steps_per_iteration(self):
        return 1 // 0


class Method(Valid):
    def steps_per_iteration(self):
        return 1


class Fails(Valid):
    def __init__(self, **values):
        raise KeyError("rate")


class Plain:
    init, iterate = Valid.init, Valid.iterate

    def __init__(self, env):
        self.env = env


MESSAGES = {
    UnknownField: "did you mean 'rate'?",
    NoClassMethod: "write @classmethod above it",
    Raises: "KeyError",
    NoDict: "return a dict of fields",
    NoSteps: "ZeroDivisionError",
    Method: "an integer of at least 1",
    Fails: "KeyError",
    Plain: "not a dataclass",
}


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_faulty_class(cls, tmp_path, capsys):
    name = f"{__name__}:{cls.__name__}"
    words = f"--algo {name} --total-steps 8 --devices 1 --out {tmp_path / 'r'}"
    text = refused(capsys, words, train_main)
    assert MESSAGES[cls] in text and "(test_own_classes.py, line " in text
    assert not (tmp_path / "r").exists()


def test_make_applies_preset_of_user_class():
    env = envs.make("CartPole-v1")
    for name in (Tuned, f"{__name__}:Tuned"):
        made = algos.make(name, env, rate=0.25)
        assert (type(made).__name__, made.rate, made.total_steps) == ("Tuned", 0.25, 16)
    with pytest.raises(FdgError, match="did you mean 'rate'"):
        algos.make(UnknownField, env)


class Pair(NamedTuple):
    x: Any
    y: Any


X = jnp.zeros(2)


@pytest.mark.parametrize(
    ("first", "later", "text"),
    [
        ({"x": X}, {"x": X, "z": X}, r"state['z']: new"),
        (Pair(X, None), Pair(X, X), "state.y: new"),
        (Pair(X, (X,) * 5), Pair(X, ()), "state.y[0], state.y[1], state.y[2] and 2 more: gone"),
        (Pair(X, [X]), Pair(X, (X,)), "state.y is tuple, and was list"),
        (Pair(X, ()), Pair(X, None), "state.y is NoneType, and was tuple"),
        ([X], Pair(X, X), "state.x, state.y: new; state[0]: gone"),
    ],
)
def test_state_of_another_structure(first, later, text):
    class Other:
        steps_per_iteration = 1

        def init(self, key):
            return first

        def iterate(self, state):
            return later, {}

    with pytest.raises(FdgError, match=re.escape(f"another structure than init: {text}")):
        fdg.trace(Other())


class _SetsItsEnv(envs.Wrapper):
    def __init__(self, env):
        self.env = env


@dataclasses.dataclass(frozen=True)
class _Counts(envs.Wrapper):
    seen: int = 0

    def step(self, keys, state, action):
        self.seen += 1
        return super().step(keys, state, action)


def test_wrapper_that_assigns_fields():
    inner = envs.make("CartPole-v1")
    with pytest.raises(FdgError, match=r"super\(\).__init__\(env\) in place of self.env = env"):
        _SetsItsEnv(inner)
    with pytest.raises(FdgError, match=r"self.seen \+= 1.*put values that change into the state"):
        envs.check(_Counts(inner))
