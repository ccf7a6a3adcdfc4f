"""Sums over a large batch in tiles that stay in a core's cache: the gradient of a loss, above all.

`loss = mean(square(x @ w - y))` with x [4096, 8] split along axis 0, and its gradient:

    p = dot_general x w     [4096]  tiled
    e = sub p y             [4096]  tiled
    g = dot_general e x     [8]     tiled: each tile adds its share
    d = mul g 0.000488      [8]     after the tiles

Written out, `p` and `e` travel to memory and back. In tiles, `scan` takes 512 rows through all three lines
at a time. What is tiled is what `batch.follow` would split over so many more devices: a tile is a device in
time. So it is known without compiling which equations may be tiled, and only the order of sums changes.

A gradient is tiled where it is added up over more rows than fit in `TILE_BYTES`, on CPU devices that have one
core each (`have_a_core_each`). A device of several cores spreads large operations over them, and tiles are
too small. Where several CPU devices have parts of the batch, a call of one tile is worth it too: its sums
travel as one array, while XLA's CPU backend lets devices meet anew for each array of an exchange (20 small
arrays: 370 us as they are, 55 us as one).
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
from fdg.batch.gradients import GradientSums, adds_up_a_gradient, gradient_sums, opened
from fdg.batch.lengths import divisors
from fdg.batch.rules.result import Axis
from fdg.cores import common_cores, sharing
from fdg.jax_internals import ClosedJaxpr
from fdg.lowering.extremes import extreme_over
from fdg.lowering.local import Local
from fdg.lowering.mesh import BATCH, is_of_cpus
from fdg.recall import Recall

TILE_BYTES = 3 << 20  # of all values of a tile that have a batch; XLA fuses most of them away
TILE_FLOPS = 4 << 20  # operations of a tile below which the loop around it would cost too much
PACKED_BYTES = 1 << 20  # of an array, above which to copy it takes as long as to meet once more
_PREFIX = "fdg-tiles"

# How the shares of tiles are brought together where they are no sums, by the operation that made them.
_EXTREMES: dict[str, Callable] = {"reduce_max": jnp.maximum, "reduce_min": jnp.minimum}


def have_a_core_each(mesh: Mesh) -> bool:
    """Whether the devices of a mesh are as many CPU devices as there are cores for them, or more.

    Devices of other processes count where these share the cores of a machine. All processes say the same.
    """
    if not is_of_cpus(mesh):
        return False
    most = max(collections.Counter(device.process_index for device in mesh.devices.flat).values())
    return min(mesh.size, most * sharing()) >= common_cores()


def tile(jaxpr: ClosedJaxpr, axes: Sequence[Axis], devices: int, cut: bool = True) -> ClosedJaxpr:
    """A program whose large sums over the batch are calls of their own, marked with a number of tiles.

    On one device the calls are loops over tiles already; on several, `constraints` makes them so.

    Args:
      jaxpr: a traced program, in the global view.
      axes: the batch axes of its first inputs.
      devices: over how many the batch is split.
      cut: whether a device may run its part in several tiles; else it is one, whose sums travel together.
    """
    rule = functools.partial(_tiled, devices, cut)
    return jaxprs.with_jaxpr(jaxpr, jaxprs.Rewriter(rule)(follow(jaxpr, axes, devices)))


def tiles_of(eqn: Any) -> int | None:
    """How many tiles a call that `tile` has made runs in; None for any other equation."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    prefix, _, count = str(eqn.params["name"]).partition(":")
    return int(count) if prefix == _PREFIX else None


def run_tiles(called: Flow, devices: int, tiles: int) -> Callable[..., list[Any]]:
    """A tiled call as a function of one device's parts of its inputs, for use inside a `shard_map`.

    Args:
      called: the flow of the call's body; outputs without an axis are sums over all rows.
      devices: over how many the batch is split; with one, no exchange is written down.
      tiles: in how many each device runs its part.
    """
    axes, output_axes = [axis for axis, _ in called.inputs], called.outputs
    flow = follow(called.jaxpr, axes, devices * tiles, output_axes)
    makers: dict[Any, str] = {}
    for each in flow.equations:
        name = each.eqn.primitive.name
        turned = name == "transpose" and not each.reduced  # of a sum: as that is made
        makers.update((v, makers.get(each.eqn.invars[0], name) if turned else name) for v in each.eqn.outvars)
    outputs = list(zip(called.jaxpr.outvars, output_axes, strict=True))
    how = [makers[v] if axis is None else "" for v, axis in outputs]

    def run(*parts: Any) -> list[Any]:
        first = jax.lax.axis_index(BATCH) * tiles if devices > 1 else 0

        def one(sums: list[Any], i: jax.Array) -> tuple[list[Any], list[Any]]:
            local = Local(devices * tiles, lambda: first + i)
            rows = [_rows(x, axis, tiles, i) for x, axis in zip(parts, axes, strict=True)]
            results = local.flow(flow, (), rows)
            shares = [x for x, name in zip(results, how, strict=True) if name]
            names = [name for name in how if name]
            sums = [_together(name)(a, b) for name, a, b in zip(names, sums, shares, strict=True)]
            return sums, [x for x, name in zip(results, how, strict=True) if not name]

        start = [_nothing(name, v.aval) for (v, _), name in zip(outputs, how, strict=True) if name]
        sums, stacked = jax.lax.scan(one, start, jnp.arange(tiles))
        if devices > 1:
            sums = _added_up(sums, [name for name in how if name])
        ends, made = iter(sums), iter(stacked)
        return [
            next(ends) if name else _joined(next(made), axis)
            for name, axis in zip(how, output_axes, strict=True)
        ]

    return run


