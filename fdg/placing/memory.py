"""Estimates the peak memory of a device from jaxprs, by liveness analysis with a model of XLA's fusion.

    p = x @ w           an array
    h = tanh(p) + 1     one array: the tanh is fused into the sum
    s = sum(h * h)      one number: h * h is fused into the sum

A program needs memory for its arguments, for results that do not reuse a donated argument, and for
temporaries, from their definition to their last use. An elementwise operation with a single elementwise
reader needs no array. A loop needs the arrays of one trip. Nothing is compiled; `Engine.memory` has XLA's
figure.
"""

import collections
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from fdg import jaxprs
from fdg.batch.flow import EquationFlow, Flow
from fdg.batch.follow import follow
from fdg.identity_cache import IdentityCache
from fdg.jaxprs.classes import PUTS, VIEWS, class_of
from fdg.placing.layout import Layout
from fdg.placing.scheduling.schedule import Call, Move, Schedule, Step, Value, defs, uses

_CONTROL = frozenset({"scan", "while", "cond", "custom_linear_solve"})  # not inlined, unlike calls
_FUSED_CLASSES = frozenset({"elementwise", "transcendental", "special"})
_MOVED = frozenset("transpose slice rev pad concatenate stack unstack tile dynamic_slice split".split())
_IN_PLACE = _CONTROL | PUTS | {"dynamic_update_slice"}  # these may reuse an operand's buffer
_HASH_ARRAYS = 4  # the number of arrays of words that threefry needs for one array of random bits
_MAX_CACHED = 10_000


class _Step(NamedTuple):
    """An operation or a loop."""

    operands: tuple[Any, ...]  # its operands, without literals
    results: tuple[tuple[Any, int], ...]  # its results and their bytes on a device
    is_fusible: bool  # True if it is elementwise and can be fused into its reader
    is_in_place: bool  # True if its results overwrite operands
    inner_bytes: int  # bytes that it needs while it runs


def program_bytes(
    jaxpr: Any,
    axes: Sequence[int | None],
    devices: int,
    donated: Sequence[int] = (),
    layouts: Mapping[int, Layout] | None = None,
) -> int:
    """The peak bytes of one device while a program runs.

    `axes` are the batch axes of its first inputs. `layouts` are the layouts of sharded inputs by position;
    outputs at these positions have the same layouts.
    """
    body, layouts = jaxprs.open_jaxpr(jaxpr), layouts or {}
    flow = follow(body, axes, devices) if devices > 1 else None
    output_axes = [None] * len(body.outvars) if flow is None else flow.outputs
    input_axes = [*axes, *[None] * (len(body.invars) - len(axes))]
    input_bytes = [
        _share(v, axis, devices, layouts.get(i))
        for i, (v, axis) in enumerate(zip(body.invars, input_axes, strict=True))
    ]
    output_bytes = [
        0 if jaxprs.is_literal(v) else _share(v, axis, devices, layouts.get(i))
        for i, (v, axis) in enumerate(zip(body.outvars, output_axes, strict=True))
    ]
    constants = sum(_share(v, None, 1) for v in body.constvars)
    results = max(0, sum(output_bytes) - sum(input_bytes[i] for i in donated))
    return constants + sum(input_bytes) + results + _temporaries(body, flow, devices, layouts.values())


def _temporaries(jaxpr: core.Jaxpr, flow: Flow | None, devices: int, layouts: Iterable[Layout]) -> int:
    """The peak bytes of intermediate values on one device, without results.

    Arrays with the shape of a sharded parameter, such as its gradient, are assumed to be sharded like it.
    """
    return _Arrays(devices, frozenset((layout.shape, layout.number) for layout in layouts)).peak(jaxpr, flow)


def _share(variable: Any, axis: int | None, devices: int, layout: Layout | None = None) -> int:
    """The bytes of an array on one of the devices that split it."""
    if not hasattr(variable.aval, "dtype"):
        return 0
    layout = layout or Layout.of_batch(variable.aval.shape, axis, devices)
    return jaxprs.bytes_of(variable.aval) // layout.number


