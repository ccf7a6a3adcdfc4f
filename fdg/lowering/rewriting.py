"""Rewrites a program before it gets sharding constraints.

The rewrites need no mesh: the program still computes global arrays. The cost model applies them too, so that
it sees the same program as the compiler.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fdg import jaxprs
from fdg.batch.rules.result import Axis
from fdg.jax_internals import ClosedJaxpr
from fdg.lowering.draws import hoist_draws
from fdg.lowering.ordering import hoist_batch_reductions, order_collectives
from fdg.lowering.tiles import tile
from fdg.lowering.transposing import transpose_weight_gradients


class Setting(NamedTuple):
    """The devices and batch axes that a program is rewritten for."""

    axes: Sequence[Axis]  # the batch axes of the first inputs; the other inputs are replicated
    devices: int  # the number of devices that split the batch
    output_axes: Sequence[Axis] | None  # the batch axes to reshard the outputs to; None to leave them
    on_cpu: bool
    uses_all_cores: bool  # True if there are at least as many devices as cores (`tiles.uses_all_cores`)
    sharded: bool = False  # True if parameters are sharded, so that XLA chooses collectives


@functools.lru_cache(maxsize=256)
def _hoist_all_draws(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    # Also removes dead code, which gives later passes less to do.
    return jaxprs.without_dead_code(hoist_draws(jaxpr))


PASSES: dict[str, tuple[Callable[[Setting], bool], Callable[[ClosedJaxpr, Setting], ClosedJaxpr]]] = {
    "draws ahead of loops": (lambda setting: True, lambda jaxpr, setting: _hoist_all_draws(jaxpr)),
    "sums ahead of loops": (
        lambda setting: setting.devices > 1 and not setting.sharded,
        lambda jaxpr, setting: hoist_batch_reductions(
            jaxpr, setting.axes, setting.devices, setting.output_axes
        ),
    ),
    "gradients in tiles": (
        lambda setting: (
            not setting.sharded and (setting.uses_all_cores or (setting.on_cpu and setting.devices > 1))
        ),
        lambda jaxpr, setting: tile(jaxpr, setting.axes, setting.devices, setting.uses_all_cores),
    ),
    "weight gradients transposed": (
        lambda setting: setting.on_cpu and not setting.sharded,
        lambda jaxpr, setting: transpose_weight_gradients(jaxpr),
    ),
    "exchanges in order": (
        lambda setting: setting.on_cpu and setting.devices > 1 and not setting.sharded,
        lambda jaxpr, setting: order_collectives(jaxpr, setting.axes, setting.devices, setting.output_axes),
    ),
}
"""The passes in order, by name: when each applies, and the function that rewrites the program."""


def rewrite_all(jaxpr: ClosedJaxpr, setting: Setting) -> ClosedJaxpr:
    """Applies all rewrites to a traced program."""
    output_axes = None if setting.output_axes is None else tuple(setting.output_axes)
    return _rewrite(jaxpr, setting._replace(axes=tuple(setting.axes), output_axes=output_axes))


@functools.lru_cache(maxsize=256)
def _rewrite(jaxpr: ClosedJaxpr, setting: Setting) -> ClosedJaxpr:
    for applies, rewrite in PASSES.values():
        jaxpr = rewrite(jaxpr, setting) if applies(setting) else jaxpr
    return jaxpr
