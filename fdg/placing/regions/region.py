"""An opened iteration as plain values: straight-line code (a region) and loops, over variables.

In a jaxpr, a loop or a fragment is one equation. If fragments inside it are on different groups, `opening`
takes it apart. The result is a value of the types below, which every later pass reads:

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
    """An equation of a region; it may also read variables of the regions around its own."""

    eqn: core.JaxprEqn
    group: str | None = None  # the group of its fragments; None for code between fragments
    fragments: tuple[str, ...] = ()  # the names of its fragments
    # the variable of the row, if the operation writes one trip's row into a stacked result of a loop
    row: Any = None
    # (input token, output token), if the operation has side effects
    token: tuple[core.Var, core.Var] | None = None

    @functools.cached_property
    def inputs(self) -> list[Any]:
        """The variables that it reads, each once."""
        return list(dict.fromkeys(jaxprs.variables(self.eqn.invars)))

    @functools.cached_property
    def outputs(self) -> list[core.Var]:
        """The variables that it defines, without results that nothing reads."""
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
        """The variables that it reads, each once: the body's free variables and the initial values."""
        return list(dict.fromkeys((*self.body.free, *self.starts)))

    @property
    def entering(self) -> list[tuple[Any, core.Var]]:
        """Pairs (outer variable, variable in the body) of the values that enter the loop.

        For a free variable of the body, both are the same variable.
        """
        return [*((v, v) for v in self.body.free), *zip(self.starts, self.body.inputs, strict=True)]

    @property
    def leaving(self) -> list[tuple[Any, core.Var]]:
        """Pairs (variable in the body, result) of the values that leave the loop after its last trip."""
        return list(zip(self.body.outputs, self.outputs, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Crossing:
    """The start of a loop, or its end: variables on one side become variables on the other."""

    loop: Loop
    is_start: bool

    @property
    def pairs(self) -> list[tuple[Any, core.Var]]:
        """Pairs (variable, the variable that it becomes); the end of a trip also starts the next trip."""
        return self.loop.entering if self.is_start else [*self.loop.body.carry, *self.loop.leaving]


Item: TypeAlias = Operation | Loop


@dataclasses.dataclass(eq=False)
class Region:
    """Operations and loops in topological order."""

    inputs: list[core.Var]  # loop-carried variables
    items: list[Item]
    outputs: list[Any]  # the next values of the carried variables, and then an iteration's metrics

    @functools.cached_property
    def free(self) -> list[core.Var]:
        """The variables that the region reads from outer regions, in order; constants for the iteration."""
        defined, variables = set(self.inputs), dict[core.Var, None]()
        for item in self.items:
            variables.update(dict.fromkeys(v for v in item.inputs if v not in defined))
            defined.update(item.outputs)
        return list(variables)

    @property
    def carry(self) -> list[tuple[Any, core.Var]]:
        """Pairs (next value, carried variable)."""
        return list(zip(self.outputs, self.inputs, strict=False))

    def walk(self) -> Iterator[Operation | Crossing]:
        """All operations in order, including those in loops, between the starts and the ends of the loops."""
        for item in self.items:
            if isinstance(item, Operation):
                yield item
            else:
                yield Crossing(item, is_start=True)
                yield from item.body.walk()
                yield Crossing(item, is_start=False)

    def operations(self) -> Iterator[Operation]:
        """All operations in order, including those in loops."""
        return (step for step in self.walk() if isinstance(step, Operation))


@dataclasses.dataclass(eq=False)
class Opened:
    """An opened iteration."""

    # The inputs are the state's leaves, and the outputs are the next leaves, then the metrics. With side
    # effects, a token follows the leaves in both. Free variables are constants.
    region: Region
    constants: list[Any]  # the initial token if there is one, then the arrays of the free variables
    declared_axes: dict[core.Var, int]  # the batch axes that the borders of opened fragments declare

    @functools.cached_property
    def lengths(self) -> frozenset[int]:
        """The lengths of the axes of all its arrays (`batch.lengths`)."""
        return frozenset().union(*(lengths_of_equation(op.eqn) for op in self.region.operations()))


def connected_sets(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, set[Any]]:
    """The connected components of a graph: maps each vertex of the edges `pairs` to the set of its component.

    >>> sorted(connected_sets([("a", "b"), ("b", "c"), ("d", "e")])["a"])
    ['a', 'b', 'c']
    """
    sets: dict[Any, set[Any]] = {}
    for a, b in pairs:
        union = sets.get(a, {a}) | sets.get(b, {b})
        sets.update(dict.fromkeys(union, union))
    return sets
