"""The best designs of a search so far, as arrays in its state: the best one, and a bounded Pareto front."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs.codesign.problem import Problem, precedes

POINTS = 16  # maximum number of points of a Pareto front


class Designs(NamedTuple):
    """Designs with their costs and scores; any leading axes."""

    choices: jax.Array  # [..., decisions] int32
    latency_cycles: jax.Array  # [...] int32
    energy_pj: jax.Array  # [...] float32
    area_mm2: jax.Array  # [...] float32
    accuracy: jax.Array  # [..., M] float32
    score: jax.Array  # [...] float32
    violation: jax.Array  # [...] float32, 0 if all specs are met; infinite for no design


def empty(problem: Problem, shape: tuple[int, ...] = ()) -> Designs:
    """Designs of this leading shape that stand for no design: their violation is infinite."""
    zeros = jnp.zeros(shape)
    return Designs(
        jnp.zeros((*shape, len(problem.decisions())), jnp.int32),
        jnp.zeros(shape, jnp.int32),
        zeros,
        zeros,
        jnp.zeros((*shape, len(problem.tasks))),
        zeros,
        zeros + jnp.inf,
    )


def better(a: Designs, b: Designs) -> Designs:
    """The better design by violation, then score, then energy; `b` in a tie."""
    is_a = precedes((a.violation, -a.score, a.energy_pj), (b.violation, -b.score, b.energy_pj))
    return jax.tree.map(lambda x, y: jnp.where(is_a, x, y), a, b)


def _dominates(a: Designs, b: Designs) -> Any:
    """Constrained domination (Deb et al., IEEE TEC 2002, section VI); equal designs dominate each other."""
    pairs = [(-a.score, -b.score), *zip(a[1:4], b[1:4], strict=True)]
    no_worse = functools.reduce(operator.and_, [x <= y for x, y in pairs])
    return (a.violation < b.violation) | ((a.violation == b.violation) & no_worse)


def insert(front: Designs, new: Designs) -> Designs:
    """Inserts a design into the Pareto front, unless it is dominated: by score, latency, energy, area.

    A full front drops the point that is nearest to another one, but never the highest score. `front` is
    [POINTS], and entries anywhere may be empty; `new` has scalars.
    """
    is_replaced = jax.vmap(lambda x: _dominates(new, x))(front)
    is_dominated = (jax.vmap(lambda x: _dominates(x, new))(front) & jnp.isfinite(front.violation)).any()
    candidates = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), front, new)
    kept = jnp.isfinite(candidates.violation) & jnp.append(~is_replaced, True)
    logs = [jnp.log(jnp.maximum(jnp.asarray(x, jnp.float32), 1e-9)) for x in candidates[1:4]]
    coordinates = jnp.stack([*logs, candidates.score], axis=1)
    distances = jnp.abs(coordinates[:, None] - coordinates[None]).sum(-1)
    is_other = kept[None] & ~jnp.eye(len(kept), dtype=bool)
    nearest = jnp.where(is_other, distances, jnp.inf).min(1)
    best = jnp.where(kept, candidates.score, -jnp.inf).argmax()
    crowded = jnp.where(kept & (jnp.arange(len(kept)) != best), nearest, jnp.inf).argmin()
    kept &= ~(kept.all() & (jnp.arange(len(kept)) == crowded))
    kept_indices = jnp.argsort(~kept, stable=True)[:-1]
    chosen = jax.tree.map(lambda x: x[kept_indices], candidates)
    chosen = chosen._replace(violation=jnp.where(kept[kept_indices], chosen.violation, jnp.inf))
    return jax.tree.map(lambda x, y: jnp.where(is_dominated, x, y), front, chosen)


class Results(NamedTuple):
    """The results of a search, NumPy arrays."""

    best: Designs  # scalars; `violation` is infinite before the first design
    front: Designs  # [points], a Pareto front, by descending score


def merge(best: Designs, front: Designs) -> Results:
    """Merges the results of all instances into one best design and one Pareto front; any leading axes."""
    flat, points = _flatten(best), _flatten(front)
    best_index = np.lexsort((flat.energy_pj, -flat.score, flat.violation))[0]
    points = _take(points, np.flatnonzero(np.isfinite(points.violation)))
    sort_keys = points.area_mm2, points.latency_cycles, points.energy_pj, -points.score, points.violation
    points = _take(points, np.lexsort(sort_keys))
    kept: list[int] = []
    for i in range(len(points.score)):  # designs are sorted after those that dominate them
        if not np.any(_dominates(_take(points, kept), _take(points, i))):
            kept.append(i)
    return Results(_take(flat, best_index), _take(points, kept))


def _flatten(designs: Designs) -> Designs:
    """Designs with a single leading axis, as NumPy arrays."""
    axes = np.ndim(designs.score)
    return jax.tree.map(lambda x: np.asarray(x).reshape(-1, *np.shape(x)[axes:]), designs)


def _take(designs: Designs, at: Any) -> Designs:
    """The designs at one index, or at several."""
    return Designs(*(x[np.asarray(at, np.int64)] for x in designs))
