"""User environments with the interfaces of gymnax, brax, Jumanji and Gymnasium; errors for others."""

import types

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from envs import host
from envs.foreign import make_and_adapt
from fdg.errors import FdgError
from tests.envs import thermostat
from tests.envs.conformance import assert_conforms
from tests.lazy_module import LazyModule
from tests.refusing import refuses

HERE, HOST = "tests.envs.foreign_envs", "tests.envs.thermostat"
gymnax, theirs = LazyModule("gymnax"), LazyModule(HERE)


def repeat_action(env, action, steps=4):
    """`(reward, terminated, truncated)` of one instance at each step."""
    keys = jax.random.split(jax.random.key(0), 2)
    state, _ = env.reset(keys)
    found = []
    for _ in range(steps):
        state, step = env.step(keys, state, jnp.full((2, *env.action_space.shape), action))
        found.append((step.reward[0].item(), step.terminated[0].item(), step.truncated[0].item()))
    return found


EXPECTED = [(1.0, False, False), (2.0, False, False), (3.0, True, False), (1.0, False, False)]


def test_playground_class_keeps_its_time_limit():
    base = type("MjxEnv", (), {"__module__": "mujoco_playground._src.mjx_env"})
    kind = type("Mine", (base, theirs.BraxLine), {"_config": types.SimpleNamespace(episode_length=33)})
    assert envs.vectorize(kind()).max_episode_steps == 33


@pytest.mark.parametrize("name", ["Line", "BraxLine", "JumanjiLine"])
def test_jax_interfaces_by_value_and_by_name(name):
    value = envs.vectorize(getattr(theirs, name)())
    by_name = envs.make(f"{HERE}:{name}")
    assert repeat_action(value, 1) == repeat_action(by_name, 1) == EXPECTED
    assert by_name == envs.make(f"{HERE}:{name}") and envs.name_with_parameters(by_name) == f"{HERE}:{name}"
    assert_conforms(by_name)


def test_values_that_are_equal_but_differ_in_type():
    """`make` keeps the environments that it makes, by their parameters."""
    made = [make_and_adapt(theirs.Line, {"step_length": value}) for value in (1, 1.0)]
    assert made[0] is not made[1] and made[0] is make_and_adapt(theirs.Line, {"step_length": 1})


class OwnLine(envs.SingleEnvironment):
    """A class of fdg whose attributes have the names of other libraries' wrappers."""

    default_params, unwrapped = 1.0, 2.0
    observation_space, action_space = envs.Box(-1.0, 1.0, (1,)), envs.Discrete(2)

    def reset(self, key):
        return (), jnp.zeros(1)

    def step(self, key, state, action):
        return state, jnp.zeros(1), jnp.float32(1), jnp.bool_(True), jnp.bool_(False)


def test_attributes_of_own_classes_may_have_names_of_wrappers():
    assert_conforms(envs.vectorize(OwnLine()))


def test_parameters_of_class_and_interface():
    env = envs.make(f"{HERE}:Line", step_length=2.0, goal=8, max_steps_in_episode=2)
    assert repeat_action(env, 1) == [(2.0, False, False), (4.0, False, True)] * 2
    assert env == envs.make(f"{HERE}:Line", goal=8, max_steps_in_episode=2, step_length=2.0)
    assert envs.make(f"{HERE}:BraxLine", episode_length=7).max_episode_steps == 7
    line = envs.make(f"{HERE}:make_line")
    assert line == envs.make(f"{HERE}:make_line") and repeat_action(line, 1, 1) == [(2.0, False, False)]
    for name in ("Line", "make_line"):
        with pytest.raises(FdgError, match="unknown parameter 'gaol': takes goal, max_steps_in_episode"):
            envs.make(f"{HERE}:{name}", gaol=8)
    for name, takes in (("BraxLine", "takes episode_length"), ("JumanjiLine", "takes no parameters")):
        with refuses(f"unknown parameter 'gaol': {takes}"):
            envs.make(f"{HERE}:{name}", gaol=8)
    with refuses("environment 'BraxLine': episode_length=0 must be an integer of at least 1"):
        envs.make(f"{HERE}:BraxLine", episode_length=0)
    with refuses("unknown parameter of make_sized 'sise': did you mean 'size'?"):
        envs.make(f"{HERE}:make_sized", sise=3)
    assert envs.make(f"{HERE}:make_line", max_steps_in_episode=5).max_episode_steps == 5
    assert repeat_action(envs.vectorize(gymnax.make("CartPole-v1")[0]), 1, 2) == [(1.0, False, False)] * 2


def test_gymnax_actions_with_parts():
    env = envs.make(f"{HERE}:PartedLine")
    assert env == envs.make(f"{HERE}:PartedLine") and repeat_action(env, 1) == EXPECTED
    assert env.action_space == envs.vectorize(theirs.PartedLine()).action_space == envs.MultiDiscrete((2,))


def test_integer_actions_and_images_of_gymnax():
    env = envs.make(f"{HERE}:IntegerLine")
    assert env.action_space == envs.MultiDiscrete((3, 3))
    assert env.observation_space == envs.Box(0.0, 255.0, (36, 36, 3), "uint8")
    assert repeat_action(env, 2, 2) == [(2.0, False, False), (4.0, True, False)]
    assert_conforms(env)


def test_limits_of_gymnax_spaces():
    env = envs.make(f"{HERE}:OwnLine")
    assert env.action_space == envs.Box(0.0, (1.0, 2.0), (2,))
    assert env.observation_space == envs.Box(-np.inf, np.inf, (1,))


