"""A new run that begins with the weights of an earlier one."""

from typing import Any

import jax
import jax.numpy as jnp

import fdg
from fdg.errors import FdgError
from fdg.training.job import Job
from fdg.training.loading import load
from fdg.training.run import Run


def begin_from(job: Job, engine: fdg.Engine, graph: fdg.FDG, state: Any) -> tuple[Any, str]:
    """The state of a new run with the weights of the run `job.start_from`, and what was taken, as a line.

    Taken are numbers that are not of single environments (which have a batch axis) nor the optimiser's:
    parameters, target networks, the statistics of normalisers. Random keys, counters, environments and
    replayed experience begin anew.

    Args:
      job: the new run's.
      engine: likewise.
      graph: of the job's algorithm, which says what the batch axis of each leaf is.
      state: the engine's, fresh.

    Raises:
      FdgError: there is no such run, or what it learned has other shapes.
    """
    assert job.start_from is not None
    earlier = load(job.start_from, trust=True)  # what it names, the new run names
    own = engine.algorithm_state(state)
    taken, leaves = _with_weights(job, earlier, own, graph)
    own = jax.tree.unflatten(jax.tree.structure(own), leaves)
    if engine.plan.delayed is not None:
        # Actors begin with the same weights, not with those that the fresh state has.
        start = engine.plan.delayed.start
        own = jax.jit(start if job.num_seeds is None else jax.vmap(start))(own)
    line = f"begins with {taken} arrays of weights from {job.start_from}, iteration {earlier.iteration:,}"
    return own, line


def _with_weights(job: Job, earlier: Run, own: Any, graph: fdg.FDG) -> tuple[int, list[Any]]:
    theirs = {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(earlier.state)
    }
    named = jax.tree_util.tree_leaves_with_path(own)
    learned = _not_of_an_optimizer(own)
    taken, leaves = 0, []
    for (path, leaf), axis, is_learned in zip(named, graph.state_axes, learned, strict=True):
        name = jax.tree_util.keystr(path)
        if axis is None and is_learned and jnp.issubdtype(leaf.dtype, jnp.inexact) and name in theirs:
            leaf = _fitted(job, earlier, name, theirs[name], leaf)
            taken += 1
        leaves.append(leaf)
    if not taken:
        raise FdgError(f"--from {job.start_from}: nothing that it learned is in the state of {graph.name}")
    return taken, leaves


def _fitted(job: Job, earlier: Run, name: str, there: jax.Array, here: jax.Array) -> jax.Array:
    """An array of the earlier run, for as many agents as the new one has."""
    if earlier.num_seeds is not None and job.num_seeds is None:
        there = there[0]
    elif earlier.num_seeds is None and job.num_seeds is not None:
        there = jnp.broadcast_to(there, (job.num_seeds, *there.shape))
    if there.shape != here.shape or there.dtype != here.dtype:
        raise FdgError(
            f"--from {job.start_from}: state{name} is {there.dtype}{list(there.shape)} there and"
            f" {here.dtype}{list(here.shape)} here: keep the network as it was"
        )
    # A copy, laid out as the new one: the earlier run's state stays its own.
    return jax.device_put(jnp.copy(there), here.sharding)


def _not_of_an_optimizer(state: Any) -> list[bool]:
    """Of each leaf, whether it belongs to no state of optax."""

    def is_optimizer(node: Any) -> bool:
        return type(node).__module__.partition(".")[0] == "optax"

    marked = jax.tree.map(
        lambda node: jax.tree.map(lambda _: False, node) if is_optimizer(node) else True,
        state,
        is_leaf=is_optimizer,
    )
    return jax.tree.leaves(marked)
