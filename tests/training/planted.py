"""Changes one operation of an algorithm (a "planted" fault), whose fragment `fdg.diff` must name."""

import random
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

import fdg
from fdg import jaxprs, keys
from fdg.fragment import FragmentMark
from fdg.training.run import Run

CHANGE = 1 + 1e-6


class Planted:
    """An algorithm with a changed iteration.

    Args:
      algorithm: the original.
      jaxpr: the changed iteration, as in `fdg.FDG`.
      metrics: the pytree of the metrics.
    """

    def __init__(self, algorithm: Any, jaxpr: Any, metrics: Any):
        self.init = algorithm.init

        def iterate(state: Any) -> Any:
            leaves, structure = jax.tree.flatten(state)
            results = core.jaxpr_as_fun(jaxpr)(*leaves)
            state_leaves, metric_leaves = results[: len(leaves)], results[len(leaves) :]
            return jax.tree.unflatten(structure, state_leaves), jax.tree.unflatten(
                jax.tree.structure(metrics), metric_leaves
            )

        self.iterate = iterate


def plant(algorithm: Any, graph: fdg.FDG, fragment: str, rng: random.Random) -> Planted | None:
    """The algorithm with a change in an operation of a fragment, but not of a fragment nested in it.

    Returns None if the fragment has no operation whose result is a float32.
    """
    count = 0

    def rewrite(chosen: int) -> Any:
        """The iteration with operation number `chosen` changed; counts the candidates."""
        nonlocal count
        count = 0

        def block(jaxpr: Any, block_fragment: str, inside: jaxprs.Inside) -> Iterator[core.JaxprEqn]:
            nonlocal count
            for eqn in jaxpr.eqns:
                mark = FragmentMark.of(eqn)
                eqn = inside(eqn, block_fragment if mark is None else mark.name)
                if block_fragment != fragment or not _is_candidate(eqn):
                    yield eqn
                    continue
                count += 1
                if chosen == count - 1:
                    yield from jaxprs.traced(
                        lambda *x, eqn=eqn: jaxprs.bind(eqn, x)[0] * np.float32(CHANGE),
                        eqn.invars,
                        eqn.outvars,
                    )[0]
                else:
                    yield eqn

        return jaxprs.rewrite_blocks(graph.jaxpr, block, "")

    rewrite(-1)
    return Planted(algorithm, rewrite(rng.choice(range(count))), graph.metrics) if count else None


def _is_candidate(eqn: core.JaxprEqn) -> bool:
    """Whether an equation has one float32 result and no inner jaxpr, and is not an identity."""
    if jaxprs.bodies(eqn) or len(eqn.outvars) != 1 or isinstance(eqn.outvars[0], core.DropVar):
        return False
    return str(getattr(eqn.outvars[0].aval, "dtype", "")) == "float32" and not jaxprs.is_identity(eqn)


def changes_nothing(before: Run, after: Run) -> bool:
    """Whether the changed iteration returns the same state, bit for bit."""
    next_states = [jax.tree.leaves(jax.jit(run.algorithm.iterate)(before.state)) for run in (before, after)]
    return all(np.asarray(keys.to_data(a)).tobytes() == np.asarray(keys.to_data(b)).tobytes()
               for a, b in zip(*next_states, strict=True))  # fmt: skip
