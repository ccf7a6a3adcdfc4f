"""The Gymnasium adapter checks results against their spaces and copies them; actions lie in their space."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import envs
from algos import PPO
from envs import from_gymnasium, gymnasium_spaces, host
from envs.gymnasium_worker import Instance, WrongAnswerError, convert
from fdg.errors import FdgError
from tests.envs.borders import MISTAKES, Random, Wrong, random_representation, random_space


@pytest.mark.parametrize("seed", range(20))
def test_convert_accepts_any_representation(seed):
    rng = np.random.default_rng(seed)
    space = random_space(rng)
    space.seed(seed)
    for _ in range(5):
        expected = space.sample()
        given = random_representation(rng, expected)
        found = convert(space, given)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert all(
            np.asarray(x).dtype == np.asarray(y).dtype
            for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        )
        arrays = [x for x in jax.tree.leaves(given) if isinstance(x, np.ndarray)]
        assert not any(np.shares_memory(x, y) for x in arrays for y in jax.tree.leaves(found))


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
@pytest.mark.parametrize("seed", range(20))
def test_decoded_actions_lie_in_the_library_space(seed):
    """Also at bounds that float32 cannot represent; distinct actions stay distinct."""
    rng = np.random.default_rng(1000 + seed)
    is_float = bool(seed % 2)
    space = random_space(rng, floats=is_float, categories=not is_float)
    ours = gymnasium_spaces.action_space("it", space)
    sent = [np.asarray(ours.sample(jax.random.key(i))) for i in range(6)]
    if is_float:
        sent += [ours.low_array, ours.high_array]
    decoded = gymnasium_spaces.decode(space, np.stack(sent))
    for row, action in enumerate(sent):
        theirs = gymnasium_spaces.select(decoded, row)
        assert space.contains(theirs), (space, theirs)
        if is_float:
            np.testing.assert_allclose(spaces.flatten(space, theirs), action.ravel(), rtol=1e-6)
    if not is_float:
        different = len({action.tobytes() for action in sent})
        assert len({repr(gymnasium_spaces.select(decoded, row)) for row in range(6)}) == different


WIDE = [
    spaces.Box(0, 1, (4,), bool),
    spaces.Box(np.uint64(2**63), np.uint64(2**63 + 3), (3,), np.uint64),
    spaces.Box(-(2**62), -(2**62) + 3, (3,), np.int64),
    spaces.Box(-128, 127, (2,), np.int8),
    spaces.Discrete(9, start=2**40),
    spaces.MultiDiscrete([5, 4], start=[2**33, -1]),
]


@pytest.mark.parametrize("space", WIDE, ids=str)
def test_integer_actions_of_any_dtype_are_distinct(space):
    ours = gymnasium_spaces.action_space("it", space)
    sent = np.stack([np.asarray(ours.sample(jax.random.key(i))) for i in range(12)])
    decoded = gymnasium_spaces.decode(space, sent)
    assert all(space.contains(gymnasium_spaces.select(decoded, i)) for i in range(12))
    assert len({action.tobytes() for action in sent}) == len({action.tobytes() for action in decoded})


@pytest.mark.parametrize("charset", ["ab", "äöü", "a日€", "😀b"])
def test_text_is_encoded_as_utf8(charset):
    space = spaces.Text(4, min_length=4, charset=charset)
    space.seed(0)
    texts = [space.sample() for _ in range(9)]
    encoded = gymnasium_spaces.encode(space, texts)
    assert encoded.shape[1:] == gymnasium_spaces.observation_box("it", space).shape
    assert [bytes(row).rstrip(b"\0").decode() for row in encoded] == texts


@pytest.mark.parametrize("case", range(5))
def test_rollouts_of_random_spaces(case):
    """Two instances in a worker; the second one's observations equal those of a local instance."""
    env = envs.make("gymnasium:tests.envs.borders:Random-v0", workers=1, case=case)
    keys = jax.random.split(jax.random.key(case), 2)
    state, seen = env.reset(keys)
    one = Random(case)
    one.reset(seed=int(host._seeds(keys)[1]))

    def assert_seen(batch):
        encoded = env.source.unpack(env.source.encode(_batch(one.observation)))
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[1], y[0]), batch, encoded)

    assert_seen(seen)
    for t in range(5):  # across the end of an episode
        action = jnp.stack([env.action_space.sample(key) for key in keys])
        state, step = env.step(keys, state, action)
        assert step.reward.tolist() == [1.5, 1.5] and step.truncated.tolist() == [t == 3] * 2
        one.observe()
        assert_seen(step.final_observation)
        if t == 3:
            one.reset()
        assert_seen(step.observation)
    host.close()


def _batch(value):
    if isinstance(value, dict):
        return {key: _batch(part) for key, part in value.items()}
    return tuple(map(_batch, value)) if isinstance(value, tuple) else np.asarray(value)[None]


