"""A builder of regions, operation by operation.

region.emit(lambda t: t + 1, counter)     counter' = <lambda>(counter): appends an operation
region.constant(w)                        an outer value as a constant of this loop's body
region.from_outside(table)                an input of the iteration, passed into every loop on the way
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from fdg import jaxprs, keys
from fdg.placing.regions.region import Item, Operation


class RegionBuilder:
    """A builder of the iteration, or of a loop's body.

    Attributes:
      around: the outer region; None for the iteration.
      constants: of a loop's body: outer variable -> inner variable.
      token: the current token of effects, or None.
    """

    def __init__(self, around: "RegionBuilder | None" = None):
        self.around = around
        self.items: list[Item] = []
        self.constants: dict[Any, core.Var] = {}
        self.token: core.Var | None = None

    def constant(self, atom: Any) -> Any:
        """The inner variable for an outer one."""
        if jaxprs.is_literal(atom):
            return atom
        return self.constants.setdefault(atom, core.Var(atom.aval))

    def from_outside(self, variable: core.Var) -> core.Var:
        """The inner variable for an input of the iteration; it is passed into each loop on the way."""
        return variable if self.around is None else self.constant(self.around.from_outside(variable))

    def emit(self, function: Callable, *operands: Any, row: Any = None) -> core.Var:
        """Appends a function with one result as a single operation."""
        (eqn,), (result,) = jaxprs.traced(jax.jit(function), operands)
        self.items.append(Operation(eqn, row=row))
        return result

    def emit_zeros(self, aval: Any) -> core.Var:
        """Appends zeros, or keys of zeros."""
        return self.emit(functools.partial(_zeros, aval.shape, aval.dtype))

    def as_variable(self, atom: Any) -> core.Var:
        """Turns a literal into the result of an operation."""
        if not jaxprs.is_literal(atom):
            return atom
        return self.emit(lambda: jax.lax.convert_element_type(atom.val, atom.aval.dtype))

    def distinct(self, ends: list[core.Var], carried: Sequence[core.Var], count: int) -> list[core.Var]:
        """Copies outputs so that no two of the first `count` (which are carried) are the same variable, nor a
        carried input that is an output elsewhere: carried values may be donated.
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


def _zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    found = keys.implementation(shape, dtype)
    if found is None:
        return jax.lax.full(shape, 0, dtype)
    kind, words = found
    return jax.random.wrap_key_data(jax.lax.full(words.shape, 0, words.dtype), impl=kind)
