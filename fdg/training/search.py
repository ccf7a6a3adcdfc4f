"""Hyperparameter search with Optuna: each trial is compiled and trained as a separate run.

Use it for hyperparameters that change the compiled program (sizes, switches, networks). For floats a sweep is
faster, and a trial may itself be a sweep. Bad trials are pruned by asynchronous successive halving (Li et al.
2020, "A System for Massively Parallel Hyperparameter Tuning", arXiv 1810.05934, algorithm 2).

    OUT/config.json     the configuration, with the search space
    OUT/study.journal   Optuna's storage, from which a search is resumed
    OUT/trials/0000     one run directory per trial
    OUT/search.json     the results; search.png plots them
"""

import dataclasses
import importlib.util
import itertools
import json
import math
import os
import re
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fdg import files
from fdg.arguments import check_arguments
from fdg.errors import FdgError, RunError, UnwritableError, one_line
from fdg.processes import distributed
from fdg.training.curves import finish_figure, make_figure, style_of
from fdg.training.finite import failed_agents
from fdg.training.job import Job, open_run, run_length
from fdg.training.loading import StoredRun
from fdg.training.loop import carry_out, say
from fdg.training.recorder import Report
from fdg.training.run_directory import RunDirectory, read_metrics, read_summary, to_json_types
from fdg.training.space import Space, check_choices, flags_text, space_text, value_text
from fdg.training.statistics import format_numbers, interval_of_returns
from fdg.training.sweep import Sweep, replace_fields, unwrap_sweep
from fdg.training.sweep_results import (
    best_index,
    final_returns,
    first_rows,
    interval_text,
    point_results,
    return_text,
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """The values and the result of one trial."""

    run: str  # the trial's folder below `trials/`
    values: Mapping[str, Any]  # hyperparameters by name, as in the search space
    state: str  # "done", "ended early" (pruned) or "refused" (not trainable, or without a finite return)
    value: float  # mean return (for a sweep, of its best point); NaN unless the trial is done
    returns: tuple[float, ...] = ()  # the return of each agent
    refused: str | None = None  # the error, if the state is "refused"

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% bootstrap interval of the mean over agents; None for one agent or an unfinished trial."""
        return interval_of_returns(self.returns) if self.state == "done" else None


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """The trial with the highest return (the first of equal ones); None if no trial is done."""
    complete = [trial for trial in trials if trial.state == "done" and math.isfinite(trial.value)]
    return max(complete, key=lambda trial: trial.value, default=None)


def write_results(run: RunDirectory, space: Space, trials: Sequence[Trial], agents: int | None) -> list[str]:
    """Writes `search.json` and `search.png`; returns the table and the best trial as lines."""
    best = best_trial(trials)
    content = {
        "search": {parameter.name: str(parameter).partition("=")[2] for parameter in space},
        "agents": agents or 1,
        "trials": [{**dataclasses.asdict(trial), "interval": trial.interval} for trial in trials],
        "best": None if best is None else {"run": best.run, "values": best.values, "return": best.value},
    }
    run.publish_json("search.json", content)
    if not trials:
        return []
    run.publish("search.png", lambda file: _plot_trials(trials, file))
    lines = [trials_table(trials, [parameter.name for parameter in space])]
    if best is None:
        return [*lines, "best: none, since no trial is done"]
    return [
        *lines,
        f"best: return {format_numbers(best.value)[0]} in {run.path / 'trials' / best.run}",
        f"by flags: {flags_text(best.values)}",
    ]


def trials_table(trials: Sequence[Trial], names: Sequence[str]) -> str:
    """A table of at most twenty trials, best first."""
    rows = []
    for trial in sorted(trials, key=lambda trial: -trial.value if math.isfinite(trial.value) else math.inf):
        texts = (
            f"{v:.4g}" if isinstance(v := trial.values[name], float) else value_text(v) for name in names
        )
        state = "" if trial.state == "done" else trial.state
        rows.append([trial.run, *texts, return_text(trial.value), interval_text(trial.interval), state])
    return first_rows(["trial", *names, "return", "95% interval", ""], rows)


def _plot_trials(trials: Sequence[Trial], picture: Any) -> None:
    """Plots each trial's return and the best so far."""
    figure, axes = make_figure()
    (_, points), (_, line) = style_of(0), style_of(1)
    values = np.array([trial.value for trial in trials], float)
    axes.scatter(range(len(values)), values, color=points, s=20, label="a trial")
    finite = np.where(np.isfinite(values), values, -np.inf)
    best = np.maximum.accumulate(finite)
    axes.plot(np.flatnonzero(np.isfinite(best)), best[np.isfinite(best)], color=line, label="best so far")
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):  # plotted at the lowest return, so that they are visible
        bottom = values[np.isfinite(values)].min() if len(bad) < len(values) else 0.0
        axes.scatter(bad, [bottom] * len(bad), color="#999999", marker="x", label="ended early, or refused")
    axes.set(title="search", xlabel="trial", ylabel="mean return")
    finish_figure(figure, [axes], "trials")
    figure.savefig(picture, format="png", dpi=150)


