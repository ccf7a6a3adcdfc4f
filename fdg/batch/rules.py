"""What each operation does with a batch axis: carries it along, consumes it, or needs it whole.

One rule an operation: (equation, axes of its operands, at least one of them not None) to what it takes and
gives. An operation without a rule needs its operands whole; nothing is guessed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fdg import jaxprs, keys

Axis = int | None


class Taken(NamedTuple):
    """What an operation does with its operands' axes.

    Attributes:
      axes: of its results.
      gathered: positions of operands that it needs whole, on every device.
      reduced: whether each device has a share of the results, and all of them add up.
      local: whether each device is best left alone with its part, because the partitioner would
        communicate for nothing.
    """

    axes: tuple[Axis, ...]
    gathered: tuple[int, ...] = ()
    reduced: bool = False
    local: bool = False


Rule = Callable[[Any, list[Axis]], Taken | None]  # None: it needs all its operands whole


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal; () of what has none."""
    return tuple(getattr(atom.aval, "shape", ()))


def first(found: Sequence[Axis]) -> Axis:
    """The first axis that is not None."""
    return next((axis for axis in found if axis is not None), None)


def _all(eqn: Any, axis: Axis, *gathered: int, reduced: bool = False) -> Taken:
    return Taken((axis,) * len(eqn.outvars), tuple(gathered), reduced)


def _same(eqn: Any, operands: list[Axis]) -> Taken | None:
    """Operands and results have one shape, or none, and one axis; operands split otherwise are gathered."""
    axis = first(operands)
    return _all(eqn, axis, *[i for i, a in enumerate(operands) if a not in (None, axis)])


def _except(*names: str) -> Rule:
    """Operations with special axes (`params[name]`), which need them whole: any other axis passes."""

    def rule(eqn: Any, operands: list[Axis]) -> Taken | None:
        special = next((eqn.params[name] for name in names if name in eqn.params), -1)
        rank = len(shape_of(eqn.invars[0]))
        gone = {a % rank for a in (special if isinstance(special, tuple | list) else (special,))}
        return None if any(axis in gone for axis in operands) else _same(eqn, operands)

    return rule


def _locally(rule: Rule) -> Rule:
    """For operations whose parts are independent though the partitioner does not know it."""

    def local(eqn: Any, operands: list[Axis]) -> Taken | None:
        taken = rule(eqn, operands)
        return taken and taken._replace(local=True)

    return local


def _matrices(eqn: Any, operands: list[Axis]) -> Taken | None:
    """Linear algebra on the last two axes."""
    if any(a is not None and a >= len(shape_of(v)) - 2 for a, v in zip(operands, eqn.invars, strict=True)):
        return None
    return _same(eqn, operands)


def _random_gamma(eqn: Any, operands: list[Axis]) -> Taken | None:
    """Keys in front, one for each row of the parameter."""
    return _same(eqn, operands) if operands[0] is not None and operands[1] in (None, operands[0]) else None


def _per_key(eqn: Any, operands: list[Axis]) -> Taken | None:
    """Key arrays keep their shape in front of what they are turned into."""
    return _all(eqn, operands[0]) if operands[0] is not None else None


def _reduce(eqn: Any, operands: list[Axis]) -> Taken | None:
    axis, gone = operands[0], eqn.params["axes"]
    if axis is None or axis in gone:
        return _all(eqn, None, reduced=True)
    return _all(eqn, axis - sum(a < axis for a in gone))


def _reduce_bits(eqn: Any, operands: list[Axis]) -> Taken | None:
    """XLA's all-reduce knows sums, products, minima and maxima, and of truth values `and` and `or` too."""
    taken = _reduce(eqn, operands)
    logical = eqn.invars[0].aval.dtype == bool and eqn.primitive.name != "reduce_xor"
    return taken if logical or not taken.reduced else None


def _arg_reduce(eqn: Any, operands: list[Axis]) -> Taken | None:
    return None if operands[0] in eqn.params["axes"] else _reduce(eqn, operands)


def _dot_general(eqn: Any, operands: list[Axis]) -> Taken | None:
    contracting, batch = eqn.params["dimension_numbers"]
    ranks = [len(shape_of(v)) for v in eqn.invars]

    def role(side: int) -> tuple[str, int] | None:
        """("sum", which contraction), ("out", which axis of the result)."""
        axis = operands[side]
        if axis is None:
            return None
        if axis in contracting[side]:
            return "sum", tuple(contracting[side]).index(axis)
        if axis in batch[side]:
            return "out", tuple(batch[side]).index(axis)
        free = [a for a in range(ranks[side]) if a not in contracting[side] and a not in batch[side]]
        left = ranks[0] - len(contracting[0]) - len(batch[0]) if side else 0
        return "out", len(batch[side]) + left + free.index(axis)

    return _product(eqn, role(0), role(1))


