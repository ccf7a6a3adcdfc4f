"""What the agents of a population exchange, as a plan has it: see `fdg.tracing.between_agents`."""

import jax

from fdg.batch.collective import Collective
from fdg.errors import PlanError
from fdg.placing.staleness import Delay
from fdg.tracing.graph import FDG


def exchanged_by_agents(
    graph: FDG, num_agents: int, width: int, delayed: Delay | None
) -> tuple[tuple[Collective, ...], tuple[str, ...]]:
    """What the devices of a population gather where an exchange is due, and a note; empty for other agents.

    Args:
      graph: of one agent.
      num_agents: all of them.
      width: devices that they are on.
      delayed: what the policy's staleness delays.

    Raises:
      PlanError: older versions of what is taken over are kept too.
    """
    between = graph.between_agents
    if between is None:
        return (), ()
    if delayed is not None:
        raise PlanError(
            "agents of a population take over each other's newest parameters, and staleness keeps older ones:"
            " leave one out"
        )
    if width == 1:
        return (), (between.note,)
    taken = between.taken(graph.state, graph.state_axes)
    leaves = [leaf for leaf, is_taken in zip(jax.tree.leaves(graph.state), taken, strict=True) if is_taken]
    seen = jax.tree.leaves(jax.eval_shape(between.known, graph.state))
    sizes = [leaf.size * leaf.dtype.itemsize * num_agents for leaf in (*seen, *leaves)]
    return tuple(Collective("all-gather", size, 1) for size in sizes), (between.note,)