REDUCTION = 3  # one in three trials that reach a rung continues
RUNGS = 3  # rungs are at 1/27, 1/9 and 1/3 of the training
_MAX_PROPOSALS = 20  # proposals of Optuna per trial; after these, values are random


def check_search(algorithm: Any, space: Space) -> None:
    """Checks that a search space names only hyperparameters of the algorithm that no sweep varies."""
    base = unwrap_sweep(algorithm)
    if not dataclasses.is_dataclass(base):
        raise FdgError(f"search: {type(base).__name__} has no fields: give an algorithm that is a dataclass")
    fields = [field.name for field in dataclasses.fields(base) if field.init]
    swept = [name for name, _ in algorithm.grid] if isinstance(algorithm, Sweep) else []
    for parameter in space:
        name = parameter.name
        if name not in fields or name in ("env", "total_steps"):
            raise FdgError(f"search: {name} is not a hyperparameter of {type(base).__name__} to search")
        for value in getattr(parameter, "values", ()):
            check_arguments(type(base), {name: value})
        if name in swept:
            raise FdgError(f"search: {name} is swept already: leave it out of the search or of the sweep")


def require_optuna() -> None:
    """Checks that Optuna is installed."""
    if importlib.util.find_spec("optuna") is None:
        raise FdgError("--optuna needs Optuna, which is not installed: pip install 'fdg[optuna]'")


def carry_out_search(
    job: Job,
    space: Space,
    start_from: StoredRun | None = None,
    devices: Any = None,
    quiet: bool = False,
) -> tuple[Path, list[Trial], int | None]:
    """Runs trials until there are as many as the job asks for; trials from before a resume count.

    The weights of the run `start_from` initialise each trial.
    Returns the directory of the search, its trials, and the signal that interrupted it (None: no signal).
    """
    require_optuna()
    check_search(job.algorithm, space)
    check_choices(space, job.optuna or 0)
    if distributed.count() > 1:
        raise FdgError(
            "--optuna: a search runs in one process: start one search per machine, with different seeds"
        )
    run, _ = open_run(dataclasses.replace(job, search=space_text(space)))
    try:
        study = _open_study(run, job.halving)
        report = (lambda line: None) if quiet else say
        return _Search(job, space, start_from, run, devices, report, study).carry_out()
    finally:
        run.close()


def _repair_last_line(journal: Path) -> None:
    """Removes an incomplete last entry of the journal; adds the newline that a complete one lacks."""
    content = journal.read_bytes()
    end = content.rfind(b"\n") + 1
    entry = content[end:]
    if not entry.startswith(b"{"):  # nothing, or not Optuna's
        return
    try:
        json.loads(entry)
    except ValueError:
        os.truncate(journal, end)
    else:
        with open(journal, "ab") as file:
            file.write(b"\n")


