"""Replay of sequences: steps that follow each other, with the memory that the actor had before the first.

For learners whose network has a memory, or whose targets look several steps ahead. A rollout is cut into
sequences, which are stored and drawn whole, each with the state of the memory at its start (the "stored
state" of R2D2; Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement Learning",
ICLR, section 3). All else is `algos/replay.py`: a ring of sequences for each environment.

Letters in shapes: `T` steps of a rollout, `B` environments, `L` steps of a sequence, `C = T / L` sequences of
a rollout, `N` sequences of a minibatch.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from algos.replay import Replay, ReplayState, Step
from envs import Observation
from fdg.settings.fields import require, require_positive


class Sequences(NamedTuple):
    """Sequences, as they are stored and drawn."""

    memory: Any  # [..., *memory] as the actor had it before the first step
    start: jax.Array  # [..., L] bool: an episode starts at this step
    steps: Step  # [..., L], rewards `[..., L, A]` where there are several agents


@dataclasses.dataclass(frozen=True)
class SequenceReplay(Replay):
    """A replay buffer whose samples are `Sequences [N]`: `sample(...).transition`.

    Sizes are counted in steps, as those of `Replay`, but for `batch_size`, which is of sequences.

    Attributes:
      sequence_length: L.

    Raises:
      FdgError: (construction) a field out of range, or sizes that do not fit.
    """

    sequence_length: int = 1

    def __post_init__(self):
        require_positive(self, "sequence_length")
        require(self, self.n_step == 1, f"n_step={self.n_step}: sequences are drawn one by one")
        super().__post_init__()

    @property
    def steps_of_a_row(self) -> int:
        """L."""
        return self.sequence_length

    def init_of(self, memory: Any, observation: Observation, action: Any, reward: jax.Array) -> ReplayState:
        """An empty buffer for such steps, `[B, ...]`; only their types count."""
        ended = jnp.zeros(self.num_envs, bool)
        steps = Step(observation, action, reward, ended, ended, observation)
        start, steps = jax.tree.map(lambda x: jnp.stack([x] * self.sequence_length, axis=1), (ended, steps))
        return self.init_of_rows(Sequences(memory, start, steps))

    def cut(self, memory: Any, start: jax.Array, steps: Step) -> Sequences:
        """A rollout as `add` takes it, `[C, B]`.

        Args:
          memory: `[C, B, ...]`, before each sequence.
          start: `[T, B]` bool.
          steps: `[T, B]`.
        """

        def sequences(x: jax.Array) -> jax.Array:
            x = x.reshape(-1, self.sequence_length, *x.shape[1:])
            return x.swapaxes(1, 2)

        return Sequences(memory, *jax.tree.map(sequences, (start, steps)))

    def _of_windows(self, windows: Sequences) -> Sequences:
        """Windows `[B, N / B, 1]` of one sequence each."""
        return jax.tree.map(lambda x: x[:, :, 0], windows)

    @property
    def _window(self) -> str:
        return f"sequence_length={self.sequence_length}"
