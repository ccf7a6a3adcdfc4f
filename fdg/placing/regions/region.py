"""An opened iteration as plain values: straight-line code (a region) and loops, over variables.

In a jaxpr, a loop or a fragment is one equation. If its parts are on different groups, `opening` inlines it.
The types here are the result, which every later pass reads:

    region a, b:
      c = act(a)  # actors
      d = 3 trips of a region e, which starts as c:
        f = step(b, e)  # workers; it reads b of the outer region
        next e: f
      return d
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from jax.extend import core

from fdg import jaxprs
from fdg.batch.lengths import lengths_of_equation


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An equation over the variables of its region, and those around it."""

    eqn: core.JaxprEqn
    group: str | None = None  # the group of its fragments; None for code between fragments
    fragments: tuple[str, ...] = ()  # the names of its fragments
    # for an operation that writes a trip's row into a loop's stacked result, the row's variable
    row: Any = None
    # for an operation with side effects, its (input token, output token)
    token: tuple[core.Var, core.Var] | None = None

    @functools.cached_property
    def inputs(self) -> list[Any]:
        """The variables that it reads, each once."""
        return list(dict.fromkeys(jaxprs.variables(self.eqn.invars)))

    @functools.cached_property
    def outputs(self) -> list[core.Var]:
        """The variables that it defines, without unused ones."""
        return [v for v in self.eqn.outvars if not isinstance(v, core.DropVar)]


@dataclasses.dataclass(eq=False)
class Loop:
    """A loop of known length with fragments of several groups."""

    trips: int
    starts: list[Any]  # initial values of the carry
    body: "Region"
    outputs: list[core.Var]  # the final carry

    @functools.cached_property
    def inputs(self) -> list[Any]:
        """The variables that it reads, each once: the body's free variables, and initial values."""
        return list(dict.fromkeys((*self.body.free, *self.starts)))

    @property
    def entering(self) -> list[tuple[core.Var, Any]]:
        """Pairs (body's variable, outer variable); the same for the body's free variables."""
        return [*((v, v) for v in self.body.free), *zip(self.body.inputs, self.starts, strict=True)]


Item: TypeAlias = Operation | Loop


@dataclasses.dataclass(eq=False)
class Region:
    """Operations and loops in topological order."""

    inputs: list[core.Var]  # loop-carried variables
    items: list[Item]
    outputs: list[Any]  # next values of the carried variables; for the iteration, then metrics

    @functools.cached_property
    def free(self) -> list[core.Var]:
        """The variables that it reads of outer regions (of the iteration: constants), in order."""
        made, found = set(self.inputs), dict[core.Var, None]()
        for item in self.items:
            found.update(dict.fromkeys(v for v in item.inputs if v not in made))
            made.update(item.outputs)
        return list(found)

    def operations(self) -> Iterator[Operation]:
        """All operations in order, those of loops included."""
        for item in self.items:
            if isinstance(item, Operation):
                yield item
            else:
                yield from item.body.operations()

    def loops(self) -> Iterator[Loop]:
        """All loops, outer ones first."""
        for item in self.items:
            if isinstance(item, Loop):
                yield item
                yield from item.body.loops()


@dataclasses.dataclass(eq=False)
class Opened:
    """An opened iteration."""

    # its inputs are the state's leaves, its outputs the next leaves, then the metrics. With side effects, a
    # token follows the leaves in both. Its free variables are constants.
    region: Region
    constants: list[Any]  # the initial token if there is one, then the values of the free variables
    declared: dict[core.Var, int]  # batch axes that the borders of opened fragments declare

    @functools.cached_property
    def lengths(self) -> frozenset[int]:
        """The lengths of all axes (`batch.lengths`)."""
        return frozenset().union(*(lengths_of_equation(op.eqn) for op in self.region.operations()))


def connected(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, set[Any]]:
    """For each variable of some pairs, the set of those that it is connected with, itself included."""
    found: dict[Any, set[Any]] = {}
    for a, b in pairs:
        both = found.get(a, {a}) | found.get(b, {b})
        found.update(dict.fromkeys(both, both))
    return found
