"""Turns the steps of a schedule into functions that the host calls in order.

Each function reads and writes a `Memory`, which has a slot for each `Value` of the schedule. A filled slot
holds an array, possibly not computed yet, and in timed iterations the program run that computes it:

    actors: act                 memory[2] = act(memory[0], memory[1])
    actors -> learners: f32[8]  memory[3] = memory[2], copied to the learners' devices
    learners: learn             memory[4] = learn(memory[3]); memory[3] = None (donated)
"""

import collections
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from fdg.lowering.mesh import layout_sharding, mesh_of
from fdg.lowering.programs import lower_call, value_shape
from fdg.placing.layout import Layout
from fdg.placing.policy import Group
from fdg.placing.resharding import Change
from fdg.placing.scheduling.schedule import Call, Move, Repeat, Step, Value
from fdg.running.exchange import Crossings, Exchange
from fdg.running.lanes import CROSSING, Action, Lanes, holds_host
from fdg.running.program import Program, is_here, spans_processes
from fdg.running.timeline import ProgramRun, Timeline
from fdg.running.transfers import Mover, Transfer


class Resharder:
    """Reshards arrays between two meshes of the same devices: a `Transfer`.

    Arrays with the same shape and change share a program. If `donates`, each array is deleted as soon as its
    program is dispatched, so at most one array exists in both layouts. `layouts` are those of each array (at
    the source, at the target), and `changes` the same on the common device mesh.
    """

    def __init__(
        self,
        source: Mesh,
        target: Mesh,
        layouts: Sequence[tuple[Layout, Layout]],
        changes: Sequence[Change],
        donates: bool = False,
    ):
        self._changes, self._donates = list(changes), donates
        self._mesh = mesh_of(list(source.devices.flat), changes[0].mesh.axes)  # in the source's order
        self._ends = [layout_sharding(target, after) for _, after in layouts]
        self._names: list[str] = []
        self.programs: dict[str, Any] = {}  # the compiled programs of `functions`, by name
        self.bytes = 0  # bytes that all devices receive in total

    def functions(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[tuple[str, Mesh, Any, Any]]:
        """A program for each kind of array: (name, mesh, function, its argument)."""
        known: dict[Any, str] = {}
        found = []
        self._names = []
        for shape, change in zip(shapes, self._changes, strict=True):
            kind = shape.shape, shape.dtype, change.source, change.target
            if kind not in known:
                known[kind] = f"reshard {len(known)}"
                before, _ = shardings(change, self._mesh)
                argument = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=before)
                found.append((known[kind], self._mesh, resharding(change, self._mesh), argument))
            self._names.append(known[kind])
        self.bytes = sum(
            change.arriving(int(np.prod(shape.shape)) * shape.dtype.itemsize)
            for shape, change in zip(shapes, self._changes, strict=True)
        )
        return found

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Reshards the arrays to the target's layouts, asynchronously."""
        moved = []
        for array, change, name, end in zip(arrays, self._changes, self._names, self._ends, strict=True):
            before, _ = shardings(change, self._mesh)
            moved.append(_seen_as(self.programs[name].compiled(_seen_as(array, before)), end))
            if self._donates:
                array.delete()
        return moved


