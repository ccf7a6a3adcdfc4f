"""`fdg.load`: opens a run directory as a `Run`."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax

import fdg
from fdg.agents import checked_name
from fdg.arguments import checked
from fdg.errors import FdgError, listed
from fdg.settings.fields import OF_NETWORK
from fdg.tracing.trace import side_by_side
from fdg.training import hub
from fdg.training.checkpoint import Checkpoints, OtherStateError
from fdg.training.description import describe, rebuild, rebuild_policy
from fdg.training.name_resolver import NameResolver
from fdg.training.run import Run
from fdg.training.run_directory import BEST, CHECKPOINTS, read_config, read_summary
from fdg.training.settings import changes
from fdg.training.sweep import Sweep, agent_count, with_recorded_sweep


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
      path: the run directory, or a packed folder; `hf://USER/NAME` is one on Hugging Face's hub.
      algorithm: the trained algorithm, if `config.json` cannot describe it (such as a network of your own).
      checkpoint: "last", "best" (of the evaluations by `--eval-every`), or an iteration.
      trust: import your own modules that the run names, and start external programs that it names.

    Raises:
      FdgError: there is no such run or checkpoint, it is damaged, or it is of another algorithm.

    Example::

        run = fdg.load("runs/CartPole-v1-ppo-0")
        action = run.policy(observation)
        print(run.evaluate(episodes=100))
    """
    return load_with_names(path, None, algorithm=algorithm, checkpoint=checkpoint, trust=trust)


def load_with_names(
    path: str | Path,
    named: Mapping[str, Any] | None,
    *,
    algorithm: Any = None,
    checkpoint: str | int = "last",
    trust: bool = False,
    flags: Collection[str] | None = None,
) -> Run:
    """As `load`.

    `named` has values that the caller gives explicitly, by field: modules that they name may be imported
    without `trust`. `flags`: see `NameResolver`.
    """
    given = algorithm
    if given is not None:
        checked_name(given)
    path = hub.download(str(path)) if str(path).startswith(hub.SCHEME) else Path(path)
    config = read_config(path, prefix="")
    resolver = NameResolver(path / "config.json", named, trust, flags)
    policy: Any = None
    if algorithm is None:
        algorithm, policy = rebuild(config, resolver, str(path))
    elif _is_delayed(config):
        policy = rebuild_policy(config, resolver, str(path))
    if not isinstance(algorithm, Sweep):  # the caller may give a swept run's plain algorithm
        algorithm = with_recorded_sweep(algorithm, config)
    checkpoints, iteration = _chosen(path, checkpoint)
    agents = agent_count(algorithm, config.get("num_seeds"))
    graph, delayed = side_by_side(fdg.trace(algorithm), agents), None
    if _is_delayed(config):  # the checkpoint then has older versions of leaves too
        plan = fdg.place(graph, policy, device_count(path, config))
        graph, delayed = plan.graph, plan.delayed
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here, weak_type=leaf.weak_type),
        graph.of_all(graph.state),
    )
    try:
        state = checkpoints.restore(iteration, target)
    except OtherStateError:
        if given is not None:
            _check_same(given, config, path)
        raise
    finally:
        checkpoints.close()
    return Run(
        algorithm,
        state if delayed is None else state.state,
        iteration,
        path=path,
        config=config,
        seed=config.get("seed", 0),
        agents=agents,
        finished=read_summary(path) is not None,
    )


def _is_delayed(config: Mapping[str, Any]) -> bool:
    return bool(config.get("staleness") or config.get("lag"))


def _check_same(algorithm: Any, config: Mapping[str, Any], path: Path) -> None:
    """Refuses an algorithm with other hyperparameters than the run; reports those of the network first."""
    described = describe(algorithm, None)
    now = {name: described[name] for name in ("algo", "env", "hyperparameters")}
    different = sorted(changes(config, now).items(), key=lambda item: item[0] not in OF_NETWORK)
    if different:
        name, (old, new) = different[0]
        raise FdgError(
            f"algorithm: {name}={new!r} contradicts the {old!r} of the run in {path}: leave algorithm out, or"
            " give that of the run"
        ) from None


def _chosen(path: Path, checkpoint: str | int) -> tuple[Checkpoints, int]:
    """The checkpoints and the iteration that `checkpoint` selects."""
    if checkpoint == "best":
        checkpoints = Checkpoints(path / BEST)
        iteration = checkpoints.latest()
        if iteration is None:
            raise FdgError(f"{path} has no best checkpoint: only runs with --eval-every N keep one")
        return checkpoints, iteration
    checkpoints = Checkpoints(path / CHECKPOINTS)
    latest = checkpoints.latest()
    if latest is None:
        raise FdgError(f"{path} has no checkpoint yet: train until it has written one")
    if checkpoint == "last":
        return checkpoints, latest
    kept = checkpoints.iterations()
    if checkpoint not in kept:
        words = ["'last'", *["'best'"] * (Checkpoints(path / BEST).latest() is not None)]
        there = listed([*map(str, kept), *words])
        raise FdgError(f"checkpoint={checkpoint!r}: {path} has no such checkpoint: give {there}")
    return checkpoints, int(checkpoint)


def device_count(path: Path, config: dict[str, Any]) -> int:
    """The number of devices that the run was planned for, or would be on this machine."""
    trained_on = (read_summary(path) or {}).get("devices") or ()
    return config.get("devices") or config.get("devices_chosen") or len(trained_on) or len(jax.devices())
