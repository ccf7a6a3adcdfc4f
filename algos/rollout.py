"""Acting in an environment: actors, rollouts for training, whole episodes for evaluation.

Shapes: `T` steps, `B` or `N` environments, `A` agents in each (multi-agent environments only).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from envs import Environment, Observation, TimeStep, features_and_mask
from fdg.arguments import check_takes, checked_names
from fdg.errors import FdgError, kind_of
from fdg.settings.moved import moved

__getattr__ = moved(__name__, __name__, {"chosen": "choose_actions"})


class _Actor(NamedTuple):
    memory: Callable[[int], Any]
    act: Callable[[Any, Any, jax.Array, jax.Array, bool], tuple[jax.Array, Any]]


@checked_names
class Actor(_Actor):
    """A policy with its parameters, normalisers and initial memory, as pure functions that can be traced:

    - `memory(N) -> memory`: the initial memory, a pytree with leading axis `N`; `()` without memory.
    - `act(memory, observation [N, (A,) *obs], start [N] bool, keys [N], greedy) -> action [N, (A,) *action],
      memory`. Actions are within the environment's bounds. Where `start` is True an episode begins, and the
      previous memory is ignored. `greedy` is a Python bool: the most probable (or best) action, else one
      sampled as in training.

    Raises:
      FdgError: (construction) a function takes other arguments, or in another order; (acting) `act` returns
        no pair.
    """

    __slots__ = ()

    def __new__(cls, memory: Any, act: Any) -> "Actor":
        """Checks the arguments of both functions."""
        check_takes(memory, ("num_envs",), "memory of algos.Actor")
        check_takes(act, ("memory", "observation", "start", "keys", "greedy"), "act of algos.Actor")

        @functools.wraps(act)
        def checked(*arguments: Any, **named: Any) -> Any:
            result = act(*arguments, **named)
            if not isinstance(result, tuple) or len(result) != 2:
                raise FdgError(
                    f"act of algos.Actor gives {kind_of(result)}: give a pair, (action, memory); a policy"
                    " without memory gives back the one that it is given"
                )
            return result

        return super().__new__(cls, memory, checked)


class Policy(Protocol):
    """A distribution over actions, as far as acting needs it: see `algos.distributions.Distribution`."""

    def sample(self, keys: jax.Array) -> jax.Array:
        """Random actions `[..., *action]`; `keys` is one key, or one per element of the leading axes."""

    def mode(self) -> jax.Array:
        """The most probable action: `[..., *action]`."""


def without_memory(
    policy: Callable[[Observation], Policy], deliver: Callable[[jax.Array], jax.Array]
) -> Actor:
    """The actor of a feed-forward policy, a function of observations `[N, *obs]` to a distribution `[N]`.

    `deliver` converts its actions for the environment, such as by clipping.
    """

    def act(memory, observation, start, keys, greedy):
        return deliver(choose_actions(policy(observation), keys, greedy)), memory

    return Actor(empty_memory, act)


def choose_actions(policy: Policy, keys: jax.Array, greedy: bool) -> jax.Array:
    """The most probable action of each of `[N]` distributions, or one sampled with each key."""
    return policy.mode() if greedy else policy.sample(keys)


def empty_memory(num_envs: int) -> tuple[()]:
    """The memory of an actor without one."""
    return ()


# --- rollouts ---


class Recollection(NamedTuple):
    """The recurrent state of an actor, and where it must be reset."""

    memory: Any  # leading axis B
    start: (
        jax.Array
    )  # [B] bool: an episode starts here; `memory` is left from the last one and is to be ignored


Step = Callable[..., Any] | tuple[Callable[..., Any], ...]


def rollout(
    act: Callable,
    step: Step,
    key: jax.Array,
    env_state: Any,
    observation: Any,
    num_steps: int,
    rings: int = 1,
    segment: Callable | None = None,
) -> tuple[Any, Any, tuple[Any, Any, TimeStep]]:
    """Steps a batch of environments `num_steps` times.

    Every environment gets its own keys at every step, so a batch that is split over devices gets the same
    random numbers.

    Args:
      act: `(observation [B, ...], keys [B]) -> (action [B, ...], extras)`; extras is any pytree.
      step: `(keys [B], env_state, action) -> (env_state, TimeStep)`; or its halves `(send, recv)`, of which
        `recv` waits for the step that `send` started. A third, `ready`, waits for any part of a ring:
        `(results of send [R, ...], waiting [R] bool) -> int32`, the index of a part whose step has finished.
      key: one key.
      env_state: leading axis B.
      observation: `[B, ...]`, the first input of `act`; an array or a pytree.
      num_steps: T.
      rings: R, a divisor of B. Environment `b` is in part `b % R`. While one part steps, others act; `act`
        and `step` get `[B / R]`. Random numbers are those of the whole batch, so results are equal up to the
        rounding of products of other shapes (environment rings of SRL, Mei et al., arXiv 2306.16688).
      segment: `(act, keys [T, 2, B], env_state) -> (env_state, observation, (action, extras), TimeStep)`: the
        environments' workers act and step; None if they do not.

    Returns:
      The environments' state and observation after the last step, and `((observation, action), extras,
      time_step)` of each step, `[T, B, ...]`; the time step's `observation` is None, it is the next row's.
    """

    def act_from_observation(observation, _, keys):
        return *act(observation, keys), None

    if segment is not None:
        num_envs = jax.tree.leaves(observation)[0].shape[0]
        keys = jax.random.split(key, (num_steps, 2, num_envs))
        env_state, last, (action, extras), steps = segment(act, keys, env_state)
        seen = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y[:-1]]), observation, steps.observation)
        return env_state, last, ((seen, action), extras, steps._replace(observation=None))
    env_state, observation, _, steps = rollout_with_memory(
        act_from_observation, step, key, env_state, observation, None, num_steps, rings
    )
    return env_state, observation, steps


def rollout_with_memory(
    act: Callable,
    step: Step,
    key: jax.Array,
    env_state: Any,
    observation: Any,
    recollection: Recollection | None,
    num_steps: int,
    rings: int = 1,
    segment: Callable | None = None,
) -> tuple[Any, Any, Any, tuple[Any, Any, TimeStep]]:
    """`rollout` for a recurrent actor: it also carries the memory, and a flag where an episode starts.

    `act` resets the memory where `start` is True, so the final memory of an episode is available.

    Args:
      act: `(observation [B, ...], Recollection, keys [B]) -> (action [B, ...], extras, memory [B, ...])`.
      recollection: the initial memory and start flags; None for an actor without memory.
      step, key, env_state, observation, num_steps, rings: as for `rollout`.
      segment: refused.

    Returns:
      As `rollout`, with the `Recollection` after the last step as third result.

    Raises:
      FdgError: there is a `segment`: workers that act have no memory.
    """
    if segment is not None:
        raise FdgError("acts=True: workers act without a memory: leave acts out, or use no memory")
    num_envs = jax.tree.leaves(observation)[0].shape[0]
    keys = jax.random.split(key, (num_steps, 2, num_envs))
    if rings > 1:
        return _in_rings(act, step, keys, (env_state, observation, recollection), rings)
    step = step if callable(step) else _joined(*step[:2])

    def one_step(carry, keys):
        env_state, observation, recollection = carry
        action, extras, memory = act(observation, recollection, keys[0])
        env_state, time_step = step(keys[1], env_state, action)
        after = None if recollection is None else Recollection(memory, time_step.done)
        # The next row's observation is this step's: no need to record it twice.
        return (env_state, time_step.observation, after), (
            (observation, action), extras, time_step._replace(observation=None),
        )  # fmt: skip

    (env_state, observation, recollection), steps = jax.lax.scan(
        one_step, (env_state, observation, recollection), keys
    )
    return env_state, observation, recollection, steps


def _joined(send: Callable, recv: Callable) -> Callable:
    return lambda keys, env_state, action: recv(send(keys, env_state, action))


class _Flight(NamedTuple):
    """A running step of one part of the environments; leading axis `B / R`."""

    sent: Any  # what `send` gave
    observation: Any
    action: Any
    extras: Any
    memory: Any  # after acting


def _in_rings(act: Callable, step: Step, keys: jax.Array, carry: Any, rings: int) -> tuple[Any, ...]:
    """`rollout_with_memory` in R parts, from its keys `[T, 2, B]`.

    The first step of every part is sent; then parts are received, act and are sent again, in turn or as they
    become ready. Parts are independent, so the order changes no number.

        send 0  send 1 | recv 0  act 0  send 0 | recv 1  act 1  send 1 | recv 0 ...
    """
    send, recv, *ready = (step, lambda sent: sent) if callable(step) else step
    num_steps = len(keys)

    def depart(begun, keys):
        env_state, observation, recollection = begun
        action, extras, memory = act(observation, recollection, keys[0])
        return _Flight(send(keys[1], env_state, action), observation, action, extras, memory)

    def arrive(flight):
        env_state, time_step = recv(flight.sent)
        after = None if carry[2] is None else Recollection(flight.memory, time_step.done)
        record = (flight.observation, flight.action), flight.extras, time_step._replace(observation=None)
        return (env_state, time_step.observation, after), record

    def one_turn(flights, keys):
        def one_part(_, both):
            flight, keys = both
            begun, record = arrive(flight)
            return None, (depart(begun, keys), record)

        _, (flights, record) = jax.lax.scan(one_part, None, (flights, keys))
        return flights, record

    def one_ready(carry, _):
        flights, received = carry  # `received [R]`: steps of each part
        part = ready[0](flights.sent, received < num_steps - 1)
        begun, record = arrive(_row(flights, part))
        slot = received[part] * rings + part
        departed = depart(begun, _row(keys[1:].reshape(-1, *keys.shape[2:]), slot))
        flights = jax.tree.map(
            lambda x, row: jax.lax.dynamic_update_index_in_dim(x, row, part, 0), flights, departed
        )
        return (flights, received.at[part].add(1)), (record, slot)

    # A part's rows are not neighbours, so that a batch that is split over devices stays split in each part.
    keys = jnp.moveaxis(keys.reshape(*keys.shape[:2], -1, rings), 3, 1)  # [T, R, 2, B / R]
    parts = jax.tree.map(lambda x: in_parts(x, rings), carry)
    _, flights = jax.lax.scan(lambda _, both: (None, depart(*both)), None, (parts, keys[0]))
    if ready and num_steps > 1:
        begun = flights, jnp.zeros(rings, jnp.int32)
        trips = (num_steps - 1) * rings
        (flights, _), (records, slots) = jax.lax.scan(one_ready, begun, None, length=trips)
        order = jnp.zeros(trips, jnp.int32).at[slots].set(jnp.arange(trips, dtype=jnp.int32))
        records = jax.tree.map(lambda x: x[order].reshape(-1, rings, *x.shape[1:]), records)
    else:
        flights, records = jax.lax.scan(one_turn, flights, keys[1:])  # [T - 1, R, B / R, ...]
    _, (parts, last) = jax.lax.scan(lambda _, flight: (None, arrive(flight)), None, flights)
    records = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), records, last)
    records = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2).reshape(len(x), -1, *x.shape[3:]), records)
    return *jax.tree.map(of_parts, parts), records


def _row(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def in_parts(x: jax.Array, rings: int) -> jax.Array:
    """Rows `[B, ...]` as parts of a ring, `[R, B / R, ...]`: row `b` is in part `b % R`.

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


def values_after(
    value: jax.Array, time_step: TimeStep, value_of: Callable[[Any], jax.Array], final: Any = None
) -> jax.Array:
    """The value of the observation after each step of a rollout, before any reset: `[T, B, ...]` float32.

    Within an episode this is the value of the next row. `value_of` is called for the others: once for the
    last row, then once for each truncation of an environment (as many calls as the environment with the most
    has). After a termination the result is meaningless.

    Args:
      value: `[T, B]` float32, the value of the observation before each step; of several agents `[T, B, A]`.
      time_step: `[T, B]`.
      value_of: `final [B, ...] -> [B, ...]`.
      final: `[T, B, ...]`, the input of `value_of`; None for `time_step.final_observation`. A recurrent
        critic passes its memory too.
    """
    final = time_step.final_observation if final is None else final
    after = jnp.concatenate([value[1:], value_of(jax.tree.map(lambda x: x[-1], final))[None]])
    row = jax.lax.broadcasted_iota(jnp.int32, value.shape[:2], 0)

    def left_over(carry):
        return jnp.any(carry[1])

    def one_of_each(carry):
        after, cut = carry
        first = jnp.argmax(cut, axis=0)
        rows = jax.tree.map(lambda x: jax.vmap(lambda x, i: x[i], in_axes=(1, 0))(x, first), final)
        here = cut & (row == first[None])
        of_agents = here.reshape(*here.shape, *(1,) * (after.ndim - 2))
        return jnp.where(of_agents, value_of(rows)[None], after), cut & ~here

    cut = time_step.truncated & ~time_step.terminated & (row < value.shape[0] - 1)
    return jax.lax.while_loop(left_over, one_of_each, (after, cut))[0]


def evaluate(
    env: Environment,
    actor: Actor,
    key: jax.Array,
    episodes: int,
    greedy: bool = True,
    max_steps: int = 10_000,
) -> dict[str, Any]:
    """Plays `episodes` whole episodes, each in its own environment with an empty memory at first.

    Args:
      greedy: take the most probable actions, else sample them as in training.
      max_steps: the length after which episodes are scored if the environment has no time limit.

    Returns:
      `return`, `return_std`, `length`: scalars over the episodes; `returns` `[B]` float32, `lengths` `[B]`
      int32; `infos`: episode metrics by name, `[B]` float32; NaN for cut episodes. In multi-agent
      environments, returns are means over agents; with a wrapper that changes rewards they are those of the
      inner environment.
    """
    names = getattr(env, "info", ())
    limit = env.max_episode_steps or max_steps
    reset_key, run_key = jax.random.split(key)
    env_state, observation = env.reset(jax.random.split(reset_key, episodes))

    def unfinished(carry):
        time, _, _, _, playing, *_ = carry
        return (time < limit) & jnp.any(playing)

    def one_step(carry):
        time, env_state, observation, (memory, begins), playing, total, length, infos = carry
        keys = jax.random.split(jax.random.fold_in(run_key, time), (2, episodes))
        action, memory = actor.act(memory, observation, begins, keys[0], greedy)
        env_state, step = env.step(keys[1], env_state, action)
        total += jnp.where(playing, _of_the_team(step.reward), 0.0)
        total = jnp.where(playing & step.done, step.episode_return, total)  # of unchanged rewards
        length += playing
        remembered = memory, step.done
        ended = playing & step.done
        infos = {name: jnp.where(ended, step.episode_info[name], old) for name, old in infos.items()}
        return time + 1, env_state, step.observation, remembered, playing & ~step.done, total, length, infos

    start = (
        jnp.int32(0),
        env_state,
        observation,
        (actor.memory(episodes), jnp.ones(episodes, bool)),
        jnp.ones(episodes, bool),
        jnp.zeros(episodes, jnp.float32),
        jnp.zeros(episodes, jnp.int32),
        {name: jnp.full(episodes, jnp.nan, jnp.float32) for name in names},
    )
    *_, total, length, infos = jax.lax.while_loop(unfinished, one_step, start)
    return {
        "return": jnp.mean(total),
        "return_std": jnp.std(total),
        "length": jnp.mean(length.astype(jnp.float32)),
        "returns": total,
        "lengths": length,
        "infos": infos,
    }


def _of_the_team(reward: jax.Array) -> jax.Array:
    return reward if reward.ndim == 1 else jnp.mean(reward, axis=1)


def episode_metrics(time_step: TimeStep) -> dict[str, jax.Array]:
    """Mean return and length of the episodes that ended in a rollout `[T, B]`, by masked sums.

    Returns:
      `episode_return`, `episode_length`, and `episode_NAME` for other metrics of environments
      (`TimeStep.episode_info`): scalar float32, nan if no episode ended; `episodes`: their number. With
      masked actions, `no_action_step`: the first step of the rollout, from 1, after which an episode
      continues and no action is allowed; nan if there is none.
    """
    episodes = jnp.sum(time_step.done.astype(jnp.float32))

    def mean(of_ended):  # zero where no episode ended, so that a plain sum is the sum over episodes
        return jnp.where(episodes > 0, jnp.sum(of_ended) / jnp.maximum(episodes, 1), jnp.nan)

    return {
        "episode_return": mean(time_step.episode_return),
        "episode_length": mean(time_step.episode_length.astype(jnp.float32)),
        "episodes": episodes,
        **{f"episode_{name}": _mean_known(time_step.done, x) for name, x in time_step.episode_info.items()},
        **_without_actions(time_step),
    }


def _without_actions(time_step: TimeStep) -> dict[str, jax.Array]:
    """The metric `no_action_step`, if actions are masked."""
    mask, done = features_and_mask(time_step.final_observation)[1], time_step.done
    if mask is None:
        return {}
    forbidden = ~jnp.any(mask, axis=tuple(range(done.ndim, mask.ndim))) & ~done
    step = jnp.arange(1, len(done) + 1, dtype=jnp.float32).reshape(-1, *(1,) * (done.ndim - 1))
    first = jnp.min(jnp.where(forbidden, step, jnp.inf))
    return {"no_action_step": jnp.where(jnp.isinf(first), jnp.nan, first)}


def _mean_known(done: jax.Array, values: jax.Array) -> jax.Array:
    known = done & ~jnp.isnan(values)
    return jnp.sum(jnp.where(known, values, 0.0)) / jnp.sum(known.astype(jnp.float32))


def environment_major(x: jax.Array) -> jax.Array:
    """Steps `[T, B, ...]` as rows `[B * T, ...]`: a sharding over environments stays a sharding over rows.

    Rows are flat because XLA is fast at products of two-dimensional matrices.

    >>> environment_major(jnp.array([[1, 10], [2, 20], [3, 30]])).tolist()
    [1, 2, 3, 10, 20, 30]
    """
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])


def time_first(x: jax.Array) -> jax.Array:
    """`[B, T, ...]` as `[T, B, ...]`, and back."""
    return x.swapaxes(0, 1)


def time_major(x: jax.Array, num_steps: int) -> jax.Array:
    """Rows `[B * T, ...]` as steps `[T, B, ...]`; undoes `environment_major`.

    >>> time_major(jnp.array([1, 2, 3, 10, 20, 30]), num_steps=3).tolist()
    [[1, 10], [2, 20], [3, 30]]
    """
    return x.reshape(-1, num_steps, *x.shape[1:]).swapaxes(0, 1)
