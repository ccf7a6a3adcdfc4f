"""`agents`: an algorithm of several agents side by side, from one of a single agent.

    one    = algos.PPO(env=envs.make("CartPole-v1"))
    many   = fdg.agents(one, 8)                        # leaves of the state and metrics have an axis of 8
    engine = fdg.compile(many, policies.GPUOnly())     # as fdg.compile(one, policies.GPUOnly(), num_seeds=8)

The rows of that axis are independent: each device runs whole agents, which exchange nothing. In a population
agents exchange what the algorithm says, when it says so (`BetweenAgents`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend import core

from fdg import jaxprs, keys
from fdg.arguments import check_takes, checked, quoted
from fdg.batch.rules.random import draws_from_the_batch
from fdg.batch.state_axes import state_axes
from fdg.errors import GraphError, PlanError

_MOST = 2**32  # seeds are 32 bits


class BetweenAgents(Protocol):
    """What agents take over from each other, as an attribute `between_agents` of an algorithm says (or None).

    Pure functions of one agent's state, but for `known`, whose arrays may have an axis of agents.

    Attributes:
      note: when agents exchange what, a sentence for the plan.
    """

    note: str

    def due(self, state: Any) -> jax.Array:
        """Whether agents exchange now: `[]` bool, the same for every agent."""

    def known(self, state: Any) -> Any:
        """What all others see of an agent: arrays, made without looking along their axes."""

    def source(self, everyone: Any, agent: jax.Array, state: Any) -> jax.Array:
        """The agent that agent number `agent` takes over from, maybe itself: `[]` int32.

        Args:
          everyone: what is `known` of all agents, `[agents, ...]`.
          agent: `[]` int32.
          state: its own.
        """

    def taken(self, state: Any, axes: Sequence[int | None]) -> list[bool]:
        """Of each leaf of the state whether it is taken over; `axes` are the leaves' batch axes."""

    def after(self, state: Any, source: jax.Array, agent: jax.Array) -> Any:
        """The state to go on with, once the leaves have been taken over from `source`."""


@dataclasses.dataclass(frozen=True)
class Agents:
    """An algorithm of `count` agents: state and metrics of `algorithm`, with an axis of agents in front.

    Everything else, such as `evaluate`, is the algorithm's own, and of one agent.
    """

    algorithm: Any
    count: int

    def __post_init__(self):
        if not _is_number(self.count):
            raise PlanError(f"n={self.count!r}: give a whole number of agents, at least one")

    def starts(self, seed: int, count: int | None = None) -> Any:
        """What `init` takes: keys of `seed`, `seed + 1`, ...; or `algorithm.starts(seed, count)`.

        Args:
          count: of agents of these agents, whose seeds go on from one to the next; None for these alone.
        """
        if count is not None:
            rows = [self.starts(seed + i * self.count) for i in range(count)]
            return jax.tree.map(lambda *row: jnp.stack(row), *rows)
        if callable(own := getattr(self.algorithm, "starts", None)):  # agents that differ in more
            return own(seed, self.count)
        return jnp.stack([jax.random.key(seed + i) for i in range(self.count)])

    def init(self, starts: Any) -> Any:
        """The states of all agents, from each row of `starts`; a single key is split."""
        if isinstance(starts, jax.Array) and starts.ndim == 0:
            starts = jax.random.split(starts, self.count)
        # One after the other: LAPACK's batched QR, which orthogonal initialisers would become under
        # vmap, can wait for itself for ever in XLA's CPU thread pool (jaxlib 0.10.2, two cores).
        return jax.lax.map(lambda start: jax.tree.map(jnp.asarray, self.algorithm.init(start)), starts)

    def iterate(self, state: Any) -> tuple[Any, Any]:
        """An iteration of all agents, and what they exchange after it."""
        leaves, structure = jax.tree.flatten(state)
        ends: list[Any] = []

        def one(*leaves: Any) -> list[Any]:
            after, metrics = self.algorithm.iterate(jax.tree.unflatten(structure, leaves))
            ends[:] = [jax.tree.structure(metrics)]
            return [*jax.tree.leaves(after), *jax.tree.leaves(metrics)]

        shapes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves]
        jaxpr = jaxprs.lowered(jax.make_jaxpr(one)(*shapes))
        axes = state_axes(jaxpr, len(leaves))
        between = getattr(self.algorithm, "between_agents", None)
        of_one = jax.tree.unflatten(structure, shapes)
        results = iterate_all(jaxpr, self.count, of_one, axes, between)(*leaves)
        state = jax.tree.unflatten(structure, results[: len(leaves)])
        return state, jax.tree.unflatten(ends[0], results[len(leaves) :])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("algorithm", "count"):
            raise AttributeError(name)
        return getattr(self.algorithm, name)


