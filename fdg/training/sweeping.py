"""`fdg.sweep`: many values of hyperparameters, and many seeds of each, in one program and one call."""

from collections.abc import Mapping
from typing import Any

from fdg.training.fit import fit
from fdg.training.grid import make_grid
from fdg.training.run import Run
from fdg.training.sweep import Sweep


def sweep(
    algorithm: Any,
    values: Mapping[str, Any],
    policy: Any = None,
    *,
    num_seeds: int = 1,
    exploit_every: int | None = None,
    **settings: Any,
) -> Run:
    """Trains an algorithm with every combination of some values, each from several seeds, in one program.

    The agents are spread over the devices, whole ones, as those of `num_seeds` are. What came of it is
    written beside the run: `sweep.json`, `sweep.csv` and `sweep.png`.

    Args:
      algorithm: as for `fdg.fit`; what is not swept, all agents have in common.
      values: of float hyperparameters by name: numbers, or a range such as `"log:1e-4..1e-2x8"`.
      policy: as for `fdg.fit`.
      num_seeds: agents of each combination, of seeds `seed`, `seed + 1`, ...
      exploit_every: None, or population-based training: the agents begin with these values, and every so many
        iterations the worst take over from the best, with hyperparameters a little changed.
      settings: whatever `fdg.fit` takes.

    Returns:
      The run: `run.best` is that of the best combination alone, `run.member(learning_rate=1e-3)` any other.

    Raises:
      FdgError: it cannot be done as asked; nothing has been written then.

    Example::

        run = fdg.sweep(
            algos.PPO(env=envs.make("CartPole-v1")), {"learning_rate": [1e-4, 3e-4, 1e-3]}, num_seeds=16
        )
        print(run.best.algorithm.learning_rate, run.best.evaluate())
    """
    return fit(Sweep(algorithm, make_grid(values), num_seeds, exploit_every), policy, **settings)