_PARTS: Recall[core.Jaxpr] = Recall(most=1024)


def on_one_device(called: Flow, devices: int, tiles: int) -> core.Jaxpr:
    """What `run_tiles` does, traced with the shapes of one device's part; its exchanges are `psum`s in it."""

    def trace() -> core.Jaxpr:
        parts = []
        for v, (axis, _) in zip(called.jaxpr.invars, called.inputs, strict=True):
            shape = [n // devices if i == axis else n for i, n in enumerate(v.aval.shape)]
            parts.append(jax.ShapeDtypeStruct(shape, v.aval.dtype))
        run = run_tiles(called, devices, tiles)
        return jaxprs.open_jaxpr(jax.make_jaxpr(run, axis_env=[(BATCH, devices)])(*parts))

    return _PARTS(called, (devices, tiles), trace)


def _rows(x: Any, axis: Axis, tiles: int, i: jax.Array) -> Any:
    if axis is None:
        return x
    size = x.shape[axis] // tiles
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _joined(x: Any, axis: Axis) -> Any:
    """Tiles `[tiles, ...]` side by side along `axis`."""
    assert axis is not None
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _together(name: str) -> Callable:
    return _EXTREMES.get(name, jnp.add)


def _nothing(name: str, aval: Any) -> jax.Array:
    """What a sum, or an extreme, begins with."""
    if name not in _EXTREMES:
        return jnp.zeros(aval.shape, aval.dtype)
    lowest = name == "reduce_max"
    if jnp.issubdtype(aval.dtype, jnp.floating):
        return jnp.full(aval.shape, -jnp.inf if lowest else jnp.inf, aval.dtype)
    limits = jnp.iinfo(aval.dtype)
    return jnp.full(aval.shape, limits.min if lowest else limits.max, aval.dtype)


def _added_up(sums: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The sums of all devices; those that add go in one exchange."""
    adding = [x for x, name in zip(sums, names, strict=True) if name not in _EXTREMES]
    added = iter(_packed_sum(adding))
    return [
        extreme_over(BATCH, name, x) if name in _EXTREMES else next(added)
        for x, name in zip(sums, names, strict=True)
    ]


def _packed_sum(shares: Sequence[jax.Array]) -> list[jax.Array]:
    """The sums over all devices; the smaller arrays of a dtype travel as one."""
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
    """Equations of a jaxpr that are tiled.

    Attributes:
      members: their positions.
      jaxpr: they alone, closed; what they read from outside is its input, what is read of them its output.
      flow: of this jaxpr.
      tiles: into how many the part of a device is cut.
    """

    members: frozenset[int]
    jaxpr: ClosedJaxpr
    flow: Flow
    tiles: int


def _tiled(devices: int, cut: bool, flow: Flow, how: None, inside: jaxprs.Inside) -> Any:
    """The jaxpr of a flow, with the equations of a region as one call."""
    region = None
    if any(map(adds_up_a_gradient, flow.equations)):
        inlined = opened(flow, devices)
        region = _find(inlined, devices, cut)
        flow = flow if region is None else inlined
    equations = [inside(each.eqn, blocks=each.bodies) if each.bodies else each.eqn for each in flow.equations]
    if region is None:
        return equations
    return flow.jaxpr.replace(eqns=_with_call(equations, region, devices))


def _with_call(equations: Sequence[Any], region: _Region, devices: int) -> list[Any]:
    """Equations, with those of a region as one call behind all that does not need it."""
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
    """The equations of a jaxpr that are to be tiled."""
    found = gradient_sums(flow)
    tiles = None if found is None else _tiles(found, devices, cut)
    if found is None or tiles is None:
        return None
    jaxpr = jaxprs.build(found.inputs, found.outputs, [each.eqn for each in found.chosen])
    axes, output_axes = ([found.axis_of.get(v) for v in side] for side in (found.inputs, found.outputs))
    if not _fits(follow(jaxpr, axes, devices * tiles, output_axes), found.chosen):
        return None
    return _Region(found.members, jaxpr, follow(jaxpr, axes, devices, output_axes), tiles)


def _tiles(found: GradientSums, devices: int, cut: bool) -> int | None:
    """How many tiles bring what a device holds of a batch below `TILE_BYTES`; None where none are needed."""
    lengths = math.gcd(*(v.aval.shape[found.axis_of[v]] for v in found.batched))
    size = found.bytes // devices
    work = sum(jaxprs.equation_flops(each.eqn) for each in found.chosen) // devices
    if lengths % devices:
        return None
    large = [k for k in divisors(lengths // devices) if cut and work // k >= TILE_FLOPS]
    enough = [k for k in large if size // k <= TILE_BYTES]
    tiles = min(enough, default=max(large, default=1))
    return tiles if tiles > 1 or devices > 1 else None


def _fits(flow: Flow, chosen: Sequence[EquationFlow]) -> bool:
    """Whether tiles do with each equation what devices do."""
    return not flow.gathered and all(
        (now.results, now.reduced) == (then.results, then.reduced)
        and not now.gathered
        and all(map(is_independent, now.bodies))
        for now, then in zip(flow.equations, chosen, strict=True)
    )
