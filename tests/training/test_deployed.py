"""Policies speak what the environment's own library does, whatever its spaces: at work, and as files."""

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
from tests.refusing import refuses
from tests.training.gymnasium_envs import Codes
from tests.training.trained import small

SHAPES = st.lists(st.integers(1, 3), max_size=2).map(tuple)
FLOATS = SHAPES.flatmap(
    lambda shape: st.sampled_from([np.float32, np.float64]).map(
        lambda dtype: spaces.Box(np.full(shape, -3.1, dtype), np.full(shape, 0.1, dtype), dtype=dtype)
    )
)
CATEGORIES = st.one_of(
    st.builds(spaces.Discrete, st.integers(2, 5), start=st.sampled_from([-3, 0, 10, 2**40])),
    SHAPES.map(lambda shape: spaces.MultiDiscrete(np.full((2, *shape), 3), start=np.full((2, *shape), 7))),
    SHAPES.map(lambda shape: spaces.MultiBinary(shape or 2)),
    st.sampled_from([np.int8, np.int32, np.int64]).map(lambda dtype: spaces.Box(-2, 3, (2,), dtype)),
)
SEEN = st.one_of(
    FLOATS,
    CATEGORIES,
    st.sampled_from([spaces.Box(0, 255, (2, 5, 4), np.uint8), spaces.Box(-(2**40), 2**40, (2,), np.int64)]),
)


def in_parts(kinds):
    return st.recursive(
        kinds,
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from("bca"), inner, min_size=1, max_size=2).map(spaces.Dict),
            st.lists(inner, min_size=1, max_size=2).map(spaces.Tuple),
        ),
        max_leaves=4,
    )


class Source(gymnasium_parts.LibrarySource):
    """Of a library that has these spaces."""

    def __init__(self, observed, acting):
        self.name, self._facts = "it", gymnasium_spaces.facts("it", observed, acting, None)

    @property
    def facts(self):
        return self._facts


class Parrot:
    """Acts by a list of actions, and remembers what it sees."""

    def __init__(self, env):
        self.env = env

    def actor(self, actions):
        def act(memory, observation, start, keys, greedy):
            return actions[: len(start)], observation  # of N, the first N

        return algos.Actor(memory=lambda count: (), act=act)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(in_parts(SEEN), st.one_of(in_parts(FLOATS), in_parts(CATEGORIES)), st.integers(0, 99))
def test_any_observation_comes_in_as_in_training_and_any_action_goes_out_as_there(observed, acting, seed):
    """What the workers of training see and do, by NumPy, is what the compiled policy does."""
    source = Source(observed, acting)
    observed.seed(seed)
    ours = source.action_space
    sent = np.stack([np.asarray(ours.sample(key)) for key in jax.random.split(jax.random.key(seed), 3)])
    if isinstance(ours, envs.Box):
        sent[0], sent[1] = ours.low_array, ours.high_array
    policy = Acting(Parrot(host.HostEnvironment(source)), jnp.asarray(sent))
    seen = [observed.sample() for _ in range(3)]
    wanted = gymnasium_spaces.decode(acting, sent)
    found = policy(stack(seen))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    expected = source.unpack(jnp.asarray(source.encode(stack(seen))))
    jax.tree.map(np.testing.assert_array_equal, policy.memory[1], expected)
    one = policy(seen[1])
    assert acting.contains(one), (acting, one)
    jax.tree.map(np.testing.assert_array_equal, one, gymnasium_spaces.select(wanted, 0))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[1]), policy.memory[1], expected)
    assert json.loads(json.dumps(source.native.observation)) and json.dumps(source.native.action)


@pytest.fixture(scope="module")
def run():
    env = envs.make("gymnasium:tests.training.gymnasium_envs:Codes-v0", workers=1)
    algorithm = small("recurrent_ppo", env=env.name, memory_size=8)
    return fdg.Run(algorithm, jax.jit(algorithm.init)(jax.random.key(1)), 0, config={"id": "0123"})


def looked_at(count=7):
    space = Codes.observation_space
    space.seed(4)
    seen = [space.sample() for _ in range(count)]
    for i, one in enumerate(seen):
        one["action_mask"] = np.array([*np.eye(3, dtype=np.int8)[i % 3], *np.eye(2, dtype=np.int8)[i % 2]])
    return seen


def test_a_raw_mask_is_kept_and_codes_are_the_librarys(run):
    for i, one in enumerate(looked_at()):
        action = run.policy(one, start=True)
        assert Codes.action_space.contains(action)
        assert action["go"] == 10 + i % 3 and action["stop"].tolist() == [i % 2]
    action = run.policy(stack(looked_at()))
    assert action["go"].tolist() == [10, 11, 12, 10, 11, 12, 10] and action["go"].dtype == np.int64


def test_a_file_says_and_does_the_same(run, tmp_path):
    policy = fdg.load_exported(run.export(tmp_path / "policy.jax"))
    facts = json.loads((tmp_path / "policy.json").read_text())
    assert facts == policy.facts
    names = [
        "camera",
        "told.0",
        "told.1",
        "observation.start",
        "action_mask",
        "memory_0",
        "memory_1",
        "start",
    ]
    assert sorted(facts["arguments"]) == sorted(names) and facts["arguments"][-3:] == names[-3:]
    assert facts["results"] == ["action.go", "action.stop", "next_memory_0", "next_memory_1"]
    assert facts["observation"]["parts"]["told"]["parts"][0] == {
        "name": "told.0", "shape": ["N"], "dtype": "int64", "jax_dtype": "int32", "kind": "Discrete",
        "n": 3, "start": 5,
    }  # fmt: skip
    assert facts["action"]["parts"]["go"]["start"] == 10 and facts["run"] == "0123"
    seen = stack(looked_at())
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, policy(seen), run.policy(seen))
    one = looked_at()[2]
    jax.tree.map(np.testing.assert_array_equal, policy(one, start=True), run.policy(one, start=True))


