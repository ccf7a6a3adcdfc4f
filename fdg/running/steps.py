"""The steps of a schedule as functions of a memory: what the host calls, one after the other.

A memory has a slot for each `Value` of the schedule. A filled slot holds an array, which may still have to be
computed, and the run of a program that makes it:

    actors: act                 memory[2] = act(memory[0], memory[1])
    actors -> learners: f32[8]  memory[3] = memory[2], copied to the learners' devices
    learners: learn             memory[4] = learn(memory[3]); memory[3] = None, for its memory was taken over
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fdg.lowering.programs import lower_call, value_shape
from fdg.placing.policy import Group
from fdg.placing.scheduling.schedule import Call, Move, Repeat, Step, Value
from fdg.running.exchange import Crossings, Exchange
from fdg.running.program import Program, is_here, spans_processes
from fdg.running.timeline import ProgramRun, Timeline
from fdg.running.transfers import Mover, Transfer

Entry: TypeAlias = tuple[jax.Array, ProgramRun | None]  # the run is None for an array from before
Memory: TypeAlias = list[Any]  # an `Entry` in each filled slot, None in the others
RunStep: TypeAlias = Callable[[Memory], None]

_ELSEWHERE: tuple[Any, Any] = (None, None)


class Interpreter:
    """Makes functions of steps. Arrays are in no part of it.

    Attributes:
      programs: of the steps made so far, in their order.
      crossings: the collectives from process to process.
      moved_bytes: by the steps when they ran.
    """

    def __init__(self, groups: Sequence[Group], meshes: Mapping[str, Mesh], timeline: Timeline):
        self.meshes = dict(meshes)
        self.programs: list[Program] = []
        self.crossings = Crossings()
        self.moved_bytes = 0
        self._groups = {group.name: group for group in groups}
        self._timeline = timeline
        self._slots: dict[Value, int] = {}

    def slot(self, value: Value) -> int:
        """Where a memory holds a value."""
        return self._slots.setdefault(value, len(self._slots))

    def slots(self, pairs: Iterable[tuple[Value, Value]]) -> list[tuple[int, int]]:
        """Where it holds both of each pair."""
        return [(self.slot(a), self.slot(b)) for a, b in pairs]

    def shape(self, value: Value) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of a value."""
        return value_shape(self.meshes[value.group], value)

    def memory(self) -> Memory:
        """An empty one, with slots for all values met so far."""
        return [None] * len(self._slots)

    def build(self, steps: Sequence[Step], times: int = 1) -> list[RunStep]:
        """Functions of steps that an iteration takes so many times."""
        built = []
        for step in steps:
            if isinstance(step, Call):
                built.append(self._call(step, times))
            elif isinstance(step, Move):
                built.append(self._move(step, times))
            else:
                built.append(self._repeat(step, times))
        return built

    def transfer(self, pairs: Sequence[tuple[Value, Value]], times: int) -> Transfer | None:
        """Moves values from one group to another, the first of each pair to the second.

        Copies within a process, a collective between processes; None in a process that has no part in it.
        """
        source, target = meshes = [self.meshes[value.group] for value in pairs[0]]
        layouts = [(a.laid_out, b.laid_out) for a, b in pairs]
        crosses = spans_processes(*meshes)
        transfer: Transfer = (
            Exchange(source, target, layouts, self.crossings) if crosses else Mover(source, target, layouts)
        )
        between = f"{pairs[0][0].group} -> {pairs[0][1].group}"
        for name, function, arguments in transfer.functions([self.shape(a) for a, _ in pairs]):
            where = tuple(transfer.mesh_of(name).devices.flat)
            program = Program(f"{name} {between}", (), where, times, function, (arguments,))
            program.exchanges = name == "exchange"
            self.programs.append(program)
            transfer.programs[name] = program
        return transfer if any(map(is_here, meshes)) else None

    def _call(self, call: Call, times: int) -> RunStep:
        mesh = self.meshes[call.group]
        function, arguments = lower_call(call, mesh, self._groups[call.group])
        program = Program(call.name, call.fragments, tuple(mesh.devices.flat), times, function, arguments)
        self.programs.append(program)
        inputs = [self.slot(value) for value in call.inputs]
        outputs = [self.slot(value) for value in call.outputs]
        freed = [inputs[i] for i in call.freed]
        timeline, crossings, group, spans = self._timeline, self.crossings, call.group, spans_processes(mesh)
        if not program.is_here:
            return _nothing

        def run(memory: Memory) -> None:
            if spans:
                crossings.wait()
            entries = [memory[i] for i in inputs]
            this = timeline.start(group, [made_by for _, made_by in entries])
            *results, done = program.compiled(*[array for array, _ in entries])
            for i in freed:
                memory[i] = None
            for i, result in zip(outputs, results, strict=True):
                memory[i] = result, this
            timeline.started(this, done)
            if spans:
                crossings.started([done])

        return run

    def _move(self, move: Move, times: int) -> RunStep:
        transfer = self.transfer(move.pairs, times)
        inputs = [self.slot(a) for a, _ in move.pairs]
        outputs = [self.slot(b) for _, b in move.pairs]
        freed = [inputs[i] for i in move.freed]
        if transfer is None:
            return _nothing

        def run(memory: Memory) -> None:
            entries = [memory[i] or _ELSEWHERE for i in inputs]
            arrays = transfer([array for array, _ in entries])
            for i in freed:
                memory[i] = None
            for i, array, (_, made_by) in zip(outputs, arrays, entries, strict=True):
                memory[i] = None if array is None else (array, made_by)
            self.moved_bytes += transfer.bytes

        return run

    def _copy(self, pairs: Sequence[tuple[Value, Value]], times: int) -> RunStep:
        """Copies of values within a group, for a loop that uses them up."""
        shapes = [self.shape(a) for a, _ in pairs]
        function = jax.jit(
            lambda arrays: [jnp.copy(x) for x in arrays], out_shardings=[shape.sharding for shape in shapes]
        )
        group = pairs[0][0].group
        where = tuple(self.meshes[group].devices.flat)
        program = Program(f"copy {group}", (), where, times, function, (shapes,))
        self.programs.append(program)
        slots = self.slots(pairs)
        if not program.is_here:
            return _nothing

        def run(memory: Memory) -> None:
            copies = program.compiled([memory[a][0] for a, _ in slots])
            for (a, b), copy in zip(slots, copies, strict=True):
                memory[b] = copy, memory[a][1]

        return run

    def _repeat(self, repeat: Repeat, times: int) -> RunStep:
        enter = self.slots(pair for i, pair in enumerate(repeat.enter) if i not in repeat.copied)
        copied = [repeat.enter[i] for i in sorted(repeat.copied)]
        by_group = [[pair for pair in copied if pair[0].group == group] for group in self.meshes]
        copies = [self._copy(pairs, times) for pairs in by_group if pairs]
        steps = self.build(repeat.steps, times * repeat.trips)
        carried, leave = self.slots(repeat.carry), self.slots(repeat.leave)
        ended = {a for a, _ in leave} | {b for _, b in carried}
        trips = repeat.trips

        def run(memory: Memory) -> None:
            for a, b in enter:
                memory[b] = memory[a]
            for copy in copies:
                copy(memory)
            for trip in range(trips):
                for step in steps:
                    step(memory)
                if trip < trips - 1:
                    rebind(memory, carried)
            results = [(b, memory[a]) for a, b in leave]
            for i in ended:
                memory[i] = None
            for b, entry in results:
                memory[b] = entry

        return run


def rebind(memory: Memory, slots: Sequence[tuple[int, int]]) -> None:
    """What the first slot of each pair holds is from now on in the second; all at once."""
    for b, entry in [(b, memory[a]) for a, b in slots]:
        memory[b] = entry


def _nothing(memory: Memory) -> None:
    """A step in which this process has no part."""
