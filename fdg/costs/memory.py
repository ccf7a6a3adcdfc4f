"""Peak memory of a device: what XLA will set aside for a program, worked out from its jaxpr.

    arguments + results that take over no argument + temporaries

XLA makes no array of an elementwise operation whose one reader is another operation of the same loop: so
those are left out here (`_written`). What is left lives from where it is made to where it is read last; a
loop's body has its own arrays on top of what is alive around it, and its results are written over what it
carries.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from fdg import jaxprs
from fdg.batch.flow import EquationFlow, Flow
from fdg.batch.follow import follow
from fdg.placing.plan import Plan
from fdg.placing.policy import Group
from fdg.placing.scheduling.schedule import Value
from fdg.profiling.work import PICKS, VIEWS, class_of

_JOINS = frozenset({"elementwise", "transcendental"})  # classes of operations that their readers compute
_MOVED = frozenset({"transpose", "slice", "rev", "pad", "concatenate"})  # likewise
_WHOLE = frozenset({"product", "convolution", "sort", "linear algebra", "host"})  # classes that read arrays
_IN_PLACE = frozenset({"dynamic_update_slice", "scatter", "scatter-add"})
_CONTROL = frozenset({"scan", "while", "cond", "custom_linear_solve"})  # not written out, as calls are


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes of a program on one device.

    Attributes:
      arguments: that it is given.
      results: that take over no argument's memory.
      temporaries: besides.
    """

    arguments: int
    results: int
    temporaries: int

    @property
    def peak(self) -> int:
        """All together."""
        return self.arguments + self.results + self.temporaries


def program_need(
    jaxpr: Any,
    axes: Sequence[int | None],
    devices: int,
    donated: frozenset[int] = frozenset(),
    platform: str = "cpu",
) -> Need:
    """Of a program.

    Args:
      jaxpr: open or closed.
      axes: the batch axis of each input.
      devices: that the batch is split over.
      donated: inputs whose memory results may take over.
      platform: of the devices, for XLA orders operations otherwise on each.
    """
    opened = jaxprs.open_jaxpr(jaxpr)
    flow = follow(opened, axes, devices) if devices > 1 else None
    arguments = sum(
        _size(v, axis, devices) for v, axis in zip(opened.invars, _padded(axes, opened), strict=True)
    )
    room = sum(_size(opened.invars[i], _padded(axes, opened)[i], devices) for i in donated)
    outputs = flow.outputs if flow is not None else [None] * len(opened.outvars)
    made = sum(
        _size(v, axis, devices)
        for v, axis in zip(opened.outvars, outputs, strict=True)
        if not jaxprs.is_literal(v)
    )
    temporaries = _lives(devices, platform == "cpu").peak(opened, flow)
    return Need(arguments, max(0, made - room), temporaries)


def _padded(axes: Sequence[int | None], jaxpr: core.Jaxpr) -> list[int | None]:
    return [*axes, *[None] * (len(jaxpr.invars) - len(axes))]


def _size(v: Any, axis: int | None, devices: int) -> int:
    if jaxprs.is_literal(v) or not hasattr(v.aval, "dtype"):
        return 0
    return jaxprs.bytes_of(v.aval) // (devices if axis is not None else 1)


_MOST_KNOWN = 10_000
_PLACED = 120
# Of random bits: threefry makes two words for each, in a loop that XLA has two copies of, and counts both.
_RANDOM = 5


class _Span(NamedTuple):
    """An array from one moment to another."""

    begin: int
    end: int
    size: int


_Spans = tuple[Sequence[_Span], int]


@functools.lru_cache(maxsize=32)
def _lives(devices: int, breadth_first: bool) -> "_Lives":
    """The one of a number of devices: what is known of a helper serves many plans."""
    return _Lives(devices, breadth_first)


