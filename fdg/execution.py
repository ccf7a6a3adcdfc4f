"""Running a plan: the whole loop as one program, or a schedule of several programs stepped from the host."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from fdg import lowering
from fdg.graph import FDG
from fdg.hlo import Collective, read_collectives
from fdg.partition import Call, Move, Repeat, Step, Value
from fdg.placement import Plan
from fdg.timeline import Timeline
from fdg.transfers import Layout, Mover

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
    """

    name: str
    fragments: tuple[str, ...]
    devices: tuple[jax.Device, ...]
    calls_per_iteration: int
    function: Any = dataclasses.field(repr=False)
    arguments: Sequence[Any] = dataclasses.field(repr=False)
    compiled: Any = dataclasses.field(default=None, repr=False)

    def compile(self) -> jax.stages.Compiled:
        """Compiles it, unless that was done already."""
        if self.compiled is None:
            self.compiled = self.function.lower(*self.arguments).compile()
        return self.compiled

    def hlo(self) -> str:
        """The optimised HLO as text; of a whole training loop, for the number of iterations last compiled."""
        return self.compile().as_text() or ""

    def collectives(self) -> tuple[Collective, ...]:
        """What the devices of this program exchange, read from its HLO."""
        return read_collectives(self.hlo())

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
        self._meshes = {
            group.name: lowering.make_mesh([devices[i] for i in group.devices]) for group in plan.groups
        }
        self.moved_bytes = 0
        self.timeline = Timeline([group.name for group in plan.groups])
        self._slots: dict[Value, int] = {}
        self._programs: list[Program] = []
        self._movers: list[tuple[Mover, list[jax.ShapeDtypeStruct]]] = []
        self._steps = self._build(schedule.steps, 1)
        self.programs = tuple(self._programs)
        self._again = self._rebind(schedule.again)
        self._metrics = [self._slot(value) for value in schedule.metrics]
        self._metric_stacks: dict[int, list[tuple[list[int], Any]]] = {}
        self._leaves = [[self._slot(value) for value in places] for places in schedule.leaves]
        self.shapes = [self._shape(places[0]) for places in schedule.leaves]
        self._place_constants = [
            (self._slot(value), plan.constants[i], self._shape(value).sharding) for i, value in schedule.constants
        ]
        self._constants: list[tuple[int, jax.Array]] | None = None
        # Leaves that several groups keep: the copies of the state that was returned last.
        self._copies: dict[int, tuple[jax.Array, list[jax.Array]]] = {}
        self._is_compiled = False

    # --- building ---

    def _slot(self, value: Value) -> int:
        return self._slots.setdefault(value, len(self._slots))

    def _shape(self, value: Value) -> jax.ShapeDtypeStruct:
        return lowering.value_shape(self._meshes[value.group], value)

    def _rebind(self, pairs: Sequence[tuple[Value, Value]]) -> list[tuple[int, int]]:
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
        function, arguments = lowering.lower_call(call, mesh)
        program = Program(call.name, call.fragments, tuple(mesh.devices.flat), times, function, arguments)
        self._programs.append(program)
        inputs = [self._slot(value) for value in call.inputs]
        outputs = [self._slot(value) for value in call.outputs]
        freed = [inputs[i] for i in call.freed]
        timeline, group = self.timeline, call.group

        def run(memory: list) -> None:
            entries = [memory[i] for i in inputs]
            this = timeline.start(group, [made_by for _, made_by in entries])
            *results, done = program.compiled(*[array for array, _ in entries])
            for i in freed:
                memory[i] = None
            for i, result in zip(outputs, results, strict=True):
                memory[i] = result, this
            timeline.started(this, done)

        return run

    def _build_move(self, move: Move, times: int) -> Callable[[list], None]:
        source, target = self._meshes[move.source], self._meshes[move.target]
        layouts = [
            (Layout(a.shape, a.axis, source.size), Layout(b.shape, b.axis, target.size)) for a, b in move.pairs
        ]
        mover = Mover(source, target, layouts)
        shapes = [self._shape(a) for a, _ in move.pairs]
        self._movers.append((mover, shapes))
        for name, function, arguments in mover.functions(shapes):
            where = source if name == "cut" else target
            title = f"{name} {move.source} -> {move.target}"
            program = Program(title, (), tuple(where.devices.flat), times, function, (arguments,))
            self._programs.append(program)
            mover.programs[name] = program
        inputs = [self._slot(a) for a, _ in move.pairs]
        outputs = [self._slot(b) for _, b in move.pairs]
        freed = [inputs[i] for i in move.freed]

        def run(memory: list) -> None:
            entries = [memory[i] for i in inputs]
            arrays = mover([array for array, _ in entries])
            for i in freed:
                memory[i] = None
            for i, array, (_, made_by) in zip(outputs, arrays, entries, strict=True):
                memory[i] = array, made_by
            self.moved_bytes += mover.bytes

        return run

    def _build_repeat(self, repeat: Repeat, times: int) -> Callable[[list], None]:
        enter = [(*pair, i in repeat.copied) for i, pair in enumerate(self._rebind(repeat.enter))]
        steps = self._build(repeat.steps, times * repeat.trips)
        again, leave = self._rebind(repeat.again), self._rebind(repeat.leave)
        targets = {b for _, b in again}
        trips = repeat.trips

        def run(memory: list) -> None:
            for a, b, copied in enter:
                memory[b] = (_copy(memory[a][0]), memory[a][1]) if copied else memory[a]
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
            lowered = [(program, program.function.lower(*program.arguments)) for program in self._programs]
            with ThreadPoolExecutor() as pool:
                for program, compiled in zip(
                    self._programs, pool.map(lambda pair: pair[1].compile(), lowered), strict=True
                ):
                    program.compiled = compiled
            self._constants = [
                (slot, jax.device_put(value, sharding)) for slot, value, sharding in self._place_constants
            ]
            self._is_compiled = True
        if iterations not in self._metric_stacks:
            self._metric_stacks[iterations] = self._compile_stacks(iterations)

    def _compile_stacks(self, iterations: int) -> list[tuple[list[int], Any]]:
        """For each group, the metrics that it makes, and a program that stacks their rows."""
        by_group: dict[str, list[int]] = collections.defaultdict(list)
        for i, value in enumerate(self._schedule.metrics):
            by_group[value.group].append(i)
        stacks = []
        for group, positions in by_group.items():
            shapes = [[self._shape(self._schedule.metrics[i])] * iterations for i in positions]
            whole = lowering.batch_sharding(self._meshes[group], None)
            stack = jax.jit(lambda rows: [jnp.stack(row) for row in rows], out_shardings=whole)
            stacks.append((positions, stack.lower(shapes).compile()))
        return stacks

    def run(self, leaves: list[jax.Array], iterations: int) -> tuple[list[jax.Array], list[jax.Array]]:
        """The state's leaves after some iterations, and the metrics, stacked over them."""
        # Each slot holds an array and the run of a program that makes it (None for one from before).
        memory: list[Any] = [None] * len(self._slots)
        for slot, value in self._constants or ():
            memory[slot] = value, None
        for i, (leaf, slots) in enumerate(zip(leaves, self._leaves, strict=True)):
            known, copies = self._copies.pop(i, (None, []))
            if known is not leaf:
                copies = [
                    jax.device_put(leaf, self._shape(value).sharding) for value in self._schedule.leaves[i][1:]
                ]
            for slot, value in zip(slots, [leaf, *copies], strict=True):
                memory[slot] = value, None
        rows: list[list[jax.Array]] = [[] for _ in self._metrics]
        in_flight: collections.deque[Any] = collections.deque()
        self.timeline.begin()
        for iteration in range(iterations):
            for step in self._steps:
                step(memory)
            for row, slot in zip(rows, self._metrics, strict=True):
                row.append(memory[slot][0])
            for b, value in [(b, memory[a]) for a, b in self._again]:
                memory[b] = value
            in_flight.append(self.timeline.latest())
            if len(in_flight) > _IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())
        metrics: list[Any] = [None] * len(self._metrics)
        for positions, stack in self._metric_stacks[iterations]:
            for i, stacked in zip(positions, stack([rows[i] for i in positions]), strict=True):
                metrics[i] = stacked
        results = []
        for i, slots in enumerate(self._leaves):
            leaf, *copies = [memory[slot][0] for slot in slots]
            results.append(leaf)
            if copies:
                self._copies[i] = leaf, copies
        return results, metrics


_copy = jax.jit(lambda x: jnp.copy(x))
