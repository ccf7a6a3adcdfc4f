import subprocess
import sys
import types

import jax
import pytest

import algos
import envs
from envs import from_brax, from_gymnax, from_jaxmarl, from_playground, probe, registry
from fdg.errors import FdgError, UnknownNameError
from tests.refusing import refuses


@pytest.fixture
def empty_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def test_environments_are_values():
    for name in envs.names():
        one, other = envs.make(name), envs.make(name)
        assert one == other and hash(one) == hash(other) and one.name == name, name


def test_names_of_all_sources():
    of_sources = [name for source in registry.SOURCES for name in source.factories()]
    assert sorted(envs.names()) == sorted(of_sources) and len(set(of_sources)) == len(of_sources)
    assert {from_gymnax, from_brax, from_jaxmarl, probe} < set(registry.SOURCES)
    assert len(from_gymnax.NAMES) == 26


def test_overrides_are_part_of_the_value():
    short = envs.make("CartPole-v1", max_steps_in_episode=20)
    assert short.max_episode_steps == 20
    assert short == envs.make("CartPole-v1", max_steps_in_episode=20)
    assert short != envs.make("CartPole-v1")
    assert envs.make("CartPole-v1", tau=0.01, gravity=9) == envs.make("CartPole-v1", gravity=9.0, tau=0.01)
    assert "max_steps_in_episode" in repr(short)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(
        UnknownNameError, match=r"unknown environment 'CartPole': did you mean 'CartPole-v1'\?"
    ):
        envs.make("CartPole")
    with pytest.raises(UnknownNameError, match="did you mean 'probe:discount'"):
        envs.make("probe:discont")
    with pytest.raises(UnknownNameError, match="did you mean 'gymnasium:Hopper-v4' or 'envpool:Hopper-v4'"):
        envs.make("Hopper-v4")


