"""Agents of one program that take over parts of each other's state: see `fdg.tracing.between_agents`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fdg import keys
from fdg.lowering.mesh import SEED
from fdg.tracing.between_agents import BetweenAgents
from fdg.tracing.graph import FDG


def exchanging(iterate: Callable, graph: FDG, between: BetweenAgents) -> Callable:
    """An iteration of the agents of a device, and what follows it where an exchange is due.

    Under `shard_map` over the agents. What is taken over is gathered from all devices, only when it is due.

    Args:
      iterate: from leaves `[agents here, ...]` to such leaves, and metrics.
      graph: of one agent.
      between: its `between_agents`, which says when and what.
    """
    structure = jax.tree.structure(graph.state)
    taken = between.taken(graph.state, graph.state_axes)

    def exchanged(leaves: list) -> list:
        here = leaves[0].shape[0]
        agents = jax.lax.axis_index(SEED) * here + jnp.arange(here, dtype=jnp.int32)
        state = jax.tree.unflatten(structure, leaves)
        everyone = jax.tree.map(_gathered, between.known(state))
        source = jax.vmap(between.source, in_axes=(None, 0, 0))(everyone, agents, state)
        taken_over = [
            _gathered(x)[source] if is_taken else x for x, is_taken in zip(leaves, taken, strict=True)
        ]
        after = jax.vmap(between.after)(jax.tree.unflatten(structure, taken_over), source, agents)
        return [_as(new, old) for new, old in zip(jax.tree.leaves(after), leaves, strict=True)]

    def iterate_and_exchange(*leaves: Any) -> list:
        results = iterate(*leaves)
        ends, metrics = list(results[: len(leaves)]), results[len(leaves) :]
        one = jax.tree.unflatten(structure, [x[0] for x in ends])
        return [*jax.lax.cond(between.due(one), exchanged, list, ends), *metrics]

    return iterate_and_exchange


def _gathered(x: jax.Array) -> jax.Array:
    """The rows of all devices, in the order of agents."""
    return jax.lax.all_gather(x, SEED, tiled=True)


def _as(new: jax.Array, old: jax.Array) -> jax.Array:
    """Strongly typed, as the state is."""
    return new if keys.is_key(old.dtype) else jax.lax.convert_element_type(new, old.dtype)
