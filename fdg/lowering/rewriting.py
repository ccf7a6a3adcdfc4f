"""The rewrites of a program before sharding constraints, all in the global view and without a mesh.

The cost model applies them too, so it sees the same program as the compiler.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fdg import jaxprs
from fdg.batch.rules.result import Axis
from fdg.identity_cache import IdentityCache
from fdg.jax_internals import ClosedJaxpr
from fdg.lowering.draws import hoist_draws
from fdg.lowering.ordering import hoist_batch_reductions, in_order
from fdg.lowering.tiles import tile
from fdg.lowering.transposing import transpose_weight_gradients

_DRAWN: IdentityCache[ClosedJaxpr] = IdentityCache(max_entries=256)


class Setting(NamedTuple):
    """What a program is rewritten for."""

    axes: Sequence[Axis]  # the batch axes of its first inputs; others are replicated
    devices: int  # the number of devices that split the batch
    output_axes: Sequence[Axis] | None  # the batch axes to reshard its outputs to; None to leave them
    on_cpu: bool
    a_core_each: bool  # whether there are at least as many devices as cores (`tiles.have_a_core_each`)
    sharded: bool = False  # whether parameters are sharded, so that XLA chooses collectives


def _without_draws(jaxpr: ClosedJaxpr, _: Setting) -> ClosedJaxpr:
    # Without dead code, which would make ordering keep unused values.
    return _DRAWN(jaxpr, None, lambda: jaxprs.without_dead_code(hoist_draws(jaxpr)))


PASSES: dict[str, tuple[Callable[[Setting], bool], Callable[[ClosedJaxpr, Setting], ClosedJaxpr]]] = {
    "draws ahead of loops": (lambda on: True, _without_draws),
    "sums ahead of loops": (
        lambda on: on.devices > 1 and not on.sharded,
        lambda jaxpr, on: hoist_batch_reductions(jaxpr, on.axes, on.devices, on.output_axes),
    ),
    "gradients in tiles": (
        lambda on: not on.sharded and (on.a_core_each or (on.on_cpu and on.devices > 1)),
        lambda jaxpr, on: tile(jaxpr, on.axes, on.devices, on.a_core_each),
    ),
    "weight gradients transposed": (
        lambda on: on.on_cpu and not on.sharded,
        lambda jaxpr, on: transpose_weight_gradients(jaxpr),
    ),
    "exchanges in order": (
        lambda on: on.on_cpu and on.devices > 1 and not on.sharded,
        lambda jaxpr, on: in_order(jaxpr, on.axes, on.devices, on.output_axes),
    ),
}
"""The passes in order: the condition of each, and its function on a program."""


def rewrite_all(jaxpr: ClosedJaxpr, setting: Setting) -> ClosedJaxpr:
    """A traced program with all rewrites applied."""
    ends = None if setting.output_axes is None else tuple(setting.output_axes)
    setting = setting._replace(axes=tuple(setting.axes), output_axes=ends)
    return _REWRITTEN(jaxpr, setting, lambda: _rewrite(jaxpr, setting))


_REWRITTEN: IdentityCache[ClosedJaxpr] = IdentityCache(max_entries=256)


def _rewrite(jaxpr: ClosedJaxpr, setting: Setting) -> ClosedJaxpr:
    for applies, rewrite in PASSES.values():
        jaxpr = rewrite(jaxpr, setting) if applies(setting) else jaxpr
    return jaxpr
