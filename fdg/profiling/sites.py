"""Extracts each fragment of a graph as a standalone function, with the state carried to its next call.

    scan((env_state, obs) -> step(keys, env_state, act(obs)))     step's result 0 is its argument 1

A benchmark that repeats a fragment passes these results as arguments of the next call, so that XLA can update
them in place. Otherwise each call would copy them, and a replay buffer may have a gigabyte. A result becomes
the argument of its type that it alone reaches, possibly through code between fragments.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jax.extend import core

from fdg import jaxprs
from fdg.jax_internals import ClosedJaxpr
from fdg.tracing.graph import FDG, Fragment
from fdg.tracing.reader import Reader, Scope

_PRINTS = frozenset({"debug_callback", "debug_print"})


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """The call of a fragment."""

    fragment: Fragment
    equation: core.JaxprEqn
    # the variables that the call reads, without duplicates; `axes` are their batch axes
    inputs: tuple[core.Var, ...]
    outputs: tuple[core.Var, ...]  # its results, without dropped ones; `output_axes` are their batch axes
    axes: tuple[int | None, ...]
    output_axes: tuple[int | None, ...]
    # state: output k reaches input `feedback[k]` of a later call, in this iteration or the next
    feedback: Mapping[int, int]

    @functools.cached_property
    def jaxpr(self) -> ClosedJaxpr:
        """The fragment as a function from `inputs` to `outputs`, with debug prints removed."""
        return jaxprs.rewrite(jaxprs.build(self.inputs, self.outputs, [self.equation]), _without_prints)


def sites(graph: FDG) -> tuple[Site, ...]:
    """The call of each fragment, in the graph's order."""
    reader = Reader(jaxprs.open_jaxpr(graph.jaxpr), len(graph.state_axes))
    return tuple(
        _site(reader, fragment, eqn, scope)
        for fragment, (_, eqn, scope, _) in zip(graph.fragments, reader.sites, strict=True)
    )


def _site(reader: Reader, fragment: Fragment, eqn: core.JaxprEqn, scope: Scope) -> Site:
    axes: dict[Any, int | None] = {}
    for v, array in zip(eqn.invars, fragment.inputs, strict=True):
        if not jaxprs.is_literal(v) and axes.get(v) is None:
            axes[v] = array.axis
    results = [
        (v, array.axis)
        for v, array in zip(eqn.outvars, fragment.outputs, strict=True)
        if not isinstance(v, core.DropVar)
    ]
    numbers = {reader.number(scope, v): k for k, (v, _) in enumerate(results)}
    feedback: dict[int, int] = {}
    for j, v in enumerate(axes):
        sources = {
            numbers[value] for _, value, _ in reader.sources(scope, [v], nested=True) if value in numbers
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


def _without_prints(eqn: core.JaxprEqn, inside: jaxprs.Inside) -> Any:
    """Removes debug prints, since a benchmark calls the fragment thousands of times."""
    return [] if eqn.primitive.name in _PRINTS else inside(eqn)
