"""`fdg.load`: opens a run directory as a `Run`. `StoredRun`: a run before a checkpoint is read."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax

import fdg
from fdg.agents import checked_name, of_seeds
from fdg.arguments import checked
from fdg.errors import FdgError, listed, one_line
from fdg.settings.fields import NETWORK_FIELDS
from fdg.training import hub
from fdg.training.checkpoint import Checkpoints, OtherStateError
from fdg.training.description import describe, rebuild_algorithm, rebuild_policy
from fdg.training.name_resolver import NameResolver
from fdg.training.run import Run
from fdg.training.run_directory import BEST, CHECKPOINTS, read_config, read_summary
from fdg.training.settings import changes
from fdg.training.sweep import Sweep, agent_count, restore_sweep


@checked
def load(
    path: str | Path,
    *,
    algorithm: Any = None,
    checkpoint: str | int = "last",
    trust: bool = False,
) -> Run:
    """Loads the run in a directory that `python -m fdg.train` or `fdg.fit` wrote.

    Works on any devices; all arrays are put on the first one.

    Args:
      path: the run directory, or a packed folder; `hf://USER/NAME` is a packed folder on Hugging Face's hub.
      algorithm: the trained algorithm, if `config.json` cannot describe it (such as a network of your own).
      checkpoint: "last", "best" (by the evaluations of `--eval-every`), or an iteration.
      trust: import your own modules that the run names, and start external programs that it names.

    Raises:
      FdgError: the run or checkpoint does not exist, is damaged, or has another algorithm.

    Example::

        run = fdg.load("runs/CartPole-v1-ppo-0")
        action = run.policy(observation)
        print(run.evaluate(episodes=100))
    """
    stored = StoredRun.open(path, trust=trust, algorithm=algorithm)
    try:
        return stored.restore(checkpoint)
    except OtherStateError:
        if algorithm is not None:
            _check_equal_algorithm(stored)
        raise


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """A run directory whose `config.json` has been read; `restore` reads a checkpoint."""

    path: Path
    config: Mapping[str, Any]
    resolver: NameResolver  # resolves the names in `config`
    algorithm: Any  # built from `config`, or the caller's; a `Sweep` if the run was swept

    @classmethod
    def open(
        cls,
        path: str | Path,
        caller_values: Mapping[str, Any] | None = None,
        *,
        trust: bool = False,
        flags: Collection[str] | None = None,
        algorithm: Any = None,
    ) -> "StoredRun":
        """Reads the configuration in a directory, and builds its algorithm unless the caller gives it.

        `caller_values` are the caller's own values by field, such as of `--env`: modules in them may be
        imported without `trust`. `flags` are the fields for which the caller has a flag that error messages
        may name; None: all fields.
        """
        if algorithm is not None:
            checked_name(algorithm)
        path = hub.download(str(path)) if str(path).startswith(hub.SCHEME) else Path(path)
        config = read_config(path, prefix="")
        resolver = NameResolver(path / "config.json", caller_values, trust, flags)
        if algorithm is None:
            stored = cls(path, config, resolver, rebuild_algorithm(config, resolver, str(path)))
            stored.policy  # noqa: B018 (raises if the configuration has no valid policy)
            return stored
        if not isinstance(algorithm, Sweep):  # a caller need not wrap it in the run's Sweep
            algorithm = restore_sweep(algorithm, config)
        return cls(path, config, resolver, algorithm)

    @functools.cached_property
    def policy(self) -> Any:
        """The run's distribution policy."""
        return rebuild_policy(self.config, self.resolver, str(self.path))

    @property
    def agents(self) -> int | None:
        """The number of agents; None if the state has no axis of agents."""
        return agent_count(self.algorithm, self.config.get("num_seeds"))

    def restore(self, checkpoint: str | int = "last") -> Run:
        """The run at a checkpoint: "last", "best" or an iteration. All arrays are put on the first device."""
        checkpoints, iteration = _select_checkpoint(self.path, checkpoint)
        summary = read_summary(self.path)
        graph, delayed = fdg.trace(of_seeds(self.algorithm, self.agents)), None
        if self.config.get("staleness") or self.config.get("lag"):  # checkpoints also have older parameters
            plan = fdg.place(graph, self.policy, device_count(self.config, summary) or len(jax.devices()))
            graph, delayed = plan.graph, plan.delayed
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type),
            graph.of_all(graph.state),
        )
        state = checkpoints.restore(iteration, target)
        stopped = None if summary is None else summary.get("stopped")
        run = Run(
            self.algorithm,
            state if delayed is None else state.state,
            iteration,
            path=self.path,
            config=self.config,
            seed=self.config.get("seed", 0),
            agents=self.agents,
            finished=summary is not None and not stopped,
            stopped=str(stopped) if stopped else None,
        )
        run._history = None if delayed is None else state.history
        return run


def open_origin(path: Path, caller_values: Mapping[str, Any], *, trust: bool = False) -> StoredRun | None:
    """The run whose weights initialise the run in `path` (`--from`); None if that has a checkpoint.

    A resumed run without a checkpoint begins again. For the arguments see `StoredRun.open`.
    """
    origin = read_config(path, prefix="").get("from")
    if origin is None or Checkpoints(path / CHECKPOINTS).iterations():
        return None
    try:
        return StoredRun.open(Path(origin["run"]), caller_values, trust=trust)
    except (FdgError, LookupError, TypeError) as error:
        reason = error if isinstance(error, FdgError) else one_line(error)
        raise FdgError(
            f"{path} has no checkpoint yet, and the run whose weights it begins with ('from' in its"
            f" config.json) cannot be used: {reason}: bring it back, or start a new run"
        ) from None


def _check_equal_algorithm(stored: StoredRun) -> None:
    """Refuses an algorithm whose hyperparameters differ from the run's; names network fields first."""
    description = describe(stored.algorithm, None)
    entries = {name: description[name] for name in ("algo", "env", "hyperparameters")}
    differences = changes(stored.config, entries)
    if differences:
        name, (old, new) = min(differences.items(), key=lambda item: item[0] not in NETWORK_FIELDS)
        raise FdgError(
            f"algorithm: {name}={new!r} contradicts the {old!r} of the run in {stored.path}: leave algorithm"
            " out, or give the algorithm of the run"
        ) from None


def _select_checkpoint(path: Path, checkpoint: str | int) -> tuple[Checkpoints, int]:
    """The checkpoints of a run, and the iteration that `checkpoint` selects."""
    is_best = checkpoint == "best"
    checkpoints = Checkpoints(path / (BEST if is_best else CHECKPOINTS))
    latest = checkpoints.latest()
    if latest is None and is_best:
        raise FdgError(f"{path} has no best checkpoint: only runs with --eval-every N keep one")
    if latest is None:
        raise FdgError(f"{path} has no checkpoint yet: train until it has written one")
    if checkpoint in ("best", "last"):
        return checkpoints, latest
    iterations = checkpoints.iterations()
    if checkpoint not in iterations:
        names = ["'last'", *["'best'"] * (Checkpoints(path / BEST).latest() is not None)]
        choices = listed([*map(str, iterations), *names])
        raise FdgError(f"checkpoint={checkpoint!r}: {path} has no such checkpoint: give {choices}")
    return checkpoints, int(checkpoint)


def device_count(config: Mapping[str, Any], summary: Mapping[str, Any] | None) -> int:
    """The number of devices that a run was planned for, from its files; 0 if unknown."""
    trained_on = (summary or {}).get("devices") or ()
    return config.get("devices") or config.get("devices_chosen") or len(trained_on)