def _open_study(run: RunDirectory, halving: bool) -> Any:
    """Optuna's study in the run's journal, created if there is none; with `halving`, it prunes trials."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    class Journal(JournalFileBackend):
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            with run.explain_write_errors(journal.name):
                super().append_logs(logs)

    journal = run.path / "study.journal"
    # Only this process writes here, since it has locked the run. A process that was killed may have left
    # Optuna's lock, which would never be released, or an incomplete line, after which Optuna cannot append.
    with run.explain_write_errors(journal.name):
        journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
        if journal.exists():
            _repair_last_line(journal)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION)
    try:
        return optuna.create_study(
            storage=JournalStorage(Journal(str(journal))),
            study_name="search",
            direction="maximize",
            load_if_exists=True,
            pruner=pruner if halving else optuna.pruners.NopPruner(),
        )
    except (OSError, FdgError):
        raise
    except Exception as error:  # Optuna raises many types on a damaged file
        raise FdgError(
            f"{journal} is not Optuna's journal ({type(error).__name__}): restore it, or start a new run"
        ) from error


@dataclasses.dataclass
class _Search:
    """A search in progress: proposes trials and trains them one after another."""

    job: Job
    space: Space
    start_from: StoredRun | None
    run: RunDirectory
    devices: Any
    say: Callable[[Any], None]
    study: Any  # Optuna's study

    def carry_out(self) -> tuple[Path, list[Trial], int | None]:
        total, caught = self.job.optuna or 0, None
        while caught is None and (num_ended := len(self._ended_trials())) < total:
            if not self._open_trials() and not self._propose(num_ended):
                rest = f"{total - num_ended} of {total} trials are left out"
                self.say(f"all {num_ended} combinations of values have been tried: {rest}")
                break
            caught = self._run_trial(self._open_trials()[0], num_ended, total)
        trials = self._trial_results()
        if caught is not None:
            self.say(f"interrupted, and saved: go on with --resume {self.run.path}")
        for line in write_results(self.run, self.space, trials, self.job.agents):
            self.say(line)
        self.say(f"run directory {self.run.path}")
        return self.run.path, trials, caught

    def _propose(self, num_ended: int) -> bool:
        """Adds a trial with untried values; equal values would repeat a trial, since all have the same seeds.

        Optuna proposes values; after `_MAX_PROPOSALS` tried proposals they are random. Returns False if all
        values have been tried.
        """
        import optuna
        from optuna.samplers import RandomSampler, TPESampler

        tried = [trial.params for trial in self._ended_trials()]
        if math.prod(parameter.count for parameter in self.space) <= len(tried):
            return False
        seed = self.job.seed + num_ended  # a resumed search has the same seeds
        memory_study = optuna.create_study(direction="maximize", sampler=TPESampler(seed=seed))
        memory_study.add_trials(self.study.get_trials())
        for attempt in itertools.count():
            if attempt == _MAX_PROPOSALS:
                memory_study.sampler = RandomSampler(seed=seed)
            trial = memory_study.ask()
            for parameter in self.space:
                parameter.suggest(trial)
            if trial.params not in tried:
                break
            memory_study.tell(trial, state=optuna.trial.TrialState.FAIL)
        proposal = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING, params=trial.params, distributions=trial.distributions
        )
        self.study.add_trial(proposal)
        return True

    def _open_trials(self) -> list[Any]:
        """Trials that were proposed and have not ended; an interrupted one resumes from its checkpoint."""
        import optuna

        return [
            optuna.trial.Trial(self.study, trial._trial_id)
            for trial in self.study.get_trials()
            if trial.state.name == "RUNNING" and len(trial.params) == len(self.space)
        ]

    def _ended_trials(self) -> list[Any]:
        """Trials that are complete, pruned or failed, but not trials that a signal interrupted."""
        return [
            trial
            for trial in self.study.get_trials()
            if trial.state.name in ("COMPLETE", "PRUNED") or "refused" in trial.user_attrs
        ]

    def _trial_results(self) -> list[Trial]:
        return [
            Trial(
                _trial_folder(trial),
                trial.params,
                {"COMPLETE": "done", "PRUNED": "ended early"}.get(trial.state.name, "refused"),
                trial.value if trial.value is not None else math.nan,
                tuple(trial.user_attrs.get("returns", ())),
                trial.user_attrs.get("refused"),
            )
            for trial in self._ended_trials()
        ]

    def _run_trial(self, trial: Any, num_ended: int, total: int) -> int | None:
        """Runs one trial; returns the signal that interrupted it, or None."""
        from optuna.trial import TrialState

        self.run.check_exists()  # raises if the directory was removed: a trial would recreate it
        trials = files.make_folder(self.run.path / "trials")
        values = {p.name: p.suggest(trial) for p in self.space}
        name = _trial_folder(trial)
        settings = ", ".join(f"{key}={value_text(value)}" for key, value in values.items())
        self.say(f"trial {num_ended + 1} of {total}: {settings}")
        pruner = None
        try:
            files.check_own(trials / name, is_folder=True)
            job = self._trial_job(values, trials / name)
            if self.job.halving:
                pruner = _Pruner(trial, job.num_iterations, read_metrics(trials / name / "metrics.jsonl"))
            outcome = carry_out(job, self.start_from, self.devices, [pruner] if pruner else [], quiet=True)
        except UnwritableError:  # the trial is not refused: a resumed search continues it
            raise
        except (FdgError, ValueError) as error:  # such as sizes that do not fit, or infinite losses
            self.run.check_exists()
            message = str(error) if isinstance(error, FdgError) else one_line(error)
            trial.set_user_attr("refused", message)
            self.study.tell(trial, state=TrialState.FAIL)
            self.say(f"  {'failed' if isinstance(error, RunError) else 'refused'}: {message}")
            return None
        if outcome.caught is not None:
            return outcome.caught
        value, returns = _trial_returns(job, outcome.run.path)
        trial.set_user_attr("returns", returns)
        if pruner is not None and pruner.is_behind:
            self.study.tell(trial, state=TrialState.PRUNED)
            self.say(f"  ended early, at iteration {outcome.iteration:,} of {job.num_iterations:,}")
        elif math.isfinite(value):
            self.study.tell(trial, value)
            self.say(f"  return {format_numbers(value)[0]}")
        else:
            trial.set_user_attr("refused", "no episode ended, or an agent's losses are not finite")
            self.study.tell(trial, state=TrialState.FAIL)
        return None

    def _trial_job(self, values: dict[str, Any], path: Path) -> Job:
        job, algorithm = self.job, replace_fields(self.job.algorithm, values)
        return job.changed(
            algorithm,
            described={"hyperparameters": {**job.described["hyperparameters"], **values}},
            out=path,
            resumes=(path / "config.json").exists(),
            optuna=None,
            search=None,
            **run_length(algorithm, type(algorithm).__name__, job.total_steps),
        )


class _Pruner:
    """A training callback that prunes a trial whose return is too low at a rung.

    Args:
      trial: Optuna's trial.
      num_iterations: iterations of the trial's training.
      earlier: rows of metrics from an earlier session; iterations that are trained again count once.
    """

    def __init__(self, trial: Any, num_iterations: int, earlier: Iterable[Mapping[str, Any]] = ()):
        self.is_behind = bool(trial.user_attrs.get("behind"))
        self._num_iterations = num_iterations
        self._trial, self._rung, self._last_iteration = trial, 0, 0
        self._returns: list[float] = []
        self._observe(earlier)

    def __call__(self, report: Report) -> bool:
        self._observe(report.rows)
        return self.is_behind

    def _observe(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Collects returns; at each rung, asks Optuna whether their mean is too low to continue."""
        for row in rows:
            if self.is_behind or row["iteration"] <= self._last_iteration:
                continue
            self._last_iteration = row["iteration"]
            if (value := to_json_types(row.get("episode_return"))) is not None:
                self._returns.append(value)
            fraction = self._last_iteration / self._num_iterations
            rung = sum(fraction >= REDUCTION ** (i - RUNGS) for i in range(RUNGS))
            if rung > self._rung and self._returns and fraction < 1:
                self._rung = rung
                with warnings.catch_warnings(action="ignore"):  # Optuna warns about a repeated report
                    self._trial.report(float(np.mean(self._returns)), REDUCTION ** (rung - 1))
                self._returns = []
                if self._trial.should_prune():
                    self.is_behind = True
                    self._trial.set_user_attr("behind", True)