@functools.lru_cache(maxsize=32)  # many plans share functions
class _Arrays:
    """The arrays of jaxprs on one device; `split` has pairs (shape, number of parts of such arrays)."""

    def __init__(self, devices: int, split: frozenset[tuple[tuple[int, ...], int]]):
        self.devices, self.split = devices, dict(split)
        self._cache: IdentityCache[int] = IdentityCache(max_entries=_MAX_CACHED)

    def peak(self, jaxpr: core.Jaxpr, flow: Flow | None) -> int:
        """The peak bytes of a jaxpr's intermediate values, without outputs."""

        def compute() -> int:
            steps: list[_Step] = []
            outputs = self._inline(jaxpr, flow, {}, steps)
            return _peak(steps, frozenset(jaxprs.variables(outputs)))

        return self._cache(flow or jaxpr, None, compute)

    def _inline(
        self, jaxpr: core.Jaxpr, flow: Flow | None, names: dict[Any, Any], steps: list[_Step]
    ) -> list[Any]:
        """Appends the steps of a jaxpr with calls inlined; returns its outputs.

        `names` maps the jaxpr's variables to the caller's. Each inlining makes new names; a view has the name
        of its array.
        """
        flows: Sequence[EquationFlow | None] = [None] * len(jaxpr.eqns) if flow is None else flow.equations
        for eqn, step_flow in zip(jaxpr.eqns, flows, strict=True):
            reads, bodies = jaxprs.renamed(eqn.invars, names), jaxprs.bodies(eqn)
            if step_flow is not None and not step_flow.bodies:
                bodies = ()
            inner = [None] * len(bodies) if step_flow is None else step_flow.bodies
            if bodies and eqn.primitive.name not in _CONTROL:
                body = bodies[0]
                inner_names = {v: reads[k] for v, k in zip(body.jaxpr.invars, body.operands, strict=True)}
                outputs = self._inline(body.jaxpr, inner[0], inner_names, steps)
                names.update((v, outputs[j]) for v, j in zip(eqn.outvars, body.results, strict=False))
                continue
            axes = [None] * len(eqn.outvars) if step_flow is None else step_flow.results
            if _is_view(eqn):
                names.update(zip(eqn.outvars, reads, strict=True))
                continue
            new_names: list[tuple[Any, Any]] = [(v, object()) for v in eqn.outvars]
            names.update(new_names)
            results = [
                (new, _share(v, axis, self.devices) // self.split.get(getattr(v.aval, "shape", ()), 1))
                for (v, new), axis in zip(new_names, axes, strict=True)
                if not isinstance(v, core.DropVar)
            ]
            inside = max((self.peak(b.jaxpr, f) for b, f in zip(bodies, inner, strict=True)), default=0)
            name = eqn.primitive.name
            if name in ("random_bits", "random_split"):
                inside = _HASH_ARRAYS * sum(size for _, size in results)
            is_fusible = name not in _CONTROL and (
                class_of(name) in _FUSED_CLASSES or name in VIEWS or name in _MOVED
            )
            operands = tuple(jaxprs.variables(reads))
            steps.append(_Step(operands, tuple(results), is_fusible, name in _IN_PLACE, inside))
        return jaxprs.renamed(jaxpr.outvars, names)


def _is_view(eqn: core.JaxprEqn) -> bool:
    """Whether each result is an alias of an operand."""
    if eqn.primitive.name not in VIEWS or len(eqn.invars) != len(eqn.outvars):
        return False
    pairs = zip(eqn.invars, eqn.outvars, strict=True)
    return all(
        hasattr(a.aval, "dtype") and jaxprs.bytes_of(a.aval) == jaxprs.bytes_of(b.aval) for a, b in pairs
    )


def _peak(steps: Sequence[_Step], returned: frozenset[Any]) -> int:
    """The peak bytes of the arrays that steps make, without the arrays `returned`."""
    read, used_steps = set(returned), []
    for step in reversed(steps):
        if any(v in read for v, _ in step.results):
            read.update(step.operands)
            used_steps.append(step)
    steps = used_steps[::-1]
    readers = collections.Counter(v for step in steps for v in set(step.operands))
    needed = {v for v, count in readers.items() if count > 1} | returned
    needed = needed.union(*(step.operands for step in steps if not step.is_fusible))
    sources: dict[Any, tuple[Any, ...]] = {}  # for values that are not arrays: the arrays that they depend on
    unfused: list[tuple[_Step, tuple[Any, ...]]] = []
    last_use: dict[Any, int] = {}
    for step in steps:
        reads = tuple(dict.fromkeys(part for v in step.operands for part in sources.get(v, (v,))))
        if step.is_fusible and not any(v in needed for v, _ in step.results):
            sources.update((v, reads) for v, _ in step.results)
            continue
        last_use.update(dict.fromkeys(reads, len(unfused)))
        unfused.append((step, reads))
    alive: dict[Any, int] = {}
    current = peak = 0
    for i, (step, reads) in enumerate(unfused):
        dying = [v for v in reads if v in alive and last_use[v] == i]
        for v, size in step.results:
            if v in returned or v not in last_use:
                continue
            donor = next((v for v in dying if alive.get(v) == size), None) if step.is_in_place else None
            if donor is not None:
                current -= alive.pop(donor)
            alive[v] = size
            current += size
        peak = max(peak, current + step.inner_bytes)
        current -= sum(alive.pop(v) for v in dying if v in alive)
    return peak


def peak_by_group(
    schedule: Schedule, sizes: Mapping[str, int], shared: Mapping[str, str] | None = None
) -> dict[str, int]:
    """The peak bytes of a device of each group, for a schedule.

    `sizes` are the numbers of devices over which each group splits a batch. Groups with a common name in
    `shared` are on the same devices, so their bytes are added.
    """
    names = shared or {group: group for group in sizes}
    state: collections.Counter[str] = collections.Counter()
    for values in schedule.leaves:
        for value in values:
            state[names[value.group]] += _share_of(value, sizes)
    for _, value in schedule.constants:
        state[names[value.group]] += _share_of(value, sizes)
    peak = _peak_steps(schedule.steps, sizes, names)
    return {group: state[group] + peak[group] for group in dict.fromkeys(names.values())}


def _share_of(value: Value, sizes: Mapping[str, int]) -> int:
    return _share(value.variable, value.axis, sizes[value.group], value.layout)


def _peak_steps(
    steps: Sequence[Step], sizes: Mapping[str, int], names: Mapping[str, str]
) -> collections.Counter[str]:
    last_use = {value: i for i, step in enumerate(steps) for value in uses(step)}
    alive: dict[Value, int] = {}
    donated: set[Value] = set()  # donated leaves: negative bytes in `alive`, since the caller adds all leaves
    peak: collections.Counter[str] = collections.Counter()
    for i, step in enumerate(steps):
        returned_leaves = [value for value in defs(step) if value in donated]
        alive.update((value, _share_of(value, sizes)) for value in defs(step) if value not in donated)
        current: collections.Counter[str] = collections.Counter()
        for value, size in alive.items():
            current[names[value.group]] += size
        if isinstance(step, Call):
            current[names[step.group]] += _call_bytes(step, alive, donated, sizes)
        elif isinstance(step, Move):
            if step.donates:  # leaf by leaf: only one leaf at a time exists in both layouts
                current[names[step.source]] += _move_bytes(step, alive, donated, returned_leaves, sizes)
        else:
            current.update(_peak_steps(step.steps, sizes, names))
        peak |= current
        for value in list(alive):
            if last_use.get(value, len(steps)) <= i and value not in donated:
                del alive[value]
        for value in returned_leaves:
            del alive[value]
        donated.difference_update(returned_leaves)
    return peak


def _call_bytes(call: Call, alive: dict[Value, int], donated: set[Value], sizes: Mapping[str, int]) -> int:
    """Frees what a call donates; returns the bytes that it needs while it runs, besides live arrays."""
    devices, jaxpr = sizes[call.group], jaxprs.open_jaxpr(call.jaxpr)
    flow = follow(jaxpr, [value.axis for value in call.inputs], devices) if devices > 1 else None
    donated_bytes = [(call.inputs[i], _share_of(call.inputs[i], sizes)) for i in call.donated]
    reusable = sum(size for _, size in donated_bytes)
    for value, size in donated_bytes:
        if alive.pop(value, None) is None:
            alive[value] = -size
            donated.add(value)
    split = [v.layout for v in call.inputs if v.axis is None and v.layout is not None and v.layout.number > 1]
    inside = _temporaries(jaxpr, flow, devices, split)
    return inside - min(reusable, sum(alive[value] for value in call.outputs))


def _move_bytes(
    move: Move,
    alive: dict[Value, int],
    donated: set[Value],
    returned_leaves: Sequence[Value],
    sizes: Mapping[str, int],
) -> int:
    """Marks donated leaves; returns the bytes to add during the move, while both copies of a leaf exist."""
    leaves = [value for value in uses(move) if value not in alive]
    alive.update((value, -_share_of(value, sizes)) for value in leaves)
    donated.update(leaves)
    largest = max(_share_of(value, sizes) for value in leaves or returned_leaves)
    return largest - sum(_share_of(value, sizes) for value in leaves)
