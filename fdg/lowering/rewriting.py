"""What is rewritten in a program before it is put on a mesh: all in the global view, and known without one.

So the cost model looks at the same program as the compiler does.
"""

from collections.abc import Sequence

from fdg import jaxprs
from fdg.batch.rules.result import Axis
from fdg.jax_internals import ClosedJaxpr
from fdg.lowering.draws import draw_ahead
from fdg.lowering.ordering import in_order, meet_ahead
from fdg.lowering.tiles import tile
from fdg.lowering.turning import turn_kernels
from fdg.recall import Recall

_DRAWN: Recall[ClosedJaxpr] = Recall(most=256)


def rewritten(
    jaxpr: ClosedJaxpr,
    axes: Sequence[Axis],
    devices: int,
    output_axes: Sequence[Axis] | None,
    *,
    on_cpu: bool,
    a_core_each: bool,
    sharded: bool = False,
) -> ClosedJaxpr:
    """The program as it is to run: draws ahead of loops, sums in one go or in tiles, exchanges in order.

    Args:
      jaxpr: a traced program.
      axes: the batch axes of its first inputs; the others are shared.
      devices: over how many the batch is split.
      output_axes: what its outputs are brought to; None for whatever they have.
      on_cpu: whether the devices are CPUs.
      a_core_each: whether they are as many as there are cores, or more (`tiles.have_a_core_each`).
      sharded: whether parameters are split too; then exchanges are XLA's.
    """
    # Without dead code, or what is put in order would need it.
    jaxpr = _DRAWN(jaxpr, None, lambda: jaxprs.without_dead_code(draw_ahead(jaxpr)))
    if sharded:
        return jaxpr
    if devices > 1:
        jaxpr = meet_ahead(jaxpr, axes, devices, output_axes)
    if a_core_each or (on_cpu and devices > 1):
        jaxpr = tile(jaxpr, axes, devices, a_core_each)
    if on_cpu:
        jaxpr = turn_kernels(jaxpr)
    return in_order(jaxpr, axes, devices, output_axes) if on_cpu and devices > 1 else jaxpr
