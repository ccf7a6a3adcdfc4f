"""Following the batch axis through a jaxpr: where it goes, and where a sum over it makes devices talk.

The border of a fragment says which axis of each input is the batch. From there on each operation either
carries that axis along, or consumes it: a reduction over it, a matrix product that contracts it, a look-up
of its rows. Where the batch is split over devices, what consumes it has a result that all of them share,
and XLA's partitioner all-reduces exactly that result. So the bytes can be told without compiling.

An operation that no rule covers loses track of the axis (`None` from there on); nothing is guessed.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from fdg import jaxprs
from fdg.fragment import FragmentMark, boundary_p

Axis = int | None


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A result that the whole batch shares: `bytes` of it, made `calls` times by an operation."""

    primitive: str
    bytes: int
    calls: int


def reductions(jaxpr: Any, axes: Sequence[Axis] = ()) -> tuple[Reduction, ...]:
    """Where a jaxpr consumes its batch axis; bodies of fragments called in it are theirs to tell.

    Args:
      jaxpr: a fragment's body, whose border is marked, or a whole iteration.
      axes: the batch axes of its first inputs; those of a marked border are known without.
    """
    found: list[Reduction] = []
    _follow(jaxpr, [*axes, *[None] * (len(jaxpr.invars) - len(axes))], 1, found)
    return tuple(found)


def _follow(jaxpr: Any, inputs: list[Axis], calls: int, found: list[Reduction]) -> list[Axis]:
    """Axes of the outputs, given those of the inputs; appends what is reduced on the way."""
    axes: dict[Any, Axis] = dict(zip(jaxpr.invars, inputs, strict=True))

    def axis_of(atom: Any) -> Axis:
        return None if hasattr(atom, "val") else axes.get(atom)  # a literal has a value and no axis

    for eqn in jaxpr.eqns:
        operands = [axis_of(atom) for atom in eqn.invars]
        inner = jaxprs.bodies(eqn)
        if eqn.primitive is boundary_p:
            results: list[Axis] = [eqn.params["axis"]]
        elif FragmentMark.of(eqn) is not None:
            results = _follow(inner[0].jaxpr, operands, calls, [])  # only its axes
        elif inner:
            results = _follow_bodies(eqn, inner, operands, calls, found)
        elif all(axis is None for axis in operands):
            results = [None] * len(eqn.outvars)
        else:
            axis, consumed = _RULES.get(eqn.primitive.name, _elementwise)(eqn, operands)
            results = [axis] * len(eqn.outvars)
            if consumed:
                size = sum(jaxprs.bytes_of(v.aval) for v in eqn.outvars)
                found.append(Reduction(eqn.primitive.name, size, calls))
        axes.update(zip(eqn.outvars, results, strict=True))
    return [axis_of(atom) for atom in jaxpr.outvars]


def _follow_bodies(eqn: Any, inner: tuple, operands: list[Axis], calls: int, found: list) -> list[Axis]:
    """Through loops, branches and calls; a slice of a loop's input has one axis less, a stack one more."""
    results: list[Axis] = [None] * len(eqn.outvars)
    for body in inner:
        inputs = [operands[i] for i in body.operands]
        for i in body.sliced:
            axis = inputs[i]
            inputs[i] = None if not axis else axis - 1  # sliced along the batch itself: each trip has one row
        for _ in range(len(body.carry) + 1):  # an axis can reach one more carried value a round
            outputs = _follow(body.jaxpr, inputs, calls, [])
            changed = False
            for i, previous in body.carry:
                if inputs[i] is None and outputs[previous] is not None:
                    inputs[i], changed = outputs[previous], True
            if not changed:
                break
        outputs = _follow(body.jaxpr, inputs, calls * body.trips, found)
        for k, j in enumerate(body.results):
            axis = outputs[j]
            if axis is not None:
                results[k] = axis + 1 if k in body.stacked else axis
    return results


# --- one rule an operation: (equation, axes of its operands) -> (axis of its results, consumed?) ---

Rule = Callable[[Any, list[Axis]], tuple[Axis, bool]]


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _first(operands: list[Axis]) -> Axis:
    return next((axis for axis in operands if axis is not None), None)


def _elementwise(eqn: Any, operands: list[Axis]) -> tuple[Axis, bool]:
    """Operands and results of one shape keep their axis; what a rule is missing for loses it."""
    axis = _first(operands)
    position = operands.index(axis)
    same = all(_shape(v) == _shape(eqn.invars[position]) for v in eqn.outvars)
    return (axis if same else None), False


def _reduce(eqn: Any, operands: list[Axis]) -> tuple[Axis, bool]:
    axis, gone = _first(operands), eqn.params["axes"]
    if axis is None or axis in gone:
        return None, axis is not None
    return axis - sum(a < axis for a in gone), False


