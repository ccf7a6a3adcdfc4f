"""Tiled batch reductions that stay in a core's cache, above all gradients.

`loss = mean(square(x @ w - y))` with x [4096, 8] split along axis 0, and its gradient:

    p = dot_general x w     [4096]  tiled
    e = sub p y             [4096]  tiled
    g = dot_general e x     [8]     tiled: each tile adds its share
    d = mul g 0.000488      [8]     after the tiles

Untiled, `p` and `e` are written to memory and read back. Tiled, a `scan` takes 512 rows at a time through the
first three lines. Whatever `batch.follow` would split over more devices can be tiled: a tile is a device in
time. So it is known without compiling which equations can be tiled, and only the order of sums changes.

A gradient is tiled if its batch is larger than `TILE_BYTES`, on CPU devices with one core each
(`have_a_core_each`); a device with several cores parallelises large operations, and tiles would be too small.
With several CPU devices even a single tile pays: its sums are all-reduced as one array, while XLA's CPU
backend synchronises for each array (20 small arrays: 370 us separately, 55 us as one).
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh

from fdg import jaxprs
from fdg.batch.flow import EquationFlow, Flow, is_independent
from fdg.batch.follow import follow
from fdg.batch.gradients import GradientSums, calls_inlined, contracts_batch, gradient_sums
from fdg.batch.lengths import divisors
from fdg.batch.rules.result import Axis
from fdg.cores import common_cores, sharing
from fdg.identity_cache import IdentityCache
from fdg.jax_internals import ClosedJaxpr
from fdg.lowering.extremes import extreme_over
from fdg.lowering.local import Local
from fdg.lowering.mesh import BATCH, is_of_cpus

TILE_BYTES = 3 << 20  # of all batched values of a tile; XLA fuses most of them away
TILE_FLOPS = 4 << 20  # minimum operations of a tile; below, the loop's overhead is too large
PACKED_BYTES = 1 << 20  # of an array; above, copying takes as long as another synchronisation
_PREFIX = "fdg-tiles"

# How tiles' results are combined if they are not sums, by operation.
_EXTREMES: dict[str, Callable] = {"reduce_max": jnp.maximum, "reduce_min": jnp.minimum}


def have_a_core_each(mesh: Mesh) -> bool:
    """Whether a mesh has at least as many CPU devices as there are cores for them.

    Devices of other processes count if they share the machine's cores. All processes get the same answer.
    """
    if not is_of_cpus(mesh):
        return False
    most = max(collections.Counter(device.process_index for device in mesh.devices.flat).values())
    return min(mesh.size, most * sharing()) >= common_cores()


def tile(jaxpr: ClosedJaxpr, axes: Sequence[Axis], devices: int, cut: bool = True) -> ClosedJaxpr:
    """Turns a program's large batch reductions into calls marked with a number of tiles.

    On one device the calls are loops over tiles already; on several, `constraints` makes them so. With `cut`,
    a device may use several tiles; else one, whose sums are all-reduced together.
    """
    rule = functools.partial(_tiled, devices, cut)
    return jaxprs.with_jaxpr(jaxpr, jaxprs.Rewriter(rule)(follow(jaxpr, axes, devices)))


def tiles_of(eqn: Any) -> int | None:
    """The number of tiles of a call made by `tile`; None for other equations."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    prefix, _, count = str(eqn.params["name"]).partition(":")
    return int(count) if prefix == _PREFIX else None


