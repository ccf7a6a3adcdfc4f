"""Other ways to act and step: in rings, and by workers that act.

Rings are R parts of the environments that take turns: while one part steps, actions are computed for the
others (environment rings of SRL, Mei et al., arXiv 2306.16688). Environment `b` is in part `b % R`. Random
numbers are those of the whole batch, so results are the same as without rings, except that matrix products of
smaller batches may round differently.

Shapes: `T` steps, `B` environments, `R` parts. `self` is the algorithm.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fdg
from algos.rollout import Recollection
from envs import Observation, TimeStep, host
from envs.checking import check_batch_reset, check_batch_step
from envs.rings import begin_step, end_step
from fdg.errors import FdgError


def rollout(
    act: Callable,
    step: Callable | tuple[Callable, ...],
    keys: jax.Array,
    carry: tuple[Any, Any, Recollection | None],
    rings: int = 1,
    segment: Callable | None = None,
) -> tuple[Any, Any, Any, tuple[Any, Any, TimeStep]]:
    """`algos.rollout.rollout_with_memory`, which calls this; `keys [T, 2, B]` are the keys of all steps.

    `act` and `step` are as there. `carry` is the environments' state, observation and `Recollection` before
    the first step. `segment`, or None, is a function in which the environments' workers act and step:
    `(act, keys [T, 2, B], env_state) -> (env_state, observation, (action, extras), TimeStep)`.

    Raises:
      FdgError: there is both a `segment` and a memory.
    """
    if segment is None:
        return _rollout_in_rings(act, step, keys, carry, rings)
    env_state, observation, recollection = carry
    if recollection is not None:
        raise FdgError("acts=True does not work with a memory: leave out acts=True or the memory")
    env_state, last, (action, extras), steps = segment(act, keys, env_state)
    # The observation before each step.
    before = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y[:-1]]), observation, steps.observation)
    return env_state, last, None, ((before, action), extras, steps._replace(observation=None))


# --- rings ---


class _RunningStep(NamedTuple):
    """A started step of one part of the environments, not yet finished; leading axis `B / R`."""

    sent: Any  # what `send` returned
    observation: Any
    action: Any
    extras: Any
    memory: Any  # after acting


def _rollout_in_rings(
    act: Callable, step: Callable | tuple[Callable, ...], keys: jax.Array, carry: Any, rings: int
) -> tuple[Any, ...]:
    """`rollout_with_memory` in R parts, with the keys of all steps, `keys [T, 2, B]`.

    First, a step of every part is started (`send`). Then, repeatedly, the step of one part is finished
    (`recv`), actions are computed for that part, and its next step is started. Parts take turns, or with
    `ready` come as they finish. Parts are independent, so their order does not change results.

        send 0  send 1 | recv 0  act 0  send 0 | recv 1  act 1  send 1 | recv 0 ...
    """
    send, recv, *ready = (step, lambda sent: sent) if callable(step) else step
    num_steps = len(keys)

    def start_step(part_carry, keys):
        env_state, observation, recollection = part_carry
        action, extras, memory = act(observation, recollection, keys[0])
        return _RunningStep(send(keys[1], env_state, action), observation, action, extras, memory)

    def finish_step(step):
        env_state, time_step = recv(step.sent)
        recollection = None if carry[2] is None else Recollection(step.memory, time_step.done)
        record = (step.observation, step.action), step.extras, time_step._replace(observation=None)
        return (env_state, time_step.observation, recollection), record

    def step_each_part(running, keys):
        def one_part(_, step_and_keys):
            step, keys = step_and_keys
            part_carry, record = finish_step(step)
            return None, (start_step(part_carry, keys), record)

        _, (running, record) = jax.lax.scan(one_part, None, (running, keys))
        return running, record

    def step_ready_part(carry, _):
        running, received = carry  # `received [R]`: the number of finished steps of each part
        part = ready[0](running.sent, received < num_steps - 1)
        part_carry, record = finish_step(_take_row(running, part))
        row_index = received[part] * rings + part
        started = start_step(part_carry, _take_row(keys[1:].reshape(-1, *keys.shape[2:]), row_index))
        running = jax.tree.map(
            lambda x, row: jax.lax.dynamic_update_index_in_dim(x, row, part, 0), running, started
        )
        return (running, received.at[part].add(1)), (record, row_index)

    # Each part takes every R-th row, so that if a batch is split over devices, each part is split too.
    keys = jnp.moveaxis(keys.reshape(*keys.shape[:2], -1, rings), 3, 1)  # [T, R, 2, B / R]
    parts = jax.tree.map(lambda x: in_parts(x, rings), carry)
    _, running = jax.lax.scan(
        lambda _, carry_and_keys: (None, start_step(*carry_and_keys)), None, (parts, keys[0])
    )
    if ready and num_steps > 1:
        running_and_received = running, jnp.zeros(rings, jnp.int32)
        trips = (num_steps - 1) * rings
        (running, _), (records, row_indices) = jax.lax.scan(
            step_ready_part, running_and_received, None, length=trips
        )
        order = jnp.zeros(trips, jnp.int32).at[row_indices].set(jnp.arange(trips, dtype=jnp.int32))
        records = jax.tree.map(lambda x: x[order].reshape(-1, rings, *x.shape[1:]), records)
    else:
        running, records = jax.lax.scan(step_each_part, running, keys[1:])  # [T - 1, R, B / R, ...]
    _, (parts, last) = jax.lax.scan(lambda _, step: (None, finish_step(step)), None, running)
    records = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), records, last)
    records = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2).reshape(len(x), -1, *x.shape[3:]), records)
    return *jax.tree.map(of_parts, parts), records


def _take_row(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def in_parts(x: jax.Array, rings: int) -> jax.Array:
    """Divides rows `[B, ...]` into parts `[R, B / R, ...]`, where R is `rings`: row `b` is in part `b % R`.

    >>> in_parts(jnp.arange(6), 2).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    return jnp.swapaxes(x.reshape(-1, rings, *x.shape[1:]), 0, 1)


