"""Rewrites a program before it gets sharding constraints.

The rewrites need no mesh: the program still computes global arrays. The cost model applies them too, so that
it sees the same program as the compiler.
"""

import functools
from collections.abc import Sequence
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


def rewrite_all(jaxpr: ClosedJaxpr, setting: Setting) -> ClosedJaxpr:
    """Applies all rewrites to a traced program."""
    output_axes = None if setting.output_axes is None else tuple(setting.output_axes)
    return _rewrite(jaxpr, setting._replace(axes=tuple(setting.axes), output_axes=output_axes))


@functools.lru_cache(maxsize=256)
def _rewrite(jaxpr: ClosedJaxpr, setting: Setting) -> ClosedJaxpr:
    jaxpr = _hoist_draws(jaxpr)
    if setting.sharded:
        return jaxpr
    split = setting.axes, setting.devices, setting.output_axes
    if setting.devices > 1:
        jaxpr = hoist_batch_reductions(jaxpr, *split)
    if setting.uses_all_cores or (setting.on_cpu and setting.devices > 1):
        jaxpr = tile(jaxpr, setting.axes, setting.devices, setting.uses_all_cores)
    if setting.on_cpu:
        jaxpr = transpose_weight_gradients(jaxpr)
    if setting.on_cpu and setting.devices > 1:
        jaxpr = order_collectives(jaxpr, *split)
    return jaxpr


@functools.lru_cache(maxsize=256)
def _hoist_draws(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Hoists draws and removes dead code, which gives later rewrites less to do."""
    return jaxprs.without_dead_code(hoist_draws(jaxpr))