EVERY_SOURCE = "CartPole-v1", "probe:value", "text:sorting", "gymnasium:CartPole-v1", "codesign:w1"


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (
            "CartPole-v1",
            {"max_steps": 3},
            "unknown parameter 'max_steps': takes force_mag, gravity, .*max_steps_in_e",
        ),
        (
            "CartPole-v1",
            {"max_steps_in_episode": 0},
            "max_steps_in_episode=0 must be an integer of at least 1",
        ),
        ("probe:agents", {"delay": -1}, "delay=-1 must be an integer of at least 0"),
        ("CartPole-v1", {"max_steps_in_episode": "20"}, "max_steps_in_episode='20' must be an integer"),
        ("CartPole-v1", {"max_steps_in_episode": True}, "must be an integer"),
        ("CartPole-v1", {"gravity": jax.numpy.float32}, "must be a Python number, string or tuple"),
        (
            "FrozenLake-misc",
            {"map_name": "9x9"},
            "gymnax does not accept map_name='9x9': map_name must be '4x4' or",
        ),
        ("probe:memory", {"length": 3}, "unknown parameter 'length': takes delay"),
        ("probe:value", {"length": 3}, "unknown parameter 'length': takes no parameters"),
        *(
            (name, {"seed": 3}, "no parameter 'seed': it is a setting of the run: fdg.fit")
            for name in EVERY_SOURCE
        ),
        *((name, {"n_envs": 8}, "no parameter 'n_envs': .*num_envs=8") for name in EVERY_SOURCE),
        ("probe:memory", {"delay": 0}, "delay=0 must be an integer of at least 1"),
        (
            "brax:ant",
            {"backend": "sprin"},
            "backend='sprin' must be one of generalized, positional, spring, mjx",
        ),
        ("brax:ant:mjx", {"backend": "spring"}, "backend='spring' must be one of mjx"),
        ("brax:swimmer", {"backend": "spring"}, "backend='spring' must be one of generalized"),
        ("brax:ant", {"episode_length": 0}, "episode_length=0 must be an integer of at least 1"),
        (
            "brax:ant",
            {"legs": 6},
            "unknown parameter 'legs': takes backend, contact_cost_weight, .*n_frames, rep",
        ),
        ("brax:ant", {"n_frames": jax.numpy.float32}, "must be a Python number, string or tuple"),
        ("brax:fast", {"asymmetric_obs": True}, "brax does not accept asymmetric_obs=True: .* dictionary"),
        (
            "MPE_simple_spread_v3",
            {"agents": 3},
            "unknown parameter 'agents': takes action_type, agent_identity, .*num_",
        ),
        ("MPE_simple_spread_v3", {"max_steps": 0}, "max_steps=0 must be an integer of at least 1"),
        ("MPE_simple_spread_v3", {"num_agents": (3,)}, "must be a Python number or string"),
        ("MPE_simple_spread_v3", {"action_type": "discrete"}, "must be 'Discrete' or 'Continuous'"),
        (
            "MPE_simple_reference_v3",
            {"num_agents": 3},
            "JaxMARL does not accept num_agents=3: .*only supports 2",
        ),
        ("MPE_simple_facmac_3a_v1", {"max_steps": 3}, "unknown parameter 'max_steps': takes agent_identity"),
        ("HeuristicEnemySMAX", {"steps": 3}, "unknown parameter 'steps': takes .*agent_identity, .*map, "),
        ("HeuristicEnemySMAX", {"max_steps": 0}, "max_steps=0 must be an integer of at least 1"),
        ("hanabi", {"shaping": 1}, "shaping=1 must be a number, for overcooked or overcooked_v2"),
        ("storm", {"num_agents": (3,)}, "must be a Python number or string"),
        ("ant_4x2", {"backend": "rigid"}, "backend='rigid' must be one of positional"),
        ("ant_4x2", {"foo": 1}, "unknown parameter 'foo': takes backend, episode_length"),
        ("ant_4x2", {"episode_length": 0}, "episode_length=0 must be an integer of at least 1"),
        ("Craftax-Symbolic-v1", {"lives": 3}, "unknown parameter 'lives': takes .*reset_ratio"),
        ("Craftax-Symbolic-v1", {"max_timesteps": 0}, "max_timesteps=0 must be an integer of at least 1"),
        ("Craftax-Symbolic-v1", {"day_length": "long"}, "day_length='long' must be an integer"),
        ("Craftax-Symbolic-v1", {"reset_ratio": 0}, "reset_ratio=0 must be an integer of at least 1"),
        ("playground:CheetahRun", {"steps": 3}, "unknown parameter 'steps': takes ctrl_dt, .*sim_dt"),
        ("playground:CheetahRun", {"action_repeat": 0}, "ActionRepeat: times=0 must be an integer"),
        ("playground:CheetahRun", {"episode_length": 1.5}, "episode_length=1.5 must be an integer"),
        ("octax:brix", {"lives": 3}, "unknown parameter 'lives': takes fps, frame_skip"),
        ("octax:brix", {"fps": 0}, "fps=0 must be an integer of at least 1"),
        ("jumanji:Snake-v1", {"lives": 3}, "unknown parameter 'lives': takes num_cols, num_rows, time_limit"),
        ("jumanji:Snake-v1", {"num_rows": (3,)}, r"num_rows=\(3,\) must be a Python number or string"),
    ],
)
def test_invalid_overrides_are_refused(name, overrides, message):
    if name.startswith("playground:"):
        pytest.importorskip("mujoco_playground")
    with pytest.raises(FdgError, match=f"environment '{name}': .*{message}"):
        envs.make(name, **overrides).observation_space.shape  # noqa: B018 constructor arguments are checked here


