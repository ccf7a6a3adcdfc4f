"""`fdg.diff` on algorithms in which one operation of one fragment was changed: is that fragment named?

    python -m bench.planted --count 50 --seed 0

Each of `--count` algorithms with a planted change is compared with a recording of the algorithm as it was,
each followed by an unchanged one. The change multiplies the result of a random operation by 1 + 1e-6. One
that changes no value (a product with zero, say) is drawn again; that is checked by a whole iteration
of its own, in one program.
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
    "recurrent_ppo": {
        "num_envs": 4,
        "num_steps": 4,
        "hidden": (4,),
        "num_minibatches": 2,
        "num_epochs": 1,
    },
    "dqn": {**OFF_POLICY, "num_steps": 2},
    "sac": {**OFF_POLICY, "num_steps": 2},
}
ENVS = {"sac": "Pendulum-v1"}


class Planted:
    """An algorithm with another iteration.

    Args:
      algorithm: as it was.
      jaxpr: of the iteration, as in `fdg.FDG`.
      metrics: their pytree.
    """

    def __init__(self, algorithm: Any, jaxpr: Any, metrics: Any):
        self.init = algorithm.init

        def iterate(state: Any) -> Any:
            leaves, structure = jax.tree.flatten(state)
            results = core.jaxpr_as_fun(jaxpr)(*leaves)
            ends, rest = results[: len(leaves)], results[len(leaves) :]
            return jax.tree.unflatten(structure, ends), jax.tree.unflatten(jax.tree.structure(metrics), rest)

        self.iterate = iterate


def plant(algorithm: Any, graph: fdg.FDG, fragment: str, choose: random.Random) -> Planted | None:
    """The algorithm with a change in an operation of a fragment, none of a fragment nested in it.

    None where the fragment has no operation whose result is a float32.
    """
    found: list[int] = []

    def rewritten(chosen: int | None) -> Any:
        found.clear()

        def block(jaxpr: Any, inside_of: str, inside: jaxprs.Inside) -> Iterator[core.JaxprEqn]:
            for eqn in jaxpr.eqns:
                mark = FragmentMark.of(eqn)
                eqn = inside(eqn, inside_of if mark is None else mark.name)
                if inside_of != fragment or not _is_candidate(eqn):
                    yield eqn
                    continue
                found.append(len(found))
                if chosen == found[-1]:
                    yield from jaxprs.traced(
                        lambda *x, eqn=eqn: jaxprs.bind(eqn, x)[0] * np.float32(CHANGE),
                        eqn.invars,
                        eqn.outvars,
                    )[0]
                else:
                    yield eqn

        return jaxprs.rewrite_blocks(graph.jaxpr, block, "")

    rewritten(None)
    if not found:
        return None
    return Planted(algorithm, rewritten(choose.choice(list(found))), graph.metrics)


def _is_candidate(eqn: core.JaxprEqn) -> bool:
    if jaxprs.bodies(eqn) or len(eqn.outvars) != 1 or isinstance(eqn.outvars[0], core.DropVar):
        return False
    return str(getattr(eqn.outvars[0].aval, "dtype", "")) == "float32" and not jaxprs.is_identity(eqn)


def run_of(algorithm: Any, seed: int) -> Run:
    """A run that holds the first state of a seed."""
    return Run(algorithm, jax.jit(algorithm.init)(jax.random.key(seed)), 0, seed=seed)


def changes_nothing(before: Run, after: Run) -> bool:
    """Whether one iteration, as one program, gives the same bits."""
    ends = [jax.tree.leaves(jax.jit(run.algorithm.iterate)(before.state)) for run in (before, after)]
    return all(np.asarray(keys.words(a)).tobytes() == np.asarray(keys.words(b)).tobytes()
               for a, b in zip(*ends, strict=True))  # fmt: skip


def main() -> None:
    """Prints a line for each algorithm, and the sums."""
    parser = harness.parser("bench.planted", __doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    choose = random.Random(args.seed)
    recorded: dict[str, tuple[Run, fdg.FDG, Path]] = {}
    named = none = redrawn = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, sizes in SMALL.items():
            env = envs.make(ENVS.get(name, "CartPole-v1"))
            algorithm = algos.get(name)(env=env, **sizes)
            run = run_of(algorithm, args.seed)
            path = fdg.record(run, Path(folder) / f"{name}.npz")
            recorded[name] = run, fdg.trace(algorithm), path
        for number in range(args.count):
            while True:
                name = choose.choice(list(SMALL))
                run, graph, path = recorded[name]
                fragment = choose.choice(graph.fragments).name
                planted = plant(run.algorithm, graph, fragment, choose)
                if planted is None:
                    continue
                changed = Run(planted, run.state, 0, seed=args.seed)
                found = fdg.diff(path, changed)
                if found.differs or not changes_nothing(run, changed):
                    break
                redrawn += 1
            named += found.fragment == fragment
            print(f"{number:3} {name} {fragment}: {found.fragment} {found.where}", flush=True)
            name = choose.choice(list(SMALL))
            run, _, path = recorded[name]
            none += not (found := fdg.diff(path, run)).differs
            print(f"{number:3} {name}, unchanged: {'none' if not found.differs else found}", flush=True)
    print(f"named {named} of {args.count}; none in {none} of {args.count} equal ones; {redrawn} drawn again")


if __name__ == "__main__":
    main()
