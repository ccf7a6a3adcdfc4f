"""Parts: shared groups of settings that become fields of an algorithm (`fdg.settings.parts`)."""

import dataclasses
import re
from typing import ClassVar

import jax.numpy as jnp
import pytest

import algos
import envs
import policies
from algos import presets
from algos.values import Layers
from fdg.commands.flags import flags_of
from fdg.errors import FdgError
from fdg.settings.fields import hyperparameter, structural
from fdg.settings.parts import Part, flattened
from tools.algorithm_sizes import count_declarations

ENV = envs.make("CartPole-v1")


@dataclasses.dataclass(frozen=True)
class Noise(Part):
    """Two settings."""

    scale: float = hyperparameter(0.1, "how much")
    steps: int = hyperparameter(3, "how long", structural="how often a loop runs")


@dataclasses.dataclass(frozen=True)
class Noisy(algos.PPO):
    """A user's algorithm with a new part, and a part of PPO with other defaults."""

    layers = Layers(hidden=(8,), activation="relu")
    noise = Noise(scale=0.5)
    last: int = hyperparameter(7, "what comes after it")


def test_part_fields_become_fields_and_flags():
    names = [field.name for field in dataclasses.fields(Noisy)]
    assert names[-3:] == ["scale", "steps", "last"]
    flags = {flag.name: flag for flag in flags_of(Noisy)}
    assert (flags["scale"].default, flags["scale"].help, flags["steps"].default) == (0.5, "how much", 3)
    assert flags["hidden"].default == (8,)
    assert "noise" not in flags
    assert "steps" in structural(Noisy)


def test_part_value_comes_from_fields():
    noisy = Noisy(env=ENV, scale=0.25, convolve=False)
    assert noisy.noise == Noise(0.25)
    assert dataclasses.replace(noisy, steps=9).noise == Noise(0.25, 9)
    assert noisy.layers == Layers((8,), "relu", convolve=False)
    assert Noisy.noise == Noise(0.5)
    traced = dataclasses.replace(noisy, scale=jnp.float32(0.75))
    assert traced.noise.scale == 0.75


def test_class_redeclares_part_field():
    @dataclasses.dataclass(frozen=True)
    @flattened
    class Plain:
        rate: float
        noise = Noise()
        scale: float = hyperparameter(2.0, "another text")

    assert [field.name for field in dataclasses.fields(Plain)] == ["rate", "steps", "scale"]
    assert Plain(1.0).noise == Noise(scale=2.0)


def test_subclass_field_changes_part():
    @dataclasses.dataclass(frozen=True)
    class Narrow(algos.DQN):
        hidden: tuple[int, ...] | None = hyperparameter((4,), "widths")

    assert Narrow(env=ENV).layers.hidden == (4,)
    assert algos.DQN(env=ENV).layers.hidden is None


def test_errors_of_part_fields():
    with pytest.raises(FdgError, match=r"hidden=\[8\]: .* write hidden=\(8,\)"):
        Noisy(env=ENV, hidden=[8])
    with pytest.raises(FdgError, match="scale"):
        Noisy(env=ENV, scales=1.0)
    assert set(presets.of("PPO", "Pendulum-v1")) <= {field.name for field in dataclasses.fields(Noisy)}


class _Annotated(algos.PPO):
    learning_rate: float = 1e-3


class _Bare(algos.PPO):
    learning_rate = 1e-3


@dataclasses.dataclass(frozen=True)
class _BareThoughDecorated(algos.PPO):
    learning_rate = 1e-3


class _NewPart(algos.PPO):
    noise = Noise()


class _OtherDefaults(algos.PPO):
    layers = Layers(activation="relu")


class _Placed(policies.Split):
    more: int = 3


@pytest.mark.parametrize(
    "cls, words",
    [
        (
            _Annotated,
            "learning_rate has no effect: write @dataclasses.dataclass(frozen=True) above the class",
        ),
        (_Bare, "learning_rate has no effect: write its type, learning_rate: float = ..., and @dataclasses"),
        (_BareThoughDecorated, "learning_rate has no effect: write its type"),
        (_NewPart, "scale and steps have no effect"),
        (_OtherDefaults, "activation has no effect"),
        (_Placed, "more has no effect"),
    ],
)
def test_ignored_settings_raise(cls, words):
    """`dataclasses` reads only decorated classes, and only attributes with a type."""
    for use in (lambda: cls(**({} if cls is _Placed else {"env": ENV})), lambda: flags_of(cls)):
        with pytest.raises(FdgError, match=re.escape(words)) as error:
            use()
        assert str(error.value).startswith(f"{cls.__name__} (test_parts.py, line ")


def test_subclass_without_settings_needs_no_decorator():
    class Same(algos.PPO):
        several: ClassVar[int] = 3
        layers = Layers()

    assert Same(env=ENV, hidden=(8,)).layers == Layers((8,))


def test_settings_are_declared_once():
    """`network` is declared per class, since classes accept different kinds of networks."""
    settings, _ = count_declarations()
    assert {name for name, count in settings.items() if count > 3} == {"network"}
