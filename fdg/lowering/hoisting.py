"""Loop-invariant code motion out of scans, for the rows of all trips at once.

A `HoistRule` selects operations of a loop's body; they are hoisted with what they depend on, unless that is
carried.

    scan 128 trips { x; row: a = f row; b = expensive a; x = step x a b }

Hoisting `expensive`, with `f row` recomputed in the loop (`again`) or passed to it:

    bs = for all 128 rows: expensive (f row)                as = ..., bs = for all 128 rows: ...
    scan 128 trips { x; row, b: ... step x (f row) b } scan 128 trips { x; a, b: x = step x a b }
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.batch.rules.random import has_draws_from_the_batch
from fdg.jax_internals import ClosedJaxpr


class HoistRule(NamedTuple):
    """What to hoist out of loops."""

    name: str  # the name of the hoisted call
    takes: Callable[[Any], bool]  # True if an equation (not a call) is worth hoisting
    # the most bytes passed to a loop's trips; with `again`, of everything that is hoisted for it
    most_bytes: int
    again: bool = False  # recompute in the loop what it needs besides, instead of passing it
    # whether an equation, and what depends on it, is never hoisted
    stays: Callable[[Any], bool] = lambda eqn: False


def hoist(jaxpr: ClosedJaxpr, rule: HoistRule) -> ClosedJaxpr:
    """Hoists operations out of a program's scans, at any depth; in the global view."""

    def of_scan(eqn: Any, inside: jaxprs.Inside) -> Any:
        eqn = inside(eqn)
        made = _in_two(eqn, rule) if eqn.primitive.name == "scan" and not eqn.effects else None
        return eqn if made is None else made

    return jaxprs.rewrite(jaxpr, of_scan)


class _Parts(NamedTuple):
    """A jaxpr in two parts: hoisted and remaining."""

    early: list[Any]  # equations that depend on no carried value
    late: list[Any]  # all others, and recomputed ones
    passed: list[core.Var]  # values of `early` that `late` reads


def _in_two(eqn: Any, rule: HoistRule) -> list[Any] | None:
    """A scan as a call before it and a scan over the call's results; None if nothing is hoisted."""
    (body,) = jaxprs.bodies(eqn)
    if has_draws_from_the_batch(body.jaxpr):
        return None
    constants = _constants(eqn)
    carried = {i for i, _ in body.carry}
    inputs = body.jaxpr.invars
    parts = _split(body.jaxpr, {*constants, *(v for i, v in enumerate(inputs) if i not in carried)}, rule)
    if parts is None or body.trips * _bytes(parts, rule.again) > rule.most_bytes:
        return None
    needed = _read(parts.early, parts.passed)
    own = [i for i, v in enumerate(inputs) if v in needed]
    if not any(i in body.sliced for i in own):
        return None  # loop-invariant; XLA hoists it itself
    hoisted = core.jaxpr_as_fun(_closed([inputs[i] for i in own], parts.passed, parts.early, constants))
    rows = [0 if i in body.sliced else None for i in own]
    operands = [eqn.invars[i] for i in own]
    try:
        made = jax.make_jaxpr(jax.vmap(hoisted, in_axes=rows))(*jaxprs.shapes_of(operands))
    except NotImplementedError:
        return None  # a user's operation without batching rule
    stacks = [core.Var(aval) for aval in made.out_avals]
    late = _closed([*inputs, *parts.passed], body.jaxpr.outvars, parts.late, constants)
    return [
        _call(rule.name, made, operands, stacks),
        _scan(eqn, late, [*eqn.invars, *stacks], eqn.outvars),
    ]


def _split(jaxpr: Any, free: set[Any], rule: HoistRule) -> _Parts | None:
    """Splits a jaxpr into hoisted equations, with their dependencies, and the rest."""
    free = set(free)
    # with flags: independent of carried values, and worth hoisting
    equations: list[tuple[Any, bool, bool]] = []
    for eqn in jaxpr.eqns:
        for each in _split_call(eqn, free, rule):
            known = all(jaxprs.is_literal(v) or v in free for v in each.invars)
            known = known and not _any(_runs_once_a_trip, each) and not _any(rule.stays, each)
            if known:
                free.update(each.outvars)
            equations.append((each, known, known and _any(rule.takes, each)))
    wanted: set[Any] = set()
    early: list[Any] = []
    late: list[Any] = []
    read = _read((), jaxpr.outvars)  # by the remaining equations, of which recomputed ones are dependencies
    for each, known, worth in reversed(equations):
        taken = worth or (known and any(v in wanted for v in each.outvars))
        if taken:
            wanted.update(jaxprs.variables(each.invars))
            early.append(each)
        if not taken or (rule.again and not worth and any(v in read for v in each.outvars)):
            read |= _read([each], ())
            late.append(each)
    if not early:
        return None
    early.reverse()
    late.reverse()
    left = {v for each in late for v in each.outvars}
    made = [v for each in early for v in each.outvars if v in read and v not in left]
    return _Parts(early, late, made)