@checked
def agents(algorithm: Any, n: int) -> Agents:
    """An algorithm of `n` independent agents, or of a population of `n`: one program trains them all.

    Its state and its metrics are those of `algorithm`, each array with an axis of agents in front. Row i is
    what `algorithm` computes from its own start: `engine.init(seed)` gives it the key of `seed + i`, or row i
    of `algorithm.starts(seed, n)` if the algorithm has that. `fdg.compile(algorithm, policy, num_seeds=n)`
    compiles the same.

    Args:
      algorithm: any object with `init(key) -> state` and `iterate(state) -> (state, metrics)`. If it has an
        attribute `between_agents`, agents exchange what that says (`BetweenAgents`).
      n: at least 1.

    Raises:
      PlanError: a number of agents that is none.
      GraphError: it is no algorithm.

    >>> class Counts:
    ...     def init(self, key): return jax.random.randint(key, (), 0, 10)
    ...     def iterate(self, state): return state + 1, {"count": state}
    >>> state, metrics = agents(Counts(), 3).iterate(jnp.array([4, 7, 1]))
    >>> state.tolist(), metrics["count"].tolist()
    ([5, 8, 2], [4, 7, 1])
    """
    checked_name(algorithm)
    return Agents(algorithm, n)


def checked_name(algorithm: Any) -> str:
    """The algorithm's name.

    Raises:
      GraphError: it is none, or a class in place of a value.
    """
    if isinstance(algorithm, type):
        raise GraphError(
            f"{algorithm.__name__} is a class, and an algorithm is a value of one:"
            f" write {algorithm.__name__}(...) with its hyperparameters"
        )
    name = type(algorithm).__name__
    named = f": write algos.make({algorithm!r:.60}, env)" if isinstance(algorithm, str) else ""
    for method in ("init", "iterate"):
        if callable(getattr(algorithm, "place", None)):
            raise GraphError(
                f"{quoted(algorithm)} is a policy in the place of the algorithm: exchange the two"
            )
        if not callable(getattr(algorithm, method, None)):
            raise GraphError(
                f"{name} has no method {method}: an algorithm has init(key) -> state and "
                f"iterate(state) -> (state, metrics){named}"
            )
        check_takes(
            getattr(algorithm, method), ("key",) if method == "init" else ("state",), f"{name}.{method}"
        )
    return name


def of_seeds(algorithm: Any, num_seeds: int | None) -> Any:
    """What an argument `num_seeds` makes of an algorithm: that many agents of it, or itself if it is None.

    Raises:
      PlanError: it is no number of agents.
    """
    if num_seeds is None:
        return algorithm
    if not _is_number(num_seeds):
        raise PlanError(f"num_seeds={num_seeds!r}: give a whole number of agents, at least one, or None")
    return Agents(algorithm, num_seeds)


def apart(algorithm: Any, num_seeds: int | None) -> tuple[Any, int | None]:
    """The algorithm of one agent, and how many there are: what `of_seeds` makes one of.

    Raises:
      PlanError: a number of agents, of what is several already.
    """
    if not isinstance(algorithm, Agents):
        return algorithm, num_seeds
    if num_seeds is not None:
        raise PlanError(f"num_seeds={num_seeds}: the algorithm is of {algorithm.count} agents: leave one out")
    return algorithm.algorithm, algorithm.count


def first_start(algorithm: Any, seed: int) -> Any:
    """What `init` of an algorithm takes for a seed: its key, or that of each agent."""
    return algorithm.starts(seed) if isinstance(algorithm, Agents) else jax.random.key(seed)


