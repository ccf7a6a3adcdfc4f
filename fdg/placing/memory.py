"""Estimates the peak memory of a device from jaxprs, by liveness analysis with a model of XLA's fusion.

    p = x @ w           an array
    h = tanh(p) + 1     one array: the tanh is fused into the sum
    s = sum(h * h)      one number: h * h is fused into the sum

A program needs memory for its arguments, for results that do not reuse a donated argument, and for
temporaries, from their definition to their last use. The result of an elementwise operation needs no array if
only one operation, also elementwise, reads it. A loop needs the arrays of one trip. Nothing is compiled here;
`Engine.memory` has the bytes that XLA reports.
"""

import collections
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from fdg import jaxprs
from fdg.batch.flow import MeshFlows, flows_of_bodies, results_of, steps_at
from fdg.batch.follow import follow_mesh, follow_rows
from fdg.identity_cache import IdentityCache
from fdg.jaxprs.classes import PUTS, VIEWS, class_of
from fdg.placing.layout import MODEL, Layout, model_axis
from fdg.placing.scheduling.schedule import Call, Move, Schedule, Step, Value, defs, uses
from fdg.rowwise import rowwise_p

_CONTROL = frozenset({"scan", "while", "cond", "custom_linear_solve"})  # not inlined, unlike calls
_FUSED_CLASSES = frozenset({"elementwise", "transcendental", "special"})
# XLA fuses these into their readers, like elementwise operations.
_REARRANGING = frozenset("transpose slice rev pad concatenate stack unstack tile dynamic_slice split".split())
_IN_PLACE = _CONTROL | PUTS | {"dynamic_update_slice"}  # these may reuse an operand's buffer
_HASH_ARRAYS = 4  # the number of uint32 arrays that threefry needs for one array of random bits
_MAX_CACHED = 10_000  # the maximum number of cached peaks


class _Operation(NamedTuple):
    """An equation of an inlined jaxpr, such as a product or a loop."""

    operands: tuple[Any, ...]  # without literals
    results: tuple[tuple[Any, int], ...]  # (variable, bytes on a device)
    is_fusible: bool  # True if XLA can fuse it into its reader: it is elementwise, a view, or rearranges
    is_in_place: bool  # True if its results may overwrite its operands
    inner_bytes: int  # temporary bytes that it needs while it runs, besides operands and results


def program_bytes(
    jaxpr: Any,
    axes: Sequence[int | None],
    devices: int,
    donated: Sequence[int] = (),
    layouts: Mapping[int, Layout] | None = None,
) -> int:
    """The peak bytes of one device while a program runs.

    `axes` are the batch axes of the first inputs; further inputs are replicated. `donated` are the positions
    of donated inputs. `layouts` are the layouts of sharded inputs by position; outputs at these positions
    have the same layouts.
    """
    body, layouts = jaxprs.open_jaxpr(jaxpr), layouts or {}
    input_layouts = [layouts.get(i) for i in range(len(body.invars))]
    estimator, flows = _estimator_and_flows(body, axes, devices, input_layouts)
    output_axes = [None] * len(body.outvars) if flows[0] is None else flows[0].outputs
    input_axes = [*axes, *[None] * (len(body.invars) - len(axes))]
    input_bytes = [
        _bytes_on_device(v, axis, devices, layouts.get(i))
        for i, (v, axis) in enumerate(zip(body.invars, input_axes, strict=True))
    ]
    output_bytes = [
        0 if jaxprs.is_literal(v) else _bytes_on_device(v, axis, devices, layouts.get(i))
        for i, (v, axis) in enumerate(zip(body.outvars, output_axes, strict=True))
    ]
    constants = sum(_bytes_on_device(v, None, 1) for v in body.constvars)
    results = max(0, sum(output_bytes) - sum(input_bytes[i] for i in donated))
    return constants + sum(input_bytes) + results + estimator.peak(body, flows)


def _estimator_and_flows(
    jaxpr: core.Jaxpr, axes: Sequence[int | None], devices: int, layouts: Sequence[Layout | None]
) -> tuple["_PeakEstimator", MeshFlows]:
    """An estimator of a jaxpr's temporaries, and the flows that it needs.

    Arrays with the shape of a sharded parameter, such as its gradient, are assumed to be sharded like it.
    Other arrays that follow from parameters split over `model`, such as the keys of attention heads, are
    split likewise.
    """
    split = frozenset(layout for layout in layouts if layout is not None and layout.num_parts > 1)
    estimator = _PeakEstimator(devices, split)
    return estimator, follow_mesh(jaxpr, axes, devices, list(map(model_axis, layouts)), estimator.model)


def _bytes_on_device(variable: Any, axis: int | None, devices: int, layout: Layout | None = None) -> int:
    """The bytes of a device's part of an array."""
    if not hasattr(variable.aval, "dtype"):
        return 0
    layout = layout or Layout.of_batch(variable.aval.shape, axis, devices)
    return jaxprs.bytes_of(variable.aval) // layout.num_parts


