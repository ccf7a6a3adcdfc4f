"""`agents`: turns an algorithm of one agent into one of several agents, which train side by side.

    one    = algos.PPO(env=envs.make("CartPole-v1"))
    many   = fdg.agents(one, 8)                        # leaves of the state and metrics have an axis of 8
    engine = fdg.compile(many, policies.GPUOnly())     # or fdg.compile(one, policies.GPUOnly(), num_seeds=8)

Agents are independent: each device runs whole agents, without communication. In a population, agents copy
parameters or settings from each other, as the algorithm's attribute `between_agents` says.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend import core

from fdg import jaxprs, keys
from fdg.arguments import check_takes, checked, quoted
from fdg.batch.rules.random import has_batch_dependent_draws
from fdg.batch.state_axes import state_axes
from fdg.errors import GraphError, PlanError
from fdg.kinds import as_python

_MAX_AGENTS = 2**32  # since seeds have 32 bits


class BetweenAgents(Protocol):
    """The attribute `between_agents` of an algorithm: when agents of a population copy, and what.

    Methods are pure functions of one agent's state. `known` is also called with states that have a leading
    axis of agents.

    Attributes:
      note: a sentence for the plan that says when agents copy, and what.
    """

    note: str

    def due(self, state: Any) -> jax.Array:
        """Whether agents copy now: `[]` bool, the same for all agents."""

    def known(self, state: Any) -> Any:
        """What other agents read about an agent, such as its score; computed elementwise from its state."""

    def source(self, everyone: Any, agent: jax.Array, state: Any) -> jax.Array:
        """The agent that `agent` copies from, possibly itself: `[]` int32.

        Args:
          everyone: `known` of all agents, `[agents, ...]`.
          agent: `[]` int32.
          state: the agent's state.
        """

    def taken(self, state: Any, axes: Sequence[int | None]) -> list[bool]:
        """Whether agents copy each leaf of the state; `axes` are the batch axes of the leaves."""

    def after(self, state: Any, source: jax.Array, agent: jax.Array) -> Any:
        """The agent's state after the leaves were copied from `source`."""


@dataclasses.dataclass(frozen=True)
class Agents:
    """`count` agents of an algorithm. State and metrics have a leading axis of agents.

    All other attributes, such as `evaluate`, come from the algorithm and are for one agent.
    """

    algorithm: Any
    count: int

    def __post_init__(self):
        object.__setattr__(self, "count", as_python(self.count))
        if not _is_valid_count(self.count):
            raise PlanError(f"n={self.count!r}: give a whole number of agents, at least 1")

    def starts(self, seed: int, count: int | None = None) -> Any:
        """The argument of `init`: keys of `seed`, `seed + 1`, ...; or `algorithm.starts(seed, count)`.

        Args:
          count: the number of sets of agents, stacked along a new leading axis; each set has the next seeds.
            None for one set without that axis.
        """
        if count is not None:
            rows = [self.starts(seed + i * self.count) for i in range(count)]
            return jax.tree.map(lambda *row: jnp.stack(row), *rows)
        if callable(starts := getattr(self.algorithm, "starts", None)):  # its agents also differ in settings
            return starts(seed, self.count)
        return jnp.stack([jax.random.key(seed + i) for i in range(self.count)])

    def init(self, starts: Any) -> Any:
        """The states of all agents, one per row of `starts`; a single key is split."""
        if isinstance(starts, jax.Array) and starts.ndim == 0:
            starts = jax.random.split(starts, self.count)
        # Sequential: under vmap, orthogonal initialisers become LAPACK's batched QR, which can deadlock in
        # XLA's CPU thread pool (jaxlib 0.10.2, two cores).
        return jax.lax.map(lambda start: jax.tree.map(jnp.asarray, self.algorithm.init(start)), starts)

    def iterate(self, state: Any) -> tuple[Any, Any]:
        """Runs one iteration of all agents; then agents copy from each other, if due."""
        leaves = jax.tree.leaves(state)
        agent_shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
        closed, results = jax.make_jaxpr(self.algorithm.iterate, return_shape=True)(agent_shapes)
        jaxpr = jaxprs.lowered(closed)
        axes, between = state_axes(jaxpr, len(leaves)), getattr(self.algorithm, "between_agents", None)
        results_flat = iterate_all(jaxpr, self.count, agent_shapes, axes, between)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(results), results_flat)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("algorithm", "count"):
            raise AttributeError(name)
        return getattr(self.algorithm, name)


