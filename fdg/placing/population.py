"""The collectives by which agents of a population exchange state (see `fdg.tracing.between_agents`)."""

import jax

from fdg.batch.collective import Collective
from fdg.errors import PlanError
from fdg.placing.staleness import Delay
from fdg.tracing.graph import FDG


def exchanged_by_agents(
    graph: FDG, num_agents: int, width: int, delayed: Delay | None
) -> tuple[tuple[Collective, ...], tuple[str, ...]]:
    """The all-gathers of one exchange, and a note for the plan; both empty for independent agents.

    Args:
      graph: the graph of one agent.
      num_agents: the size of the population.
      width: the number of devices that the agents are on.
      delayed: the values that the policy's staleness delays; None without staleness.

    Raises:
      PlanError: the policy has staleness.
    """
    between = graph.between_agents
    if between is None:
        return (), ()
    if delayed is not None:
        raise PlanError(
            "population-based training copies the newest parameters between agents, and staleness keeps older"
            " ones: use only one of the two"
        )
    if width == 1:
        return (), (between.note,)
    taken = between.taken(graph.state, graph.state_axes)
    leaves = [leaf for leaf, is_taken in zip(jax.tree.leaves(graph.state), taken, strict=True) if is_taken]
    seen = jax.tree.leaves(jax.eval_shape(between.known, graph.state))
    sizes = [leaf.size * leaf.dtype.itemsize * num_agents for leaf in (*seen, *leaves)]
    return tuple(Collective("all-gather", size, 1) for size in sizes), (between.note,)
