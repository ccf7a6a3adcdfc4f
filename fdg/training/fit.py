"""`fdg.fit`: `python -m fdg.train` as a function."""

import dataclasses
import io
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax

import policies
from fdg.agents import Agents, checked_name, split_agents
from fdg.arguments import as_arguments, check_takes, checked, quoted
from fdg.errors import FdgError, FdgWarning
from fdg.kinds import as_python, dataclass_fields
from fdg.placing.policy import check_policy, checked_devices
from fdg.training.curves import draw_run
from fdg.training.description import describe
from fdg.training.job import Job
from fdg.training.loading import StoredRun, inherit_fields, load, open_origin
from fdg.training.loop import carry_out, say
from fdg.training.recorder import Callback, Report
from fdg.training.run import Run
from fdg.training.run_directory import check_free, read_config
from fdg.training.settings import Settings, changes, contradiction, flatten_config, kept_settings
from fdg.training.sweep import Sweep, replace_fields, unwrap_sweep, wrapper_entries

_SECONDS_BETWEEN_PLOTS = 2.0  # drawing a plot takes 0.1 s


class LivePlot:
    """A callback of `fdg.fit` that updates a plot in the output of a notebook cell."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._drawn_at = -_SECONDS_BETWEEN_PLOTS
        self._handle: Any = None

    def __call__(self, report: Report) -> None:
        """Adds the rows of a report; redraws at most every `_SECONDS_BETWEEN_PLOTS`."""
        self._rows.extend(dict(row) for row in report.rows)
        now = time.monotonic()
        if now - self._drawn_at < _SECONDS_BETWEEN_PLOTS and report.iteration < report.num_iterations:
            return
        self._drawn_at = now
        from IPython.display import Image, display

        picture, title = io.BytesIO(), f"iteration {report.iteration:,} of {report.num_iterations:,}"
        draw_run(self._rows, title, None, picture, 80)
        image = Image(data=picture.getvalue(), format="png")
        if self._handle is None:
            self._handle = display(image, display_id=True)
        else:
            self._handle.update(image)


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return any(cls.__name__ == "ZMQInteractiveShell" for cls in type(shell).mro())  # Colab's is a subclass


@checked
def fit(
    algorithm: Any,
    policy: Any = None,
    *,
    total_steps: int | None = None,
    devices: int | Sequence[jax.Device] | None = None,
    seed: int = 0,
    num_seeds: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    start_from: str | Path | None = None,
    eval_every: int | None = None,
    eval_episodes: int | None = None,
    checkpoint_every: int | None = None,
    stop_at: float | None = None,
    stop_after: float | None = None,
    on_nan: Literal["stop", "warn"] = "stop",
    callbacks: Sequence[Callback] = (),
    tensorboard: bool = False,
    wandb: str | None = None,
    mlflow: str | None = None,
    progress: bool = True,
    live_plot: bool | None = None,
) -> Run:
    """Trains an algorithm under a distribution policy and writes a run directory.

    Ctrl-C (a notebook's stop button) saves after the current call and stops. A notebook then gets the `Run`
    so far; a script gets `KeyboardInterrupt`. `fdg.fit(..., out=DIR, resume=True)` continues exactly.

    Args:
      algorithm: any object with `init`, `iterate` and `steps_per_iteration`, such as `algos.PPO(...)`.
      policy: the distribution policy; None: `policies.GPUOnly()`.
      total_steps: steps of each agent (environment steps; responses for language models); None: the
        algorithm's `total_steps`.
      devices: the devices, or their number; None: all devices.
      seed: the seed of all random numbers.
      num_seeds: train this many agents in one program, with seeds `seed`, `seed + 1`, ...; None: one agent.
      out: the run directory; None: `runs/ENV-ALGO-SEED-TIME`.
      resume: resume the run in `out`, if there is one; a larger `total_steps` extends it.
      start_from: the directory of an earlier run whose weights initialise this one.
      eval_every: iterations between evaluations during training; the state with the best return is saved.
      eval_episodes: episodes of the evaluation after training; 0: no evaluation; None: 128, or every held-out
        row of a file once.
      checkpoint_every: iterations between checkpoints; None: about twenty checkpoints, fewer if writing them
        would take more than 1% of the time.
      stop_at: stop when an evaluation during training reaches this return.
      stop_after: stop after this many seconds of training; compilation does not count.
      on_nan: "stop" ends the run if a loss of every agent is NaN or infinite; "warn" continues.
      callbacks: functions that get a `Report` of newly recorded iterations; a true result ends the run.
      tensorboard: write TensorBoard event files into the run directory.
      wandb: log to this project of Weights & Biases.
      mlflow: log to this experiment of MLflow.
      progress: print progress.
      live_plot: update a plot of the learning curve; None: only in notebooks.

    Returns:
      The run: `run.policy(observation)`, `run.evaluate()`, `run.play("video.mp4")`.

    Raises:
      FdgError: an argument is invalid; nothing has been written.
      KeyboardInterrupt: in an interrupted script, after saving.

    Example::

        run = fdg.fit(algos.PPO(env=envs.make("CartPole-v1")), total_steps=100_000)
    """
    arguments = locals()  # the fields of `Settings` among them are passed on
    names = {*kept_settings(Settings), "out", "resume", "start_from"} - {"devices"}
    settings = {name: value for name, value in arguments.items() if name in names}
    job, start = make_job(algorithm, policies.GPUOnly() if policy is None else policy, **settings)
    for line in job.unused_setting_messages:
        warnings.warn(as_arguments(line), FdgWarning, stacklevel=3)
    if progress and job.rounding_message is not None:
        say(job.rounding_message)
    for callback in callbacks:
        check_takes(callback, ("report",), f"callback {quoted(callback)}")
    job_devices = None if devices is None else checked_devices(devices)
    plots = [LivePlot()] if (in_notebook() if live_plot is None else live_plot) else []
    try:
        outcome = carry_out(
            job, start, job_devices, (*plots, *callbacks), quiet=not progress, show_plan=False
        )
    except FdgError as error:
        if not str(error).startswith("--"):
            raise
        raise type(error)(as_arguments(str(error))) from error
    if outcome.state is None:  # the run was already complete
        run = load(outcome.run.path, algorithm=job.algorithm)
    else:
        run = Run(
            job.algorithm,
            outcome.engine.algorithm_state(outcome.state),
            outcome.iteration,
            path=outcome.run.path,
            config=job.config,
            seed=job.seed,
            agents=job.agents,
            finished=outcome.iteration == job.num_iterations,
            stopped="interrupted" if outcome.caught is not None else outcome.stopped,
            last_evaluation=outcome.evaluation,
        )
    if outcome.caught is not None:
        if not (in_notebook() or hasattr(sys, "ps1")):  # an interactive prompt
            raise KeyboardInterrupt(f"saved at iteration {outcome.iteration}: fdg.load({str(run.path)!r})")
        if progress:
            say(f"from Python: fdg.fit(..., out={str(run.path)!r}, resume=True)")
    return run


def make_job(
    algorithm: Any,
    policy: Any,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    start_from: str | Path | None = None,
    total_steps: int | None = None,
    **settings: Any,
) -> tuple[Job, StoredRun | None]:
    """The job of `fit`, from its arguments and further fields of `Settings`.

    Also returns the run whose weights initialise it, or None.
    """
    check_policy(policy)
    total_steps, settings = as_python(total_steps), {name: as_python(x) for name, x in settings.items()}
    algorithm, settings["num_seeds"] = split_agents(algorithm, settings.get("num_seeds"))
    if isinstance(algorithm, Agents):
        raise FdgError("fit does not train agents of agents: give fdg.agents(algorithm, n) of one agent")
    base = unwrap_sweep(algorithm)
    name = checked_name(base)
    is_field = any(field.name == "total_steps" for field in dataclass_fields(base))
    is_of_wrapped = hasattr(base, "total_steps") and callable(getattr(base, "changed", None))
    if total_steps is not None and (is_field or is_of_wrapped):
        algorithm, total_steps = replace_fields(algorithm, {"total_steps": total_steps}), None
    start: StoredRun | None = None
    if start_from is not None:
        start = StoredRun.open(start_from, flatten_config(describe(algorithm, policy)))
        algorithm = inherit_fields(algorithm, start)
    if total_steps is None and not hasattr(algorithm, "total_steps"):
        raise FdgError(f"total_steps: {name} has no default: give a number")
    num_seeds = settings.get("num_seeds")
    if isinstance(algorithm, Sweep) and num_seeds not in (None, algorithm.num_seeds):
        raise FdgError(f"num_seeds={num_seeds}: the sweep has {algorithm.num_seeds} seeds per point")
    settings |= wrapper_entries(algorithm)
    if out == "":
        raise FdgError("out='': give a directory, or None for one in runs/")
    if resume and out is None:
        raise FdgError("resume=True: give the run directory with out=")
    path = None if out is None else Path(out)
    resumes = resume and path is not None and (path / "config.json").exists()
    description = describe(algorithm, policy)
    try:
        origin_run = open_origin(path, flatten_config(description)) if resumes and path is not None else start
        job = Job.make(
            algorithm,
            policy,
            description,
            {**settings, "total_steps": total_steps, "out": path},
            resumes=resumes,
            record={"command": "fdg.fit"},
        )
        if path is not None and not resumes:
            check_free(path)
    except FdgError as error:
        raise type(error)(as_arguments(str(error))) from None
    if start is not None:
        origin = {"run": os.path.abspath(start.path), "changes": changes(start.config, job.config)}
        job = dataclasses.replace(job, record={**job.record, "from": origin})
    if path is not None and resumes and (conflict := contradiction(read_config(path, prefix=""), job.config)):
        name, old, new = conflict
        raise FdgError(
            f"resume=True: {name}={new!r} contradicts the {old!r} of the run in {path}: keep the old value,"
            " or start a new run (start_from= begins with the weights of this run)"
        )
    return job, origin_run