def _trial_returns(job: Job, path: Path) -> tuple[float, list[float]]:
    """The mean return and each agent's, from the trial's evaluation or else the last tenth of training.

    Reads them from the run directory, since the run may have ended in an earlier session.
    """
    summary, rows = read_summary(path) or {}, list(read_metrics(path / "metrics.jsonl"))
    failed = failed_agents(rows[-1] if rows else None, job.config, job.agents)
    means = (summary.get("eval_returns") or [summary["eval_return"]]) if "eval_return" in summary else None
    if isinstance(job.algorithm, Sweep):
        points = point_results(job.algorithm, rows, means, failed, job.seed)
        returns = points[best_index(points)].returns
    else:  # if an agent failed, the mean is NaN, and the trial counts as refused
        returns, _ = final_returns(rows, job.agents or 1, means, failed)
    return float(np.mean(returns)), returns.tolist()


def _trial_folder(trial: Any) -> str:
    """A trial's folder: its number, or its attribute `run` if valid (the journal is untrusted input).

    Releases up to 0.2.0 gave an interrupted trial a new number on resume, and stored its folder as `run`.
    """
    folder = trial.user_attrs.get("run")
    return folder if isinstance(folder, str) and re.fullmatch(r"\d{4,9}", folder) else f"{trial.number:04d}"


def allows_integer(algorithm: Any, name: str) -> bool:
    """Whether the annotation of a hyperparameter allows an integer."""
    annotation = typing.get_type_hints(type(unwrap_sweep(algorithm))).get(name)
    return annotation is int or int in typing.get_args(annotation)
