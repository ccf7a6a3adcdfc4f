"""`fdg.load`: opens a run directory as a `Run`. `StoredRun`: a run before a checkpoint is read.

`read_weights` takes the weights of an earlier run that initialise a new one (`--from`).
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fdg
from fdg.agents import checked_name, of_seeds
from fdg.arguments import checked
from fdg.errors import FdgError, kind_of, listed, one_line
from fdg.kinds import shown
from fdg.processes.arrays import put
from fdg.settings.fields import NETWORK_FIELDS
from fdg.training import hub
from fdg.training.checkpoint import Checkpoints, OtherStateError
from fdg.training.description import describe, rebuild_algorithm, rebuild_policy
from fdg.training.name_resolver import NameResolver
from fdg.training.run import Run
from fdg.training.run_directory import BEST, CHECKPOINTS, device_count, read_config, read_summary
from fdg.training.settings import changes
from fdg.training.sweep import (
    Sweep,
    SweptState,
    agent_count,
    replace_fields,
    restore_sweep,
    unwrap_sweep,
)

_SWEEP_PREFIX = "sweep"  # prefix for names of leaves that a sweep adds to the algorithm's state


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
        raise FdgError(f"{path} has no checkpoint yet: continue it with fdg train --resume {path}")
    if checkpoint in ("best", "last"):
        return checkpoints, latest
    iterations = checkpoints.iterations()
    if checkpoint not in iterations:
        names = ["'last'", *["'best'"] * (Checkpoints(path / BEST).latest() is not None)]
        choices = listed([*map(str, iterations), *names])
        raise FdgError(f"checkpoint={checkpoint!r}: {path} has no such checkpoint: give {choices}")
    return checkpoints, int(checkpoint)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights of an earlier run that initialise a new run."""

    # Arrays on the host, by the index of the leaf in the algorithm's state; with an axis of agents if the new
    # run has one.
    arrays: dict[int, np.ndarray]
    message: str  # a line to print: where the weights come from


def read_weights(start: StoredRun, algorithm: Any, agents: int | None, graph: fdg.FDG) -> Weights:
    """Reads the weights of an earlier run that initialise a new one.

    `algorithm` and `agents` are the new run's, and `graph` is of one agent.

    Weights are floating-point leaves without a batch axis that are not in an optax state: parameters, target
    networks, normaliser statistics. Random keys, counters, environments and replay buffers start fresh.

    Agent i starts from agent i if both runs have the same number of agents; otherwise all agents start from
    agent 0. From a sweep with another number of agents, the agents of its best point are used.
    """
    earlier = start.restore()
    if isinstance(earlier.algorithm, Sweep) and earlier.agents != agents:
        earlier = earlier.best
    new, old = unwrap_sweep(algorithm), unwrap_sweep(earlier.algorithm)
    if reason := getattr(new, "reason_incompatible_with", lambda old: None)(old):
        raise FdgError(f"--from {start.path}: {reason}")
    stored = {n: x for n, x in _leaves_by_name(earlier.state).items() if not n.startswith(_SWEEP_PREFIX)}
    named_leaves = _leaves_by_name(graph.state).items()
    leaves = zip(named_leaves, graph.state_axes, _is_outside_optimizer(graph.state), strict=True)
    arrays = {}
    for i, ((name, leaf), axis, is_weight) in enumerate(leaves):
        source = _source(algorithm, name, stored)
        is_learned = axis is None and is_weight and jnp.issubdtype(leaf.dtype, jnp.inexact)
        if not is_learned or source not in stored:
            continue
        array = stored[source]
        of_agent = array if earlier.agents is None else array[0]
        if of_agent.shape != leaf.shape or of_agent.dtype != leaf.dtype:
            if reason := _describe_unequal_spaces(new, old):
                raise FdgError(f"--from {start.path}: that run's environment is {reason}")
            raise FdgError(
                f"--from {start.path}: state{name} is {kind_of(of_agent)} in that run and"
                f" {kind_of(leaf)} here: {_network_fix(new, old)}"
            )
        if agents is None:
            arrays[i] = of_agent
        elif earlier.agents == agents:
            arrays[i] = array
        else:
            arrays[i] = jnp.broadcast_to(of_agent, (agents, *of_agent.shape))
    if not arrays:
        raise FdgError(
            f"--from {start.path}: none of its learned arrays matches the state of {graph.name}: it is a"
            f" run of {type(earlier.algorithm).__name__}: give a run of {graph.name}, or leave out --algo"
        )
    text = f"begins with {len(arrays)} arrays of weights from {start.path}"
    return Weights(jax.device_get(arrays), f"{text}, iteration {earlier.iteration:,}")


