"""Extracts each fragment as a function, so that it can run alone, with the inputs of its first call.

    scan((env_state, obs) -> step(keys, env_state, act(obs)))     step's result 0 is its argument 1

A benchmark that repeats a fragment passes some results as arguments of the next call, as above, so that XLA
can update them in place. Otherwise each call would copy them, and a replay buffer may have a gigabyte. A
result becomes an argument of the next call if the two have the same type, and if the argument depends on this
result alone among the fragment's results, directly or through code between fragments.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.batch.rules.random import has_batch_dependent_draws
from fdg.fragment import FragmentMark, fragments_in
from fdg.jax_internals import ClosedJaxpr
from fdg.profiling.repeating import platform_of
from fdg.running.program import compile_lowered
from fdg.tracing.graph import FDG, Fragment
from fdg.tracing.reader import Reader, Scope

_PRINTS = frozenset({"debug_callback", "debug_print"})


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """The equation that calls a fragment, with its inputs and outputs."""

    fragment: Fragment
    equation: core.JaxprEqn
    # the variables that the call reads, without duplicates; `axes` are their batch axes
    inputs: tuple[core.Var, ...]
    outputs: tuple[core.Var, ...]  # its results, without dropped ones; `output_axes` are their batch axes
    axes: tuple[int | None, ...]
    output_axes: tuple[int | None, ...]
    # output k becomes input `feedback[k]` of a later call, in this iteration or the next
    feedback: Mapping[int, int]

    @functools.cached_property
    def jaxpr(self) -> ClosedJaxpr:
        """The fragment as a function from `inputs` to `outputs`, with debug prints removed."""
        jaxpr = jaxprs.build(self.inputs, self.outputs, [self.equation])
        return jaxprs.rewrite(jaxpr, lambda eqn, inside: [] if eqn.primitive.name in _PRINTS else inside(eqn))


def sites(graph: FDG) -> tuple[Site, ...]:
    """The site of each fragment, in the graph's order."""
    reader = Reader(jaxprs.open_jaxpr(graph.jaxpr), len(graph.state_axes))
    return tuple(
        _site(reader, fragment, call.eqn, call.outside)
        for fragment, call in zip(graph.fragments, reader.fragment_calls, strict=True)
    )


def _site(reader: Reader, fragment: Fragment, eqn: core.JaxprEqn, scope: Scope) -> Site:
    """The site of a fragment that `eqn` calls; `scope` is the jaxpr around `eqn`."""
    axes: dict[Any, int | None] = {}
    for v, array in zip(eqn.invars, fragment.inputs, strict=True):
        if not jaxprs.is_literal(v) and axes.get(v) is None:
            axes[v] = array.axis
    results = [
        (v, array.axis)
        for v, array in zip(eqn.outvars, fragment.outputs, strict=True)
        if not isinstance(v, core.DropVar)
    ]
    index_of = {reader.value_number(scope, v): k for k, (v, _) in enumerate(results)}
    feedback: dict[int, int] = {}
    for j, v in enumerate(axes):
        sources = {
            index_of[value] for _, value, _ in reader.sources(scope, [v], nested=True) if value in index_of
        }
        if len(sources) == 1 and results[k := sources.pop()][0].aval == v.aval:
            feedback.setdefault(k, j)
    return Site(
        fragment,
        eqn,
        tuple(axes),
        tuple(v for v, _ in results),
        tuple(axes.values()),
        tuple(axis for _, axis in results),
        feedback,
    )


def _first_inputs(jaxpr: ClosedJaxpr, leaves: Sequence[Any]) -> dict[str, list[Any]]:
    """The inputs of each fragment's first call in an iteration, in the order of its equation's operands.

        iterate(state): keys = split(state.key); scan(act, step); learn(...)

    Each equation that contains fragments is entered: the first trip of its body starts from the equation's
    operands, so the inputs of the fragments inside are known without later trips. The whole equation is
    evaluated only if later equations may read its results.

    A pure function of `leaves`, to be called under `jax.jit`. Host callbacks run if later fragments need
    their results. `leaves` are the inputs of an iteration whose fragments have unique names. Returns inputs
    by fragment name, without literals.
    """
    inputs_by_name: dict[str, list[Any]] = {}

    def visit(closed: Any, values: Sequence[Any]) -> None:
        jaxpr = jaxprs.open_jaxpr(closed)
        last_index = max((i for i, eqn in enumerate(jaxpr.eqns) if fragments_in([eqn])), default=-1)
        prefix = jaxpr.replace(eqns=jaxpr.eqns[: last_index + 1], outvars=[])
        flagged_equations = [(eqn, i < last_index) for i, eqn in enumerate(prefix.eqns)]
        jaxprs.evaluate_jaxpr(prefix, jaxprs.constants_of(closed), values, evaluate, flagged_equations)

    def evaluate(flagged_equation: tuple[core.JaxprEqn, bool], values: list[Any]) -> Sequence[Any]:
        eqn, is_read = flagged_equation  # `is_read`: whether later equations may read its results
        value_by_variable = {
            v: x for v, x in zip(eqn.invars, values, strict=True) if not jaxprs.is_literal(v)
        }
        mark = FragmentMark.of(eqn)
        if mark is not None:
            inputs_by_name[mark.name] = [value_by_variable[v] for v in jaxprs.variables(eqn.invars)]
        for body, closed_body in zip(jaxprs.bodies(eqn), jaxprs.closed_bodies(eqn), strict=True):
            if fragments_in(body.jaxpr.eqns):
                first_trip = (
                    values[i][0] if k in body.sliced else values[i] for k, i in enumerate(body.operands)
                )
                visit(closed_body, list(first_trip))
        if not is_read:
            return [None] * len(eqn.outvars)
        return core.jaxpr_as_fun(jaxprs.build(list(value_by_variable), eqn.outvars, [eqn], checked=False))(
            *value_by_variable.values()
        )

    visit(jaxpr, leaves)
    return inputs_by_name


def inputs_of(graph: FDG, leaves: Sequence[Any]) -> Mapping[str, list[jax.Array]]:
    """The first inputs of each fragment, computed on the device of `leaves`.

    With several agents, `leaves` have a leading axis of any number of agents.
    """

    def run(leaves: Sequence[Any]) -> dict[str, list[Any]]:
        return _first_inputs(graph.jaxpr, leaves)

    if graph.agents is not None:
        run_agent = run
        is_sequential = has_batch_dependent_draws(jaxprs.open_jaxpr(graph.jaxpr))
        run = (lambda leaves: jax.lax.map(run_agent, leaves)) if is_sequential else jax.vmap(run_agent)
    leaves = list(leaves)
    return compile_lowered(jax.jit(run).lower(leaves), platform_of(leaves))(leaves)