def run_tiles(called: Flow, devices: int, tiles: int) -> Callable[..., list[Any]]:
    """A tiled call as a function of one device's parts of its inputs, for use in a `shard_map`.

    Outputs of the body's flow without an axis are sums over all rows. With one device, there is no
    collective.
    """
    axes, output_axes = [axis for axis, _ in called.inputs], called.outputs
    flow = follow(called.jaxpr, axes, devices * tiles, output_axes)
    makers: dict[Any, str] = {}
    for each in flow.equations:
        name = each.eqn.primitive.name
        if name == "transpose" and not each.reduced:  # the transpose of a sum, computed as the sum is
            name = makers.get(each.eqn.invars[0], name)
        makers.update(dict.fromkeys(each.eqn.outvars, name))
    outputs = list(zip(called.jaxpr.outvars, output_axes, strict=True))
    how = [makers[v] if axis is None else "" for v, axis in outputs]

    def run(*parts: Any) -> list[Any]:
        first = jax.lax.axis_index(BATCH) * tiles if devices > 1 else 0

        def one(sums: list[Any], i: jax.Array) -> tuple[list[Any], list[Any]]:
            local, tile = Local(devices * tiles, lambda: first + i), Local(tiles, lambda: i)
            rows = [tile.part(x, axis) for x, axis in zip(parts, axes, strict=True)]
            results = local.flow(flow, (), rows)
            shares = [x for x, name in zip(results, how, strict=True) if name]
            names = [name for name in how if name]
            sums = [
                _EXTREMES.get(name, jnp.add)(a, b) for name, a, b in zip(names, sums, shares, strict=True)
            ]
            return sums, [x for x, name in zip(results, how, strict=True) if not name]

        start = [_neutral_element(name, v.aval) for (v, _), name in zip(outputs, how, strict=True) if name]
        sums, stacked = jax.lax.scan(one, start, jnp.arange(tiles))
        if devices > 1:
            sums = _added_up(sums, [name for name in how if name])
        ends, made = iter(sums), iter(stacked)
        return [
            next(ends) if name else _joined(next(made), axis)
            for name, axis in zip(how, output_axes, strict=True)
        ]

    return run


_PARTS: IdentityCache[core.Jaxpr] = IdentityCache(max_entries=1024)


