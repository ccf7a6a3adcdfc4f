"""`python -m fdg.train`: trains an algorithm, and keeps what comes of it in a run directory."""

import datetime
import math
import platform
import re
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fdg
from fdg.errors import FdgError
from fdg.placing.policy import with_host
from fdg.processes import distributed
from fdg.running.host_devices import host_devices
from fdg.running.metrics import PendingMetrics
from fdg.showing.words import quantity
from fdg.training.checkpoint import Checkpoints
from fdg.training.job import Job
from fdg.training.progress import Progress, clock
from fdg.training.run_directory import RunDirectory, Unwritten

# Returns at which Gymnasium's registry calls an environment solved (`reward_threshold`).
SOLVED = {
    "Acrobot-v1": -100.0,
    "CartPole-v1": 475.0,
    "MountainCar-v0": -110.0,
    "MountainCarContinuous-v0": 90.0,
}

_STEPS_PER_CALL = 65_536  # of one agent: half a second at 130,000 steps/s
_CALLS = 50  # at least, in a whole run
_CHECKPOINTS = 20


def train(job: Job) -> int:
    """Trains, evaluates, and writes the run directory; says on standard output how it goes.

    Of several processes, all call it, and the first one writes.

    Returns:
      The exit status: 0, or 128 and the signal's number where one ended the run early.

    Raises:
      FdgError: the job cannot be done as asked; nothing has been written then.
    """
    _check_same(job)
    devices = with_host(job.policy, available_devices(job.devices))
    engine = fdg.compile(job.algorithm, job.policy, devices, job.num_seeds)
    _check_all_busy(job, engine.plan, devices)
    run = _open(job)
    checkpoints = Checkpoints(run.checkpoints)
    try:
        return _train(job, engine, run, checkpoints)
    finally:
        checkpoints.close()
        run.close()


