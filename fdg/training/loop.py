"""A whole training run: it compiles, runs, records, saves, evaluates, and says how it goes."""

import dataclasses
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

import fdg
from fdg.errors import FdgError
from fdg.processes import distributed
from fdg.profiling.writing import profile_run
from fdg.training.checkpoint import Checkpoints
from fdg.training.default_devices import Choice
from fdg.training.devices import check_all_busy, devices_of
from fdg.training.evaluation import SOLVED, evaluate, verdict
from fdg.training.finite import Finite
from fdg.training.job import Job
from fdg.training.opening import open_run, title
from fdg.training.progress import Progress, clock
from fdg.training.recorder import Recorder
from fdg.training.run_directory import RunDirectory
from fdg.training.signals import Signals
from fdg.training.summary import groups_summary, summary, unexplained, versions

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
    graph = fdg.trace(job.algorithm)
    devices, choice = devices_of(job, graph)
    if choice is not None:  # a resumed run does not choose again
        job = dataclasses.replace(job, config={**job.config, "devices_chosen": choice.devices})
    engine = fdg.compile(job.algorithm, job.policy, devices, job.num_seeds, graph)
    check_all_busy(job, engine.plan, devices)
    run = open_run(job)
    checkpoints = Checkpoints(run.checkpoints)
    try:
        return _train(job, engine, run, checkpoints, choice)
    except Exception:
        if not job.resumes:
            run.discard()
        raise
    finally:
        checkpoints.close()
        run.close()


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


def _train(
    job: Job, engine: fdg.Engine, run: RunDirectory, checkpoints: Checkpoints, choice: Choice | None
) -> int:
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
    if choice is not None:
        say(f"devices: {choice.reason}")
    say("compiling ...")
    state, compile_s = _start(job, engine, checkpoints, latest, size)
    start = iteration = latest or 0
    last = run.truncate_metrics(start) if job.resumes else None
    wall_before = last["wall_s"] if last else 0.0
    if job.resumes:
        say(f"resuming at iteration {start:,} of {total:,}")
    say(f"compiled in {compile_s:.1f} s; run directory {run.path}")
    for line in unexplained(engine):
        say(line)

    with Signals() as signals, Progress(total, job.steps_per_iteration * agents, start) as progress:
        recorder = Recorder(job, run, progress, start, wall_before, Finite(job, checkpoints))
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

    run.draw_learning_curve(title(job), SOLVED.get(job.config["env"]))
    if iteration < total:
        checkpoints.close()
        say(f"interrupted at iteration {iteration:,} of {total:,}, and saved: go on with --resume {run.path}")
        return 128 + (caught or 0)
    groups = groups_summary(engine, wall_s - wall_before)
    evaluation = evaluate(job, engine, state)
    profiled = profile_run(engine, state, run.path) if job.profiles else []
    checkpoints.close()
    if not distributed.is_first():
        return 0
    seconds = {"wall_s": wall_s, "compile_s": compile_s}
    run.write_summary(summary(job, engine, iteration, seconds, evaluation, groups))
    steps = iteration * job.steps_per_iteration * agents
    say(f"trained {steps:,} steps in {clock(wall_s)} ({steps / wall_s:,.0f} steps/s)")
    if evaluation:
        say(verdict(evaluation, job))
    for line in profiled:
        say(line)
    say(f"run directory {run.path}")
    return 0


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


def _check_same(job: Job) -> None:
    """Processes that run different programs would wait for each other for ever."""
    mine, *others = distributed.exchange({**job.config, "versions": versions()})
    for i, other in enumerate(others, 1):
        for name in mine:
            if other.get(name) != mine[name]:
                raise FdgError(f"process {i} has {name} {other.get(name)}, and process 0 has {mine[name]}")


def say(line: Any = "") -> None:
    """Prints at once, also into a pipe."""
    print(line, flush=True)
