"""Whether `fdg.diff` names the fragment in which one operation was changed.

    python -m bench.planted --count 50 --seed 0

Each of `--count` algorithms with a change is compared with a recording of the original algorithm; an
unchanged algorithm follows each. The change multiplies the result of a random operation by 1 + 1e-6. A change
without effect on an iteration's values (such as in a product with zero) is drawn again.
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
            ends, rest = results[: len(leaves)], results[len(leaves) :]
            return jax.tree.unflatten(structure, ends), jax.tree.unflatten(jax.tree.structure(metrics), rest)

        self.iterate = iterate


def plant(algorithm: Any, graph: fdg.FDG, fragment: str, choose: random.Random) -> Planted | None:
    """The algorithm with a change in an operation of a fragment, but not of a fragment nested in it.

    Returns None if the fragment has no operation whose result is a float32.
    """
    count = 0

    def rewritten(chosen: int) -> Any:
        nonlocal count
        count = 0

        def block(jaxpr: Any, inside_of: str, inside: jaxprs.Inside) -> Iterator[core.JaxprEqn]:
            nonlocal count
            for eqn in jaxpr.eqns:
                mark = FragmentMark.of(eqn)
                eqn = inside(eqn, inside_of if mark is None else mark.name)
                if inside_of != fragment or not _is_candidate(eqn):
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

    rewritten(-1)
    return Planted(algorithm, rewritten(choose.choice(range(count))), graph.metrics) if count else None


def _is_candidate(eqn: core.JaxprEqn) -> bool:
    if jaxprs.bodies(eqn) or len(eqn.outvars) != 1 or isinstance(eqn.outvars[0], core.DropVar):
        return False
    return str(getattr(eqn.outvars[0].aval, "dtype", "")) == "float32" and not jaxprs.is_identity(eqn)


def run_of(algorithm: Any, seed: int) -> Run:
    """A run with the first state of a seed."""
    return Run(algorithm, jax.jit(algorithm.init)(jax.random.key(seed)), 0, seed=seed)


def changes_nothing(before: Run, after: Run) -> bool:
    """Whether the changed iteration returns the same bits."""
    ends = [jax.tree.leaves(jax.jit(run.algorithm.iterate)(before.state)) for run in (before, after)]
    return all(np.asarray(keys.to_data(a)).tobytes() == np.asarray(keys.to_data(b)).tobytes()
               for a, b in zip(*ends, strict=True))  # fmt: skip


def main() -> None:
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
                diff = fdg.diff(path, changed)
                if diff.differs or not changes_nothing(run, changed):
                    break
                redrawn += 1
            named += diff.fragment == fragment
            print(f"{number:3} {name} {fragment}: {diff.fragment} {diff.where}", flush=True)
            name = choose.choice(list(SMALL))
            run, _, path = recorded[name]
            none += not (diff := fdg.diff(path, run)).differs
            print(f"{number:3} {name}, unchanged: {diff if diff.differs else 'none'}", flush=True)
    print(f"named {named} of {args.count}; none in {none} of {args.count} equal ones; {redrawn} drawn again")


if __name__ == "__main__":
    main()
