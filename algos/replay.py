"""Replay: steps stored on the devices, and minibatches sampled from them.

Each environment has a buffer (`algos/buffers.py`), by default a flashbax ring buffer in time order. This
module maps the buffer over the environments, stores steps and samples transitions:

- Each step is stored with its final observation, *before* the automatic reset, and with `terminated` and
  `truncated`. So truncated episodes bootstrap, and terminated episodes do not (`algos.losses`).
- A window of `n_step` steps ends with its episode (`summarize`).

**Under a distribution policy**, a minibatch takes equally many windows from each environment's ring. Each
ring has its own key. So a buffer that is sharded like the environments needs no communication, its capacity
grows with the number of devices, and results equal those of one device.

Shapes: `T` steps of a rollout, `B` environments, `N` samples, `n` steps of a window.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fdg
from algos import buffers, replaying
from algos.buffers import BufferSpec, ReplayBuffer, n_step_sums
from algos.replaying import Transition
from envs import Observation, TimeStep
from fdg.settings.fields import require, require_positive, require_within
from fdg.settings.moved import moved

__getattr__ = moved(__name__, "algos.replaying", "ReplayChoice ReplayUpdates StepReplay linear whole_updates")


class Step(NamedTuple):
    """A stored step of one environment."""

    observation: Observation  # [..., *obs], before the action
    action: jax.Array  # [..., *action]
    reward: jax.Array  # [...] float32
    terminated: jax.Array  # [...] bool
    truncated: jax.Array  # [...] bool
    final_observation: Observation  # [..., *obs], after the step, before any automatic reset

    @staticmethod
    def of(observation: Observation, action: jax.Array, time_step: TimeStep) -> "Step":
        """The steps of a rollout `[T, B]`, as `algos.rollout.rollout` recorded them."""
        ended = time_step.terminated, time_step.truncated
        return Step(observation, action, time_step.reward, *ended, time_step.final_observation)


class Sample(NamedTuple):
    """A minibatch, and the indices it was sampled from."""

    transition: Any  # [N], environment-major: a `Transition`; in `SequenceReplay`, a `Sequences`
    indices: jax.Array  # [N] int32, position in the environment's ring; for `Replay.prioritize`
    probability: jax.Array  # [N] float32, of sampling each window from its ring; ones if replay is uniform


class ReplayState(NamedTuple):
    """The contents of a replay buffer."""

    rings: Any  # leading axis B: flashbax's state of each environment's ring
    added: jax.Array  # [] int32: rows of each environment so far

    def resized(self, shape: "ReplayState") -> "ReplayState":
        """Moves the steps to the longer rings of `shape`; unchanged if a step was already overwritten.

        A run that is resumed with more steps calls this, with NumPy arrays.
        """
        ring = self.rings
        if not hasattr(ring, "is_full"):  # a user's ring
            return self
        stored, target = jax.tree.leaves(ring.experience), jax.tree.leaves(shape.rings.experience)
        axis = ring.current_index.ndim + 1  # after the axes of agents and environments, and flashbax's axis
        length, new_length = stored[0].shape[axis], target[0].shape[axis]
        if new_length <= length or np.any(self.added > length):
            return self

        def pad(x: Any) -> np.ndarray:
            return np.pad(x, [(0, new_length - length if i == axis else 0) for i in range(x.ndim)])

        index = np.where(ring.is_full, length, ring.current_index).astype(ring.current_index.dtype)
        changed = {"experience": jax.tree.map(pad, ring.experience), "current_index": index}
        if hasattr(ring, "sum_tree_state"):
            tree, size = ring.sum_tree_state, shape.rings.sum_tree_state.nodes.shape[-1]
            changed["sum_tree_state"] = tree.replace(nodes=_with_more_leaves(tree.nodes, size))
        return self._replace(rings=ring.replace(**changed, is_full=np.zeros_like(ring.is_full)))


def _with_more_leaves(nodes: np.ndarray, size: int) -> np.ndarray:
    """The nodes of a binary tree of sums, level by level from its root, `[..., size]`; new leaves are 0."""
    leaves = nodes[..., nodes.shape[-1] // 2 :]
    levels = [np.pad(leaves, [*[(0, 0)] * (leaves.ndim - 1), (0, size // 2 + 1 - leaves.shape[-1])])]
    while levels[0].shape[-1] > 1:
        levels.insert(0, levels[0][..., ::2] + levels[0][..., 1::2])
    return np.concatenate(levels, axis=-1)


_BATCH_AXES = ReplayState._make((0, None))  # the batch axis of each field


@dataclasses.dataclass(frozen=True)
class Replay:
    """A replay buffer, whose fragments have the role `buffer`.

    Learn from minibatches only when `is_ready`: until then their values are arbitrary.

    Attributes:
      num_envs: B.
      buffer_size: capacity in steps of all environments; rounded down to equal rings.
      batch_size: N, a multiple of `num_envs`.
      learning_starts: steps of all environments after which `is_ready` is true.
      n_step, discount: the length of sampled windows, and gamma.
      priority_exponent: alpha of prioritised replay (Schaul et al. 2016, arXiv 1511.05952): an environment's
        windows are sampled with probability proportional to `priority ** alpha`. Zero is uniform.
      make: makes the buffer of one environment `env` (`algos.buffers`); None: chosen by `priority_exponent`.

    Raises:
      FdgError: at construction, if a field is out of range, or sizes do not fit.
    """

    num_envs: int
    buffer_size: int
    batch_size: int
    learning_starts: int = 0
    n_step: int = 1
    discount: float = 0.99
    priority_exponent: float = 0.0
    make: Any = None
    env: Any = None

    def __post_init__(self):
        require_positive(self, "num_envs", "buffer_size", "batch_size", "n_step")
        require_within(self, 0, 1, "discount", "priority_exponent")
        require(
            self,
            self.batch_size % self.num_envs == 0,
            f"batch_size={self.batch_size} is no multiple of num_envs={self.num_envs}:"
            " a minibatch has as many samples of each environment",
        )
        require(
            self,
            self.window <= self.length,
            f"buffer_size={self.buffer_size} holds no window of {self._window_setting} steps of"
            f" num_envs={self.num_envs} environments: make it at least"
            f" {self.num_envs * self.window * self.steps_per_row}",
        )
        require(
            self,
            0 <= self.learning_starts <= self.buffer_size,
            f"learning_starts={self.learning_starts}: it must be from 0 to buffer_size={self.buffer_size}",
        )

    # --- overridden where rows are sequences (`algos/sequences.py`) ---

    def as_rows(self, memory: Any, start: jax.Array | None, steps: Step) -> Any:
        """Converts a rollout `[T, B]` for `add`; single steps have no memory."""
        return steps

    def map_observations(self, function: Callable[[Observation], Observation], minibatch: Any) -> Any:
        """Applies a function, such as normalisation, to the observations of a minibatch."""
        return minibatch._replace(
            observation=function(minibatch.observation), next_observation=function(minibatch.next_observation)
        )

    def transitions(self, minibatch: Any, weight: jax.Array | None) -> tuple[Transition, jax.Array | None]:
        """A minibatch as transitions, and a weight for each transition (None without weights)."""
        return minibatch, weight

    def transitions_and_keys(self, minibatch: Any, keys: jax.Array) -> tuple[Any, jax.Array]:
        """A minibatch `[N]` as transitions, and `keys [K, N]` as K keys for each transition."""
        return minibatch, keys

    def priority(self, error: jax.Array) -> jax.Array:
        """Reduces errors of transitions to one for each sample, `[N]`."""
        return error

    @property
    def steps_per_row(self) -> int:
        """Steps of an environment in one row of its ring."""
        return 1

    @property
    def window(self) -> int:
        """Consecutive rows that are sampled together."""
        return self.n_step

    @property
    def least_rows(self) -> int:
        """Rows of an environment that sampling needs."""
        return max(self.window, self._ring.least_rows)

    @property
    def has_priorities(self) -> bool:
        """True if errors change the sampling."""
        return self._ring.update is not None

    @property
    def length(self) -> int:
        """Rows of one environment's ring."""
        return self.buffer_size // (self.num_envs * self.steps_per_row)

    def init(self, observation: Observation, action: Any, memory: Any = None) -> ReplayState:
        """An empty buffer for `observation [B, *obs]`, `action [B, *action]`; uses only shapes and dtypes."""
        scalar, ended = jnp.zeros(self.num_envs, jnp.float32), jnp.zeros(self.num_envs, bool)
        return self.init_of_rows(Step(observation, action, scalar, ended, ended, observation))

    def init_of_rows(self, rows: Any) -> ReplayState:
        """An empty buffer for `rows [B, ...]`, one per environment; only shapes and dtypes are used."""
        ring = self._ring.init(jax.tree.map(lambda x: jnp.zeros_like(x[0]), rows))
        rings = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.num_envs, *x.shape)), ring)
        # flashbax makes some numbers weakly typed, but only initially; programs would compile twice.
        rings = jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), rings)
        return ReplayState(rings, jnp.int32(0))

    @fdg.fragment("buffer", in_axes=(_BATCH_AXES, 1), out_axes=_BATCH_AXES)
    def add(self, state: ReplayState, steps: Any) -> ReplayState:
        """Appends a rollout `[T, B]`, which continues the last one; overwrites the oldest steps."""
        count, row_steps = jax.tree.leaves(steps)[0].shape[0], self.steps_per_row
        num_steps = count * row_steps
        require(
            self,
            count <= self.length,
            f"a rollout of {num_steps} steps is longer than the {self.length * row_steps} of each environment"
            f" that buffer_size={self.buffer_size} keeps: make it at least {num_steps * self.num_envs}",
        )
        by_environment = jax.tree.map(lambda x: x.swapaxes(0, 1), steps)
        return ReplayState(jax.vmap(self._ring.add)(state.rings, by_environment), state.added + count)

    def sample(self, state: ReplayState, key: jax.Array) -> Sample:
        """Samples a minibatch of windows uniformly from the rings, with replacement."""
        samples = self._sample(state, jax.random.split(key, self.num_envs))
        return jax.tree.map(lambda x: x.reshape(self.batch_size, *x.shape[2:]), samples)

    def samples(self, state: ReplayState, keys: jax.Array) -> Sample:
        """All minibatches that `sample` returns for the keys `[U]`: every field is `[U, N, ...]`."""
        env_keys = jax.vmap(lambda key: jax.random.split(key, self.num_envs))(keys)
        samples = self._samples(state, env_keys)
        return jax.tree.map(lambda x: x.reshape(len(keys), self.batch_size, *x.shape[3:]), samples)

    def prioritize(
        self, state: ReplayState, indices: jax.Array, priority: jax.Array, ready: jax.Array | None = None
    ) -> ReplayState:
        """Sets the priorities `[N]` float32 of a `Sample`'s windows, by `indices [N]`.

        Does nothing if replay is uniform, or `ready` is False (None: `is_ready`).
        """
        if not self.has_priorities:
            return state
        ready = self.is_ready(state) if ready is None else ready
        shape = (self.num_envs, -1)
        return self._prioritize(state, ready, indices.reshape(shape), priority.reshape(shape))

    def weight(self, sample: Sample, beta: float | jax.Array) -> jax.Array:
        """The samples' `importance_weight`, `[N]` float32: ones if replay is uniform."""
        if not self.has_priorities:
            return jnp.ones(self.batch_size, jnp.float32)
        return importance_weight(sample.probability, beta)

    def is_ready(self, state: ReplayState) -> jax.Array:
        """Whether learning may start: `[]` bool.

        The buffer must have `learning_starts` steps (or as many as fit), and a window of each environment.
        """
        return state.added >= self._rows_until_ready

    def first_ready_iteration(self, num_steps: int) -> int:
        """The first iteration (from 0) whose rollout of `num_steps` steps makes the buffer ready."""
        return -(-self._rows_until_ready * self.steps_per_row // num_steps) - 1

    @property
    def _rows_until_ready(self) -> int:
        rows = math.ceil(self.learning_starts / (self.num_envs * self.steps_per_row))
        return max(self.least_rows, min(rows, self.length))

    @fdg.fragment("buffer", in_axes=(_BATCH_AXES, 0), name="sample")
    def _sample(self, state: ReplayState, keys: jax.Array) -> Sample:
        """Samples each ring with its own key: a `Sample [B, N / B]`."""
        return self._sample_rings(state, keys)

    def _sample_rings(self, state: ReplayState, keys: jax.Array) -> Sample:
        windows = jax.vmap(self._ring.sample)(state.rings, keys)
        return Sample(self._minibatch_of_windows(windows.rows), windows.indices, windows.probability)

    def _minibatch_of_windows(self, windows: Any) -> Any:
        """Summarises windows `[B, N / B, n_step]`: `[B, N / B]`."""
        return jax.vmap(lambda windows: summarize(windows, self.discount))(windows)

    @fdg.fragment("buffer", in_axes=(_BATCH_AXES, 1), out_axes=1, name="samples")
    def _samples(self, state: ReplayState, keys: jax.Array) -> Sample:
        """Samples each ring with its own keys `[U, B]`: a `Sample [U, B, N / B]`."""
        return jax.vmap(self._sample_rings, in_axes=(None, 0))(state, keys)

    @fdg.fragment("buffer", in_axes=(_BATCH_AXES, None, 0, 0), out_axes=_BATCH_AXES, name="prioritize")
    def _prioritize(self, state: ReplayState, ready, indices, priority) -> ReplayState:
        update = self._ring.update
        assert update is not None  # `prioritize` has checked it
        update_rings = jax.vmap(update, in_axes=(0, 0, 0, None))
        return state._replace(rings=update_rings(state.rings, indices, priority, ready))

    @property
    def _window_setting(self) -> str:
        return f"n_step={self.n_step}"

    @property
    def _ring(self) -> ReplayBuffer:
        spec = BufferSpec(self.env, self.length, self.batch_size // self.num_envs, self.window)
        if self.make is not None:
            return buffers.make_buffer(self.make, spec)
        exponent = self.priority_exponent
        return buffers.prioritized(spec, exponent) if exponent else buffers.uniform(spec)


def summarize(window: Step, discount: float) -> Transition:
    """The n-step transitions of windows `[N, n]`, each cut at the end of its first episode.

    Rewards are summed up to that end (`buffers.n_step_sums`). The next observation is the one after the last
    step of the sum; the discount is zero if that step terminated.

    >>> row = lambda *values: jnp.array([values])
    >>> steps = Step(
    ...     observation=row(0, 1, 7),
    ...     action=row(5, 5, 5),
    ...     reward=row(1.0, 2.0, 4.0),
    ...     terminated=row(False, False, False),
    ...     truncated=row(False, True, False),  # the third step is another episode's
    ...     final_observation=row(1, 2, 8),
    ... )
    >>> transition = summarize(steps, 0.5)
    >>> float(transition.reward[0]), float(transition.discount[0]), int(transition.next_observation[0])
    (2.0, 0.25, 2)
    """
    count = window.reward.shape[1]
    sums = n_step_sums(window.reward.T, window.terminated.T, window.truncated.T, discount, count)
    reward, weight, last = (x[0] for x in sums)  # [N], of the windows' first steps

    return Transition(
        observation=jax.tree.map(lambda x: x[:, 0], window.observation),
        action=window.action[:, 0],
        reward=reward,
        discount=weight,
        next_observation=jax.tree.map(lambda x: rows_at(x, last), window.final_observation),
    )


def rows_at(x: jax.Array, index: jax.Array) -> jax.Array:
    """Selects rows of each sequence, `x[i, index[i]]`, of `x [N, L, ...]` by `index [N, ...]` int32."""
    return jax.vmap(lambda steps, i: steps[i])(x, index)


def importance_weight(probability: jax.Array, beta: float | jax.Array) -> jax.Array:
    """Weights `[N]` that correct for sampling by priority; the largest is one.

    `(1 / (count * probability)) ** beta`, divided by the largest in the minibatch (Schaul et al. 2016,
    section 3.4 and algorithm 1, line 10); the count cancels.

    >>> importance_weight(jnp.array([0.5, 0.125]), 0.5).tolist()
    [0.5, 1.0]
    """
    # Sums in the tree are rounded, so rarely a window of probability zero is sampled; its weight is zero.
    possible = probability > 0.0
    least = jnp.min(jnp.where(possible, probability, jnp.inf))
    return jnp.where(possible, (least / jnp.where(possible, probability, 1.0)) ** beta, 0.0)


def prioritized_steps(
    self: Any, state: Any, sample_key: jax.Array, learn_key: jax.Array, is_learning: jax.Array
) -> tuple[Any, ReplayState, Any]:
    """`algos.off_policy.gradient_steps` if errors change priorities: each step samples its own minibatch."""
    replay, beta = self.buffer, self.replays.beta(state.iteration, self.num_iterations)

    def one_step(carry, keys):
        learned, replay_state = carry
        sample = replay.sample(replay_state, keys[0])
        weighted = sample.transition._replace(weight=replay.weight(sample, beta))
        minibatch = jax.tree.map(lambda x: x[None], weighted)
        minibatch = replaying.transform_and_scale(self, state, minibatch, learned, keys[1])
        learned, error, losses = self.learn(
            learned, state.observation_statistics, minibatch, keys[1], is_learning
        )
        # Proportional prioritisation, equation 1 of Schaul et al.; 1e-6 keeps priorities above zero.
        priority = jnp.abs(error[0]) + 1e-6
        replay_state = replay.prioritize(replay_state, sample.indices, priority, is_learning)
        return (learned, replay_state), losses

    updates = self.updates_per_iteration
    keys = jnp.stack([jax.random.split(key, updates) for key in (sample_key, learn_key)], axis=1)
    (learned, replay_state), losses = jax.lax.scan(one_step, (state.learned, state.replay), keys)
    return learned, replay_state, jax.tree.map(lambda x: jnp.mean(x, axis=0), losses)
