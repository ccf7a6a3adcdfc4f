"""Host environments: environments on the CPU, stepped by callbacks of compiled programs.

A *source* (EnvPool, Gymnasium) starts a *pool*: instances of one environment that work on NumPy arrays.
`HostEnvironment` implements `envs.Environment` with a source: `reset` starts a pool, `step` is a callback
that steps it. Programs only hold a ticket: the pool's number and its number of steps. Each call takes the
ticket of the previous one, so data dependencies order the calls under `jit`, `scan` and `while_loop`.

`step` is `send` and `recv` in one callback. If a program calls them separately, it works while the instances
step: in *rings* (`algos.rollout`), a rollout acts for some instances while others step, each in its own pool.

A pool cannot go back to earlier steps, and checkpoints do not contain it. If a ticket does not match (the
process with the pool is gone, or the pool has moved on), the instances start new episodes: that step is a
truncation with reward 0, and its final observation is the ticket's observation.

Callbacks only use NumPy, because a callback that runs JAX could deadlock.

Shapes: `B` instances; `*wire`, the shape of a row in a pool's arrays (`pools.wire_space`).
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from envs import running_pools, satellites
from envs.adapters import KINDS, hashable_parameters
from envs.environment import EnvironmentBase, EpisodeState, TimeStep, actions, check_keys, check_state
from envs.native import Native, of_spaces
from envs.pools import Source, wire_space
from envs.running_pools import close as close
from envs.running_pools import losses as losses
from envs.running_pools import running as running
from fdg.arguments import check_options, checked_names
from fdg.batch.exchanges import operations_across_rows
from fdg.errors import FdgError, HostError, host_errors, raised

TIMEOUT = 60.0  # default limit of a step, in seconds

_num_pools: contextvars.ContextVar[int] = contextvars.ContextVar("_num_pools", default=1)  # see `in_parts`


@contextlib.contextmanager
def in_parts(count: int) -> Iterator[None]:
    """A context for tracing a batch in parts: each part has its own pool, `count` pools in all."""
    before = _num_pools.set(count)
    try:
        yield
    finally:
        _num_pools.reset(before)


class Ticket(NamedTuple):
    """A program's reference to a pool; every leaf has the leading axis `B`."""

    pool: jax.Array  # [B] int32, the pool's number, the same in every row
    steps: jax.Array  # [B] int32, number of steps made, the same in every row
    observation: jax.Array  # [B, *wire], the last observation


