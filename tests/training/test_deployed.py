"""Policies take observations and return actions of the environment's library, in Python and exported."""

import contextlib
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import algos
import envs
import fdg
from envs import gymnasium_parts, gymnasium_spaces, host
from envs.gymnasium_worker import stack
from fdg.errors import FdgError
from fdg.training.deployed import Acting
from fdg.training.onnx import Output, to_onnx
from tests.refusing import refuses
from tests.training.gymnasium_envs import MixedSpaces
from tests.training.trained import small

SHAPES = st.lists(st.integers(1, 3), max_size=2).map(tuple)
FLOATS = SHAPES.flatmap(
    lambda shape: st.sampled_from([np.float32, np.float64]).map(
        lambda dtype: spaces.Box(np.full(shape, -3.1, dtype), np.full(shape, 0.1, dtype), dtype=dtype)
    )
)
CATEGORICAL = st.one_of(
    st.builds(spaces.Discrete, st.integers(2, 5), start=st.sampled_from([-3, 0, 10, 2**40])),
    SHAPES.map(lambda shape: spaces.MultiDiscrete(np.full((2, *shape), 3), start=np.full((2, *shape), 7))),
    SHAPES.map(lambda shape: spaces.MultiBinary(shape or 2)),
    st.sampled_from([np.int8, np.int32, np.int64]).map(lambda dtype: spaces.Box(-2, 3, (2,), dtype)),
)
OBSERVATIONS = st.one_of(
    FLOATS,
    CATEGORICAL,
    st.sampled_from([spaces.Box(0, 255, (2, 5, 4), np.uint8), spaces.Box(-(2**40), 2**40, (2,), np.int64)]),
)


def nested(kinds):
    return st.recursive(
        kinds,
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from("bca"), inner, min_size=1, max_size=2).map(spaces.Dict),
            st.lists(inner, min_size=1, max_size=2).map(spaces.Tuple),
        ),
        max_leaves=4,
    )


class Source(gymnasium_parts.LibrarySource):
    """An environment source with these library spaces."""

    def __init__(self, observation_space, action_space):
        self.name, self._facts = "it", gymnasium_parts.facts("it", observation_space, action_space, None)

    @property
    def facts(self):
        return self._facts


class Scripted:
    """Returns the given actions; its memory is the observation."""

    def __init__(self, env):
        self.env = env

    def actor(self, actions):
        def act(memory, observation, start, keys, greedy):
            return actions[: len(start)], observation  # the first N of them for a batch of N

        return algos.Actor(memory=lambda count: (), act=act)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(nested(OBSERVATIONS), st.one_of(nested(FLOATS), nested(CATEGORICAL)), st.integers(0, 99))
def test_random_spaces_match_training(observation_space, action_space, seed):
    """Compares the compiled policy with the NumPy encoding and decoding of training's workers."""
    source = Source(observation_space, action_space)
    observation_space.seed(seed)
    space = source.action_space
    encoded = np.stack([np.asarray(space.sample(key)) for key in jax.random.split(jax.random.key(seed), 3)])
    if isinstance(space, envs.Box):
        encoded[0], encoded[1] = space.low_array, space.high_array
    policy = Acting(Scripted(host.HostEnvironment(source)), jnp.asarray(encoded))
    seen = [observation_space.sample() for _ in range(3)]
    expected_actions = gymnasium_spaces.decode(action_space, encoded)
    actions = policy(stack(seen))
    jax.tree.map(np.testing.assert_array_equal, actions, expected_actions)
    expected = source.unpack(jnp.asarray(source.encode(stack(seen))))
    jax.tree.map(np.testing.assert_array_equal, policy.memory[1], expected)
    one = policy(seen[1])
    assert action_space.contains(one), (action_space, one)
    jax.tree.map(np.testing.assert_array_equal, one, gymnasium_spaces.select(expected_actions, 0))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[1]), policy.memory[1], expected)
    assert json.loads(json.dumps(source.native.observation)) and json.dumps(source.native.action)


class Choices(envs.Wrapper):
    """Choices in place of forces."""

    action_space = envs.Discrete(3)

    def step(self, keys, state, action):
        return super().step(keys, state, action[:, None] - 1.0)


class Sums(envs.Wrapper):
    """Sums of the library's observations."""

    observation_space = envs.Box(-8.0, 8.0, (1,))

    def reset(self, keys):
        state, observation = super().reset(keys)
        return state, jnp.sum(observation, axis=1, keepdims=True)


@pytest.mark.parametrize(("wrapper", "size", "action"), [(Choices, 4, [2]), (Sums, 1, [[0.5]])])
def test_wrapper_that_changes_spaces(wrapper, size, action):
    """Only the wrapper can convert from and to the library's, so the policy takes and gives the wrapper's."""
    source = Source(spaces.Box(-2, 2, (4,)), spaces.Box(-1, 1, (1,)))
    policy = Acting(Scripted(wrapper(host.HostEnvironment(source))), jnp.array(action))
    assert policy(np.ones((1, size))).tolist() == action
    np.testing.assert_array_equal(policy.memory[1], np.ones((1, size)))


