"""Lowering: from a graph and a plan to functions that XLA compiles, one for each program.

Fragments that share their devices become one program. The traced code stays as it is, in the global view;
only its fragment borders change, from an identity to a sharding constraint that splits the declared batch
axis over the group's devices. XLA's partitioner derives the rest and inserts the collectives, so a policy
cannot change the mathematics.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdg import jaxprs, keys
from fdg.agents import exchanging, mapped
from fdg.jax_internals import ClosedJaxpr
from fdg.lowering import constraints as sharding
from fdg.lowering.draws import hoist_draws
from fdg.lowering.extremes import keep_nan
from fdg.lowering.mesh import SEED, batch_sharding, group_mesh, is_of_cpus, layout_sharding, make_mesh
from fdg.lowering.rewriting import Setting, rewrite_all
from fdg.lowering.tiles import have_a_core_each
from fdg.placing.layout import Layout, Spec
from fdg.placing.plans import Plan
from fdg.placing.policy import Group
from fdg.placing.scheduling.schedule import Call, Value
from fdg.placing.sharded import by_position
from fdg.placing.staleness import own_state


@dataclasses.dataclass(frozen=True)
class TrainingLoop:
    """A training loop as one program, for any number of iterations."""

    # `(leaves, iterations, rows) -> (leaves, buffers)`: the state's leaves after `iterations` (int32, at
    # most `rows`), and a buffer `[rows, ...]` for each metric, with its first `iterations` rows written.
    # Metrics that are random keys are stored as their words (uint32).
    run: Callable[[list, jax.Array, int], tuple[list, list]]
    shardings: list[NamedSharding]  # of the leaves
    buffer_sharding: NamedSharding  # of every buffer
    count_sharding: NamedSharding  # of the number of iterations


def lower_shared(plan: Plan, devices: Sequence[jax.Device]) -> TrainingLoop:
    """The program of a plan whose fragments share all devices."""
    (group,), graph = plan.groups, plan.graph
    mesh = group_mesh(group, devices)
    split = by_position(plan.sharded, group.name)
    specs = [split[i].spec if i in split else None for i in range(len(graph.state_axes))]
    axes = graph.state_axes, graph.output_axes
    iterate = core.jaxpr_as_fun(on_mesh(graph.jaxpr, mesh, *axes, specs if group.shards else None))
    shardings = [
        layout_sharding(mesh, split.get(i) or Layout.of_batch(leaf.shape, axis, group.mesh))
        for i, (axis, leaf) in enumerate(zip(graph.state_axes, jax.tree.leaves(graph.state), strict=True))
    ]
    if group.shards:  # an iteration's results must have the shardings of its inputs
        iterate = _with_stable_shardings(iterate, shardings)
    everywhere = batch_sharding(mesh, None)
    metrics = jax.tree.leaves(graph.metrics)

    def run(leaves: list, iterations: jax.Array, rows: int) -> tuple[list, list]:
        return _run_iterations(iterate, leaves, _buffers(metrics, rows), iterations)

    return TrainingLoop(run, shardings, everywhere, everywhere)


def lower_agents(plan: Plan, devices: Sequence[jax.Device]) -> TrainingLoop:
    """The program of several agents, a few at a time on each device (`placing.agents_per_device`).

        128 agents on a GPU     all mapped together: one program of large operations
        128 agents on a core    8 mapped together for all iterations of a call; then the next 8

    Agents are independent, except for the exchanges of a population (`graph.between_agents`): these are
    stepped together.
    """
    graph, mesh = plan.graph, make_mesh([devices[i] for i in plan.groups[0].devices], SEED)
    split, record, everywhere = PartitionSpec(SEED), PartitionSpec(None, SEED), PartitionSpec()
    assert plan.together is not None
    here, together = plan.agents_here, plan.together
    agent = core.jaxpr_as_fun(
        rewrite_one_agent(graph.jaxpr, graph.state_axes, graph.output_axes, together, mesh)
    )
    if graph.between_agents is None:
        iterate = mapped(agent, together, together)
    else:  # in step
        state = own_state(graph.state)
        axis = SEED if mesh.size > 1 else None
        iterate = exchanging(
            mapped(agent, here, together), state, graph.state_axes, graph.between_agents, axis
        )
        together = here
    metrics = [
        jax.ShapeDtypeStruct((here, *metric.shape), metric.dtype) for metric in jax.tree.leaves(graph.metrics)
    ]

    def run(leaves: list, iterations: jax.Array, rows: int) -> tuple[list, list]:
        def all_here(leaves: list, iterations: jax.Array) -> tuple[list, list]:
            def some(leaves: list, buffers: list, first: Any) -> tuple[list, list]:
                return _run_iterations(iterate, leaves, buffers, iterations, first)

            return in_chunks(some, here, together)(leaves, _buffers(metrics, rows))

        return jax.shard_map(
            all_here, mesh=mesh, in_specs=(split, everywhere), out_specs=(split, record), check_vma=False
        )(leaves, iterations)

    shardings = [NamedSharding(mesh, split)] * len(graph.state_axes)
    return TrainingLoop(run, shardings, NamedSharding(mesh, record), NamedSharding(mesh, everywhere))


def with_sharding_constraints(jaxpr: ClosedJaxpr, plan: Plan, devices: Sequence[jax.Device]) -> ClosedJaxpr:
    """Adds sharding constraints to the results of a program, such as `init`, of a plan with one group."""
    if len(plan.groups) > 1:
        return keep_nan(jaxpr)
    mesh = group_mesh(plan.groups[0], devices)
    constrained = sharding.constrain(jaxpr, mesh, specs=()) if plan.groups[0].shards else keep_nan(jaxpr)
    return sharding.replicate_host_results(constrained, mesh)


def rewrite_one_agent(
    jaxpr: ClosedJaxpr,
    axes: Sequence[int | None],
    output_axes: Sequence[int | None],
    together: int,
    mesh: Mesh,
) -> ClosedJaxpr:
    """One agent's program, rewritten for a mesh whose axis is the agents (`prepare_for_vmap`)."""
    return prepare_for_vmap(
        jaxpr, together, Setting(axes, 1, output_axes, is_of_cpus(mesh), have_a_core_each(mesh))
    )


