"""Evaluates jaxprs with custom interpreters, in the style of JAX's own.

An interpreter defines the results of an equation. For one with bodies, `run_bodies` runs the loop, branch or
call with the given functions as bodies, so that the interpreter applies inside:

    def equation(eqn, values):
        functions = [partial(run, closed) for closed in closed_bodies(eqn)]
        return run_bodies(eqn, functions, values) if functions else bind(eqn, values)

    def run(closed, values):
        return evaluate_jaxpr(open_jaxpr(closed), constants_of(closed), values, equation)

Values may be any pytree of arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend import core

from fdg.jaxprs.read import Body, bodies, is_literal

Function: TypeAlias = Callable[[Any], Any]
"""From a list of values to a list of values."""


def evaluate_jaxpr(
    jaxpr: core.Jaxpr,
    constants: Sequence[Any],
    values: Sequence[Any],
    equation: Callable[[Any, list[Any]], Sequence[Any]],
    steps: Sequence[Any] | None = None,
) -> list[Any]:
    """The outputs of an open jaxpr.

    `equation` maps a step and the values of its operands to those of its results; `steps` are the equations,
    unless given.
    """
    known = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*values, *constants), strict=True))

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [v.val if is_literal(v) else known[v] for v in atoms]

    for eqn, step in zip(jaxpr.eqns, steps or jaxpr.eqns, strict=True):
        known.update(zip(eqn.outvars, equation(step, read(eqn.invars)), strict=True))
    return read(jaxpr.outvars)


def bind(eqn: core.JaxprEqn, values: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """The results of an equation for arrays, optionally with other parameters."""
    results = eqn.primitive.bind(*values, **(eqn.params if params is None else params))
    return list(results) if eqn.primitive.multiple_results else [results]


def run_bodies(eqn: core.JaxprEqn, functions: Sequence[Function], values: Sequence[Any]) -> list[Any]:
    """The results of a loop, branch or call with other bodies.

    `functions` are in the order of `bodies(eqn)`; those of loops and branches return values of the same
    structure.
    """
    inner = bodies(eqn)

    def of_operands(body: Body, function: Function) -> Function:
        return lambda operands: function([operands[i] for i in body.operands])

    wrapped = [of_operands(*each) for each in zip(inner, functions, strict=True)]
    rows = len(values) - len(inner[-1].sliced)
    first = rows - len(inner[-1].carry)
    return control_flow(eqn, wrapped, values[:first], values[first:rows], values[rows:])


def control_flow(
    eqn: core.JaxprEqn,
    functions: Sequence[Function],
    constants: Sequence[Any],
    carried: Sequence[Any] = (),
    rows: Sequence[Any] = (),
) -> list[Any]:
    """Runs an equation's control flow with functions that may have other arguments than its bodies.

    `functions` are in the order of its bodies; each takes the constants, the carry, and a trip's rows.
    Constants are equal in every trip; the first one selects a branch.
    """
    *tests, body = functions
    match eqn.primitive.name:
        case "cond":
            branches = [lambda *operands, run=run: run(operands) for run in functions]
            return list(jax.lax.switch(constants[0], branches, *constants))
        case "while":
            return list(
                jax.lax.while_loop(
                    lambda carried: tests[0]([*constants, *carried])[0],
                    lambda carried: body([*constants, *carried]),
                    list(carried),
                )
            )
        case "scan":

            def one(carried: Any, row: Any) -> Any:
                results = body([*constants, *carried, *row])
                return results[: len(carried)], results[len(carried) :]

            how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
            ends, stacked = jax.lax.scan(one, list(carried), list(rows), **how)
            return [*ends, *stacked]
    return list(body(constants))
