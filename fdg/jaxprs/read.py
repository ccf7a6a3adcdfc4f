"""Reads and builds jaxprs: bodies of equations, trip counts, dataflow.

Nothing is evaluated. Differences between JAX versions are in `fdg.jax_internals`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from fdg.arguments import quoted
from fdg.errors import GraphError
from fdg.identity_cache import IdentityCache
from fdg.jax_internals import CLOSED_JAXPR_IS_JAXPR, HIGH_LEVEL_PRIMITIVES, ClosedJaxpr, lower_high_level


@dataclasses.dataclass(frozen=True)
class Body:
    """A jaxpr inside an equation, and how its variables map to the equation's."""

    jaxpr: core.Jaxpr  # open
    trips: int  # runs of the body per run of the equation
    # False if `trips` is an expected number (`fdg.expect_trips`), a bound (a branch: 1; a while loop with a
    # counter), or a guess (any other while loop: 1)
    exact: bool
    operands: tuple[int, ...]  # body input i is the equation's input `operands[i]` (in the first trip)
    results: tuple[int, ...]  # the equation's output k is body output `results[k]`
    stacked: frozenset[int] = frozenset()  # the equation's outputs that stack a body output of each trip
    sliced: frozenset[int] = frozenset()  # body inputs that are rows, along axis 0, of the equation's inputs
    # pairs (i, j): in later trips, body input i is body output j of the previous trip
    carry: tuple[tuple[int, int], ...] = ()


def open_jaxpr(jaxpr: Any) -> core.Jaxpr:
    """The open jaxpr of a closed jaxpr; an open jaxpr itself."""
    return jaxpr.jaxpr if not CLOSED_JAXPR_IS_JAXPR and isinstance(jaxpr, ClosedJaxpr) else jaxpr


def with_jaxpr(closed: Any, jaxpr: Any) -> Any:
    """`closed` with another jaxpr over the same constants; the same object if nothing changes."""
    if jaxpr is open_jaxpr(closed):
        return closed
    if CLOSED_JAXPR_IS_JAXPR or not isinstance(closed, ClosedJaxpr):  # the body of a `checkpoint` is open
        return jaxpr
    if closed.consts:  # do not keep arrays alive in a cache
        return ClosedJaxpr(jaxpr, closed.consts)
    return _without_constants(jaxpr)


@functools.lru_cache(maxsize=1024)
def _without_constants(jaxpr: core.Jaxpr) -> ClosedJaxpr:
    """Closes an open jaxpr without constants; cached, so that JAX lowers the same object once."""
    return ClosedJaxpr(jaxpr, [])


@functools.cache
def _debug_info() -> Any:
    """JAX's debug information for a jaxpr that was not traced."""
    traced = open_jaxpr(jax.make_jaxpr(lambda x: x)(0))
    return traced.replace(outvars=[]).debug_info  # without names of arguments and results


_jaxpr_class: Any = core.Jaxpr  # untyped, because its arguments differ between JAX versions


def build(
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    equations: Sequence[core.JaxprEqn],
    constvars: Sequence[Any] = (),
    constants: Sequence[Any] = (),
    checked: bool = True,
) -> ClosedJaxpr:
    """Builds a closed jaxpr; `constants` are the values of `constvars`.

    If `checked` is True, JAX checks that it is valid; a jaxpr that is never run needs no check.
    """
    effects = frozenset().union(*(eqn.effects for eqn in equations))
    arguments = (list(constvars), list(inputs), list(outputs), list(equations), effects)
    constants_field = {"consts": list(constants)} if CLOSED_JAXPR_IS_JAXPR else {}
    jaxpr = _jaxpr_class(*arguments, debug_info=_debug_info(), **constants_field)
    if checked:
        core.check_jaxpr(jaxpr)
    return jaxpr if CLOSED_JAXPR_IS_JAXPR else ClosedJaxpr(jaxpr, list(constants))


def constants_of(jaxpr: Any) -> Sequence[Any]:
    """The values of a closed jaxpr's constants, in the order of its `constvars`."""
    return getattr(jaxpr, "consts", None) or ()


