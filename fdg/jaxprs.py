"""Reading and building jaxprs: what runs inside an equation, how often, and what feeds what.

Nothing is evaluated. What JAX's versions differ in stands in `fdg.jax_internals`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from fdg.jax_internals import HIGH_LEVEL, ONE_TYPE, ClosedJaxpr, lower_high_level
from fdg.recall import Recall


@dataclasses.dataclass(frozen=True)
class Body:
    """A jaxpr inside an equation, and how its variables are wired to the equation's.

    Attributes:
      jaxpr: the body.
      trips: how often it runs each time the equation does.
      exact: False where `trips` is only a guess (a while loop's 1) or a bound (a branch).
      operands: body input i holds the equation's input `operands[i]` (on the first trip).
      results: equation output k holds body output `results[k]`.
      stacked: the equation's outputs that stack one body output a trip.
      sliced: body inputs that hold a row, along axis 0, of the equation's input: another each trip.
      carry: body input i holds, after the first trip, body output `carry[i]` of the trip before.
    """

    jaxpr: core.Jaxpr
    trips: int
    exact: bool
    operands: tuple[int, ...]
    results: tuple[int, ...]
    stacked: frozenset[int] = frozenset()
    sliced: frozenset[int] = frozenset()
    carry: tuple[tuple[int, int], ...] = ()


def open_jaxpr(jaxpr: Any) -> core.Jaxpr:
    """The jaxpr of a closed one, or the open one itself."""
    return jaxpr.jaxpr if not ONE_TYPE and isinstance(jaxpr, ClosedJaxpr) else jaxpr


def with_jaxpr(closed: Any, jaxpr: Any) -> Any:
    """`closed`, with another jaxpr over the same constants, where it has any."""
    is_open = ONE_TYPE or not isinstance(closed, ClosedJaxpr)  # as the body of a `checkpoint` is
    return jaxpr if is_open else ClosedJaxpr(jaxpr, closed.consts)


def without_dead_code(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A closed jaxpr without what none of its outputs needs, in branches, loops and calls too.

    XLA drops the same but for some branches: a result of theirs that nobody reads would be made, exchanges
    included.
    """
    jaxpr = open_jaxpr(closed)
    jaxpr = _without_unread_constants(jaxpr) or jaxpr
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return with_jaxpr(closed, live)


def inputs_read(closed: ClosedJaxpr) -> list[bool]:
    """For each argument of a closed jaxpr, whether any of its outputs needs it."""
    jaxpr = open_jaxpr(closed)
    jaxpr = _without_unread_constants(jaxpr) or jaxpr
    _, read = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return list(read)


def _without_unread_constants(jaxpr: core.Jaxpr) -> core.Jaxpr | None:
    """With `while` loops given nothing that no trip reads, which JAX leaves to XLA; None if all are so."""
    eqns = [_reads_all(eqn) for eqn in jaxpr.eqns]
    return (
        None
        if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
        else jaxpr.replace(eqns=eqns)
    )


def _reads_all(eqn: core.JaxprEqn) -> core.JaxprEqn:
    eqn = with_new_bodies(eqn, [_without_unread_constants(body.jaxpr) for body in bodies(eqn)])
    if eqn.primitive.name != "while":
        return eqn
    closed, first, count = (eqn.params[key] for key in ("body_jaxpr", "cond_nconsts", "body_nconsts"))
    body = open_jaxpr(closed)
    carried = len(body.invars) - count
    all_of_it = [True] * len(body.outvars)
    live, read = partial_eval.dce_jaxpr(body, all_of_it, instantiate=[False] * count + [True] * carried)
    if all(read):
        return eqn
    kept = [*eqn.invars[:first], *itertools.compress(eqn.invars[first:], read)]
    params = {**eqn.params, "body_jaxpr": with_jaxpr(closed, live), "body_nconsts": sum(read[:count])}
    return eqn.replace(invars=kept, params=params)


@functools.cache
def _origin() -> Any:
    """What JAX wants to know of where a jaxpr comes from; it gives that to those that it traces itself."""
    traced = open_jaxpr(jax.make_jaxpr(lambda x: x)(0))
    return traced.replace(outvars=[]).debug_info  # without names for arguments and results


_jaxpr: Any = core.Jaxpr  # whose arguments differ from version to version


def build(
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    equations: Sequence[core.JaxprEqn],
    constvars: Sequence[Any] = (),
    constants: Sequence[Any] = (),
    checked: bool = True,
) -> ClosedJaxpr:
    """A closed jaxpr, checked unless it is only read; `constants` are the values of `constvars`."""
    effects = frozenset().union(*(eqn.effects for eqn in equations))
    parts = (list(constvars), list(inputs), list(outputs), list(equations), effects)
    held = {"consts": list(constants)} if ONE_TYPE else {}
    jaxpr = _jaxpr(*parts, debug_info=_origin(), **held)
    if checked:
        core.check_jaxpr(jaxpr)
    return jaxpr if ONE_TYPE else ClosedJaxpr(jaxpr, list(constants))


def constants_of(jaxpr: Any) -> Sequence[Any]:
    """The values of a closed jaxpr's constants, in the order of its `constvars`."""
    return getattr(jaxpr, "consts", None) or ()


def shapes_of(atoms: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """What a function of some variables or literals is traced with: weakly typed where they are."""
    avals = [v.aval for v in atoms]
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]


def is_literal(atom: Any) -> bool:
    """Whether an operand is a number written into the jaxpr, not a variable."""
    return isinstance(atom, core.Literal)


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """How many of a scan's inputs are constants, and how many are carried."""
    if "num_carry" in params:  # JAX 0.10
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()
    return len(list(constants)), len(list(carried))


_JAXPRS = (core.Jaxpr, ClosedJaxpr)


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, open or closed."""
    return isinstance(value, _JAXPRS)


def bodies(eqn: core.JaxprEqn) -> tuple[Body, ...]:
    """The jaxprs that run when `eqn` runs; empty for an ordinary operation."""
    params = eqn.params
    match eqn.primitive.name:
        case "scan":
            return (_scanned(open_jaxpr(params["jaxpr"]), params["length"], *scan_sizes(params)),)
        case "while":
            test, body = open_jaxpr(params["cond_jaxpr"]), open_jaxpr(params["body_jaxpr"])
            test_consts, body_consts = params["cond_nconsts"], params["body_nconsts"]
            carry = range(test_consts + body_consts, len(eqn.invars))
            return (
                Body(test, 1, False, operands=(*range(test_consts), *carry), results=()),
                Body(
                    body,
                    1,
                    False,
                    operands=(*range(test_consts, test_consts + body_consts), *carry),
                    results=tuple(range(len(body.outvars))),
                    carry=tuple((body_consts + i, i) for i in range(len(carry))),
                ),
            )
        case "cond":
            branches = [open_jaxpr(branch) for branch in params["branches"]]
            return tuple(
                Body(b, 1, False, tuple(range(1, len(eqn.invars))), tuple(range(len(b.outvars))))
                for b in branches
            )
        case "custom_linear_solve":  # what runs of it, unless it is differentiated, is its solver
            sizes, solve = params["const_lengths"], open_jaxpr(params["jaxprs"].solve)
            first = sizes.matvec + sizes.vecmat
            right = range(sum(sizes), len(eqn.invars))
            operands = (*range(first, first + sizes.solve), *right)
            return (Body(solve, 1, True, operands, tuple(range(len(solve.outvars)))),)
        case name if name in HIGH_LEVEL:
            return _called(open_jaxpr(_expanded(eqn)))
    for value in params.values():
        if isinstance(value, _JAXPRS):
            j = open_jaxpr(value)
            if _alike(j.invars, eqn.invars) and _alike(j.outvars, eqn.outvars):
                return _called(j)
    return ()  # also where a jaxpr is the scalar function of a reduction


@functools.lru_cache(maxsize=4096)
def _called(jaxpr: core.Jaxpr) -> tuple[Body, ...]:
    return (Body(jaxpr, 1, True, tuple(range(len(jaxpr.invars))), tuple(range(len(jaxpr.outvars)))),)


@functools.lru_cache(maxsize=4096)
def _scanned(jaxpr: core.Jaxpr, length: int, consts: int, carried: int) -> Body:
    return Body(
        jaxpr,
        length,
        True,
        operands=tuple(range(len(jaxpr.invars))),
        results=tuple(range(len(jaxpr.outvars))),
        stacked=frozenset(range(carried, len(jaxpr.outvars))),
        sliced=frozenset(range(consts + carried, len(jaxpr.invars))),
        carry=tuple((consts + i, i) for i in range(carried)),
    )


def closed_bodies(eqn: core.JaxprEqn) -> tuple[Any, ...]:
    """The parameters that hold the jaxprs of `bodies(eqn)`, closed where JAX has them closed."""
    params = eqn.params
    match eqn.primitive.name:
        case "scan":
            return (params["jaxpr"],)
        case "while":
            return params["cond_jaxpr"], params["body_jaxpr"]
        case "cond":
            return tuple(params["branches"])
        case "custom_linear_solve":
            return (params["jaxprs"].solve,)
        case name if name in HIGH_LEVEL:
            return (_expanded(eqn),)
    return tuple(
        next(v for v in params.values() if is_jaxpr(v) and open_jaxpr(v) is body.jaxpr)
        for body in bodies(eqn)
    )


def with_bodies(eqn: core.JaxprEqn, closed: Sequence[ClosedJaxpr]) -> core.JaxprEqn:
    """The equation with other jaxprs of the same inputs and outputs, in the order of `bodies(eqn)`.

    A `cond` may get branches of other inputs and outputs, if its variables fit them.
    """
    match eqn.primitive.name:
        case "scan":
            changed: dict[str, Any] = {"jaxpr": closed[0]}
        case "while":
            changed = {"cond_jaxpr": closed[0], "body_jaxpr": closed[1]}
        case "cond":
            changed = {"branches": tuple(closed)}
        case "custom_linear_solve":
            changed = {"jaxprs": eqn.params["jaxprs"]._replace(solve=closed[0])}
        case name if name in HIGH_LEVEL:
            return as_call(core.jaxpr_as_fun(closed[0]), type(eqn.params["_prim"]).__name__, eqn)
        case _:
            old = closed_bodies(eqn)
            changed = {
                key: new if isinstance(value, ClosedJaxpr) else open_jaxpr(new)
                for before, new in zip(old, closed, strict=True)
                for key, value in eqn.params.items()
                if value is before
            }
    return eqn.replace(params={**eqn.params, **changed})


def with_new_bodies(eqn: core.JaxprEqn, new: Sequence[Any]) -> core.JaxprEqn:
    """The equation with other bodies, in the order of `bodies(eqn)`: open jaxprs, None for one that stays."""
    if all(body is None for body in new):
        return eqn
    pairs = zip(closed_bodies(eqn), new, strict=True)
    return with_bodies(eqn, [old if body is None else with_jaxpr(old, body) for old, body in pairs])


_EXPANDED: Recall[ClosedJaxpr] = Recall(most=1024)


def _expanded(eqn: core.JaxprEqn) -> ClosedJaxpr:
    """What a high-level operation stands for."""

    def expand() -> ClosedJaxpr:
        inputs: list[Any] = [core.Var(v.aval) for v in eqn.invars]
        outputs = [core.Var(v.aval) for v in eqn.outvars]
        alone = eqn.replace(invars=inputs, outvars=outputs)
        return lower_high_level(build(inputs, outputs, [alone], checked=False))

    others = {key: value for key, value in eqn.params.items() if key != "_prim"}  # of its derivative
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    return _EXPANDED(eqn.params["_prim"], (eqn.primitive.name, f"{others} {avals}"), expand)


def lowered(closed: Any) -> Any:
    """A jaxpr with calls in the place of high-level operations, at any depth."""
    known: dict[int, tuple[Any, Any]] = {}  # a jaxpr called from many places stays one

    def of_jaxpr(closed: Any) -> Any:
        if id(closed) not in known:
            jaxpr: Any = open_jaxpr(closed)
            eqns = [of_equation(eqn) for eqn in jaxpr.eqns]
            low = {"is_high": False} if hasattr(jaxpr, "is_high") else {}
            same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
            new = closed if same else with_jaxpr(closed, jaxpr.replace(eqns=eqns, **low))
            known[id(closed)] = closed, new
        return known[id(closed)][1]

    def of_equation(eqn: core.JaxprEqn) -> core.JaxprEqn:
        old = closed_bodies(eqn)
        new = [of_jaxpr(body) for body in old]
        same = eqn.primitive.name not in HIGH_LEVEL and all(a is b for a, b in zip(old, new, strict=True))
        return eqn if same else with_bodies(eqn, new)

    return of_jaxpr(closed)


def as_one(function: Callable[..., Any], eqn: Any) -> core.JaxprEqn:
    """A function that is traced to one equation, in the place of one of the same operands and results."""
    (made,) = open_jaxpr(jax.make_jaxpr(function)(*shapes_of(eqn.invars))).eqns
    return made.replace(invars=eqn.invars, outvars=eqn.outvars)


def as_call(function: Callable[..., Any], name: str, eqn: core.JaxprEqn) -> core.JaxprEqn:
    """A call of a function in the place of an equation of the same operands and results."""

    def call(*operands: Any) -> Any:
        return function(*operands)

    call.__name__ = name
    return as_one(jax.jit(call), eqn)


def _alike(inside: Sequence[Any], outside: Sequence[Any]) -> bool:
    """Whether two lists of variables have the same shapes."""
    return len(inside) == len(outside) and all(
        v.aval is w.aval or getattr(v.aval, "shape", None) == getattr(w.aval, "shape", None)
        for v, w in zip(inside, outside, strict=True)
    )


def bytes_of(aval: Any) -> int:
    """Bytes of one array; a typed PRNG key counts as the words that it holds."""
    itemsize = getattr(aval.dtype, "itemsize", None)
    return math.prod(aval.shape) * (itemsize if itemsize else 1)


def flops_of(jaxpr: core.Jaxpr) -> int:
    """Floating-point operations of one run: matrix products and convolutions counted as multiply + add,
    anything else as one operation for each element that it reads or writes, whichever are more; moving
    data costs none. Of several branches the dearest counts; an unbounded loop counts one trip.
    """
    return sum(map(equation_flops, jaxpr.eqns))


def equation_flops(eqn: core.JaxprEqn) -> int:
    """Floating-point operations of one equation, counted as in `flops_of`; 0 for one that only moves data."""
    inner = bodies(eqn)
    if eqn.primitive.name == "cond":
        return max((flops_of(body.jaxpr) for body in inner), default=0)
    if inner:
        return sum(body.trips * flops_of(body.jaxpr) for body in inner)
    return _operation_flops(eqn)


def elements_of(jaxpr: core.Jaxpr) -> int:
    """Of `flops_of`, those that are no products or convolutions: one for each element."""
    return sum(map(_elements_of, jaxpr.eqns))


def _elements_of(eqn: core.JaxprEqn) -> int:
    inner = bodies(eqn)
    if inner:
        each = [body.trips * elements_of(body.jaxpr) for body in inner]
        return max(each) if eqn.primitive.name == "cond" else sum(each)
    return 0 if eqn.primitive.name in _PRODUCTS else _operation_flops(eqn)


def operations_of(jaxpr: core.Jaxpr) -> int:
    """Equations of one run, those of loops as often as they run; an unbounded loop counts one trip."""
    count = 0
    for eqn in jaxpr.eqns:
        inner = bodies(eqn)
        count += sum(body.trips * operations_of(body.jaxpr) for body in inner) if inner else 1
    return count


def largest_operation(jaxpr: core.Jaxpr) -> int:
    """Floating-point operations of the largest single equation, counted as in `flops_of`, but a hundred for
    an element: a tanh takes as long as some fifty multiply-adds of a matrix product.
    """
    largest = 0
    for eqn in jaxpr.eqns:
        inner = bodies(eqn)
        if inner:
            largest = max(largest, *(largest_operation(body.jaxpr) for body in inner))
        else:
            weight = 1 if eqn.primitive.name in _PRODUCTS else _ELEMENTWISE
            largest = max(largest, _operation_flops(eqn) * weight)
    return largest


def wide_product_flops(jaxpr: core.Jaxpr, width: int, least: int) -> int:
    """Of `flops_of`, those of matrix products of at least `least` operations that are `width` wide.

    That is, each row is multiplied by a matrix of so many rows and columns at least.
    """
    return sum(_wide_product_flops(eqn, width, least) for eqn in jaxpr.eqns)


def _wide_product_flops(eqn: core.JaxprEqn, width: int, least: int) -> int:
    inner = bodies(eqn)
    if inner:
        each = [body.trips * wide_product_flops(body.jaxpr, width, least) for body in inner]
        return max(each) if eqn.primitive.name == "cond" else sum(each)
    if eqn.primitive.name != "dot_general" or _operation_flops(eqn) < least:
        return 0
    (contracting, _), (batch, _) = eqn.params["dimension_numbers"]
    lhs, result = (list(v.aval.shape) for v in (eqn.invars[0], eqn.outvars[0]))  # type: ignore[attr-defined]
    sizes = [math.prod(lhs[axis] for axis in contracting), *result[len(batch) :]]
    return _operation_flops(eqn) if min(sizes) >= width else 0


_ELEMENTWISE = 100

_PRODUCTS = ("dot_general", "conv_general_dilated")

_MOVES = frozenset(
    """broadcast_in_dim reshape transpose squeeze slice dynamic_slice dynamic_update_slice gather scatter
    concatenate stack unstack split tile pad rev iota empty empty2 copy convert_element_type
    bitcast_convert_type stop_gradient fragment_boundary random_wrap random_unwrap random_bits random_split
    random_fold_in random_seed random_clone sharding_constraint device_put name pvary tie
    optimization_barrier""".split()
)


def _operation_flops(eqn: Any) -> int:
    name = eqn.primitive.name
    size = max((math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)), default=0)
    if name == "dot_general":
        (contracting, _), _ = eqn.params["dimension_numbers"]
        lhs = eqn.invars[0].aval.shape
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[axis] for axis in contracting)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // max(out_features, 1)
    if name == "polynomial":  # a product and a sum for each coefficient but one
        return 2 * (len(eqn.invars) - 2) * size
    return 0 if name in _MOVES else size
