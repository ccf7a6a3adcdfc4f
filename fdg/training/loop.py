"""A training run from start to end: compiling, iterating, metrics, checkpoints, evaluation, progress."""

import contextlib
import dataclasses
import io
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TextIO

import jax

import fdg
from fdg import ctrl_c
from fdg.errors import FdgError, host_errors
from fdg.processes import distributed
from fdg.profiling.writing import profile_run, timeline_run
from fdg.training import loggers
from fdg.training.checkpoint import Checkpoints
from fdg.training.curves import draw_learning_curve
from fdg.training.data_copies import copy_data_files
from fdg.training.evaluation import (
    SOLVED,
    Evaluation,
    PeriodicEvaluation,
    episodes_of,
    evaluate,
    summarized,
    verdict,
)
from fdg.training.finite import Finite
from fdg.training.job import Job, steps_of
from fdg.training.progress import Progress, clock
from fdg.training.recorder import Callback, LostEpisodes, Recorder
from fdg.training.run_directory import RunDirectory
from fdg.training.samples import sample_lines, write_samples
from fdg.training.settling import check_all_busy, ready, too_small_micro_batch
from fdg.training.starting import (
    Weights,
    compile_and_init,
    load_weights_into,
    open_run,
    read_weights,
    run_title,
)
from fdg.training.summary import groups_summary, summary, unexplained_lines, versions
from fdg.training.sweep import Sweep, agent_seeds, point_names, without_sweep
from fdg.training.sweep_results import write_sweep


def _interrupt(_: int) -> NoReturn:
    raise KeyboardInterrupt


def _agree_on_signal(caught: Sequence[int]) -> int | None:
    """The signal that any process caught, so that all stop at the same iteration. A collective."""
    return next((each[0] for each in distributed.exchange(caught[:1]) if each), None)


_STEPS_PER_CALL = 65_536  # the most steps of one agent in a call: half a second at 130,000 steps/s
_CALLS = 50  # the fewest calls in a run
_CHECKPOINTS = 20  # in a run, unless `--checkpoint-every` is given
_FEW_ROWS = 32  # a data file with fewer rows gets a hint


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a job."""

    run: RunDirectory  # the run directory
    engine: fdg.Engine  # the engine that ran it
    state: Any  # the engine's final state; None if the run was already complete
    iteration: int  # completed iterations
    caught: int | None = None  # the signal that ended the run early, or None
    stopped: str | None = None  # any other reason for an early end, or None
    evaluation: Evaluation | None = None  # the greedy evaluation at the end, or None


def say(line: Any = "") -> None:
    """Prints and flushes."""
    print(line, flush=True)


def carry_out(
    job: Job,
    devices: Sequence[jax.Device] | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    brief: bool = False,
) -> Outcome:
    """Trains, evaluates and writes the run directory; prints progress.

    All processes call it; process 0 writes. `quiet` prints nothing, `brief` leaves out the plan.

    Raises:
      FdgError: the job is invalid; nothing has been written.
      HostError: a function on the host failed, such as a reward; checkpoints are kept.
    """
    _check_same(job.config)
    for kind in job.loggers:  # before anything slow starts
        loggers.package_of(kind)
    if not (quiet or brief):
        say("tracing ...")
    env: Any = getattr(without_sweep(job.algorithm), "env", None)
    if not job.resumes and callable(getattr(env, "try_out", None)):
        env.try_out()
    rows = getattr(env, "num_rows", None)
    if rows is not None and rows < _FEW_ROWS and not (quiet or job.resumes):
        say(
            f"hint: {env.name} has {rows} row{'s' * (rows != 1)} to learn from, which are soon known by heart"
        )
    settled = ready(job, devices)
    job, graph = settled.job, settled.graph
    engine = fdg.compile(job.algorithm, job.policy, settled.devices, job.agents, graph)
    check_all_busy(job, engine.plan, settled.devices)
    if not quiet and (line := too_small_micro_batch(job.algorithm, engine.plan)):
        say(f"hint: {line}")
    weights = read_weights(job, graph)
    run = open_run(job)
    checkpoints = Checkpoints(run.checkpoints)
    try:
        report = (lambda line: None) if quiet else say
        session = _Session(job, engine, weights, run, checkpoints, callbacks, report)
        with host_errors():
            return session.train(settled.said, settled.why, brief, io.StringIO() if quiet else None)
    except Exception as error:
        if not job.resumes:
            run.discard()
        if isinstance(error, BrokenPipeError) and distributed.is_first() and run.path.exists():
            print(f"standard output was closed: go on with --resume {run.path}", file=sys.stderr)
        raise
    finally:
        with contextlib.closing(run):
            checkpoints.close()  # may raise


def iterations_per_call(num_iterations: int, steps_per_iteration: int) -> int:
    """The number of iterations in a call of `engine.run`: a divisor of the total, small enough for progress.

    >>> iterations_per_call(976, 512)
    16
    """
    most = max(1, min(num_iterations // _CALLS, _STEPS_PER_CALL // steps_per_iteration))
    return next(size for size in range(most, 0, -1) if num_iterations % size == 0)


def _eta(algorithm: Any, plan: fdg.Plan) -> int | None:
    """The bound on the age of a stream's tokens, in updates; None without a stream or without any lag."""
    ahead = getattr(without_sweep(algorithm), "ahead", None)
    late = 0 if plan.delayed is None else plan.delayed.staleness
    return ahead + late if ahead is not None and (ahead or late) else None