@pytest.fixture(scope="module")
def run():
    env = envs.make("gymnasium:tests.training.gymnasium_envs:MixedSpaces-v0", workers=1)
    algorithm = small("recurrent_ppo", env=env.name, memory_size=8)
    return fdg.Run(algorithm, jax.jit(algorithm.init)(jax.random.key(1)), 0, config={"id": "0123"})


def sample_observations(count=7):
    space = MixedSpaces.observation_space
    space.seed(4)
    seen = [space.sample() for _ in range(count)]
    for i, one in enumerate(seen):
        one["action_mask"] = np.array([*np.eye(3, dtype=np.int8)[i % 3], *np.eye(2, dtype=np.int8)[i % 2]])
    return seen


def test_mask_and_library_actions(run):
    for i, one in enumerate(sample_observations()):
        action = run.policy(one, start=True)
        assert MixedSpaces.action_space.contains(action)
        assert action["go"] == 10 + i % 3 and action["stop"].tolist() == [i % 2]
    action = run.policy(stack(sample_observations()))
    assert action["go"].tolist() == [10, 11, 12, 10, 11, 12, 10] and action["go"].dtype == np.int64


def test_exported_policy_matches(run, tmp_path):
    policy = fdg.load_exported(run.export(tmp_path / "policy.jax"))
    facts = json.loads((tmp_path / "policy.json").read_text())
    assert facts == policy.facts
    names = [
        "camera",
        "tuple.0",
        "tuple.1",
        "observation.start",
        "action_mask",
        "memory_0",
        "memory_1",
        "start",
    ]
    assert sorted(facts["arguments"]) == sorted(names) and facts["arguments"][-3:] == names[-3:]
    assert facts["results"] == ["action.go", "action.stop", "next_memory_0", "next_memory_1"]
    assert facts["observation"]["parts"]["tuple"]["parts"][0] == {
        "name": "tuple.0", "shape": ["N"], "dtype": "int64", "jax_dtype": "int32", "kind": "Discrete",
        "n": 3, "start": 5,
    }  # fmt: skip
    assert facts["action"]["parts"]["go"]["start"] == 10 and facts["run"] == "0123"
    seen = stack(sample_observations())
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, policy(seen), run.policy(seen))
    one = sample_observations()[2]
    jax.tree.map(np.testing.assert_array_equal, policy(one, start=True), run.policy(one, start=True))


class Still:
    """Takes the first action of each choice."""

    steps_per_iteration = 1

    def __init__(self, env):
        self.env = env

    def actor(self, state):
        def act(memory, observation, start, keys, greedy):
            return jnp.zeros((start.shape[0], 2), jnp.int32), memory

        return algos.Actor(memory=lambda count: (), act=act)


def test_exported_policy_keeps_integer_keys(tmp_path):
    """JSON has no integers as keys."""
    parts = spaces.Dict({0: spaces.Discrete(3), 1: spaces.Box(0, 1, (2,))})
    actions = spaces.Dict({0: spaces.Discrete(3), 1: spaces.Discrete(2, start=4)})
    run = fdg.Run(Still(host.HostEnvironment(Source(parts, actions))), {}, 0)
    policy = fdg.load_exported(run.export(tmp_path / "policy.jax"))
    for act in (run.policy, policy):
        assert act(parts.sample()) == {0: 0, 1: 4}


@pytest.fixture(scope="module")
def cartpole_policies(tmp_path_factory):
    algorithm = small(env="CartPole-v1")
    run = fdg.Run(algorithm, jax.jit(algorithm.init)(jax.random.key(1)), 0)
    return {
        "run": run.policy,
        "file": fdg.load_exported(run.export(tmp_path_factory.mktemp("cart") / "policy.jax")),
    }


@pytest.mark.parametrize("kind", ["run", "file"])
def test_empty_batch(cartpole_policies, run, kind):
    expected = cartpole_policies[kind](np.zeros((2, 4)))
    actions = cartpole_policies[kind](np.zeros((0, 4)))
    assert actions.shape == (0,) and actions.dtype == expected.dtype
    np.testing.assert_array_equal(cartpole_policies[kind](np.zeros((2, 4))), expected)
    none = run.policy(jax.tree.map(lambda x: x[:0], stack(sample_observations())))
    assert {name: (x.shape, x.dtype) for name, x in none.items()} == {
        "go": ((0,), np.int64),
        "stop": ((0, 1), np.int8),
    }


