"""Replay of sequences: steps that follow each other, with the memory that the actor had before the first.

For learners whose network has a memory, or whose targets look several steps ahead. A rollout is cut into
sequences, which are stored and drawn whole, each with the state of the memory at its start (the "stored
state" of R2D2; Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement Learning",
ICLR, section 3). All else is `algos/replay.py`: a ring of sequences for each environment.

A learner whose loss is over transitions learns from sequences unchanged: `SequenceReplay.transitions` makes
rows of them, and `algos/over_sequences.py` makes a network over such rows of a network with a memory.

Letters in shapes: `T` steps of a rollout, `B` environments, `L` steps of a sequence, `C = T / L` sequences of
a rollout, `N` sequences of a minibatch, `K` steps of burn-in.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from algos.over_sequences import Observed
from algos.replay import Replay, ReplayState, Step, Transition
from algos.returns import n_step_sums
from envs import Observation
from fdg.settings.fields import require, require_positive


class Sequences(NamedTuple):
    """Sequences, as they are stored and drawn."""

    memory: Any  # [..., *memory] as the actor had it before the first step
    start: jax.Array  # [..., L] bool: an episode starts at this step
    steps: Step  # [..., L], rewards `[..., L, A]` where there are several agents
    weight: Any = None  # as of `Transition`


@dataclasses.dataclass(frozen=True)
class SequenceReplay(Replay):
    """A replay buffer whose samples are `Sequences [N]`: `sample(...).transition`.

    Sizes are counted in steps, as those of `Replay`, but for `batch_size`, which is of sequences. With
    burn-in, a sample is the stored sequence and those before it, so that samples overlap as in R2D2.

    Attributes:
      sequence_length: L.
      burn_in: K, steps before them from which only the memory is computed: a multiple of L.

    Raises:
      FdgError: (construction) a field out of range, or sizes that do not fit.
    """

    sequence_length: int = 1
    burn_in: int = 0

    def __post_init__(self):
        require_positive(self, "sequence_length")
        require(
            self,
            self.burn_in >= 0 and self.burn_in % self.sequence_length == 0,
            f"burn_in={self.burn_in}: it must be a multiple of sequence_length={self.sequence_length}",
        )
        require(
            self,
            self.n_step <= self.sequence_length,
            f"n_step={self.n_step} is longer than sequence_length={self.sequence_length}: use at most that",
        )
        super().__post_init__()

    @property
    def steps_of_a_row(self) -> int:
        """L."""
        return self.sequence_length

    @property
    def window(self) -> int:
        """Sequences of a sample: the one that is learned from, and those of the burn-in."""
        return 1 + self.burn_in // self.sequence_length

    def init(self, observation: Observation, action: Any, memory: Any = None) -> ReplayState:
        """An empty buffer for `observation [B, *obs]`, `action [B, *action]` and `memory [B, ...]`."""
        return self.init_of(memory, observation, action, jnp.zeros(self.num_envs))

    def init_of(self, memory: Any, observation: Observation, action: Any, reward: jax.Array) -> ReplayState:
        """An empty buffer for such steps, `[B, ...]`; only their types count."""
        ended = jnp.zeros(self.num_envs, bool)
        steps = Step(observation, action, reward, ended, ended, observation)
        start, steps = jax.tree.map(lambda x: jnp.stack([x] * self.sequence_length, axis=1), (ended, steps))
        return self.init_of_rows(Sequences(memory, start, steps))

    def cut(self, memory: Any, start: jax.Array | None, steps: Step) -> Sequences:
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

    def seen(self, see: Callable[[Observation], Observation], minibatch: Sequences) -> Sequences:
        """A minibatch with its observations as networks see them."""
        steps = minibatch.steps
        return minibatch._replace(
            steps=steps._replace(
                observation=see(steps.observation), final_observation=see(steps.final_observation)
            )
        )

    def transitions(
        self, minibatch: Sequences, weight: jax.Array | None
    ) -> tuple[Transition, jax.Array | None]:
        """Sequences `[N]` as transitions `[N * L]` of all steps after the burn-in, whose observations are
        `Observed [N]`; and weights `[N]` as those of each step.

        N-step windows are cut at the end of the episode, and of the sequence.
        """
        timed = minibatch.start, minibatch.steps
        begins, earlier = jax.tree.map(lambda x: x[:, : self.burn_in], timed)
        start, steps = jax.tree.map(lambda x: x[:, self.burn_in :], timed)
        ends = steps.terminated.T, steps.truncated.T
        sums = n_step_sums(steps.reward.T, *ends, self.discount, self.n_step)  # [L, N]
        observed = Observed(minibatch.memory, (earlier.observation, begins), steps.observation, start)
        final, last = steps.final_observation, None
        if self.n_step > 1:
            last = sums.last.T
            final = jax.tree.map(lambda x: jax.vmap(lambda steps, at: steps[at])(x, last), final)
        transition = Transition(
            observation=observed,
            action=steps.action.reshape(-1, *steps.action.shape[2:]),
            reward=sums.reward.T.reshape(-1),
            discount=sums.weight.T.reshape(-1),
            next_observation=observed._replace(final=final, last=last),
        )
        if weight is not None:
            weight = jnp.repeat(weight, self.sequence_length)
        return transition, weight

    def priority(self, error: jax.Array) -> jax.Array:
        """Errors of steps `[N * L]` as one of each sequence, `[N]`: 0.9 of the largest, 0.1 of the mean
        (R2D2, section 2.3)."""
        size = jnp.abs(error).reshape(-1, self.sequence_length)
        return 0.9 * jnp.max(size, axis=1) + 0.1 * jnp.mean(size, axis=1)

    def _of_windows(self, windows: Sequences) -> Sequences:
        """Windows `[B, N / B, w]` of sequences, end to end, with the memory before the first."""

        def end_to_end(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:2], -1, *x.shape[4:])

        if self.window == 1:
            return jax.tree.map(lambda x: x[:, :, 0], windows)
        start, steps = jax.tree.map(end_to_end, (windows.start, windows.steps))
        return Sequences(jax.tree.map(lambda x: x[:, :, 0], windows.memory), start, steps)

    @property
    def _window(self) -> str:
        return f"sequence_length={self.sequence_length}"