def shapes_of(atoms: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of variables or literals for tracing, with their weak types."""
    return [shape_to_trace(v.aval) for v in atoms]


def shape_to_trace(x: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of an array, or of an abstract one; keys have no weak type."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def is_literal(atom: Any) -> bool:
    """Whether an operand is a literal."""
    return isinstance(atom, core.Literal)


def is_mutable(atom: Any) -> bool:
    """Whether an operand is a mutable array (`jax.new_ref`), not a value."""
    return not isinstance(atom.aval, jax.core.ShapedArray)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The operands that are variables."""
    return [v for v in atoms if not is_literal(v)]


_SAME_VALUE = frozenset(  # primitives that return their operands
    "fragment_boundary copy copy_p optimization_barrier stop_gradient sharding_constraint name".split()
)


def is_identity(eqn: core.JaxprEqn) -> bool:
    """Whether each result equals the operand at the same position."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        return eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype  # type: ignore[attr-defined]
    return name in _SAME_VALUE and len(eqn.invars) == len(eqn.outvars)


def renamed(atoms: Iterable[Any], names: Mapping[Any, Any]) -> list[Any]:
    """The operands, with variables replaced by their new names."""
    return [v if is_literal(v) else names.get(v, v) for v in atoms]


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of a scan's constants and of its carried values."""
    if "num_carry" in params:  # JAX 0.10
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()
    return len(list(constants)), len(list(carried))


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, open or closed."""
    return isinstance(value, (core.Jaxpr, ClosedJaxpr))


def bodies(eqn: core.JaxprEqn) -> tuple[Body, ...]:
    """The jaxprs that run when `eqn` runs; empty for an ordinary operation."""
    params, inner = eqn.params, [open_jaxpr(closed) for closed in closed_bodies(eqn)]
    match eqn.primitive.name:
        case "scan":
            return (_scan_body(inner[0], params["length"], *scan_sizes(params)),)
        case "while":
            test, body = inner
            test_consts, body_consts = params["cond_nconsts"], params["body_nconsts"]
            carry = range(test_consts + body_consts, len(eqn.invars))
            trips = _expected_trips(test)
            if trips is None:
                trips = _max_trips(test, body, test_consts, body_consts, [eqn.invars[i] for i in carry])
            return (
                Body(test, trips, False, operands=(*range(test_consts), *carry), results=()),
                Body(
                    body,
                    trips,
                    False,
                    operands=(*range(test_consts, test_consts + body_consts), *carry),
                    results=tuple(range(len(body.outvars))),
                    carry=tuple((body_consts + i, i) for i in range(len(carry))),
                ),
            )
        case "cond":
            return tuple(
                Body(branch, 1, False, tuple(range(1, len(eqn.invars))), tuple(range(len(branch.outvars))))
                for branch in inner
            )
        case "custom_linear_solve":
            sizes = params["const_lengths"]
            solve_start = sizes.matvec + sizes.vecmat
            right_sides = range(sum(sizes), len(eqn.invars))
            operands = (*range(solve_start, solve_start + sizes.solve), *right_sides)
            return (Body(inner[0], 1, True, operands, tuple(range(len(inner[0].outvars)))),)
    return _call_body(inner[0]) if inner else ()


def closed_bodies(eqn: core.JaxprEqn) -> tuple[Any, ...]:
    """The jaxprs of `bodies(eqn)` as they are in the equation's parameters: closed, or open."""
    params = eqn.params
    match eqn.primitive.name:
        case "scan":
            return (params["jaxpr"],)
        case "while":
            return params["cond_jaxpr"], params["body_jaxpr"]
        case "cond":
            return tuple(params["branches"])
        case "custom_linear_solve":  # without differentiation, only its solver runs
            return (params["jaxprs"].solve,)
        case name if name in HIGH_LEVEL_PRIMITIVES:
            return (_expand(eqn),)
    for value in params.values():
        if is_jaxpr(value):
            inner = open_jaxpr(value)
            if _same_shapes(inner.invars, eqn.invars) and _same_shapes(inner.outvars, eqn.outvars):
                return (value,)
    return ()  # a jaxpr with other shapes, such as the scalar function of a reduction, is no body


def walk(equations: Iterable[core.JaxprEqn]) -> Iterator[core.JaxprEqn]:
    """Yields equations at any depth; each body once, even if it is called several times."""
    walked: set[core.Jaxpr] = set()

    def walk_equations(equations: Iterable[core.JaxprEqn]) -> Iterator[core.JaxprEqn]:
        for eqn in equations:
            yield eqn
            for body in bodies(eqn):
                if body.jaxpr not in walked:
                    walked.add(body.jaxpr)
                    yield from walk_equations(body.jaxpr.eqns)

    return walk_equations(equations)


def _has_value(atom: Any, number: int) -> bool:
    """Whether an operand is a literal with the value `number`."""
    return is_literal(atom) and np.ndim(atom.val) == 0 and atom.val == number


EXPECTED_TRIPS = "expected trips: "  # the beginning of the name of a loop's condition; the number follows


def _expected_trips(test: core.Jaxpr) -> int | None:
    """The number that `fdg.expect_trips` declares in the condition of a while loop; None if there is none."""
    names = [str(eqn.params["name"]) for eqn in walk(test.eqns) if eqn.primitive.name == "name"]
    numbers = [name.removeprefix(EXPECTED_TRIPS) for name in names if name.startswith(EXPECTED_TRIPS)]
    return int(numbers[0]) if numbers else None


def _max_trips(
    test: core.Jaxpr, body: core.Jaxpr, test_consts: int, body_consts: int, initial: Sequence[Any]
) -> int:
    """The maximum trips of a while loop: N if its condition is `i < N` and i counts from 0; else 1.

    If several such conditions are joined by `and`, N is the smallest. `initial` are the carried operands.
    """
    producer: dict[Any, core.JaxprEqn] = {v: eqn for eqn in test.eqns for v in eqn.outvars}
    adds: dict[Any, core.JaxprEqn] = {
        v: eqn for eqn in body.eqns if eqn.primitive.name == "add" for v in eqn.outvars
    }
    pending_atoms: list[Any] = list(test.outvars)
    bounds: list[int] = []
    while pending_atoms:
        eqn = None if is_literal(pending_atoms[-1]) else producer.get(pending_atoms[-1])
        pending_atoms.pop()
        if eqn is not None and eqn.primitive.name == "and":
            pending_atoms += eqn.invars
        elif eqn is not None and eqn.primitive.name == "lt":
            counter, bound = eqn.invars
            i = test.invars.index(counter) - test_consts if counter in test.invars else -1
            if i < 0 or not (_has_value(initial[i], 0) and is_literal(bound)) or is_literal(body.outvars[i]):
                continue
            addends = adds[body.outvars[i]].invars if body.outvars[i] in adds else ()
            counter_input = body.invars[body_consts + i]
            if any(v is counter_input for v in addends) and any(_has_value(v, 1) for v in addends):
                bounds.append(int(bound.val))  # type: ignore[union-attr]
    return max(0, min(bounds)) if bounds else 1


@functools.lru_cache(maxsize=4096)
def _call_body(jaxpr: core.Jaxpr) -> tuple[Body, ...]:
    """The only body of a call."""
    return (Body(jaxpr, 1, True, tuple(range(len(jaxpr.invars))), tuple(range(len(jaxpr.outvars)))),)


@functools.lru_cache(maxsize=4096)
def _scan_body(jaxpr: core.Jaxpr, length: int, consts: int, carried: int) -> Body:
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


def inner_jaxprs(eqn: core.JaxprEqn) -> tuple[Any, ...]:
    """The jaxprs that run in an equation: `closed_bodies`, or the jaxpr of a `shard_map`."""
    return (eqn.params["jaxpr"],) if eqn.primitive.name == "shard_map" else closed_bodies(eqn)


def with_bodies(eqn: core.JaxprEqn, closed: Sequence[ClosedJaxpr]) -> core.JaxprEqn:
    """The equation with the jaxprs `closed` in place of `inner_jaxprs(eqn)`, and with their effects.

    Inputs and outputs of `closed` must match the variables of `eqn`. A high-level operation becomes a call.
    """
    old = inner_jaxprs(eqn)
    match eqn.primitive.name:
        case "while":
            changed: dict[str, Any] = {"cond_jaxpr": closed[0], "body_jaxpr": closed[1]}
        case "cond":
            changed = {"branches": tuple(closed)}
        case "custom_linear_solve":
            changed = {"jaxprs": eqn.params["jaxprs"]._replace(solve=closed[0])}
        case name if name in HIGH_LEVEL_PRIMITIVES:
            name = type(eqn.params["_prim"]).__name__
            return as_call(core.jaxpr_as_fun(closed[0]), name, eqn.invars, eqn.outvars)
        case _:
            changed = {
                key: new if isinstance(value, ClosedJaxpr) else open_jaxpr(new)
                for before, new in zip(old, closed, strict=True)
                for key, value in eqn.params.items()
                if value is before
            }
    before, now = (frozenset().union(*(body.effects for body in jaxpr_list)) for jaxpr_list in (old, closed))
    effects = eqn.effects if before == now else eqn.effects - (before - now) | (now - before)
    return eqn.replace(params={**eqn.params, **changed}, effects=effects)


def with_new_bodies(eqn: core.JaxprEqn, new: Sequence[core.Jaxpr]) -> core.JaxprEqn:
    """`with_bodies` for open jaxprs, which keep the old constants; the same object if nothing changes."""
    old = inner_jaxprs(eqn)
    closed = [with_jaxpr(old_body, new_body) for old_body, new_body in zip(old, new, strict=True)]
    return eqn if all(a is b for a, b in zip(closed, old, strict=True)) else with_bodies(eqn, closed)


_EXPANSIONS: IdentityCache[ClosedJaxpr] = IdentityCache(max_entries=1024)  # results of `_expand`


def _expand(eqn: core.JaxprEqn) -> ClosedJaxpr:
    """The jaxpr that a high-level operation lowers to."""

    def lower() -> ClosedJaxpr:
        inputs: list[Any] = [core.Var(v.aval) for v in eqn.invars]
        outputs = [core.Var(v.aval) for v in eqn.outvars]
        equation = eqn.replace(invars=inputs, outvars=outputs)
        return lower_high_level(build(inputs, outputs, [equation], checked=False))

    # Equations of one operation have equal lowerings if their types and their other parameters are equal.
    parameters = {key: value for key, value in eqn.params.items() if key != "_prim"}
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    return _EXPANSIONS(eqn.params["_prim"], (eqn.primitive.name, f"{parameters} {avals}"), lower)


def traced_equation(
    function: Callable[..., Any], operands: Sequence[Any], results: Sequence[Any]
) -> core.JaxprEqn:
    """Traces a function of one operation; returns its equation from `operands` to the variables `results`."""
    jaxpr = open_jaxpr(jax.make_jaxpr(function)(*shapes_of(operands)))
    (eqn,) = jaxpr.eqns
    assert list(eqn.invars) == list(jaxpr.invars) and len(eqn.outvars) == len(results), eqn
    return eqn.replace(invars=list(operands), outvars=list(results))


def as_call(
    function: Callable[..., Any], name: str, operands: Sequence[Any], results: Sequence[Any]
) -> core.JaxprEqn:
    """An equation that calls a function under the name `name`; the function must compute all results."""

    def call(*operands: Any) -> Any:
        return function(*operands)

    call.__name__ = call.__qualname__ = name
    return traced_equation(jax.jit(call), operands, results)


def call_of(body: ClosedJaxpr, name: str, operands: Sequence[Any], results: Sequence[Any]) -> core.JaxprEqn:
    """An equation that calls a jaxpr under the name `name`."""
    return with_bodies(as_call(placeholder(body), name, operands, results), [body])


# While an equation with a body is traced, this primitive stands for the body. Otherwise JAX would remove
# results that the body returns unchanged, and the traced equation would have too few results.
_body_p = core.Primitive("body")
_body_p.multiple_results = True
_body_p.def_abstract_eval(lambda *_, avals: list(avals))


def placeholder(body: ClosedJaxpr) -> Callable[..., list[Any]]:
    """A function with the results of `body`, to trace an equation whose body is then replaced by `body`."""
    avals = tuple(v.aval for v in open_jaxpr(body).outvars)
    return lambda *operands: _body_p.bind(*operands, avals=avals)


def _same_shapes(inner: Sequence[Any], outer: Sequence[Any]) -> bool:
    """Whether two lists of variables have the same shapes."""
    return len(inner) == len(outer) and all(
        v.aval is w.aval or getattr(v.aval, "shape", None) == getattr(w.aval, "shape", None)
        for v, w in zip(inner, outer, strict=True)
    )


def bytes_of(aval: Any) -> int:
    """The bytes of an array; a typed PRNG key has the bytes of its key data."""
    itemsize = getattr(aval.dtype, "itemsize", None)
    return math.prod(aval.shape) * (itemsize if itemsize else 1)


def require_arrays(what: str, tree: Any) -> Any:
    """Returns the tree if all leaves are arrays or numbers; else raises `GraphError`, which names `what`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        try:
            jax.typeof(leaf)
        except TypeError:
            where = jax.tree_util.keystr(path)
            raise GraphError(f"{what}{where} is {quoted(leaf)}: it must be an array or a number") from None
    return tree