def _product(eqn: Any, left: tuple[str, int] | None, right: tuple[str, int] | None) -> Taken:
    """Two operands whose axes stay in the result or are summed over; of two that differ, one is gathered."""
    gathered: tuple[int, ...] = ()
    if left and right and left != right:
        larger = jaxprs.bytes_of(eqn.invars[1].aval) > jaxprs.bytes_of(eqn.invars[0].aval)
        gathered, left, right = ((0,), None, right) if larger else ((1,), left, None)
    kind, axis = left or right  # type: ignore[misc]
    return Taken((None,), gathered, True) if kind == "sum" else Taken((axis,), gathered)


def _conv_general_dilated(eqn: Any, operands: list[Axis]) -> Taken | None:
    lhs, rhs, out = eqn.params["dimension_numbers"]
    if eqn.params["batch_group_count"] != 1 or (
        eqn.params["feature_group_count"] != 1 and operands != [lhs[0], None]
    ):
        return None
    sides = ({lhs[0]: ("out", out[0]), lhs[1]: ("sum", 0)}, {rhs[0]: ("out", out[1]), rhs[1]: ("sum", 0)})
    roles = [None if a is None else side.get(a, ()) for a, side in zip(operands, sides, strict=True)]
    return None if () in roles else _product(eqn, *roles)  # type: ignore[arg-type]


def _broadcast_in_dim(eqn: Any, operands: list[Axis]) -> Taken | None:
    return _all(eqn, eqn.params["broadcast_dimensions"][operands[0]])


def _transpose(eqn: Any, operands: list[Axis]) -> Taken | None:
    return _all(eqn, tuple(eqn.params["permutation"]).index(operands[0]))


def _squeeze(eqn: Any, operands: list[Axis]) -> Taken | None:
    axis, gone = operands[0], eqn.params["dimensions"]
    return None if axis in gone else _all(eqn, axis - sum(a < axis for a in gone))


def _unstack(eqn: Any, operands: list[Axis]) -> Taken | None:
    axis, gone = operands[0], eqn.params["axis"]
    return None if axis is None or axis == gone else _all(eqn, axis - (gone < axis))


def _stack(eqn: Any, operands: list[Axis]) -> Taken | None:
    taken, new = _same(eqn, operands), eqn.params["axis"]
    return taken and taken._replace(axes=tuple(a + (new <= a) for a in taken.axes if a is not None))


def _reshape(eqn: Any, operands: list[Axis]) -> Taken | None:
    """The batch stays the batch where it is the slowest axis of what it is merged into or split from."""
    axis = operands[0]
    if axis is None or eqn.params.get("dimensions") is not None:
        return None
    before = math.prod(shape_of(eqn.invars[0])[:axis])
    ahead = 1
    for position, size in enumerate(shape_of(eqn.outvars[0])):
        if ahead == before and size > 1:
            return _all(eqn, position)
        ahead *= size
    return None


def _kept_whole(eqn: Any, operands: list[Axis]) -> Taken | None:
    """Slices, updates of slices, padding: an axis passes whose length they do not touch."""
    axis = first(operands)
    arrays = [v for v in (*eqn.invars, *eqn.outvars) if len(shape_of(v)) == len(shape_of(eqn.invars[0]))]
    if axis is None or len({shape_of(v)[axis] for v in arrays if shape_of(v)}) != 1:
        return None
    if eqn.primitive.name == "pad" and tuple(eqn.params["padding_config"][axis]) != (0, 0, 0):
        return None
    return _same(eqn, operands)


def _window(eqn: Any, operands: list[Axis]) -> Taken | None:
    """Windows that move over other axes."""
    axis = first(operands)
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    if axis is None or any(eqn.params.get(n) and eqn.params[n][axis] != 1 for n in names):
        return None
    return None if any(eqn.params["padding"][axis]) else _same(eqn, operands)


