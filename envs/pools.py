"""The interface of host environments: sources start pools of instances; a step returns a `Transition`.

A pool works on NumPy arrays and does not use JAX. `envs.host` implements `envs.Environment` with it.

Shapes: `B` instances; `*wire`, the shape of a row in a pool's arrays (`wire_space`).
"""

from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from envs.deadline import Deadline
from envs.spaces import Space
from fdg.errors import HostError


class DiedAtStartError(HostError):
    """A worker process ended while it made or reset its instances; another try may succeed."""


class Failure(NamedTuple):
    """Instances that a step lost."""

    rows: np.ndarray  # [F] int, indices
    reason: str  # "worker 3 was killed by signal 9"


class Transition(NamedTuple):
    """The result of a pool's step; NumPy arrays that the pool does not reuse."""

    observation: np.ndarray  # [B, *wire] after the auto-reset
    reward: np.ndarray  # [B] float32
    terminated: np.ndarray  # [B] bool
    truncated: np.ndarray  # [B] bool; may be true where `terminated` is
    final_observation: np.ndarray  # [B, *wire] before the auto-reset
    info: tuple[np.ndarray, ...] = ()  # [B] float32 each, of the ended episode, in the order of `Source.info`
    failures: Sequence[Failure] = ()  # rows of failed instances are zero

    @property
    def arrays(self) -> list[np.ndarray]:
        """All arrays, those of `info` last."""
        return [*self[:5], *self.info]

    @staticmethod
    def of_arrays(arrays: Iterable[np.ndarray], failures: Sequence[Failure] = ()) -> "Transition":
        """The transition with these `arrays`."""
        observation, reward, terminated, truncated, final, *info = arrays
        return Transition(observation, reward, terminated, truncated, final, tuple(info), failures)

    @staticmethod
    def empty(size: int, space: Space, num_info: int = 0) -> "Transition":
        """Arrays of zeros for `size` rows."""
        observation = np.zeros((2, size, *space.shape), space.dtype)
        flags = np.zeros((2, size), np.bool_)
        rewards = np.zeros((1 + num_info, size), np.float32)
        return Transition(observation[0], rewards[0], flags[0], flags[1], observation[1], tuple(rewards[1:]))

    @staticmethod
    def all_lost(size: int, space: Space, reason: str, num_info: int = 0) -> "Transition":
        """The result of a step that lost all instances."""
        return Transition.empty(size, space, num_info)._replace(failures=[Failure(np.arange(size), reason)])

    @staticmethod
    def stack(steps: Sequence["Transition"]) -> "Transition":
        """Stacks steps along a new leading axis."""
        return Transition.of_arrays(map(np.stack, zip(*(step.arrays for step in steps), strict=True)))


class Recreated(NamedTuple):
    """Instances that replace lost ones.

    Their first step is a truncation with reward 0. A worker's actor still acts on the last observation of the
    lost instances; this action has no effect.
    """

    last_observation: np.ndarray  # [n, *wire], of the lost instances
    first_observation: np.ndarray  # [n, *wire], of the new instances
    num_info: int = 0  # number of episode metrics, which are unknown for lost instances

    def step(self) -> Transition:
        """The first step of these instances."""
        size = len(self.first_observation)
        false, reward = np.zeros(size, np.bool_), np.zeros(size, np.float32)
        unknown = tuple(np.full((self.num_info, size), np.nan, np.float32))
        return Transition(self.first_observation, reward, false, ~false, self.first_observation, unknown)

    def select(self, rows: np.ndarray) -> "Recreated":
        """The recreated instances of some rows."""
        return Recreated(self.last_observation[rows], self.first_observation[rows], self.num_info)


Array = TypeVar("Array")  # NumPy's or JAX's


class ActorInputs(NamedTuple, Generic[Array]):
    """What an actor in a worker reads besides observations, in a segment of T steps."""

    fixed: Sequence[Array]  # such as parameters
    per_step: Sequence[Array]  # [T, B, ...] each, such as keys


