"""The work of a jaxpr: operations and bytes by class of operation, and the shapes of its products.

    scan(x -> tanh(x @ w)), 8 trips, x [4, 16], w [16, 16]

is 8 products 4x16x16, 16,384 floating-point operations, and 8 x 64 of class "transcendental". Nothing is
evaluated or compiled. For a batch that is split over devices, it is the work of one device.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from fdg import jaxprs
from fdg.batch.flow import EquationFlow, Flow
from fdg.batch.follow import follow
from fdg.batch.rules.result import shape_of
from fdg.identity_cache import IdentityCache
from fdg.jaxprs.classes import PICKS, PUTS, VIEWS, class_of
from fdg.jaxprs.count import Product, product_of
from fdg.lowering.tiles import on_one_device, tiles_of
from fdg.rowwise import rowwise_p, trace_rows


class SizedOperation(NamedTuple):
    """The class of an operation, and the `bytes` that it reads and writes without fusion."""

    kind: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of a program."""

    # floating-point operations by class, counted as in `jaxprs.flops_of`
    flops: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # by class, bytes read and written without fusion. Views cost nothing; a look-up counts what it reads.
    bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # counts by shape, convolutions included
    products: Mapping[Product, int] = dataclasses.field(default_factory=dict)
    # False with a `while` loop (counted as its most trips, or one) or a branch (the most expensive one)
    exact: bool = True
    # counts by class and size, without products and views; a look-up counts whole cache lines
    operations: Mapping[SizedOperation, int] = dataclasses.field(default_factory=dict)
    trips: int = 0  # of all loops

    @property
    def total_flops(self) -> int:
        """Floating-point operations of all classes."""
        return sum(self.flops.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all classes."""
        return sum(self.bytes.values())

    def times(self, count: int) -> "Work":
        """The work of `count` runs."""
        return sum_of_work([(self, count)])


def sum_of_work(parts: Iterable[tuple[Work, int]]) -> Work:
    """The sum of several pieces of work, each with a count."""
    parts = list(parts)

    def added(name: str) -> dict[Any, int]:
        found: collections.Counter[Any] = collections.Counter()
        for work, count in parts:
            for key, number in getattr(work, name).items():
                found[key] += number * count
        return dict(found)

    exact, trips = all(work.exact for work, _ in parts), sum(work.trips * count for work, count in parts)
    return Work(added("flops"), added("bytes"), added("products"), exact, added("operations"), trips)


def work_of(jaxpr: Any, axes: Sequence[int | None] = (), devices: int = 1) -> Work:
    """The work of a jaxpr on one of the devices that split its batch.

    `axes` are the batch axes of its first inputs, as for `batch.follow.follow`.
    """
    flow = follow(jaxpr, axes, devices) if devices > 1 else None
    return _Walk(devices).work(jaxprs.open_jaxpr(jaxpr), flow)


_MOST_KNOWN = 10_000


@functools.lru_cache(maxsize=32)
class _Walk:
    def __init__(self, devices: int):
        self.devices = devices
        self.known: IdentityCache[Work] = IdentityCache(
            max_entries=_MOST_KNOWN
        )  # a helper may be called from many places

    def work(self, jaxpr: core.Jaxpr, flow: Flow | None) -> Work:
        steps: Sequence[EquationFlow | None] = [None] * len(jaxpr.eqns) if flow is None else flow.equations
        pairs = zip(jaxpr.eqns, steps, strict=True)
        return self.known(
            flow or jaxpr, None, lambda: sum_of_work((self.equation(*pair), 1) for pair in pairs)
        )

    def equation(self, eqn: core.JaxprEqn, step: EquationFlow | None) -> Work:
        bodies = jaxprs.bodies(eqn)
        if step is not None and eqn.primitive is rowwise_p:
            return _Walk(1).work(jaxprs.open_jaxpr(self._rows(eqn, step)), None)
        if not bodies or (step is not None and not step.bodies):
            return self.operation(eqn, step)
        tiles = None if step is None else tiles_of(eqn)
        if step is not None and tiles is not None:
            return _Walk(1).work(on_one_device(step.bodies[0], self.devices, tiles), None)
        flows: Sequence[Flow | None] = [None] * len(bodies) if step is None else step.bodies
        inner = [
            self.work(body.jaxpr, flow).times(body.trips) for body, flow in zip(bodies, flows, strict=True)
        ]
        if eqn.primitive.name == "cond":
            most = max(inner, key=lambda work: (work.total_flops, work.total_bytes))
            return dataclasses.replace(most, exact=len(bodies) == 1 and most.exact)
        whole = sum_of_work((work, 1) for work in inner)
        loops = eqn.primitive.name in ("scan", "while")
        return dataclasses.replace(
            whole,
            trips=whole.trips + (bodies[-1].trips if loops else 0),
            exact=all(body.exact for body in bodies) and all(work.exact for work in inner),
        )

    def operation(self, eqn: core.JaxprEqn, step: EquationFlow | None) -> Work:
        name, kind = eqn.primitive.name, class_of(eqn.primitive.name)
        operands = self._parts(eqn.invars, None if step is None else step.operands)
        results = self._parts(eqn.outvars, None if step is None else step.results)
        product = product_of(eqn)
        if product is not None:
            product = self._local(product, eqn, step)
            flops = product.flops
        else:
            whole = max((math.prod(shape_of(v)) for v in (*eqn.invars, *eqn.outvars)), default=0)
            part = max((math.prod(shape_of(v)) // n for v, n in (*operands, *results)), default=0)
            flops = jaxprs.equation_flops(eqn) * part // max(whole, 1)
        moved = _bytes_moved(name, operands, results)
        reached = max(moved, _cache_lines(name, operands))
        return Work(
            {kind: flops} if flops else {},
            {kind: moved} if moved else {},
            {} if product is None else {product: 1},
            operations={SizedOperation(kind, reached): 1} if moved and product is None else {},
        )

    def _rows(self, eqn: core.JaxprEqn, step: EquationFlow) -> Any:
        """The jaxpr of a `rowwise` call for one device's rows, at least one."""
        if self.devices == 1 or all(axis is None for axis in step.operands):
            return eqn.params["jaxpr"]
        operands = []
        for v, axis in zip(eqn.invars, step.operands, strict=True):
            aval: Any = v.aval
            if axis is not None:
                rows = max(1, aval.shape[axis] // self.devices)
                aval = aval.update(shape=(*aval.shape[:axis], rows, *aval.shape[axis + 1 :]))
            operands.append(aval)
        return trace_rows(eqn.params["function"], operands)

    def _parts(self, atoms: Sequence[Any], axes: Sequence[int | None] | None) -> list[tuple[Any, int]]:
        """Each value with its number of parts."""
        known = [None] * len(atoms) if axes is None else axes
        return [(v, 1 if axis is None else self.devices) for v, axis in zip(atoms, known, strict=True)]

    def _local(self, product: Product, eqn: core.JaxprEqn, step: EquationFlow | None) -> Product:
        """One device's part of a product."""
        if step is None:
            return product
        if step.reduced:
            return product._replace(k=max(1, product.k // self.devices))
        (axis,) = step.results
        if axis is None:
            return product
        side = "m"
        if eqn.primitive.name == "dot_general":
            (contracting, _), (batch, _) = eqn.params["dimension_numbers"]
            free = len(shape_of(eqn.invars[0])) - len(contracting) - len(batch)
            side = "batch" if axis < len(batch) else "m" if axis < len(batch) + free else "n"
        elif eqn.params["feature_group_count"] > 1:
            side = "batch"
        return product._replace(**{side: max(1, getattr(product, side) // self.devices)})


_CACHE_LINE = 64  # bytes


def _cache_lines(name: str, operands: Sequence[tuple[Any, int]]) -> int:
    """Bytes of the cache lines that a look-up reads, and of those that it writes: at least one each."""
    if name != "gather" and name not in PUTS:
        return 0
    indices, parts = operands[1]
    return 2 * _CACHE_LINE * (math.prod(shape_of(indices)[:-1]) // parts)


def _bytes_moved(name: str, operands: Sequence[tuple[Any, int]], results: Sequence[tuple[Any, int]]) -> int:
    """Bytes that an operation reads and writes, given its values and their numbers of parts."""
    if name in VIEWS or class_of(name) == "exchange":  # counted as a collective, not as work
        return 0

    def size(values: Sequence[tuple[Any, int]]) -> int:
        return sum(
            jaxprs.bytes_of(v.aval) // parts
            for v, parts in values
            if not jaxprs.is_literal(v) and hasattr(v.aval, "dtype")
        )

    if name in PICKS:
        return 2 * size(results) + size(operands[1:])
    if name == "dynamic_update_slice":
        return 2 * size(operands[1:2])
    if name in PUTS:
        return 2 * size(operands[2:3]) + size(operands[1:2])
    return size(operands) + size(results)
