"""Lowering: turns a graph and a plan into functions that XLA compiles, one per program.

Fragments that share their devices become one program. Its code still computes global arrays, as it was
traced; only fragment borders change, from an identity to a sharding constraint that splits the declared batch
axis over the group's devices. XLA's partitioner derives the other shardings and inserts the collectives, so a
policy cannot change the mathematics.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdg import jaxprs, keys
from fdg.agents import mapped, with_copying
from fdg.jax_internals import ClosedJaxpr
from fdg.lowering import constraints as sharding
from fdg.lowering.draws import hoist_draws
from fdg.lowering.extremes import keep_nan
from fdg.lowering.mesh import AGENT_AXIS, batch_sharding, group_mesh, is_of_cpus, layout_sharding, make_mesh
from fdg.lowering.rewriting import Setting, rewrite_all
from fdg.lowering.tiles import uses_all_cores
from fdg.placing.layout import BATCH, Layout, Spec
from fdg.placing.plans import Plan
from fdg.placing.policy import Group
from fdg.placing.scheduling.schedule import Call, Value
from fdg.placing.sharded import layouts_by_position
from fdg.placing.staleness import algorithm_state


@dataclasses.dataclass(frozen=True)
class TrainingLoop:
    """A training loop as one program, for any number of iterations."""

    # `(leaves, iterations, rows) -> (leaves, buffers)`: the state's leaves after `iterations` (int32, at
    # most `rows`), and a buffer `[rows, ...]` per metric, with its first `iterations` rows written. Metrics
    # that are random keys are stored as key data (uint32).
    run: Callable[[list, jax.Array, int], tuple[list, list]]
    shardings: list[NamedSharding]  # the shardings of the leaves
    buffer_sharding: NamedSharding  # the sharding of every buffer
    count_sharding: NamedSharding  # the sharding of the number of iterations


def lower_shared(plan: Plan, devices: Sequence[jax.Device]) -> TrainingLoop:
    """The training loop of a plan with one group, in which all fragments share one program."""
    (group,), graph = plan.groups, plan.graph
    mesh = group_mesh(group, devices)
    layouts = layouts_by_position(plan.sharded, group.name)
    specs = [layouts[i].spec if i in layouts else None for i in range(len(graph.state_axes))]
    axes = graph.state_axes, graph.output_axes
    iterate = core.jaxpr_as_fun(on_mesh(graph.jaxpr, mesh, *axes, specs if group.shards else None))
    shardings = [
        layout_sharding(mesh, layouts.get(i) or Layout.of_batch(leaf.shape, axis, group.mesh))
        for i, (axis, leaf) in enumerate(zip(graph.state_axes, jax.tree.leaves(graph.state), strict=True))
    ]
    if group.shards:  # an iteration's results must have the shardings of its inputs
        iterate = _with_stable_shardings(iterate, shardings)
    replicated = batch_sharding(mesh, None)
    metrics = jax.tree.leaves(graph.metrics)

    def run(leaves: list, iterations: jax.Array, rows: int) -> tuple[list, list]:
        return _run_iterations(iterate, leaves, _buffers(metrics, rows), iterations)

    return TrainingLoop(run, shardings, replicated, replicated)


def lower_agents(plan: Plan, devices: Sequence[jax.Device]) -> TrainingLoop:
    """The program of several agents; each device vmaps a few at a time (`placing.agents_per_device`).

        128 agents on a GPU     all vmapped together: one program of large operations
        128 agents on a core    8 vmapped together for all iterations of a call; then the next 8

    Agents are independent, or they form a population (`graph.between_agents`). Agents of a population copy
    from each other after an iteration, so all of them finish it before the next one starts.
    """
    graph, mesh = plan.graph, _agents_mesh(plan, devices)
    by_agent, replicated = PartitionSpec(AGENT_AXIS), PartitionSpec()
    buffer_spec = PartitionSpec(None, AGENT_AXIS)
    assert plan.agents_per_vmap is not None
    num_agents, per_vmap = plan.agents_per_device, plan.agents_per_vmap
    chunk_size = per_vmap if graph.between_agents is None else num_agents
    setting = setting_on(mesh, graph.state_axes, graph.output_axes)
    agent = core.jaxpr_as_fun(prepare_for_vmap(graph.jaxpr, per_vmap, setting))
    one_by_one = graph.between_agents is None and per_vmap == 1
    if one_by_one:
        num_leaves = len(graph.state_axes)

        def iterate(*leaves: jax.Array) -> list[jax.Array]:
            """One iteration of one agent; metrics get an axis of agents."""
            return [x if i < num_leaves else x[None] for i, x in enumerate(agent(*leaves))]

    else:
        iterate = mapped(agent, chunk_size, per_vmap)
    if graph.between_agents is not None:
        state = algorithm_state(graph.state)
        axis = AGENT_AXIS if mesh.size > 1 else None
        iterate = with_copying(iterate, state, graph.state_axes, graph.between_agents, axis)
    metrics = [
        jax.ShapeDtypeStruct((num_agents, *metric.shape), metric.dtype)
        for metric in jax.tree.leaves(graph.metrics)
    ]

    def run(leaves: list, iterations: jax.Array, rows: int) -> tuple[list, list]:
        def run_all_of_device(leaves: list, iterations: jax.Array) -> tuple[list, list]:
            def run_chunk(leaves: list, buffers: list, first: Any) -> tuple[list, list]:
                if not one_by_one:
                    return _run_iterations(iterate, leaves, buffers, iterations, first)
                # If the loop's carry had an axis of one agent, XLA would copy a replay buffer per iteration.
                leaves = [x[0] for x in leaves]
                leaves, buffers = _run_iterations(iterate, leaves, buffers, iterations, first)
                return [x[None] for x in leaves], buffers

            return in_chunks(run_chunk, num_agents, chunk_size)(leaves, _buffers(metrics, rows))

        return jax.shard_map(
            run_all_of_device,
            mesh=mesh,
            in_specs=(by_agent, replicated),
            out_specs=(by_agent, buffer_spec),
            check_vma=False,
        )(leaves, iterations)

    shardings = [NamedSharding(mesh, by_agent)] * len(graph.state_axes)
    return TrainingLoop(run, shardings, NamedSharding(mesh, buffer_spec), NamedSharding(mesh, replicated))


def _agents_mesh(plan: Plan, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh whose only axis splits the agents."""
    return make_mesh([devices[i] for i in plan.groups[0].devices], AGENT_AXIS)


