"""The inputs of each fragment's first call in an iteration, computed from a real state.

    iterate(state): keys = split(state.key); scan(act, step); learn(...)

Each equation with fragments is entered: its body's first trip starts from the equation's operands, so the
inputs of the fragments inside are known without later trips. The whole equation is evaluated only if later
ones may read its results.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.batch.rules.random import has_draws_from_the_batch
from fdg.fragment import FragmentMark, fragments_in
from fdg.jax_internals import ClosedJaxpr
from fdg.tracing.graph import FDG


def first_inputs(jaxpr: ClosedJaxpr, leaves: Sequence[Any]) -> dict[str, list[Any]]:
    """The inputs of each fragment's first call in an iteration, in the order of its equation's operands.

    A pure function of `leaves`, to be called under `jax.jit`. Host callbacks run if later fragments need
    them. `leaves` are the inputs of an iteration whose fragments have unique names. Returns inputs by the
    fragments' names, without literals.
    """
    found: dict[str, list[Any]] = {}

    def visit(closed: Any, values: Sequence[Any]) -> None:
        jaxpr = jaxprs.open_jaxpr(closed)
        last = max((i for i, eqn in enumerate(jaxpr.eqns) if fragments_in([eqn])), default=-1)
        head = jaxpr.replace(eqns=jaxpr.eqns[: last + 1], outvars=[])
        steps = [(eqn, i < last) for i, eqn in enumerate(head.eqns)]
        jaxprs.evaluate_jaxpr(head, jaxprs.constants_of(closed), values, equation, steps)

    def equation(step: tuple[core.JaxprEqn, bool], values: list[Any]) -> Sequence[Any]:
        eqn, is_read = step
        given = {v: x for v, x in zip(eqn.invars, values, strict=True) if not jaxprs.is_literal(v)}
        mark = FragmentMark.of(eqn)
        if mark is not None:
            found[mark.name] = [given[v] for v in jaxprs.variables(eqn.invars)]
        for body, inner in zip(jaxprs.bodies(eqn), jaxprs.closed_bodies(eqn), strict=True):
            if fragments_in(body.jaxpr.eqns):
                first = (values[i][0] if k in body.sliced else values[i] for k, i in enumerate(body.operands))
                visit(inner, list(first))
        if not is_read:
            return [None] * len(eqn.outvars)
        return core.jaxpr_as_fun(jaxprs.build(list(given), eqn.outvars, [eqn], checked=False))(
            *given.values()
        )

    visit(jaxpr, leaves)
    return found


def inputs_of(graph: FDG, leaves: Sequence[Any]) -> Mapping[str, list[jax.Array]]:
    """The first inputs of each fragment, computed on the device of `leaves`.

    With several agents, `leaves` of the state have a leading axis of any number of them.
    """

    def run(leaves: Sequence[Any]) -> dict[str, list[Any]]:
        return first_inputs(graph.jaxpr, leaves)

    if graph.agents is not None:
        one = run
        in_turn = has_draws_from_the_batch(jaxprs.open_jaxpr(graph.jaxpr))
        run = (lambda leaves: jax.lax.map(one, leaves)) if in_turn else jax.vmap(one)
    return jax.jit(run)(list(leaves))
