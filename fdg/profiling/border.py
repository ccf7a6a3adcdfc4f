"""The bytes that a program must read and write: the accessed parts of its inputs and outputs.

    add(buffer [100000, 8], row [8])     reads the row, writes a row of the buffer in place
    sample(buffer, positions [64])       reads 64 rows and their positions, writes 64 rows

Parts that are gathered or updated count by their size; any other input or output counts once, as a whole. In
a profile, the time that memory needs for these bytes is a lower bound on a fragment's time.
"""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from fdg import jaxprs
from fdg.jaxprs.classes import PICKS, PUTS, VIEWS

_IN_PLACE = PUTS | {"dynamic_update_slice"}  # primitives that update their first operand in place
_SAME_BYTES = VIEWS | {"convert_element_type"}  # primitives whose result may have the operand's bytes


@dataclasses.dataclass(frozen=True)
class Accesses:
    """How many bytes of each input a jaxpr accesses."""

    read: tuple[int, ...]  # bytes read, for each input
    written: tuple[int, ...]  # bytes written in place, for each input
    origin: tuple[int | None, ...]  # for each output, the input that the output aliases, or None


def border_bytes(jaxpr: Any, parts: Sequence[int] = ()) -> int:
    """Bytes of inputs and outputs that one call reads and writes, on one device.

    `parts` has the number of devices that split each input, then each output; empty if none is split.
    """
    jaxpr = jaxprs.open_jaxpr(jaxpr)
    accesses = accesses_of(jaxpr)
    written = [size if i in accesses.origin else 0 for i, size in enumerate(accesses.written)]
    results = zip(jaxpr.outvars, accesses.origin, strict=True)
    sizes = [
        *map(operator.add, accesses.read, written),
        *(_size(v) if origin is None else 0 for v, origin in results),
    ]
    return sum(size // count for size, count in zip(sizes, parts or [1] * len(sizes), strict=True))


def accesses_of(jaxpr: core.Jaxpr) -> Accesses:
    """How many bytes of each input a jaxpr accesses."""
    # For each variable that aliases an input: the position of this input.
    roots: dict[Any, int] = {v: i for i, v in enumerate(jaxpr.invars)}
    read, written = [0] * len(jaxpr.invars), [0] * len(jaxpr.invars)
    for eqn in jaxpr.eqns:
        _add_accesses(eqn, roots, read, written)
    input_sizes = [_size(v) for v in jaxpr.invars]
    return Accesses(
        tuple(map(min, read, input_sizes)),
        tuple(map(min, written, input_sizes)),
        tuple(None if jaxprs.is_literal(v) else roots.get(v) for v in jaxpr.outvars),
    )


def _add_accesses(eqn: core.JaxprEqn, roots: dict[Any, int], read: list[int], written: list[int]) -> None:
    """Adds an equation's accesses, and tracks which of its results alias an input."""
    name = eqn.primitive.name
    root_by_operand: Mapping[int, int] = {
        position: roots[v] for position, v in enumerate(eqn.invars) if not jaxprs.is_literal(v) and v in roots
    }
    if not root_by_operand:
        return
    bodies = jaxprs.bodies(eqn)
    for body in bodies:
        body_accesses = accesses_of(body.jaxpr)
        for i, operand in enumerate(body.operands):
            if operand in root_by_operand:
                read[root_by_operand[operand]] += body_accesses.read[i] * body.trips
                written[root_by_operand[operand]] += body_accesses.written[i] * body.trips
        for result, j in enumerate(body.results):
            origin = body_accesses.origin[j]
            if origin is None or origin in body.sliced or result in body.stacked:
                continue
            if body.operands[origin] in root_by_operand:
                roots[eqn.outvars[result]] = root_by_operand[body.operands[origin]]
    if bodies:
        return
    for position, root in root_by_operand.items():
        if position == 0 and name in PICKS:
            read[root] += sum(map(_size, eqn.outvars))
        elif position == 0 and name in _IN_PLACE:
            written[root] += _size(eqn.invars[1 if name == "dynamic_update_slice" else 2])
            roots[eqn.outvars[0]] = root
        elif name in _SAME_BYTES and _size(eqn.outvars[0]) == _size(eqn.invars[position]):
            roots[eqn.outvars[0]] = root
        else:
            read[root] += _size(eqn.invars[position])


def _size(atom: Any) -> int:
    """The bytes of a variable or literal; 0 for a token."""
    return jaxprs.bytes_of(atom.aval) if hasattr(atom.aval, "dtype") else 0