MESSAGES = {
    "four": "returned a tuple of 4 values: return five",
    "alone": "returned a dictionary of 'a', 'b': return",
    "none": "returned NoneType None: return",
    "shape": r"observation\['a'\] has the shape \[4\], where its space has \[3\]",
    "column": r"observation\['a'\] has the shape \[3, 1\], where its space has \[3\]",
    "ragged": r"observation\['a'\] is list \[1, \[2, 3\]\], which is not an array of numbers",
    "text": r"observation\['a'\] is str 'three', which is not an array of numbers",
    "complex": r"observation\['a'\] is an array of shape \[3\], which is not .*: its numbers are complex",
    "hole": r"observation\['a'\] is list \[1, None, 3\], which is not .*: it contains None",
    "above": r"observation\['b'\] has 3, which is outside of its space Discrete\(3\)",
    "below": r"observation\['b'\] has -1, which is outside",
    "half": r"observation\['b'\] has 0.5, which its space's dtype int64 cannot hold",
    "part": "observation is a dictionary of 'a', without the part 'b' of its space",
    "array": r"observation is an array of shape \[4\], without the part 'a'",
    "reward": r"step returned reward = an array of shape \[2\]: return one number",
    "no reward": "step returned reward = NoneType None",
    "reward of none": r"step returned reward = list \[None\]: return one number",
    "complex reward": "step returned reward = complex128 .*: return one number",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_invalid_results_are_refused(mistake):
    in_reset = mistake != "four" and "reward" not in mistake
    instance = Instance(Wrong(mistake, "reset" if in_reset else "step"))
    with pytest.raises(WrongAnswerError, match=MESSAGES.get(mistake, "return the pair")):
        instance.reset(0) if in_reset else instance.step(0)


@pytest.mark.filterwarnings("error")
def test_reward_beyond_float32_is_infinite():
    pool = envs.make("tests.envs.borders:Huge", workers=1).source.start(2)
    pool.reset(np.arange(2), np.arange(2), 60.0)
    pool.send(np.zeros(2, np.int32), 60.0)
    assert pool.recv(60.0).reward.tolist() == [np.inf] * 2
    pool.close()


def test_invalid_result_names_environment_worker_and_instance():
    env = envs.make("gymnasium:tests.envs.borders:Wrong-v0", workers=1, mistake="shape")
    keys = jax.random.split(jax.random.key(0), 2)
    with pytest.raises(
        Exception, match=r"'gymnasium:tests.envs.borders:Wrong-v0': worker 0 .* its instance 0: obs"
    ) as caught:
        jax.block_until_ready(env.step(keys, env.reset(keys)[0], jnp.zeros(2, jnp.int32)))
    assert "restarts" not in str(caught.value)  # the next process would return the same
    host.close()


class Buffered(gymnasium.Env):
    """Reuses one array for all observations and one for all frames."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space, action_space = spaces.Box(0, 9, (1,), np.float32), spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode, self.frame = render_mode, np.zeros((8, 8, 3), np.uint8)
        self.now = np.zeros(1, np.float32)

    def reset(self, *, seed=None, options=None):
        self.now[:] = 0
        return self.now, {}

    def step(self, action):
        self.now += 1
        return self.now, 1.0, bool(self.now[0] >= 5), False, {}

    def render(self):
        self.frame[:] = 20 * self.now
        return self.frame


gymnasium.register("BorderBuffered-v0", entry_point=Buffered)


def test_reused_arrays_are_copied():
    source = from_gymnasium.make("BorderBuffered-v0").source
    (episode,) = source.record(lambda observation, step: np.int32(0), 1, 10, 0)
    assert [int(picture.max()) for picture in episode.states] == [0, 20, 40, 60, 80]
    assert episode.observation[:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (spaces.Box(-1, 1, (0,)), spaces.Discrete(2), "its observation_space is .* which is empty"),
        (
            spaces.Dict({"a": spaces.Box(-1, 1, (2, 0))}),
            spaces.Discrete(2),
            r"observation_space\['a'\] is .* empty",
        ),
        (spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (0,)), "its action_space is .* which is empty"),
        (
            spaces.Box(-1, 1, (2,)),
            spaces.Box(-(2**31), 2**31 - 1, (2,), np.int32),
            "whose 8,589,934,592 categories",
        ),
        (spaces.Box(-1, 1, (2,)), spaces.Discrete(2**40), "whose 1,099,511,627,776 categories"),
        (
            spaces.Box(-1, 1, (2,)),
            spaces.Dict({"go": spaces.Discrete(2), "far": spaces.Box(0, 1, ())}),
            "categories and floats together",
        ),
        (
            spaces.Box(-1, 1, (2,)),
            spaces.Sequence(spaces.Discrete(2)),
            "neither categories nor arrays of numbers",
        ),
    ],
)
def test_unsupported_spaces_are_refused(observation, action, message):
    class Odd(gymnasium.Env):
        observation_space, action_space = observation, action

    gymnasium.envs.registration.registry.pop("BorderOdd-v0", None)
    gymnasium.register("BorderOdd-v0", entry_point=Odd)
    from_gymnasium._facts.cache_clear()
    with pytest.raises(FdgError, match=f"environment 'gymnasium:BorderOdd-v0': .*{message}"):
        PPO(env=envs.make("gymnasium:BorderOdd-v0", workers=1), num_envs=2, num_steps=16)


def test_integer_boxes_sample_their_range():
    """Bounds at the ends of int32, and all of int32: sample range and mean of many samples."""
    for low, high in ((2**31 - 3, 2**31 - 1), (-(2**31), 2**31 - 1), (-(2**31), 0), (-5, 5)):
        box = envs.Box(float(low), float(high), (4000,), "int32")
        drawn = np.asarray(box.sample(jax.random.key(0))).astype(np.float64)
        assert drawn.min() >= low and drawn.max() <= high
        width = high - low
        assert abs(drawn.mean() - (low + high) / 2) <= 0.03 * width
        assert drawn.max() - drawn.min() >= 0.99 * width
    with pytest.raises(FdgError, match=r"Box\(high=...\): 300 is not uint8"):
        envs.Box(0.0, 300.0, (2,), "uint8")