@dataclasses.dataclass
class _Session:
    """One process's work on a run, from its start or latest checkpoint to its end or an interruption."""

    job: Job
    engine: fdg.Engine
    weights: Weights | None
    run: RunDirectory
    checkpoints: Checkpoints
    callbacks: Sequence[Callback]
    say: Callable[[Any], None]
    samples: Sequence[Mapping[str, Any]] = ()  # the latest table of sampled texts

    def train(self, candidates: str, why: str, brief: bool, file: TextIO | None) -> Outcome:
        """Trains, then prints and writes the results."""
        job, engine, run, say = self.job, self.engine, self.run, self.say
        total, agents = job.num_iterations, job.agents or 1
        found: Any = None, False
        if job.resumes and distributed.is_first():
            found = self.checkpoints.latest(), run.summary() is not None
        latest, complete = distributed.exchange(found)[0]  # as found by process 0
        if latest == total and complete:
            copy_data_files(run, job.algorithm)  # raises if data files have changed
            say(f"the run in {run.path} is complete: all of its {total:,} iterations are done")
            if job.timeline or job.profile:
                say("nothing was timed or drawn, for nothing ran")
            say("go on with it by --total-steps, above what it has done")
            return Outcome(run, engine, None, total)
        if not brief:
            if candidates:
                say(f"{candidates}\n")
            say(f"{engine.plan}\n")
            if why:
                say(f"devices: {why}")
        say("compiling ...")
        state, compile_s = self._start(latest)
        engine, start = self.engine, latest or 0
        last = run.truncate_metrics(start) if job.resumes else None
        lost = LostEpisodes(getattr(job.algorithm, "env", None), last)
        copy_data_files(run, job.algorithm)
        wall_before = last["wall_s"] if last else 0.0
        self.samples = write_samples(job, engine, state, run, start)  # compiles before the timed loop
        if job.resumes:
            none = "" if latest is not None else " (no checkpoint had been written)"
            say(f"resuming at iteration {start:,} of {total:,}{none}")
        say(f"compiled in {compile_s:.1f} s; run directory {run.path}")
        for line in unexplained_lines(engine):
            say(line)

        wanted = job.loggers if distributed.is_first() else {}
        trackers = loggers.open_loggers(wanted, run.path, job.config, start * job.steps_per_iteration)
        evaluating = PeriodicEvaluation(job, engine, run)
        try:
            with (
                ctrl_c.collected_signals(_interrupt, grace=ctrl_c.GRACE_SECONDS) as signals,
                Progress(total, job.steps_per_iteration * agents, start, file) as progress,
            ):
                recorder = Recorder(
                    job,
                    run,
                    progress,
                    start,
                    wall_before,
                    trackers,
                    self.callbacks,
                    Finite(job, self.checkpoints),
                    lost,
                    lambda: self.samples,
                    lambda: engine.busy_seconds(waits=False),
                    last,
                    _eta(job.algorithm, engine.plan),
                )
                state, iteration, caught = self._iterations(state, start, recorder, evaluating, signals)
                wall_s = recorder.wall_s
        finally:
            for tracker in trackers:
                tracker.close()
            evaluating.close()
        points, failed = point_names(job.algorithm), recorder.failed
        how: Any = {"points": points, "counted": steps_of(job.algorithm), "failed": failed}
        draw_learning_curve(run, run_title(job), SOLVED.get(job.described["env"]), **how)
        if caught is not None:
            self.checkpoints.close()
            at = f"interrupted at iteration {iteration:,} of {total:,}"
            say(f"{at}, and saved: go on with --resume {run.path}")
            return Outcome(run, engine, state, iteration, caught=caught)
        stopped = evaluating.stopped or ("a callback ended it" if recorder.wants_to_stop else None)
        if iteration < total:
            say(f"stopped at iteration {iteration:,} of {total:,}: {stopped}")
        groups = groups_summary(engine, wall_s - wall_before)
        episodes = episodes_of(job.algorithm, job.eval_episodes)
        evaluations = evaluate(job, engine, state, episodes, failed=failed)
        profiled = profile_run(engine, state, run.path) if job.profile else []
        profiled += timeline_run(engine, state, run.path) if job.timeline else []
        self.checkpoints.close()
        evaluation = evaluations[0] if evaluations else None
        outcome = Outcome(run, engine, state, iteration, stopped=stopped, evaluation=evaluation)
        if not distributed.is_first():
            return outcome
        seconds = {"wall_s": wall_s, "compile_s": compile_s}
        best = evaluating.best_summary()
        ended = {"stopped": stopped} if stopped else {}
        said = {**summarized(evaluations), **best, **ended, **lost.summary()}
        if failed:
            seeds = agent_seeds(job.algorithm, job.seed, job.agents)
            said["failed_seeds"] = [seeds[i] for i in failed]
        run.publish_json("summary.json", summary(job, engine, iteration, seconds, said, groups))
        steps = iteration * job.steps_per_iteration * agents
        say(f"trained {steps:,} steps in {clock(wall_s)} ({steps / max(wall_s, 1e-9):,.0f} steps/s)")
        if lost.line():
            say(lost.line())
        if evaluation is not None:
            # A mean over all points of a sweep is not a result.
            say(verdict(evaluation, None if points else job.described["env"]))
        swept = []
        if isinstance(job.algorithm, Sweep):
            means = None if evaluation is None else evaluation.means
            swept = write_sweep(job.algorithm, run, means, run_title(job), failed, job.seed)
        for line in [*sample_lines(self.samples), *profiled, *swept]:
            say(line)
        say(f"run directory {run.path}")
        return outcome

    def _iterations(
        self,
        state: Any,
        start: int,
        recorder: Recorder,
        evaluating: PeriodicEvaluation,
        signals: Sequence[int],
    ) -> tuple[Any, int, int | None]:
        """Runs the remaining iterations; returns the state, the iteration and the signal that ended them."""
        job, total = self.job, self.job.num_iterations
        size = iterations_per_call(total, job.steps_per_iteration)
        checkpoint_every = math.ceil((job.checkpoint_every or total / _CHECKPOINTS) / size) * size
        periods = [checkpoint_every, *([job.eval_every] if job.eval_every else [])]
        iteration, caught, ended = start, _agree_on_signal(signals), False
        while iteration < total and caught is None and not ended:
            boundary = min((iteration // period + 1) * period for period in periods)
            state, metrics = self.engine.start(state, min(size, boundary - iteration, total - iteration))
            recorder.add(metrics)
            iteration += metrics.iterations
            if job.eval_every and iteration % job.eval_every == 0:
                recorder.annotate(evaluating.evaluate(state, iteration, recorder.failed))
            if job.stop_at is not None or self.callbacks:
                ended = any(distributed.exchange(evaluating.stopped is not None or recorder.wants_to_stop))
            caught = _agree_on_signal(signals)
            is_due = iteration % checkpoint_every == 0 and (
                job.checkpoint_every is not None or self.checkpoints.are_cheap()
            )
            if is_due or iteration == total or caught is not None or ended:
                recorder.flush()  # first: a checkpoint is never ahead of the metrics
                self.checkpoints.save(iteration, state)
                self.samples = write_samples(job, self.engine, state, self.run, iteration)
        return state, iteration, caught

    def _start(self, latest: int | None) -> tuple[Any, float]:
        """Compiles the engine; returns the initial or restored state and the seconds that this took."""
        begun = time.perf_counter()
        job, engine = self.job, self.engine
        if latest is not None:
            state = self.checkpoints.restore(latest, engine.state_shape)
            if latest < job.num_iterations:
                engine.compile()
        else:
            state = compile_and_init(engine, job.seed)
            if self.weights is not None:
                state = load_weights_into(self.weights, engine, state)
                self.say(self.weights.message)
        jax.block_until_ready(state)
        return state, time.perf_counter() - begun


def _check_same(config: Mapping[str, Any]) -> None:
    """Refuses processes with different jobs or versions: their collectives would deadlock."""
    mine, *others = distributed.exchange({**config, "versions": versions()})
    for i, other in enumerate(others, 1):
        for name in mine:
            if other.get(name) != mine[name]:
                raise FdgError(f"process {i} has {name} {other.get(name)}, and process 0 has {mine[name]}")
