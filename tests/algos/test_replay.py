"""Replay: n-step windows, sampling probabilities, priorities and resizing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
from algos.replay import Replay, Step, importance_weight, summarize
from fdg.training.checkpoint import Checkpoints

B = 4  # environments


def replay(**fields):
    return Replay(**{"num_envs": B, "buffer_size": 6 * B, "batch_size": 32, "discount": 0.5, **fields})


def rollout(start, steps):
    """Observation, action and reward of environment b at time t are `100 b + t`."""
    tag = 100 * jnp.arange(B)[None] + start + jnp.arange(steps)[:, None]
    observation = tag[..., None].astype(jnp.float32)
    no_ends = jnp.zeros((steps, B), bool)
    return Step(observation, tag, tag.astype(jnp.float32), no_ends, no_ends, observation + 1)


def filled(buffer, *lengths):
    """State after consecutive rollouts of these lengths."""
    state, start = buffer.init(jnp.zeros((B, 1)), jnp.zeros(B, jnp.int32)), 0
    for length in lengths:
        state, start = buffer.add(state, rollout(start, length)), start + length
    return state


def sampled_actions(buffer, state, count=20):
    """Sorted unique actions `100 b + t` of many minibatches."""
    keys = jax.random.split(jax.random.key(0), count)
    return np.unique(jax.jit(buffer.samples)(state, keys).transition.action)


uniform_and_prioritized = pytest.mark.parametrize("exponent", [0.0, 0.6], ids=["uniform", "prioritized"])


@uniform_and_prioritized
def test_windows_lie_within_buffer(exponent):
    """Eight steps in a ring of six: 2 to 7 remain, and windows of three start at 2, 3, 4 or 5."""
    buffer = replay(n_step=3, priority_exponent=exponent)
    starts = sampled_actions(buffer, filled(buffer, 4, 4))
    np.testing.assert_array_equal(starts, np.add.outer(100 * np.arange(B), [2, 3, 4, 5]).ravel())


@uniform_and_prioritized
def test_n_step_transition(exponent):
    """Discount 1/2: reward t + (t + 1) / 2 + (t + 2) / 4, and the third step's next observation."""
    buffer = replay(n_step=3, priority_exponent=exponent)
    sample = buffer.sample(filled(buffer, 4, 4), jax.random.key(0))
    transition, first = sample.transition, np.asarray(sample.transition.action, np.float32)
    np.testing.assert_array_equal(transition.observation[:, 0], first)
    np.testing.assert_array_equal(transition.reward, first + (first + 1) / 2 + (first + 2) / 4)
    np.testing.assert_array_equal(transition.discount, 1 / 8)
    np.testing.assert_array_equal(transition.next_observation[:, 0], first + 3)


def test_windows_end_with_episode():
    """Windows of three steps with rewards 1, 2 and 4, discount 1/2: complete; terminated at the second step;
    truncated there; terminated at the first step, with a later truncation that is ignored."""
    no, yes = False, True
    steps = Step(
        observation=jnp.tile(jnp.array([[10, 20, 30]]), (4, 1)),
        action=jnp.tile(jnp.array([[0, 1, 2]]), (4, 1)),
        reward=jnp.tile(jnp.array([[1.0, 2.0, 4.0]]), (4, 1)),
        terminated=jnp.array([[no, no, no], [no, yes, no], [no, no, yes], [yes, no, no]]),
        truncated=jnp.array([[no, no, no], [no, no, no], [no, yes, no], [no, yes, no]]),
        final_observation=jnp.tile(jnp.array([[11, 21, 31]]), (4, 1)),
    )
    transition = summarize(steps, 0.5)
    assert transition.reward.tolist() == [1 + 2 / 2 + 4 / 4, 1 + 2 / 2, 1 + 2 / 2, 1]
    assert transition.discount.tolist() == [1 / 8, 0, 1 / 4, 0]
    assert transition.next_observation.tolist() == [31, 21, 21, 11]
    assert transition.observation.tolist() == [10] * 4 and transition.action.tolist() == [0] * 4


def test_truncated_single_step():
    """A truncated last step bootstraps like any other."""
    steps = jax.tree.map(lambda x: x.swapaxes(0, 1)[:, :1], rollout(0, 1))
    steps = steps._replace(truncated=jnp.ones((B, 1), bool))
    transition = summarize(steps, 0.5)
    np.testing.assert_array_equal(transition.discount, 0.5)
    np.testing.assert_array_equal(transition.next_observation[:, 0], 100 * np.arange(B) + 1)


def test_uniform_replay_is_uniform():
    buffer = replay(batch_size=4_000)
    tags = np.asarray(buffer.sample(filled(buffer, 5), jax.random.key(0)).transition.action)
    _, counts = np.unique(tags, return_counts=True)
    assert len(counts) == 5 * B
    assert np.all(np.abs(counts - 200) < 5 * np.sqrt(200))


def test_priorities_set_probabilities():
    """Each environment has five windows; the second has priority 16, the others 1; alpha 1/2."""
    buffer = replay(batch_size=4_000, priority_exponent=0.5)
    state = filled(buffer, 5)
    indices = buffer.sample(state, jax.random.key(0)).indices
    state = buffer.prioritize(state, indices, jnp.where(indices == 1, 16.0, 1.0))
    sample = buffer.sample(state, jax.random.key(1))
    second = np.asarray(sample.transition.action) % 100 == 1
    np.testing.assert_allclose(sample.probability, np.where(second, 4 / 8, 1 / 8), rtol=1e-5)
    assert abs(second.sum() - 2_000) < 5 * np.sqrt(2_000)


