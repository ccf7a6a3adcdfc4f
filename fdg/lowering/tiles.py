"""Computes large batch reductions, above all gradients, in tiles that fit into a core's cache.

For example, `loss = mean(square(x @ w - y))` with x [4096, 8] split along axis 0, and its gradient:

    p = dot_general x w     [4096]  tiled
    e = sub p y             [4096]  tiled
    g = dot_general e x     [8]     tiled: each tile adds its summand
    d = mul g 0.000488      [8]     after the tiles

Without tiles, `p` and `e` are written to memory and read back. With tiles, a `scan` runs the first three
lines on 512 rows at a time. Equations can be tiled if `batch.follow` would split them over more devices: a
tile is like the part of a device, but tiles run one after another. So it is known without compiling which
equations can be tiled, and only the order of sums changes.

A gradient is tiled if its values are larger than `TILE_BYTES`, on CPU devices with one core each
(`uses_all_cores`). A device with several cores runs large operations in parallel, and tiles would be too
small for that. With several CPU devices, even a single tile saves time: its sums are all-reduced as one
array, while XLA's CPU backend otherwise synchronises once per array (20 small arrays take 370 us separately,
and 55 us as one).
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
from jax.extend import core
from jax.sharding import Mesh

from fdg import jaxprs
from fdg.batch.flow import EquationFlow, Flow, is_independent
from fdg.batch.follow import follow
from fdg.batch.gradients import GradientSums, contracts_batch, gradient_sums, inline_calls
from fdg.batch.lengths import divisors
from fdg.batch.rules.result import Axis
from fdg.cores import min_cores_per_process, processes_sharing_cores
from fdg.jax_internals import ClosedJaxpr
from fdg.lowering.extremes import extreme_over_devices
from fdg.lowering.local import OnePart
from fdg.lowering.mesh import BATCH, is_of_cpus

TILE_BYTES = 3 << 20  # the target for the total size of a tile's batched values; XLA stores few of them
TILE_FLOPS = 4 << 20  # the minimum operations of a tile; with fewer, the loop's overhead is too large
PACKED_BYTES = 1 << 20  # the largest array to pack; copying more takes as long as another synchronisation
_PREFIX = "fdg-tiles"  # a call that is computed in 8 tiles is named "fdg-tiles:8"

# The functions that combine the results of tiles, for operations other than sums.
_EXTREMES: dict[str, Callable] = {"reduce_max": jnp.maximum, "reduce_min": jnp.minimum}


def uses_all_cores(mesh: Mesh) -> bool:
    """Whether a mesh has at least as many CPU devices as there are cores for them.

    Devices of other processes count if they share the machine's cores. All processes get the same result.
    """
    if not is_of_cpus(mesh):
        return False
    max_per_process = max(collections.Counter(device.process_index for device in mesh.devices.flat).values())
    return min(mesh.size, max_per_process * processes_sharing_cores()) >= min_cores_per_process()


def tile(jaxpr: ClosedJaxpr, axes: Sequence[Axis], devices: int, may_split: bool = True) -> ClosedJaxpr:
    """Turns a program's large batch reductions into calls marked with a number of tiles.

    On one device, the calls already contain the loops over tiles; for several devices, `constraints` adds the
    loops. If `may_split` is False, each device has one tile, whose sums are all-reduced together.
    """
    rule = functools.partial(_tile_flow, devices, may_split)
    return jaxprs.with_jaxpr(jaxpr, jaxprs.Rewriter(rule)(follow(jaxpr, axes, devices)))


def tiles_of(eqn: Any) -> int | None:
    """The number of tiles of a call made by `tile`; None for other equations."""
    if eqn.primitive.name != "jit":
        return None
    prefix, _, count = str(eqn.params["name"]).partition(":")
    return int(count) if prefix == _PREFIX else None


def tiled_function(body_flow: Flow, devices: int, tiles: int) -> Callable[..., list[Any]]:
    """The function that runs a tiled call on one device's parts of its inputs, for use in a `shard_map`.

    `body_flow` is the flow of the call's body. Outputs without a batch axis are sums (or extremes) over all
    rows. With one device, the function has no collectives.
    """
    axes, output_axes = [axis for axis, _ in body_flow.inputs], body_flow.outputs
    flow = follow(body_flow.jaxpr, axes, devices * tiles, output_axes)
    operations: dict[Any, str] = {}
    for step in flow.equations:
        name = step.eqn.primitive.name
        if name == "transpose" and not step.reduced:  # transposed results are combined like the originals
            name = operations.get(step.eqn.invars[0], name)
        operations.update(dict.fromkeys(step.eqn.outvars, name))
    outputs = list(zip(body_flow.jaxpr.outvars, output_axes, strict=True))
    names = [operations[v] if axis is None else "" for v, axis in outputs]  # "" for outputs that are split
    sum_names = [name for name in names if name]

    def run(*parts: Any) -> list[Any]:
        first_tile = jax.lax.axis_index(BATCH) * tiles if devices > 1 else 0

        def add_tile(sums: list[Any], i: jax.Array) -> tuple[list[Any], list[Any]]:
            device_tile, tile = OnePart(devices * tiles, lambda: first_tile + i), OnePart(tiles, lambda: i)
            inputs = [tile.part(x, axis) for x, axis in zip(parts, axes, strict=True)]
            results = device_tile.run_flow(flow, (), inputs)
            summands = [x for x, name in zip(results, names, strict=True) if name]
            sums = [
                _EXTREMES.get(name, jnp.add)(a, b.astype(a.dtype))
                for name, a, b in zip(sum_names, sums, summands, strict=True)
            ]
            return sums, [x for x, name in zip(results, names, strict=True) if not name]

        avals = [v.aval for (v, _), name in zip(outputs, names, strict=True) if name]
        initial = list(map(_neutral_element, sum_names, avals))
        sums, stacked = jax.lax.scan(add_tile, initial, jnp.arange(tiles))
        sums = [x.astype(aval.dtype) for x, aval in zip(sums, avals, strict=True)]
        if devices > 1:
            sums = _reduce_over_devices(sums, sum_names)
        sums_left, stacked_left = iter(sums), iter(stacked)
        return [
            next(sums_left) if name else _join_tiles(next(stacked_left), axis)
            for name, axis in zip(names, output_axes, strict=True)
        ]

    return run


@functools.lru_cache(maxsize=1024)
def traced_per_device(body_flow: Flow, devices: int, tiles: int) -> core.Jaxpr:
    """Traces `tiled_function` on one device's part, for `profiling.work`; its collectives are `psum`s."""
    parts = []
    for variable, (axis, _) in zip(body_flow.jaxpr.invars, body_flow.inputs, strict=True):
        shape = [n // devices if i == axis else n for i, n in enumerate(variable.aval.shape)]
        parts.append(jax.ShapeDtypeStruct(shape, variable.aval.dtype))
    run = tiled_function(body_flow, devices, tiles)
    return jaxprs.open_jaxpr(jax.make_jaxpr(run, axis_env=[(BATCH, devices)])(*parts))


def _join_tiles(x: Any, axis: Axis) -> Any:
    """Concatenates tiles `[tiles, ...]` along `axis`."""
    assert axis is not None
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _neutral_element(name: str, aval: Any) -> jax.Array:
    """The neutral element of a sum, a max or a min; of narrow floats in float32, in which tiles are added."""
    is_float, dtype = jnp.issubdtype(aval.dtype, jnp.floating), aval.dtype
    if is_float and jnp.finfo(dtype).bits < 32:
        dtype = jnp.float32
    if name not in _EXTREMES:
        return jnp.zeros(aval.shape, dtype)
    low, high = (-jnp.inf, jnp.inf) if is_float else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    return jnp.full(aval.shape, low if name == "reduce_max" else high, dtype)


def _reduce_over_devices(sums: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Combines the devices' results: sums in one collective, and each max or min in another."""
    summands = [x for x, name in zip(sums, names, strict=True) if name not in _EXTREMES]
    totals = iter(_packed_sum(summands))
    return [
        extreme_over_devices(name, x) if name in _EXTREMES else next(totals)
        for x, name in zip(sums, names, strict=True)
    ]


def _packed_sum(summands: Sequence[jax.Array]) -> list[jax.Array]:
    """Sums arrays over all devices; small arrays of equal dtype are concatenated."""
    packs: dict[Any, list[int]] = {}
    for i, summand in enumerate(summands):
        is_large = summand.size * summand.dtype.itemsize > PACKED_BYTES
        packs.setdefault(i if is_large else summand.dtype, []).append(i)
    flat = [jnp.concatenate([summands[i].ravel() for i in pack]) for pack in packs.values()]
    sums: list[Any] = [None] * len(summands)
    for pack, total in zip(packs.values(), jax.lax.psum(flat, BATCH), strict=True):
        ends = itertools.accumulate(summands[i].size for i in pack)
        for i, part in zip(pack, jnp.split(total, list(ends)[:-1]), strict=True):
            sums[i] = part.reshape(summands[i].shape)
    return sums


@dataclasses.dataclass(frozen=True)
class _Region:
    """Equations of a jaxpr that are tiled."""

    members: frozenset[int]  # the positions of the equations
    jaxpr: ClosedJaxpr  # the equations as a closed jaxpr
    flow: Flow  # the flow of `jaxpr`
    tiles: int  # the number of tiles per device


def _tile_flow(devices: int, may_split: bool, flow: Flow, context: None, inside: jaxprs.Inside) -> Any:
    """Rewrites the jaxpr of a flow: the equations to tile, if there are any, become one call."""
    region = None
    if any(map(contracts_batch, flow.equations)):
        inlined = inline_calls(flow, devices)
        region = _find_region(inlined, devices, may_split)
        flow = flow if region is None else inlined
    equations = [inside(step.eqn, blocks=step.bodies) if step.bodies else step.eqn for step in flow.equations]
    if region is None:
        return equations
    return flow.jaxpr.replace(eqns=_with_call(equations, region, devices))


def _with_call(equations: Sequence[Any], region: _Region, devices: int) -> list[Any]:
    """Replaces a region's equations by one call, placed after all equations that do not depend on it."""
    function: Callable = core.jaxpr_as_fun(region.jaxpr)
    if devices == 1:
        function = tiled_function(region.flow, 1, region.tiles)
    inputs, outputs = region.flow.jaxpr.invars, region.flow.jaxpr.outvars
    call = jaxprs.as_call(function, f"{_PREFIX}:{region.tiles}", inputs, outputs)
    dependent: set[Any] = set(outputs)
    earlier: list[Any] = []
    later: list[Any] = []
    for i, eqn in enumerate(equations):
        if i in region.members:
            continue
        is_dependent = any(v in dependent for v in jaxprs.variables(eqn.invars))
        if is_dependent:
            dependent.update(eqn.outvars)
        (later if is_dependent else earlier).append(eqn)
    return [*earlier, call, *later]


def _find_region(flow: Flow, devices: int, may_split: bool) -> _Region | None:
    """The equations of a jaxpr to tile; None if there are none."""
    if (sums := gradient_sums(flow)) is None or (tiles := _num_tiles(sums, devices, may_split)) is None:
        return None
    jaxpr = jaxprs.build(sums.inputs, sums.outputs, [step.eqn for step in sums.equations])
    axes, output_axes = (
        [sums.axis_of.get(v) for v in variables] for variables in (sums.inputs, sums.outputs)
    )
    if not _is_splittable(follow(jaxpr, axes, devices * tiles, output_axes), sums.equations):
        return None
    return _Region(sums.members, jaxpr, follow(jaxpr, axes, devices, output_axes), tiles)


def _num_tiles(sums: GradientSums, devices: int, may_split: bool) -> int | None:
    """The smallest number of tiles per device with at most `TILE_BYTES` each; None if tiles do not help.

    Tiles never have fewer than `TILE_FLOPS` operations, so they may be larger than `TILE_BYTES`.
    """
    length = math.gcd(*(v.aval.shape[sums.axis_of[v]] for v in sums.batched))
    size = sums.bytes // devices
    work = sum(jaxprs.equation_flops(step.eqn) for step in sums.equations) // devices
    if length % devices:
        return None
    candidates = [k for k in divisors(length // devices) if may_split and work // k >= TILE_FLOPS]
    fitting = [k for k in candidates if size // k <= TILE_BYTES]
    tiles = min(fitting, default=max(candidates, default=1))
    return tiles if tiles > 1 or devices > 1 else None


def _is_splittable(flow: Flow, untiled: Sequence[EquationFlow]) -> bool:
    """Whether splitting into tiles changes no equation's batch axes and needs no gathers."""
    return not flow.gathered and all(
        (tiled.results, tiled.reduced) == (original.results, original.reduced)
        and not tiled.gathered
        and all(map(is_independent, tiled.bodies))
        for tiled, original in zip(flow.equations, untiled, strict=True)
    )