def _dot_general(eqn: Any, operands: list[Axis]) -> tuple[Axis, bool]:
    contracting, batch = eqn.params["dimension_numbers"]
    ranks = [len(_shape(v)) for v in eqn.invars[:2]]
    for side, axis in enumerate(operands[:2]):
        if axis is None:
            continue
        if axis in contracting[side]:
            return None, True
        if axis in batch[side]:
            return tuple(batch[side]).index(axis), False
        free = [a for a in range(ranks[side]) if a not in contracting[side] and a not in batch[side]]
        left = ranks[0] - len(contracting[0]) - len(batch[0]) if side else 0
        return len(batch[side]) + left + free.index(axis), False
    return None, False


def _broadcast_in_dim(eqn: Any, operands: list[Axis]) -> tuple[Axis, bool]:
    axis = operands[0]
    return (None if axis is None else eqn.params["broadcast_dimensions"][axis]), False


def _transpose(eqn: Any, operands: list[Axis]) -> tuple[Axis, bool]:
    return tuple(eqn.params["permutation"]).index(operands[0]), False


def _squeeze(eqn: Any, operands: list[Axis]) -> tuple[Axis, bool]:
    axis, gone = operands[0], eqn.params["dimensions"]
    return (None if axis is None or axis in gone else axis - sum(a < axis for a in gone)), False


def _reshape(eqn: Any, operands: list[Axis]) -> tuple[Axis, bool]:
    """The batch stays the batch where it is the slowest axis of what it is merged into or split from."""
    axis = operands[0]
    if axis is None:
        return None, False
    old, new = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    before = math.prod(old[:axis])
    ahead = 1
    for position, size in enumerate(new):
        if ahead == before and size > 1:
            return position, False
        ahead *= size
    return None, False


def _along(name: str) -> Rule:
    """Operations with one special axis (`params[name]`): any other axis passes."""

    def rule(eqn: Any, operands: list[Axis]) -> tuple[Axis, bool]:
        axis = _first(operands)
        return (None if axis == eqn.params[name] else axis), False

    return rule


def _sliced(eqn: Any, operands: list[Axis]) -> tuple[Axis, bool]:
    """Slices keep an axis that they keep whole."""
    axis = operands[0]
    if axis is None or _shape(eqn.invars[0])[axis] != _shape(eqn.outvars[0])[axis]:
        return None, False
    return axis, False


def _gather(eqn: Any, operands: list[Axis]) -> tuple[Axis, bool]:
    """Looking up rows of a split batch takes a share from every device; another axis passes."""
    axis, numbers = operands[0], eqn.params["dimension_numbers"]
    if axis is None:  # rows of a shared table, by split indices
        index = operands[1]
        offsets = set(numbers.offset_dims)
        free = [d for d in range(len(_shape(eqn.outvars[0]))) if d not in offsets]
        return (free[index] if index is not None and index < len(free) else None), False
    if axis in numbers.operand_batching_dims:
        return operands[1], False
    if axis in numbers.start_index_map:
        return None, True
    if axis in numbers.collapsed_slice_dims:
        return None, False
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(len(_shape(eqn.invars[0]))) if d not in gone]
    return numbers.offset_dims[kept.index(axis)], False


_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "reduce_sum",
            "reduce_max",
            "reduce_min",
            "reduce_prod",
            "reduce_and",
            "reduce_or",
            "argmax",
            "argmin",
        ),
        _reduce,
    ),
    **dict.fromkeys(("slice", "dynamic_slice", "pad"), _sliced),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    "concatenate": _along("dimension"),
    "sort": _along("dimension"),
    "dot_general": _dot_general,
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "gather": _gather,
    # Key arrays keep their shape in front of what they are turned into.
    **dict.fromkeys(
        ("random_bits", "random_split", "random_unwrap", "random_wrap", "random_fold_in"),
        lambda eqn, operands: (_first(operands), False),
    ),
}


def equation_axes(eqn: Any, operands: Sequence[Axis]) -> list[Axis]:
    import types

    named = {v: a for v, a in zip(eqn.invars, operands, strict=True) if not hasattr(v, "val")}
    fake = types.SimpleNamespace(invars=list(named), eqns=[eqn], outvars=eqn.outvars)
    return _follow(fake, list(named.values()), 1, [])


@dataclasses.dataclass(frozen=True)
class Communication:
    fragment: str | None
    kind: str
    bytes: int
    calls: int


def communication(jaxpr, axes):
    return tuple(Communication(None, "all-reduce", r.bytes, r.calls) for r in reductions(jaxpr, axes))
