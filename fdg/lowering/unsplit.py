"""Dimensions along which XLA is not to split an operation, where parameters are split over `model`.

Its partitioner gets some of them wrong (jaxlib 0.10.2). A convolution whose windows move over a dimension
that is split over `model` alone is added up over all devices: it comes out multiplied by the rows of the
batch. Of a reduction by a function of the user's own it makes an exchange that it cannot carry out. Such
dimensions are made whole first; along all others it may split as it likes.
"""

from collections.abc import Mapping
from typing import Any

from fdg import jaxprs
from fdg.batch.flow import EquationFlow
from fdg.batch.rules.result import shape_of

Dimensions = Mapping[int, tuple[int, ...]]
"""By the position of an operand or a result."""


def unsplit(step: EquationFlow) -> tuple[Dimensions, Dimensions]:
    """The dimensions of operands, and of results, that are to be whole on every device, but for the batch."""
    eqn = step.eqn
    if step.bodies or step.local:
        return {}, {}
    arrays = [i for i, v in enumerate(eqn.invars) if shape_of(v) and not jaxprs.is_literal(v)]
    match eqn.primitive.name:
        case "conv_general_dilated":
            grouped = max(eqn.params["feature_group_count"], eqn.params["batch_group_count"]) > 1
            specs = eqn.params["dimension_numbers"]
            lhs, rhs, out = (tuple(spec if grouped else spec[2:]) for spec in specs)
            return {0: lhs, 1: rhs}, {0: out}
        case "reduce":
            return dict.fromkeys(arrays, tuple(eqn.params["dimensions"])), {}
        case name if name.startswith(("reduce_window", "select_and_")):
            moved = _moved(eqn)
            return dict.fromkeys(arrays, moved), dict.fromkeys(range(len(eqn.outvars)), moved)
    return {}, {}


def _moved(eqn: Any) -> tuple[int, ...]:
    """The dimensions that a window moves over."""
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    sizes = [eqn.params[name] for name in names if eqn.params.get(name)]
    padding = eqn.params["padding"]
    return tuple(d for d in range(len(padding)) if any(padding[d]) or any(size[d] != 1 for size in sizes))