@pytest.fixture(scope="module")
def cart(tmp_path_factory):
    algorithm = small(env="CartPole-v1")
    run = fdg.Run(algorithm, jax.jit(algorithm.init)(jax.random.key(1)), 0)
    return {
        "run": run.policy,
        "file": fdg.load_exported(run.export(tmp_path_factory.mktemp("cart") / "policy.jax")),
    }


@pytest.mark.parametrize("kind", ["run", "file"])
def test_no_observations_have_no_actions(cart, run, kind):
    expected = cart[kind](np.zeros((2, 4)))
    actions = cart[kind](np.zeros((0, 4)))
    assert actions.shape == (0,) and actions.dtype == expected.dtype
    np.testing.assert_array_equal(cart[kind](np.zeros((2, 4))), expected)
    none = run.policy(jax.tree.map(lambda x: x[:0], stack(looked_at())))
    assert {name: (x.shape, x.dtype) for name, x in none.items()} == {
        "go": ((0,), np.int64),
        "stop": ((0, 1), np.int8),
    }


@pytest.mark.parametrize("kind", ["run", "file"])
@pytest.mark.parametrize(
    ("observation", "said"),
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
def test_what_is_no_observation_gets_no_action(cart, kind, observation, said):
    with refuses(f"an observation of CartPole-v1 {said}"):
        cart[kind](observation)


@pytest.mark.parametrize(("high", "accepted"), [(1.0, False), (np.inf, True)])
def test_infinity_is_seen_where_the_space_has_it(high, accepted):
    source = Source(spaces.Box(-1.0, high, (2,)), spaces.Discrete(2))
    policy = Acting(Parrot(host.HostEnvironment(source)), jnp.zeros(1, jnp.int32))
    with contextlib.nullcontext() if accepted else refuses("has inf, which is no finite float32"):
        assert policy(np.float32([np.inf, 0])) == 0
    with refuses("has -inf, which is no finite float32"):
        policy(np.float32([-np.inf, 0]))


def test_onnx_takes_observations_as_they_are(run, tmp_path):
    pytest.importorskip("jax2onnx")
    runtime = pytest.importorskip("onnxruntime")
    path = run.export(tmp_path / "policy.onnx")
    session = runtime.InferenceSession(str(path))
    facts = json.loads((tmp_path / "policy.json").read_text())
    assert [one.name for one in session.get_inputs()] == facts["arguments"]
    assert [one.name for one in session.get_outputs()] == facts["results"]
    said = session.get_modelmeta().custom_metadata_map
    assert said["environment"] == run.algorithm.env.name and said["run"] == "0123"
    assert json.loads(said["action"]) == facts["action"] and said["fdg"] == fdg.__version__
    seen = stack(looked_at())
    parts = {"camera": seen["camera"], "told.0": seen["told"][0], "told.1": seen["told"][1]}
    parts |= {"observation.start": seen["start"], "action_mask": seen["action_mask"]}
    start, memory = (
        np.ones(7, bool),
        {leaf["name"]: np.zeros([7, *leaf["shape"][1:]], leaf["dtype"]) for leaf in facts["memory"]},
    )
    run.policy.reset()
    for _ in range(2):
        found = dict(
            zip(facts["results"], session.run(None, {**parts, **memory, "start": start}), strict=True)
        )
        expected = run.policy(seen)
        np.testing.assert_array_equal(found["action.go"], expected["go"])
        np.testing.assert_array_equal(found["action.stop"], expected["stop"])
        assert found["action.go"].dtype == np.int64 and found["action.stop"].dtype == np.int8
        memory = {name.removeprefix("next_"): value for name, value in found.items() if "memory" in name}
        start = np.zeros(7, bool)


def test_the_bounds_of_doubles_are_exact_in_files_too(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    algorithm = small(env="gymnasium:tests.training.gymnasium_envs:Doubles-v0")
    state = jax.jit(algorithm.init)(jax.random.key(1))
    for sign, end in ((1e6, 0.1), (-1e6, -0.1)):
        scaled = jax.tree.map(lambda x, s=sign: x * 0 + s if x.ndim == 1 else x * 0, state.parameters)
        run = fdg.Run(algorithm, state._replace(parameters=scaled), 0)
        action = run.policy(np.zeros(2))
        assert action[0] == end and algorithm.env.source.facts.library_action_space.contains(action)
        exported = fdg.load_exported(run.export(tmp_path / "policy.jax"))
        np.testing.assert_array_equal(exported(np.zeros(2)), action)
    session = runtime.InferenceSession(str(run.export(tmp_path / "policy.onnx")))
    (found,) = session.run(None, {"observation": np.zeros((1, 2))})
    np.testing.assert_array_equal(found[0], action)


def test_files_that_are_in_the_way(run, tmp_path):
    (tmp_path / "config.json").write_text('{"algo": "ppo"}')
    with pytest.raises(FdgError, match=r"its description would replace .*config.json, which does not"):
        run.export(tmp_path / "config.onnx")
    assert (tmp_path / "config.json").read_text() == '{"algo": "ppo"}'
    for name in ("policy.tflite", "policy", "policy.jax.zip"):
        with pytest.raises(FdgError, match=r"an exported policy's file ends in \.jax or \.onnx"):
            run.export(tmp_path / name)
