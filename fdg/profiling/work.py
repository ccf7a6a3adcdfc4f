"""The work of a jaxpr: operations and bytes by class of operation, and the shapes of its products.

    scan(x -> tanh(x @ w)), 8 trips, x [4, 16], w [16, 16]

has 8 products 4x16x16, with 16,384 floating-point operations, and 8 x 64 operations of "transcendental".
Nothing is evaluated or compiled. If the batch is split over devices, the work is that of one device.
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
from fdg.lowering.tiles import tiles_of, traced_per_device
from fdg.rowwise import rows_of_device, rowwise_p


class SizedOperation(NamedTuple):
    """The class of an operation (`class_of`), and the bytes that it reads and writes without fusion."""

    kind: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of a program."""

    # floating-point operations by class, counted as in `jaxprs.flops_of`
    flops: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # bytes read and written without fusion, by class; views have none, and gathers count the gathered rows
    bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # number of products by shape, convolutions included
    products: Mapping[Product, int] = dataclasses.field(default_factory=dict)
    # False if there is a `while` loop (counted with its upper bound of trips, or one trip) or a `cond`
    # (counted as its most expensive branch)
    exact: bool = True
    # number of operations by class and bytes, without products and views; bytes of a gather or scatter are
    # rounded up to cache lines
    operations: Mapping[SizedOperation, int] = dataclasses.field(default_factory=dict)
    trips: int = 0  # total number of trips of all loops

    @property
    def total_flops(self) -> int:
        """Floating-point operations of all classes."""
        return sum(self.flops.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all classes."""
        return sum(self.bytes.values())


def sum_of_work(parts: Iterable[tuple[Work, int]]) -> Work:
    """The sum of works, each multiplied by a count."""
    parts = list(parts)

    def add_counts(name: str) -> dict[Any, int]:
        total: collections.Counter[Any] = collections.Counter()
        for work, count in parts:
            for key, number in getattr(work, name).items():
                total[key] += number * count
        return dict(total)

    counts = {name: add_counts(name) for name in ("flops", "bytes", "products", "operations")}
    exact, trips = all(work.exact for work, _ in parts), sum(work.trips * count for work, count in parts)
    return Work(**counts, exact=exact, trips=trips)


def work_of(jaxpr: Any, axes: Sequence[int | None] = (), devices: int = 1) -> Work:
    """The work of a jaxpr on one of the devices that split its batch.

    `axes` are the batch axes of its first inputs, as for `batch.follow.follow`.
    """
    flow = follow(jaxpr, axes, devices) if devices > 1 else None
    return _WorkCounter(devices).work_of_jaxpr(jaxprs.open_jaxpr(jaxpr), flow)


_MAX_CACHED = 10_000


@functools.lru_cache(maxsize=32)
class _WorkCounter:
    """Adds up the work of equations on one of `devices` devices; `flow` says how these split each value."""

    def __init__(self, devices: int):
        self.devices = devices
        # The work of a jaxpr that is called from many places is added up once.
        self.cache: IdentityCache[Work] = IdentityCache(max_entries=_MAX_CACHED)

    def work_of_jaxpr(self, jaxpr: core.Jaxpr, flow: Flow | None) -> Work:
        flows: Sequence[EquationFlow | None] = [None] * len(jaxpr.eqns) if flow is None else flow.equations
        pairs = zip(jaxpr.eqns, flows, strict=True)
        return self.cache(
            flow or jaxpr, None, lambda: sum_of_work((self.work_of_equation(*pair), 1) for pair in pairs)
        )

    def work_of_equation(self, eqn: core.JaxprEqn, flow: EquationFlow | None) -> Work:
        bodies = jaxprs.bodies(eqn)
        if flow is not None and eqn.primitive is rowwise_p:
            part = rows_of_device(eqn, flow.operands, self.devices)
            return _WorkCounter(1).work_of_jaxpr(jaxprs.open_jaxpr(part), None)
        if not bodies or (flow is not None and not flow.bodies):
            return self.work_of_operation(eqn, flow)
        tiles = None if flow is None else tiles_of(eqn)
        if flow is not None and tiles is not None:
            return _WorkCounter(1).work_of_jaxpr(traced_per_device(flow.bodies[0], self.devices, tiles), None)
        flows: Sequence[Flow | None] = [None] * len(bodies) if flow is None else flow.bodies
        body_works = [
            sum_of_work([(self.work_of_jaxpr(body.jaxpr, body_flow), body.trips)])
            for body, body_flow in zip(bodies, flows, strict=True)
        ]
        if eqn.primitive.name == "cond":
            costliest = max(body_works, key=lambda work: (work.total_flops, work.total_bytes))
            return dataclasses.replace(costliest, exact=len(bodies) == 1 and costliest.exact)
        total = sum_of_work((work, 1) for work in body_works)
        is_loop = eqn.primitive.name in ("scan", "while")
        return dataclasses.replace(
            total,
            trips=total.trips + (bodies[-1].trips if is_loop else 0),
            exact=all(body.exact for body in bodies) and all(work.exact for work in body_works),
        )

    def work_of_operation(self, eqn: core.JaxprEqn, flow: EquationFlow | None) -> Work:
        name, operation_class = eqn.primitive.name, class_of(eqn.primitive.name)
        operands = self._parts(eqn.invars, None if flow is None else flow.operands)
        results = self._parts(eqn.outvars, None if flow is None else flow.results)
        product = product_of(eqn)
        if product is not None:
            product = self._product_of_device(product, eqn, flow)
            flops = product.flops
        else:
            global_size = max((math.prod(shape_of(v)) for v in (*eqn.invars, *eqn.outvars)), default=0)
            device_size = max((math.prod(shape_of(v)) // n for v, n in (*operands, *results)), default=0)
            flops = jaxprs.equation_flops(eqn) * device_size // max(global_size, 1)
        moved = _bytes_moved(name, operands, results)
        operation = SizedOperation(operation_class, max(moved, _cache_line_bytes(name, operands)))
        return Work(
            {operation_class: flops} if flops else {},
            {operation_class: moved} if moved else {},
            {} if product is None else {product: 1},
            operations={operation: 1} if moved and product is None else {},
        )

    def _parts(self, atoms: Sequence[Any], axes: Sequence[int | None] | None) -> list[tuple[Any, int]]:
        """Each value with the number of devices that split it."""
        axes = [None] * len(atoms) if axes is None else axes
        return [(v, 1 if axis is None else self.devices) for v, axis in zip(atoms, axes, strict=True)]

    def _product_of_device(self, product: Product, eqn: core.JaxprEqn, flow: EquationFlow | None) -> Product:
        """The part of a product that one device computes."""
        if flow is None:
            return product
        if flow.reduced:
            return product._replace(k=max(1, product.k // self.devices))
        (axis,) = flow.results
        if axis is None:
            return product
        dimension = "m"
        if eqn.primitive.name == "dot_general":
            (contracting, _), (batch, _) = eqn.params["dimension_numbers"]
            num_free = len(shape_of(eqn.invars[0])) - len(contracting) - len(batch)
            dimension = "batch" if axis < len(batch) else "m" if axis < len(batch) + num_free else "n"
        elif eqn.params["feature_group_count"] > 1:
            dimension = "batch"
        return product._replace(**{dimension: max(1, getattr(product, dimension) // self.devices)})


_CACHE_LINE_BYTES = 64


def _cache_line_bytes(name: str, operands: Sequence[tuple[Any, int]]) -> int:
    """The minimum bytes of a gather or scatter: per index, one cache line read and one written; else 0."""
    if name != "gather" and name not in PUTS:
        return 0
    indices, parts = operands[1]
    return 2 * _CACHE_LINE_BYTES * (math.prod(shape_of(indices)[:-1]) // parts)


def _bytes_moved(name: str, operands: Sequence[tuple[Any, int]], results: Sequence[tuple[Any, int]]) -> int:
    """Bytes that an operation reads and writes. Each value has the number of devices that split it."""
    if name in VIEWS or class_of(name) == "exchange":  # counted as a collective, not as work
        return 0

    def size(values: Sequence[tuple[Any, int]]) -> int:
        return sum(
            jaxprs.bytes_of(v.aval) // parts
            for v, parts in values
            if not jaxprs.is_literal(v) and hasattr(v.aval, "dtype")
        )

    if name in PICKS:
        return 2 * size(results) + size(operands[1:])  # the picked elements are read and written
    if name == "dynamic_update_slice":
        return 2 * size(operands[1:2])  # the update is read and written
    if name in PUTS:
        return 2 * size(operands[2:3]) + size(operands[1:2])
    return size(operands) + size(results)
