"""The bytes that a program must read and write: the accessed parts of its inputs and outputs.

    add(buffer [100000, 8], row [8])     reads the row, writes a row of the buffer in place
    sample(buffer, positions [64])       reads 64 rows and their positions, writes 64 rows

Looked-up or updated parts count by their size; anything else counts whole, once.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from fdg import jaxprs
from fdg.jaxprs.classes import PICKS, PUTS, VIEWS

_IN_PLACE = PUTS | {"dynamic_update_slice"}
_SAME = VIEWS | {"convert_element_type"}


@dataclasses.dataclass(frozen=True)
class Touched:
    """Bytes of each input read and written in place, and the input that each output aliases, if any."""

    read: tuple[int, ...]
    written: tuple[int, ...]
    origin: tuple[int | None, ...]


def border_bytes(jaxpr: Any, parts: Sequence[int] = ()) -> int:
    """Bytes that one call reads and writes at its border.

    `parts` are the number of parts of each input, then each output, over devices; empty if unsplit.
    """
    jaxpr = jaxprs.open_jaxpr(jaxpr)
    touched = touches(jaxpr)
    border = [*jaxpr.invars, *jaxpr.outvars]
    kept = [
        touched.read[i] + (touched.written[i] if i in touched.origin else 0) for i in range(len(jaxpr.invars))
    ] + [
        0 if origin is not None else _size(v) for v, origin in zip(jaxpr.outvars, touched.origin, strict=True)
    ]
    shares = [*parts, *[1] * (len(border) - len(parts))]
    return sum(size // share for size, share in zip(kept, shares, strict=True))


def touches(jaxpr: core.Jaxpr) -> Touched:
    """The accessed parts of a jaxpr's inputs."""
    roots: dict[Any, int] = {v: i for i, v in enumerate(jaxpr.invars)}
    read, written = [0] * len(jaxpr.invars), [0] * len(jaxpr.invars)
    for eqn in jaxpr.eqns:
        _enter(eqn, roots, read, written)
    whole = [_size(v) for v in jaxpr.invars]
    return Touched(
        tuple(map(min, read, whole)),
        tuple(map(min, written, whole)),
        tuple(None if jaxprs.is_literal(v) else roots.get(v) for v in jaxpr.outvars),
    )


def _enter(eqn: core.JaxprEqn, roots: dict[Any, int], read: list[int], written: list[int]) -> None:
    """Adds an equation's accesses, and tracks which of its results alias an input."""
    name = eqn.primitive.name
    rooted: Mapping[int, int] = {
        k: roots[v] for k, v in enumerate(eqn.invars) if not jaxprs.is_literal(v) and v in roots
    }
    if not rooted:
        return
    bodies = jaxprs.bodies(eqn)
    for body in bodies:
        inner = touches(body.jaxpr)
        for i, operand in enumerate(body.operands):
            if operand in rooted:
                read[rooted[operand]] += inner.read[i] * body.trips
                written[rooted[operand]] += inner.written[i] * body.trips
        for result, j in enumerate(body.results):
            origin = inner.origin[j]
            if origin is None or origin in body.sliced or result in body.stacked:
                continue
            if body.operands[origin] in rooted:
                roots[eqn.outvars[result]] = rooted[body.operands[origin]]
    if bodies:
        return
    for k, root in rooted.items():
        if k == 0 and name in PICKS:
            read[root] += sum(map(_size, eqn.outvars))
        elif k == 0 and name in _IN_PLACE:
            written[root] += _size(eqn.invars[1 if name == "dynamic_update_slice" else 2])
            roots[eqn.outvars[0]] = root
        elif name in _SAME and _size(eqn.outvars[0]) == _size(eqn.invars[k]):
            roots[eqn.outvars[0]] = root
        else:
            read[root] += _size(eqn.invars[k])


def _size(atom: Any) -> int:
    return jaxprs.bytes_of(atom.aval) if hasattr(atom.aval, "dtype") else 0
