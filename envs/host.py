"""Environments on the host's CPU, stepped from inside compiled programs.

A *source* (EnvPool, Gymnasium) starts a *pool*: instances of one environment that work on NumPy arrays.
`HostEnvironment` puts a source behind the interface of `envs.Environment`: its `reset` starts a pool, its
`step` is a callback that steps it. What programs hold is no more than a ticket: the pool's number, and the
number of steps that it has made. Each call takes the ticket of the one before it, so that the data put them
in order, under `jit`, `scan` and `while_loop` alike.

A pool cannot go back, and no checkpoint holds it. Where a ticket does not fit (the process that had the
pool is gone, or the pool has moved on), the instances start new episodes: that step is a truncation, with
reward 0 and the observation last seen as its final one.

Callbacks see NumPy arrays only: one that computed with JAX could wait for the very thread that it holds.
"""

import atexit
import collections
import dataclasses
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from envs import gymnasium_worker
from envs.composite import ObservationSpace
from envs.environment import EpisodeState, TimeStep, Whole, check_keys, check_state
from envs.native import Native, of_spaces
from envs.spaces import Space
from fdg.arguments import check_options, checked_names
from fdg.errors import FdgError, HostError, raised

_log = logging.getLogger(__name__)

TIMEOUT = 60.0  # seconds that a step may take, unless told otherwise
_START_TIMEOUT = 300.0  # seconds until all instances are made and reset: they may load models
_KEPT = 4  # pools of one environment and size at the same time: to train, to evaluate, and a few more


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


class Pool(Protocol):
    """Instances of an environment at work. Every call raises or reports within the time given to it."""

    def reset(self, rows: np.ndarray, seeds: np.ndarray, timeout: float) -> np.ndarray:
        """Makes the instances `rows [F]` anew, each from its seed `[F]`; their observations `[F, *obs]`."""

    def step(self, action: np.ndarray, timeout: float) -> Transition:
        """Steps every instance; those whose episode ends begin the next one in the same call."""

    def close(self) -> None:
        """Ends all that the pool has running, also what hangs."""


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
        """A pool for so many instances; they are made by its first `reset`."""


class Ticket(NamedTuple):
    """What a program holds of a pool; every leaf has the leading axis `B`."""

    pool: jax.Array  # [B] int32, the pool's number, the same in every row
    steps: jax.Array  # [B] int32, steps made, likewise
    observation: jax.Array  # [B, *wire], what was seen last


@dataclasses.dataclass(frozen=True)
class HostEnvironment(Whole):
    """A batch of instances of a `Source`.

    Its `step` calls the host once for the whole batch, so the fragment that it is in cannot be split over
    devices; the plan refuses to.

    Attributes:
      source: whose instances.
      timeout: seconds that one step of the batch may take before the run ends.
      restarts: how many failures (a worker that died, hung or raised) a pool survives: the instances that
        are lost are made anew, and their step counts as truncated. 0: the first failure ends the run.
    """

    FIELDS: ClassVar[frozenset[str]] = frozenset({"timeout", "restarts"})

    source: Any  # a Source
    timeout: float = TIMEOUT
    restarts: int = 0

    def __post_init__(self) -> None:
        given = {"timeout": self.timeout, "restarts": self.restarts}
        check_options(f"environment '{self.name}'", HostEnvironment, given)
        if not self.timeout > 0:
            raise FdgError(f"environment '{self.name}': timeout={self.timeout!r} must be above 0 seconds")
        if self.restarts < 0:
            raise FdgError(f"environment '{self.name}': restarts={self.restarts!r} must be 0 or more")

    @property
    def name(self) -> str:
        """Name of the source."""
        return self.source.name

    @property
    def num_agents(self) -> None:
        """One agent acts, without an axis."""
        return None

    @property
    def observation_space(self) -> ObservationSpace:
        """Space of one observation."""
        return self.source.observation_space

    @property
    def action_space(self) -> Space:
        """Space of one action."""
        return self.source.action_space

    @property
    def max_episode_steps(self) -> int | None:
        """Steps after which the library truncates an episode."""
        return self.source.max_episode_steps

    @property
    def info(self) -> tuple[str, ...]:
        """Names of what is reported of each episode."""
        return getattr(self.source, "info", ())

    @property
    def native(self) -> Native:
        """Observations and actions as the library has them."""
        return getattr(self.source, "native", None) or of_spaces(self)

    @checked_names
    def reset(self, keys: jax.Array) -> tuple[EpisodeState, Any]:
        """Starts a pool of one instance a key; see `Environment.reset`."""
        check_keys(self.name, keys)
        (size,) = keys.shape
        pool, observation = io_callback(
            _HostCall(self, "reset"),
            (jax.ShapeDtypeStruct((size,), jnp.int32), self._observations(size)),
            _seeds(keys),
        )
        state = Ticket(pool, jnp.zeros(size, jnp.int32), observation)
        first = EpisodeState(state, jnp.zeros(size), jnp.zeros(size, jnp.int32))
        return first, self._unpacked(observation)

    @checked_names
    def step(self, keys: jax.Array, state: EpisodeState, action: jax.Array) -> tuple[EpisodeState, TimeStep]:
        """Takes one step in every instance; see `Environment.step`. The keys seed what starts anew."""
        check_keys(self.name, keys)
        check_state(self.name, state)
        expected = keys.shape + self.action_space.shape
        if jnp.shape(action) != expected:
            raise FdgError(
                f"environment '{self.name}': action has shape {jnp.shape(action)}, expected {expected}"
            )
        (size,) = keys.shape
        number, flag = (jax.ShapeDtypeStruct((size,), dtype) for dtype in (jnp.int32, jnp.bool_))
        reward = jax.ShapeDtypeStruct((size,), jnp.float32)
        observation = self._observations(size)
        pool, steps, transition, lost = io_callback(
            _HostCall(self, "step"),
            (
                number,
                number,
                (observation, reward, flag, flag, observation, (reward,) * len(self.info)),
                flag,
            ),
            _packed(
                state.inner.pool,
                state.inner.steps,
                _seeds(keys),
                jnp.asarray(action, self.action_space.dtype),
            ),
        )
        observation, reward, terminated, truncated, final_observation, info = transition
        rows = lost.reshape(size, *[1] * (final_observation.ndim - 1))
        final_observation = jax.lax.select(
            jnp.broadcast_to(rows, final_observation.shape), state.inner.observation, final_observation
        )
        done = terminated | truncated
        episode_return = state.running_return + reward
        episode_length = state.running_length + 1
        next_state = EpisodeState(
            Ticket(pool, steps, observation),
            jnp.where(done, 0, episode_return),
            jnp.where(done, 0, episode_length),
        )
        return next_state, TimeStep(
            observation=self._unpacked(observation),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            final_observation=self._unpacked(final_observation),
            episode_return=jnp.where(done, episode_return, 0),
            episode_length=jnp.where(done, episode_length, 0),
            episode_info={
                name: jnp.where(done, value, 0) for name, value in zip(self.info, info, strict=True)
            },
        )

    def _observations(self, size: int) -> jax.ShapeDtypeStruct:
        space = wire_space(self.source)
        return jax.ShapeDtypeStruct((size, *space.shape), space.dtype)

    def _unpacked(self, rows: jax.Array) -> Any:
        unpacked = getattr(self.source, "unpacked", None)
        return rows if unpacked is None else unpacked(rows)


