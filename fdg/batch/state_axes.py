"""Infers the batch axis of each state leaf, from the borders of the fragments that read it."""

import collections
from typing import Any, TypeAlias

from jax.extend import core

from fdg import jaxprs
from fdg.batch.follow import follow
from fdg.fragment import boundary_p

Axes: TypeAlias = tuple[int | None, ...]  # the batch axis of each leaf or input; None without a batch


def state_axes(jaxpr: Any, num_leaves: int) -> Axes:
    """Batch axes of the state's leaves (the first inputs of a closed jaxpr); None for leaves without a batch.

    The first fragment that reads a leaf declares its axis. If no fragment reads the leaf, it has the axis of
    its next value.
    """
    body = jaxprs.open_jaxpr(jaxpr)
    axes, old_axes = _declared_axes(body, {})[:num_leaves], None
    while axes != old_axes:
        old_axes = axes
        outputs = follow(jaxpr, axes).outputs[:num_leaves]
        new_axes = [new if axis is None else axis for axis, new in zip(axes, outputs, strict=True)]
        axes = _copy_to_successors(body, new_axes)
    return axes


def _copy_to_successors(jaxpr: core.Jaxpr, axes: list[int | None]) -> Axes:
    """If an iteration moves a leaf's value to another leaf, as in a history, copies its axis to that leaf."""
    positions_of_next_value = collections.defaultdict(list)
    for i in range(len(axes)):
        positions_of_next_value[id(jaxpr.outvars[i])].append(i)
    pending = [i for i, axis in enumerate(axes) if axis is not None]
    while pending:
        leaf = pending.pop()
        for i in positions_of_next_value[id(jaxpr.invars[leaf])]:
            if axes[i] is None:
                axes[i] = axes[leaf]
                pending.append(i)
    return tuple(axes)


def _declared_axes(jaxpr: core.Jaxpr, cache: dict[core.Jaxpr, Axes]) -> Axes:
    """The axis that the first fragment to read each input declares, at any depth; `cache` is by jaxpr."""
    if jaxpr not in cache:
        axis_of: dict[Any, int] = {}
        for eqn in jaxpr.eqns:
            for position, axis in sorted(_axes_declared_by(eqn, cache).items()):
                if not jaxprs.is_literal(operand := eqn.invars[position]):
                    axis_of.setdefault(operand, axis)
        cache[jaxpr] = tuple(axis_of.get(v) for v in jaxpr.invars)
    return cache[jaxpr]


def _axes_declared_by(eqn: core.JaxprEqn, cache: dict[core.Jaxpr, Axes]) -> dict[int, int]:
    """The axes that an equation, or a fragment inside it, declares for its operands, by position."""
    if eqn.primitive is boundary_p:
        axis = eqn.params["axis"]
        return {} if axis is None else {0: axis}
    axes: dict[int, int] = {}
    for body in jaxprs.bodies(eqn):
        inner_axes = _declared_axes(body.jaxpr, cache)
        for i, (position, axis) in enumerate(zip(body.operands, inner_axes, strict=True)):
            if axis is not None:
                axes.setdefault(position, axis + 1 if i in body.sliced else axis)
    return axes
