"""A plan of several groups: programs and transfers, which the host starts in the order of a schedule."""

import collections
import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fdg.lowering.mesh import group_mesh
from fdg.placing.plans import SteppedPlan
from fdg.processes.arrays import absent, committed, put
from fdg.running.lanes import kept, lanes_of
from fdg.running.leaves import LeafCopies
from fdg.running.metrics import Chunk, PendingMetrics
from fdg.running.program import compile_programs
from fdg.running.rows import ROWS, RowStacks
from fdg.running.steps import Interpreter, Memory, rebind
from fdg.running.timeline import Timeline

_IN_FLIGHT = 3  # iterations that the host may be ahead of the devices


class ManyPrograms:
    """A schedule of several programs: the host starts them in turn and waits for none.

    Each group's devices work through what they were given in order; groups overlap where the data allow.
    Where programs would hold up the host's thread, a thread for each group starts them (`lanes`).

    Attributes: those of `OneProgram`; `timeline` says how long each group was busy.
    """

    timeline: Timeline | None

    def __init__(self, plan: SteppedPlan, devices: Sequence[jax.Device]):
        schedule = plan.schedule
        meshes = {group.name: group_mesh(group, devices) for group in plan.groups}
        self.timeline = self._timeline = Timeline(list(meshes))
        weakref.finalize(self, self._timeline.close)
        self._lanes = lanes_of(schedule, meshes)
        self._interpreter = interpreter = Interpreter(plan.groups, meshes, self._timeline, self._lanes)
        self._steps = interpreter.build(schedule.steps)
        self._calls = sum(times for _, times in schedule.calls())
        self._carried = interpreter.slots(schedule.carry)
        self._made = [interpreter.slot(value) for value in schedule.metrics]
        self._metrics, self._stack = plan.graph.metrics, RowStacks(schedule.metrics, interpreter)
        self._copies = LeafCopies(schedule.leaves, interpreter)
        self.shapes = [interpreter.shape(places[0]) for places in schedule.leaves]
        self._place_constants = [
            (interpreter.slot(value), plan.constants[i], interpreter.shape(value))
            for i, value in schedule.constants
        ]
        self._constants: list[tuple[int, jax.Array]] | None = None
        carried = {start for _, start in schedule.carry}
        self._tokens = [interpreter.slot(value) for _, value in schedule.constants if value in carried]
        self._last_tokens: list[tuple[int, jax.Array]] = []
        self.programs = tuple(interpreter.programs)

    @property
    def moved_bytes(self) -> int:
        """Bytes that were moved between groups since this was made."""
        return self._interpreter.moved_bytes

    def compile(self) -> None:
        """Compiles all programs, and lays out constants."""
        if self._constants is None:
            compile_programs([*self.programs, *self._stack.programs])
            self._constants = [(slot, put(value, shape)) for slot, value, shape in self._place_constants]

    def start(
        self, leaves: list[jax.Array], iterations: int, stop: Callable[[], bool]
    ) -> tuple[list[jax.Array], PendingMetrics]:
        """Starts all programs of all iterations; waits where it gets too far ahead of the devices.

        Of several processes, all have to call it; they do as many iterations each, whatever `stop` says.

        Args:
          leaves, iterations: as for `OneProgram.start`.
          stop: looked at between iterations: whether to do no more of them.
        """
        alone = jax.process_count() == 1
        memory = self._interpreter.memory()
        for slot, value in self._constants or ():
            memory.arrays[slot] = value
        for slot, token in self._last_tokens:  # effects come after those of the last call
            if not has_failed(token):
                memory.arrays[slot] = token
        self._copies.fill(memory, leaves)
        self._timeline.begin()
        with self._lanes or contextlib.nullcontext():
            chunks = self._iterate(memory, iterations, lambda: alone and stop())
        memory.arrays = [kept(array) for array in memory.arrays]
        self._last_tokens = [
            (slot, memory.arrays[slot]) for slot in self._tokens if memory.arrays[slot] is not None
        ]
        self._interpreter.crossings.wait()
        chunks = [([kept(buffer) for buffer in buffers], count) for buffers, count in chunks]
        share = self._stack.share if jax.process_count() > 1 else None
        return self._leaves(memory), PendingMetrics(self._metrics, chunks, share)

    def _iterate(self, memory: Memory, iterations: int, stop: Callable[[], bool]) -> list[Chunk]:
        """Starts iterations, one after the other; their metrics, in order."""
        chunks: list[Chunk] = []
        rows: list[list[Any]] = []
        in_flight: collections.deque[Any] = collections.deque()
        for i in range(iterations):
            memory.watch(self._timeline.watches(self._calls))
            for step in self._steps:
                step(memory)
            rows.append([memory.arrays[slot] for slot in self._made])
            last = i == iterations - 1 or stop()
            if len(rows) == ROWS or last:
                chunks.append((self._stack(rows), len(rows)))
                rows = []
            rebind(memory, self._carried)
            in_flight.append(self._timeline.latest())
            if len(in_flight) > _IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())
            if last:
                break
        return chunks

    def _leaves(self, memory: Memory) -> list[jax.Array]:
        leaves = [
            absent(shape) if leaf is None else committed(leaf, shape.sharding)
            for leaf, shape in zip(self._copies.take(memory), self.shapes, strict=True)
        ]
        self._copies.keep(memory, leaves)
        return leaves


def has_failed(array: Any) -> bool:
    """Whether what makes a `jax.Array` is over, and has raised: on the host, say. Never waits."""
    if not array.is_ready():
        return False
    try:
        array.block_until_ready()
    except jax.errors.JaxRuntimeError:
        return True
    return False
