"""`fdg.sweep` and `fdg.search`: hyperparameters in one program, or in one trial after another."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import policies
from fdg.arguments import checked
from fdg.errors import FdgError
from fdg.placing.policy import checked_devices
from fdg.training.fit import fit, make_job
from fdg.training.loading import load_with_names
from fdg.training.run import Run
from fdg.training.search import Trial, best_trial, carry_out_search, is_whole
from fdg.training.settings import flat
from fdg.training.space import make_grid, make_space, space_text
from fdg.training.sweep import Sweep, check_names


@checked
def sweep(
    algorithm: Any,
    values: Mapping[str, Any],
    policy: Any = None,
    *,
    num_seeds: int = 1,
    exploit_every: int | None = None,
    **settings: Any,
) -> Run:
    """Trains an algorithm with every combination of hyperparameter values, each from several seeds, in one
    program.

    Agents are distributed over the devices. Results are written to the run directory: `sweep.json`,
    `sweep.csv` and `sweep.png`.

    Args:
      algorithm: as for `fdg.fit`; all agents share hyperparameters that are not swept.
      values: float hyperparameters by name: numbers, or a range such as `"log:1e-4..1e-2x8"`.
      policy: as for `fdg.fit`.
      num_seeds: agents of each combination, with seeds `seed`, `seed + 1`, ...
      exploit_every: None, or population-based training: agents start from these values, and every
        `exploit_every` iterations the worst copy the best, with perturbed hyperparameters.
      settings: further arguments of `fdg.fit`.

    Returns:
      The run: `run.best` has the agents of the best combination, `run.member(learning_rate=1e-3)` those of
      any other.

    Raises:
      FdgError: an argument is invalid; nothing has been written.

    Example::

        run = fdg.sweep(
            algos.PPO(env=envs.make("CartPole-v1")), {"learning_rate": [1e-4, 3e-4, 1e-3]}, num_seeds=16
        )
        print(run.best.algorithm.learning_rate, run.best.evaluate())
    """
    check_names(algorithm, [str(name).replace("-", "_") for name in values])  # before their values
    return fit(Sweep(algorithm, make_grid(values), num_seeds, exploit_every), policy, **settings)


@dataclasses.dataclass(frozen=True)
class Search:
    """The result of `fdg.search`.

    Attributes:
      path: the search's directory.
      trials: the trials, in order.
      interrupted: whether Ctrl-C ended it; the same call with `resume=True` continues.
    """

    path: Path
    trials: tuple[Trial, ...]
    interrupted: bool = False
    _named: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def best(self) -> Run:
        """The run of the best trial.

        Raises:
          FdgError: no trial is done.
        """
        best = best_trial(self.trials)
        if best is None:
            raise FdgError(f"no trial of {self.path} is done: give more trials, or a longer training")
        return load_with_names(self.path / "trials" / best.run, self._named)


@checked
def search(
    algorithm: Any,
    values: Mapping[str, Any],
    policy: Any = None,
    *,
    trials: int,
    halving: bool = True,
    devices: int | Sequence[jax.Device] | None = None,
    progress: bool = True,
    **settings: Any,
) -> Search:
    """Searches hyperparameters with Optuna; each trial is compiled and trained as a separate run.

    Use it for hyperparameters that change the program, such as sizes. For floats a sweep is faster;
    `algorithm` may be a sweep (`fdg.Sweep`); a trial's return is then that of its best combination.

    Args:
      algorithm: as for `fdg.fit`.
      values: by name, a list of choices, or a range: `"log:1e-4..1e-2"`, `"lin:16..256"`.
      policy: as for `fdg.fit`.
      trials: the number of trials; fewer are run where all combinations of choices have been tried.
      halving: prune trials that are behind at 1/27, 1/9 and 1/3 of the training.
      devices: as for `fdg.fit`.
      progress: print progress.
      settings: further arguments of `fdg.fit`: `total_steps`, `seed`, `num_seeds`, `out`, `resume`,
        `eval_every`, `eval_episodes`, `checkpoint_every`, `stop_at`.

    Returns:
      All trials, the path of the run directory, and `best`: the `Run` with the highest mean return.

    Raises:
      FdgError: an argument is invalid, or Optuna is not installed.

    Example::

        found = fdg.search(algorithm, {"hidden": [(64, 64), (256,)], "num_steps": [64, 128]}, trials=12)
        print(found.best.evaluate())
    """
    if trials < 1:
        raise FdgError(f"trials={trials!r}: give a whole number, at least 1")
    space = make_space(values, lambda name: is_whole(algorithm, name))
    more: dict[str, Any] = {"optuna": trials, "search": space_text(space), "halving": halving}
    job = make_job(algorithm, policies.GPUOnly() if policy is None else policy, **settings, **more)
    used = None if devices is None else checked_devices(devices)
    path, made, caught = carry_out_search(job, space, used, quiet=not progress)
    named = flat(job.config)  # named by the caller, except networks to choose from
    return Search(path, tuple(made), caught is not None, named)
