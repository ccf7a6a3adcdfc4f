"""Carries out a training run: compiles, iterates, records metrics, saves checkpoints, evaluates."""

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
from fdg import ctrl_c, files
from fdg.costs.machine import calibration_problem
from fdg.errors import FdgError, host_errors
from fdg.processes import distributed
from fdg.profiling.writing import write_profile, write_timeline
from fdg.training import loggers
from fdg.training.checkpoint import Checkpoints
from fdg.training.curves import draw_learning_curve
from fdg.training.data_copies import copy_data_files
from fdg.training.evaluation import SOLVED, Evaluation, verdict
from fdg.training.finite import FiniteCheck
from fdg.training.job import Job, open_run, steps_unit
from fdg.training.loading import StoredRun, Weights, load_weights_into, read_weights
from fdg.training.periodic_evaluation import Evaluator
from fdg.training.progress import Progress, clock
from fdg.training.recorder import Callback, Recorder, check_metrics
from fdg.training.run_directory import RunDirectory, read_summary, unwritable_error
from fdg.training.samples import sample_lines, write_samples
from fdg.training.settling import Settled, check_all_busy, prepare, too_small_micro_batch
from fdg.training.summary import groups_summary, summary, unplanned_collectives, versions
from fdg.training.sweep import Sweep, agent_seeds, point_names
from fdg.training.sweep_results import write_sweep