def available_devices(count: int | None) -> list[jax.Device]:
    """The first `count` devices, or all; of several processes, as many of each.

    On a CPU so many are made, unless JAX has started already.

    Raises:
      FdgError: there are not so many.
    """
    processes = distributed.count()
    if count is not None:
        host_devices(count // processes)
    devices = jax.devices()
    if count is None:
        return devices
    if count > len(devices):
        kind = devices[0].platform
        fix = "" if kind == "cpu" else ", or set JAX_PLATFORMS=cpu for host devices"
        raise FdgError(
            f"--devices {count}: there {'is' if len(devices) == 1 else 'are'} {len(devices)} of kind {kind}:"
            f" use --devices {len(devices)}{fix}"
        )
    if processes == 1:
        return devices[:count]
    each = [[d for d in devices if d.process_index == i][: count // processes] for i in range(processes)]
    if min(map(len, each)) < count // processes:
        raise FdgError(
            f"--devices {count}: that is {count // processes} in each of {processes} processes,"
            f" and one has only {min(map(len, each))}"
        )
    return [device for some in each for device in some]


def iterations_per_call(num_iterations: int, steps_per_iteration: int) -> int:
    """How many iterations one call of `engine.run` does.

    Few enough that the display stays alive, and a divisor of the whole, so that one executable does it all.
    It depends on the configuration alone: a resumed run then makes the same calls as one that was never
    interrupted, and XLA gives the same numbers bit for bit.

    >>> iterations_per_call(976, 512)
    16
    """
    most = max(1, min(num_iterations // _CALLS, _STEPS_PER_CALL // steps_per_iteration))
    return next(size for size in range(most, 0, -1) if num_iterations % size == 0)


def _train(job: Job, engine: fdg.Engine, run: RunDirectory, checkpoints: Checkpoints) -> int:
    total, agents = job.num_iterations, job.num_seeds or 1
    size = iterations_per_call(total, job.steps_per_iteration)
    checkpoint_every = math.ceil((job.checkpoint_every or total / _CHECKPOINTS) / size) * size
    found = (
        (checkpoints.latest(), run.summary() is not None) if job.resumes and distributed.is_first() else None
    )
    latest, complete = distributed.exchange(found)[0] or (None, False)  # what process 0 found
    if latest == total and complete:
        say(f"the run in {run.path} is complete: all of its {total:,} iterations are done")
        return 0
    say(f"{engine.plan}\n")
    state, compile_s = _start(job, engine, checkpoints, latest, size)
    start = iteration = latest or 0
    last = run.truncate_metrics(start) if job.resumes else None
    wall_before = last["wall_s"] if last else 0.0
    if job.resumes:
        say(f"resuming at iteration {start:,} of {total:,}")
    say(f"compiled in {compile_s:.1f} s; run directory {run.path}")
    for line in _unexplained(engine):
        say(line)

    with _Signals() as signals, Progress(total, job.steps_per_iteration * agents, start) as progress:
        recorder = _Recorder(job, run, progress, start, wall_before)
        caught = signals.agreed()
        while iteration < total and caught is None:
            state, metrics = engine.start(state, size)
            recorder.add(size, metrics)
            iteration += size
            caught = signals.agreed()
            if iteration % checkpoint_every == 0 or iteration == total or caught is not None:
                recorder.flush()  # first, for a checkpoint is never ahead of the metrics
                checkpoints.save(iteration, state)
        wall_s = recorder.wall_s

    run.draw_learning_curve(_title(job), SOLVED.get(job.config["env"]))
    if iteration < total:
        checkpoints.close()
        say(f"interrupted at iteration {iteration:,} of {total:,}, and saved: go on with --resume {run.path}")
        return 128 + (caught or 0)
    groups = _groups(engine, wall_s - wall_before)
    evaluation = _evaluate(job, engine, state)
    checkpoints.close()
    if not distributed.is_first():
        return 0
    steps = iteration * job.steps_per_iteration
    run.write_summary(
        {
            "env_steps": steps,
            "iterations": iteration,
            "wall_s": wall_s,
            "compile_s": compile_s,
            "steps_per_s": steps * agents / wall_s,
            **evaluation,
            "seeds": [job.seed + i for i in range(agents)],
            "policy": str(job.policy),
            **groups,
            "devices": [device.device_kind for device in engine.devices],
            "versions": versions(),
        }
    )
    say(f"trained {steps * agents:,} steps in {clock(wall_s)} ({steps * agents / wall_s:,.0f} steps/s)")
    if evaluation:
        say(_verdict(evaluation, job))
    say(f"run directory {run.path}")
    return 0


def _unexplained(engine: fdg.Engine) -> list[str]:
    """Says which collectives of the compiled programs the plan does not name."""
    return [
        f"unexplained: {c.kind} of {quantity(c.bytes, 'B')} x {c.calls} in program '{program}'"
        f" ({', '.join(c.fragments) or 'between fragments'}), which the plan does not name"
        for program, c in engine.unexplained()
    ]


def _groups(engine: fdg.Engine, wall_s: float) -> dict[str, Any]:
    """For several groups: how long each was busy and idle of `wall_s` seconds, and what moved between."""
    if len(engine.plan.groups) < 2:
        return {}
    everywhere = distributed.exchange({"busy_s": engine.busy_seconds(), "moved": engine.moved_bytes})
    groups = {}
    for group in engine.plan.groups:
        busy = min(wall_s, max(here["busy_s"][group.name] for here in everywhere))
        groups[group.name] = {
            "devices": len(group),
            "busy_s": round(busy, 4),
            "idle_s": round(wall_s - busy, 4),
        }
    return {"groups": groups, "moved_bytes": sum(here["moved"] for here in everywhere)}


def _start(
    job: Job, engine: fdg.Engine, checkpoints: Checkpoints, latest: int | None, size: int
) -> tuple[Any, float]:
    """The state to begin with, all compiled that training needs, and the seconds that this took."""
    begun = time.perf_counter()
    if latest is not None:
        state = checkpoints.restore(latest, engine.state_shape)
        if latest < job.num_iterations:
            engine.compile(size)
    else:
        with ThreadPoolExecutor(1) as pool:
            compiling = pool.submit(engine.compile, size)
            state = engine.init(job.seed)  # a program of its own, which takes as long to compile
        compiling.result()
    jax.block_until_ready(state)
    return state, time.perf_counter() - begun


class _Recorder:
    """Metrics on their way to disk and display: one call of `start` late, so that no device waits for it."""

    def __init__(self, job: Job, run: RunDirectory, progress: Progress, iteration: int, wall_s: float):
        self.wall_s = wall_s  # spent in training until the last call that was recorded
        self._job, self._run, self._progress, self._iteration = job, run, progress, iteration
        self._clock = time.perf_counter()
        self._latest: tuple[int, PendingMetrics] | None = None

    def add(self, iterations: int, metrics: PendingMetrics) -> None:
        """Takes the metrics of a call just made, and records those of the one before."""
        self.flush()
        self._latest = iterations, metrics

    def flush(self) -> None:
        """Waits for the metrics that were added, and records them."""
        if self._latest is None:
            return
        iterations, pending = self._latest
        metrics, self._latest = distributed.fetch(pending.result()), None
        if metrics is None:
            return
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        rows = []
        for i in range(iterations):
            iteration = self._iteration + i + 1
            rows.append(
                {
                    "iteration": iteration,
                    "env_steps": iteration * self._job.steps_per_iteration,
                    "wall_s": round(self.wall_s + seconds * (i + 1) / iterations, 4),
                    **_row({name: values[i] for name, values in metrics.items()}),
                }
            )
        self._iteration += iterations
        self.wall_s += seconds
        self._run.append_metrics(rows)
        returns = [
            row["episode_return"] for row in rows if math.isfinite(row.get("episode_return", math.nan))
        ]
        self._progress.update(self._iteration, float(np.mean(returns)) if returns else None)


def _row(metrics: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Metrics of one iteration, scalars or `[seeds]`: means over the seeds, and the returns one by one."""
    row: dict[str, Any] = {name: _mean(values) for name, values in metrics.items()}
    if np.ndim(metrics.get("episode_return", 0.0)):
        row["episode_return_per_seed"] = metrics["episode_return"]
    return row


def _mean(values: np.ndarray) -> Any:
    """A scalar as it is; of several agents the mean over those that have a number."""
    if np.ndim(values) == 0:
        return values
    if not np.issubdtype(values.dtype, np.floating):
        return values.mean()
    there = values[np.isfinite(values)]
    return there.mean(dtype=values.dtype) if there.size else math.nan


def _evaluate(job: Job, engine: fdg.Engine, state: Any) -> dict[str, Any]:
    """Mean return of whole episodes, played by the trained agents; empty if there is no way to."""
    algorithm = job.algorithm
    if not job.eval_episodes or not hasattr(algorithm, "evaluate"):
        return {}

    def mean_return(state, key):
        return algorithm.evaluate(state, key, job.eval_episodes)["return"]

    state = engine.algorithm_state(state)
    # Another stream than those that training draws from.
    keys = [jax.random.fold_in(jax.random.key(job.seed + i), 2**31 - 1) for i in range(job.num_seeds or 1)]
    if distributed.count() > 1:
        state = distributed.gather(state)
        if state is None:
            return {}
    elif job.num_seeds is None:
        # On one device: on several, each would play the same episodes.
        state = jax.device_put(state, engine.devices[0])
    if job.num_seeds is None:
        value = float(jax.jit(mean_return)(state, keys[0]))
        return {"eval_return": value, "eval_episodes": job.eval_episodes}
    values = np.asarray(jax.jit(jax.vmap(mean_return))(state, jnp.stack(keys)))
    return {"eval_return": values.mean(), "eval_returns": values, "eval_episodes": job.eval_episodes}


def _verdict(evaluation: Mapping[str, Any], job: Job) -> str:
    value, episodes = evaluation["eval_return"], f"{job.eval_episodes:,} episodes"
    text = f"evaluation return {value:.1f} over {episodes}"
    if "eval_returns" in evaluation:
        values = evaluation["eval_returns"]
        text += f" of each of {len(values)} agents (from {values.min():.1f} to {values.max():.1f})"
    solved = SOLVED.get(job.config["env"])
    if solved is not None:
        text += f" (solved: >= {solved:g})" if value >= solved else f" (not solved: < {solved:g})"
    return text


def _check_all_busy(job: Job, plan: fdg.Plan, devices: Sequence[jax.Device]) -> None:
    """Refuses to leave devices idle that were asked for by number, and says which numbers would do."""
    if not plan.idle or (job.devices is None and distributed.count() == 1):
        return  # each of several processes needs something to do
    there = plan.num_devices
    busy = there - len(plan.idle)
    if job.num_seeds is not None:
        nearest = _multiples(job.num_seeds, there)
        raise FdgError(
            f"--num-seeds {job.num_seeds} does not divide by --devices {there}:"
            f" use --num-seeds {nearest}, or --devices {busy}"
        )
    if len(plan.groups) > 1:  # of several groups, one takes what its batch divides by; the plan says which
        working = {devices[i].process_index for group in plan.groups for i in group.devices}
        for process in range(distributed.count()):
            if process not in working:
                raise FdgError(
                    f"{job.policy} leaves process {process} without work: it uses {busy} of {there} devices;"
                    f" use other numbers of devices, or --num-envs that divide by them"
                )
        return
    num_envs = getattr(job.algorithm, "num_envs", None)
    if num_envs is None or num_envs % there == 0:
        raise FdgError(f"{job.policy} uses {busy} of {there} devices: use --devices {busy}")
    raise FdgError(
        f"--num-envs {num_envs} does not divide by --devices {there} under {job.policy}:"
        f" use --num-envs {_multiples(num_envs, there)}, or --devices {busy}"
    )


def _multiples(number: int, of: int) -> str:
    below, above = number // of * of, -(-number // of) * of
    return f"{below} or {above}" if below else str(above)


def _check_same(job: Job) -> None:
    """Processes that run different programs would wait for each other for ever."""
    mine, *others = distributed.exchange({**job.config, "versions": versions()})
    for i, other in enumerate(others, 1):
        for name in mine:
            if other.get(name) != mine[name]:
                raise FdgError(f"process {i} has {name} {other.get(name)}, and process 0 has {mine[name]}")


def _open(job: Job) -> RunDirectory:
    if not distributed.is_first():
        return Unwritten(job.out or Path())
    return (
        RunDirectory.reopen(_directory(job))
        if job.resumes
        else RunDirectory.create(_directory(job), job.config)
    )


def _directory(job: Job) -> Path:
    if job.out is not None:
        return job.out
    parts = [
        part
        for part in (job.config["env"], job.config["algo"].rpartition(":")[2], job.seed)
        if part is not None
    ]
    name = "-".join(re.sub(r"[^\w.-]+", "_", str(part)) for part in parts)
    path = Path("runs", f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    copies = (path.with_name(f"{path.name}-{i}") for i in range(2, 1000))
    return path if not path.exists() else next(copy for copy in copies if not copy.exists())


def _title(job: Job) -> str:
    return " on ".join(filter(None, (job.config["algo"].rpartition(":")[2], job.config["env"])))


def versions() -> dict[str, str]:
    """Versions of what a run's numbers depend on."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "fdg": fdg.__version__,
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
    }


def say(line: Any = "") -> None:
    """Prints at once, also into a pipe."""
    print(line, flush=True)


class _Signals:
    """Keeps Ctrl-C and SIGTERM for the loop to look at; a second one ends the program where it stands."""

    def __init__(self) -> None:
        self.caught: int | None = None
        self._before: Sequence[Any] = ()

    def __enter__(self) -> "_Signals":
        self._before = [signal.signal(number, self._catch) for number in (signal.SIGINT, signal.SIGTERM)]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), self._before, strict=True):
            signal.signal(number, handler)

    def agreed(self) -> int | None:
        """What any of the processes caught: all stop at the same iteration."""
        return next((caught for caught in distributed.exchange(self.caught) if caught is not None), None)

    def _catch(self, number: int, _: Any) -> None:
        if self.caught is not None:
            raise KeyboardInterrupt
        self.caught = number