def _is_number(count: Any) -> bool:
    return isinstance(count, int) and not isinstance(count, bool) and 1 <= count < _MOST


def iterate_all(
    jaxpr: Any, count: int, state: Any, axes: Sequence[int | None], between: BetweenAgents | None
) -> Callable[..., list[Any]]:
    """An iteration of one agent as one of `count` of them, in the global view.

    Args:
      jaxpr: of one agent: the leaves of its state to those, and metrics.
      state: its pytree, of shapes; `axes` are the batch axes of its leaves.
      between: what agents exchange after it.
    """
    alone = draws_from_the_batch(jaxprs.open_jaxpr(jaxpr))  # mapped, they would share their draws
    iterate = mapped(core.jaxpr_as_fun(jaxpr), count, 1 if alone else count)
    return iterate if between is None else exchanging(iterate, state, axes, between)


def mapped(one: Callable[..., list[Any]], agents: int, together: int) -> Callable[..., list[Any]]:
    """A function of one agent for several, `together` at a time.

    Args:
      one: from arrays to arrays.
      agents: the leading axis of all arrays that the result takes and gives.
      together: a divisor of their number.
    """
    if together == agents:
        return one_by_one(one) if agents == 1 else jax.vmap(one)
    some = one_by_one(one) if together == 1 else jax.vmap(one)

    def all_here(*arrays: Any) -> list[Any]:
        groups = [x.reshape(agents // together, together, *x.shape[1:]) for x in arrays]
        results = jax.lax.map(lambda group: some(*group), groups)
        return [x.reshape(agents, *x.shape[2:]) for x in results]

    return all_here


def one_by_one(one: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """A function of one agent for a single one, whose arrays have an axis of length one."""
    return lambda *arrays: [x[None] for x in one(*(x[0] for x in arrays))]


def exchanging(
    iterate: Callable[..., list[Any]],
    state: Any,
    axes: Sequence[int | None],
    between: BetweenAgents,
    mesh_axis: str | None = None,
) -> Callable[..., list[Any]]:
    """An iteration of several agents, and what they exchange after it if that is due.

    Args:
      iterate: from leaves `[agents, ...]` to such leaves, and metrics. Its first leaves are those of `state`;
        others (the older parameters of a staleness) are an agent's own.
      state: the pytree of one agent's state, of shapes; `axes` are the batch axes of its leaves.
      between: when agents exchange, and what.
      mesh_axis: under `shard_map`, the axis that agents are split over: what is taken over is gathered from
        all devices, only when it is due. None where all agents are there.
    """
    structure = jax.tree.structure(state)
    count = len(jax.tree.leaves(state))
    taken = between.taken(state, axes[:count])

    def gathered(x: jax.Array) -> jax.Array:
        return x if mesh_axis is None else jax.lax.all_gather(x, mesh_axis, tiled=True)

    def exchanged(leaves: list) -> list:
        here = leaves[0].shape[0]
        first = 0 if mesh_axis is None else jax.lax.axis_index(mesh_axis) * here
        agents = first + jnp.arange(here, dtype=jnp.int32)
        state = jax.tree.unflatten(structure, leaves)
        everyone = jax.tree.map(gathered, between.known(state))
        source = jax.vmap(between.source, in_axes=(None, 0, 0))(everyone, agents, state)
        taken_over = [
            gathered(x)[source] if is_taken else x for x, is_taken in zip(leaves, taken, strict=True)
        ]
        after = jax.vmap(between.after)(jax.tree.unflatten(structure, taken_over), source, agents)
        return [_as(new, old) for new, old in zip(jax.tree.leaves(after), leaves, strict=True)]

    def iterate_and_exchange(*leaves: Any) -> list:
        results = iterate(*leaves)
        own, others = list(results[:count]), results[count:]
        one = jax.tree.unflatten(structure, [x[0] for x in own])
        return [*jax.lax.cond(between.due(one), exchanged, list, own), *others]

    return iterate_and_exchange


def _as(new: jax.Array, old: jax.Array) -> jax.Array:
    """Strongly typed, as the state is."""
    return new if keys.is_key(old.dtype) else jax.lax.convert_element_type(new, old.dtype)