def on_one_device(called: Flow, devices: int, tiles: int) -> core.Jaxpr:
    """`run_tiles`, traced with the shapes of one device's part; its collectives are `psum`s."""

    def trace() -> core.Jaxpr:
        parts = []
        for v, (axis, _) in zip(called.jaxpr.invars, called.inputs, strict=True):
            shape = [n // devices if i == axis else n for i, n in enumerate(v.aval.shape)]
            parts.append(jax.ShapeDtypeStruct(shape, v.aval.dtype))
        run = run_tiles(called, devices, tiles)
        return jaxprs.open_jaxpr(jax.make_jaxpr(run, axis_env=[(BATCH, devices)])(*parts))

    return _PARTS(called, (devices, tiles), trace)


def _joined(x: Any, axis: Axis) -> Any:
    """Concatenates tiles `[tiles, ...]` along `axis`."""
    assert axis is not None
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _neutral_element(name: str, aval: Any) -> jax.Array:
    """The neutral element of a sum, a max or a min."""
    if name not in _EXTREMES:
        return jnp.zeros(aval.shape, aval.dtype)
    lowest = name == "reduce_max"
    if jnp.issubdtype(aval.dtype, jnp.floating) and np.isinf(np.asarray(np.inf, aval.dtype)):
        return jnp.full(aval.shape, -jnp.inf if lowest else jnp.inf, aval.dtype)
    # Some float8 types have no infinity: it would become NaN.
    limits: Any = (jnp.finfo if jnp.issubdtype(aval.dtype, jnp.floating) else jnp.iinfo)(aval.dtype)
    return jnp.full(aval.shape, limits.min if lowest else limits.max, aval.dtype)


def _added_up(sums: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The sums over all devices, in one collective."""
    adding = [x for x, name in zip(sums, names, strict=True) if name not in _EXTREMES]
    added = iter(_packed_sum(adding))
    return [
        extreme_over(BATCH, name, x) if name in _EXTREMES else next(added)
        for x, name in zip(sums, names, strict=True)
    ]


def _packed_sum(shares: Sequence[jax.Array]) -> list[jax.Array]:
    """The sums over all devices; small arrays of a dtype are concatenated."""
    packs: dict[Any, list[int]] = {}
    for i, share in enumerate(shares):
        large = share.size * share.dtype.itemsize > PACKED_BYTES
        packs.setdefault(i if large else share.dtype, []).append(i)
    flat = [jnp.concatenate([shares[i].ravel() for i in pack]) for pack in packs.values()]
    sums: list[Any] = [None] * len(shares)
    for pack, together in zip(packs.values(), jax.lax.psum(flat, BATCH), strict=True):
        ends = itertools.accumulate(shares[i].size for i in pack)
        for i, part in zip(pack, jnp.split(together, list(ends)[:-1]), strict=True):
            sums[i] = part.reshape(shares[i].shape)
    return sums


@dataclasses.dataclass(frozen=True)
class _Region:
    """Equations of a jaxpr that are tiled."""

    members: frozenset[int]  # their positions
    jaxpr: ClosedJaxpr  # the equations as a closed jaxpr
    flow: Flow  # of this jaxpr
    tiles: int  # the number of tiles of a device's part


def _tiled(devices: int, cut: bool, flow: Flow, how: None, inside: jaxprs.Inside) -> Any:
    """The jaxpr of a flow, with a region's equations as one call."""
    region = None
    if any(map(contracts_batch, flow.equations)):
        inlined = calls_inlined(flow, devices)
        region = _find(inlined, devices, cut)
        flow = flow if region is None else inlined
    equations = [inside(each.eqn, blocks=each.bodies) if each.bodies else each.eqn for each in flow.equations]
    if region is None:
        return equations
    return flow.jaxpr.replace(eqns=_with_call(equations, region, devices))


def _with_call(equations: Sequence[Any], region: _Region, devices: int) -> list[Any]:
    """Equations with a region's as one call, placed after everything that does not depend on it."""
    function: Callable = core.jaxpr_as_fun(region.jaxpr)
    if devices == 1:
        function = run_tiles(region.flow, 1, region.tiles)
    inputs, outputs = region.flow.jaxpr.invars, region.flow.jaxpr.outvars
    eqn = jaxprs.as_call(function, f"{_PREFIX}:{region.tiles}", inputs, outputs)
    made: set[Any] = set(outputs)
    before: list[Any] = []
    after: list[Any] = []
    for i, each in enumerate(equations):
        if i in region.members:
            continue
        late = any(v in made for v in jaxprs.variables(each.invars))
        if late:
            made.update(each.outvars)
        (after if late else before).append(each)
    return [*before, eqn, *after]


def _find(flow: Flow, devices: int, cut: bool) -> _Region | None:
    """The equations of a jaxpr to tile."""
    found = gradient_sums(flow)
    tiles = None if found is None else _tiles(found, devices, cut)
    if found is None or tiles is None:
        return None
    jaxpr = jaxprs.build(found.inputs, found.outputs, [each.eqn for each in found.equations])
    axes, output_axes = ([found.axis_of.get(v) for v in side] for side in (found.inputs, found.outputs))
    if not _fits(follow(jaxpr, axes, devices * tiles, output_axes), found.equations):
        return None
    return _Region(found.members, jaxpr, follow(jaxpr, axes, devices, output_axes), tiles)


def _tiles(found: GradientSums, devices: int, cut: bool) -> int | None:
    """The number of tiles that brings a device's part below `TILE_BYTES`; None if none are needed."""
    lengths = math.gcd(*(v.aval.shape[found.axis_of[v]] for v in found.batched))
    size = found.bytes // devices
    work = sum(jaxprs.equation_flops(each.eqn) for each in found.equations) // devices
    if lengths % devices:
        return None
    large = [k for k in divisors(lengths // devices) if cut and work // k >= TILE_FLOPS]
    enough = [k for k in large if size // k <= TILE_BYTES]
    tiles = min(enough, default=max(large, default=1))
    return tiles if tiles > 1 or devices > 1 else None


def _fits(flow: Flow, chosen: Sequence[EquationFlow]) -> bool:
    """Whether each equation can be split into tiles as it is into devices."""
    return not flow.gathered and all(
        (now.results, now.reduced) == (then.results, then.reduced)
        and not now.gathered
        and all(map(is_independent, now.bodies))
        for now, then in zip(flow.equations, chosen, strict=True)
    )