def test_new_steps_get_the_largest_priority():
    """The largest priority is 1.9 (alpha 1), not rounded down to 1: 1.9 of 2 * 1.9 + 2 * 0.1."""
    buffer = replay(batch_size=400, priority_exponent=1.0)
    state = filled(buffer, 2)
    indices = buffer.sample(state, jax.random.key(0)).indices
    state = buffer.prioritize(state, indices, jnp.where(indices == 0, 1.9, 0.1))
    state = buffer.prioritize(state, indices, jnp.full(400, 0.1))
    sample = buffer.sample(buffer.add(state, rollout(2, 2)), jax.random.key(1))
    new = np.asarray(sample.transition.action) % 100 >= 2
    np.testing.assert_allclose(sample.probability, np.where(new, 1.9 / 4, 0.1 / 4), rtol=1e-3)


def test_new_steps_get_a_priority_above_integers():
    """flashbax rounds to int32."""
    buffer = replay(batch_size=400, priority_exponent=1.0)
    state = filled(buffer, 2)
    indices = buffer.sample(state, jax.random.key(0)).indices
    state = buffer.add(buffer.prioritize(state, indices, jnp.full(400, 1e8)), rollout(2, 2))
    np.testing.assert_allclose(buffer.sample(state, jax.random.key(1)).probability, 0.25)


def test_importance_weights_by_hand():
    """Probabilities 1/2, 1/8, 1/8, beta 1: (1/8) / (1/2) = 1/4, then 1; probability 0 has weight 0."""
    probability = jnp.array([0.5, 0.125, 0.125, 0.0])
    assert importance_weight(probability, 1.0).tolist() == [0.25, 1.0, 1.0, 0.0]
    assert importance_weight(probability, 0.0).tolist() == [1.0, 1.0, 1.0, 0.0]
    assert importance_weight(jnp.full(3, jnp.nan), 1.0).tolist() == [0.0, 0.0, 0.0]  # an empty buffer


@uniform_and_prioritized
@pytest.mark.parametrize("added", [5, 8])
def test_resume_with_longer_buffer(added, exponent, tmp_path):
    short, long = (replay(buffer_size=size * B, priority_exponent=exponent) for size in (8, 20))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(0, filled(short, added))
    checkpoints.close()
    empty = filled(long, added)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), empty)
    found = checkpoints.restore(0, shapes)
    expected = long.add(filled(long, added), rollout(added, 4))
    jax.tree.map(np.testing.assert_array_equal, long.add(found, rollout(added, 4)), expected)
    overwritten = filled(short, 8, 1)
    assert overwritten.resized(empty) is overwritten


@uniform_and_prioritized
def test_ready_after_learning_starts(exponent):
    """Ten steps in four environments are three steps in each."""
    buffer = replay(learning_starts=10, n_step=2, priority_exponent=exponent)
    assert [bool(buffer.is_ready(filled(buffer, *[1] * count))) for count in (0, 2, 3, 6)] == [0, 0, 1, 1]
    unready = filled(buffer, 1)  # holds no window
    sample = buffer.sample(unready, jax.random.key(0))
    after = buffer.prioritize(unready, sample.indices, jnp.ones(32))
    jax.tree.map(np.testing.assert_array_equal, unready, after)


def test_types_are_stable():
    buffer = replay(priority_exponent=0.6)
    state = filled(buffer)
    sample = buffer.sample(state, jax.random.key(0))
    for after in (filled(buffer, 2), buffer.prioritize(state, sample.indices, jnp.ones(32))):
        assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)  # weak types included


def test_rollout_longer_than_buffer():
    with pytest.raises(fdg.FdgError, match=r"7 steps is longer than the 6 .* buffer_size=24 .*at least 28"):
        filled(replay(), 7)


# --- in an algorithm ---


class Collector:
    """Stores steps of four counters and samples from the buffer."""

    def __init__(self, exponent):
        self.buffer = replay(batch_size=8, n_step=2, priority_exponent=exponent)

    def init(self, key):
        buffer = self.buffer.init(jnp.zeros((B, 1)), jnp.zeros(B, jnp.int32))
        return {"buffer": buffer, "start": jnp.int32(0), "key": key}

    def iterate(self, state):
        key, sample_key = jax.random.split(state["key"])
        buffer = self.buffer.add(state["buffer"], counted(rollout(state["start"], 2)))
        sample = self.buffer.sample(buffer, sample_key)
        reward = learn(sample.transition.reward)
        buffer = self.buffer.prioritize(buffer, sample.indices, 1.0 + reward)
        return {"buffer": buffer, "start": state["start"] + 2, "key": key}, {"reward": jnp.sum(reward)}


@fdg.fragment("environment", in_axes=1, out_axes=1)
def counted(steps):
    return steps


@fdg.fragment("learner")
def learn(reward):
    return 0.5 * reward


def test_tracing_allocates_nothing():
    before = jax.live_arrays()
    fdg.trace(Collector(0.6))
    assert len(jax.live_arrays()) == len(before)
