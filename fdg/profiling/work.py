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
from fdg.batch.flow import EquationFlow, MeshFlows, flows_of_bodies, steps_at
from fdg.batch.follow import follow_mesh, follow_rows
from fdg.batch.rules.result import shape_of
from fdg.identity_cache import IdentityCache
from fdg.jaxprs.classes import PICKS, PUTS, VIEWS, class_of
from fdg.jaxprs.count import Product, product_of
from fdg.lowering.tiles import tiles_of, traced_per_device
from fdg.rowwise import rowwise_p


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
    # False if there is a `while` loop (counted with its expected trips, their upper bound, or one trip) or a
    # `cond` (counted as its most expensive branch)
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


def work_of(
    jaxpr: Any,
    axes: Sequence[int | None] = (),
    devices: int = 1,
    model_axes: Sequence[int | None] = (),
    model: int = 1,
) -> Work:
    """The work of a jaxpr on one device of a mesh: its batch is split over `devices`, others over `model`.

    `axes` and `model_axes` are the axes of its first inputs, as for `batch.follow.follow_mesh`.
    """
    flows = follow_mesh(jaxpr, axes, devices, model_axes, model)
    return _WorkCounter(devices, model).work_of_jaxpr(jaxprs.open_jaxpr(jaxpr), flows)


_MAX_CACHED = 10_000


@functools.lru_cache(maxsize=32)
class _WorkCounter:
    """Adds up the work of equations on one device; flows say how devices split each value."""

    def __init__(self, devices: int, model: int):
        self.devices, self.model = devices, model
        # The work of a jaxpr that is called from many places is added up once.
        self.cache: IdentityCache[Work] = IdentityCache(max_entries=_MAX_CACHED)

    def work_of_jaxpr(self, jaxpr: core.Jaxpr, flows: MeshFlows) -> Work:
        return self.cache(
            jaxpr,
            flows,
            lambda: sum_of_work(
                (self.work_of_equation(eqn, steps_at(flows, i)), 1) for i, eqn in enumerate(jaxpr.eqns)
            ),
        )

    def work_of_equation(self, eqn: core.JaxprEqn, steps: list[EquationFlow | None]) -> Work:
        bodies, known = jaxprs.bodies(eqn), [step for step in steps if step is not None]
        if known and eqn.primitive is rowwise_p:
            part, flows = follow_rows(eqn, steps, self.devices, self.model)
            return _WorkCounter(1, self.model).work_of_jaxpr(part, flows)
        if not bodies or not all(step.bodies for step in known):
            return self.work_of_operation(eqn, steps)
        batch, model = steps
        tiles = None if batch is None else tiles_of(eqn)
        if batch is not None and tiles is not None:
            part = traced_per_device(batch.bodies[0], self.devices, tiles)
            model_axes = [] if model is None else [axis for axis, _ in model.bodies[0].inputs]
            flows = follow_mesh(part, (), 1, model_axes, self.model)
            return _WorkCounter(1, self.model).work_of_jaxpr(part, flows)
        body_works = [
            sum_of_work([(self.work_of_jaxpr(body.jaxpr, body_flows), body.trips)])
            for body, body_flows in zip(bodies, flows_of_bodies(steps, len(bodies)), strict=True)
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

    def work_of_operation(self, eqn: core.JaxprEqn, steps: list[EquationFlow | None]) -> Work:
        name, operation_class = eqn.primitive.name, class_of(eqn.primitive.name)
        operands = self._parts(eqn.invars, [None if step is None else step.operands for step in steps])
        results = self._parts(eqn.outvars, [None if step is None else step.results for step in steps])
        product = product_of(eqn)
        if product is not None:
            for step, count in zip(steps, (self.devices, self.model), strict=True):
                product = _product_of_device(product, eqn, step, count)
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

    def _parts(
        self, atoms: Sequence[Any], axes: Sequence[Sequence[int | None] | None]
    ) -> list[tuple[Any, int]]:
        """Each value with the number of devices that split it; `axes` are those along `batch` and `model`."""
        parts = [1] * len(atoms)
        for along_axis, count in zip(axes, (self.devices, self.model), strict=True):
            for i, axis in enumerate(along_axis or ()):
                parts[i] *= 1 if axis is None else count
        return list(zip(atoms, parts, strict=True))


def _product_of_device(
    product: Product, eqn: core.JaxprEqn, flow: EquationFlow | None, devices: int
) -> Product:
    """The part of a product that one device computes, if `devices` split it along one axis of the mesh."""
    if flow is None:
        return product
    if flow.reduced:
        return product._replace(k=max(1, product.k // devices))
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
    return product._replace(**{dimension: max(1, getattr(product, dimension) // devices)})


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
