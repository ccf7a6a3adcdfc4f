"""Turns the steps of a schedule into functions that the host calls in order.

Each function reads and writes a `Memory`, which has a slot for each `Value` of the schedule. A filled slot
holds an array, possibly not computed yet, and in timed iterations the run that computes it. For example:

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
from jax.sharding import Mesh, NamedSharding

from fdg import jaxprs
from fdg.lowering.mesh import layout_sharding, mesh_of
from fdg.lowering.programs import lower_call, value_shape
from fdg.placing.layout import Layout
from fdg.placing.policy import Group
from fdg.placing.resharding import Change
from fdg.placing.scheduling.schedule import Call, Move, Repeat, Step, Value, all_steps, uses
from fdg.processes import distributed
from fdg.running.exchange import Exchange, ProcessCollectives
from fdg.running.lanes import COLLECTIVE_LANE, Action, Lanes, may_block_host
from fdg.running.program import Program, is_here, spans_processes
from fdg.running.timeline import ProgramRun, Timeline
from fdg.running.transfers import Mover, Transfer


class Resharder(Transfer):
    """Reshards arrays between two meshes of the same devices.

    `changes` has the layouts of each array, before and after, on one mesh that both groups share. Arrays with
    the same shape and change share a program. With `donates`, each array is deleted as soon as its program is
    dispatched, so at most one array exists in both layouts.
    """

    def __init__(
        self,
        source: Mesh,
        target: Mesh,
        layouts: Sequence[tuple[Layout, Layout]],
        changes: Sequence[Change],
        donates: bool,
    ):
        super().__init__(source, target, layouts)
        self._changes, self._donates = list(changes), donates
        self._mesh = mesh_of(list(source.devices.flat), changes[0].mesh.axes)  # in the source's order
        self._target_shardings = [layout_sharding(target, after) for _, after in layouts]
        self._names: list[str] = []  # the name of each array's program

    def functions(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[tuple[str, Mesh, Any, Any]]:
        """Name, mesh, function and argument of each program: one for each shape, dtype and change."""
        names: dict[Any, str] = {}
        programs = []
        self.bytes = 0
        for shape, change in zip(shapes, self._changes, strict=True):
            signature = shape.shape, shape.dtype, change.source, change.target
            if signature not in names:
                names[signature] = f"reshard {len(names)}"
                source_sharding, _ = shardings(change, self._mesh)
                argument = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=source_sharding)
                programs.append((names[signature], self._mesh, resharding(change, self._mesh), argument))
            self._names.append(names[signature])
            self.bytes += change.arriving(jaxprs.bytes_of(shape))
        return programs

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Reshards the arrays to the target's layouts, asynchronously."""
        results = []
        for array, change, name, target_sharding in zip(
            arrays, self._changes, self._names, self._target_shardings, strict=True
        ):
            source_sharding, _ = shardings(change, self._mesh)
            resharded = self.programs[name].compiled(_with_sharding(array, source_sharding))
            results.append(_with_sharding(resharded, target_sharding))
            if self._donates:
                array.delete()
        return results


