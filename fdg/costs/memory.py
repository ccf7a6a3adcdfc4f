"""Peak memory of a device: what XLA will set aside for a program, worked out from its jaxpr.

    arguments + results that take over no argument + temporaries

Which values become arrays, and in which order, says `buffers`. Each lives from where it is made to where it
is read last; a loop's body has its own arrays on top of what is alive around it, and its results are written
over what it carries. The program that is compiled draws its random numbers ahead of its loops
(`lowering.draws`), and what they are counted by is there as long as the loops run.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.batch.flow import Flow
from fdg.batch.follow import follow
from fdg.costs.buffers import IN_PLACE, TILES, Program, Step, program_of
from fdg.costs.compiled import HERE, Target, programs
from fdg.lowering.tiles import on_one_device, tiles_of
from fdg.placing.plan import Plan
from fdg.placing.policy import Group
from fdg.placing.scheduling.schedule import Value
from fdg.recall import Recall
from fdg.running import metrics


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes of a program on one device.

    Attributes:
      arguments: that it is given.
      results: that take over no argument's memory.
      temporaries: besides.
      shared: of the temporaries, what agents that are mapped together have one of: positions of random draws.
    """

    arguments: int
    results: int
    temporaries: int
    shared: int = 0

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
    repeated: bool = False,
) -> Need:
    """Of a program.

    Args:
      jaxpr: open or closed.
      axes: the batch axis of each input.
      devices: that the batch is split over.
      donated: inputs whose memory results may take over.
      platform: of the devices, for XLA orders operations otherwise on each.
      repeated: whether the program is a loop over the jaxpr.
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
    counters = 2 * _WORD * sum(_counted(opened, flow, devices, repeated).values())
    return Need(arguments, max(0, made - room), temporaries + counters, counters)


_WORD = 4  # bytes


def _counted(jaxpr: core.Jaxpr, flow: Flow | None, devices: int, in_loop: bool) -> dict[tuple[int, ...], int]:
    """Shapes of what a key is asked for in loops: threefry hashes positions, which XLA writes down before
    the loops, as two words each. With each shape, how many positions a device has.
    """
    found: dict[tuple[int, ...], int] = {}
    steps = [None] * len(jaxpr.eqns) if flow is None else flow.equations
    for eqn, step in zip(jaxpr.eqns, steps, strict=True):
        shape = eqn.params.get("shape")
        if in_loop and shape and eqn.primitive.name in ("random_bits", "random_split"):
            is_split = step is not None and step.results[0] is not None
            found[tuple(shape)] = math.prod(shape) // (devices if is_split else 1)
        bodies = jaxprs.bodies(eqn)
        flows = step.bodies if step is not None and step.bodies else [None] * len(bodies)
        for body, inner in zip(bodies, flows, strict=True):
            in_body = in_loop or eqn.primitive.name in ("scan", "while")
            found |= _counted(body.jaxpr, inner, devices, in_body)
    return found


def _padded(axes: Sequence[int | None], jaxpr: core.Jaxpr) -> list[int | None]:
    return [*axes, *[None] * (len(jaxpr.invars) - len(axes))]


def _size(v: Any, axis: int | None, devices: int) -> int:
    if jaxprs.is_literal(v) or not hasattr(v.aval, "dtype"):
        return 0
    return jaxprs.bytes_of(v.aval) // (devices if axis is not None else 1)


_MOST_KNOWN = 10_000
_PLACED = 120
# Of threefry: it makes two words for each that is wanted, in a loop that XLA has two copies of.
_WORDS = 4


class _Span(NamedTuple):
    """An array from one moment to another."""

    begin: int
    end: int
    size: int
    what: str = ""


_Spans = tuple[Sequence[_Span], int]


@functools.lru_cache(maxsize=32)
def _lives(devices: int, on_cpu: bool) -> "_Lives":
    """The one of a number of devices: what is known of a helper serves many plans."""
    return _Lives(devices, on_cpu)


class _Lives:
    """Peaks of jaxprs, each looked at once."""

    def __init__(self, devices: int, on_cpu: bool):
        self.devices, self.on_cpu = devices, on_cpu
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

    def _inside(self, step: Step) -> list[_Spans]:
        """Of the bodies of a step."""
        if step.name == TILES:
            (flow,), tiles = step.flows, tiles_of(step.eqn)
            assert flow is not None and tiles is not None
            return [_lives(1, self.on_cpu).spans(on_one_device(flow, self.devices, tiles), None)]
        flows = step.flows or [None] * len(step.bodies)
        return [self.spans(body.jaxpr, flow) for body, flow in zip(step.bodies, flows, strict=True)]

    def _spans(self, jaxpr: core.Jaxpr, flow: Flow | None) -> _Spans:
        program = _program(jaxpr, flow, self.on_cpu, self.devices)
        given = set(jaxprs.variables(program.outputs))
        found: list[_Span] = []
        made: dict[Any, tuple[int, int, str]] = {}  # where each array begins, its bytes, and what makes it
        ends: dict[Any, int] = {}
        now = 0
        for step in program.steps:
            over = step.joins or step.name in IN_PLACE
            sizes = {_size(v, axis, self.devices) for v, axis in step.makes}
            length = 2
            for spans, moments in self._inside(step):  # one after another
                begin = now + length - 2
                found += [_Span(begin + one.begin, begin + one.end, one.size, one.what) for one in spans]
                length += moments
            carried = {start: v for v, start in reversed(step.carried) if start in made}
            for v in step.reads:
                if v in made:  # what is computed element by element is written over what it read
                    ends[v] = now if v in carried or (over and made[v][1] in sizes) else now + length
            rows = _rows(step)
            for v, axis in step.makes:
                begin = now + (1 if over else 0)
                if v in rows:
                    begin = 0  # they begin as zeros, which wait for nothing
                if step.name == TILES and axis is None:
                    begin = now + length - 1  # sums of all devices, after the last tile
                if step.name in ("random_bits", "random_split"):
                    begin = now + length
                    words = _size(v, axis, self.devices) // (2 if step.name == "random_split" else 1)
                    found += [_Span(now, now + length, words, "hashing")] * _WORDS
                if v in program.arrays and v not in given:
                    made[v] = begin, _size(v, axis, self.devices), step.name
            now += length
        found += [
            _Span(begin, ends[v], size, what)
            for v, (begin, size, what) in made.items()
            if ends.get(v, -1) >= begin
        ]
        return found, now


def _rows(step: Step) -> set[Any]:
    """The results of a scan that have a row for each trip."""
    if step.name != "scan":
        return set()
    kept = [k for k, v in enumerate(step.eqn.outvars) if not isinstance(v, core.DropVar)]
    return {v for k, (v, _) in zip(kept, step.makes, strict=True) if k in step.bodies[0].stacked}


_PROGRAMS: Recall[Program] = Recall(most=_MOST_KNOWN)


def _program(jaxpr: core.Jaxpr, flow: Flow | None, on_cpu: bool, devices: int) -> Program:
    """Of a jaxpr for all numbers of devices whose flow it is; that is kept by what is made of it."""
    of_library = devices if on_cpu else 1  # which alone asks for the size of a part
    how = id(flow), on_cpu, of_library
    return _PROGRAMS(jaxpr, how, lambda: program_of(jaxpr, flow, on_cpu, of_library))


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


def program_needs(plan: Plan, target: Target = HERE) -> dict[str, Need]:
    """Of each program of a plan, by its name; leaves that rules split count whole. Nothing is compiled.

    Args:
      plan: any.
      target: the devices that it is for.
    """
    found = {}
    for one in programs(plan, target):
        need = program_need(one.jaxpr, one.axes, one.rows, one.donated, target.platform, one.repeated)
        kept = 0
        if one.repeated:
            records = jax.tree.leaves(plan.graph.metrics)
            kept = metrics.capacity(records * one.agents) * sum(map(jaxprs.bytes_of, records))
        copied = need.arguments if one.together < one.agents else 0  # states of those that are trained
        found[one.name] = Need(
            one.agents * need.arguments,
            one.agents * (need.results + kept),
            one.together * (need.temporaries - need.shared + copied) + need.shared,
        )
    return found


def plan_memory(plan: Plan, target: Target = HERE) -> dict[str, int]:
    """Bytes that each device of each group needs at its peak, for a plan; nothing is compiled.

    It is the program that needs most, and what of the state is on the group meanwhile.

    Args:
      plan: any.
      target: the devices that it is for.
    """
    groups = {group.name: group for group in plan.groups}
    needs = program_needs(plan, target)
    if plan.schedule is None:
        (group,), (need,) = plan.groups, needs.values()
        return {group.name: _with_sharded(plan, group, need.peak)}
    held: dict[str, int] = dict.fromkeys(groups, 0)
    leaves = {value for places in plan.schedule.leaves for value in places}
    for value in leaves:
        held[value.group] += _value_size(value, groups)
    most = dict(held)
    for call, _ in plan.schedule.calls():
        elsewhere = held[call.group] - sum(_value_size(v, groups) for v in call.inputs if v in leaves)
        most[call.group] = max(most[call.group], needs[call.name].peak + max(0, elsewhere))
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
            saved += width * math.prod(whole) * (leaf.layout.number - 1) // leaf.layout.number
    return max(0, size - saved)
