"""A region in the making: what opening appends to, operation by operation.

region.emit(lambda t: t + 1, counter)     counter' = <lambda>(counter): one operation, and its variable
region.constant(w)                        w of the region around, as a constant of this loop's body
region.from_outside(table)                an input of the iteration: every loop on the way takes it in
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from fdg import jaxprs, keys
from fdg.placing.regions.region import Item, Operation


class RegionBuilder:
    """A region in the making: the iteration, or a loop's body.

    Attributes:
      around: the region that the loop is in, None for the iteration.
      constants: of a loop's body: variable around the loop -> variable in it.
      token: that of the effects so far, None without effects.
    """

    def __init__(self, around: "RegionBuilder | None" = None):
        self.around = around
        self.items: list[Item] = []
        self.constants: dict[Any, core.Var] = {}
        self.token: core.Var | None = None

    def constant(self, atom: Any) -> Any:
        """What stands for a variable of the region around, in this one."""
        if jaxprs.is_literal(atom):
            return atom
        return self.constants.setdefault(atom, core.Var(atom.aval))

    def from_outside(self, variable: core.Var) -> core.Var:
        """What stands for an input of the iteration, in this region: each loop on the way takes it in."""
        return variable if self.around is None else self.constant(self.around.from_outside(variable))

    def emit(self, function: Callable, *operands: Any, row: Any = None) -> core.Var:
        """Appends a function of one result as one operation, so that what belongs together stays together.

        Args:
          row: as of `Operation`.
        """
        (eqn,), (result,) = jaxprs.traced(jax.jit(function), operands)
        self.items.append(Operation(eqn, row=row))
        return result

    def emit_zeros(self, aval: Any) -> core.Var:
        """Zeros, or keys of zeros."""
        return self.emit(functools.partial(_zeros, aval.shape, aval.dtype))

    def as_variable(self, atom: Any) -> core.Var:
        """A number written into the jaxpr becomes the result of an operation."""
        if not jaxprs.is_literal(atom):
            return atom
        return self.emit(lambda: jax.lax.convert_element_type(atom.val, atom.aval.dtype))

    def distinct(self, ends: list[core.Var], carried: Sequence[core.Var], count: int) -> list[core.Var]:
        """The first `count` ends are carried on, and the memory of what is carried may be used up: each gets
        memory of its own, and so does an end that is no longer carried, but was.
        """
        seen: set[core.Var] = set()
        before = set(carried)
        made = {v for i in self.items for v in (i.outputs if isinstance(i, Operation) else i.results)}
        distinct = []
        for i, v in enumerate(ends):
            may_pass = v in made or (v in before and i < count)
            distinct.append(v if v not in seen and may_pass else self.emit(jax.numpy.copy, v))
            seen.add(v)
        return distinct


def look_up(names: dict, atom: Any) -> Any:
    """What stands for an operand; a number written into the jaxpr stands for itself."""
    return atom if jaxprs.is_literal(atom) else names[atom]


def renamed(eqn: core.JaxprEqn, names: dict) -> core.JaxprEqn:
    """The equation over other variables; its results get new ones, entered in `names`."""
    for v in eqn.outvars:
        if not isinstance(v, core.DropVar):
            names[v] = core.Var(v.aval)
    return eqn.replace(
        invars=[look_up(names, v) for v in eqn.invars],
        outvars=[names.get(v, v) for v in eqn.outvars],
    )


def _zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    found = keys.implementation(shape, dtype)
    if found is None:
        return jax.lax.full(shape, 0, dtype)
    kind, words = found
    return jax.random.wrap_key_data(jax.lax.full(words.shape, 0, words.dtype), impl=kind)