def _gather(eqn: Any, operands: list[Axis]) -> Taken | None:
    """Looking up rows of a split batch takes a share from every device; another axis passes."""
    (axis, index), numbers = operands, eqn.params["dimension_numbers"]
    rank, sizes = len(shape_of(eqn.outvars[0])), eqn.params["slice_sizes"]
    of_index = [d for d in range(rank) if d not in numbers.offset_dims]  # axes of the indices, in the result
    if axis is None:
        return _all(eqn, of_index[index]) if index is not None and index < len(of_index) else None
    if axis in numbers.operand_batching_dims:
        at = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
        return _all(eqn, of_index[at], *([1] if index not in (None, at) else []))
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if axis not in gone and sizes[axis] == shape_of(eqn.invars[0])[axis]:
        kept = [d for d in range(len(sizes)) if d not in gone]
        return _all(eqn, numbers.offset_dims[kept.index(axis)], *([1] if index is not None else []))
    if index is not None and index < len(of_index):  # split indices into a split table
        return _all(eqn, of_index[index], 0)
    if axis in numbers.start_index_map and sizes[axis] == 1:
        return _all(eqn, None, reduced=True)
    return None


def _scatter(eqn: Any, operands: list[Axis]) -> Taken | None:
    """The reverse of a look-up: rows of a split batch that are added to a shared table are added up."""
    numbers = eqn.params["dimension_numbers"]
    shape, updates = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    of_index = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [d for d in range(len(shape)) if d not in gone]

    def fits(*expected: Axis) -> bool:
        return all(a is None or a == e for a, e in zip(operands, expected, strict=True))

    for d in range(len(shape)):
        if d in numbers.operand_batching_dims:
            at = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(d)]
            if fits(d, at, of_index[at]):
                return _all(eqn, d)
        elif d in window:
            at = numbers.update_window_dims[window.index(d)]
            if updates[at] == shape[d] and fits(d, None, at):
                return _all(eqn, d)
    adds = eqn.primitive.name in ("scatter-add", "scatter-min", "scatter-max")
    for at, d in enumerate(of_index):
        if adds and fits(None, at, d):
            return _all(eqn, None, reduced=True)
    return None


def draws_from_the_batch(jaxpr: Any) -> bool:
    """Whether an open jaxpr draws, at any depth, for one key of a batch by what other keys are in it."""
    return any(
        keys.draws_from_the_batch(eqn) or any(draws_from_the_batch(body.jaxpr) for body in jaxprs.bodies(eqn))
        for eqn in jaxpr.eqns
    )


def creates(eqn: Any, axis: Axis) -> bool:
    """Whether an operation on shared values makes each part of its result on its own."""
    name = eqn.primitive.name
    if keys.draws_from_the_batch(eqn):
        return False
    if name in ("random_bits", "random_split"):
        return axis is not None and axis >= len(shape_of(eqn.invars[0]))
    return name == "iota" or (name == "broadcast_in_dim" and axis not in eqn.params["broadcast_dimensions"])


_ELEMENTWISE = """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh digamma
    div eq eq_to erf
    erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le le_to lgamma log log1p log2
    logistic lt lt_to max min mul name ne neg nextafter not one_minus_square or population_count pow
    random_clone random_fold_in real reduce_precision rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
    threefry2x32 xor""".split()

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _same),
    "random_gamma": _locally(_random_gamma),
    # Loops over all elements, once they are lowered.
    **dict.fromkeys(
        "igamma igammac igamma_grad_a lgamma_grad polygamma random_gamma_grad regularized_incomplete_beta "
        "zeta".split(),
        _locally(_same),
    ),
    **dict.fromkeys(
        "reduce_sum reduce_max reduce_min reduce_prod".split(), _reduce
    ),
    **dict.fromkeys("reduce_and reduce_or reduce_xor".split(), _reduce_bits),
    **dict.fromkeys(("argmax", "argmin"), _arg_reduce),
    **dict.fromkeys("slice dynamic_slice dynamic_update_slice pad".split(), _kept_whole),
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp split".split(), _except("axis")),
    **dict.fromkeys(("concatenate", "sort"), _except("dimension")),
    "rev": _except("dimensions"),
    "top_k": _locally(_except("axis")),  # the last axis where there is no such parameter
    **dict.fromkeys("cholesky eigh lu qr svd triangular_solve".split(), _locally(_matrices)),
    **dict.fromkeys(
        "reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add".split(), _window
    ),
    "dot_general": _dot_general,
    "conv_general_dilated": _conv_general_dilated,
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "stack": _stack,
    "unstack": _unstack,
    "gather": _gather,
    **dict.fromkeys("scatter scatter-add scatter-mul scatter-min scatter-max".split(), _scatter),
    **dict.fromkeys("random_bits random_split random_unwrap random_wrap random_seed".split(), _per_key),
    "optimization_barrier": lambda eqn, operands: Taken(tuple(operands)),
}
