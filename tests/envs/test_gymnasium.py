"""Gymnasium's environments: the contract, spaces, and equality with stepping Gymnasium directly."""

import gymnasium
import jax
import numpy as np
import pytest

import envs
from algos.rollout import rollout
from envs import from_gymnasium, gymnasium_codec, gymnasium_parts, gymnasium_spaces, host, native
from envs.spaces import Box, Discrete, MultiDiscrete
from fdg.errors import FdgError
from tests.envs.conformance import COMPILE_FAST, assert_conforms

STEPS, NUM_ENVS = 60, 3


@pytest.fixture(autouse=True)
def _close_pools():
    yield
    host.close()


def random_rollout(env):
    """Random actions by `algos.rollout`: seeds, first observation, actions `[T, B]`, a `TimeStep [T, B]`."""
    keys = jax.random.split(jax.random.key(5), NUM_ENVS)

    def program(keys):
        state, observation = env.reset(keys)
        _, _, ((_, actions), _, step) = rollout(
            act=lambda observation, keys: (jax.vmap(env.action_space.sample)(keys), ()),
            step=env.step, key=jax.random.key(6), env_state=state, observation=observation, num_steps=STEPS,
        )  # fmt: skip
        return host._seeds(keys), observation, actions, step

    return jax.tree.map(np.asarray, jax.jit(program, compiler_options=COMPILE_FAST)(keys))


@pytest.mark.parametrize(("name", "limit"), [("CartPole-v1", 18), ("Pendulum-v1", 7)])
def test_conforms(name, limit):
    rollout = assert_conforms(envs.make(f"gymnasium:{name}", max_episode_steps=limit, workers=2))
    assert rollout.step.truncated.any() and rollout.step.terminated.any() == (name == "CartPole-v1")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("NoSuch-v0", {}, "environment 'gymnasium:NoSuch-v0' cannot be made: NameNotFound: .*NoSuch"),
        ("CartPole-v9", {}, "VersionNotFound.*: write gymnasium:CartPole-v1; if a module registers it"),
        ("no_such_package:Mine-v0", {}, "cannot be made: ModuleNotFoundError"),
        ("CartPole-v1", {"gravity": 3}, "with gravity=3 cannot be made: TypeError"),
        ("CartPole-v1", {"max_episode_steps": {3}}, "must be a Python number, string or tuple"),
    ],
)
def test_errors_of_gymnasium_are_reported(name, options, message):
    with pytest.raises(FdgError, match=message):
        envs.make(f"gymnasium:{name}", **options)


def test_parameter_may_be_none():
    env = envs.make("gymnasium:CartPole-v1", max_episode_steps=None)
    assert env.observation_space.shape == (4,)


@pytest.mark.parametrize(
    ("desc", "cells"), [(("SF", "FG"), 4), ([["S", "F"], ["F", "G"]], 4), ((["S"], ["G"]), 2), (None, 64)]
)
def test_parameter_annotated_as_list(desc, cells):
    """Gymnasium's annotation is `desc: list[str] = None`; a list would not hash."""
    env = envs.make("gymnasium:FrozenLake-v1", desc=desc, map_name="8x8")
    name, parameters = envs.registry.parse(envs.name_with_parameters(env))
    assert env.observation_space.shape == (cells,) and envs.make(name, **parameters) == env


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (
            "box2d",
            r"^'gymnasium:Missing-v0' needs packages that are not installed: pip install 'fdg\[box2d\]'$",
        ),
        ("mujoco", r"pip install 'fdg\[gymnasium\]'$"),
        ("toy-text", r"cannot be made: DependencyNotInstalled: .*gymnasium\[toy-text\]"),
    ],
)
def test_missing_dependency_names_the_extra(missing, message, monkeypatch):
    def make(*_, **__):
        raise gymnasium.error.DependencyNotInstalled(f'it is missing: pip install "gymnasium[{missing}]"')

    monkeypatch.setattr(gymnasium, "make", make)
    from_gymnasium._facts.cache_clear()
    with pytest.raises(FdgError, match=message):
        envs.make("gymnasium:Missing-v0")


# --- spaces ---

spaces = gymnasium.spaces