def of_parts(x: jax.Array) -> jax.Array:
    """The inverse of `in_parts`.

    >>> of_parts(jnp.array([[0, 2, 4], [1, 3, 5]])).tolist()
    [0, 1, 2, 3, 4, 5]
    """
    return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])


def time_first(x: jax.Array) -> jax.Array:
    """Swaps the first two axes: `[B, T, ...]` to `[T, B, ...]`, and back."""
    return x.swapaxes(0, 1)


def time_major(x: jax.Array, num_steps: int) -> jax.Array:
    """Reshapes rows `[B * T, ...]` to steps `[T, B, ...]`; undoes `environment_major`.

    >>> time_major(jnp.array([1, 2, 3, 10, 20, 30]), num_steps=3).tolist()
    [[1, 10], [2, 20], [3, 30]]
    """
    return x.reshape(-1, num_steps, *x.shape[1:]).swapaxes(0, 1)


# --- environments of an algorithm ---


def rollout_arguments(self: Any) -> dict[str, Any]:
    """The arguments of `algos.rollout.rollout` for an algorithm with rings, or with workers that act."""
    if getattr(self.env, "acts", False):
        return {"step": self.step, "segment": functools.partial(_act_in_workers, self)}
    functions = (_send, _recv, *([_ready] if hasattr(self.env, "ready") else []))
    return {"step": tuple(function.__get__(self) for function in functions), "rings": self.rings}


def reset(self: Any, keys: jax.Array) -> tuple[Any, Observation]:
    """The initial state and observation of all environments; resets one part after another."""

    def one_part(keys):  # host environments have one pool for each part
        with host.in_parts(self.rings):
            return check_batch_reset(self.env, self.env.reset(keys), self.num_envs // self.rings)

    parts = jax.lax.map(one_part, in_parts(keys, self.rings))
    return jax.tree.map(of_parts, parts)


@fdg.fragment("environment", name="send")
def _send(self, keys, env_state, action):
    """Starts a step of one part of the environments; arguments as for `step`."""
    with host.in_parts(self.rings):
        return begin_step(self.env, keys, env_state, self._for_environment(action))


@fdg.fragment("environment", name="recv")
def _recv(self, sent):
    """Waits for the step that `send` started; returns what `step` returns."""
    result = end_step(self.env, sent)
    return check_batch_step(self.env, result, jax.tree.leaves(sent)[0].shape[0])


@fdg.fragment("environment", in_axes=(1, None), out_axes=None, name="ready")
def _ready(self, sent, waiting):
    """Waits for one of the parts that are `waiting [R]`: `sent [R, B / R]` -> its index, int32."""
    return self.env.ready(sent, waiting)


def _act_in_workers(self: Any, act: Any, keys: jax.Array, env_state: Any) -> tuple[Any, ...]:
    """A rollout in which the environments' workers call the policy: the `segment` of `rollout`."""

    def act_and_convert(observation: Any, keys: jax.Array) -> tuple[jax.Array, Any]:
        action, extras, _ = act(observation, None, keys)
        return self._for_environment(action), (action, extras)

    traced, operands = self.env.acting(act_and_convert, keys)
    run_segment = fdg.fragment("actor", in_axes=(None, 2, 0), out_axes=(0, 0, 1, 1), name="segment")(
        functools.partial(self.env.segment, traced)
    )
    return run_segment(operands, keys, env_state)