def test_array_as_gymnax_parameter():
    env = envs.make(f"{HERE}:PartedLine", origin=(2,))
    assert env == envs.make(f"{HERE}:PartedLine", origin=(2,))
    assert env.reset(jax.random.split(jax.random.key(0), 2))[1].tolist() == [[2.0], [2.0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"goal": "far"}, "environment 'Line': goal='far' must be a number"),
        ({"max_steps_in_episode": 2.5}, "max_steps_in_episode=2.5 must be an integer"),
        ({"max_steps_in_episode": 0}, "max_steps_in_episode=0 must be an integer of at least 1"),
    ],
)
def test_types_of_gymnax_parameters(options, message):
    with pytest.raises(FdgError, match=message):
        envs.make(f"{HERE}:Line", **options)


def test_actions_of_jumanji_specs():
    """Integers from -1 to 1, and floats without bounds, in an array of shape (1, 2)."""
    integers, floats = envs.make(f"{HERE}:JumanjiSum"), envs.make(f"{HERE}:JumanjiSum", floats=True)
    assert integers.action_space == envs.MultiDiscrete((3, 3))
    assert floats.action_space == envs.Box(-np.inf, np.inf, (2,))
    assert repeat_action(integers, 2, 2) == [(2.0, False, False), (4.0, True, False)]
    assert repeat_action(integers, 0, 1) == [(-2.0, False, False)] == repeat_action(floats, -1.0, 1)
    with pytest.raises(FdgError, match="'JumanjiSum': integer actions without bounds"):
        envs.make(f"{HERE}:JumanjiSum", bounds=False)


def test_jumanji_observation_of_chex():
    env = envs.make(f"{HERE}:JumanjiMasked")
    assert env.action_space == envs.Discrete(2) and repeat_action(env, 1, 1) == [(1.0, False, False)]
    _, observation = env.reset(jax.random.split(jax.random.key(0), 2))
    assert observation.observation.shape == (2, 1) and observation.action_mask.tolist() == [[False, True]] * 2


def test_unregistered_gymnasium_class():
    """A class and a function, with their own parameters, those of `gymnasium.make` and those of fdg."""
    for name, steps in [("Thermostat", 3), ("make_thermostat", 2)]:
        env = envs.make(f"{HOST}:{name}", workers=1, info="is_success")
        assert env == envs.make(f"gymnasium:{HOST}:{name}", workers=1, info="is_success")
        keys = jax.random.split(jax.random.key(0), 2)
        state, _ = env.reset(keys)
        for i in range(1, steps + 1):
            state, step = env.step(keys, state, jnp.ones(2, jnp.int32))
            assert step.reward.tolist() == [i] * 2 and step.terminated.tolist() == [i == steps] * 2
        assert step.episode_info["is_success"].tolist() == [1.0, 1.0]
    with refuses("unknown parameter of make_thermostat 'gaol': did you mean 'goal'?"):
        envs.make(f"{HOST}:make_thermostat", workers=1, gaol=8)
    limited = envs.make(f"{HOST}:Thermostat", goal=99.0, max_episode_steps=2)
    assert limited.max_episode_steps == 2 and dict(limited.source.options)["goal"] == 99.0
    assert envs.trust_reason(limited.name, {}) == f"imports the module {HOST}"
    assert np.isfinite(limited.observation_space.high_array).all()
    host.close()


@pytest.mark.parametrize("name", ["make_partial", "make_lambda"])
def test_gymnasium_factory_without_own_name(name):
    env = envs.make(f"{HOST}:{name}", workers=1)
    assert env == envs.make(f"gymnasium:{HOST}:{name}", workers=1)
    keys = jax.random.split(jax.random.key(0), 1)
    _, step = env.step(keys, env.reset(keys)[0], jnp.ones(1, jnp.int32))
    assert step.terminated.all()
    host.close()


def class_in_main():
    """A class that is defined in a script."""
    return type("Boiler", (thermostat.Thermostat,), {"__module__": "__main__"})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: algos.PPO(env=theirs.Line()), r"is one instance: write envs.vectorize\(Line\(\)\)"),
        (lambda: envs.vectorize(theirs.BraxLine), r"is a class.*write envs.vectorize\(BraxLine\(\)\)"),
        (lambda: envs.make(theirs.JumanjiLine()), "a SingleEnvironment to envs.vectorize"),
        (
            lambda: envs.make(thermostat.Thermostat),
            rf"write envs.make\('{HOST}:Thermostat'\); worker processes",
        ),
        (lambda: envs.vectorize(thermostat.Thermostat()), rf"write envs.make\('{HOST}:Thermostat'\)"),
        (lambda: algos.PPO(env=gymnasium.make("CartPole-v1")), r"write envs.make\('gymnasium:CartPole-v1'\)"),
        (
            lambda: envs.vectorize(class_in_main()()),
            r"its own file, such as boiler.py.*envs.make\('boiler:Boiler'\)",
        ),
        (lambda: envs.make(f"{HOST}:thermostat"), rf"write envs.make\('{HOST}:Thermostat'\)"),
        (lambda: envs.make("gymnasium:Thermo-v0"), "registers it, write gymnasium:MODULE:Thermo-v0"),
        (
            lambda: envs.vectorize(theirs.Pair(2)),
            "of JaxMARL: write a class with the methods of envs.SingleEnv",
        ),
        (lambda: envs.make(f"{HERE}:Suite"), "of dm_env: wrap it as a gymnasium.Env"),
        (
            lambda: envs.vectorize(theirs.LogWrapper(theirs.Line())),
            "is a wrapper of gymnax's: give the environment within it",
        ),
    ],
)
def test_errors_name_the_fix(call, message):
    with refuses(match=message):
        call()