def with_sharding_constraints(jaxpr: ClosedJaxpr, plan: Plan, devices: Sequence[jax.Device]) -> ClosedJaxpr:
    """Adds the constraints that prevent wrong results (`constrain_whole`) to a program such as `init`.

    XLA chooses the shardings. With several groups, the program is only rewritten by `keep_nan`.
    """
    if len(plan.groups) > 1:
        return keep_nan(jaxpr)
    # JAX accepts only the mesh of the state's shardings.
    mesh = _agents_mesh(plan, devices) if plan.graph.agents else group_mesh(plan.groups[0], devices)
    if plan.groups[0].shards:
        return sharding.constrain(jaxpr, mesh, specs=())
    return sharding.constrain_whole(jaxpr, mesh, mesh.size)


def setting_on(
    mesh: Mesh,
    axes: Sequence[int | None],
    output_axes: Sequence[int | None],
    devices: int = 1,
    sharded: bool = False,
) -> Setting:
    """The setting of a program on a mesh; `devices` split its batch (1 if the mesh splits agents)."""
    return Setting(axes, devices, output_axes, is_of_cpus(mesh), uses_all_cores(mesh), sharded)


def prepare_for_vmap(jaxpr: ClosedJaxpr, agents_per_vmap: int, setting: Setting) -> ClosedJaxpr:
    """Rewrites one agent's program; if several agents will be vmapped, only hoists random draws."""
    return hoist_draws(jaxpr) if agents_per_vmap > 1 else rewrite_all(jaxpr, setting)


def vmapped_program(jaxpr: ClosedJaxpr, agents: int, agents_per_vmap: int) -> ClosedJaxpr:
    """A traced program of one agent, vmapped over several, `agents_per_vmap` at a time."""
    shapes = jaxprs.shapes_of(jaxprs.open_jaxpr(jaxpr).invars)
    batched_shapes = [jax.ShapeDtypeStruct((agents, *x.shape), x.dtype) for x in shapes]
    return jax.make_jaxpr(mapped(core.jaxpr_as_fun(jaxpr), agents, agents_per_vmap))(*batched_shapes)


