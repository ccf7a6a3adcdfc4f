"""Enumerates all designs of a problem: the optimum, the feasible fraction, and specs by quantiles."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs.codesign.problem import Costs, Problem, Specs, costs_of, over, precedes, tables
from fdg.errors import FdgError


class Enumerated(NamedTuple):
    """Results of `enumerate_all`."""

    designs: int  # number of designs
    feasible: int  # number of designs that meet the specs
    networks: tuple[int, ...]  # of the best design: indices among each task's choices
    kinds: tuple[int, ...]  # its sub-accelerators: indices among `Chips.kinds()`
    score: float  # of the best design
    costs: Costs  # of the best design
    violation: float  # 0 if a design meets the specs; else the least sum of relative excess


_CHUNK = 512  # designs evaluated together; their arrays fit in a core's cache


@functools.partial(jax.jit, static_argnames="problem")
def _evaluate_chunk(problem: Problem, chips: jax.Array, indices: jax.Array) -> tuple:
    """Networks, kinds and costs of designs by index, as in `designs_at`; `chips` are `Chips.all()`."""
    counts = [len(task.choices()) for task in problem.tasks]
    costs = tables(problem)

    def evaluate(index: jax.Array) -> tuple[jax.Array, jax.Array, Costs]:
        strides = [math.prod(counts[task + 1 :]) for task in range(len(counts))]
        chosen = jnp.stack([index // stride % count for stride, count in zip(strides, counts, strict=True)])
        chip_index = index // math.prod(counts)
        return chosen, chips[chip_index], costs_of(problem, costs, chosen, chips[chip_index])

    return jax.vmap(evaluate)(indices)


def designs_at(problem: Problem, indices: jax.Array) -> tuple[jax.Array, jax.Array, Costs]:
    """The designs with these indices, from 0 to `problem.count()` - 1: networks, kinds and costs."""
    return _evaluate_chunk(problem, jnp.asarray(problem.chips.all()), jnp.asarray(indices))


def specs_at(problem: Problem, quantile: float, samples: int = 100_000, seed: int = 0) -> Specs:
    """Specs at a quantile (0 to 1) of latency, energy and area over `samples` uniformly drawn designs.

    A smaller quantile gives tighter specs.

    Raises:
      FdgError: there are more than 2^31 designs.
    """
    drawn = np.random.default_rng(seed).integers(0, _checked_count("specs_at", problem), samples)
    costs = designs_at(problem, jnp.asarray(drawn, jnp.int32))[2]
    return Specs(*(float(np.quantile(x, quantile)) for x in costs))


def enumerate_all(problem: Problem, scores: tuple[np.ndarray, ...], specs: Specs) -> Enumerated:
    """The best design: the highest score that meets the specs, then the least energy.

    The layers of a network run in sequence. `scores` has an array for each task: a score for each of its
    choices, such as weighted accuracies. A design's score is the sum over tasks.

    Raises:
      FdgError: the numbers of scores do not fit the tasks, or there are more than 2^31 designs.
    """
    counts = [len(task.choices()) for task in problem.tasks]
    if [len(task_scores) for task_scores in scores] != counts:
        raise FdgError(
            f"enumerate_all: the tasks have {counts} choices, but the scores are of"
            f" {[len(task_scores) for task_scores in scores]}: give one score for each choice"
        )
    total = _checked_count("enumerate_all", problem)
    padded = jnp.asarray(np.stack([np.pad(x, (0, max(counts) - len(x))) for x in scores]), jnp.float32)
    feasible, best, index = _find_best(problem, jnp.asarray(problem.chips.all()), padded, specs)
    networks, kinds, costs = jax.tree.map(lambda x: x[0], designs_at(problem, index[None]))
    return Enumerated(
        designs=total,
        feasible=int(feasible),
        networks=tuple(networks.tolist()),
        kinds=tuple(kinds.tolist()),
        score=float(sum(task_scores[i] for task_scores, i in zip(scores, networks.tolist(), strict=True))),
        costs=Costs(*(x.item() for x in costs)),
        violation=float(best[0]),
    )


def _checked_count(function: str, problem: Problem) -> int:
    """The number of designs, whose indices must fit into int32."""
    total = problem.count()
    if total + _CHUNK >= 2**31:
        raise FdgError(f"{function}: {total:,} designs, more than 2^31: give fewer options")
    return total


@functools.partial(jax.jit, static_argnames="problem")
def _find_best(problem: Problem, chips: jax.Array, scores: jax.Array, specs: Specs) -> tuple:
    """The number of feasible designs; (violation, -score, energy) of the best design; its index."""
    total, tasks = problem.count(), jnp.arange(len(problem.tasks))

    def step(carry: tuple, chunk_start: jax.Array) -> tuple[tuple, None]:
        feasible, best, index = carry
        indices = chunk_start + jnp.arange(_CHUNK)
        networks, _, costs = _evaluate_chunk(problem, chips, jnp.minimum(indices, total - 1))
        excess = jnp.where(indices < total, over(costs, specs).sum(0), jnp.inf)
        score = scores[tasks[None], networks].sum(1)
        # The lexicographic minimum of (violation, -score, energy).
        keys = excess, -score, costs.energy_pj
        first = jnp.lexsort(keys[::-1])[0]
        key = tuple(x[first] for x in keys)
        is_better = precedes(key, best)
        best = tuple(jnp.where(is_better, a, b) for a, b in zip(key, best, strict=True))
        return (feasible + (excess == 0).sum(), best, jnp.where(is_better, indices[first], index)), None

    initial = jnp.int32(0), (jnp.float32(jnp.inf),) * 3, jnp.int32(0)
    chunk_starts = jnp.arange(0, total, _CHUNK)
    return jax.lax.scan(step, initial, chunk_starts)[0]
