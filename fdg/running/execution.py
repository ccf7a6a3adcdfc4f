"""Running a plan: the whole loop as one program, or a schedule of several programs stepped from the host."""

import collections
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fdg.lowering import programs as lowering
from fdg.lowering.mesh import batch_sharding, group_mesh
from fdg.placing.plan import Plan
from fdg.placing.schedule import Call, Move, Repeat, Step, Value
from fdg.processes.arrays import absent, put, share
from fdg.running.exchange import Crossings, Exchange
from fdg.running.hlo import Collective, read_collectives
from fdg.running.timeline import Timeline
from fdg.running.transfers import Mover, Transfer
from fdg.tracing.graph import FDG

_IN_FLIGHT = 3  # iterations that the host may be ahead of the devices


@dataclasses.dataclass(eq=False)
class Program:
    """One XLA program of an engine.

    Attributes:
      fragments: the names of the fragments in it.
      devices: what it runs on.
      calls_per_iteration: how often it runs in one training iteration.
      function: the jitted function.
      arguments: what it takes, as `jax.ShapeDtypeStruct` with shardings.
      exchanges: whether it is a transfer between processes, which is a collective itself.
    """

    name: str
    fragments: tuple[str, ...]
    devices: tuple[jax.Device, ...]
    calls_per_iteration: int
    function: Any = dataclasses.field(repr=False)
    arguments: Sequence[Any] = dataclasses.field(repr=False)
    exchanges: bool = False
    compiled: Any = dataclasses.field(default=None, repr=False)
    iterations: int = 1  # in the loop over iterations of what was compiled

    @property
    def is_here(self) -> bool:
        """Whether this process has one of its devices."""
        return any(d.process_index == jax.process_index() for d in self.devices)

    def compile(self) -> jax.stages.Compiled:
        """Compiles it, unless that was done already."""
        if self.compiled is None:
            self.compiled = self.function.lower(*self.arguments).compile()
        return self.compiled

    def hlo(self) -> str:
        """The optimised HLO as text; of a whole training loop, for the number of iterations last compiled."""
        return self.compile().as_text() or ""

    def collectives(self) -> tuple[Collective, ...]:
        """What the devices of this program exchange each time that it runs, read from its HLO."""
        found = read_collectives(self.hlo())
        return tuple(dataclasses.replace(c, calls=-(-c.calls // self.iterations)) for c in found)

    def cost(self) -> dict[str, float]:
        """What XLA says of one device's share, 0 where it says nothing.

        `flops` and `bytes_accessed` count each loop's body once; of memory: `argument_bytes`,
        `output_bytes`, `temporary_bytes`, `code_bytes`.
        """
        compiled = self.compile()
        analysis = compiled.cost_analysis() or {}
        analysis = analysis[0] if isinstance(analysis, list) else analysis
        memory = compiled.memory_analysis()
        return {
            "flops": float(analysis.get("flops", 0)),
            "bytes_accessed": float(analysis.get("bytes accessed", 0)),
            "argument_bytes": float(getattr(memory, "argument_size_in_bytes", 0)),
            "output_bytes": float(getattr(memory, "output_size_in_bytes", 0)),
            "temporary_bytes": float(getattr(memory, "temp_size_in_bytes", 0)),
            "code_bytes": float(getattr(memory, "generated_code_size_in_bytes", 0)),
        }


class Whole:
    """A training loop that is one program, compiled once for each number of iterations.

    Attributes:
      shapes: of the state's leaves, with shardings.
    """

    timeline: Timeline | None = None

    def __init__(self, graph: FDG, plan: Plan, devices: Sequence[jax.Device]):
        lower = lowering.lower_shared if plan.num_seeds is None else lowering.lower_seeds
        self._loop = lower(graph, plan, devices)
        lead = () if plan.num_seeds is None else (plan.num_seeds,)
        self.shapes = [
            jax.ShapeDtypeStruct(lead + leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(jax.tree.leaves(graph.state), self._loop.shardings, strict=True)
        ]
        used = tuple(devices[i] for i in plan.groups[0].devices)
        fragments = tuple(f.name for f in graph.fragments)
        program = Program("train", fragments, used, 1, self._jitted(1), (self.shapes,))
        self.programs = (program,)
        self._compiled: dict[int, jax.stages.Compiled] = {}

    def _jitted(self, iterations: int) -> Any:
        def train(leaves):
            return self._loop.run(leaves, iterations=iterations)

        shardings = self._loop.shardings, self._loop.metrics_sharding
        return jax.jit(train, donate_argnums=0, out_shardings=shardings)

    def compile(self, iterations: int) -> None:
        """Compiles all that `run(_, iterations)` needs."""
        if iterations not in self._compiled:
            compiled = self._jitted(iterations).lower(self.shapes).compile()
            self._compiled[iterations] = self.programs[0].compiled = compiled
            self.programs[0].iterations = iterations

    def run(self, leaves: list[jax.Array], iterations: int) -> tuple[list[jax.Array], list[jax.Array]]:
        """The state's leaves after some iterations, and the metrics, stacked over them."""
        return self._compiled[iterations](leaves)


class Stepped:
    """A schedule of several programs: the host starts them one after the other and waits for none.

    Each group's devices work through what they were given in order; groups overlap where the data allow.

    Attributes:
      shapes: of the state's leaves, with shardings.
      moved_bytes: bytes that were moved between groups since the engine was made.
      timeline: how long each group was busy.
    """

    def __init__(self, graph: FDG, plan: Plan, devices: Sequence[jax.Device]):
        assert plan.schedule is not None
        self._schedule = schedule = plan.schedule
        self._groups = {group.name: group for group in plan.groups}
        self._meshes = {group.name: group_mesh(group, devices) for group in plan.groups}
        self.moved_bytes = 0
        self.timeline = Timeline([group.name for group in plan.groups])
        weakref.finalize(self, self.timeline.close)
        self._slots: dict[Value, int] = {}
        self._programs: list[Program] = []
        self._crossings = Crossings()
        self._steps = self._build(schedule.steps, 1)
        self._again = self._rebind(schedule.again)
        self._metrics = [self._slot(value) for value in schedule.metrics]
        self._metric_stacks: dict[int, list[tuple[list[int], Any]]] = {}
        self._leaves = [[self._slot(value) for value in places] for places in schedule.leaves]
        self.shapes = [self._shape(places[0]) for places in schedule.leaves]
        self._place_constants = [
            (self._slot(value), plan.constants[i], self._shape(value)) for i, value in schedule.constants
        ]
        self._copiers = self._build_copiers()
        self._constants: list[tuple[int, jax.Array]] | None = None
        self.programs = tuple(self._programs)
        # The state that was returned last, and further groups' copies of it: (slot, array).
        self._copies: tuple[list[jax.Array], list[tuple[int, jax.Array]]] | None = None
        self._is_compiled = False

    # --- building ---

    def _slot(self, value: Value) -> int:
        return self._slots.setdefault(value, len(self._slots))

    def _shape(self, value: Value) -> jax.ShapeDtypeStruct:
        return lowering.value_shape(self._meshes[value.group], value)

    def _rebind(self, pairs: Iterable[tuple[Value, Value]]) -> list[tuple[int, int]]:
        return [(self._slot(a), self._slot(b)) for a, b in pairs]

    def _build(self, steps: Sequence[Step], times: int) -> list[Callable[[list], None]]:
        built = []
        for step in steps:
            if isinstance(step, Call):
                built.append(self._build_call(step, times))
            elif isinstance(step, Move):
                built.append(self._build_move(step, times))
            else:
                built.append(self._build_repeat(step, times))
        return built

    def _build_call(self, call: Call, times: int) -> Callable[[list], None]:
        mesh = self._meshes[call.group]
        function, arguments = lowering.lower_call(call, mesh, self._groups[call.group])
        program = Program(call.name, call.fragments, tuple(mesh.devices.flat), times, function, arguments)
        self._programs.append(program)
        inputs = [self._slot(value) for value in call.inputs]
        outputs = [self._slot(value) for value in call.outputs]
        freed = [inputs[i] for i in call.freed]
        timeline, group = self.timeline, call.group
        spans = _spans_processes(mesh)
        if not program.is_here:
            return _nothing

        def run(memory: list) -> None:
            if spans:
                self._crossings.wait()
            entries = [memory[i] for i in inputs]
            this = timeline.start(group, [made_by for _, made_by in entries])
            *results, done = program.compiled(*[array for array, _ in entries])
            for i in freed:
                memory[i] = None
            for i, result in zip(outputs, results, strict=True):
                memory[i] = result, this
            timeline.started(this, done)
            if spans:
                self._crossings.started([done])

        return run

    def _build_move(self, move: Move, times: int) -> Callable[[list], None]:
        mover = self._build_mover(move.source, move.target, move.pairs, times)
        inputs = [self._slot(a) for a, _ in move.pairs]
        outputs = [self._slot(b) for _, b in move.pairs]
        freed = [inputs[i] for i in move.freed]
        if mover is None:
            return _nothing

        def run(memory: list) -> None:
            entries = [memory[i] or _ELSEWHERE for i in inputs]
            arrays: list[Any] = mover([array for array, _ in entries])
            for i in freed:
                memory[i] = None
            for i, array, (_, made_by) in zip(outputs, arrays, entries, strict=True):
                memory[i] = None if array is None else (array, made_by)
            self.moved_bytes += mover.bytes

        return run

    def _build_mover(
        self, source: str, target: str, pairs: Sequence[tuple[Value, Value]], times: int
    ) -> Transfer | None:
        """Moves values from group to group; None in a process that has no part in it."""
        meshes = self._meshes[source], self._meshes[target]
        crosses = len({d.process_index for mesh in meshes for d in mesh.devices.flat}) > 1
        layouts = [(a.laid_out, b.laid_out) for a, b in pairs]
        mover: Transfer = Exchange(*meshes, layouts, self._crossings) if crosses else Mover(*meshes, layouts)
        for name, function, arguments in mover.functions([self._shape(a) for a, _ in pairs]):
            where = tuple(mover.mesh_of(name).devices.flat)
            program = Program(f"{name} {source} -> {target}", (), where, times, function, (arguments,))
            program.exchanges = name == "exchange"
            self._programs.append(program)
            mover.programs[name] = program
        return mover if any(_is_here(mesh) for mesh in meshes) else None

    def _build_copiers(self) -> list[tuple[list[int], list[int], Any]]:
        """For leaves that several groups keep: their positions, slots of the copies, and what copies them."""
        together: dict[tuple[str, str], list[tuple[int, Value, Value]]] = collections.defaultdict(list)
        for i, (first, *others) in enumerate(self._schedule.leaves):
            for value in others:
                together[first.group, value.group].append((i, first, value))
        copiers = []
        for (source, target), rows in together.items():
            mover = self._build_mover(source, target, [(a, b) for _, a, b in rows], 0)
            copiers.append(([i for i, *_ in rows], [self._slot(b) for *_, b in rows], mover))
        return copiers

    def _build_copy(
        self, group: str, pairs: Sequence[tuple[Value, Value]], times: int
    ) -> Callable[[list], None]:
        """Copies of values within a group, for a loop that uses them up."""
        shapes = [self._shape(a) for a, _ in pairs]
        function = jax.jit(
            lambda arrays: [jnp.copy(x) for x in arrays], out_shardings=[shape.sharding for shape in shapes]
        )
        where = tuple(self._meshes[group].devices.flat)
        program = Program(f"copy {group}", (), where, times, function, (shapes,))
        if not pairs or not program.is_here:
            return _nothing
        self._programs.append(program)
        slots = self._rebind(pairs)

        def run(memory: list) -> None:
            copies = program.compiled([memory[a][0] for a, _ in slots])
            for (a, b), copy in zip(slots, copies, strict=True):
                memory[b] = copy, memory[a][1]

        return run

    def _build_repeat(self, repeat: Repeat, times: int) -> Callable[[list], None]:
        enter = self._rebind(pair for i, pair in enumerate(repeat.enter) if i not in repeat.copied)
        copied = [repeat.enter[i] for i in sorted(repeat.copied)]
        copies = [
            self._build_copy(group, [p for p in copied if p[0].group == group], times)
            for group in self._meshes
        ]
        steps = self._build(repeat.steps, times * repeat.trips)
        again, leave = self._rebind(repeat.again), self._rebind(repeat.leave)
        targets = {b for _, b in again}
        trips = repeat.trips

        def run(memory: list) -> None:
            for a, b in enter:
                memory[b] = memory[a]
            for copy in copies:
                copy(memory)
            for trip in range(trips):
                for step in steps:
                    step(memory)
                if trip < trips - 1:
                    for b, value in [(b, memory[a]) for a, b in again]:
                        memory[b] = value
            results = [(b, memory[a]) for a, b in leave]
            for a, _ in leave:
                memory[a] = None
            for i in targets:
                memory[i] = None
            for b, value in results:
                memory[b] = value

        return run

    # --- running ---

    def compile(self, iterations: int) -> None:
        """Compiles all that `run(_, iterations)` needs: the programs once, whatever the number."""
        if not self._is_compiled:
            here = [program for program in self._programs if program.is_here]
            lowered = [program.function.lower(*program.arguments) for program in here]
            with ThreadPoolExecutor() as pool:
                for program, compiled in zip(here, pool.map(lambda one: one.compile(), lowered), strict=True):
                    program.compiled = compiled
            self._constants = [(slot, put(value, shape)) for slot, value, shape in self._place_constants]
            self._is_compiled = True
        if iterations not in self._metric_stacks:
            self._metric_stacks[iterations] = self._compile_stacks(iterations)

    def _compile_stacks(self, iterations: int) -> list[tuple[list[int], Any]]:
        """For each group, the metrics that it makes, and what stacks their rows (None elsewhere)."""
        by_group: dict[str, list[int]] = collections.defaultdict(list)
        for i, value in enumerate(self._schedule.metrics):
            by_group[value.group].append(i)
        stacks: list[tuple[list[int], Any]] = []
        for group, positions in by_group.items():
            mesh = self._meshes[group]
            shapes = [self._shape(self._schedule.metrics[i]) for i in positions]
            stacks.append((positions, _Stack(shapes, mesh, iterations) if _is_here(mesh) else None))
        return stacks

    def run(self, leaves: list[jax.Array], iterations: int) -> tuple[list[jax.Array], list[jax.Array]]:
        """The state's leaves after some iterations, and the metrics, stacked over them."""
        memory = self._fill(leaves)
        rows: list[list[Any]] = [[] for _ in self._metrics]
        in_flight: collections.deque[Any] = collections.deque()
        self.timeline.begin()
        for _ in range(iterations):
            for step in self._steps:
                step(memory)
            for row, slot in zip(rows, self._metrics, strict=True):
                row.append((memory[slot] or _ELSEWHERE)[0])
            for b, entry in [(b, memory[a]) for a, b in self._again]:
                memory[b] = entry
            in_flight.append(self.timeline.latest())
            if len(in_flight) > _IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())
        metrics: list[Any] = [None] * len(self._metrics)
        for positions, stack in self._metric_stacks[iterations]:
            stacked = [None] * len(positions) if stack is None else stack([rows[i] for i in positions])
            for i, metric in zip(positions, stacked, strict=True):
                metrics[i] = metric
        self._crossings.wait()
        if jax.process_count() > 1:
            shapes = [
                jax.ShapeDtypeStruct((iterations, *value.shape), value.dtype)
                for value in self._schedule.metrics
            ]
            owners = [
                self._meshes[value.group].devices.flat[0].process_index for value in self._schedule.metrics
            ]
            metrics = share(metrics, shapes, owners)
        return self._take_leaves(memory), metrics

    def _fill(self, leaves: Sequence[jax.Array]) -> list[Any]:
        """Memory in which each slot holds an array and the run that makes it (None for one from before)."""
        memory: list[Any] = [None] * len(self._slots)
        for slot, value in self._constants or ():
            memory[slot] = value, None
        for leaf, slots in zip(leaves, self._leaves, strict=True):
            memory[slots[0]] = leaf, None
        kept, self._copies = self._copies, None
        if kept is not None and all(leaf is known for leaf, known in zip(leaves, kept[0], strict=True)):
            for slot, array in kept[1]:
                memory[slot] = array, None
            return memory
        for positions, slots, copy in self._copiers:
            if copy is not None:
                for slot, array in zip(slots, copy([leaves[i] for i in positions]), strict=True):
                    memory[slot] = None if array is None else (array, None)
        return memory

    def _take_leaves(self, memory: Sequence[Any]) -> list[jax.Array]:
        """The state of record; copies on further groups are kept in case the state comes back."""
        leaves = [
            absent(shape) if memory[slots[0]] is None else memory[slots[0]][0]
            for slots, shape in zip(self._leaves, self.shapes, strict=True)
        ]
        copies = [
            (slot, memory[slot][0])
            for slots in self._leaves
            for slot in slots[1:]
            if memory[slot] is not None
        ]
        self._copies = leaves, copies
        return leaves


class _Stack:
    """Stacks rows of metrics, of which there may be thousands: a few dozen at a time, then all together."""

    ROWS = 64

    def __init__(self, shapes: Sequence[jax.ShapeDtypeStruct], mesh: Mesh, count: int):
        where = batch_sharding(mesh, None)
        self._sizes = [min(self.ROWS, count - i) for i in range(0, count, self.ROWS)]
        stack = jax.jit(lambda rows: [jnp.stack(row) for row in rows], out_shardings=where)
        join = jax.jit(lambda parts: [jnp.concatenate(part) for part in parts], out_shardings=where)
        self._stacks = {
            size: stack.lower([[shape] * size for shape in shapes]).compile() for size in set(self._sizes)
        }
        parts = [
            [jax.ShapeDtypeStruct((n, *shape.shape), shape.dtype, sharding=where) for n in self._sizes]
            for shape in shapes
        ]
        self._join = join.lower(parts).compile() if len(self._sizes) > 1 else None

    def __call__(self, rows: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """`rows` of each metric to one array of each."""
        parts, at = [], 0
        for size in self._sizes:
            parts.append(self._stacks[size]([row[at : at + size] for row in rows]))
            at += size
        return (
            parts[0] if self._join is None else self._join([list(part) for part in zip(*parts, strict=True)])
        )


_ELSEWHERE: tuple[Any, Any] = (None, None)


def _nothing(memory: list) -> None:
    """A step in which this process has no part."""


def _is_here(mesh: Mesh) -> bool:
    return any(d.process_index == jax.process_index() for d in mesh.devices.flat)


def _spans_processes(mesh: Mesh) -> bool:
    return len({d.process_index for d in mesh.devices.flat}) > 1