@functools.lru_cache(maxsize=32)  # many plans share functions
class _PeakEstimator:
    """Computes peak bytes of jaxprs on one device; `layouts`: see `_estimator_and_flows`."""

    def __init__(self, devices: int, layouts: frozenset[Layout]):
        self.devices, self.layout_by_shape = devices, {layout.shape: layout for layout in layouts}
        self.model = max((dict(layout.mesh).get(MODEL, 1) for layout in layouts), default=1)
        self._cache: IdentityCache[int] = IdentityCache(max_entries=_MAX_CACHED)

    def peak(self, jaxpr: core.Jaxpr, flows: MeshFlows) -> int:
        """The peak bytes of a jaxpr's intermediate values, without outputs."""

        def compute() -> int:
            operations: list[_Operation] = []
            outputs = self._inline(jaxpr, flows, {}, operations)
            return _peak(operations, frozenset(jaxprs.variables(outputs)))

        return self._cache(jaxpr, flows, compute)

    def _inline(
        self, jaxpr: core.Jaxpr, flows: MeshFlows, names: dict[Any, Any], operations: list[_Operation]
    ) -> list[Any]:
        """Appends the operations of a jaxpr with calls inlined; returns the names of its outputs.

        `names` maps each variable to a name, which is unique even if a jaxpr is inlined twice. A view has the
        name of its array.
        """
        for i, eqn in enumerate(jaxpr.eqns):
            reads, bodies = jaxprs.renamed(eqn.invars, names), jaxprs.bodies(eqn)
            steps = steps_at(flows, i)
            known = [step for step in steps if step is not None]
            is_rowwise = eqn.primitive is rowwise_p and bool(known)
            if is_rowwise or not all(step.bodies for step in known):
                bodies = ()
            inner_flows = flows_of_bodies(steps, len(bodies)) if bodies else []
            if bodies and eqn.primitive.name not in _CONTROL:
                body = bodies[0]
                inner_names = {v: reads[k] for v, k in zip(body.jaxpr.invars, body.operands, strict=True)}
                outputs = self._inline(body.jaxpr, inner_flows[0], inner_names, operations)
                names.update((v, outputs[j]) for v, j in zip(eqn.outvars, body.results, strict=False))
                continue
            if _is_view(eqn):
                names.update(zip(eqn.outvars, reads, strict=True))
                continue
            new_names: list[tuple[Any, Any]] = [(v, object()) for v in eqn.outvars]
            names.update(new_names)
            results = [
                (new, self._bytes(v, *axes))
                for (v, new), axes in zip(new_names, results_of(steps, len(eqn.outvars)), strict=True)
                if not isinstance(v, core.DropVar)
            ]
            inner_peaks = (self.peak(b.jaxpr, f) for b, f in zip(bodies, inner_flows, strict=True))
            inner_peak = max(inner_peaks, default=0)
            if is_rowwise:
                inner_peak = self.peak(*follow_rows(eqn, steps, self.devices, self.model))
            name = eqn.primitive.name
            if name in ("random_bits", "random_split"):
                inner_peak = _HASH_ARRAYS * sum(size for _, size in results)
            is_fusible = name not in _CONTROL and (
                class_of(name) in _FUSED_CLASSES or name in VIEWS or name in _REARRANGING
            )
            operands = tuple(jaxprs.variables(reads))
            operations.append(_Operation(operands, tuple(results), is_fusible, name in _IN_PLACE, inner_peak))
        return jaxprs.renamed(jaxpr.outvars, names)

    def _bytes(self, variable: Any, axis: int | None, model_axis: int | None) -> int:
        """The bytes of a device's part of an intermediate value."""
        layout = self.layout_by_shape.get(getattr(variable.aval, "shape", ()))
        split = _bytes_on_device(variable, axis, self.devices) // (1 if model_axis is None else self.model)
        return split if layout is None else min(split, _bytes_on_device(variable, None, 1, layout))


def _is_view(eqn: core.JaxprEqn) -> bool:
    """Whether each result needs no memory, because it is an operand under another shape."""
    if eqn.primitive.name not in VIEWS or len(eqn.invars) != len(eqn.outvars):
        return False
    pairs = zip(eqn.invars, eqn.outvars, strict=True)
    return all(
        hasattr(a.aval, "dtype") and jaxprs.bytes_of(a.aval) == jaxprs.bytes_of(b.aval) for a, b in pairs
    )


