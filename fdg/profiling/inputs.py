"""The inputs of each fragment's first call in an iteration, computed from a real state.

    iterate(state): keys = split(state.key); scan(act, step); learn(...)

Everything before the first equation with a fragment is evaluated. Then that equation is entered: its body's
first trip starts from the equation's operands, so the inputs of the fragments inside are known without later
trips. The whole equation is evaluated only if its results are needed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.batch.rules.random import draws_from_the_batch
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
    _visit(jaxpr, leaves, found)
    return found


def _visit(closed: Any, arguments: Sequence[Any], found: dict[str, list[Any]]) -> None:
    jaxpr = jaxprs.open_jaxpr(closed)
    known: dict[Any, Any] = dict(zip(jaxpr.invars, arguments, strict=True))
    known.update(zip(jaxpr.constvars, jaxprs.constants_of(closed), strict=True))
    begun = 0
    for i, eqn in enumerate(jaxpr.eqns):
        if not fragments_in([eqn]):
            continue
        _compute(jaxpr.eqns[begun:i], jaxpr.eqns[i:], known)
        begun = i
        atoms: list[Any] = list(eqn.invars)
        values = [v.val if jaxprs.is_literal(v) else known[v] for v in atoms]
        mark = FragmentMark.of(eqn)
        if mark is not None:
            given = zip(eqn.invars, values, strict=True)
            found[mark.name] = [x for v, x in given if not jaxprs.is_literal(v)]
        for body, inner in zip(jaxprs.bodies(eqn), jaxprs.closed_bodies(eqn), strict=True):
            if not fragments_in(body.jaxpr.eqns):
                continue
            starts = [
                values[operand][0] if k in body.sliced else values[operand]
                for k, operand in enumerate(body.operands)
            ]
            _visit(inner, starts, found)


def _compute(
    equations: Sequence[core.JaxprEqn], later: Sequence[core.JaxprEqn], known: dict[Any, Any]
) -> None:
    """Evaluates equations; adds to `known` what later ones read."""
    needed = {v for eqn in later for v in jaxprs.variables(eqn.invars)}
    made = [v for eqn in equations for v in eqn.outvars if not isinstance(v, core.DropVar) and v in needed]
    if not made:
        return
    inner = {v for eqn in equations for v in eqn.outvars}
    inputs = dict.fromkeys(v for eqn in equations for v in jaxprs.variables(eqn.invars) if v not in inner)
    function = core.jaxpr_as_fun(jaxprs.build(list(inputs), made, equations))
    known.update(zip(made, function(*(known[v] for v in inputs)), strict=True))


def inputs_of(graph: FDG, leaves: Sequence[Any]) -> Mapping[str, list[jax.Array]]:
    """The first inputs of each fragment, computed on the device of `leaves`.

    With several agents, `leaves` of the state have a leading axis of any number of them.
    """

    def run(leaves: Sequence[Any]) -> dict[str, list[Any]]:
        return first_inputs(graph.jaxpr, leaves)

    if graph.agents is not None:
        one = run
        in_turn = draws_from_the_batch(jaxprs.open_jaxpr(graph.jaxpr))
        run = (lambda leaves: jax.lax.map(one, leaves)) if in_turn else jax.vmap(one)
    return jax.jit(run)(list(leaves))