def inherit_fields(algorithm: Any, start: StoredRun) -> Any:
    """Returns the algorithm with fields of an earlier run, if it has a method `fields_from_run`.

    For example, a language model's task inherits the characters for which the model has tokens.
    """
    fields_from_run = getattr(algorithm, "fields_from_run", None)
    fields = None if fields_from_run is None else fields_from_run(start.algorithm)
    return replace_fields(algorithm, fields) if fields else algorithm


def load_weights_into(weights: Weights, engine: fdg.Engine, state: Any) -> Any:
    """Replaces leaves of the engine's initial state by the weights."""
    leaves, structure = jax.tree.flatten(state)
    newest = range(len(jax.tree.leaves(engine.algorithm_state(state))))
    delayed = engine.plan.delayed
    # Older versions of leaves, which stale actors read, get these weights too.
    older = () if delayed is None else delayed.leaves * delayed.staleness
    for position, i in enumerate((*newest, *older)):
        if i in weights.arrays:
            leaves[position] = put(weights.arrays[i], jax.tree.leaves(engine.state_shape)[position])
    return jax.tree.unflatten(structure, leaves)


def _leaves_by_name(state: Any) -> dict[str, Any]:
    """Leaves by path in the algorithm's state; leaves that a sweep adds get the prefix `_SWEEP_PREFIX`."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    if not isinstance(state, SweptState):
        return leaves
    prefix = ".state"
    return {
        name.removeprefix(prefix) if name.startswith(prefix) else f"{_SWEEP_PREFIX}{name}": leaf
        for name, leaf in leaves.items()
    }


def _source(algorithm: Any, name: str, stored: Mapping[str, Any]) -> str:
    """The name of the earlier run's leaf that initialises the leaf `name`, or "".

    If the algorithm's `weight_sources` has a prefix of the name, the prefix is replaced by its first
    replacement that names a leaf of the earlier run; otherwise the name stays the same.
    """
    for prefix, replacements in getattr(algorithm, "weight_sources", {}).items():
        if name.startswith(prefix):
            candidates = [replacement + name.removeprefix(prefix) for replacement in replacements]
            return next((candidate for candidate in candidates if candidate in stored), "")
    return name


def _describe_unequal_spaces(new: Any, old: Any) -> str:
    """A message if the environments' spaces have different shapes; else ""."""

    def shape(space: Any) -> str:
        box_shape = getattr(space, "shape", None)
        return str(list(box_shape)) if box_shape else str(getattr(space, "n", None) or space)

    def spaces(env: Any) -> str:
        observations, actions = (getattr(env, f"{kind}_space", None) for kind in ("observation", "action"))
        is_discrete = hasattr(actions, "n") and not getattr(actions, "shape", None)
        return f"observations {shape(observations)} and " + (
            f"{shape(actions)} actions" if is_discrete else f"actions {shape(actions)}"
        )

    new_env, old_env = (getattr(x, "env", None) for x in (new, old))
    if new_env is None or old_env is None or spaces(new_env) == spaces(old_env):
        return ""
    return (
        f"{old_env.name}, {spaces(old_env):.200}; {new_env.name} has {spaces(new_env):.200}: choose an"
        " environment with the same spaces, or leave out --from"
    )


def _network_fix(new: Any, old: Any) -> str:
    """The fix for a network whose shapes differ from the earlier run's: the flags to change."""

    def fix(name: str) -> str:
        flag, value = f"--{name.replace('_', '-')}", getattr(old, name)
        here = f"(here {shown(getattr(new, name)):.200})"
        return f"no {flag} {here}" if value is None else f"{flag} {shown(value):.200} {here}"

    shared = [name for name in sorted(NETWORK_FIELDS) if hasattr(new, name) and hasattr(old, name)]
    fixes = [fix(name) for name in shared if getattr(new, name) != getattr(old, name)]
    if fixes:
        return f"give the network of that run: {', '.join(fixes)}"
    if type(new) is not type(old):
        return f"it is a run of {type(old).__name__}; give one of {type(new).__name__}, or another --algo"
    return "keep the network of that run"


def _is_outside_optimizer(state: Any) -> list[bool]:
    """For each leaf in order, False if it is in an optax state."""

    def is_optimizer(node: Any) -> bool:
        return type(node).__module__.partition(".")[0] == "optax"

    is_outside = jax.tree.map(
        lambda node: jax.tree.map(lambda _: False, node) if is_optimizer(node) else True,
        state,
        is_leaf=is_optimizer,
    )
    return jax.tree.leaves(is_outside)
