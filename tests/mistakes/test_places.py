"""Families of mistakes: code without a file, misplaced values, wrong names, settings without effect."""

import dataclasses
import importlib.util

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from algos.values import Network
from envs.text import HostReward
from fdg.arguments import check_takes
from fdg.errors import FdgWarning
from fdg.training.job import ineffective_field_messages
from tests.mistakes.test_families import ENV, corridor, refused
from tests.tiny import Walk
from tests.training.trained import fitted, small

# --- code without a file: a terminal, `python -c`, `exec` ---

BODIES = {
    "while state['x'] < 3: pass": "max) needs the unknown number",
    "range(state['x'].sum())": "used as a Python integer",
    "float(state['x'])": "needs the number",
    "np.sort(state['x'])": "NumPy was given",
    "self.missing": "AttributeError",
    "jnp.add(state['x'], 'one')": "not an array",
    "jax.random.key(jax.random.key(0))": "in the place of a seed",
}


def typed(*body, file):
    """An algorithm that was typed into a terminal."""
    text = "class Typed:\n def init(self, key): return {'x': jnp.zeros(())}\n def iterate(self, state):\n  "
    text += "\n  ".join([*body, "return state, {}"])
    names = {"jax": jax, "jnp": jnp, "np": np, "__name__": "__main__"}
    exec(compile(text, file, "exec"), names)
    return names["Typed"]()


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("file", ["<stdin>", "<string>", "<console>"])
def test_error_in_code_without_file(body, file):
    text = refused(lambda: fdg.trace(typed(body, file=file)))
    assert text.startswith(f"Typed.iterate, line 4 of {file}") and BODIES[body] in text


def test_constant_key_in_code_without_file_warns():
    draws = "state = {'x': state['x'] + jax.random.normal(jax.random.key(0))}"
    with pytest.warns(FdgWarning, match="line 4 of <stdin> draws from a constant key"):
        fdg.trace(typed(draws, file="<stdin>"))


# --- a class, module or name instead of a value ---


class Watch:
    def __call__(self, *args):
        return [0.0] * len(args[0])


def test_class_instead_of_instance():
    assert "Watch is a class: give an instance, Watch(...)" in refused(lambda: check_takes(Watch, (), "it"))
    assert "Watch is a class" in refused(lambda: fdg.fit(small(), callbacks=[Watch], eval_episodes=0))
    assert "reward Watch is a class" in refused(lambda: HostReward(Watch))
    for made in (Network(Watch, lambda p, x: x), Network(lambda k, x: {}, Watch)):
        assert "Watch is a class" in refused(lambda made=made: fdg.trace(small(network=made)))
    text = refused(lambda: fdg.trace(small(network=nn.Dense)))
    assert "missing a required argument: 'features'" in text and text.endswith("write Dense(...)")


@pytest.mark.parametrize("package", [algos, policies], ids=lambda package: package.__name__)
def test_module_instead_of_class(package):
    modules = [name for name in package.names() if hasattr(package, name)]
    assert len(modules) >= 8
    for name in modules:
        wanted = f"{package.__name__}.{package.get(name).__name__}(...)"
        assert refused(lambda name=name: getattr(package, name)(ENV)).endswith(f"is a module: write {wanted}")


@pytest.mark.parametrize("package", [fdg, algos, envs, policies], ids=lambda package: package.__name__)
def test_misspelled_names_of_packages(package):
    for name in package.__all__:
        for other in (name.lower(), name.upper(), f"{name}s"):
            is_module = importlib.util.find_spec(f"{package.__name__}.{other}") is not None
            if not is_module and other not in (*dir(package), *package.__all__):
                text = refused(lambda other=other: getattr(package, other), AttributeError)
                assert text.startswith(f"{package.__name__} has no {other}: "), other
        assert getattr(package, f"__{name}__", None) is None
    assert not hasattr(package, "zzz")


def test_name_instead_of_algorithm():
    for do in (fdg.trace, lambda name: fdg.place(name, policies.GPUOnly(), 1)):
        assert "write algos.make('ppo', env)" in refused(lambda do=do: do("ppo"))


def test_function_instead_of_list():
    assert refused(lambda: fdg.fit(small(), callbacks=print)).endswith("write [<built-in function print>]")


# --- user-defined functions ---


@pytest.mark.parametrize("arguments", ["", "key", "key, one, two"])
def test_network_functions_with_wrong_number_of_arguments(arguments):
    wrong = eval(f"lambda {arguments}: {{}}")
    right = lambda first, observation: {}  # noqa: E731
    for name, made in (("init", Network(wrong, right)), ("apply", Network(right, wrong))):
        text = refused(lambda made=made: fdg.trace(small(network=made)))
        assert text.startswith(f"{name} of network takes ({arguments}), but is called with (")