def _split_call(eqn: Any, free: set[Any], rule: HoistRule) -> list[Any]:
    """Splits a call in two, of which the first is hoisted; any other equation is unchanged."""
    if eqn.primitive.name not in ("jit", "pjit") or eqn.effects:
        return [eqn]
    (body,) = jaxprs.bodies(eqn)
    pairs = list(zip(body.jaxpr.invars, eqn.invars, strict=True))
    known = {inner for inner, outer in pairs if jaxprs.is_literal(outer) or outer in free}
    if len(known) == len(pairs):
        return [eqn]
    constants = _constants(eqn)
    parts = _split(body.jaxpr, {*constants, *known}, rule)
    if parts is None:
        return [eqn]
    needed = _read(parts.early, parts.passed)
    inputs = [(inner, outer) for inner, outer in pairs if inner in needed]
    passed = [core.Var(v.aval) for v in parts.passed]
    first = _closed([inner for inner, _ in inputs], parts.passed, parts.early, constants)
    second = _closed([*body.jaxpr.invars, *parts.passed], body.jaxpr.outvars, parts.late, constants)
    return [
        _call(eqn.params["name"], first, [outer for _, outer in inputs], passed),
        _call(eqn.params["name"], second, [*eqn.invars, *passed], eqn.outvars),
    ]


def _any(test: Callable[[Any], bool], eqn: Any) -> bool:
    """Whether a predicate holds for an equation or any inside it."""
    return any(map(test, jaxprs.walk([eqn])))


def _runs_once_a_trip(eqn: Any) -> bool:
    """Whether an equation must stay in its loop, because batching it could change its results.

    Host callbacks run once per trip in order, and a custom batching rule runs only where the user maps. Under
    `vmap` both branches of a `cond` run, and a loop in the branch that is not taken might never end.
    """
    if eqn.primitive.name == "cond":
        return _any(lambda each: each.primitive.name == "while", eqn)
    return bool(eqn.effects) or eqn.primitive.name in _OUTSIDE


_OUTSIDE = frozenset("pure_callback io_callback debug_callback debug_print ffi_call custom_vmap_call".split())


def _bytes(parts: _Parts, all_of_it: bool) -> int:
    made = [v for each in parts.early for v in each.outvars] if all_of_it else parts.passed
    return sum(jaxprs.bytes_of(v.aval) for v in made)


def _constants(eqn: Any) -> dict[Any, Any]:
    """The constants of an equation's single body, by their variables."""
    (body,), (closed,) = jaxprs.bodies(eqn), jaxprs.closed_bodies(eqn)
    return dict(zip(body.jaxpr.constvars, jaxprs.constants_of(closed), strict=True))


def _closed(
    inputs: Sequence[Any], outputs: Sequence[Any], equations: Sequence[Any], constants: Mapping[Any, Any]
) -> ClosedJaxpr:
    """Equations as a closed jaxpr with the constants that they read."""
    read = _read(equations, outputs)
    own = [v for v in constants if v in read]
    return jaxprs.build(inputs, outputs, equations, own, [constants[v] for v in own])


# A placeholder for a body while its equation is traced: JAX removes results that a body passes through, so
# the equation would have fewer results than needed.
_body_p = core.Primitive("body")
_body_p.multiple_results = True
_body_p.def_abstract_eval(lambda *_, avals: list(avals))


def _stand_in(avals: Sequence[Any]) -> Callable[..., list[Any]]:
    return lambda *operands: _body_p.bind(*operands, avals=tuple(avals))


def _call(name: str, body: Any, invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """An equation that calls a jaxpr."""
    avals = [v.aval for v in jaxprs.open_jaxpr(body).outvars]
    return jaxprs.with_bodies(jaxprs.as_call(_stand_in(avals), name, invars, outvars), [body])


def _scan(model: Any, late: Any, invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """A scan with another body and further scanned inputs."""
    (body,) = jaxprs.bodies(model)
    count = len(body.carry)
    first = len(model.invars) - len(body.sliced) - count
    one = _stand_in([v.aval for v in body.jaxpr.outvars])

    def loop(*operands: Any) -> list[Any]:
        constants, start, rows = operands[:first], operands[first : first + count], operands[first + count :]
        return jaxprs.control_flow(model, [lambda values: one(*values)], constants, start, rows)

    return jaxprs.with_bodies(jaxprs.as_one(loop, invars, outvars), [late])


def _read(equations: Iterable[Any], ends: Iterable[Any]) -> set[Any]:
    """The variables that equations, or outputs, read."""
    return set(jaxprs.variables([*ends, *(v for each in equations for v in each.invars)]))
