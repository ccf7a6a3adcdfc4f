"""Several agents of one program on a device: a few at a time, each few through all iterations of a call.

    128 agents on a GPU     all mapped together: one program of large operations
    128 agents on a core    8 are mapped together, and trained for the iterations of a call; then the next 8

How many at a time, the plan says (`placing.agents_per_device`). Agents do not talk to each other, so the
order does not matter; only those of a population have to keep step.
"""

from collections.abc import Callable
from typing import Any

import jax

from fdg.jax_internals import ClosedJaxpr
from fdg.lowering.draws import draw_ahead
from fdg.lowering.rewriting import Setting, rewritten


def of_one(jaxpr: ClosedJaxpr, together: int, setting: Setting) -> ClosedJaxpr:
    """A traced program of one agent as it is to be mapped, `together` at a time, or to run by itself."""
    return draw_ahead(jaxpr) if together > 1 else rewritten(jaxpr, setting)


def by_groups(
    run: Callable[[list, list, Any], tuple[list, list]], agents: int, together: int
) -> Callable[[list, list], tuple[list, list]]:
    """A training loop of `together` agents for all agents of a device, a group after another.

    Args:
      run: `(leaves, buffers, first) -> (leaves, buffers)`: leaves `[together, ...]`; `buffers`
        `[rows, agents, ...]` of all of them, of which it writes those from agent `first` on.
      agents: on the device.
      together: a divisor of their number.
    """
    if together == agents:
        return lambda leaves, buffers: run(leaves, buffers, 0)

    def group(i: jax.Array, carry: tuple[list, list]) -> tuple[list, list]:
        leaves, buffers = carry
        first = i * together
        mine = [jax.lax.dynamic_slice_in_dim(x, first, together) for x in leaves]
        mine, buffers = run(mine, buffers, first)
        leaves = [
            jax.lax.dynamic_update_slice_in_dim(x, new, first, 0) for x, new in zip(leaves, mine, strict=True)
        ]
        return leaves, buffers

    return lambda leaves, buffers: jax.lax.fori_loop(0, agents // together, group, (leaves, buffers))
