"""Tests whether `fdg.diff` names the fragment in which one operation was changed ("planted" faults).

    python -m bench.planted --count 50 --seed 0

This compares `--count` changed algorithms, and as many unchanged ones, with recordings of the original
algorithms. A change multiplies the result of a random operation by 1 + 1e-6. If a change has no effect on the
state after an iteration (as in a product with zero), another change is drawn.
"""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend import core

import algos
import envs
import fdg
from bench import harness
from fdg import jaxprs, keys
from fdg.fragment import FragmentMark
from fdg.training.run import Run

CHANGE = 1 + 1e-6
OFF_POLICY = {"num_envs": 4, "hidden": (4,), "buffer_size": 64, "batch_size": 4, "learning_starts": 0}
SMALL: dict[str, dict[str, Any]] = {
    "ppo": {"num_envs": 4, "num_steps": 4, "hidden": (4,), "num_minibatches": 2, "num_epochs": 1},
    "a2c": {"num_envs": 4, "num_steps": 4, "hidden": (4,)},
    "recurrent_ppo": {"num_envs": 4, "num_steps": 4, "hidden": (4,), "num_minibatches": 2, "num_epochs": 1},
    "dqn": {**OFF_POLICY, "num_steps": 2},
    "sac": {**OFF_POLICY, "num_steps": 2},
}
ENVS = {"sac": "Pendulum-v1"}


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


def run_of(algorithm: Any, seed: int) -> Run:
    """An untrained run, with the initial state of a seed."""
    return Run(algorithm, jax.jit(algorithm.init)(jax.random.key(seed)), 0, seed=seed)


def changes_nothing(before: Run, after: Run) -> bool:
    """Whether the changed iteration returns the same state, bit for bit."""
    next_states = [jax.tree.leaves(jax.jit(run.algorithm.iterate)(before.state)) for run in (before, after)]
    return all(np.asarray(keys.to_data(a)).tobytes() == np.asarray(keys.to_data(b)).tobytes()
               for a, b in zip(*next_states, strict=True))  # fmt: skip


def main() -> None:
    parser = harness.parser("bench.planted", __doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    originals: dict[str, tuple[Run, fdg.FDG, Path]] = {}
    num_named = num_without_difference = num_redrawn = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, sizes in SMALL.items():
            env = envs.make(ENVS.get(name, "CartPole-v1"))
            algorithm = algos.get(name)(env=env, **sizes)
            run = run_of(algorithm, args.seed)
            path = fdg.record(run, Path(folder) / f"{name}.npz")
            originals[name] = run, fdg.trace(algorithm), path
        for number in range(args.count):
            while True:
                name = rng.choice(list(SMALL))
                run, graph, path = originals[name]
                fragment = rng.choice(graph.fragments).name
                planted = plant(run.algorithm, graph, fragment, rng)
                if planted is None:
                    continue
                changed = Run(planted, run.state, 0, seed=args.seed)
                diff = fdg.diff(path, changed)
                if diff.differs or not changes_nothing(run, changed):
                    break
                num_redrawn += 1
            num_named += diff.fragment == fragment
            print(f"{number:3} {name} {fragment}: {diff.fragment} {diff.where}", flush=True)
            name = rng.choice(list(SMALL))
            run, _, path = originals[name]
            num_without_difference += not (diff := fdg.diff(path, run)).differs
            print(f"{number:3} {name}, unchanged: {diff if diff.differs else 'none'}", flush=True)
    print(
        f"named {num_named} of {args.count} changed fragments; no difference in {num_without_difference} of"
        f" {args.count} unchanged algorithms; {num_redrawn} changes drawn again"
    )


if __name__ == "__main__":
    main()
