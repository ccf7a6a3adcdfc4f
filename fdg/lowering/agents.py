"""Several agents of one program on a device: a few at a time, each few through all iterations of a call.

    128 agents on a GPU     all mapped together: one program of large operations
    128 agents on a core    8 are mapped together, and trained for the iterations of a call; then the next 8

How many at a time, the plan says (`placing.agents`). Agents do not talk to each other, so the order does not
matter; only those of a population have to keep step.
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


def mapped(one: Callable[..., list[Any]], agents: int, together: int) -> Callable[..., list[Any]]:
    """A function of one agent for all agents of a device, `together` at a time.

    Args:
      one: from arrays to arrays.
      agents: on the device, the leading axis of all arrays that the result takes and gives.
      together: a divisor of their number.
    """
    if together == agents:
        return one_by_one(one) if agents == 1 else jax.vmap(one)
    some = one_by_one(one) if together == 1 else jax.vmap(one)

    def all_here(*arrays: Any) -> list[Any]:
        groups = [x.reshape(agents // together, together, *x.shape[1:]) for x in arrays]
        results = jax.lax.map(lambda group: some(*group), groups)
        return [x.reshape(agents, *x.shape[2:]) for x in results]

    return all_here


def one_by_one(one: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """A function of one agent for the only agent of a device, whose arrays have an axis of length one."""
    return lambda *arrays: [x[None] for x in one(*(x[0] for x in arrays))]


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
