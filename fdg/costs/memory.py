"""Peak memory of a device: what XLA will set aside for a program, worked out from its jaxpr.

    arguments + results that take over no argument + temporaries

XLA makes no array of an elementwise operation whose one reader is another operation of the same loop: so
those are left out here (`_written`). What is left lives from where it is made to where it is read last; a
loop's body has its own arrays on top of what is alive around it, and its results are written over what it
carries.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from fdg import jaxprs
from fdg.batch.flow import EquationFlow, Flow
from fdg.batch.follow import follow
from fdg.placing.plan import Plan
from fdg.placing.policy import Group
from fdg.placing.scheduling.schedule import Value
from fdg.profiling.work import VIEWS, class_of

_JOINS = frozenset({"elementwise", "transcendental"})  # classes of operations that their readers compute anew
_IN_PLACE = frozenset({"dynamic_update_slice", "scatter", "scatter-add"})


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
    jaxpr: Any, axes: Sequence[int | None], devices: int, donated: frozenset[int] = frozenset()
) -> Need:
    """Of a program.

    Args:
      jaxpr: open or closed.
      axes: the batch axis of each input.
      devices: that the batch is split over.
      donated: inputs whose memory results may take over.
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
    temporaries = _lives(devices).peak(opened, flow, frozenset(opened.outvars))
    return Need(arguments, max(0, made - room), temporaries)


def _padded(axes: Sequence[int | None], jaxpr: core.Jaxpr) -> list[int | None]:
    return [*axes, *[None] * (len(jaxpr.invars) - len(axes))]


def _size(v: Any, axis: int | None, devices: int) -> int:
    if jaxprs.is_literal(v) or not hasattr(v.aval, "dtype"):
        return 0
    return jaxprs.bytes_of(v.aval) // (devices if axis is not None else 1)


_MOST_KNOWN = 10_000


@functools.lru_cache(maxsize=32)
def _lives(devices: int) -> "_Lives":
    """The one of a number of devices: what is known of a helper serves many plans."""
    return _Lives(devices)


class _Lives:
    """Peaks of jaxprs, each looked at once."""

    def __init__(self, devices: int):
        self.devices = devices
        # Kept with what they are of, so that nothing else has the same id.
        self.known: dict[tuple[int, int], tuple[int, core.Jaxpr, Flow | None]] = {}

    def peak(self, jaxpr: core.Jaxpr, flow: Flow | None, kept: frozenset[Any]) -> int:
        """The most that is alive at once of what the equations make; outputs among `kept` are not counted."""
        key = id(jaxpr), id(flow)
        if key not in self.known:
            found = self._peak(jaxpr, flow, kept)
            if len(self.known) > _MOST_KNOWN:
                self.known.clear()
            self.known[key] = found, jaxpr, flow
        return self.known[key][0]

    def _peak(self, jaxpr: core.Jaxpr, flow: Flow | None, kept: frozenset[Any]) -> int:
        steps: Sequence[EquationFlow | None] = [None] * len(jaxpr.eqns) if flow is None else flow.equations
        inputs = {*jaxpr.invars, *jaxpr.constvars}
        root = _roots(jaxpr)
        last: dict[Any, int] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            for v in eqn.invars:
                if not jaxprs.is_literal(v):
                    last[root.get(v, v)] = i
        written = _written(jaxpr)
        alive: dict[Any, int] = {}
        most = now = 0
        for i, (eqn, step) in enumerate(zip(jaxpr.eqns, steps, strict=True)):
            inside = self._inside(eqn, step)
            axes = [None] * len(eqn.outvars) if step is None else step.results
            for v, axis in zip(eqn.outvars, axes, strict=True):
                if isinstance(v, core.DropVar) or v in kept or v not in written or root.get(v, v) is not v:
                    continue
                size = _size(v, axis, self.devices)
                if self._over_operand(eqn, v, i, last, inputs, root):
                    continue
                alive[v] = size
                now += size
            most = max(most, now + inside)
            for v in {root.get(v, v) for v in eqn.invars if not jaxprs.is_literal(v)} | set(eqn.outvars):
                if v in alive and last.get(v, -1) <= i:
                    now -= alive.pop(v)
        return most

    def _inside(self, eqn: core.JaxprEqn, step: EquationFlow | None) -> int:
        """What the bodies of an equation need besides its operands and results."""
        bodies = jaxprs.bodies(eqn)
        flows: Sequence[Flow | None] = (
            [None] * len(bodies) if step is None or not step.bodies else step.bodies
        )
        most = 0
        for body, flow in zip(bodies, flows, strict=True):
            # A row that is stacked is written into the stack, what is carried over what was carried.
            kept = frozenset(v for v in body.jaxpr.outvars if not jaxprs.is_literal(v))
            most = max(most, self.peak(body.jaxpr, flow, kept))
        return most

    def _over_operand(
        self,
        eqn: core.JaxprEqn,
        v: Any,
        i: int,
        last: Mapping[Any, int],
        inputs: set[Any],
        root: Mapping[Any, Any],
    ) -> bool:
        """Whether a result is written over an operand that nobody reads afterwards."""
        if eqn.primitive.name not in _IN_PLACE:
            return False
        first = eqn.invars[0]
        return (
            not jaxprs.is_literal(first) and root.get(first, first) not in inputs and last.get(first, i) <= i
        )