@dataclasses.dataclass(frozen=True)
class HostEnvironment(EnvironmentBase):
    """A batch of instances of a `Source`.

    `step` calls the host once for the whole batch, so its fragment cannot be split over devices, and
    `fdg.place` refuses a plan that would split it.

    Attributes:
      source: the source of the instances.
      timeout: seconds after which a step of the batch ends the run.
      restarts: failures (a worker that died, hung or raised) that a pool survives: lost instances are
        recreated, and their step counts as truncated. 0: the first failure ends the run.
    """

    FIELDS: ClassVar[frozenset[str]] = frozenset({"timeout", "restarts"})
    _forwards_to: ClassVar[str] = "source"

    source: Any  # a Source
    timeout: float = TIMEOUT
    restarts: int = 0

    def __post_init__(self) -> None:
        name, fields = f"environment '{self.name}'", {"timeout": self.timeout, "restarts": self.restarts}
        check_options(name, HostEnvironment, fields)
        if not 0 < self.timeout <= 1e6:  # the system refuses to wait for more than 24 days
            raise FdgError(f"{name}: timeout={self.timeout!r} must be above 0 and at most 1e6 seconds")
        if self.restarts < 0:
            raise FdgError(f"{name}: restarts={self.restarts!r} must be 0 or more")

    @property
    def info(self) -> tuple[str, ...]:
        """Names of the values that the environment reports at the end of an episode (`envs.vectorize`)."""
        return getattr(self.source, "info", ())

    @property
    def native(self) -> Native:
        """The library's own observations and actions."""
        return getattr(self.source, "native", None) or of_spaces(self)

    @checked_names
    def reset(self, keys: jax.Array) -> tuple[EpisodeState, Any]:
        """Starts a pool with an instance for each key; see `Environment.reset`."""
        check_keys(self.name, keys)
        (size,) = keys.shape
        pool, observation = _call_host(
            _HostCall(self, "reset", _num_pools.get()),
            (jax.ShapeDtypeStruct((size,), jnp.int32), self._observation_type(size)),
            _seeds(keys),
        )
        ticket = Ticket(pool, jnp.zeros(size, jnp.int32), observation)
        state = EpisodeState(ticket, jnp.zeros(size, jnp.float32), jnp.zeros(size, jnp.int32))
        return state, self._unpack(observation)

    @checked_names
    def step(self, keys: jax.Array, state: EpisodeState, action: jax.Array) -> tuple[EpisodeState, TimeStep]:
        """Steps every instance; see `Environment.step`. The keys seed restarted instances."""
        call, operand = _HostCall(self, "step", _num_pools.get()), self._step_operand(keys, state, action)
        return self._after_step(state, _call_host(call, self._result_types(len(operand)), operand))

    @checked_names
    def send(self, keys: jax.Array, state: EpisodeState, action: jax.Array) -> EpisodeState:
        """Starts a step of every instance without waiting; arguments as for `step`.

        Returns:
          The state with the ticket of the running step, only to be passed to `recv`.
        """
        call, operand = _HostCall(self, "send", _num_pools.get()), self._step_operand(keys, state, action)
        pool, steps = _call_host(call, (self._int_type(len(operand)),) * 2, operand)
        return state._replace(inner=state.inner._replace(pool=pool, steps=steps))

    @checked_names
    def recv(self, sent: EpisodeState) -> tuple[EpisodeState, TimeStep]:
        """Waits for the step that `send` started; returns what `step` returns.

        Raises:
          HostError: (in the program) the ticket has no running step, such as one that was received before.
        """
        check_state(self.name, sent)
        operand = _pack(sent.inner.pool, sent.inner.steps)
        call = _HostCall(self, "recv", 1)
        return self._after_step(sent, _call_host(call, self._result_types(len(operand)), operand))

    @checked_names
    def ready(self, sent: EpisodeState, waiting: jax.Array) -> jax.Array:
        """Waits until one of R batches has finished its step; returns its index, int32.

        Args:
          sent: results of `send`, `[R, B, ...]`.
          waiting: `[R] bool`, the candidates; at least one is True.
        """
        operand = _pack(sent.inner.pool[:, 0], sent.inner.steps[:, 0], waiting.astype(jnp.int32))
        return _call_host(_HostCall(self, "ready", 1), jax.ShapeDtypeStruct((), jnp.int32), operand)

    @property
    def acts(self) -> bool:
        """True if workers act (`?acts=True`)."""
        return getattr(self.source, "acts", False)

    def acting(
        self, act: Callable[..., Any], keys: jax.Array
    ) -> tuple[satellites.TracedActor, list[jax.Array]]:
        """Traces an actor for workers; returns the first argument of `segment`, and the arrays that the actor
        closes over.

        Args:
          act: `(observation [n, ...], keys [n]) -> (action [n, ...], extras)`; `extras` is a pytree of arrays
            with leading axis n. It may close over traced arrays.
          keys: `[T, 2, B]`, as for `segment`.
        """
        key_data, implementation = jax.random.key_data(keys[0, 0]), jax.random.key_impl(keys)
        wire = wire_space(self.source)

        def act_on_rows(rows: jax.Array, key_data: jax.Array) -> Any:
            keys = jax.random.wrap_key_data(key_data, impl=implementation)
            action, extras = act(self._unpack(rows), keys)
            return actions(self.name, action, self.action_space, keys.shape), extras

        def argument_types(rows: int) -> Any:
            return (
                jax.ShapeDtypeStruct((rows, *wire.shape), wire.dtype),
                jax.ShapeDtypeStruct((rows, *key_data.shape[1:]), key_data.dtype),
            )

        size = len(key_data)
        closed = jax.make_jaxpr(act_on_rows)(*argument_types(size))
        if mixing := operations_across_rows(closed, (0, 0)):
            raise FdgError(
                f"environment '{self.name}': acts=True needs an actor that acts in each environment alone,"
                f" and this one combines environments (with {', '.join(mixing)}): leave out acts=True"
            )
        shares = self.source.shares(size)
        return self.source.trace_actor(self.name, act_on_rows, argument_types, shares)

    def segment(
        self, actor: satellites.TracedActor, operands: list[jax.Array], keys: jax.Array, state: EpisodeState
    ) -> tuple[EpisodeState, Any, Any, TimeStep]:
        """Makes workers act and step T times.

        Args:
          actor, operands: results of `acting`.
          keys: `[T, 2, B]`: for actions and for steps.
          state: from `reset` or the last step.

        Returns:
          State and observation after the last step; the actor's `extras`, `[T, B, ...]`; the time steps, `[T,
          B]`.
        """
        check_state(self.name, state)
        extras, extras_structure = jax.tree.flatten(actor.extras)
        num_steps, _, size = keys.shape
        types, step_structure = jax.tree.flatten(self._result_types(size))
        shapes = [jax.ShapeDtypeStruct((num_steps, *x.shape), x.dtype) for x in [*extras, *types]]
        operand = _pack(state.inner.pool, state.inner.steps, _seeds(keys[0, 1]))
        inputs = actor.inputs(operands, jax.random.key_data(keys[:, 0]))
        call = _HostCall(self, "segment", (actor.program, num_steps, len(inputs.fixed)))
        arrays = _call_host(call, shapes, operand, state.inner.observation, *inputs.fixed, *inputs.per_step)
        results = jax.tree.unflatten(step_structure, arrays[len(extras) :])
        state, steps = jax.lax.scan(self._after_step, state, results)
        observation = jax.tree.map(lambda x: x[-1], steps.observation)
        return state, observation, jax.tree.unflatten(extras_structure, arrays[: len(extras)]), steps

    def _step_operand(self, keys: jax.Array, state: EpisodeState, action: jax.Array) -> jax.Array:
        """The operand of a step's callback: ticket, seed and action of each instance, `[B, n] int32`."""
        check_keys(self.name, keys)
        check_state(self.name, state, len(keys))
        action = actions(self.name, action, self.action_space, keys.shape)
        return _pack(state.inner.pool, state.inner.steps, _seeds(keys), action)

    def _result_types(self, size: int) -> tuple[Any, ...]:
        """The result shapes of a step's callback."""
        flag, reward = (jax.ShapeDtypeStruct((size,), dtype) for dtype in (jnp.bool_, jnp.float32))
        integer, observation = self._int_type(size), self._observation_type(size)
        transition = observation, reward, flag, flag, observation, (reward,) * len(self.info)
        return integer, integer, transition, flag

    def _after_step(self, state: EpisodeState, results: tuple[Any, ...]) -> tuple[EpisodeState, TimeStep]:
        """The state and the time step, from the results of a step's callback."""
        pool, steps, transition, lost = results
        size = len(lost)
        observation, reward, terminated, truncated, final_observation, info = transition
        lost_rows = lost.reshape(size, *[1] * (final_observation.ndim - 1))
        final_observation = jax.lax.select(
            jnp.broadcast_to(lost_rows, final_observation.shape), state.inner.observation, final_observation
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
            observation=self._unpack(observation),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            final_observation=self._unpack(final_observation),
            episode_return=jnp.where(done, episode_return, 0),
            episode_length=jnp.where(done, episode_length, 0),
            episode_info={
                name: jnp.where(done, value, 0) for name, value in zip(self.info, info, strict=True)
            },
        )

    @staticmethod
    def _int_type(size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32)

    def _observation_type(self, size: int) -> jax.ShapeDtypeStruct:
        space = wire_space(self.source)
        return jax.ShapeDtypeStruct((size, *space.shape), space.dtype)

    def _unpack(self, rows: jax.Array) -> Any:
        unpack = getattr(self.source, "unpack", None)
        return rows if unpack is None else unpack(rows)