def in_chunks(
    run: Callable[[list, list, Any], tuple[list, list]], agents: int, chunk_size: int
) -> Callable[[list, list], tuple[list, list]]:
    """A training loop for all agents of a device, which runs them in chunks of `chunk_size` agents by `run`.

    `run` maps `(leaves, buffers, first)` to `(leaves, buffers)`: leaves are `[chunk_size, ...]`, and entries
    from agent `first` on are written into `buffers` `[rows, agents, ...]`. `chunk_size` must divide `agents`,
    the number of agents on the device.
    """
    if chunk_size == agents:
        return lambda leaves, buffers: run(leaves, buffers, 0)

    def chunk(i: jax.Array, carry: tuple[list, list]) -> tuple[list, list]:
        leaves, buffers = carry
        first = i * chunk_size
        chunk_leaves = [jax.lax.dynamic_slice_in_dim(x, first, chunk_size) for x in leaves]
        chunk_leaves, buffers = run(chunk_leaves, buffers, first)
        leaves = [
            jax.lax.dynamic_update_slice_in_dim(x, new, first, 0)
            for x, new in zip(leaves, chunk_leaves, strict=True)
        ]
        return leaves, buffers

    return lambda leaves, buffers: jax.lax.fori_loop(0, agents // chunk_size, chunk, (leaves, buffers))


def _with_stable_shardings(iterate: Callable, shardings: Sequence[NamedSharding]) -> Callable:
    """Wraps an iteration so that its output leaves have the shardings of its input leaves."""

    def constrained(*leaves):
        results = iterate(*leaves)
        new_leaves = jax.lax.with_sharding_constraint(list(results[: len(shardings)]), list(shardings))
        return [*new_leaves, *results[len(shardings) :]]

    return constrained


def lower_call(call: Call, mesh: Mesh, group: Group) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """The jitted function of a schedule's program, and the shapes of its arguments.

    The last result is an additional uint8. To wait for the program, block on this result: other results may
    already have been donated to the next program. Programs of one device are lowered without shardings
    (`running.program.Program.roams`).
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
    output_shardings = [layout_sharding(mesh, value.laid_out) for value in call.outputs]
    shardings = (*output_shardings, batch_sharding(mesh, None))
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
    """Rewrites a traced program for a mesh, and adds sharding constraints if it has several devices.

    If parameters are sharded, `specs` are the shardings of inputs without a batch axis.
    """
    rows = mesh.shape[BATCH]
    jaxpr = rewrite_all(jaxpr, setting_on(mesh, input_axes, output_axes, rows, specs is not None))
    if rows == 1 and specs is None:
        return jaxpr
    return sharding.constrain(jaxpr, mesh, input_axes, output_axes, specs)


def _buffers(metrics: Sequence[Any], rows: int) -> list[jax.Array]:
    """A buffer `[rows, ...]` of zeros per metric."""
    data = [keys.data_shape(metric.shape, metric.dtype) for metric in metrics]
    return [jnp.zeros((rows, *row.shape), row.dtype) for row in data]


def _run_iterations(
    iterate: Callable, leaves: list, buffers: list, iterations: jax.Array, first: Any = 0
) -> tuple[list, list]:
    """Runs `iterations` iterations; returns the leaves, and the metric buffers with a row per iteration.

    For a chunk of agents, rows are written from agent `first` on.
    """

    def unfinished(carry: Any) -> jax.Array:
        return carry[0] < iterations

    def step(carry: Any) -> Any:
        i, leaves, buffers = carry
        results = iterate(*leaves)
        leaves, metrics = list(results[: len(leaves)]), results[len(leaves) :]
        buffers = [
            _with_row(buffer, keys.to_data(jnp.asarray(row)), i, first)  # a constant is a Python number
            for buffer, row in zip(buffers, metrics, strict=True)
        ]
        return i + 1, leaves, buffers

    _, leaves, buffers = jax.lax.while_loop(unfinished, step, (jnp.int32(0), list(leaves), buffers))
    return leaves, buffers


def _with_row(buffer: jax.Array, row: jax.Array, i: jax.Array, first: Any) -> jax.Array:
    """Writes row `i` of a buffer, or the part of it that starts at agent `first`."""
    start = [jnp.asarray(index, jnp.int32) for index in (i, first, *[0] * buffer.ndim)[: buffer.ndim]]
    return jax.lax.dynamic_update_slice(buffer, jnp.expand_dims(row, 0), start)
