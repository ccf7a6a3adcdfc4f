"""Evaluates jaxprs with custom interpreters, in the style of JAX's own.

An interpreter is a function that computes an equation's results from its operands' values. For an equation
with bodies, it calls `run_bodies`, which runs the loop, branch or call with functions in place of the bodies:

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
"""Maps a list of values to a list of values."""


def evaluate_jaxpr(
    jaxpr: core.Jaxpr,
    constants: Sequence[Any],
    values: Sequence[Any],
    equation: Callable[[Any, list[Any]], Sequence[Any]],
    steps: Sequence[Any] | None = None,
) -> list[Any]:
    """The outputs of an open jaxpr.

    `equation` maps a step and the values of the operands to the values of the results. `steps` has one step
    per equation, which may be any object; by default, the step is the equation itself.
    """
    value_of = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*values, *constants), strict=True))

    def values_of(atoms: Sequence[Any]) -> list[Any]:
        return [v.val if is_literal(v) else value_of[v] for v in atoms]

    for eqn, step in zip(jaxpr.eqns, steps or jaxpr.eqns, strict=True):
        value_of.update(zip(eqn.outvars, equation(step, values_of(eqn.invars)), strict=True))
    return values_of(jaxpr.outvars)


def bind(eqn: core.JaxprEqn, values: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Runs an equation on arrays; `params` replace the equation's parameters, unless None."""
    results = eqn.primitive.bind(*values, **(eqn.params if params is None else params))
    return list(results) if eqn.primitive.multiple_results else [results]


def run_bodies(eqn: core.JaxprEqn, functions: Sequence[Function], values: Sequence[Any]) -> list[Any]:
    """Runs a loop, branch or call with functions in place of its bodies.

    `functions` are in the order of `bodies(eqn)`; the body of a loop returns values of the carry's structure,
    and all branches return values of the same structure.
    """
    inner = bodies(eqn)

    def with_operands(body: Body, function: Function) -> Function:
        return lambda operands: function([operands[i] for i in body.operands])

    wrapped = [with_operands(*pair) for pair in zip(inner, functions, strict=True)]
    num_before_rows = len(values) - len(inner[-1].sliced)
    num_constants = num_before_rows - len(inner[-1].carry)
    return control_flow(
        eqn, wrapped, values[:num_constants], values[num_constants:num_before_rows], values[num_before_rows:]
    )


def control_flow(
    eqn: core.JaxprEqn,
    functions: Sequence[Function],
    constants: Sequence[Any],
    carried: Sequence[Any] = (),
    rows: Sequence[Any] = (),
) -> list[Any]:
    """Runs an equation's control flow with functions in place of its bodies, on other constants and values.

    `functions` are in the order of the bodies. Each takes one list: the constants, the carry, and one row of
    each scanned input. Constants are equal in every trip; a `cond` selects its branch by the first constant.
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

            def step(carried: Any, row: Any) -> Any:
                results = body([*constants, *carried, *row])
                return results[: len(carried)], results[len(carried) :]

            params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
            carry, stacked = jax.lax.scan(step, list(carried), list(rows), **params)
            return [*carry, *stacked]
    return list(body(constants))
