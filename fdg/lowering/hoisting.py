"""Hoists operations out of scans, and computes them for the rows of all trips at once.

A `HoistRule` selects operations of a loop's body. They are hoisted with the operations that they depend on,
unless they depend on a carried value. In this loop, `x` is carried, and the rule selects `expensive`:

    scan 128 trips { x; row: a = f row; b = expensive a; x = step x a b }

The loop also needs `a`. With `recompute`, the loop computes `a` again (first result below); otherwise `a` is
passed to the loop (second result):

    bs = for all 128 rows: expensive (f row)
    scan 128 trips { x; row, b: a = f row; x = step x a b }

    as, bs = for all 128 rows: a = f row, expensive a
    scan 128 trips { x; a, b: x = step x a b }
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.batch.rules.random import has_batch_dependent_draws
from fdg.jax_internals import ClosedJaxpr


class HoistRule(NamedTuple):
    """Decides which equations are hoisted out of loops."""

    name: str  # the name of the hoisted call
    selects: Callable[[Any], bool]  # True if an equation (not a call) is worth hoisting
    # A loop is not changed if the values that are passed to its trips have more bytes than this. With
    # `recompute`, all hoisted values count.
    max_bytes: int
    recompute: bool = False  # True to recompute dependencies that the loop reads too, instead of passing them
    # True for equations that must stay in the loop; equations that depend on them stay too
    is_fixed: Callable[[Any], bool] = lambda eqn: False


def hoist(jaxpr: ClosedJaxpr, rule: HoistRule) -> ClosedJaxpr:
    """Hoists operations out of a program's scans, at any depth."""

    def rewrite_equation(eqn: Any, inside: jaxprs.Inside) -> Any:
        eqn = inside(eqn)
        equations = _hoist_from_scan(eqn, rule) if eqn.primitive.name == "scan" and not eqn.effects else None
        return eqn if equations is None else equations

    return jaxprs.rewrite(jaxpr, rewrite_equation)


class _Parts(NamedTuple):
    """The equations of a jaxpr in two parts: hoisted and remaining."""

    early: list[Any]  # hoisted equations, which depend on no carried value
    late: list[Any]  # all other equations, and the recomputed ones
    passed: list[core.Var]  # results of `early` that `late` reads


def _hoist_from_scan(eqn: Any, rule: HoistRule) -> list[Any] | None:
    """Rewrites a scan as a call and a scan over the call's results; None if nothing is hoisted."""
    (body,) = jaxprs.bodies(eqn)
    if has_batch_dependent_draws(body.jaxpr):
        return None
    constants = _constants(eqn)
    carried = {i for i, _ in body.carry}
    inputs = body.jaxpr.invars
    parts = _split(body.jaxpr, {*constants, *(v for i, v in enumerate(inputs) if i not in carried)}, rule)
    if parts is None or body.trips * _bytes(parts, rule.recompute) > rule.max_bytes:
        return None
    inputs_read = _variables_read(parts.early, parts.passed)
    positions = [i for i, v in enumerate(inputs) if v in inputs_read]
    if not any(i in body.sliced for i in positions):
        return None  # XLA itself hoists loop-invariant operations
    hoisted = core.jaxpr_as_fun(_close([inputs[i] for i in positions], parts.passed, parts.early, constants))
    in_axes = [0 if i in body.sliced else None for i in positions]
    operands = [eqn.invars[i] for i in positions]
    try:
        call_body = jax.make_jaxpr(jax.vmap(hoisted, in_axes=in_axes))(*jaxprs.shapes_of(operands))
    except NotImplementedError:
        return None  # an operation has no batching rule
    stacks = [core.Var(aval) for aval in call_body.out_avals]
    loop_body = _close([*inputs, *parts.passed], body.jaxpr.outvars, parts.late, constants)
    return [
        jaxprs.call_of(call_body, rule.name, operands, stacks),
        _make_scan(eqn, loop_body, [*eqn.invars, *stacks], eqn.outvars),
    ]


def _split(jaxpr: Any, invariant: set[Any], rule: HoistRule) -> _Parts | None:
    """Splits a jaxpr into hoisted equations, with their dependencies, and the rest.

    `invariant` are the variables that do not depend on carried values. Returns None if nothing is hoisted.
    """
    invariant = set(invariant)
    # (equation, whether it is independent of carried values, whether the rule selects it too)
    equations: list[tuple[Any, bool, bool]] = []
    for eqn in jaxpr.eqns:
        for part in _split_call(eqn, invariant, rule):
            is_invariant = all(jaxprs.is_literal(v) or v in invariant for v in part.invars)
            is_invariant = is_invariant and not any(
                _any_inside(test, part) for test in (_runs_per_trip, rule.is_fixed)
            )
            if is_invariant:
                invariant.update(part.outvars)
            equations.append((part, is_invariant, is_invariant and _any_inside(rule.selects, part)))
    needed: set[Any] = set()
    early: list[Any] = []
    late: list[Any] = []
    read = _variables_read((), jaxpr.outvars)  # variables that the remaining equations, or the outputs, read
    for part, is_invariant, is_selected in reversed(equations):
        is_hoisted = is_selected or (is_invariant and any(v in needed for v in part.outvars))
        if is_hoisted:
            needed.update(jaxprs.variables(part.invars))
            early.append(part)
        if not is_hoisted or (rule.recompute and not is_selected and any(v in read for v in part.outvars)):
            read |= _variables_read([part], ())
            late.append(part)
    if not early:
        return None
    early.reverse()
    late.reverse()
    recomputed = {v for part in late for v in part.outvars}
    passed = [v for part in early for v in part.outvars if v in read and v not in recomputed]
    return _Parts(early, late, passed)