def wire_space(source: Source) -> Space:
    """The space of a row that a pool of this source gives: of its observations, unless they are in parts."""
    return getattr(source, "wire_space", None) or source.observation_space


def make_from(
    source: Callable[[tuple[tuple[str, Any], ...]], Source], overrides: dict[str, Any]
) -> HostEnvironment:
    """A `HostEnvironment` with its own fields from `overrides`; the rest are the source's options.

    Args:
      source: from options, sorted by name, to the source.
      overrides: Python numbers, strings and tuples of them.
    """
    options = {name: value for name, value in overrides.items() if name not in HostEnvironment.FIELDS}
    made = source(tuple(sorted(options.items())))
    for name, value in options.items():
        if not isinstance(value, bool | int | float | str | tuple):
            raise FdgError(
                f"environment '{made.name}': {name}={value!r} must be a number, string or tuple, so that"
                " the environment hashes"
            )
    return HostEnvironment(
        made, **{name: overrides[name] for name in HostEnvironment.FIELDS & overrides.keys()}
    )


def _packed(*columns: jax.Array) -> jax.Array:
    """Arrays `[B, ...]` of four-byte numbers side by side, `[B, sum of sizes] int32`.

    JAX hands each operand of a callback over by itself, which takes longer than most steps of one instance.
    """
    size = columns[0].shape[0]
    bits = [x if x.dtype == jnp.int32 else jax.lax.bitcast_convert_type(x, jnp.int32) for x in columns]
    return jnp.concatenate([x.reshape(size, -1) for x in bits], axis=1)


def _seeds(keys: jax.Array) -> jax.Array:
    """A seed for each key, `[B] int32`, at least 0: what all libraries take."""
    bits = jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(keys)
    return jax.lax.bitcast_convert_type(bits >> 1, jnp.int32)


@dataclasses.dataclass(frozen=True)
class _HostCall:
    """What a program calls. A value, so that equal environments share their compiled programs."""

    environment: HostEnvironment
    method: str

    @property
    def __name__(self) -> str:
        return f"environment '{self.environment.name}'"

    def __call__(self, operand: Any) -> Any:
        try:
            return getattr(_pools, self.method)(self.environment, np.asarray(operand))
        except HostError:
            raise
        except Exception as error:  # JAX hands on no more than its text
            raise HostError(f"environment '{self.environment.name}': {raised(error)}") from error


class Losses(NamedTuple):
    """What failures of workers have cost this process, of all its pools."""

    failures: int
    episodes: int  # that were running, and count as truncated


_losses = Losses(0, 0)


def losses() -> Losses:
    """What failures have cost so far."""
    return _losses