def _with_sharding(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The same buffers with an equivalent sharding, without a copy."""
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def shardings(change: Change, mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """The shardings (before, after) on the common mesh."""
    return layout_sharding(mesh, change.source), layout_sharding(mesh, change.target)


def resharding(change: Change, mesh: Mesh) -> Any:
    """The program that reshards one array. It donates nothing, since the array's size per device changes."""
    _, after = shardings(change, mesh)
    return jax.jit(lambda x: x, out_shardings=after)


class Memory:
    """Slots for the values of a schedule."""

    __slots__ = ("arrays", "producers")

    def __init__(self, size: int):
        self.arrays: list[Any] = [None] * size  # the array of each slot; None if empty
        # For each slot, the program run that computes its array (None if that run was not timed). The list
        # itself is None in untimed iterations.
        self.producers: list[ProgramRun | None] | None = None

    def set_timed(self, is_timed: bool) -> None:
        """Sets whether the following steps are timed."""
        if is_timed != (self.producers is not None):
            self.producers = [None] * len(self.arrays) if is_timed else None


RunStep: TypeAlias = Callable[[Memory], None]  # runs one step of the schedule


class StepBuilder:
    """Builds the functions of a schedule's steps. Holds no arrays."""

    def __init__(
        self,
        groups: Sequence[Group],
        meshes: Mapping[str, Mesh],
        timeline: Timeline,
        lanes: Lanes | None,
    ):
        self.meshes = dict(meshes)
        self.programs: list[Program] = []  # the programs of the steps built so far, in order
        self.collectives = ProcessCollectives()  # the order of collectives between processes
        self.lanes = lanes  # the threads that dispatch programs; None if the calling thread dispatches them
        self._exchanges: list[Exchange] = []  # of the steps, in order
        self.num_runs: collections.Counter[Transfer] = collections.Counter()  # runs of each transfer
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
        return sum(transfer.bytes * count for transfer, count in self.num_runs.items())

    def connect(self) -> None:
        """Runs each exchange between processes once, with zeros. All processes must call it.

        XLA's collectives on CPUs connect the devices when they run first, and fail if a process is 30 s late.
        In an iteration it may be later, since another process may act in slow environments before.
        """
        distributed.exchange(None)
        for exchange in self._exchanges:
            exchange.connect()
        self.collectives.wait()

    def memory(self) -> Memory:
        """An empty memory with slots for all values that have a slot so far."""
        return Memory(len(self._slots))

    def build(
        self, steps: Sequence[Step], carry: Sequence[tuple[Value, Value]], times: int = 1
    ) -> list[RunStep]:
        """Builds the functions of steps that run `times` times in an iteration.

        `carry` has the values that the steps pass on to their next run, as in `Repeat`. A step without work
        for this process has no function.
        """
        run_steps: list[RunStep | None] = []
        for i, step in enumerate(steps):
            if isinstance(step, Call):
                run_steps.append(self._call_step(step, times))
            elif isinstance(step, Move):
                may_fetch = _is_read_next(step, [*steps[i + 1 :], *steps[:i]], carry)
                run_steps.append(self._move_step(step, times, may_fetch))
            else:
                run_steps.append(self._repeat_step(step, times))
        return [run for run in run_steps if run is not None]

    def transfer(
        self,
        pairs: Sequence[tuple[Value, Value]],
        times: int,
        changes: Sequence[Change] = (),
        donates: bool = False,
        may_fetch: bool = True,
    ) -> Transfer | None:
        """Builds the transfer of values from one group to another; `pairs` are (source, target) values.

        It uses device-to-device copies within a process, a collective between processes, or, if both groups
        are on the same devices, the resharding in `changes`. `donates` is as in `Move`, `times` as in
        `build`, and `may_fetch` as in `Mover`. Returns None in a process without devices of the groups.
        """
        source, target = meshes = [self.meshes[value.group] for value in pairs[0]]
        layouts = [(a.laid_out, b.laid_out) for a, b in pairs]
        transfer: Transfer
        if spans_processes(source, target):
            transfer = Exchange(source, target, layouts, self.collectives)
        elif changes:
            transfer = Resharder(source, target, layouts, changes, donates)
        else:
            transfer = Mover(source, target, layouts, may_fetch)
        direction = f"{pairs[0][0].group} -> {pairs[0][1].group}"
        for name, mesh, function, argument in transfer.functions([self.shape(a) for a, _ in pairs]):
            program = self._program(f"{name} {direction}", mesh, times, function, (argument,))
            program.exchanges = name == "exchange" or name.startswith("reshard")
            program.roams = name == "fetch"
            transfer.programs[name] = program
        return transfer if any(is_here(mesh.devices.flat) for mesh in meshes) else None

    def _program(
        self, name: str, mesh: Mesh, times: int, function: Any, arguments: Sequence[Any], fragments: Any = ()
    ) -> Program:
        """Adds a program, which runs `times` times in an iteration, to `programs`."""
        devices = tuple(mesh.devices.flat)
        program = Program(name, fragments, devices, times, function, arguments, roams=mesh.size == 1)
        self.programs.append(program)
        return program

    def _call_step(self, call: Call, times: int) -> RunStep | None:
        """A step that runs a program; None in a process without devices of its group."""
        mesh = self.meshes[call.group]
        function, arguments = lower_call(call, mesh, self._groups[call.group])
        program = self._program(call.name, mesh, times, function, arguments, call.fragments)
        inputs, outputs = (list(map(self.slot, values)) for values in (call.inputs, call.outputs))
        if not program.is_here:
            return None
        freed_slots = [inputs[i] for i in call.freed]
        timeline, group, name = self._timeline, call.group, call.name
        read_inputs = _slot_reader(inputs)
        dispatch = self.on_lane(group, self._dispatcher(program, call, mesh), len(outputs) + 1)

        def run(memory: Memory) -> None:
            arrays, producers = memory.arrays, memory.producers
            program_run = (
                None if producers is None else timeline.start(group, [producers[i] for i in inputs], name)
            )
            results = dispatch(read_inputs(arrays))
            for i in freed_slots:
                arrays[i] = None
            for i, result in zip(outputs, results, strict=False):  # the last result, a token, has no slot
                arrays[i] = result
            timeline.register(group, program_run, results[-1])
            if producers is not None:
                for i in outputs:
                    producers[i] = program_run

        return run

    def _dispatcher(self, program: Program, call: Call, mesh: Mesh) -> Action:
        """The function that dispatches a program.

        On a lane, the function also waits for the program to finish, if the program calls Python.
        """
        collectives, is_collective = self.collectives, spans_processes(mesh)
        waits = not is_collective and self.lanes is not None and may_block_host(call, mesh)

        def dispatch(arrays: Sequence[Any]) -> Sequence[Any]:
            if is_collective:
                collectives.wait()
            results = program.compiled(*arrays)
            if is_collective:
                collectives.register([results[-1]])
            if waits:
                jax.block_until_ready(results[-1])
            return results

        return dispatch

    def on_lane(self, group: str, call: Action, count: int) -> Action:
        """Wraps `call`, which returns `count` arrays, so that it is queued on the group's lane, if any."""
        return call if self.lanes is None else self.lanes.defer(group, call, count)

    def _move_step(self, move: Move, times: int, may_fetch: bool) -> RunStep | None:
        """A step that transfers values between groups; None in a process without their devices."""
        transfer = self.transfer(move.pairs, times, move.changes, move.donates, may_fetch)
        if transfer is None:
            return None
        count, num_runs = len(move.pairs), self.num_runs
        if isinstance(transfer, Exchange):  # all exchanges share one lane, in the schedule's order
            self._exchanges.append(transfer)
            cut = self.on_lane(move.source, lambda arrays: [transfer.cut(arrays)], 1)
            exchange = self.on_lane(COLLECTIVE_LANE, lambda parts: transfer.exchange(parts[0]), count)
            transfer_arrays: Action = lambda arrays: exchange(cut(arrays))  # noqa: E731
        else:
            transfer_arrays = self.on_lane(move.source, transfer, count)

        def count_and_transfer(arrays: Sequence[Any]) -> Sequence[Any]:
            num_runs[transfer] += 1
            return transfer_arrays(arrays)

        return self._action_step(count_and_transfer, move.pairs, move.freed)

    def _action_step(
        self, action: Action, pairs: Sequence[tuple[Value, Value]], freed: Iterable[int] = ()
    ) -> RunStep:
        """A step that applies `action` to the arrays in the pairs' first slots and fills the second slots."""
        inputs, outputs = zip(*self.slots(pairs), strict=True)
        read_inputs, freed_slots = _slot_reader(inputs), [inputs[i] for i in freed]

        def run(memory: Memory) -> None:
            arrays, producers = memory.arrays, memory.producers
            results = action(read_inputs(arrays))
            for i in freed_slots:
                arrays[i] = None
            for i, array in zip(outputs, results, strict=True):
                arrays[i] = array
            if producers is not None:
                for a, b in zip(inputs, outputs, strict=True):
                    producers[b] = producers[a]

        return run

    def _copy_step(self, pairs: Sequence[tuple[Value, Value]], times: int) -> RunStep | None:
        """A step that copies values within a group before a loop donates them; None as in `_call_step`."""
        shapes = [self.shape(a) for a, _ in pairs]
        group = pairs[0][0].group
        mesh = self.meshes[group]
        shardings = None if mesh.size == 1 else [shape.sharding for shape in shapes]
        function = jax.jit(lambda arrays: [jnp.copy(x) for x in arrays], out_shardings=shardings)
        program = self._program(f"copy {group}", mesh, times, function, (shapes,))
        if not program.is_here:
            return None
        return self._action_step(self.on_lane(group, program, len(pairs)), pairs)

    def _repeat_step(self, repeat: Repeat, times: int) -> RunStep:
        """A step that runs the steps of a loop for all its trips."""
        moved_pairs = (pair for i, pair in enumerate(repeat.enter) if i not in repeat.copied)
        entry_slots = self.slots((a, b) for a, b in moved_pairs if a is not b)
        copied_pairs = [repeat.enter[i] for i in sorted(repeat.copied)]
        by_group = [[pair for pair in copied_pairs if pair[0].group == group] for group in self.meshes]
        copies = [copy for pairs in by_group if pairs and (copy := self._copy_step(pairs, times))]
        steps = self.build(repeat.steps, repeat.carry, times * repeat.trips)
        carried_slots, exit_slots = self.slots(repeat.carry), self.slots(repeat.leave)
        dead_slots = {a for a, _ in exit_slots} | {b for _, b in carried_slots}
        trips = repeat.trips

        def run(memory: Memory) -> None:
            move_slots(memory, entry_slots)
            for copy in copies:
                copy(memory)
            for trip in range(trips):
                for step in steps:
                    step(memory)
                if trip < trips - 1:
                    move_slots(memory, carried_slots)
            move_slots(memory, exit_slots, dead_slots)

        return run


def _is_read_next(move: Move, following: Sequence[Step], carry: Sequence[tuple[Value, Value]]) -> bool:
    """Whether the target's next program or loop reads a moved value.

    `following` are the steps after the move, then those before it, which run next with the values of `carry`.
    """
    moved = {b for _, b in move.pairs}
    moved |= {start for end, start in carry if end in moved}
    for step in following:
        if any(isinstance(part, Call) and part.group == move.target for part, _ in all_steps([step])):
            return not moved.isdisjoint(uses(step))
    return True


def move_slots(memory: Memory, slots: Sequence[tuple[int, int]], dead_slots: Iterable[int] = ()) -> None:
    """Moves the content of each pair's first slot to its second slot; all moves happen at once.

    Also empties those `dead_slots` that are not the second slot of a pair.
    """
    for contents in (memory.arrays, memory.producers):
        if contents is None:
            continue
        entries = [contents[a] for a, _ in slots]
        for i in dead_slots:
            contents[i] = None
        for (_, b), entry in zip(slots, entries, strict=True):
            contents[b] = entry


def _slot_reader(slots: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """Returns a function that reads these slots."""
    if len(slots) > 1:
        return operator.itemgetter(*slots)  # runs in C
    return lambda contents: [contents[i] for i in slots]