def _split_call(eqn: Any, invariant_outside: set[Any], rule: HoistRule) -> list[Any]:
    """Splits a call into a call of its hoisted equations and one of the rest; keeps other equations whole."""
    if eqn.primitive.name != "jit" or eqn.effects:
        return [eqn]
    (body,) = jaxprs.bodies(eqn)
    pairs = list(zip(body.jaxpr.invars, eqn.invars, strict=True))
    invariant = {inner for inner, outer in pairs if jaxprs.is_literal(outer) or outer in invariant_outside}
    if len(invariant) == len(pairs):
        return [eqn]
    constants = _constants(eqn)
    parts = _split(body.jaxpr, {*constants, *invariant}, rule)
    if parts is None:
        return [eqn]
    inputs_read = _variables_read(parts.early, parts.passed)
    inputs = [(inner, outer) for inner, outer in pairs if inner in inputs_read]
    passed = [core.Var(v.aval) for v in parts.passed]
    first = _close([inner for inner, _ in inputs], parts.passed, parts.early, constants)
    second = _close([*body.jaxpr.invars, *parts.passed], body.jaxpr.outvars, parts.late, constants)
    return [
        jaxprs.call_of(first, eqn.params["name"], [outer for _, outer in inputs], passed),
        jaxprs.call_of(second, eqn.params["name"], [*eqn.invars, *passed], eqn.outvars),
    ]


def _any_inside(test: Callable[[Any], bool], eqn: Any) -> bool:
    """Whether a predicate holds for an equation or for any equation inside it."""
    return any(map(test, jaxprs.walk([eqn])))


def _runs_per_trip(eqn: Any) -> bool:
    """Whether an equation must stay in its loop, because batching it could change its results.

    Host callbacks run once per trip in order, and a custom batching rule runs only if the user's code calls
    `vmap`. Under `vmap` both branches of a `cond` run, and a loop in the unselected branch might never end.
    """
    if eqn.primitive.name == "cond":
        return _any_inside(lambda inner: inner.primitive.name == "while", eqn)
    return bool(eqn.effects) or eqn.primitive.name in _FIXED


# Primitives that always stay in their loop.
_FIXED = frozenset("pure_callback io_callback debug_callback debug_print ffi_call custom_vmap_call".split())


def _bytes(parts: _Parts, includes_all: bool) -> int:
    """The bytes of all hoisted values, or only of those that the loop reads."""
    variables = [v for eqn in parts.early for v in eqn.outvars] if includes_all else parts.passed
    return sum(jaxprs.bytes_of(v.aval) for v in variables)


def _constants(eqn: Any) -> dict[Any, Any]:
    """The constants of an equation's single body, by their variables."""
    (body,), (closed,) = jaxprs.bodies(eqn), jaxprs.closed_bodies(eqn)
    return dict(zip(body.jaxpr.constvars, jaxprs.constants_of(closed), strict=True))


def _close(
    inputs: Sequence[Any], outputs: Sequence[Any], equations: Sequence[Any], constants: Mapping[Any, Any]
) -> ClosedJaxpr:
    """Builds a closed jaxpr of equations; adds the `constants` that the equations read."""
    variables = _variables_read(equations, outputs)
    constvars = [v for v in constants if v in variables]
    return jaxprs.build(inputs, outputs, equations, constvars, [constants[v] for v in constvars])


def _make_scan(scan: Any, loop_body: Any, invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """A copy of `scan` with the body `loop_body` and more scanned inputs."""
    (body,) = jaxprs.bodies(scan)
    num_before_rows = len(scan.invars) - len(body.sliced)
    num_constants = num_before_rows - len(body.carry)
    body_placeholder = jaxprs.placeholder(loop_body)

    def loop(*operands: Any) -> list[Any]:
        constants, start = operands[:num_constants], operands[num_constants:num_before_rows]
        rows = operands[num_before_rows:]
        return jaxprs.control_flow(scan, [lambda values: body_placeholder(*values)], constants, start, rows)

    return jaxprs.with_bodies(jaxprs.traced_equation(loop, invars, outvars), [loop_body])


def _variables_read(equations: Iterable[Any], outputs: Iterable[Any]) -> set[Any]:
    """The variables among `outputs` and the operands of equations."""
    return set(jaxprs.variables([*outputs, *(v for eqn in equations for v in eqn.invars)]))