class Segment(NamedTuple):
    """T steps of instances for which a worker acted."""

    extras: Sequence[np.ndarray]  # [T, B, ...] each, the actor's outputs besides actions
    steps: Transition  # [T, B, ...]; `failures` refer to the whole segment

    @property
    def arrays(self) -> list[np.ndarray]:
        """The extras, then the arrays of the steps."""
        return [*self.extras, *self.steps.arrays]

    @staticmethod
    def concatenate(
        parts: Sequence["Segment | None"], sizes: Sequence[int], failures: Sequence[Failure]
    ) -> "Segment":
        """Concatenates the segments of workers; rows of lost workers are zero."""
        example = next((part for part in parts if part is not None), None)
        if example is None:
            return Segment((), Transition.of_arrays([np.zeros((0, 0))] * 5, failures))
        shapes = example.arrays

        def arrays(part: "Segment | None", size: int) -> list[np.ndarray]:
            if part is not None:
                return part.arrays
            return [np.zeros((len(x), size, *x.shape[2:]), x.dtype) for x in shapes]

        worker_arrays = [arrays(part, size) for part, size in zip(parts, sizes, strict=True)]
        joined_arrays = [np.concatenate(x, axis=1) for x in zip(*worker_arrays, strict=True)]
        count = len(example.extras)
        return Segment(joined_arrays[:count], Transition.of_arrays(joined_arrays[count:], failures))


class Pool(Protocol):
    """The instances of an environment. Every call returns or raises within its time limit."""

    def reset(self, rows: np.ndarray, seeds: np.ndarray, timeout: float) -> np.ndarray:
        """Recreates the instances `rows [F]` from the seeds `[F]`; returns observations `[F, *wire]`."""

    def step(self, action: np.ndarray, timeout: float) -> Transition:
        """Steps every instance; those whose episode ends are reset in the same call."""

    def close(self) -> None:
        """Ends everything that the pool runs, even if it hangs."""

    # Optional, if instances run in other threads or processes: `send(action, timeout)` starts a step and
    # returns at once; `recv(timeout) -> Transition` waits for the step; `ready() -> bool` is True if `recv`
    # would not wait.
    # If workers act: `segment(program, num_steps, inputs, rows, recreated, timeout)` makes steps of the
    # instances `rows`, all those of some workers, and returns a `Segment`; `inputs` are those of the batch.


class Source(Protocol):
    """A frozen, hashable source of instances. Tracing only needs its spaces."""

    @property
    def name(self) -> str:
        """The name for `envs.make`."""

    @property
    def observation_space(self) -> Any:
        """Space of one observation."""

    @property
    def action_space(self) -> Space:
        """Space of one action."""

    @property
    def max_episode_steps(self) -> int | None:
        """Steps after which the library truncates an episode."""

    # Optional: `info`, the names of episode metrics; and if observations have parts, `wire_space`, the space
    # of rows in the pool's arrays, and `unpack(rows)`, which restores observations in a compiled program. If
    # workers act: `acts`; `shares(size)`, the number of instances of each worker; and `trace_actor`, which is
    # `satellites.trace` or `numpy_actors.trace`.

    def start(self, size: int) -> Pool:
        """A pool of `size` instances, which its first `reset` creates."""


def wire_space(source: Source) -> Space:
    """The space of a row of a pool's array: the observation space, unless observations have parts."""
    return getattr(source, "wire_space", None) or source.observation_space


class InTwoHalves:
    """Base class of pools that have `send` and `recv`: `step` calls one after the other."""

    def step(self: Any, action: np.ndarray, timeout: float) -> Transition:
        """Steps every instance; those whose episode ends are reset in the same call."""
        self.send(action, timeout)
        return self.recv(timeout)


class SendRecv:
    """`send` and `recv` for any pool: the pool's own methods, or a thread that calls the pool's `step`."""

    def __init__(self, pool: Any):
        self._pool, self._pool_has_both = pool, hasattr(pool, "send") and hasattr(pool, "recv")
        self._caller: Deadline | None = None

    def send(self, action: np.ndarray, timeout: float) -> None:
        """Starts a step of every instance without waiting."""
        if self._pool_has_both:
            self._pool.send(action, timeout)
            return
        self._caller = self._caller or Deadline()
        self._caller.begin(lambda: self._pool.step(action, timeout))

    def recv(self, timeout: float) -> Transition:
        """Waits for the step; raises its error."""
        if self._pool_has_both:
            return self._pool.recv(timeout)
        assert self._caller is not None
        return self._caller.finish(None)  # the pool's `step` has its own time limit

    def ready(self) -> bool:
        """Whether `recv` would return at once; True if unknown."""
        if self._pool_has_both:
            return not hasattr(self._pool, "ready") or self._pool.ready()
        return self._caller is None or self._caller.ready()

    def close(self) -> None:
        """Ends the thread."""
        if self._caller is not None:
            self._caller.close()