class _Running:
    """A pool that programs hold tickets of."""

    def __init__(self, environment: HostEnvironment, seeds: np.ndarray):
        self.environment, self.size, self.steps, self.restarted = environment, len(seeds), 0, 0
        self.lock = threading.Lock()
        self.pool = environment.source.start(self.size)
        try:
            self.first_observation = self.pool.reset(np.arange(self.size), seeds, _START_TIMEOUT)
        except BaseException:
            self.pool.close()
            raise

    def step(self, seeds: np.ndarray, action: np.ndarray) -> tuple[Transition, np.ndarray]:
        """A transition, and which of its rows were lost and start anew."""
        made = self.pool.step(action, self.environment.timeout)
        self.steps += 1
        lost = np.zeros(self.size, np.bool_)
        for rows, reason in made.failures:
            self._replace(made, rows, reason, seeds)
            lost[rows] = True
        # A terminal state needs no bootstrap, whatever the clock says: termination wins.
        return made._replace(truncated=made.truncated & ~made.terminated, failures=()), lost

    def _replace(self, made: Transition, rows: np.ndarray, reason: str, seeds: np.ndarray) -> None:
        limit, name = self.environment.restarts, self.environment.name
        if self.restarted >= limit:
            fix = f"all {limit} restarts are used up" if limit else "restarts=N of envs.make would survive it"
            hint = "" if gymnasium_worker.is_wrong_answer(reason) and not limit else f" ({fix})"
            raise HostError(f"environment '{name}': {reason}{hint}")
        self.restarted += 1
        global _losses
        _losses = Losses(_losses.failures + 1, _losses.episodes + len(rows))
        _log.warning(
            "environment '%s': %s; %d of its %d instances start anew (restart %d of %d)",
            name, reason, len(rows), self.size, self.restarted, limit,
        )  # fmt: skip
        made.observation[rows] = self.pool.reset(rows, seeds[rows], _START_TIMEOUT)
        made.final_observation[rows] = made.observation[rows]  # the program knows the one before
        made.reward[rows], made.terminated[rows], made.truncated[rows] = 0, False, True
        for each in made.info:
            each[rows] = np.nan


class _Pools:
    """The pools of this process by number. A new one beyond `_KEPT` closes the one unused for longest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: collections.OrderedDict[int, _Running] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._running)

    def reset(self, environment: HostEnvironment, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A new pool: its number `[B]`, and the first observations."""
        number, running = self._start(environment, seeds)
        return np.full(len(seeds), number, np.int32), running.first_observation

    def step(
        self, environment: HostEnvironment, packed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, tuple, np.ndarray]:
        """Steps the pool of a ticket; `packed` holds pool, steps, seed and action."""
        pool, steps, seeds = packed[:, :3].T
        space = environment.action_space
        action = packed[:, 3:].copy().view(space.dtype).reshape(-1, *space.shape)
        number, size = int(pool[0]), len(seeds)
        running = self._find(number)
        if running is not None:
            with running.lock:
                same = running.environment is environment or running.environment == environment
                fits = same and running.size == size
                if fits and running.steps == steps[0]:
                    try:
                        made, lost = running.step(seeds, action)
                    except BaseException:
                        self._forget(number)
                        running.pool.close()
                        raise
                    return pool, steps + np.int32(1), made[:6], lost
        _log.warning(
            "environment '%s': the instances that this state was made with are gone (no checkpoint holds"
            " them): %d new episodes start here", environment.name, size,
        )  # fmt: skip
        number, running = self._start(environment, seeds)
        first = running.first_observation
        no, yes = np.zeros(size, np.bool_), np.ones(size, np.bool_)
        unknown = tuple(np.full(size, np.nan, np.float32) for _ in environment.info)
        begun = (first, np.zeros(size, np.float32), no, yes, first, unknown)
        return np.full(size, number, np.int32), np.zeros(size, np.int32), begun, yes

    def close(self) -> None:
        """Ends all pools."""
        with self._lock:
            ending, self._running = list(self._running.values()), collections.OrderedDict()
        for running in ending:
            running.pool.close()

    def _find(self, number: int) -> _Running | None:
        with self._lock:
            if number in self._running:
                self._running.move_to_end(number)
            return self._running.get(number)

    def _forget(self, number: int) -> None:
        with self._lock:
            self._running.pop(number, None)

    def _start(self, environment: HostEnvironment, seeds: np.ndarray) -> tuple[int, _Running]:
        running = _Running(environment, seeds)
        # At random, so that a ticket of another process fits none of ours.
        number = secrets.randbelow(2**31)
        with self._lock:
            self._running[number] = running
            alike = [
                n for n, r in self._running.items() if (r.environment, r.size) == (environment, len(seeds))
            ]
            ending = [self._running.pop(n) for n in alike[:-_KEPT]]
        for old in ending:
            with old.lock:
                old.pool.close()
        return number, running


_pools = _Pools()


@atexit.register
def close() -> None:
    """Ends all pools of this process; states made with them start new episodes when stepped again."""
    _pools.close()


def running() -> int:
    """How many pools this process has."""
    return len(_pools)