def make_from(
    make_source: Callable[[tuple[tuple[str, Any], ...]], Source], overrides: dict[str, Any]
) -> HostEnvironment:
    """Makes a `HostEnvironment`; overrides that are not its own fields are options of the source.

    `make_source` gets the options, sorted by name; overrides are Python numbers, strings and tuples.
    """
    options = {name: value for name, value in overrides.items() if name not in HostEnvironment.FIELDS}
    options = hashable_parameters(f"environment '{make_source(()).name}'", options, KINDS | None)
    source = make_source(tuple(sorted(options.items())))
    return HostEnvironment(
        source, **{name: overrides[name] for name in HostEnvironment.FIELDS & overrides.keys()}
    )


def _pack(*columns: jax.Array) -> jax.Array:
    """Concatenates arrays `[B, ...]` of four-byte numbers to `[B, sum of sizes] int32`.

    JAX transfers each operand of a callback separately, which takes longer than a step of most instances.
    """
    size = columns[0].shape[0]
    bits = [x if x.dtype == jnp.int32 else jax.lax.bitcast_convert_type(x, jnp.int32) for x in columns]
    return jnp.concatenate([x.reshape(size, -1) for x in bits], axis=1)


def _seeds(keys: jax.Array) -> jax.Array:
    """A seed for each key, `[B] int32`, at least 0, as all libraries accept."""
    bits = jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(keys)
    return jax.lax.bitcast_convert_type(bits >> 1, jnp.int32)


def _call_host(call: Callable[..., Any], shapes: Any, *operands: jax.Array) -> Any:
    """Calls the host by `io_callback`; outside compiled programs, the callback's own errors are raised."""
    with host_errors():
        return io_callback(call, shapes, *operands)


@dataclasses.dataclass(frozen=True)
class _HostCall:
    """A callback; hashable, so that equal environments share compiled programs."""

    environment: HostEnvironment
    method: str
    argument: Any  # the number of pools of the batch; for a segment, as in `running_pools`

    @property
    def __name__(self) -> str:
        return f"environment '{self.environment.name}'"

    def __call__(self, *operands: Any) -> Any:
        try:
            method = getattr(running_pools.POOLS, self.method)
            return method(self.environment, self.argument, *map(np.asarray, operands))
        except HostError:
            raise
        except Exception as error:  # JAX passes on only the error's text
            raise HostError(f"environment '{self.environment.name}': {raised(error)}") from error