def sample_batch(space, number=4):
    """Random elements, batched in Gymnasium's layout and unbatched."""
    from envs.gymnasium_worker import stack

    space.seed(0)
    samples = [space.sample() for _ in range(number)]
    return stack(samples), samples


def test_images_are_channels_last():
    for shape, expected in {(4, 9, 8): (9, 8, 4), (9, 8, 3): (9, 8, 3), (9, 8): (9, 8)}.items():
        space = spaces.Box(0, 255, shape, np.uint8)
        box = gymnasium_spaces.observation_box("it", space)
        assert box == Box(0.0, 255.0, expected, "uint8")
        batch, samples = sample_batch(space)
        encoded = gymnasium_spaces.encode(space, batch)
        assert encoded.shape == (4, *expected) and encoded.dtype == np.uint8 and encoded.flags["C_CONTIGUOUS"]
        is_moved = shape == (4, 9, 8)
        np.testing.assert_array_equal(encoded[1], np.moveaxis(samples[1], 0, -1) if is_moved else samples[1])


@pytest.mark.parametrize(
    "space",
    [spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([[2, 3], [4, 5]]),
     spaces.MultiBinary((2, 2))],
)  # fmt: skip
def test_encode_matches_gymnasium_flatten(space):
    batch, samples = sample_batch(space)
    encoded = gymnasium_spaces.encode(space, batch)
    assert encoded.dtype == np.float32
    np.testing.assert_array_equal(encoded, [spaces.flatten(space, sample).ravel() for sample in samples])
    assert gymnasium_spaces.observation_box("it", space) == Box(0.0, 1.0, encoded.shape[1:])


def test_observation_dtypes():
    for dtype, high in ((np.float64, 9), (np.int32, 900), (np.uint8, 100)):
        space = spaces.Box(0, high, (5,), dtype)
        assert gymnasium_spaces.observation_box("it", space) == Box(0.0, float(high), (5,))
        encoded = gymnasium_spaces.encode(space, np.arange(10, dtype=dtype).reshape(2, 5))
        assert encoded.dtype == np.float32 and encoded[1, 4] == 9
    for dtype in (np.int8, np.int64, np.uint8):
        space = spaces.Box(0, 9, (5,), dtype)
        assert gymnasium_spaces.observation_box("it", space) == Box(0.0, 9.0, (5,), "int32")
        encoded = gymnasium_spaces.encode(space, np.arange(10, dtype=dtype).reshape(2, 5))
        assert encoded.dtype == np.int32 and encoded[1].tolist() == [5, 6, 7, 8, 9]
    memory = spaces.Box(0, 255, (5,), np.uint8)  # of a console: networks scale it as they scale images
    assert gymnasium_spaces.observation_box("it", memory) == Box(0.0, 255.0, (5,), "uint8")
    assert gymnasium_spaces.encode(memory, np.full((2, 5), 200, np.uint8)).dtype == np.uint8
    assert gymnasium_spaces.observation_box("it", spaces.Discrete(3)) == Box(0.0, 1.0, (3,))
    np.testing.assert_array_equal(
        gymnasium_spaces.encode(spaces.Discrete(3, start=2), np.array([2, 4])), [[1, 0, 0], [0, 0, 1]]
    )


