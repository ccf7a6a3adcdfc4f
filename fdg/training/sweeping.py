"""`fdg.sweep` and `fdg.search`: many values of hyperparameters, in one program, or in trials one by one."""

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
    check_names(algorithm, [str(name).replace("-", "_") for name in values])  # before their values
    return fit(Sweep(algorithm, make_grid(values), num_seeds, exploit_every), policy, **settings)


@dataclasses.dataclass(frozen=True)
class Search:
    """What `fdg.search` returns.

    Attributes:
      path: its directory.
      trials: in the order in which they were made.
      interrupted: whether Ctrl-C ended it early; the same call goes on, with `resume=True`.
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
    """Trains with hyperparameters that Optuna proposes, each trial in a run and a program of its own.

    For what decides the program, such as sizes; floats are quicker in a sweep, and `algorithm` may be one
    (`fdg.Sweep`), whose best point a trial is then worth.

    Args:
      algorithm: as for `fdg.fit`.
      values: by name, a list of choices, or a range as a text: `"log:1e-4..1e-2"`, `"lin:16..256"`.
      policy: as for `fdg.fit`.
      trials: how many.
      halving: end trials that are behind at 1/27, 1/9 and 1/3 of their training.
      devices: as for `fdg.fit`.
      progress: print how it goes.
      settings: of a run, as `fdg.fit` takes them: `total_steps`, `seed`, `num_seeds`, `out`, `resume`,
        `eval_every`, `eval_episodes`, `checkpoint_every`, `stop_at`.

    Raises:
      FdgError: it cannot be done as asked, or Optuna is not installed.

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
    named = flat(job.config)  # by the caller; but for networks to choose from
    return Search(path, tuple(made), caught is not None, named)
