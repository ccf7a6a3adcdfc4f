"""The batch axis of each leaf of the state, from the borders of the fragments that read it."""

from typing import Any

from jax.extend import core

from fdg import jaxprs
from fdg.batch import follow as batch_flow
from fdg.fragment import boundary_p


def state_axes(jaxpr: Any, num_leaves: int) -> tuple[int | None, ...]:
    """Batch axes of the first inputs of a closed jaxpr, which are the state's leaves; None without a batch.

    A leaf has the axis that the first fragment to read it declares; one that no fragment reads, the axis that
    it comes back with.
    """
    inside = jaxprs.open_jaxpr(jaxpr)
    axes = tuple(_declared(inside, v) for v in inside.invars[:num_leaves])
    for _ in range(len(axes) + 1):
        ends = batch_flow.axes(jaxpr, axes)
        later = tuple(end if axis is None else axis for axis, end in zip(axes, ends, strict=False))
        if later == axes:
            break
        axes = later
    return axes


def _declared(jaxpr: core.Jaxpr, variable: Any) -> int | None:
    """The batch axis that the first fragment to read a variable declares; loops and calls are looked into."""
    for eqn in jaxpr.eqns:
        for position, operand in enumerate(eqn.invars):
            if operand is not variable:
                continue
            if eqn.primitive is boundary_p and eqn.params["axis"] is not None:
                return eqn.params["axis"]
            for body in jaxprs.bodies(eqn):
                if position not in body.operands:
                    continue
                at = body.operands.index(position)
                axis = _declared(body.jaxpr, body.jaxpr.invars[at])
                if axis is not None:
                    return axis + 1 if at in body.sliced else axis
    return None