@checked
def agents(algorithm: Any, n: int) -> Agents:
    """`n` independent agents of an algorithm, or a population of `n`, trained by one program.

    State and metrics get a leading axis of agents. Row i starts from the key of `seed + i`
    (`engine.init(seed)`), or from row i of `algorithm.starts(seed, n)` if the algorithm has this method.
    `fdg.compile(algorithm, policy, num_seeds=n)` compiles the same program.

    Args:
      algorithm: any object with `init(key) -> state` and `iterate(state) -> (state, metrics)`. If it has an
        attribute `between_agents`, agents copy from each other (`BetweenAgents`).
      n: at least 1.

    Raises:
      PlanError: `n` is not a positive integer.
      GraphError: `algorithm` is not an algorithm.

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
    """Returns the name of an algorithm; raises `GraphError` for any other value."""
    if isinstance(algorithm, type):
        raise GraphError(
            f"{algorithm.__name__} is a class, but an algorithm is an instance:"
            f" write {algorithm.__name__}(...) with its hyperparameters"
        )
    if inspect.ismodule(algorithm):
        raise GraphError(f"{algorithm.__name__} is a module, not an algorithm: write algos.make('PPO', env)")
    name = type(algorithm).__name__
    hint = f": write algos.make({algorithm!r:.60}, env)" if isinstance(algorithm, str) else ""
    if hasattr(algorithm, "observation_space"):
        hint = ": this is an environment: write algos.make('ppo', env)"
    for method in ("init", "iterate"):
        if callable(getattr(algorithm, "place", None)):
            raise GraphError(f"{quoted(algorithm)} is a policy, not an algorithm: exchange the two arguments")
        if not callable(getattr(algorithm, method, None)):
            raise GraphError(
                f"{name} has no method {method}: an algorithm has init(key) -> state and "
                f"iterate(state) -> (state, metrics){hint}"
            )
        check_takes(
            getattr(algorithm, method), ("key",) if method == "init" else ("state",), f"{name}.{method}"
        )
    return name


def of_seeds(algorithm: Any, num_seeds: int | None) -> Any:
    """`num_seeds` agents of an algorithm; the algorithm itself if `num_seeds` is None."""
    num_seeds = as_python(num_seeds)
    if num_seeds is None:
        return algorithm
    if not _is_valid_count(num_seeds):
        raise PlanError(f"num_seeds={num_seeds!r}: give a whole number of agents, at least 1, or None")
    return Agents(algorithm, num_seeds)


def split_agents(algorithm: Any, num_seeds: int | None) -> tuple[Any, int | None]:
    """The algorithm of one agent and the number of agents: the inverse of `of_seeds`."""
    if not isinstance(algorithm, Agents):
        return algorithm, num_seeds
    if num_seeds is not None:
        raise PlanError(
            f"num_seeds={num_seeds}: the algorithm already has {algorithm.count} agents: leave out num_seeds"
        )
    return algorithm.algorithm, algorithm.count


def first_start(algorithm: Any, seed: int) -> Any:
    """The argument of `init` for a seed: its key, or one key per agent."""
    return algorithm.starts(seed) if isinstance(algorithm, Agents) else jax.random.key(seed)


def _is_valid_count(count: Any) -> bool:
    return isinstance(count, int) and not isinstance(count, bool) and 1 <= count < _MAX_AGENTS


def iterate_all(
    jaxpr: Any, count: int, state: Any, axes: Sequence[int | None], between: BetweenAgents | None
) -> Callable[..., list[Any]]:
    """A function that runs one iteration of `count` agents, on the arrays of all devices.

    Args:
      jaxpr: the iteration of one agent, from the leaves of its state to their next values and metrics.
      state: one agent's state, a pytree of shapes; `axes` are the batch axes of its leaves.
      between: what agents copy after the iteration.
    """
    # Under vmap, agents would share these random draws, so such agents run one after the other.
    shares_draws = has_batch_dependent_draws(jaxprs.open_jaxpr(jaxpr))
    iterate = mapped(core.jaxpr_as_fun(jaxpr), count, 1 if shares_draws else count)
    return iterate if between is None else with_copying(iterate, state, axes, between)


def mapped(function: Callable[..., list[Any]], agents: int, agents_per_vmap: int) -> Callable[..., list[Any]]:
    """Maps a function of one agent over `agents` agents; vmaps `agents_per_vmap` of them at a time.

    Args:
      function: a function from arrays to arrays.
      agents: length of the leading axis of all arguments and results.
      agents_per_vmap: a divisor of `agents`.
    """
    if agents_per_vmap == 1:

        def map_chunk(*arrays: Any) -> list[Any]:
            return [x[None] for x in function(*(x[0] for x in arrays))]

    else:
        map_chunk = jax.vmap(function, axis_size=agents_per_vmap)  # the size, since there may be no arguments
    if agents_per_vmap == agents:
        return map_chunk

    def map_chunks(*arrays: Any) -> list[Any]:
        count = agents // agents_per_vmap
        chunks = [x.reshape(count, agents_per_vmap, *x.shape[1:]) for x in arrays]
        _, results = jax.lax.scan(lambda _, chunk: (None, map_chunk(*chunk)), None, chunks, count)
        return [x.reshape(agents, *x.shape[2:]) for x in results]

    return map_chunks


def with_copying(
    iterate: Callable[..., list[Any]],
    state: Any,
    axes: Sequence[int | None],
    between: BetweenAgents,
    mesh_axis: str | None = None,
) -> Callable[..., list[Any]]:
    """A function that runs one iteration of several agents; then agents copy from each other, if due.

    Args:
      iterate: from leaves `[agents, ...]` to new leaves and metrics. The first leaves are the state's;
        further ones (older parameters, under staleness) are not copied.
      state: one agent's state, a pytree of shapes; `axes` are the batch axes of its leaves.
      between: when agents copy, and what.
      mesh_axis: under `shard_map`, the mesh axis over which agents are split: leaves are gathered from all
        devices when copies are due. None if all agents are on this device.
    """
    structure = jax.tree.structure(state)
    count = len(jax.tree.leaves(state))
    copy_flags = between.taken(state, axes[:count])

    def gather(x: jax.Array) -> jax.Array:
        return x if mesh_axis is None else jax.lax.all_gather(x, mesh_axis, tiled=True)

    def copy(leaves: list) -> list:
        num_local = leaves[0].shape[0]
        offset = 0 if mesh_axis is None else jax.lax.axis_index(mesh_axis) * num_local
        agents = offset + jnp.arange(num_local, dtype=jnp.int32)
        state = jax.tree.unflatten(structure, leaves)
        everyone = jax.tree.map(gather, between.known(state))
        source = jax.vmap(between.source, in_axes=(None, 0, 0))(everyone, agents, state)
        copied = [
            gather(x)[source] if is_copied else x for x, is_copied in zip(leaves, copy_flags, strict=True)
        ]
        states = jax.vmap(between.after)(jax.tree.unflatten(structure, copied), source, agents)
        return [  # without weak types
            x if keys.is_key(x.dtype) else jax.lax.convert_element_type(x, old.dtype)
            for x, old in zip(jax.tree.leaves(states), leaves, strict=True)
        ]

    def iterate_and_copy(*leaves: Any) -> list:
        results = iterate(*leaves)
        state_leaves, metrics = list(results[:count]), results[count:]
        first_agent = jax.tree.unflatten(structure, [x[0] for x in state_leaves])
        return [*jax.lax.cond(between.due(first_agent), copy, list, state_leaves), *metrics]

    return iterate_and_copy
