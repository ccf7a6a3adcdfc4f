"""Infers the batch axis of each state leaf, from the borders of the fragments that read it."""

import collections
from typing import Any, TypeAlias

from jax.extend import core

from fdg import jaxprs
from fdg.batch import follow as batch_flow
from fdg.fragment import boundary_p

Axes: TypeAlias = tuple[int | None, ...]


def state_axes(jaxpr: Any, num_leaves: int) -> Axes:
    """Batch axes of the state's leaves (the first inputs of a closed jaxpr); None for leaves without a batch.

    A leaf's axis is the one that the first fragment to read it declares. If no fragment reads it, its axis is
    that of its next value.
    """
    inside = jaxprs.open_jaxpr(jaxpr)
    axes, before = _declared(inside, {})[:num_leaves], None
    while axes != before:
        before = axes
        ends = batch_flow.axes(jaxpr, axes)
        later = (end if axis is None else axis for axis, end in zip(axes, ends, strict=False))
        axes = _copy_to_successors(inside, list(later))
    return axes


def _copy_to_successors(jaxpr: core.Jaxpr, axes: list[int | None]) -> Axes:
    """Copies axes to leaves whose next value is another leaf, as in a history of several leaves."""
    ends = collections.defaultdict(list)
    for i in range(len(axes)):
        ends[id(jaxpr.outvars[i])].append(i)
    known = [i for i, axis in enumerate(axes) if axis is not None]
    while known:
        leaf = known.pop()
        for i in ends[id(jaxpr.invars[leaf])]:
            if axes[i] is None:
                axes[i] = axes[leaf]
                known.append(i)
    return tuple(axes)


def _declared(jaxpr: core.Jaxpr, known: dict[core.Jaxpr, Axes]) -> Axes:
    """The axis that the first reading fragment declares for each input, also inside loops and calls.

    `known` caches results by jaxpr.
    """
    if jaxpr not in known:
        found: dict[Any, int] = {}
        for eqn in jaxpr.eqns:
            for position, axis in sorted(_declared_by(eqn, known).items()):
                if not jaxprs.is_literal(operand := eqn.invars[position]):
                    found.setdefault(operand, axis)
        known[jaxpr] = tuple(found.get(v) for v in jaxpr.invars)
    return known[jaxpr]


def _declared_by(eqn: core.JaxprEqn, known: dict[core.Jaxpr, Axes]) -> dict[int, int]:
    """The axis of each operand, by position, that an equation declares."""
    if eqn.primitive is boundary_p:
        axis = eqn.params["axis"]
        return {} if axis is None else {0: axis}
    found: dict[int, int] = {}
    for body in jaxprs.bodies(eqn):
        inside = _declared(body.jaxpr, known)
        for at, (position, axis) in enumerate(zip(body.operands, inside, strict=True)):
            if axis is not None:
                found.setdefault(position, axis + 1 if at in body.sliced else axis)
    return found