class _Lives:
    """Peaks of jaxprs, each looked at once."""

    def __init__(self, devices: int, breadth_first: bool):
        self.devices, self.breadth_first = devices, breadth_first
        # Kept with what they are of, so that nothing else has the same id.
        self.known: dict[tuple[int, int], tuple[_Spans, core.Jaxpr, Flow | None]] = {}

    def peak(self, jaxpr: core.Jaxpr, flow: Flow | None) -> int:
        """Bytes that hold all that the equations make, as XLA lays it out; what they give is not counted."""
        return _packed(self.spans(jaxpr, flow)[0])

    def spans(self, jaxpr: core.Jaxpr, flow: Flow | None) -> _Spans:
        """The arrays that the equations make, and for how many moments they run.

        The body of a loop is there once, within the moments of the loop.
        """
        key = id(jaxpr), id(flow)
        if key not in self.known:
            found = self._spans(jaxpr, flow)
            if len(self.known) > _MOST_KNOWN:
                self.known.clear()
            self.known[key] = found, jaxpr, flow
        return self.known[key][0]

    def _spans(self, jaxpr: core.Jaxpr, flow: Flow | None) -> _Spans:
        steps, outputs = _inlined(jaxpr, flow)
        given = {v for v in outputs if not jaxprs.is_literal(v)}
        written = _written(steps, given)
        if self.breadth_first:
            steps = _breadth_first(steps, written)
        found: list[_Span] = []
        made: dict[Any, tuple[int, int]] = {}  # where each array begins, and its bytes
        ends: dict[Any, int] = {}
        now = 0
        for step in steps:
            over = step.joins or step.eqn.primitive.name in _IN_PLACE
            length = 2
            bodies = jaxprs.bodies(step.eqn)
            for body, inner in zip(bodies, step.flows or [None] * len(bodies), strict=True):
                spans, moments = self.spans(body.jaxpr, inner)
                found += [_Span(now + begin, now + end, size) for begin, end, size in spans]
                length = max(length, moments + 2)
            # What is computed element by element is written over what it read.
            ends.update((v, now if over else now + length) for v in step.reads if v in made)
            for v, axis in step.makes:
                if step.eqn.primitive.name == "random_bits":
                    size = _size(v, axis, self.devices)
                    found += [_Span(now, now + length, size)] * _RANDOM
                if v in written and v not in given:
                    made[v] = now + (1 if over else 0), _size(v, axis, self.devices)
            now += length
        found += [
            _Span(begin, ends[v], size) for v, (begin, size) in made.items() if ends.get(v, -1) >= begin
        ]
        return found, now


def _packed(spans: Sequence[_Span]) -> int:
    """Bytes that XLA's heap needs: the largest array first, each at the lowest place that is free then.

    (`GlobalDecreasingSizeBestFitHeap`.) Small ones fit between; only the largest are placed.
    """
    placed: list[tuple[_Span, int]] = []
    most = 0
    for span in sorted(spans, key=lambda one: (-one.size, one.begin))[:_PLACED]:
        busy = sorted(
            (at, at + other.size) for other, at in placed if other.begin < span.end and span.begin < other.end
        )
        at, best = 0, None
        for begin, end in busy:
            if begin - at >= span.size and (best is None or begin - at < best[0]):
                best = begin - at, at
            at = max(at, end)
        here = at if best is None else best[1]
        placed.append((span, here))
        most = max(most, here + span.size)
    return most


@dataclasses.dataclass(frozen=True)
class _Step:
    """An equation as XLA sees it: outside of calls, which it writes out, and without views.

    Attributes:
      eqn: the equation.
      reads: its operands, literals left out.
      makes: its results, each with its batch axis.
      flows: of its bodies, if it is a loop or has branches.
    """

    eqn: core.JaxprEqn
    reads: tuple[Any, ...]
    makes: tuple[tuple[Any, int | None], ...]
    flows: Sequence[Flow | None]

    @property
    def joins(self) -> bool:
        """Whether it is computed element by element, with its readers."""
        name = self.eqn.primitive.name
        return not jaxprs.bodies(self.eqn) and (class_of(name) in _JOINS or name in VIEWS or name in _MOVED)


def _inlined(jaxpr: core.Jaxpr, flow: Flow | None) -> tuple[list[_Step], list[Any]]:
    """The equations with calls written out, and what the outputs are then."""
    steps: list[_Step] = []

    def visit(inner: core.Jaxpr, its_flow: Flow | None, names: dict[Any, Any]) -> list[Any]:
        """Adds the steps of a jaxpr whose variables have other names outside; its outputs by those names."""

        def name_of(v: Any) -> Any:
            return v if jaxprs.is_literal(v) else names.get(v, v)

        flows: Sequence[EquationFlow | None] = [None] * len(inner.eqns)
        if its_flow is not None:
            flows = its_flow.equations
        for eqn, each in zip(inner.eqns, flows, strict=True):
            reads = [name_of(v) for v in eqn.invars]
            bodies = jaxprs.bodies(eqn)
            if bodies and eqn.primitive.name not in _CONTROL and (each is None or each.bodies):
                body = bodies[0]
                given = {v: reads[k] for v, k in zip(body.jaxpr.invars, body.operands, strict=True)}
                ends = visit(body.jaxpr, None if each is None else each.bodies[0], given)
                names.update((v, ends[j]) for v, j in zip(eqn.outvars, body.results, strict=False))
                continue
            if _is_view(eqn) and not jaxprs.is_literal(reads[0]):
                names[eqn.outvars[0]] = reads[0]
                continue
            axes = [None] * len(eqn.outvars) if each is None else each.results
            makes = []
            for v, axis in zip(eqn.outvars, axes, strict=True):
                names[v] = _Array(v.aval)  # another one each time that the call is written out
                if not isinstance(v, core.DropVar):
                    makes.append((names[v], axis))
            known = tuple(v for v in reads if not jaxprs.is_literal(v))
            steps.append(_Step(eqn, known, tuple(makes), () if each is None else each.bodies))
        return [name_of(v) for v in inner.outvars]

    return steps, visit(jaxpr, flow, {})


