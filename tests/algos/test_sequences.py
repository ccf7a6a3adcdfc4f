"""`SequenceReplay` stores and samples complete sequences with the memory before them."""

import jax
import jax.numpy as jnp
import numpy as np

from algos.replay import Step
from algos.sequences import SequenceReplay


def test_sequences_are_stored_with_memory():
    """Two environments; rollouts of four steps in sequences of two. The memory counts the steps."""
    buffer = SequenceReplay(num_envs=2, buffer_size=16, batch_size=64, sequence_length=2, learning_starts=8)
    zeros = jnp.zeros((2, 1))
    state = buffer.init_of(zeros, zeros, jnp.zeros(2, jnp.int32), jnp.zeros(2))
    for first in (0, 4):
        time = jnp.broadcast_to(first + jnp.arange(4.0)[:, None], (4, 2)) + jnp.array([[0.0, 100.0]])
        never = jnp.zeros((4, 2), bool)
        assert bool(buffer.is_ready(state)) == (first > 0)
        steps = Step(time[..., None], time.astype(jnp.int32), time, never, never, time[..., None] + 1)
        state = buffer.add(state, buffer.as_rows(time[::2, :, None], never, steps))
    drawn = buffer.sample(state, jax.random.key(0)).transition
    np.testing.assert_array_equal(np.unique(drawn.memory), [0, 2, 4, 6, 100, 102, 104, 106])
    np.testing.assert_array_equal(drawn.steps.reward, drawn.memory + jnp.arange(2.0)[None])
    np.testing.assert_array_equal(drawn.steps.observation[:, :, 0], drawn.steps.action)