def prepare_for_vmap(jaxpr: ClosedJaxpr, together: int, setting: Setting) -> ClosedJaxpr:
    """Rewrites one agent's program: if it is to be mapped (`together > 1`), only hoists its random draws."""
    return hoist_draws(jaxpr) if together > 1 else rewrite_all(jaxpr, setting)


def vmapped_program(jaxpr: ClosedJaxpr, agents: int, together: int) -> ClosedJaxpr:
    """A traced program of one agent, mapped over several, `together` at a time."""
    shapes = jaxprs.shapes_of(jaxprs.open_jaxpr(jaxpr).invars)
    several = [jax.ShapeDtypeStruct((agents, *x.shape), x.dtype) for x in shapes]
    return jax.make_jaxpr(mapped(core.jaxpr_as_fun(jaxpr), agents, together))(*several)


def in_chunks(
    run: Callable[[list, list, Any], tuple[list, list]], agents: int, together: int
) -> Callable[[list, list], tuple[list, list]]:
    """A training loop for all agents of a device, which runs them in chunks of `together` agents by `run`.

    `run` maps `(leaves, buffers, first)` to `(leaves, buffers)`: leaves `[together, ...]`; it writes the
    entries from agent `first` on into `buffers` `[rows, agents, ...]`. `together` divides `agents`, those of
    the device.
    """
    if together == agents:
        return lambda leaves, buffers: run(leaves, buffers, 0)

    def chunk(i: jax.Array, carry: tuple[list, list]) -> tuple[list, list]:
        leaves, buffers = carry
        first = i * together
        mine = [jax.lax.dynamic_slice_in_dim(x, first, together) for x in leaves]
        mine, buffers = run(mine, buffers, first)
        leaves = [
            jax.lax.dynamic_update_slice_in_dim(x, new, first, 0) for x, new in zip(leaves, mine, strict=True)
        ]
        return leaves, buffers

    return lambda leaves, buffers: jax.lax.fori_loop(0, agents // together, chunk, (leaves, buffers))


def _with_stable_shardings(iterate: Callable, shardings: Sequence[NamedSharding]) -> Callable:
    """An iteration whose output leaves have the shardings of its inputs."""

    def kept(*leaves):
        results = iterate(*leaves)
        ends = jax.lax.with_sharding_constraint(list(results[: len(shardings)]), list(shardings))
        return [*ends, *results[len(shardings) :]]

    return kept


def lower_call(call: Call, mesh: Mesh, group: Group) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """One program of a schedule, and its arguments.

    The program returns one more uint8. Block on it to wait for the program: its other results may have been
    donated to the next program by then. Programs of one device are lowered without shardings
    (`Program.roams`).
    """
    inputs = [value.variable for value in call.inputs]
    outputs = [value.variable for value in call.outputs]
    jaxpr = jaxprs.build(inputs, outputs, call.equations)
    axes = [value.axis for value in call.inputs], [value.axis for value in call.outputs]
    specs = [value.laid_out.spec if value.axis is None else None for value in call.inputs]
    function = core.jaxpr_as_fun(on_mesh(jaxpr, mesh, *axes, specs if group.shards else None))

    def program(*arrays):
        return *function(*arrays), jnp.zeros((), jnp.uint8)

    program.__name__ = program.__qualname__ = call.name
    shapes, donated = [value_shape(mesh, value) for value in call.inputs], tuple(sorted(call.donated))
    if mesh.size == 1:
        return jax.jit(program, donate_argnums=donated), shapes
    ends = [layout_sharding(mesh, value.laid_out) for value in call.outputs]
    shardings = (*ends, batch_sharding(mesh, None))
    return jax.jit(program, donate_argnums=donated, out_shardings=shardings), shapes


def value_shape(mesh: Mesh, value: Value) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a value on its group's mesh."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=layout_sharding(mesh, value.laid_out))


def on_mesh(
    jaxpr: ClosedJaxpr,
    mesh: Mesh,
    input_axes: Sequence[int | None],
    output_axes: Sequence[int | None],
    specs: Sequence[Spec | None] | None,
) -> ClosedJaxpr:
    """A traced program on a mesh: rewritten and constrained.

    If parameters are sharded, `specs` are the shardings of inputs without a batch axis.
    """
    kind = is_of_cpus(mesh), have_a_core_each(mesh)
    jaxpr = rewrite_all(jaxpr, Setting(input_axes, mesh.size, output_axes, *kind, sharded=specs is not None))
    if mesh.size == 1:
        return jaxpr
    return sharding.constrain(jaxpr, mesh, input_axes, output_axes, specs)


def _buffers(metrics: Sequence[Any], rows: int) -> list[jax.Array]:
    words = [keys.words_shape(metric.shape, metric.dtype) for metric in metrics]
    return [jnp.zeros((rows, *row.shape), row.dtype) for row in words]


def _run_iterations(
    iterate: Callable, leaves: list, buffers: list, iterations: jax.Array, first: Any = 0
) -> tuple[list, list]:
    """Runs `iterations` iterations; returns the leaves, and the metric buffers with a row for each iteration.

    For a chunk of agents, rows are written from agent `first` on.
    """

    def unfinished(carry: Any) -> jax.Array:
        return carry[0] < iterations

    def one(carry: Any) -> Any:
        i, leaves, buffers = carry
        results = iterate(*leaves)
        leaves, made = list(results[: len(leaves)]), results[len(leaves) :]
        buffers = [
            _with_row(buffer, keys.words(row), i, first) for buffer, row in zip(buffers, made, strict=True)
        ]
        return i + 1, leaves, buffers

    _, leaves, buffers = jax.lax.while_loop(unfinished, one, (jnp.int32(0), list(leaves), buffers))
    return leaves, buffers


def _with_row(buffer: jax.Array, row: jax.Array, i: jax.Array, first: Any) -> jax.Array:
    """The buffer with row `i`, or a part of it from `first` on, replaced."""
    start = [jnp.asarray(at, jnp.int32) for at in (i, first, *[0] * buffer.ndim)[: buffer.ndim]]
    return jax.lax.dynamic_update_slice(buffer, jnp.expand_dims(row, 0), start)