_MAX_STEPS_PER_CALL = 65_536  # maximum steps of one agent per call: half a second at 130,000 steps/s
_MIN_CALLS = 50  # minimum number of calls in a run
_MAX_SECONDS_PER_CALL = 5.0  # longer calls would delay Ctrl-C, callbacks and the display
_NUM_CHECKPOINTS = 20  # number of checkpoints in a run without `--checkpoint-every`
_MIN_ROWS = 32  # a data file with fewer rows causes a hint


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a job."""

    run: RunDirectory  # the run's directory
    engine: fdg.Engine  # the engine that ran it
    state: Any  # the engine's final state; None if the run was already complete
    iteration: int  # completed iterations
    caught: int | None = None  # the signal that ended the run early, or None
    stopped: str | None = None  # another reason for an early end, or None
    evaluation: Evaluation | None = None  # the greedy evaluation at the end, or None


def say(line: Any = "") -> None:
    """Prints a line and flushes standard output."""
    print(line, flush=True)


def carry_out(
    job: Job,
    start_from: StoredRun | None = None,
    devices: Sequence[jax.Device] | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    show_plan: bool = True,
) -> Outcome:
    """Trains, evaluates and writes the run directory; prints progress.

    The weights of the run `start_from` initialise this one; `devices` replace those of the job. All processes
    call it; process 0 writes. With `quiet` nothing is printed; `show_plan` prints the plan.

    Raises:
      FdgError: the job is invalid; nothing has been written.
      HostError: a function on the host failed, such as a reward; checkpoints remain.
    """
    _check_equal_jobs(job.config)
    report = (lambda line: None) if quiet else say
    if show_plan:
        report("tracing ...")
    env: Any = getattr(job.algorithm, "env", None)
    rows = getattr(env, "num_rows", None)
    if not job.resumes and callable(getattr(env, "try_out", None)):
        env.try_out()
    if not job.resumes and rows is not None and rows < _MIN_ROWS:
        report(f"hint: {env.name} has only {rows} row{'s' * (rows != 1)} to learn from: expect overfitting")
    settled = prepare(job, devices)
    job, graph = settled.job, settled.graph
    engine = fdg.compile(job.algorithm, job.policy, settled.devices, job.agents, graph)
    if job.devices is not None or distributed.count() > 1:
        check_all_busy(job.algorithm, engine.plan, settled.devices)
    if line := too_small_micro_batch(job.algorithm, engine.plan):
        report(f"hint: {line}")
    weights = None
    if start_from is not None:
        weights = read_weights(start_from, job.algorithm, job.agents, graph)
    run, checkpoints = open_run(job)
    try:
        session = _Session(job, engine, weights, run, checkpoints, callbacks, report)
        with host_errors():
            return session.train(settled, show_plan, io.StringIO() if quiet else None)
    except Exception as error:
        if not job.resumes:
            run.remove_if_unused()
        if isinstance(error, BrokenPipeError) and distributed.is_first() and run.path.exists():
            print(f"standard output was closed: go on with --resume {run.path}", file=sys.stderr)
        if isinstance(error, OSError) and error.errno in files.FULL and run.path.exists():
            problem = f"{error.filename or 'standard output'} cannot be written"
            raise unwritable_error(run.path, problem, str(error.strerror), False) from error
        raise
    finally:
        with contextlib.closing(run):
            checkpoints.close()  # may raise


def iterations_per_call(num_iterations: int, steps_per_iteration: int) -> int:
    """The number of iterations per call of `engine.run`: a divisor of the total that keeps calls short.

    >>> iterations_per_call(976, 512)
    16
    """
    limit = max(1, min(num_iterations // _MIN_CALLS, _MAX_STEPS_PER_CALL // steps_per_iteration))
    return next(size for size in range(limit, 0, -1) if num_iterations % size == 0)


@dataclasses.dataclass
class _Session:
    """Runs a job in one process, from the start or latest checkpoint to the end or an interruption."""

    job: Job
    engine: fdg.Engine
    weights: Weights | None
    run: RunDirectory
    checkpoints: Checkpoints
    callbacks: Sequence[Callback]
    say: Callable[[Any], None]

    def train(self, settled: Settled, show_plan: bool, progress_file: TextIO | None) -> Outcome:
        """Trains, then prints and writes the results."""
        job, engine, run, say = self.job, self.engine, self.run, self.say
        total = job.num_iterations
        stored: Any = None, False
        if job.resumes and distributed.is_first():
            stored = self.checkpoints.latest(), read_summary(run.path) is not None
        latest, complete = distributed.exchange(stored)[0]  # the values of process 0
        if latest == total and complete:
            return self._leave_as_it_is()
        if show_plan:
            self._print_plan(settled)
        check_metrics(engine.plan.graph.metrics)
        say("compiling ...")
        state, compile_s = self._start(latest)
        start = latest or 0
        last_row = run.truncate_metrics(start) if job.resumes else None
        copy_data_files(run, job.algorithm)
        samples = write_samples(job, engine, state, run, start)  # compiles before the timed loop
        if job.resumes:
            suffix = "" if latest is not None else " (no checkpoint had been written)"
            say(f"resuming at iteration {start:,} of {total:,}{suffix}")
        say(f"compiled in {compile_s:.1f} s; run directory {run.path}")
        for line in unplanned_collectives(engine):
            say(line)

        targets = job.loggers if distributed.is_first() else {}
        trackers = loggers.open_loggers(targets, run.path, job.config, start * job.steps_per_iteration)
        evaluator = Evaluator(job, engine, run, start)
        status: loggers.Status = "FAILED"
        try:
            with (
                ctrl_c.collected_signals(_interrupt, grace=ctrl_c.GRACE_SECONDS) as signals,
                Progress(
                    total, job.steps_per_iteration * (job.agents or 1), start, progress_file
                ) as progress,
            ):
                finite = FiniteCheck(job.algorithm, self.checkpoints, job.seed, job.on_nan == "warn")
                outputs = run, progress, trackers, self.callbacks
                recorder = Recorder(job, engine, finite, *outputs, start, last_row, samples)
                wall_before = recorder.wall_s
                state, iteration, caught = self._iterations(state, start, recorder, evaluator, signals)
                seconds = {"wall_s": recorder.wall_s, "compile_s": compile_s}
                status = "FINISHED" if caught is None else "KILLED"
        finally:
            for tracker in trackers:
                tracker.close(status)
            evaluator.close()
        solved, unit = SOLVED.get(job.described["env"]), steps_unit(job.algorithm)
        points, failed = point_names(job.algorithm), recorder.failed
        draw_learning_curve(run, job.title, solved, points=points, x_label=unit, failed=failed)
        if caught is not None:
            self.checkpoints.close()
            place = f"iteration {iteration:,} of {total:,}"
            say(f"interrupted at {place}, and saved: go on with --resume {run.path}")
            return Outcome(run, engine, state, iteration, caught=caught)
        groups = groups_summary(engine, recorder.wall_s - wall_before)
        return self._finish(state, iteration, recorder, evaluator, seconds, groups)

    def _leave_as_it_is(self) -> Outcome:
        """Says that the run is complete."""
        job, run, say = self.job, self.run, self.say
        copy_data_files(run, job.algorithm)  # raises if data files have changed
        say(f"the run in {run.path} is complete: all of its {job.num_iterations:,} iterations are done")
        if job.timeline or job.profile:
            say("--profile and --timeline have no effect: no iteration ran")
        say("to continue it, give a larger --total-steps")
        return Outcome(run, self.engine, None, job.num_iterations)

    def _print_plan(self, settled: Settled) -> None:
        """Prints the plan, and why it was chosen."""
        if settled.message:
            self.say(f"{settled.message}\n")
        self.say(f"{self.engine.plan}\n")
        if problem := calibration_problem(self.engine.devices[0].device_kind):
            self.say(f"calibration: {problem}")
        if settled.devices_reason:
            self.say(f"devices: {settled.devices_reason}")

    def _finish(
        self,
        state: Any,
        iteration: int,
        recorder: Recorder,
        evaluator: Evaluator,
        seconds: Mapping[str, float],
        groups: Any,
    ) -> Outcome:
        """Evaluates the trained agents, and prints and writes the results."""
        job, engine, run, say, failed = self.job, self.engine, self.run, self.say, recorder.failed
        total = job.num_iterations
        stopped = (evaluator.stopped or recorder.stopped) if iteration < total else None
        if stopped:
            say(f"stopped at iteration {iteration:,} of {total:,}: {stopped}")
        evaluation, entries = evaluator.after_training(state, failed)
        profile_lines = write_profile(engine, state, run.path) if job.profile else []
        profile_lines += write_timeline(engine, state, run.path) if job.timeline else []
        self.checkpoints.close()
        outcome = Outcome(run, engine, state, iteration, stopped=stopped, evaluation=evaluation)
        if not distributed.is_first():
            return outcome
        seeds = agent_seeds(job.algorithm, job.seed, job.agents)
        entries |= {"stopped": stopped} if stopped else {}
        entries |= recorder.lost_episodes.summary()
        if failed:
            entries["failed_seeds"] = [seeds[i] for i in failed]
        steps = iteration * job.steps_per_iteration
        content = summary(engine, iteration, steps, seeds, seconds, entries, groups)
        run.publish_json("summary.json", content)
        steps *= job.agents or 1
        wall_s = seconds["wall_s"]
        say(f"trained {steps:,} steps in {clock(wall_s)} ({steps / max(wall_s, 1e-9):,.0f} steps/s)")
        if line := recorder.lost_episodes.line():
            say(line)
        if evaluation is not None:
            # `None`: the mean over all points of a sweep does not say whether the environment is solved.
            say(verdict(evaluation, None if point_names(job.algorithm) else job.described["env"]))
        lines = [*sample_lines(recorder.samples), *profile_lines]
        if isinstance(job.algorithm, Sweep):
            means = None if evaluation is None else evaluation.means
            lines += write_sweep(job.algorithm, run, means, job.title, failed, job.seed)
        for line in lines:
            say(line)
        say(f"run directory {run.path}")
        return outcome

    def _iterations(
        self,
        state: Any,
        start: int,
        recorder: Recorder,
        evaluator: Evaluator,
        signals: Sequence[int],
    ) -> tuple[Any, int, int | None]:
        """Runs the remaining iterations; returns the state, the iteration, and the signal that ended it."""
        job, total = self.job, self.job.num_iterations
        size = iterations_per_call(total, job.steps_per_iteration)
        checkpoint_every = math.ceil((job.checkpoint_every or total / _NUM_CHECKPOINTS) / size) * size
        periods = [size, checkpoint_every, *([job.eval_every] if job.eval_every else [])]
        iteration, count = start, 1  # `count`: iterations of the next call, doubled up to `size`
        caught, is_done, _ = _agree(signals, None, count)
        while iteration < total and caught is None and not is_done:
            boundary = min((iteration // period + 1) * period for period in periods)
            recorder.note_time_if_ended()
            state, metrics = self.engine.start(state, min(count, boundary - iteration, total - iteration))
            recorder.add(metrics)
            iteration += metrics.iterations
            if job.eval_every and iteration % job.eval_every == 0:
                recorder.annotate(evaluator.while_training(state, iteration, recorder.failed))
            max_count = _MAX_SECONDS_PER_CALL / max(recorder.iteration_s, 1e-9)
            count = max(1, min(size, 2 * count, int(max_count)))
            caught, is_done, count = _agree(signals, evaluator.stopped or recorder.stopped, count)
            is_due = iteration % checkpoint_every == 0 and (
                job.checkpoint_every is not None or self.checkpoints.are_cheap()
            )
            if is_due or iteration == total or caught is not None or is_done:
                recorder.flush()  # before saving, so that a checkpoint is never ahead of the metrics
                self.checkpoints.save(iteration, state)
                recorder.samples = write_samples(job, self.engine, state, self.run, iteration)
        return state, iteration, caught

    def _start(self, latest: int | None) -> tuple[Any, float]:
        """Compiles the engine; returns the initial or restored state, and the seconds until it was ready."""
        start = time.perf_counter()
        job, engine = self.job, self.engine
        if latest is not None:
            state = self.checkpoints.restore(latest, engine.state_shape)
            if latest < job.num_iterations:
                engine.compile()
        else:
            state = engine.compile_and_init(job.seed)
            if self.weights is not None:
                state = load_weights_into(self.weights, engine, state)
                self.say(self.weights.message)
        jax.block_until_ready(state)
        return state, time.perf_counter() - start


def _interrupt(_: int) -> NoReturn:
    raise KeyboardInterrupt


def _agree(caught: Sequence[int], stopped: str | None, count: int) -> tuple[int | None, bool, int]:
    """What all processes do next: the signal that any of them caught, or None; whether any has a reason to
    stop; and the iterations of the next call, which process 0 chooses. A collective.
    """
    answers = distributed.exchange((list(caught[:1]), stopped is not None, count))
    signal = next((signals[0] for signals, _, _ in answers if signals), None)
    return signal, any(stops for _, stops, _ in answers), answers[0][2]


def _check_equal_jobs(config: Mapping[str, Any]) -> None:
    """Refuses processes with unequal jobs or versions: their collectives would deadlock."""
    first, *rest = distributed.exchange({**config, "versions": versions()})
    for i, candidate in enumerate(rest, 1):
        for name in first:
            if candidate.get(name) != first[name]:
                raise FdgError(
                    f"process {i} has {name} {candidate.get(name)}, and process 0 has {first[name]}: start"
                    " all processes with the same flags and versions"
                )