@dataclasses.dataclass(frozen=True, eq=False)
class _Array:
    """What an equation makes, told apart by identity."""

    aval: Any


def _breadth_first(steps: Sequence[_Step], written: set[Any]) -> list[_Step]:
    """In the order of XLA's scheduler for CPUs: what became ready first comes first, so that cores have work.

    (`concurrency optimised`, its default.) What is joined to its readers takes no turn of its own.
    """
    maker = {v: i for i, step in enumerate(steps) for v, _ in step.makes}
    waiting = [{maker[v] for v in step.reads if v in maker} for step in steps]
    readers: list[list[int]] = [[] for _ in steps]
    for i, before in enumerate(waiting):
        for other in before:
            readers[other].append(i)
    order: list[_Step] = []
    queue = collections.deque(i for i, before in enumerate(waiting) if not before)
    while queue:
        i = queue.popleft()
        order.append(steps[i])
        for reader in readers[i]:
            waiting[reader].discard(i)
            if not waiting[reader]:
                turn = any(v in written for v, _ in steps[reader].makes)
                (queue.append if turn else queue.appendleft)(reader)
    return order


def _is_view(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name not in VIEWS or len(eqn.invars) != 1 or not hasattr(eqn.invars[0].aval, "dtype"):
        return False
    return jaxprs.bytes_of(eqn.outvars[0].aval) == jaxprs.bytes_of(eqn.invars[0].aval)


def _written(steps: Sequence[_Step], given: set[Any]) -> set[Any]:
    """What becomes an array: not what its readers compute for themselves."""
    needed = set(given)
    for step in steps:
        if not step.joins:
            kind = class_of(step.eqn.primitive.name)
            whole = jaxprs.bodies(step.eqn) or kind in _WHOLE or step.eqn.primitive.name in _IN_PLACE | PICKS
            needed.update(step.reads if whole else ())
    return {v for step in steps for v, _ in step.makes if not step.joins or v in needed}


def plan_memory(plan: Plan, platform: str = "cpu") -> dict[str, int]:
    """Bytes that each device of each group needs at its peak, for a plan; nothing is compiled.

    Args:
      plan: any.
      platform: of the devices.
    """
    groups = {group.name: group for group in plan.groups}
    if plan.schedule is None:
        (group,) = plan.groups
        agents = (plan.num_seeds or len(group)) // len(group) if plan.num_seeds is not None else 1
        rows = group.rows if plan.num_seeds is None else 1
        state = frozenset(range(len(plan.graph.state_axes)))
        axes = plan.graph.state_axes if plan.num_seeds is None else ()
        need = program_need(plan.graph.jaxpr, axes, rows, state, platform)
        return {group.name: agents * _with_sharded(plan, group, need.peak)}
    held: dict[str, int] = dict.fromkeys(groups, 0)
    for places in plan.schedule.leaves:
        for value in places:
            held[value.group] += _value_size(value, groups)
    most = dict(held)
    for call, _ in plan.schedule.calls():
        group = groups[call.group]
        need = program_need(call.jaxpr, [v.axis for v in call.inputs], group.rows, call.donated, platform)
        leaves = {v for places in plan.schedule.leaves for v in places}
        elsewhere = held[call.group] - sum(_value_size(v, groups) for v in call.inputs if v in leaves)
        most[call.group] = max(most[call.group], need.peak + max(0, elsewhere))
    return {name: _with_sharded(plan, groups[name], size) for name, size in most.items()}


def _value_size(value: Value, groups: Mapping[str, Group]) -> int:
    if value.layout is not None:
        return value.bytes // value.layout.number
    return _size(value.variable, value.axis, groups[value.group].rows)


def _with_sharded(plan: Plan, group: Group, size: int) -> int:
    """Leaves that rules split are a part of themselves on each device."""
    saved = 0
    for leaf in plan.sharded:
        if leaf.group == group.name and leaf.layout.number > 1:
            whole = leaf.layout.shape
            width = 4
            saved += width * _product(whole) * (leaf.layout.number - 1) // leaf.layout.number
    return max(0, size - saved)


def _product(shape: Sequence[int]) -> int:
    found = 1
    for n in shape:
        found *= n
    return found
