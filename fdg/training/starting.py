"""Starting a run: its directory, its programs and initial state, and weights of an earlier run (`--from`)."""

import dataclasses
import datetime
import re
import secrets
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fdg
from fdg import ctrl_c
from fdg.errors import FdgError
from fdg.kinds import shown
from fdg.processes import distributed
from fdg.processes.arrays import put
from fdg.settings.fields import OF_NETWORK
from fdg.training.checkpoint import Checkpoints
from fdg.training.description import rebuild
from fdg.training.job import Job
from fdg.training.loading import load_with_names
from fdg.training.name_resolver import NameResolver
from fdg.training.run import Run
from fdg.training.run_directory import RunDirectory, Unwritten, read_config
from fdg.training.settings import changes, flat
from fdg.training.summary import versions
from fdg.training.sweep import Sweep, SweptState, changed, without_sweep

_SESSION = ("command", "versions", "git_commit")  # recorded at each start and resume


def open_run(job: Job) -> RunDirectory:
    """Creates or reopens the run directory; in all processes but 0, one that writes nothing."""
    if not distributed.is_first():
        return Unwritten(job.out or Path())
    session = {**job.record, "versions": versions(), "git_commit": git_commit()}
    path = job.out or free_directory(job.described["env"], job.described["algo"], job.seed)
    if not job.resumes:
        run = RunDirectory.create(path, {"id": secrets.token_hex(8), **job.config, **session})
    else:
        run = RunDirectory.reopen(path)
        checkpoints = Checkpoints(run.checkpoints)
        own = list(filter(checkpoints.is_own, checkpoints.iterations()))
        try:
            if not own:
                checkpoints.latest()  # raises if all checkpoints were lost, before anything is written
        except FdgError:
            run.close()
            raise
        done = max(own, default=0)
        if done > job.num_iterations:
            run.close()
            raise FdgError(
                f"{path} has already run {done:,} iterations, but --total-steps asks for"
                f" {job.num_iterations:,}: give a larger --total-steps"
            )
        before = read_config(path)
        changed = changes(before, job.config)
        noted = {name: session[name] for name in _SESSION if name in session}
        at = {"at": f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}", "changes": changed, **noted}
        run.write_config({**before, **job.config, "resumes": [*before.get("resumes", ()), at]})
    ctrl_c.set_resume_hint(f"go on with --resume {path}")
    return run


