"""`fdg.sweep` and `fdg.search`: try hyperparameter values in one program, or in one trial after another."""

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
from fdg.training.loading import StoredRun
from fdg.training.run import Run
from fdg.training.search import Trial, allows_integer, best_trial, carry_out_search
from fdg.training.settings import flatten_config
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
      algorithm: the algorithm; all agents share the hyperparameters that are not swept.
      values: float hyperparameters by name: numbers, or a range such as `"log:1e-4..1e-2x8"` (8 values,
        spaced logarithmically).
      policy: the distribution policy; None: `policies.GPUOnly()`.
      num_seeds: agents per combination, with seeds `seed`, `seed + 1`, ...
      exploit_every: None for a grid. Otherwise population-based training: agents start from these values, and
        every `exploit_every` iterations the worst copy the best and perturb the copied hyperparameters.
      settings: further arguments of `fdg.fit`.

    Returns:
      The run: `run.best` has the agents of the best combination, `run.member(learning_rate=1e-3)` the agents
      of another one.

    Raises:
      FdgError: an argument is invalid; nothing has been written.

    Example::

        run = fdg.sweep(
            algos.PPO(env=envs.make("CartPole-v1")), {"learning_rate": [1e-4, 3e-4, 1e-3]}, num_seeds=16
        )
        print(run.best.algorithm.learning_rate, run.best.evaluate())
    """
    check_names(algorithm, [str(name).replace("-", "_") for name in values])  # before values are parsed
    return fit(Sweep(algorithm, make_grid(values), num_seeds, exploit_every), policy, **settings)


@dataclasses.dataclass(frozen=True)
class Search:
    """The result of `fdg.search`.

    Attributes:
      path: the search's directory.
      trials: the trials, in order.
      interrupted: whether a signal (SIGINT, as from Ctrl-C, or SIGTERM) ended it; the same call with
        `resume=True` continues.
    """

    path: Path
    trials: tuple[Trial, ...]
    interrupted: bool = False
    _caller_values: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def best(self) -> Run:
        """The run of the best trial.

        Raises:
          FdgError: no trial is done.
        """
        best = best_trial(self.trials)
        if best is None:
            fix = "give more trials, or a larger total_steps"
            if self.interrupted:
                fix = "the search was interrupted: call it again with resume=True"
            raise FdgError(f"no trial of {self.path} completed: {fix}")
        return StoredRun.open(self.path / "trials" / best.run, self._caller_values).restore()


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

    Use it for hyperparameters that change the program, such as sizes. For floats a sweep is faster.
    `algorithm` may be a sweep (`fdg.Sweep`); the return of a trial is then that of its best combination.

    Args:
      algorithm: the algorithm, or a sweep.
      values: by name, a list of choices, or a range: `"log:1e-4..1e-2"`, `"lin:16..256"`.
      policy: the distribution policy; None: `policies.GPUOnly()`.
      trials: the number of trials; the search ends earlier once all combinations of choices were tried.
      halving: prune trials whose return is among the lower two thirds at 1/27, 1/9 and 1/3 of the training.
      devices: the devices, or their number; None: all devices.
      progress: print progress.
      settings: further arguments of `fdg.fit`: `total_steps`, `seed`, `num_seeds`, `out`, `resume`,
        `eval_every`, `eval_episodes`, `checkpoint_every`, `stop_at`, `stop_after`.

    Returns:
      All trials, the path of the run directory, and `best`: the `Run` with the highest mean return.

    Raises:
      FdgError: an argument is invalid, or Optuna is not installed.

    Example::

        result = fdg.search(algorithm, {"hidden": [(64, 64), (256,)], "num_steps": [64, 128]}, trials=12)
        print(result.best.evaluate())
    """
    if trials < 1:
        raise FdgError(f"trials={trials!r}: give a whole number, at least 1")
    space = make_space(values, lambda name: allows_integer(algorithm, name))
    options: dict[str, Any] = {"optuna": trials, "search": space_text(space), "halving": halving}
    job, start = make_job(algorithm, policies.GPUOnly() if policy is None else policy, **settings, **options)
    job_devices = None if devices is None else checked_devices(devices)
    path, results, signal = carry_out_search(job, space, start, job_devices, quiet=not progress)
    # `Search.best` imports modules that stored settings name only if the caller named them here.
    caller_values = flatten_config(job.config)
    return Search(path, tuple(results), signal is not None, caller_values)
