"""Estimates the peak memory of a device from jaxprs, by liveness analysis of a model of XLA's fusion.

    p = x @ w           an array
    h = tanh(p) + 1     one array: the tanh is fused into the sum
    s = sum(h * h)      one number: h * h is fused into the sum

A program needs its arguments, results that do not reuse a donated argument, and temporaries, from their
definition to their last use. An elementwise operation with a single elementwise reader makes no array. A loop
has the arrays of one trip. Nothing is compiled: `Engine.memory` has XLA's own figure.
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

_CONTROL = frozenset({"scan", "while", "cond", "custom_linear_solve"})  # not written out, as calls are
_JOINED = frozenset({"elementwise", "transcendental", "special"})  # classes of operations
_MOVED = frozenset("transpose slice rev pad concatenate stack unstack tile dynamic_slice split".split())
_IN_PLACE = _CONTROL | PUTS | {"dynamic_update_slice"}  # they may reuse an operand's buffer
_HASHED = 4  # arrays of words in which threefry makes one array of random bits
_MOST_KNOWN = 10_000


class _Step(NamedTuple):
    """An operation or a loop."""

    reads: tuple[Any, ...]  # its operands, without literals
    makes: tuple[tuple[Any, int], ...]  # its results and their bytes on a device
    joins: bool  # whether it is elementwise and can be fused into its reader
    in_place: bool  # whether its results overwrite operands
    inside: int  # bytes that it needs while it runs


def program_bytes(
    jaxpr: Any,
    axes: Sequence[int | None],
    devices: int,
    donated: Sequence[int] = (),
    layouts: Mapping[int, Layout] | None = None,
) -> int:
    """The peak bytes of one device while a program runs.

    `axes` are the batch axes of its first inputs. `layouts` are other layouts of inputs by position; outputs
    at these positions have the same.
    """
    body, layouts = jaxprs.open_jaxpr(jaxpr), layouts or {}
    flow = follow(body, axes, devices) if devices > 1 else None
    ends = [None] * len(body.outvars) if flow is None else flow.outputs
    known = [*axes, *[None] * (len(body.invars) - len(axes))]
    given = [
        _share(v, axis, devices, layouts.get(i))
        for i, (v, axis) in enumerate(zip(body.invars, known, strict=True))
    ]
    made = [
        0 if jaxprs.is_literal(v) else _share(v, axis, devices, layouts.get(i))
        for i, (v, axis) in enumerate(zip(body.outvars, ends, strict=True))
    ]
    constants = sum(_share(v, None, 1) for v in body.constvars)
    results = max(0, sum(made) - sum(given[i] for i in donated))
    return constants + sum(given) + results + _temporaries(body, axes, devices, layouts.values())


def _temporaries(
    jaxpr: core.Jaxpr, axes: Sequence[int | None], devices: int, layouts: Iterable[Layout]
) -> int:
    """The peak bytes of intermediate values on one device, without results.

    Arrays with the shape of a sharded parameter, such as its gradient, are assumed to be sharded like it.
    """
    flow = follow(jaxpr, axes, devices) if devices > 1 else None
    return _Arrays(devices, frozenset((one.shape, one.number) for one in layouts)).peak(jaxpr, flow)


def _share(variable: Any, axis: int | None, devices: int, layout: Layout | None = None) -> int:
    """Bytes of an array on one of the devices that split it."""
    if not hasattr(variable.aval, "dtype"):
        return 0
    layout = layout or Layout.of_batch(variable.aval.shape, axis, devices)
    return jaxprs.bytes_of(variable.aval) // layout.number


@functools.lru_cache(maxsize=32)  # many plans share functions
class _Arrays:
    """The arrays of jaxprs on one device; `split` has pairs of a shape and the parts of such arrays."""

    def __init__(self, devices: int, split: frozenset[tuple[tuple[int, ...], int]]):
        self.devices, self.split = devices, dict(split)
        self._known: IdentityCache[int] = IdentityCache(max_entries=_MOST_KNOWN)

    def peak(self, jaxpr: core.Jaxpr, flow: Flow | None) -> int:
        """Peak bytes of a jaxpr's intermediate values, without outputs."""

        def find() -> int:
            steps: list[_Step] = []
            outputs = self._write_out(jaxpr, flow, {}, steps)
            return _peak(steps, frozenset(jaxprs.variables(outputs)))

        return self._known(flow or jaxpr, None, find)

    def _write_out(
        self, jaxpr: core.Jaxpr, flow: Flow | None, names: dict[Any, Any], steps: list[_Step]
    ) -> list[Any]:
        """Appends the steps of a jaxpr with calls inlined; returns its outputs.

        `names` are the outer names of its variables. Each inlining of a call makes new names; a view has the
        name of its array.
        """
        flows: Sequence[EquationFlow | None] = [None] * len(jaxpr.eqns) if flow is None else flow.equations
        for eqn, each in zip(jaxpr.eqns, flows, strict=True):
            reads, bodies = jaxprs.renamed(eqn.invars, names), jaxprs.bodies(eqn)
            if each is not None and not each.bodies:
                bodies = ()
            inner = [None] * len(bodies) if each is None else each.bodies
            if bodies and eqn.primitive.name not in _CONTROL:
                body = bodies[0]
                known = {v: reads[k] for v, k in zip(body.jaxpr.invars, body.operands, strict=True)}
                ends = self._write_out(body.jaxpr, inner[0], known, steps)
                names.update((v, ends[j]) for v, j in zip(eqn.outvars, body.results, strict=False))
                continue
            axes = [None] * len(eqn.outvars) if each is None else each.results
            if _is_view(eqn):
                names.update(zip(eqn.outvars, reads, strict=True))
                continue
            made: list[tuple[Any, Any]] = [(v, object()) for v in eqn.outvars]
            names.update(made)
            makes = [
                (new, _share(v, axis, self.devices) // self.split.get(getattr(v.aval, "shape", ()), 1))
                for (v, new), axis in zip(made, axes, strict=True)
                if not isinstance(v, core.DropVar)
            ]
            inside = max((self.peak(b.jaxpr, f) for b, f in zip(bodies, inner, strict=True)), default=0)
            name = eqn.primitive.name
            if name in ("random_bits", "random_split"):
                inside = _HASHED * sum(size for _, size in makes)
            joins = name not in _CONTROL and (class_of(name) in _JOINED or name in VIEWS or name in _MOVED)
            used = tuple(jaxprs.variables(reads))
            steps.append(_Step(used, tuple(makes), joins, name in _IN_PLACE, inside))
        return jaxprs.renamed(jaxpr.outvars, names)


def _is_view(eqn: core.JaxprEqn) -> bool:
    """Whether each result is an alias of an operand."""
    if eqn.primitive.name not in VIEWS or len(eqn.invars) != len(eqn.outvars):
        return False
    pairs = zip(eqn.invars, eqn.outvars, strict=True)
    return all(
        hasattr(a.aval, "dtype") and jaxprs.bytes_of(a.aval) == jaxprs.bytes_of(b.aval) for a, b in pairs
    )


def _peak(steps: Sequence[_Step], given: frozenset[Any]) -> int:
    """Peak bytes of the arrays that steps make, without those that are returned."""
    read, live = set(given), []
    for step in reversed(steps):
        if any(v in read for v, _ in step.makes):
            read.update(step.reads)
            live.append(step)
    steps = live[::-1]
    readers = collections.Counter(v for step in steps for v in set(step.reads))
    needed = {v for v, count in readers.items() if count > 1} | given
    needed = needed.union(*(step.reads for step in steps if not step.joins))
    parts: dict[Any, tuple[Any, ...]] = {}  # for values that are not arrays: the arrays that they depend on
    running: list[tuple[_Step, tuple[Any, ...]]] = []
    last: dict[Any, int] = {}
    for step in steps:
        reads = tuple(dict.fromkeys(part for v in step.reads for part in parts.get(v, (v,))))
        if step.joins and not any(v in needed for v, _ in step.makes):
            parts.update((v, reads) for v, _ in step.makes)
            continue
        last.update(dict.fromkeys(reads, len(running)))
        running.append((step, reads))
    alive: dict[Any, int] = {}
    now = peak = 0
    for i, (step, reads) in enumerate(running):
        dying = [v for v in reads if v in alive and last[v] == i]
        for v, size in step.makes:
            if v in given or v not in last:
                continue
            same = next((old for old in dying if alive.get(old) == size), None) if step.in_place else None
            if same is not None:  # in place
                now -= alive.pop(same)
            alive[v] = size
            now += size
        peak = max(peak, now + step.inside)
        now -= sum(alive.pop(v) for v in dying if v in alive)
    return peak


def peak_by_group(
    schedule: Schedule, sizes: Mapping[str, int], together: Mapping[str, str] | None = None
) -> dict[str, int]:
    """The peak bytes of a device of each group, for a schedule.

    `sizes` are the numbers of devices over which each group splits a batch. Groups with a common name in
    `together` are on the same devices, and are counted together.
    """
    names = together or {group: group for group in sizes}
    state: collections.Counter[str] = collections.Counter()
    for places in schedule.leaves:
        for value in places:
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
    last = {value: i for i, step in enumerate(steps) for value in uses(step)}
    alive: dict[Value, int] = {}
    donated: set[Value] = set()  # of the state, which is counted separately: negative bytes
    peak: collections.Counter[str] = collections.Counter()
    for i, step in enumerate(steps):
        back = [value for value in defs(step) if value in donated]
        alive.update((value, _share_of(value, sizes)) for value in defs(step) if value not in donated)
        now: collections.Counter[str] = collections.Counter()
        for value, size in alive.items():
            now[names[value.group]] += size
        if isinstance(step, Call):
            now[names[step.group]] += _while_called(step, alive, donated, sizes)
        elif isinstance(step, Move):
            if step.donates:  # leaf by leaf: both layouts of one leaf exist at a time
                now[names[step.source]] += _while_moved(step, alive, donated, back, sizes)
        else:
            now.update(_peak_steps(step.steps, sizes, names))
        peak |= now
        for value in list(alive):
            if last.get(value, len(steps)) <= i and value not in donated:
                del alive[value]
        for value in back:
            del alive[value]
        donated.difference_update(back)
    return peak


def _while_called(call: Call, alive: dict[Value, int], donated: set[Value], sizes: Mapping[str, int]) -> int:
    """Frees what a call donates; returns the bytes that a device needs besides live arrays while it runs."""
    devices, axes = sizes[call.group], [value.axis for value in call.inputs]
    given = [(call.inputs[i], _share_of(call.inputs[i], sizes)) for i in call.donated]
    room = sum(size for _, size in given)
    for value, size in given:
        if alive.pop(value, None) is None:
            alive[value] = -size
            donated.add(value)
    split = [v.layout for v in call.inputs if v.axis is None and v.layout is not None and v.layout.number > 1]
    inside = _temporaries(jaxprs.open_jaxpr(call.jaxpr), axes, devices, split)
    return inside - min(room, sum(alive[value] for value in call.outputs))


def _while_moved(
    move: Move,
    alive: dict[Value, int],
    donated: set[Value],
    back: Sequence[Value],
    sizes: Mapping[str, int],
) -> int:
    """Marks donated leaves, and returns the correction of the count during the move."""
    owned = [value for value in uses(move) if value not in alive]
    alive.update((value, -_share_of(value, sizes)) for value in owned)
    donated.update(owned)
    largest = max(_share_of(value, sizes) for value in owned or back)
    return largest - sum(_share_of(value, sizes) for value in owned)