def test_minigrid_codes_and_text_bytes():
    """Maps have code ranges with every source and module name; rendered images do not."""
    cells, drawn = (spaces.Box(0, 255, (size, size, 3), np.uint8) for size in (7, 56))
    for name in ("envpool:MiniGrid-Empty-5x5-v0", "gymnasium:minigrid:BabyAI-GoToObj-v0"):
        found = gymnasium_spaces.observation_box(name, cells)
        assert found.codes == ((0, 11), (0, 6), (0, 4)) and found.dtype == "uint8"
        assert gymnasium_spaces.observation_box(name, drawn).codes is None
    assert gymnasium_spaces.observation_box("gymnasium:Mine-v0", cells).codes is None
    theirs = spaces.Dict({"map": cells, "mission": spaces.Text(4)})
    assert gymnasium_parts.observation_space("it", theirs)["mission"] == Box(0.0, 255.0, (4,), "uint8")
    batch = {"map": np.zeros((2, 7, 7, 3), np.uint8), "mission": np.array(["go", "open it"])}
    assert gymnasium_codec.encode_parts(theirs, batch)["mission"].tolist() == [list(b"go\0\0"), list(b"open")]


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Discrete(3, start=-1), Discrete(3)),
        (spaces.MultiDiscrete([2, 3], start=[1, 0]), MultiDiscrete((2, 3))),
        (spaces.MultiBinary(2), MultiDiscrete((2, 2))),
        (spaces.Box(2, 4, (2,), np.int32), MultiDiscrete((3, 3))),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), MultiDiscrete((2, 3, 4, 5))),
        (spaces.Dict({"b": spaces.Discrete(2), "a": spaces.MultiBinary(2)}), MultiDiscrete((2, 2, 2))),
        (spaces.Box(-1.0, np.array([1.0, 2.0]), dtype=np.float64), Box(-1.0, (1.0, 2.0), (2,))),
    ],
)
def test_action_spaces(space, expected):
    ours = gymnasium_spaces.action_space("it", space)
    assert ours == expected
    keys = jax.random.split(jax.random.key(0), 20)
    decoded = gymnasium_spaces.decode(space, np.asarray(jax.vmap(ours.sample)(keys)))
    for row in range(20):
        action = gymnasium_spaces.select(decoded, row)
        assert space.contains(action), action


def test_subclasses_of_spaces_are_those_spaces():
    """Users subclass spaces, for example to change how actions are sampled."""
    from envs.gymnasium_worker import convert

    def subclass(space):
        space.__class__ = type("Mine", (type(space),), {})
        return space

    for make in (
        lambda own: own(spaces.Box(-1.0, 1.0, (3,))),
        lambda own: own(spaces.Discrete(3, start=2)),
        lambda own: own(
            spaces.Dict({"a": own(spaces.MultiBinary(2)), "b": own(spaces.Discrete(3, start=1))})
        ),
    ):
        theirs, mine = make(lambda space: space), make(subclass)
        same = (
            gymnasium_parts.facts("it", theirs, theirs, None),
            gymnasium_parts.facts("it", mine, mine, None),
        )
        assert same[0][2:] == same[1][2:]
        batch = sample_batch(mine)[0]
        for a, b in (
            (
                gymnasium_parts.encode_observation(mine, batch),
                gymnasium_parts.encode_observation(theirs, batch),
            ),
            (convert(mine, sample_batch(mine)[1][0]), convert(theirs, sample_batch(mine)[1][0])),
        ):
            jax.tree.map(np.testing.assert_array_equal, a, b)
        assert native.describe("action", mine) == native.describe("action", theirs)


def test_parts_with_any_keys_and_counts():
    parts = spaces.Dict({("a", 1): spaces.Discrete(2**21), ("b", 2): spaces.Discrete(2)})
    assert dict(gymnasium_parts.observation_space("it", parts).spaces)["('a', 1)"] == Discrete(2**21)
    values = {("a", 1): 5, ("b", 2): 0}
    assert native.rebuilt(native.describe("observation", parts), iter(values.values())) == values


def test_smallest_positive_bound_means_unbounded():
    """EnvPool's ViZDoom has this bound for actions, its Control Suite for observations."""
    space, free = spaces.Box(np.finfo(np.float64).tiny, np.inf, (2,), np.float64), Box(-np.inf, np.inf, (2,))
    assert gymnasium_spaces.action_space("it", space) == gymnasium_spaces.observation_box("it", space) == free


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_boxes_without_numbers(shape):
    space = spaces.Box(-1.0, 1.0, shape)
    assert gymnasium_spaces.observation_box("it", space).shape == shape
    assert gymnasium_spaces.action_space("it", space).low_array.shape == shape


def test_unsupported_spaces_are_refused():
    with pytest.raises(FdgError, match="environment 'it': its observations hold a Sequence"):
        gymnasium_parts.facts(
            "it", spaces.Dict({"a": spaces.Sequence(spaces.Discrete(3))}), spaces.Discrete(2), None
        )
    with pytest.raises(FdgError, match=r"'it': its observations hold a Discrete\(\d+\), .*at most 1,048,576"):
        gymnasium_parts.facts("it", spaces.Discrete(10**13), spaces.Discrete(2), None)
    for space in (spaces.Discrete(2**40), spaces.Box(-(2**31), 2**31 - 2, (1,), np.int32)):
        with pytest.raises(FdgError, match=r"'it': its actions are .*each be an output.*at most 1,048,576"):
            gymnasium_spaces.action_space("it", space)
    with pytest.raises(FdgError, match="environment 'it': its actions are Sequence"):
        gymnasium_spaces.action_space("it", spaces.Sequence(spaces.Discrete(3)))
    empty, bit = spaces.Tuple(()), spaces.Discrete(2)
    for what, both in (("observations are", (empty, bit)), ("actions are", (bit, empty))):
        with pytest.raises(FdgError, match=rf"environment 'it': its {what} Tuple\(\), which has no parts"):
            gymnasium_parts.facts("it", *both, None)


