"""Starts a run: opens its directory, compiles and initialises, loads weights of an earlier run (`--from`)."""

import contextlib
import dataclasses
import datetime
import re
import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fdg
from envs.wrappers import unwrapped
from fdg import ctrl_c
from fdg.errors import FdgError, kind_of
from fdg.kinds import shown
from fdg.processes import distributed
from fdg.processes.arrays import put
from fdg.settings.fields import NETWORK_FIELDS
from fdg.training.checkpoint import Checkpoints
from fdg.training.job import Job
from fdg.training.loading import StoredRun
from fdg.training.run_directory import NullRunDirectory, RunDirectory, read_config
from fdg.training.settings import changes
from fdg.training.summary import versions
from fdg.training.sweep import Sweep, SweptState, replace_fields, unwrap_sweep
from fdg.training.writable import explain_os_errors

_SESSION_ENTRIES = ("command", "versions", "git_commit")  # entries of `config.json` per start or resume


def open_run(job: Job) -> tuple[RunDirectory, Checkpoints]:
    """Creates or reopens the run directory and its checkpoints.

    In processes other than 0, the directory writes nothing.
    """
    if not distributed.is_first():
        run: RunDirectory = NullRunDirectory(job.out or Path())
        return run, Checkpoints(run.checkpoints)
    session = {**job.record, "versions": versions(), "git_commit": git_commit()}
    path = job.out or _make_run_path(job)
    env, _ = unwrapped(getattr(unwrap_sweep(job.algorithm), "env", None))
    digest = getattr(getattr(env, "tokenizer", None), "digest", None)
    if not job.resumes:
        identity = {"id": secrets.token_hex(8), **({"tokenizer_digest": digest} if digest else {})}
        run = RunDirectory.create(path, {**identity, **job.config, **session})
        checkpoints = Checkpoints(run.checkpoints)
    else:
        with RunDirectory.reopen(path).closed_on_error() as run:
            checkpoints = Checkpoints(run.checkpoints)
            if (completed := checkpoints.completed()) > job.num_iterations:
                raise FdgError(
                    f"{path} has already run {completed:,} iterations, but --total-steps asks for"
                    f" {job.num_iterations:,}: give a larger --total-steps"
                )
            stored = read_config(path)
            if stored.get("tokenizer_digest") not in (None, digest):
                raise FdgError(
                    f"{env.tokenizer.path}: its tokenizer has changed since the run in {path} began: bring"
                    " back its files, or start a new run"
                )
            changed = changes(stored, job.config)
            recorded = {name: session[name] for name in _SESSION_ENTRIES if name in session}
            entry = {"at": f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}", "changes": changed, **recorded}
            run.write_config({**stored, **job.config, "resumes": [*stored.get("resumes", ()), entry]})
    ctrl_c.set_resume_hint(f"go on with --resume {path}")
    return run, checkpoints


def git_commit() -> str | None:
    """The git commit of the current folder, with `-dirty` if files have changed; None without one."""
    try:
        result = subprocess.run(
            # `core.fsmonitor` of an untrusted repository could start a program.
            "git -c core.fsmonitor=false describe --always --dirty --abbrev=40 --exclude=*".split(),
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def _make_run_path(job: Job) -> Path:
    """Creates the folder of a run that names itself; another process may take the same name at this time."""
    while True:
        path = new_run_path(job.described["env"], job.described["algo"], job.seed)
        with explain_os_errors(f"--out {path}", "written to"), contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path


def new_run_path(env: str | None, algo: str, seed: Any) -> Path:
    """A new path `runs/ENV-ALGO-SEED-TIME`, without parts that are None or empty."""
    env = None if env is None else re.sub(r"[^?&=]*/", "", env)  # keeps only the name of a file path
    parts = [str(part) for part in (env, algo.rpartition(":")[2], seed) if part not in (None, "")]
    name = "-".join(re.sub(r"[^\w.-]+", "_", part) for part in parts)
    start = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    paths = (Path("runs", f"{start}-{i}" if i > 1 else start) for i in range(1, 1000))
    return next(path for path in paths if not path.exists())


_SWEEP_PREFIX = "sweep"  # prefix for names of leaves that a sweep adds to the algorithm's state


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights of an earlier run that initialise a new run."""

    arrays: dict[int, np.ndarray]  # arrays on the host, by the index of the leaf in the algorithm's state
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