def test_callback_that_raises(tmp_path):
    def watch(report):
        return report.rows[-1]["rewards"]

    with pytest.raises(
        fdg.RunError, match=r"raised KeyError: 'rewards' \(test_places.py, line \d+\)"
    ) as caught:
        fitted(tmp_path / "run", Walk(), iterations=2, callbacks=[watch])
    assert isinstance(caught.value.__cause__, KeyError) and "resume=True" in str(caught.value)


def test_arguments_of_register_and_vectorize():
    single = corridor().single
    assert "register(name=<class" in refused(lambda: envs.register(type(single), "mine"))
    assert "give a function" in refused(lambda: envs.register("mine", single))
    assert "repeat_start=8" in refused(lambda: envs.vectorize(single, 8))


def test_float_observation_in_integer_space_warns():
    env = corridor(observation_space=envs.Box(0, 255, (1,), "uint8"))
    with pytest.warns(
        FdgWarning, match="float32 as observation, and its space is of uint8: fractions are cut"
    ):
        fdg.trace(algos.A2C(env=env))


# --- tensors of other libraries ---


class Tensor:
    """Has a dtype unknown to NumPy, as torch's tensors have."""

    shape, dtype = (), "torch.float32"

    def item(self):
        return 0.125


def test_foreign_tensor():
    assert refused(lambda: small(learning_rate=Tensor())).endswith("write learning_rate=0.125")
    typed_state = type("Own", (), {"init": lambda self, key: Tensor(), "iterate": lambda self, s: (s, {})})
    assert "as the Tensor" in refused(lambda: fdg.trace(typed_state()))


# --- settings without effect ---


def dependent():
    """Yields (algorithm, field) for each hyperparameter that another one disables."""
    for name in algos.names("environments"):
        for field in dataclasses.fields(algos.get(name)):
            if (switch := field.metadata.get("only_with", "").partition("=")[0]) and hasattr(
                algos.get(name), switch
            ):
                yield name, field


def test_hyperparameters_without_effect():
    for name, changed in dependent():
        cls = algos.get(name)
        algorithm = object.__new__(cls)
        for field in dataclasses.fields(cls):
            object.__setattr__(algorithm, field.name, field.default)
        switch, _, value = changed.metadata["only_with"].partition("=")
        assert ineffective_field_messages(algorithm) == [], name
        object.__setattr__(algorithm, changed.name, 3)
        object.__setattr__(algorithm, switch, None if value else 0)
        flag, messages = changed.name.replace("_", "-"), ineffective_field_messages(algorithm)
        assert any(f"--{flag} 3 has no effect, for" in line for line in messages), (name, changed.name)
        object.__setattr__(algorithm, switch, value or True)
        messages = ineffective_field_messages(algorithm)
        assert not any(f"--{flag} " in line for line in messages), (name, changed.name)


def test_swept_hyperparameter_without_effect():
    algorithm = small("dqn")
    (text,) = ineffective_field_messages(algorithm, swept=["learning_rate", "rnd_share"])
    assert text == "--sweep rnd_share=... has no effect, for rnd is False: set rnd too, or leave this out"


# --- environment names of other libraries ---


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("gym:CartPole-v1", "'gymnasium:CartPole-v1' or 'CartPole-v1'"),
        ("gymnasium/CartPole-v1", "'gymnasium:CartPole-v1' or 'CartPole-v1'"),
        ("gymnax:Breakout-MinAtar", "'Breakout-MinAtar'"),
        ("brax/ant", "'brax:ant'"),
        ("jumanji.Snake-v1", "'jumanji:Snake-v1'"),
        ("jaxmarl:MPE_simple_spread_v3", "'MPE_simple_spread_v3'"),
    ],
)
def test_environment_prefixes_of_other_libraries(theirs, ours):
    assert f"did you mean {ours}?" in refused(lambda: envs.make(theirs))


def test_library_is_not_a_module_of_environments():
    assert "unknown environment 'jaxmarl:foo'" in refused(lambda: envs.make("jaxmarl:foo"))


def test_wrong_parameter_separator():
    for sign in ("&", ",", ";", " "):
        text = f"CartPole-v1{sign}gravity=9.8"
        assert refused(lambda text=text: envs.parse(text)).endswith("write 'CartPole-v1?gravity=9.8'")
    assert refused(lambda: envs.parse("CartPole-v1?gravity")).endswith("write CartPole-v1?gravity=VALUE")
