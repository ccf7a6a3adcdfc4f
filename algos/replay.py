"""Replay: steps that the environments took, kept on the devices, and minibatches drawn from them.

A thin layer over flashbax, whose buffers are rings of static shape `[B, length]`: one row an environment, in
the order of time. It adds what learning needs to be right:

- Each step is stored with the observation that it led to *before* the automatic reset, and with how the
  episode ended, if it did. So a truncated episode bootstraps and a terminated one does not (`algos.returns`).
- A window of `n_step` steps is cut at the episode's end (`summarize`): no reward of the next one leaks in.

**Under a policy** each environment has a ring of its own, and a minibatch takes equally many windows from
each, by a key of its own. So a buffer that is split as the environments are exchanges nothing, neither to add
nor to sample; its memory grows with the devices; and the numbers are those of one device.

Letters in shapes: `T` steps of a rollout, `B` environments, `N` samples, `n` steps of a window.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flashbax
import jax
import jax.numpy as jnp
import numpy as np

import fdg
from algos.returns import n_step_sums
from envs import Observation, TimeStep
from fdg.settings.fields import hyperparameter, is_traced, require, require_positive, require_within
from fdg.settings.parts import Part


@dataclasses.dataclass(frozen=True)
class ReplayUpdates(Part):
    """What is kept for replay, and how often what is drawn from it is learned from."""

    buffer_size: int = hyperparameter(10_000, "steps that are kept for replay, of all environments together")
    batch_size: int = hyperparameter(128, "samples of a gradient step, as many of each environment")
    learning_starts: int = hyperparameter(10_000, "environment steps before the first gradient step")
    updates_per_step: float = hyperparameter(
        1.0, "gradient steps for each environment step", structural="how often a loop runs"
    )

    def check(self, algorithm: Any) -> None:
        """Refuses sizes that are not positive, and gradient steps that are no whole number."""
        require_positive(algorithm, "batch_size")
        require(
            algorithm, self.learning_starts >= 0, f"learning_starts={self.learning_starts}: it is below zero"
        )
        whole_updates(algorithm)


def whole_updates(algorithm: Any) -> int:
    """Gradient steps in one iteration: `updates_per_step` times the environment steps of all environments.

    Raises:
      FdgError: the product is not a whole number above zero.
    """
    require(
        algorithm, not is_traced(algorithm.updates_per_step), "updates_per_step cannot be a traced number"
    )
    require_positive(algorithm, "updates_per_step")
    rate, steps = algorithm.updates_per_step, algorithm.steps_per_iteration
    exact = rate * steps
    require(
        algorithm,
        0.5 < exact < 2**31 and math.isclose(round(exact), exact),
        f"updates_per_step={rate} times num_envs * num_steps={steps} makes {exact:g} updates an iteration:"
        " it must be a whole number above zero",
    )
    return round(exact)


class Step(NamedTuple):
    """One step of one environment, as it is stored."""

    observation: Observation  # [..., *obs] what the action answered to
    action: jax.Array  # [..., *action]
    reward: jax.Array  # [...] float32
    terminated: jax.Array  # [...] bool
    truncated: jax.Array  # [...] bool
    final_observation: Observation  # [..., *obs] what the step led to, before any automatic reset

    @staticmethod
    def of(observation: Observation, action: jax.Array, time_step: TimeStep) -> "Step":
        """The steps of a rollout `[T, B]`, from what `algos.rollout.rollout` recorded."""
        return Step(
            observation,
            action,
            time_step.reward,
            time_step.terminated,
            time_step.truncated,
            time_step.final_observation,
        )


class Transition(NamedTuple):
    """What learning needs of a window of steps: `target = reward + discount * V(next_observation)`."""

    observation: Observation  # [N, *obs]
    action: jax.Array  # [N, *action]
    reward: jax.Array  # [N] float32, discounted sum over the window
    discount: jax.Array  # [N] float32, of the value that follows it; zero where the episode terminated
    next_observation: Observation  # [N, *obs], what the window led to, before any automatic reset


class Sample(NamedTuple):
    """A minibatch, and where it came from."""

    transition: Any  # [N], environment-major: a `Transition`, or what a subclass of `Replay` makes of windows
    indices: jax.Array  # [N] int32, position in the environment's ring; for `Replay.prioritize`
    probability: jax.Array  # [N] float32, of being drawn from that ring; one everywhere if replay is uniform


class ReplayState(NamedTuple):
    """What is stored."""

    rings: Any  # leading axis B: flashbax's state of each environment's ring
    added: jax.Array  # [] int32: rows of each environment so far

    def resized(self, shape: "ReplayState") -> "ReplayState":
        """The same steps in the longer rings of `shape`; itself where a step was overwritten already.

        A run that is resumed for longer restores its checkpoint through this. Arrays are NumPy's.
        """
        ring = self.rings
        if not hasattr(ring, "is_full"):  # prioritised: its tree has the ring's length
            return self
        stored, wanted = jax.tree.leaves(ring.experience), jax.tree.leaves(shape.rings.experience)
        axis = ring.current_index.ndim + 1  # after those of agents and environments, and flashbax's own
        length, longer = stored[0].shape[axis], wanted[0].shape[axis]
        if longer <= length or np.any(self.added > length):
            return self

        def padded(x: Any) -> np.ndarray:
            return np.pad(x, [(0, longer - length if each == axis else 0) for each in range(x.ndim)])

        index = np.where(ring.is_full, length, ring.current_index).astype(ring.current_index.dtype)
        experience = jax.tree.map(padded, ring.experience)
        return self._replace(
            rings=ring.replace(
                experience=experience, current_index=index, is_full=np.zeros_like(ring.is_full)
            )
        )


_AXES = ReplayState._make((0, None))  # the batch axis of each field

# The largest priority so far, which new steps get, is rounded down to an integer by flashbax 0.1.3, so
# priorities are kept in small units. Only their ratios matter.
_PRIORITY_UNIT = 1024.0


@dataclasses.dataclass(frozen=True)
class Replay:
    """A replay buffer, on fragments of role `buffer`.

    A frozen value: algorithms make one from their hyperparameters where they need it. Until `is_ready`, and
    in particular while the buffer is empty, `sample` gives a minibatch that is not to be learned from.

    Attributes:
      num_envs: B.
      buffer_size: steps that are kept, of all environments together, rounded down to the same for each.
      batch_size: N, a multiple of `num_envs`.
      learning_starts: steps of all environments together after which `is_ready` is true.
      n_step: length of the windows that are drawn.
      discount: gamma.
      priority_exponent: alpha of prioritised replay (Schaul et al. 2016, arXiv 1511.05952): of an
        environment's windows, each is drawn with probability proportional to `priority ** alpha`. Zero, the
        default, is uniform replay.

    Raises:
      FdgError: (construction) a field out of range, or sizes that do not fit.
    """

    num_envs: int
    buffer_size: int
    batch_size: int
    learning_starts: int = 0
    n_step: int = 1
    discount: float = 0.99
    priority_exponent: float = 0.0

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
            self.n_step <= self.length,
            f"buffer_size={self.buffer_size} holds no window of {self._window} steps of"
            f" num_envs={self.num_envs} environments: make it at least"
            f" {self.num_envs * self.n_step * self.steps_of_a_row}",
        )
        kept = self.num_envs * self.length * self.steps_of_a_row
        require(
            self,
            0 <= self.learning_starts <= kept,
            f"learning_starts={self.learning_starts}: it must be from 0 to the {kept}"
            f" steps that buffer_size={self.buffer_size} holds",
        )

    @property
    def steps_of_a_row(self) -> int:
        """Steps of an environment that are one row of its ring."""
        return 1

    @property
    def length(self) -> int:
        """Rows of one environment's ring."""
        return self.buffer_size // (self.num_envs * self.steps_of_a_row)

    def init(self, observation: Observation, action: Any) -> ReplayState:
        """An empty buffer for `observation [B, *obs]` and `action [B, *action]`; only their types count."""
        scalar, ended = jnp.zeros(self.num_envs), jnp.zeros(self.num_envs, bool)
        return self.init_of_rows(Step(observation, action, scalar, ended, ended, observation))

    def init_of_rows(self, rows: Any) -> ReplayState:
        """An empty buffer for `rows`, one of each environment, `[B, ...]`; only their types count."""
        ring = self._ring.init(jax.tree.map(lambda x: jnp.zeros_like(x[0]), rows))
        if self.priority_exponent:
            tree = ring.sum_tree_state.replace(max_recorded_priority=jnp.float32(_PRIORITY_UNIT))
            ring = ring.replace(sum_tree_state=tree)
        rings = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.num_envs, *x.shape)), ring)
        # Some of flashbax's numbers are weakly typed at first and not later, which would compile twice.
        rings = jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), rings)
        return ReplayState(rings, jnp.int32(0))

    @fdg.fragment("buffer", in_axes=(_AXES, 1), out_axes=_AXES)
    def add(self, state: ReplayState, steps: Any) -> ReplayState:
        """Appends a rollout `[T, B]`, which continues the last one; the oldest steps give way."""
        count, each = jax.tree.leaves(steps)[0].shape[0], self.steps_of_a_row
        require(
            self,
            count <= self.length,
            f"a rollout of {count * each} steps is longer than the {self.length * each} of each environment"
            f" that buffer_size={self.buffer_size} keeps: make it at least {count * each * self.num_envs}",
        )
        by_environment = jax.tree.map(lambda x: x.swapaxes(0, 1)[:, None], steps)  # a ring takes rows [1, T]
        return ReplayState(self._per_ring(self._ring.add)(state.rings, by_environment), state.added + count)

    def sample(self, state: ReplayState, key: jax.Array) -> Sample:
        """A minibatch of windows that lie anywhere in the rings, drawn with replacement."""
        drawn = self._sample(state, jax.random.split(key, self.num_envs))
        return jax.tree.map(lambda x: x.reshape(self.batch_size, *x.shape[2:]), drawn)

    def samples(self, state: ReplayState, keys: jax.Array) -> Sample:
        """The minibatches that `sample` gives for `keys [U]`, all at once: every field is `[U, N, ...]`."""
        each = jax.vmap(lambda key: jax.random.split(key, self.num_envs))(keys)
        drawn = self._samples(state, each)
        return jax.tree.map(lambda x: x.reshape(len(keys), self.batch_size, *x.shape[3:]), drawn)

    def prioritize(self, state: ReplayState, indices: jax.Array, priority: jax.Array) -> ReplayState:
        """Gives the windows of a `Sample`, by its `indices [N]`, new priorities `[N]` float32.

        Nothing changes where replay is uniform, nor before `is_ready`: what was drawn then may be no window.
        """
        if not self.priority_exponent:
            return state
        shape = (self.num_envs, -1)
        return self._prioritize(state, self.is_ready(state), indices.reshape(shape), priority.reshape(shape))

    def weight(self, sample: Sample, beta: float | jax.Array) -> jax.Array:
        """The samples' `importance_weight`, `[N]` float32: ones where replay is uniform."""
        if not self.priority_exponent:
            return jnp.ones(self.batch_size)
        return importance_weight(sample.probability, beta)

    def is_ready(self, state: ReplayState) -> jax.Array:
        """Whether `learning_starts` steps are there, and a window of each environment: `[]` bool."""
        rows = math.ceil(self.learning_starts / (self.num_envs * self.steps_of_a_row))
        return state.added >= max(self.n_step, rows)

    @fdg.fragment("buffer", in_axes=(_AXES, 0), name="sample")
    def _sample(self, state: ReplayState, keys: jax.Array) -> Sample:
        """From each ring, by its own key: a `Sample [B, N / B]`."""
        return self._drawn(state, keys)

    def _drawn(self, state: ReplayState, keys: jax.Array) -> Sample:
        drawn = self._per_ring(self._ring.sample)(state.rings, keys)
        if self.priority_exponent:
            indices, probability = drawn.indices, drawn.probabilities
        else:
            shape = (self.num_envs, self.batch_size // self.num_envs)
            indices, probability = jnp.zeros(shape, jnp.int32), jnp.ones(shape)
        return Sample(self._of_windows(drawn.experience), indices, probability)

    def _of_windows(self, windows: Any) -> Any:
        """What is learned from, of windows `[B, N / B, n_step]`: `[B, N / B]`."""
        return jax.vmap(lambda windows: summarize(windows, self.discount))(windows)

    @fdg.fragment("buffer", in_axes=(_AXES, 1), out_axes=1, name="samples")
    def _samples(self, state: ReplayState, keys: jax.Array) -> Sample:
        """From each ring, by each of its own `keys [U, B]`: a `Sample [U, B, N / B]`."""
        return jax.vmap(self._drawn, in_axes=(None, 0))(state, keys)

    @fdg.fragment("buffer", in_axes=(_AXES, None, 0, 0), out_axes=_AXES, name="prioritize")
    def _prioritize(self, state: ReplayState, ready, indices, priority) -> ReplayState:
        """Windows `[B, N / B]`."""
        # An index beyond the end of the tree, with priority zero, is what flashbax skips.
        indices = jnp.where(ready, indices, 4 * self.length)
        raised = jnp.where(ready, _PRIORITY_UNIT * priority**self.priority_exponent, 0.0)
        return state._replace(rings=self._per_ring(self._ring.set_priorities)(state.rings, indices, raised))

    @property
    def _window(self) -> str:
        return f"n_step={self.n_step}"

    def _per_ring(self, function: Callable) -> Callable:
        """A function of flashbax, over all rings."""

        def over_all(*arguments):
            with jax.numpy_rank_promotion("allow"):  # flashbax broadcasts over leading axes without a word
                return jax.vmap(function)(*arguments)

        return over_all

    @property
    def _ring(self) -> Any:
        """flashbax's functions on the ring of one environment. `period=1`: a window may start at any step."""
        shape: dict[str, Any] = {
            "add_batch_size": 1,
            "sample_batch_size": self.batch_size // self.num_envs,
            "sample_sequence_length": self.n_step,
            "period": 1,
            "min_length_time_axis": self.n_step,
            "max_length_time_axis": self.length,
        }
        if not self.priority_exponent:
            return flashbax.make_trajectory_buffer(**shape)
        # `prioritize` applies the exponent. "cpu" names a way to update the tree, one priority after the
        # other, and runs on any device.
        return flashbax.make_prioritised_trajectory_buffer(**shape, priority_exponent=1.0, device="cpu")


def summarize(window: Step, discount: float) -> Transition:
    """The n-step transition of windows `[N, n]`, cut at the end of the episode that they start in.

    Rewards are summed up to that end (`returns.n_step_sums`); the next observation is what the last step
    counted led to, and its value is worth `discount` for every step, or nothing if the last one terminated.

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
    reward, weight, last = (x[0] for x in sums)  # from the window's first step on: [N]

    def at_last(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda steps, position: steps[position])(x, last)

    return Transition(
        observation=jax.tree.map(lambda x: x[:, 0], window.observation),
        action=window.action[:, 0],
        reward=reward,
        discount=weight,
        next_observation=jax.tree.map(at_last, window.final_observation),
    )


def importance_weight(probability: jax.Array, beta: float | jax.Array) -> jax.Array:
    """Weights `[N]` that make up for the drawing by priority, the largest of them one.

    `(1 / (count * probability)) ** beta`, divided by its largest value in the minibatch (Schaul et al. 2016,
    section 3.4 and algorithm 1, line 10); the count cancels.

    >>> importance_weight(jnp.array([0.5, 0.125]), 0.5).tolist()
    [0.5, 1.0]
    """
    # The tree's sums are rounded, so that rarely a window of probability zero is drawn: it weighs nothing.
    possible = probability > 0.0
    least = jnp.min(jnp.where(possible, probability, jnp.inf))
    return jnp.where(possible, (least / jnp.where(possible, probability, 1.0)) ** beta, 0.0)
