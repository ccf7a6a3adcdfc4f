"""What environments on the host are made of: sources, which start pools of instances, and what a step gives.

A pool works on NumPy arrays and knows nothing of JAX. `envs.host` puts it behind `envs.Environment`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from envs.deadline import Deadline
from envs.spaces import Space


class Failure(NamedTuple):
    """Instances that a step has lost."""

    rows: np.ndarray  # [F] int, which
    reason: str  # "worker 3 was killed by signal 9"


class Transition(NamedTuple):
    """What a pool's step gives; NumPy arrays that the pool does not use again."""

    observation: np.ndarray  # [B, *obs] after the auto-reset
    reward: np.ndarray  # [B] float32
    terminated: np.ndarray  # [B] bool
    truncated: np.ndarray  # [B] bool; may be true where `terminated` is
    final_observation: np.ndarray  # [B, *obs] before the auto-reset
    info: tuple[np.ndarray, ...] = ()  # [B] float32 each, of the episode that ended, as `Source.info` names
    failures: Sequence[Failure] = ()  # the rows of these hold nothing

    @staticmethod
    def empty(size: int, space: Space, info: int = 0) -> "Transition":
        """Arrays to write rows into; and that many of information."""
        observation = np.zeros((2, size, *space.shape), space.dtype)
        flags = np.zeros((2, size), np.bool_)
        rewards = np.zeros((1 + info, size), np.float32)
        return Transition(observation[0], rewards[0], flags[0], flags[1], observation[1], tuple(rewards[1:]))

    @staticmethod
    def lost(size: int, space: Space, reason: str, info: int = 0) -> "Transition":
        """What a step gives that has lost all instances."""
        return Transition.empty(size, space, info)._replace(failures=[Failure(np.arange(size), reason)])

    @staticmethod
    def stacked(steps: Sequence["Transition"]) -> "Transition":
        """Steps one after the other, each array with a leading axis for them."""
        info = tuple(map(np.stack, zip(*(step.info for step in steps), strict=True)))
        arrays = map(np.stack, zip(*(step[:5] for step in steps), strict=True))
        return Transition._make([*arrays, info, ()])


class Begun(NamedTuple):
    """Instances that begin in place of lost ones: their first step is a truncation without a reward."""

    seen: np.ndarray  # [n, *obs], of the lost ones, last
    first: np.ndarray  # [n, *obs], of the new ones
    info: int = 0  # numbers that an episode reports, which are not known of lost ones

    def step(self) -> Transition:
        """That step."""
        size = len(self.first)
        no, reward = np.zeros(size, np.bool_), np.zeros(size, np.float32)
        unknown = tuple(np.full((self.info, size), np.nan, np.float32))
        return Transition(self.first, reward, no, ~no, self.first, unknown)

    def of(self, rows: np.ndarray) -> "Begun":
        """Some of them."""
        return Begun(self.seen[rows], self.first[rows], self.info)


class Segment(NamedTuple):
    """T steps of instances that a worker acted for."""

    kept: Sequence[np.ndarray]  # [T, B, ...] each, what the actor gave in addition to its actions
    steps: Transition  # [T, B, ...]; `failures` are of the whole segment

    @staticmethod
    def joined(
        parts: Sequence["Segment | None"], sizes: Sequence[int], failures: Sequence[Failure]
    ) -> "Segment":
        """Segments of shares, of these sizes, side by side; a lost share's rows hold nothing."""
        known = next((part for part in parts if part is not None), None)
        if known is None:
            nothing = np.zeros((0, 0))
            return Segment((), Transition._make([*[nothing] * 5, (), failures]))
        given = [*known.kept, *known.steps[:5], *known.steps.info]

        def arrays(part: "Segment | None", size: int) -> list[np.ndarray]:
            if part is not None:
                return [*part.kept, *part.steps[:5], *part.steps.info]
            return [np.zeros((len(x), size, *x.shape[2:]), x.dtype) for x in given]

        each = [arrays(part, size) for part, size in zip(parts, sizes, strict=True)]
        whole = [np.concatenate(x, axis=1) for x in zip(*each, strict=True)]
        count = len(known.kept)
        steps = Transition._make([*whole[count : count + 5], tuple(whole[count + 5 :]), failures])
        return Segment(whole[:count], steps)


class Pool(Protocol):
    """Instances of an environment at work. Every call raises or reports within the time given to it."""

    def reset(self, rows: np.ndarray, seeds: np.ndarray, timeout: float) -> np.ndarray:
        """Recreates the instances `rows [F]`, each from its seed `[F]`; their observations `[F, *obs]`."""

    def step(self, action: np.ndarray, timeout: float) -> Transition:
        """Steps every instance; those whose episode ends begin the next one in the same call."""

    def close(self) -> None:
        """Ends all that the pool has running, also what hangs."""

    # A pool whose instances work in other threads or processes may have the two halves of `step`, for which
    # others get a thread: `send(action, timeout)`, which returns at once, and `recv(timeout) -> Transition`;
    # and `ready() -> bool`, whether `recv` would not wait. A pool whose workers act may have
    # `segment(program, operands, keys, rows, begun, timeout) -> Segment` of the instances `rows`.


class Source(Protocol):
    """Where instances come from: a frozen, hashable value. No more than its spaces is needed to trace."""

    @property
    def name(self) -> str:
        """Name that `envs.make` knows it by."""

    @property
    def observation_space(self) -> Any:
        """Space of one observation."""

    @property
    def action_space(self) -> Space:
        """Space of one action."""

    @property
    def max_episode_steps(self) -> int | None:
        """Steps after which the library truncates an episode."""

    # Where episodes report more than their return, also `info`, the names of that.
    # Where observations are in parts, also `wire_space`, of the rows that stand for them in what pools give,
    # and `unpacked(rows)`, which makes them of these in a compiled program.

    def start(self, size: int) -> Pool:
        """A pool of `size` instances; they are made by its first `reset`."""


def wire_space(source: Source) -> Space:
    """The space of a row that a pool of this source gives: of its observations, unless they are in parts."""
    return getattr(source, "wire_space", None) or source.observation_space


class Halves:
    """The halves of a pool's `step`: its own `send` and `recv`, else a thread that calls its `step`."""

    def __init__(self, pool: Any):
        self._pool, self._own = pool, hasattr(pool, "send") and hasattr(pool, "recv")
        self._thread: Deadline | None = None

    def send(self, action: np.ndarray, timeout: float) -> None:
        """Begins a step of every instance, and does not wait for it."""
        if self._own:
            self._pool.send(action, timeout)
            return
        self._thread = self._thread or Deadline()
        self._thread.begin(lambda: self._pool.step(action, timeout))

    def recv(self, timeout: float) -> Transition:
        """Waits for the step; raises what it raised."""
        if self._own:
            return self._pool.recv(timeout)
        assert self._thread is not None
        return self._thread.finish(None)  # the pool's `step` keeps the time

    def ready(self) -> bool:
        """Whether `recv` would not wait; True if that is not known."""
        if self._own:
            return not hasattr(self._pool, "ready") or self._pool.ready()
        return self._thread is None or self._thread.ready()

    def close(self) -> None:
        """Lets the thread end."""
        if self._thread is not None:
            self._thread.close()
