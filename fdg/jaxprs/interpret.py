"""Running jaxprs on values of another kind than arrays: the base of interpreters, as JAX's own are made.

An interpreter says what an equation does with its values. Of one with bodies, `run_bodies` runs the loop,
branch or call with functions in their place, so that the interpreter goes into them:

    def equation(eqn, values):
        functions = [partial(run, closed) for closed in closed_bodies(eqn)]
        return run_bodies(eqn, functions, values) if functions else bind(eqn, values)

    def run(closed, values):
        return evaluate(open_jaxpr(closed), constants_of(closed), values, equation)

Values may be any pytree of arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from fdg.jaxprs.read import bodies, is_literal


def evaluate(
    jaxpr: core.Jaxpr,
    constants: Sequence[Any],
    values: Sequence[Any],
    equation: Callable[[Any, list[Any]], Sequence[Any]],
    steps: Sequence[Any] | None = None,
    literal: Callable[[Any], Any] = lambda x: x,
) -> list[Any]:
    """The outputs of an open jaxpr.

    Args:
      jaxpr: the open jaxpr.
      constants: its constants, as values.
      values: of its inputs.
      equation: `(equation, values of its operands) -> values of its results`.
      steps: what `equation` is called with in place of each equation, if it is not the equation.
      literal: a number that is written into the jaxpr, as a value.
    """
    known = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*values, *constants), strict=True))

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [literal(v.val) if is_literal(v) else known[v] for v in atoms]

    for eqn, step in zip(jaxpr.eqns, steps or jaxpr.eqns, strict=True):
        known.update(zip(eqn.outvars, equation(step, read(eqn.invars)), strict=True))
    return read(jaxpr.outvars)


def bind(eqn: core.JaxprEqn, values: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """The results of an equation for arrays; with other parameters, if they are given."""
    results = eqn.primitive.bind(*values, **(eqn.params if params is None else params))
    return list(results) if eqn.primitive.multiple_results else [results]


def run_bodies(eqn: core.JaxprEqn, functions: Sequence[Callable], values: Sequence[Any]) -> list[Any]:
    """The results of an equation with functions in the place of its bodies.

    Args:
      eqn: a loop, a branch or a call.
      functions: in the order of `bodies(eqn)`, each from a list of values to a list of values. Of loops and
        branches all give values of the same structure.
      values: of its operands.
    """
    inner = bodies(eqn)
    last = inner[-1]
    count, rows = len(last.carry), len(values) - len(last.sliced)
    first = rows - count  # of what is carried
    match eqn.primitive.name:
        case "cond":
            branches = [lambda *operands, run=run: run(operands) for run in functions]
            return list(jax.lax.switch(values[0], branches, *values[1:]))
        case "scan":

            def one(carried: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
                results = functions[0]([*values[:first], *carried, *row])
                return results[:count], results[count:]

            how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
            ends, stacked = jax.lax.scan(one, list(values[first:rows]), list(values[rows:]), **how)
            return [*ends, *stacked]
        case "while":
            test, body = functions
            constants = len(inner[0].operands) - count  # of the test; the others are the body's

            def unfinished(carried: list[Any]) -> Any:
                return test([*values[:constants], *carried])[0]

            return list(
                jax.lax.while_loop(
                    unfinished,
                    lambda carried: body([*values[constants:first], *carried]),
                    list(values[first:]),
                )
            )
    results = functions[0]([values[i] for i in last.operands])
    return [results[j] for j in last.results]