@pytest.mark.parametrize("kind", ["run", "file"])
@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (np.zeros(4, complex), "is an array [4], not "),
        ([None] * 4, "is an array [4], not [None, None, None, None]"),
        (["1", "2", "3", "4"], "is an array [4], not "),
        (np.zeros(4, "m8[s]"), "is an array [4], not "),
        ([0, 0, 1e300, 0], "has 1e+300, which is no finite float32: give only numbers that are in its space"),
        ([[0, 0, 0, 0], [0, math.nan, 0, 0]], "has nan, which is no finite float32"),
        (np.full(4, np.nan, object), "has nan, which is no finite float32"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_invalid_observation_is_refused(cartpole_policies, kind, observation, message):
    with refuses(f"an observation of CartPole-v1 {message}"):
        cartpole_policies[kind](observation)


@pytest.mark.parametrize(("high", "accepted"), [(1.0, False), (np.inf, True)])
def test_infinity_is_accepted_if_in_the_space(high, accepted):
    source = Source(spaces.Box(-1.0, high, (2,)), spaces.Discrete(2))
    policy = Acting(Scripted(host.HostEnvironment(source)), jnp.zeros(1, jnp.int32))
    with contextlib.nullcontext() if accepted else refuses("has inf, which is no finite float32"):
        assert policy(np.float32([np.inf, 0])) == 0
    with refuses("has -inf, which is no finite float32"):
        policy(np.float32([-np.inf, 0]))


def test_onnx_conversion_restores_jax_functions():
    before = {name: value for name, value in vars(jnp).items() if callable(value)}
    names = [("x", "float32")], [Output("y", "float32", "float32")], {}
    to_onnx(lambda x: [jnp.cumsum(x) * 2], [jax.ShapeDtypeStruct((3,), jnp.float32)], "cumulated", *names)
    after = {name: value for name, value in vars(jnp).items() if name in before}
    assert {name for name in before if after[name] is not before[name]} == set()
    np.testing.assert_array_equal(jnp.cumsum(jnp.ones((2, 2)), 0), [[1, 1], [2, 2]])


def test_onnx_takes_raw_observations(run, tmp_path):
    pytest.importorskip("jax2onnx")
    runtime = pytest.importorskip("onnxruntime")
    path = run.export(tmp_path / "policy.onnx")
    session = runtime.InferenceSession(str(path))
    facts = json.loads((tmp_path / "policy.json").read_text())
    assert [one.name for one in session.get_inputs()] == facts["arguments"]
    assert [one.name for one in session.get_outputs()] == facts["results"]
    info = session.get_modelmeta().custom_metadata_map
    assert info["environment"] == run.algorithm.env.name and info["run"] == "0123"
    assert json.loads(info["action"]) == facts["action"] and info["fdg"] == fdg.__version__
    seen = stack(sample_observations())
    parts = {"camera": seen["camera"], "tuple.0": seen["tuple"][0], "tuple.1": seen["tuple"][1]}
    parts |= {"observation.start": seen["start"], "action_mask": seen["action_mask"]}
    start, memory = (
        np.ones(7, bool),
        {leaf["name"]: np.zeros([7, *leaf["shape"][1:]], leaf["dtype"]) for leaf in facts["memory"]},
    )
    run.policy.reset()
    for _ in range(2):
        results = dict(
            zip(facts["results"], session.run(None, {**parts, **memory, "start": start}), strict=True)
        )
        expected = run.policy(seen)
        np.testing.assert_array_equal(results["action.go"], expected["go"])
        np.testing.assert_array_equal(results["action.stop"], expected["stop"])
        assert results["action.go"].dtype == np.int64 and results["action.stop"].dtype == np.int8
        memory = {name.removeprefix("next_"): value for name, value in results.items() if "memory" in name}
        start = np.zeros(7, bool)


def test_exported_float64_bounds_are_exact(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    algorithm = small(env="gymnasium:tests.training.gymnasium_envs:Float64Bounds-v0")
    state = jax.jit(algorithm.init)(jax.random.key(1))
    for sign, end in ((1e6, 0.1), (-1e6, -0.1)):
        scaled = jax.tree.map(lambda x, s=sign: x * 0 + s if x.ndim == 1 else x * 0, state.parameters)
        run = fdg.Run(algorithm, state._replace(parameters=scaled), 0)
        action = run.policy(np.zeros(2))
        assert action[0] == end and algorithm.env.source.facts.library_action_space.contains(action)
        exported = fdg.load_exported(run.export(tmp_path / "policy.jax"))
        np.testing.assert_array_equal(exported(np.zeros(2)), action)
    session = runtime.InferenceSession(str(run.export(tmp_path / "policy.onnx")))
    (actions,) = session.run(None, {"observation": np.zeros((1, 2))})
    np.testing.assert_array_equal(actions[0], action)


def test_export_does_not_overwrite(run, tmp_path):
    (tmp_path / "config.json").write_text('{"algo": "ppo"}')
    with pytest.raises(
        FdgError, match=r"would be written to .*config.json, which exists and is no such description"
    ):
        run.export(tmp_path / "config.onnx")
    assert (tmp_path / "config.json").read_text() == '{"algo": "ppo"}'
    for name in ("policy.tflite", "policy", "policy.jax.zip"):
        with pytest.raises(FdgError, match=r"an exported policy's file ends in \.jax or \.onnx"):
            run.export(tmp_path / name)
