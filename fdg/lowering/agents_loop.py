"""Maps the agents of a device a few at a time, each group through all iterations of a call.

    128 agents on a GPU     all mapped together: one program of large operations
    128 agents on a core    8 mapped together for all iterations of a call; then the next 8

The plan has the number (`placing.agents_per_device`). Agents are independent, so the order does not matter;
those of a population are stepped together.
"""

from collections.abc import Callable
from typing import Any

import jax

from fdg.jax_internals import ClosedJaxpr
from fdg.lowering.draws import hoist_draws
from fdg.lowering.rewriting import Setting, rewritten


def of_one(jaxpr: ClosedJaxpr, together: int, setting: Setting) -> ClosedJaxpr:
    """Prepares a traced program of one agent to be mapped, `together` at a time, or to run alone."""
    return hoist_draws(jaxpr) if together > 1 else rewritten(jaxpr, setting)


def by_groups(
    run: Callable[[list, list, Any], tuple[list, list]], agents: int, together: int
) -> Callable[[list, list], tuple[list, list]]:
    """A training loop for all agents of a device, made of one for `together` agents.

    Args:
      run: `(leaves, buffers, first) -> (leaves, buffers)`: leaves `[together, ...]`; it writes the entries
        from agent `first` on into `buffers` `[rows, agents, ...]`.
      agents: agents on the device.
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
