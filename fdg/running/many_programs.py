"""Runs a plan of several groups: the host dispatches programs and transfers in the schedule's order."""

import collections
import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fdg import keys
from fdg.lowering.mesh import group_mesh
from fdg.lowering.programs import batch_sharding, value_shape
from fdg.placing.plans import SteppedPlan
from fdg.placing.scheduling.schedule import Value
from fdg.processes.arrays import absent_array, broadcast, commit, put
from fdg.running.lanes import Action, array_of, lanes_of
from fdg.running.leaves import LeafCopies
from fdg.running.metrics import Chunk, PendingMetrics
from fdg.running.program import Program, compile_programs
from fdg.running.steps import Memory, StepBuilder, move_slots
from fdg.running.timeline import Timeline

ROWS = 64  # the number of iterations whose metrics are stacked by one call


class MetricStacks:
    """Stacks the metrics of up to `ROWS` iterations, with one program for each group."""

    def __init__(self, metrics: Sequence[Value], builder: StepBuilder):
        meshes = builder.meshes
        by_group: dict[str, list[int]] = collections.defaultdict(list)
        for i, value in enumerate(metrics):
            by_group[value.group].append(i)
        self._group_stacks: list[tuple[list[int], Program, Action]] = []
        for group, positions in by_group.items():
            mesh = meshes[group]
            rows = [value_shape(mesh, metrics[i]) for i in positions for _ in range(ROWS)]
            stack = jax.jit(_stack_rows, out_shardings=batch_sharding(mesh, None))
            program = Program(
                f"stack {group}",
                fragments=(),
                devices=tuple(mesh.devices.flat),
                calls_per_iteration=0,
                function=stack,
                arguments=(rows,),
            )
            dispatch = builder.on_lane(group, program, len(positions))
            self._group_stacks.append((positions, program, dispatch))
        self.programs = tuple(program for _, program, _ in self._group_stacks)
        data = [keys.data_shape(value.shape, value.dtype) for value in metrics]
        self._shapes = [jax.ShapeDtypeStruct((ROWS, *row.shape), row.dtype) for row in data]
        self._owners = [meshes[value.group].devices.flat[0].process_index for value in metrics]

    def __call__(self, rows: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns a buffer `[ROWS, ...]` for each metric; None for metrics of other processes.

        Each row has all metrics of an iteration; the last row is repeated until there are `ROWS` rows.
        """
        buffers: list[Any] = [None] * len(self._shapes)
        padded = [*rows, *[rows[-1]] * (ROWS - len(rows))]
        for positions, program, dispatch in self._group_stacks:
            if program.is_here:
                stacked = dispatch([row[i] for i in positions for row in padded])
                for i, buffer in zip(positions, stacked, strict=True):
                    buffers[i] = buffer
        return buffers

    def broadcast(self, buffers: Sequence[Any]) -> list[jax.Array]:
        """Copies each process's buffers to all processes."""
        return broadcast(buffers, self._shapes, self._owners)


def _stack_rows(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Stacks `ROWS` arrays of each metric in turn."""
    rows = [arrays[i : i + ROWS] for i in range(0, len(arrays), ROWS)]
    return [jnp.stack([keys.to_data(x) for x in row]) for row in rows]


IN_FLIGHT = 4  # the number of iterations at once: one that is dispatched, and three that are still running


class ManyPrograms:
    """A schedule of several programs, dispatched asynchronously in order.

    Each group runs its programs in order; groups overlap as far as data dependencies allow. If programs would
    block the dispatching thread, each group has a thread (`lanes`).

    Attributes:
      shapes: shapes, dtypes and shardings of the state's leaves.
      timeline: measures how long each group is busy.
      programs: the compiled programs, without those that stack metrics.
    """

    def __init__(self, plan: SteppedPlan, devices: Sequence[jax.Device]):
        schedule = plan.schedule
        meshes = {group.name: group_mesh(group, devices) for group in plan.groups}
        self.timeline = Timeline(list(meshes))
        weakref.finalize(self, self.timeline.close)
        self._lanes = lanes_of(schedule, meshes)
        self._builder = builder = StepBuilder(plan.groups, meshes, self.timeline, self._lanes)
        self._steps = builder.build(schedule.steps, schedule.carry)
        self._calls_per_iteration = sum(times for _, times in schedule.calls())
        self._carried_slots = builder.slots(schedule.carry)
        self._metric_slots = [builder.slot(value) for value in schedule.metrics]
        self._metrics, self._stack = plan.graph.metrics, MetricStacks(schedule.metrics, builder)
        self._copies = LeafCopies(schedule.leaves, builder)
        self.shapes = [builder.shape(values[0]) for values in schedule.leaves]
        self._host_constants = [
            (builder.slot(value), plan.constants[i], builder.shape(value)) for i, value in schedule.constants
        ]
        self._constants: list[tuple[int, jax.Array]] | None = None
        carried_values = {start for _, start in schedule.carry}
        self._token_slots = [builder.slot(b) for _, b in schedule.constants if b in carried_values]
        self._last_tokens: list[tuple[int, jax.Array]] = []
        self.programs = tuple(builder.programs)

    @property
    def moved_bytes(self) -> int:
        """Bytes transferred between groups so far."""
        return self._builder.moved_bytes

    def compile(self, meanwhile: Callable[[], Any]) -> Any:
        """Compiles all programs, copies constants to the devices, and connects the processes.

        `meanwhile` is called at the same time; its result is returned.
        """
        result = compile_programs([*self.programs, *self._stack.programs], meanwhile)
        if self._constants is None:
            self._constants = [(slot, put(value, shape)) for slot, value, shape in self._host_constants]
            self._builder.connect()
        return result

    def start(
        self, leaves: list[jax.Array], iterations: int, stop: Callable[[], bool]
    ) -> tuple[list[jax.Array], PendingMetrics]:
        """Dispatches all iterations, at most `IN_FLIGHT` at once.

        Ends early, after an iteration, if `stop` returns True; with several processes, `stop` is ignored. All
        processes have to call this method.
        """
        is_single_process = jax.process_count() == 1
        memory = self._builder.memory()
        for slot, value in self._constants or ():
            memory.arrays[slot] = value
        for slot, token in self._last_tokens:  # so effects run after those of the previous call
            if not has_failed(token):
                memory.arrays[slot] = token
        self._copies.fill(memory, leaves)
        self.timeline.begin()
        with self._lanes or contextlib.nullcontext():
            chunks = self._iterate(memory, iterations, lambda: is_single_process and stop())
        memory.arrays = [array_of(array) for array in memory.arrays]
        self._last_tokens = [
            (slot, memory.arrays[slot]) for slot in self._token_slots if memory.arrays[slot] is not None
        ]
        self._builder.collectives.wait()
        chunks = [([array_of(buffer) for buffer in buffers], count) for buffers, count in chunks]
        broadcast = self._stack.broadcast if jax.process_count() > 1 else None
        return self._new_leaves(memory), PendingMetrics(self._metrics, chunks, broadcast)

    def _iterate(self, memory: Memory, iterations: int, stop: Callable[[], bool]) -> list[Chunk]:
        """Dispatches the iterations; returns their metrics in order."""
        chunks: list[Chunk] = []
        rows: list[list[Any]] = []
        in_flight: collections.deque[Any] = collections.deque()
        for i in range(iterations):
            memory.set_timed(self.timeline.begin_iteration(self._calls_per_iteration))
            for step in self._steps:
                step(memory)
            rows.append([memory.arrays[slot] for slot in self._metric_slots])
            is_last = i == iterations - 1 or stop()
            if len(rows) == ROWS or is_last:
                chunks.append((self._stack(rows), len(rows)))
                rows = []
            move_slots(memory, self._carried_slots)
            in_flight.append(self.timeline.last_results())
            if len(in_flight) == IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())
            if is_last:
                break
        return chunks

    def _new_leaves(self, memory: Memory) -> list[jax.Array]:
        """Returns the leaves of the new state; their copies are kept for the next call."""
        leaves = [
            absent_array(shape) if leaf is None else commit(leaf, shape.sharding)
            for leaf, shape in zip(self._copies.primary(memory), self.shapes, strict=True)
        ]
        self._copies.keep(memory, leaves)
        return leaves


def has_failed(array: Any) -> bool:
    """Whether the computation of an array has ended with an error. Never waits."""
    if not array.is_ready():
        return False
    try:
        array.block_until_ready()
    except jax.errors.JaxRuntimeError:
        return True
    return False