def _peak(operations: Sequence[_Operation], returned: frozenset[Any]) -> int:
    """The peak bytes of the arrays that operations create, not counting the arrays `returned`."""
    needed, used_operations = set(returned), []
    for operation in reversed(operations):
        if any(v in needed for v, _ in operation.results):
            needed.update(operation.operands)
            used_operations.append(operation)
    operations = used_operations[::-1]
    readers = collections.Counter(v for operation in operations for v in set(operation.operands))
    stored = {v for v, count in readers.items() if count > 1} | returned  # values that need an array
    stored = stored.union(*(operation.operands for operation in operations if not operation.is_fusible))
    sources: dict[Any, tuple[Any, ...]] = {}  # for each fused value: the arrays that it is computed from
    unfused: list[tuple[_Operation, tuple[Any, ...]]] = []
    last_use: dict[Any, int] = {}
    for operation in operations:
        reads = tuple(dict.fromkeys(array for v in operation.operands for array in sources.get(v, (v,))))
        if operation.is_fusible and not any(v in stored for v, _ in operation.results):
            sources.update((v, reads) for v, _ in operation.results)
            continue
        last_use.update(dict.fromkeys(reads, len(unfused)))
        unfused.append((operation, reads))
    alive: dict[Any, int] = {}
    current = peak = 0
    for i, (operation, reads) in enumerate(unfused):
        dying = [v for v in reads if v in alive and last_use[v] == i]
        for v, size in operation.results:
            if v in returned or v not in last_use:
                continue
            donor = next((x for x in dying if alive.get(x) == size), None) if operation.is_in_place else None
            if donor is not None:
                current -= alive.pop(donor)
            alive[v] = size
            current += size
        peak = max(peak, current + operation.inner_bytes)
        current -= sum(alive.pop(v) for v in dying if v in alive)
    return peak


def peak_by_group(
    schedule: Schedule, sizes: Mapping[str, int], shared: Mapping[str, str] | None = None
) -> dict[str, int]:
    """The peak bytes on a device of each group while a schedule runs.

    `sizes` are the numbers of devices over which each group splits a batch. `shared` maps each group to a
    name for its devices: groups with the same name are on the same devices, so their bytes are added. The
    result is by these names; without `shared`, by group.
    """
    names = shared or {group: group for group in sizes}
    state_bytes: collections.Counter[str] = collections.Counter()
    for values in schedule.leaves:
        for value in values:
            state_bytes[names[value.group]] += _value_bytes(value, sizes)
    for _, value in schedule.constants:
        state_bytes[names[value.group]] += _value_bytes(value, sizes)
    peak = _step_peaks(schedule.steps, sizes, names)
    return {group: state_bytes[group] + peak[group] for group in dict.fromkeys(names.values())}


def _value_bytes(value: Value, sizes: Mapping[str, int]) -> int:
    return _bytes_on_device(value.variable, value.axis, sizes[value.group], value.layout)


def _step_peaks(
    steps: Sequence[Step], sizes: Mapping[str, int], names: Mapping[str, str]
) -> collections.Counter[str]:
    """The peak bytes of `peak_by_group` while steps run, in addition to the state and the constants."""
    last_use = {value: i for i, step in enumerate(steps) for value in uses(step)}
    alive: dict[Value, int] = {}
    # Donated leaves have negative bytes in `alive`, because the caller adds the bytes of all leaves.
    donated: set[Value] = set()
    peak: collections.Counter[str] = collections.Counter()
    for i, step in enumerate(steps):
        returned_leaves = [value for value in defs(step) if value in donated]
        alive.update((value, _value_bytes(value, sizes)) for value in defs(step) if value not in donated)
        current: collections.Counter[str] = collections.Counter()
        for value, size in alive.items():
            current[names[value.group]] += size
        if isinstance(step, Call):
            current[names[step.group]] += _call_bytes(step, alive, donated, sizes)
        elif isinstance(step, Move):
            if step.donates:  # leaves are moved one by one, so only one of them is stored twice
                current[names[step.source]] += _move_bytes(step, alive, donated, returned_leaves, sizes)
        else:
            current.update(_step_peaks(step.steps, sizes, names))
        peak |= current
        for value in list(alive):
            if last_use.get(value, len(steps)) <= i and value not in donated:
                del alive[value]
        for value in returned_leaves:
            del alive[value]
        donated.difference_update(returned_leaves)
    return peak


def _call_bytes(call: Call, alive: dict[Value, int], donated: set[Value], sizes: Mapping[str, int]) -> int:
    """Frees the inputs that a call donates; returns the bytes that its run needs in addition to `alive`."""
    devices, jaxpr = sizes[call.group], jaxprs.open_jaxpr(call.jaxpr)
    donated_bytes = [(call.inputs[i], _value_bytes(call.inputs[i], sizes)) for i in call.donated]
    reusable = sum(size for _, size in donated_bytes)
    for value, size in donated_bytes:
        if alive.pop(value, None) is None:
            alive[value] = -size
            donated.add(value)
    layouts = [value.layout if value.axis is None else None for value in call.inputs]
    axes = [value.axis for value in call.inputs]
    estimator, flows = _estimator_and_flows(jaxpr, axes, devices, layouts)
    return estimator.peak(jaxpr, flows) - min(reusable, sum(alive[value] for value in call.outputs))


def _move_bytes(
    move: Move,
    alive: dict[Value, int],
    donated: set[Value],
    returned_leaves: Sequence[Value],
    sizes: Mapping[str, int],
) -> int:
    """Marks the leaves that a move donates; returns the additional bytes while a leaf is stored twice."""
    leaves = [value for value in uses(move) if value not in alive]
    alive.update((value, -_value_bytes(value, sizes)) for value in leaves)
    donated.update(leaves)
    largest = max(_value_bytes(value, sizes) for value in leaves or returned_leaves)
    return largest - sum(_value_bytes(value, sizes) for value in leaves)