@pytest.fixture
def playground(monkeypatch):
    """A stub of MuJoCo Playground with the configuration of a task."""
    config = {"ctrl_dt": 0.01, "sim_dt": 0.01, "episode_length": 1000, "impl": "jax", "njmax": 100}
    suite = types.SimpleNamespace(get_default_config=lambda task: config)
    package = types.SimpleNamespace(dm_control_suite=suite)
    monkeypatch.setitem(sys.modules, "mujoco_playground", types.SimpleNamespace(_src=package))
    monkeypatch.setitem(sys.modules, "mujoco_playground._src", package)
    from_playground._suite.cache_clear()
    yield
    from_playground._suite.cache_clear()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"ctrl_dt": 0.0}, "ctrl_dt=0.0 must be a finite number above zero"),
        ({"sim_dt": 0}, "sim_dt=0.0 must be a finite number above zero"),
        ({"sim_dt": float("inf")}, "sim_dt=inf must be a finite number above zero"),
        ({"ctrl_dt": 0.004}, "ctrl_dt=0.004 must be at least sim_dt=0.01"),
        ({"impl": "warp"}, "impl='warp' must be 'jax'"),
        ({"impl": 1}, "impl=1 must be a string"),
        (
            {"njmax": 1},
            "unknown parameter 'njmax': takes ctrl_dt, episode_length, impl, repeat_start, sim_dt",
        ),
    ],
)
def test_parameters_that_playground_cannot_step_are_refused(playground, overrides, message):
    with refuses(f"environment 'playground:CheetahRun': {message}"):
        envs.make("playground:CheetahRun", **overrides)


def test_parameters_of_playground(playground):
    env = envs.make("playground:CheetahRun", ctrl_dt=1, impl="jax")
    assert env == envs.make("playground:CheetahRun", impl="jax", ctrl_dt=1.0)
    assert env != envs.make("playground:CheetahRun")


@pytest.mark.parametrize("text", ["hanabi?hand_size=0", "MPE_simple_spread_v3?num_agents=0"])
def test_parameters_that_a_library_fails_for_are_named(text):
    name, parameters = envs.parse(text)
    env = envs.make(name, **parameters)
    with refuses(
        f"environment '{text}': its observation_space cannot be read", ": change its parameters, or"
    ):
        algos.IPPO(env=env)


def test_register(empty_registry):
    envs.register("recall", lambda delay=8: envs.vectorize(probe.Memory(delay)))
    assert "recall" in envs.names()
    assert envs.make("recall", delay=2) == envs.make("probe:memory", delay=2)
    with refuses("environment 'recall': unknown parameter 'steps': takes delay"):
        envs.make("recall", steps=2)
    envs.register("recall", lambda: envs.make("probe:value"))
    assert envs.make("recall") == envs.make("probe:value")
    with pytest.raises(FdgError, match="'CartPole-v1' is built in and cannot be replaced"):
        envs.register("CartPole-v1", lambda: envs.make("probe:value"))


def test_make_starts_no_backend_and_tracing_allocates_nothing():
    # In a new process: this one has loaded gymnax and the backend.
    script = """
import gc, jax, sys
from jax._src import xla_bridge
sys.modules["envpool"] = sys.modules["gymnasium"] = None  # as if not installed: nothing needs them
import fdg, envs, algos
del sys.modules["envpool"], sys.modules["gymnasium"]
all_envs = [envs.make(name) for name in envs.names()]
assert not {"gymnax", "brax", "jaxmarl"} & sys.modules.keys() and not xla_bridge.backends_are_initialized()
for env in all_envs:
    if env.name not in ("CartPole-v1", "Acrobot-v1", "Pong-misc", "FourRooms-misc", "FrozenLake-misc"):
        continue
    def first_step(key):
        keys = jax.random.split(key, 2)
        state, _ = env.reset(keys)
        return env.step(keys, state, jax.vmap(env.action_space.sample)(keys))
    jax.eval_shape(first_step, jax.eval_shape(lambda: jax.random.key(0)))
# JAX caches a few scalars of eager random calls; every array of an environment has an axis.
assert not [a for a in jax.live_arrays() if a.ndim], jax.live_arrays()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