# --- composite observations ---


@pytest.mark.parametrize(
    ("action_space", "shape", "expected"),
    [
        (spaces.Discrete(6), (2, 3), [[0, 1, 1, 1, 1, 1]]),
        (spaces.MultiDiscrete([2, 4]), (6,), [[0, 1, 1, 1, 1, 1]]),
        (spaces.MultiDiscrete([3, 3]), (6,), [[0, 1, 1, 1, 1, 1]]),
        (spaces.MultiDiscrete([3, 3]), (2, 3), [[0, 1, 1, 1, 1, 1]]),
        (spaces.MultiDiscrete([2, 3]), (2, 3), None),  # one bit per combination of choices
        (spaces.MultiDiscrete([2, 2]), (2, 2), None),  # ambiguous
        (spaces.Discrete(5), (2, 3), None),
        (spaces.Box(-1.0, 1.0, (6,)), (6,), None),
    ],
)
def test_detects_action_masks(action_space, shape, expected):
    theirs = spaces.Dict({"seen": spaces.Box(0.0, 1.0, (1,)), "action_mask": spaces.MultiBinary(shape)})
    facts = gymnasium_parts.facts("it", theirs, action_space, None)
    bits = np.ones((2, *shape), np.int8)
    bits[0].flat[0], bits[1] = 0, 0
    batch = {"seen": np.zeros((2, 1), np.float32), "action_mask": bits}
    shown = gymnasium_parts.split_mask(facts, gymnasium_codec.encode_parts(theirs, batch))
    features, mask = envs.features_and_mask(shown)
    assert set(features) == {"seen"} | ({"action_mask"} if expected is None else set())
    if expected is not None:
        np.testing.assert_array_equal(mask, [*expected, [1] * 6])  # an empty mask allows every action


PARTED = "gymnasium:tests.envs.parted:Parted-v0"


def test_matches_gymnasium_with_composite_observations():
    """Images are channels-last, categories start at zero, all other numbers are float32."""
    env = envs.make(PARTED, workers=2)
    assert env.observation_space == envs.Dict(
        {
            "bits": Box(0.0, 1.0, (2,)),
            "goal": envs.Tuple((Discrete(3), MultiDiscrete((2, 3)))),
            "picture": Box(0.0, 255.0, (6, 5, 2), "uint8"),
            "position": Box(-1.0, 2.0, (2,)),
        }
    )
    seeds, first, actions, step = random_rollout(env)
    ended = 0
    for b in range(NUM_ENVS):
        reference = gymnasium.make(PARTED.removeprefix("gymnasium:"))
        observation, _ = reference.reset(seed=int(seeds[b]))
        assert_same(jax.tree.map(lambda x, b=b: x[b], first), observation)
        for t in range(STEPS):
            observation, reward, terminated, truncated, _ = reference.step(int(actions[t, b]))
            assert_same(jax.tree.map(lambda x, t=t, b=b: x[t, b], step.final_observation), observation)
            assert (step.reward[t, b], step.terminated[t, b]) == (reward, terminated)
            if terminated or truncated:
                ended += 1
                reference.reset()
    assert ended > NUM_ENVS


def assert_same(ours, theirs):
    np.testing.assert_array_equal(ours["picture"], np.moveaxis(theirs["picture"], 0, -1))
    np.testing.assert_array_equal(ours["position"], theirs["position"].astype(np.float32))
    np.testing.assert_array_equal(ours["bits"], theirs["bits"])
    np.testing.assert_array_equal(ours["goal"][0], theirs["goal"][0] - 1)
    np.testing.assert_array_equal(ours["goal"][1], theirs["goal"][1])