def _seen_as(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The same buffers with an equivalent sharding, without a copy."""
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def shardings(change: Change, mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """The shardings (before, after) on the common mesh."""
    return layout_sharding(mesh, change.source), layout_sharding(mesh, change.target)


def resharding(change: Change, mesh: Mesh) -> Any:
    """The program that reshards one array. It donates nothing: the result has another size per device."""
    _, after = shardings(change, mesh)
    return jax.jit(lambda x: x, out_shardings=after)


class Memory:
    """Slots for the values of a schedule."""

    __slots__ = ("arrays", "makers")

    def __init__(self, size: int):
        self.arrays: list[Any] = [None] * size  # the array of each slot; None if empty
        # the program run that computes each array (None if older); None in iterations that are not timed
        self.makers: list[ProgramRun | None] | None = None

    def watch(self, watched: bool) -> None:
        """Sets whether the following steps are timed."""
        if watched != (self.makers is not None):
            self.makers = [None] * len(self.arrays) if watched else None


RunStep: TypeAlias = Callable[[Memory], None]


class Interpreter:
    """Builds the functions of a schedule's steps. Holds no arrays."""

    def __init__(
        self,
        groups: Sequence[Group],
        meshes: Mapping[str, Mesh],
        timeline: Timeline,
        lanes: Lanes | None = None,
    ):
        self.meshes = dict(meshes)
        self.programs: list[Program] = []  # the programs of the steps built so far, in order
        self.crossings = Crossings()  # the order of collectives between processes
        self.lanes = lanes  # the threads that dispatch programs; None if the calling thread dispatches them
        self.moves: collections.Counter[Transfer] = collections.Counter()  # how often each transfer ran
        self._groups = {group.name: group for group in groups}
        self._timeline = timeline
        self._slots: dict[Value, int] = {}

    def slot(self, value: Value) -> int:
        """The slot of a value."""
        return self._slots.setdefault(value, len(self._slots))

    def slots(self, pairs: Iterable[tuple[Value, Value]]) -> list[tuple[int, int]]:
        """The slots of each pair of values."""
        return [(self.slot(a), self.slot(b)) for a, b in pairs]

    def shape(self, value: Value) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of a value."""
        return value_shape(self.meshes[value.group], value)

    @property
    def moved_bytes(self) -> int:
        """Bytes transferred so far."""
        return sum(transfer.bytes * count for transfer, count in self.moves.items())

    def memory(self) -> Memory:
        """An empty memory with slots for all values known so far."""
        return Memory(len(self._slots))

    def build(self, steps: Sequence[Step], times: int = 1) -> list[RunStep]:
        """Builds the functions of steps that run `times` times in an iteration."""
        built = []
        for step in steps:
            if isinstance(step, Call):
                built.append(self._call(step, times))
            elif isinstance(step, Move):
                built.append(self._move(step, times))
            else:
                built.append(self._repeat(step, times))
        return built

    def transfer(
        self,
        pairs: Sequence[tuple[Value, Value]],
        times: int,
        changes: Sequence[Change] = (),
        donates: bool = False,
    ) -> Transfer | None:
        """The transfer of values (source, target) from one group to another.

        Device-to-device copies within a process, a collective between processes, or if both groups are on the
        same devices the resharding in `changes`. None in a process that has no device of either group.
        """
        source, target = meshes = [self.meshes[value.group] for value in pairs[0]]
        layouts = [(a.laid_out, b.laid_out) for a, b in pairs]
        crosses = spans_processes(*meshes)
        transfer: Transfer
        if crosses:
            transfer = Exchange(source, target, layouts, self.crossings)
        elif changes:
            transfer = Resharder(source, target, layouts, changes, donates)
        else:
            transfer = Mover(source, target, layouts)
        between = f"{pairs[0][0].group} -> {pairs[0][1].group}"
        for name, mesh, function, argument in transfer.functions([self.shape(a) for a, _ in pairs]):
            program = self._program(f"{name} {between}", mesh, times, function, (argument,))
            program.exchanges = name == "exchange" or name.startswith("reshard")
            program.roams = name == "fetch"
            transfer.programs[name] = program
        return transfer if any(is_here(mesh.devices.flat) for mesh in meshes) else None

    def _program(
        self, name: str, mesh: Mesh, times: int, function: Any, arguments: Sequence[Any], fragments: Any = ()
    ) -> Program:
        where = tuple(mesh.devices.flat)
        program = Program(name, fragments, where, times, function, arguments, roams=mesh.size == 1)
        self.programs.append(program)
        return program

    def _call(self, call: Call, times: int) -> RunStep:
        mesh = self.meshes[call.group]
        function, arguments = lower_call(call, mesh, self._groups[call.group])
        program = self._program(call.name, mesh, times, function, arguments, call.fragments)
        inputs, outputs = (list(map(self.slot, values)) for values in (call.inputs, call.outputs))
        freed = [inputs[i] for i in call.freed]
        timeline, group, name = self._timeline, call.group, call.name
        if not program.is_here:
            return _no_step
        taken = _taker(inputs)
        start = self.on_lane(group, self._starter(program, call, mesh), len(outputs) + 1)

        def run(memory: Memory) -> None:
            arrays, makers = memory.arrays, memory.makers
            this = None if makers is None else timeline.start(group, [makers[i] for i in inputs], name)
            results = start(taken(arrays))
            for i in freed:
                arrays[i] = None
            for i, result in zip(outputs, results, strict=False):  # the last result is a token
                arrays[i] = result
            timeline.started(group, this, results[-1])
            if makers is not None:
                for i in outputs:
                    makers[i] = this

        return run

    def _starter(self, program: Program, call: Call, mesh: Mesh) -> Action:
        """Returns what dispatches a program; a lane waits for the end of a program that calls Python."""
        crossings, crosses = self.crossings, spans_processes(mesh)
        waits = not crosses and self.lanes is not None and holds_host(call, mesh)

        def start(arrays: Sequence[Any]) -> Sequence[Any]:
            if crosses:
                crossings.wait()
            results = program.compiled(*arrays)
            if crosses:
                crossings.started([results[-1]])
            if waits:
                jax.block_until_ready(results[-1])
            return results

        return start

    def on_lane(self, group: str, call: Action, count: int) -> Action:
        """The call, queued on the group's lane if there are lanes; it returns `count` arrays."""
        return call if self.lanes is None else self.lanes.deferred(group, call, count)

    def _move(self, move: Move, times: int) -> RunStep:
        transfer = self.transfer(move.pairs, times, move.changes, move.donates)
        if transfer is None:
            return _no_step
        count, moves = len(move.pairs), self.moves
        if isinstance(transfer, Exchange):  # between processes: they share one lane, in the schedule's order
            cut = self.on_lane(move.source, lambda arrays: [transfer.cut(arrays)], 1)
            exchange = self.on_lane(CROSSING, lambda parts: transfer.exchange(parts[0]), count)
            transferred: Action = lambda arrays: exchange(cut(arrays))  # noqa: E731
        else:
            transferred = self.on_lane(move.source, transfer, count)

        def counted(arrays: Sequence[Any]) -> Sequence[Any]:
            moves[transfer] += 1
            return transferred(arrays)

        return self._moved(counted, move.pairs, move.freed)

    def _moved(
        self, action: Action, pairs: Sequence[tuple[Value, Value]], freed: Iterable[int] = ()
    ) -> RunStep:
        """A step that fills the second slot of each pair by an action on the first ones."""
        inputs, outputs = zip(*self.slots(pairs), strict=True)
        taken, emptied = _taker(inputs), [inputs[i] for i in freed]

        def run(memory: Memory) -> None:
            arrays, makers = memory.arrays, memory.makers
            moved = action(taken(arrays))
            for i in emptied:
                arrays[i] = None
            for i, array in zip(outputs, moved, strict=True):
                arrays[i] = array
            if makers is not None:
                for a, b in zip(inputs, outputs, strict=True):
                    makers[b] = makers[a]

        return run

    def _copy(self, pairs: Sequence[tuple[Value, Value]], times: int) -> RunStep:
        """Copies values within a group before a loop that donates them."""
        shapes = [self.shape(a) for a, _ in pairs]
        group = pairs[0][0].group
        mesh = self.meshes[group]
        shardings = None if mesh.size == 1 else [shape.sharding for shape in shapes]
        function = jax.jit(lambda arrays: [jnp.copy(x) for x in arrays], out_shardings=shardings)
        program = self._program(f"copy {group}", mesh, times, function, (shapes,))
        if not program.is_here:
            return _no_step
        return self._moved(self.on_lane(group, program, len(pairs)), pairs)

    def _repeat(self, repeat: Repeat, times: int) -> RunStep:
        starts = (pair for i, pair in enumerate(repeat.enter) if i not in repeat.copied)
        enter = self.slots((a, b) for a, b in starts if a is not b)
        copied = [repeat.enter[i] for i in sorted(repeat.copied)]
        by_group = [[pair for pair in copied if pair[0].group == group] for group in self.meshes]
        copies = [self._copy(pairs, times) for pairs in by_group if pairs]
        steps = self.build(repeat.steps, times * repeat.trips)
        carried, leave = self.slots(repeat.carry), self.slots(repeat.leave)
        ended = {a for a, _ in leave} | {b for _, b in carried}
        trips = repeat.trips

        def run(memory: Memory) -> None:
            rebind(memory, enter)
            for copy in copies:
                copy(memory)
            for trip in range(trips):
                for step in steps:
                    step(memory)
                if trip < trips - 1:
                    rebind(memory, carried)
            rebind(memory, leave, ended)

        return run


def rebind(memory: Memory, slots: Sequence[tuple[int, int]], ended: Iterable[int] = ()) -> None:
    """Moves the contents of the first slot of each pair to the second, all at once.

    Empties slots `ended`, unless they are the second of a pair.
    """
    for held in (memory.arrays, memory.makers):
        if held is None:
            continue
        entries = [held[a] for a, _ in slots]
        for i in ended:
            held[i] = None
        for (_, b), entry in zip(slots, entries, strict=True):
            held[b] = entry


def _taker(slots: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that reads these slots."""
    if len(slots) > 1:
        return operator.itemgetter(*slots)  # in C
    return lambda held: [held[i] for i in slots]


def _no_step(memory: Memory) -> None:
    """A step without work for this process."""