def _roots(jaxpr: core.Jaxpr) -> dict[Any, Any]:
    """Of each variable that is only another view of one, that one."""
    root: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in VIEWS and len(eqn.invars) == 1 and not jaxprs.is_literal(eqn.invars[0]):
            source, (result,) = eqn.invars[0], eqn.outvars
            if jaxprs.bytes_of(result.aval) == jaxprs.bytes_of(source.aval):
                root[result] = root.get(source, source)
    return root


def _written(jaxpr: core.Jaxpr) -> set[Any]:
    """The variables that become arrays: not those that their readers compute for themselves."""
    readers: dict[Any, list[core.JaxprEqn]] = {}
    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            if not jaxprs.is_literal(v):
                readers.setdefault(v, []).append(eqn)
    outputs = {v for v in jaxpr.outvars if not jaxprs.is_literal(v)}
    found: set[Any] = set()
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        joins = not jaxprs.bodies(eqn) and (
            class_of(name) in _JOINS
            or name in VIEWS
            or name in ("transpose", "slice", "rev", "pad", "concatenate")
        )
        for v in eqn.outvars:
            if isinstance(v, core.DropVar):
                continue
            if v in outputs or not joins or any(_needs_array(reader, v) for reader in readers.get(v, [])):
                found.add(v)
    return found


def _needs_array(eqn: core.JaxprEqn, v: Any) -> bool:
    """Whether a reader takes an operand as an array, and cannot compute it for itself."""
    if jaxprs.bodies(eqn):
        return True
    kind = class_of(eqn.primitive.name)
    return kind in ("product", "convolution", "sort", "linear algebra", "host") or (
        eqn.primitive.name in ("gather", "scatter", "scatter-add", "dynamic_update_slice", "dynamic_slice")
        and eqn.invars[0] is v
    )


def plan_memory(plan: Plan) -> dict[str, int]:
    """Bytes that each device of each group needs at its peak, for a plan; nothing is compiled."""
    groups = {group.name: group for group in plan.groups}
    if plan.schedule is None:
        (group,) = plan.groups
        agents = (plan.num_seeds or len(group)) // len(group) if plan.num_seeds is not None else 1
        rows = group.rows if plan.num_seeds is None else 1
        state = frozenset(range(len(plan.graph.state_axes)))
        axes = plan.graph.state_axes if plan.num_seeds is None else ()
        need = program_need(plan.graph.jaxpr, axes, rows, state)
        return {group.name: agents * _with_sharded(plan, group, need.peak)}
    held: dict[str, int] = dict.fromkeys(groups, 0)
    for places in plan.schedule.leaves:
        for value in places:
            held[value.group] += _value_size(value, groups)
    most = dict(held)
    for call, _ in plan.schedule.calls():
        group = groups[call.group]
        need = program_need(call.jaxpr, [v.axis for v in call.inputs], group.rows, call.donated)
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