def git_commit() -> str | None:
    """The git commit of the current folder, with `-dirty` if files have changed; None without one."""
    try:
        said = subprocess.run(
            # `core.fsmonitor` of an untrusted repository could start a program.
            "git -c core.fsmonitor=false describe --always --dirty --abbrev=40 --exclude=*".split(),
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None if said.returncode == 0 else None


def free_directory(env: str | None, algo: str, seed: Any) -> Path:
    """A new path `runs/ENV-ALGO-SEED-TIME`; parts that are None or empty are left out."""
    env = None if env is None else re.sub(r"[^?&=]*/", "", env)  # of a file path, only the name
    parts = [str(part) for part in (env, algo.rpartition(":")[2], seed) if part not in (None, "")]
    name = "-".join(re.sub(r"[^\w.-]+", "_", part) for part in parts)
    path = Path("runs", f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    copies = (path.with_name(f"{path.name}-{i}") for i in range(2, 1000))
    return path if not path.exists() else next(copy for copy in copies if not copy.exists())


def run_title(job: Job) -> str:
    """The title of a run's plots: algorithm and environment, policy and seeds."""
    what = " on ".join(filter(None, (job.described["algo"].rpartition(":")[2], job.described["env"])))
    seeds = f"seed {job.seed}"
    if isinstance(job.algorithm, Sweep):
        names = ", ".join(name for name, _ in job.algorithm.grid)
        seeds = f"sweep of {names}, {job.agents} agents"
    elif job.agents is not None and job.agents > 1:
        seeds = f"seeds {job.seed} to {job.seed + job.agents - 1}"
    return f"{what}\n{job.policy}, {seeds}"


_OF_THE_SWEEP = "sweep"  # prefix of the names of a sweep's own leaves


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights of an earlier run that initialise a new one."""

    arrays: dict[int, np.ndarray]  # arrays on the host, by the position of the leaf in the algorithm's state
    message: str  # a line to print: where they come from


def compile_and_init(engine: fdg.Engine, seed: int) -> Any:
    """Returns the engine's initial state; compiles the training programs at the same time."""
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(engine.compile)
        state = engine.init(seed)  # compiles another program, which takes nearly as long
    compiling.result()
    return state


def read_weights(job: Job, graph: fdg.FDG) -> Weights | None:
    """Reads the weights of the run `job.start_from`; returns None if `start_from` is None.

    Copied are floating-point leaves without a batch axis that are not in an optax state: parameters, target
    networks, normaliser statistics. Random keys, counters, environments and replay buffers start fresh. From
    a sweep, the best point's agents are taken; if the new run has as many agents as the sweep, agent i
    starts from agent i.
    """
    if job.start_from is None:
        return None
    named = flat(job.config)  # by the caller, for the new run
    earlier = load_with_names(job.start_from, named, trust=job.trust)
    if isinstance(earlier.algorithm, Sweep) and earlier.agents != job.agents:
        earlier = earlier.best
    ours, before = without_sweep(job.algorithm), without_sweep(earlier.algorithm)
    if why := getattr(ours, "why_not_from", lambda before: None)(before):
        raise FdgError(f"--from {job.start_from}: {why}")
    theirs = {n: x for n, x in _by_name(earlier.state).items() if not n.startswith(_OF_THE_SWEEP)}
    leaves = zip(_by_name(graph.state).items(), graph.state_axes, _is_learned(graph.state), strict=True)
    source = _sources(job.algorithm, theirs)
    arrays = {
        i: _fitted(job, earlier, name, theirs[source(name)], leaf)
        for i, ((name, leaf), axis, is_learned) in enumerate(leaves)
        if axis is None and is_learned and jnp.issubdtype(leaf.dtype, jnp.inexact) and source(name) in theirs
    }
    if not arrays:
        raise FdgError(
            f"--from {job.start_from}: no learned array of it matches the state of {graph.name}: it is a run"
            f" of {type(earlier.algorithm).__name__}; give one of {graph.name}, or leave out --algo"
        )
    said = f"begins with {len(arrays)} arrays of weights from {job.start_from}"
    return Weights(jax.device_get(arrays), f"{said}, iteration {earlier.iteration:,}")


def as_it_begins(algorithm: Any, path: str | Path, named: Mapping[str, Any], trust: bool = False) -> Any:
    """An algorithm with what it takes over from the run in `path`, by its method `taken_from`.

    So a language model's task gets the characters that the earlier run has tokens for. `named` and `trust`:
    see `load_with_names`.
    """
    taken_from = getattr(without_sweep(algorithm), "taken_from", None)
    if taken_from is None:
        return algorithm
    resolver = NameResolver(Path(path) / "config.json", named, trust)
    fields = taken_from(rebuild(read_config(Path(path), prefix=""), resolver, str(path))[0])
    return changed(algorithm, fields) if fields else algorithm


def load_weights_into(weights: Weights, engine: fdg.Engine, state: Any) -> Any:
    """Replaces leaves of the engine's initial state by the weights."""
    leaves, structure = jax.tree.flatten(state)
    own = range(len(jax.tree.leaves(engine.algorithm_state(state))))
    delayed = engine.plan.delayed
    # The older versions that stale actors read get these weights too.
    older = () if delayed is None else delayed.leaves * delayed.staleness
    for position, i in enumerate((*own, *older)):
        if i in weights.arrays:
            leaves[position] = put(weights.arrays[i], jax.tree.leaves(engine.state_shape)[position])
    return jax.tree.unflatten(structure, leaves)


def _by_name(state: Any) -> dict[str, Any]:
    """Leaves by their path in the algorithm's state; a sweep's own leaves get the prefix `_OF_THE_SWEEP`."""
    named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    if not isinstance(state, SweptState):
        return named
    own = ".state"
    return {
        name.removeprefix(own) if name.startswith(own) else f"{_OF_THE_SWEEP}{name}": leaf
        for name, leaf in named.items()
    }


def _sources(algorithm: Any, theirs: Mapping[str, Any]) -> Callable[[str], str]:
    """Maps the name of a leaf to the name of the earlier run's leaf that initialises it; "" if there is none.

    The names are equal, unless the algorithm's `begins_as` has a prefix of the name: it lists the prefixes to
    look for instead.
    """
    begins_as: Mapping[str, Sequence[str]] = getattr(algorithm, "begins_as", {})

    def source(name: str) -> str:
        for beginning, others in begins_as.items():
            if name.startswith(beginning):
                found = [other + name.removeprefix(beginning) for other in others]
                return next((other for other in found if other in theirs), "")
        return name

    return source


def _fitted(job: Job, earlier: Run, name: str, there: jax.Array, here: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of the earlier run, with the new run's axis of agents."""
    of_one = there if earlier.agents is None else there[0]
    if of_one.shape != here.shape or of_one.dtype != here.dtype:
        if why := _other_spaces(job.algorithm, earlier.algorithm):
            raise FdgError(f"--from {job.start_from}: it is of {why}")
        raise FdgError(
            f"--from {job.start_from}: state{name} is {of_one.dtype}{list(of_one.shape)} in that run and"
            f" {here.dtype}{list(here.shape)} here: {_other_network(job.algorithm, earlier.algorithm)}"
        )
    if job.agents is None or earlier.agents == job.agents:
        return of_one if job.agents is None else there
    return jnp.broadcast_to(of_one, (job.agents, *of_one.shape))


def _other_spaces(ours: Any, before: Any) -> str:
    """A message if the environments' spaces have different shapes; else ""."""

    def shape(space: Any) -> str:
        of_box = getattr(space, "shape", None)
        return str(list(of_box)) if of_box else str(getattr(space, "n", None) or space)

    def spaces(env: Any) -> str:
        observations, actions = (getattr(env, f"{of}_space", None) for of in ("observation", "action"))
        counted = hasattr(actions, "n") and not getattr(actions, "shape", None)
        return f"observations {shape(observations)} and " + (
            f"{shape(actions)} actions" if counted else f"actions {shape(actions)}"
        )

    here, there = (getattr(without_sweep(one), "env", None) for one in (ours, before))
    if here is None or there is None or spaces(here) == spaces(there):
        return ""
    return (
        f"{there.name}, {spaces(there):.200}; {here.name} has {spaces(here):.200}: take an environment with"
        " the same spaces, or leave --from out"
    )


def _other_network(ours: Any, before: Any) -> str:
    """The fix for a network with other shapes than in the earlier run: the flags that differ."""
    here, there = without_sweep(ours), without_sweep(before)
    shared = [name for name in sorted(OF_NETWORK) if hasattr(here, name) and hasattr(there, name)]
    both = ((name, getattr(here, name), getattr(there, name)) for name in shared)
    flags = [
        f"--{name.replace('_', '-')} {shown(then):.200} (here {shown(now):.200})"
        for name, now, then in both
        if now != then
    ]
    if flags:
        return f"give the network as it was: {', '.join(flags)}"
    if type(here) is not type(there):
        return f"it is a run of {type(there).__name__}; give one of {type(here).__name__}, or another --algo"
    return "keep the network as it was"


def _is_learned(state: Any) -> list[bool]:
    """For each leaf, whether it is outside of optax's states."""

    def is_optimizer(node: Any) -> bool:
        return type(node).__module__.partition(".")[0] == "optax"

    marked = jax.tree.map(
        lambda node: jax.tree.map(lambda _: False, node) if is_optimizer(node) else True,
        state,
        is_leaf=is_optimizer,
    )
    return jax.tree.leaves(marked)
