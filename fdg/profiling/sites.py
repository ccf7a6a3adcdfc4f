"""Extracts each fragment of a graph as a standalone function, with the state carried to its next call.

    scan((env_state, obs) -> step(keys, env_state, act(obs)))     step's result 0 is its argument 1

A benchmark that repeats one fragment feeds these results back as arguments, so that XLA can update them in
place. Otherwise each call would copy them: a replay buffer may have a gigabyte.
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

_SAME = frozenset({"convert_element_type", "fragment_boundary", "sharding_constraint", "copy"})
_PRINTS = frozenset({"debug_callback", "debug_print"})


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """Where a fragment is called."""

    fragment: Fragment
    equation: core.JaxprEqn
    # the variables that it reads, without duplicates; `axes` are their batch axes
    inputs: tuple[core.Var, ...]
    outputs: tuple[core.Var, ...]  # its results, without dropped ones; `output_axes` are their batch axes
    axes: tuple[int | None, ...]
    output_axes: tuple[int | None, ...]
    # loop-carried state: output k is input `handed_on[k]` of the next call, in this iteration or the next
    handed_on: Mapping[int, int]

    @functools.cached_property
    def jaxpr(self) -> ClosedJaxpr:
        """The fragment as a function from `inputs` to `outputs`, with debug prints removed."""
        return jaxprs.rewrite(jaxprs.build(self.inputs, self.outputs, [self.equation]), _silent)


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
    made = [
        (k, v, array.axis)
        for k, (v, array) in enumerate(zip(eqn.outvars, fragment.outputs, strict=True))
        if not isinstance(v, core.DropVar)
    ]
    position = {k: i for i, (k, _, _) in enumerate(made)}
    handed_on: dict[int, int] = {}
    for j, v in enumerate(axes):
        k = _origin(reader, scope, v, eqn)
        if k is not None and k in position and eqn.outvars[k].aval == v.aval:
            handed_on.setdefault(position[k], j)
    return Site(
        fragment,
        eqn,
        tuple(axes),
        tuple(v for _, v, _ in made),
        tuple(axes.values()),
        tuple(axis for _, _, axis in made),
        handed_on,
    )


def _origin(reader: Reader, scope: Scope, var: Any, eqn: core.JaxprEqn) -> int | None:
    """Index of the output of `eqn` that a variable equals, from an earlier trip or iteration; else None."""
    here, v = scope, var
    seen: set[tuple[int, Any]] = set()
    while not jaxprs.is_literal(v) and (id(here), v) not in seen:
        seen.add((id(here), v))
        if v in here.producer:
            made_by = here.producer[v]
            index = made_by.outvars.index(v)
            if made_by is eqn:
                return index
            inner = [each for each in here.inner.get(id(made_by), []) if each.body.results]
            if not inner:
                if made_by.primitive.name not in _SAME or made_by.invars[0].aval != v.aval:
                    return None
                v = made_by.invars[0]
            elif len(inner) > 1 or index in inner[0].body.stacked:
                return None
            else:
                here, v = inner[0], inner[0].jaxpr.outvars[inner[0].body.results[index]]
            continue
        if v not in here.position:
            return None
        position = here.position[v]
        carried = dict(here.body.carry) if here.body is not None else {}
        if position in carried:
            v = here.jaxpr.outvars[carried[position]]
        elif here.parent is None:
            if position >= reader.num_state:
                return None
            v = here.jaxpr.outvars[position]
        elif position in here.body.sliced:
            return None
        else:
            here, v = here.parent, here.eqn.invars[here.body.operands[position]]
    return None


def _silent(eqn: core.JaxprEqn, inside: jaxprs.Inside) -> Any:
    """Removes debug prints: a benchmark calls the fragment thousands of times."""
    return [] if eqn.primitive.name in _PRINTS else inside(eqn)
