"""An opened iteration as plain values: straight-line code (a region) and loops, over variables.

In a jaxpr, a loop or a fragment is one equation. If its parts are on different groups, `opening` inlines it.
The types here are the result, which every later pass reads. It prints as:

    region a, b:
      c = act(a)  # actors
      d = 3 trips of (b; c)
        region e, f:
          g = step(e, f)  # workers
          return g
      return d
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from jax.extend import core

from fdg import jaxprs
from fdg.batch.lengths import lengths_of_equation


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An equation over the variables of its region."""

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

    @property
    def name(self) -> str:
        """The names of its fragments, else the name of its primitive."""
        return "+".join(self.fragments) or str(self.eqn.params.get("name", self.eqn.primitive.name))


@dataclasses.dataclass(eq=False)
class Loop:
    """A loop of known length with fragments of several groups."""

    trips: int
    constants: list[core.Var]  # outer variables that each trip reads; the body's first inputs
    starts: list[Any]  # initial values of the carry; the body's remaining inputs
    results: list[core.Var]  # the final carry, one for each of `starts`
    body: "Region"

    @property
    def carried(self) -> list[core.Var]:
        """The body's input variables for the carry."""
        return self.body.inputs[len(self.constants) :]

    @property
    def entering(self) -> list[tuple[core.Var, Any]]:
        """Pairs (body's input variable, outer value)."""
        return list(zip(self.body.inputs, (*self.constants, *self.starts), strict=True))


Item: TypeAlias = Operation | Loop


@dataclasses.dataclass(eq=False)
class Region:
    """Operations and loops in topological order."""

    inputs: list[core.Var]
    items: list[Item]
    outputs: list[Any]  # for a loop's body, the next values of the carry

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

    def described(self, place_of: Callable[[Operation], str]) -> str:
        """A line for each operation, with its place."""
        return "\n".join(_region_lines(self, VariableNames(), place_of))

    def __str__(self) -> str:
        return self.described(lambda operation: operation.group or "")


@dataclasses.dataclass(eq=False)
class Opened:
    """An opened iteration."""

    # its inputs are the state's leaves, then the constants; its outputs are the next leaves, then the
    # metrics. With side effects, a token follows the leaves in both.
    region: Region
    # values of the inputs after the state's leaves (with effects, the first is the initial token)
    constants: list[Any]
    declared: dict[core.Var, int]  # batch axes that the borders of opened fragments declare
    has_token: bool = False  # whether there are effects

    @functools.cached_property
    def lengths(self) -> frozenset[int]:
        """The lengths of all axes (`batch.lengths`)."""
        return frozenset().union(*(lengths_of_equation(op.eqn) for op in self.region.operations()))

    def __str__(self) -> str:
        return str(self.region)


def tied(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, set[Any]]:
    """For each variable of some pairs, the set of those that it is connected with, itself included."""
    found: dict[Any, set[Any]] = {}
    for a, b in pairs:
        both = found.get(a, {a}) | found.get(b, {b})
        found.update(dict.fromkeys(both, both))
    return found


class VariableNames:
    """Short names of variables in order of use: a, b, ..., z, ba, ..."""

    def __init__(self) -> None:
        self._known: dict[core.Var, str] = {}

    def __call__(self, atom: Any) -> str:
        """The name of a variable; a literal is its value."""
        if jaxprs.is_literal(atom):
            return str(atom.val)
        if atom not in self._known:
            number, name = len(self._known), ""
            while number or not name:
                number, digit = divmod(number, 26)
                name = chr(ord("a") + digit) + name
            self._known[atom] = name
        return self._known[atom]

    def listed(self, atoms: Any) -> str:
        """Several names, separated by commas."""
        return ", ".join(map(self, atoms))


def _region_lines(region: Region, names: VariableNames, place_of: Callable[[Operation], str]) -> list[str]:
    lines = [f"region {names.listed(region.inputs)}:"]
    for item in region.items:
        if isinstance(item, Operation):
            place = place_of(item)
            line = f"  {names.listed(item.outputs)} = {item.name}({names.listed(item.inputs)})"
            lines.append(f"{line}  # {place}" if place else line)
            continue
        enter = f"{names.listed(item.constants)}; {names.listed(item.starts)}"
        lines.append(f"  {names.listed(item.results)} = {item.trips} trips of ({enter})")
        lines += ["    " + line for line in _region_lines(item.body, names, place_of)]
    return [*lines, f"  return {names.listed(region.outputs)}"]
