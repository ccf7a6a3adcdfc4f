"""Hyperparameter search with Optuna: each trial is compiled and trained as a separate run.

Use it for hyperparameters that change the compiled program (sizes, switches, networks). For floats a sweep is
quicker, and each trial may contain one. Bad trials are pruned by asynchronous successive halving (Li et al.
2020, "A System for Massively Parallel Hyperparameter Tuning", arXiv 1810.05934, algorithm 2).

    OUT/config.json     the configuration, with the search space
    OUT/study.journal   Optuna's storage, from which a search is resumed
    OUT/trials/0000     a run directory for each trial
    OUT/search.json     the results
"""

import dataclasses
import importlib.util
import itertools
import math
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
from fdg.training.curves import figure_of, finish, style
from fdg.training.job import Job, lengths
from fdg.training.loop import carry_out, say
from fdg.training.recorder import Report
from fdg.training.run_directory import RunDirectory, plain, read_metrics
from fdg.training.space import Space, check_choices, flags_text, space_text, value_text
from fdg.training.starting import open_run
from fdg.training.statistics import format_numbers, interval_of_returns
from fdg.training.sweep import Sweep, agent_seeds, changed, without_sweep
from fdg.training.sweep_results import (
    best_of,
    final_returns,
    first_rows,
    point_results,
    shown_interval,
    shown_return,
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trial."""

    run: str  # its folder below `trials/`
    values: Mapping[str, Any]  # hyperparameters by name, as in the search space
    state: str  # "done", "ended early" (pruned) or "refused" (it could not be trained)
    value: float  # mean return (of a sweep, that of its best point); NaN unless the trial is done
    returns: tuple[float, ...] = ()  # the return of each agent
    refused: str | None = None  # the error, if the state is "refused"

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% bootstrap interval of the mean over agents; None for one agent or an unfinished trial."""
        return interval_of_returns(self.returns) if self.state == "done" else None


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """The trial with the highest return, the first of equal ones; None if none is done."""
    done = [trial for trial in trials if trial.state == "done" and math.isfinite(trial.value)]
    return max(done, key=lambda trial: trial.value, default=None)


def write_results(run: RunDirectory, space: Space, trials: Sequence[Trial], agents: int | None) -> list[str]:
    """Writes `search.json` and `search.png`; returns the table and the best trial as lines."""
    best = best_trial(trials)
    content = {
        "search": {one.name: str(one).partition("=")[2] for one in space},
        "agents": agents or 1,
        "trials": [{**dataclasses.asdict(trial), "interval": trial.interval} for trial in trials],
        "best": None if best is None else {"run": best.run, "values": best.values, "return": best.value},
    }
    run.publish_json("search.json", content)
    if not trials:
        return []
    run.publish("search.png", lambda file: _draw(trials, file))
    lines = [trials_table(trials, [one.name for one in space])]
    if best is None:
        return [*lines, "best: none, for no trial is done"]
    return [
        *lines,
        f"best: return {format_numbers(best.value)[0]} in {run.path / 'trials' / best.run}",
        f"by flags: {flags_text(best.values)}",
    ]


def trials_table(trials: Sequence[Trial], names: Sequence[str]) -> str:
    """A table of at most twenty trials, best first."""
    rows = []
    for trial in sorted(trials, key=lambda trial: -trial.value if math.isfinite(trial.value) else math.inf):
        shown = (
            f"{v:.4g}" if isinstance(v := trial.values[name], float) else value_text(v) for name in names
        )
        state = "" if trial.state == "done" else trial.state
        rows.append([trial.run, *shown, shown_return(trial.value), shown_interval(trial.interval), state])
    return first_rows(["trial", *names, "return", "95% interval", ""], rows)


def _draw(trials: Sequence[Trial], picture: Any) -> None:
    """Plots each trial's return and the best so far."""
    figure, axes = figure_of()
    (_, points), (_, line) = style(0), style(1)
    values = np.array([trial.value for trial in trials], float)
    axes.scatter(range(len(values)), values, color=points, s=20, label="a trial")
    known = np.where(np.isfinite(values), values, -np.inf)
    best = np.maximum.accumulate(known)
    axes.plot(np.flatnonzero(np.isfinite(best)), best[np.isfinite(best)], color=line, label="best so far")
    lost = np.flatnonzero(~np.isfinite(values))
    if len(lost):  # at the lower edge, to be visible
        low = values[np.isfinite(values)].min() if len(lost) < len(values) else 0.0
        axes.scatter(lost, [low] * len(lost), color="#999999", marker="x", label="ended early, or refused")
    axes.set(title="search", xlabel="trial", ylabel="mean return")
    finish(figure, [axes], "trials")
    figure.savefig(picture, format="png", dpi=150)


REDUCTION = 3  # one in three trials that reach a rung continues
RUNGS = 3  # at 1/27, 1/9 and 1/3 of the training
_PROPOSALS = 20  # of Optuna's for a trial, before random values


def check_search(algorithm: Any, space: Space) -> None:
    """Checks that a search space names only hyperparameters, and none that is already swept."""
    own = without_sweep(algorithm)
    if not dataclasses.is_dataclass(own):
        raise FdgError(f"search: {type(own).__name__} has no fields: give an algorithm that is a dataclass")
    known = [field.name for field in dataclasses.fields(own) if field.init]
    swept = [name for name, _ in algorithm.grid] if isinstance(algorithm, Sweep) else []
    for one in space:
        if one.name not in known or one.name in ("env", "total_steps"):
            raise FdgError(f"search: {one.name} is no hyperparameter of {type(own).__name__} to be searched")
        for value in getattr(one, "values", ()):
            check_arguments(type(own), {one.name: value})
        if one.name in swept:
            raise FdgError(f"search: {one.name} is swept already: leave one of them out")


def require_optuna() -> None:
    """Checks that Optuna is installed."""
    if importlib.util.find_spec("optuna") is None:
        raise FdgError("--optuna needs Optuna, which is not installed: pip install 'fdg[optuna]'")


def carry_out_search(
    job: Job, space: Space, devices: Any = None, quiet: bool = False
) -> tuple[Path, list[Trial], int | None]:
    """Runs trials until the job's number is reached; trials before a resume count.

    Returns its directory, its trials, and the signal that interrupted it, or None.
    """
    require_optuna()
    check_search(job.algorithm, space)
    check_choices(space, job.optuna or 0)
    if distributed.count() > 1:
        raise FdgError(
            "--optuna: a search is of one process: start one for each machine, with seeds of its own"
        )
    run = open_run(dataclasses.replace(job, search=space_text(space)))
    try:
        return _Search(job, space, run, devices, (lambda line: None) if quiet else say).carry_out()
    finally:
        run.close()


@dataclasses.dataclass
class _Search:
    job: Job
    space: Space
    run: RunDirectory
    devices: Any
    say: Callable[[Any], None]

    def carry_out(self) -> tuple[Path, list[Trial], int | None]:
        study, total, caught = self._study(), self.job.optuna or 0, None
        while caught is None and (number := len(self._done(study))) < total:
            if not self._unfinished(study) and not self._propose(study, number):
                left = f"{total - number} of {total} trials are left out"
                self.say(f"all {number} combinations of values have been tried: {left}")
                break
            caught = self._trial(study, self._unfinished(study)[0], number, total)
        trials = self._trials(study)
        if caught is not None:
            self.say(f"interrupted, and saved: go on with --resume {self.run.path}")
        for line in write_results(self.run, self.space, trials, self.job.agents):
            self.say(line)
        self.say(f"run directory {self.run.path}")
        return self.run.path, trials, caught

    def _study(self) -> Any:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        pruner: Any = optuna.pruners.NopPruner()
        if self.job.halving:
            pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION)
        journal = self.run.path / "study.journal"
        try:
            return optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(journal))),
                study_name="search",
                direction="maximize",
                load_if_exists=True,
                pruner=pruner,
            )
        except OSError:
            raise
        except Exception as error:  # Optuna raises many types on a damaged file
            raise FdgError(
                f"{journal} is no record of Optuna's ({type(error).__name__}): restore it, or start a new run"
            ) from error

    def _propose(self, study: Any, number: int) -> bool:
        """Adds a trial with values that none has had, for all have equal seeds; False if there are no others.

        Values are Optuna's proposals, and random ones after `_PROPOSALS` that had been tried.
        """
        import optuna
        from optuna.samplers import RandomSampler, TPESampler

        tried = [one.params for one in self._done(study)]
        if math.prod(one.count for one in self.space) <= len(tried):
            return False
        seed = self.job.seed + number  # the same in a resumed search
        draft = optuna.create_study(direction="maximize", sampler=TPESampler(seed=seed))  # in memory
        draft.add_trials(study.get_trials())
        for attempt in itertools.count():
            if attempt == _PROPOSALS:
                draft.sampler = RandomSampler(seed=seed)
            trial = draft.ask()
            for one in self.space:
                one.suggested(trial)
            if trial.params not in tried:
                break
            draft.tell(trial, state=optuna.trial.TrialState.FAIL)
        made = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING, params=trial.params, distributions=trial.distributions
        )
        study.add_trial(made)
        return True

    def _unfinished(self, study: Any) -> list[Any]:
        """Trials that were proposed; those of an interrupted search resume from their checkpoints."""
        import optuna

        return [
            optuna.trial.Trial(study, old._trial_id)
            for old in study.get_trials()
            if old.state.name == "RUNNING" and len(old.params) == len(self.space)
        ]

    def _done(self, study: Any) -> list[Any]:
        """Trials that are complete, pruned or failed; not those that a signal interrupted."""
        return [
            one
            for one in study.get_trials()
            if one.state.name in ("COMPLETE", "PRUNED") or "refused" in one.user_attrs
        ]

    def _trials(self, study: Any) -> list[Trial]:
        return [
            Trial(
                _run_of(one),
                one.params,
                {"COMPLETE": "done", "PRUNED": "ended early"}.get(one.state.name, "refused"),
                one.value if one.value is not None else math.nan,
                tuple(one.user_attrs.get("returns", ())),
                one.user_attrs.get("refused"),
            )
            for one in self._done(study)
        ]

    def _trial(self, study: Any, trial: Any, number: int, total: int) -> int | None:
        """Runs one trial; returns the signal that interrupted it, or None."""
        from optuna.trial import TrialState

        self.run.check_there()  # otherwise a trial would recreate a removed directory
        trials = files.make_folder(self.run.path / "trials")
        values = {one.name: one.suggested(trial) for one in self.space}
        name = _run_of(trial)
        shown = ", ".join(f"{key}={value_text(value)}" for key, value in values.items())
        self.say(f"trial {number + 1} of {total}: {shown}")
        watch = None
        try:
            files.check_own(trials / name, is_folder=True)
            job = self._job_of(values, trials / name)
            if self.job.halving:
                watch = _Watch(trial, job.num_iterations, read_metrics(trials / name / "metrics.jsonl"))
            outcome = carry_out(job, self.devices, [watch] if watch else [], quiet=True)
        except UnwritableError:  # not the trial's fault; it continues when the search is resumed
            raise
        except (FdgError, ValueError) as error:  # sizes that do not fit, or infinite losses
            self.run.check_there()
            said = str(error) if isinstance(error, FdgError) else one_line(error)
            trial.set_user_attr("refused", said)
            study.tell(trial, state=TrialState.FAIL)
            self.say(f"  {'failed' if isinstance(error, RunError) else 'refused'}: {said}")
            return None
        if outcome.caught is not None:
            return outcome.caught
        value, returns = _trial_returns(job, outcome.run)
        trial.set_user_attr("returns", returns)
        if watch is not None and watch.is_behind:
            study.tell(trial, state=TrialState.PRUNED)
            self.say(f"  ended early, at iteration {outcome.iteration:,} of {job.num_iterations:,}")
        elif math.isfinite(value):
            study.tell(trial, value)
            self.say(f"  return {format_numbers(value)[0]}")
        else:
            trial.set_user_attr("refused", "no episode ended, or an agent's losses are not finite")
            study.tell(trial, state=TrialState.FAIL)
        return None

    def _job_of(self, values: dict[str, Any], path: Path) -> Job:
        job, algorithm = self.job, changed(self.job.algorithm, values)
        return job.changed(
            algorithm,
            described={"hyperparameters": {**job.described["hyperparameters"], **values}},
            out=path,
            resumes=(path / "config.json").exists(),
            optuna=None,
            search=None,
            **lengths(algorithm, type(algorithm).__name__, job.total_steps),
        )


class _Watch:
    """A training callback that prunes a trial whose return is too low at a rung.

    Args:
      trial: Optuna's.
      num_iterations: of its training.
      earlier: rows of metrics of an earlier session. Those that are recorded again are not counted twice.
    """

    def __init__(self, trial: Any, num_iterations: int, earlier: Iterable[Mapping[str, Any]] = ()):
        self.is_behind = bool(trial.user_attrs.get("behind"))
        self._num_iterations = num_iterations
        self._trial, self._rung, self._seen = trial, 0, 0
        self._returns: list[float] = []
        self._look(earlier)

    def __call__(self, report: Report) -> bool:
        self._look(report.rows)
        return self.is_behind

    def _look(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            if self.is_behind or row["iteration"] <= self._seen:
                continue
            self._seen = row["iteration"]
            if (value := plain(row.get("episode_return"))) is not None:
                self._returns.append(value)
            share = self._seen / self._num_iterations
            reached = sum(share >= REDUCTION ** (i - RUNGS) for i in range(RUNGS))
            if reached > self._rung and self._returns and share < 1:
                self._rung = reached
                with warnings.catch_warnings(action="ignore"):  # it was reported before an interruption
                    self._trial.report(float(np.mean(self._returns)), REDUCTION ** (reached - 1))
                self._returns = []
                if self._trial.should_prune():
                    self.is_behind = True
                    self._trial.set_user_attr("behind", True)


def _trial_returns(job: Job, run: RunDirectory) -> tuple[float, list[float]]:
    """A trial's mean return and each agent's: from its evaluation, else from the last tenth of training.

    Reads only files: the run may have ended in an earlier session, before its trial was recorded.
    """
    said, rows = run.summary() or {}, list(read_metrics(run.path / "metrics.jsonl"))
    lost = said.get("failed_seeds") or ()
    failed = [i for i, seed in enumerate(agent_seeds(job.algorithm, job.seed, job.agents)) if seed in lost]
    means = (said.get("eval_returns") or [said["eval_return"]]) if "eval_return" in said else None
    if isinstance(job.algorithm, Sweep):
        found = point_results(job.algorithm, rows, means, failed, job.seed)
        returns = found[best_of(found)].returns
    else:  # the mean is NaN: settings that lose an agent are bad
        returns, _ = final_returns(rows, job.agents or 1, means, failed)
    return float(np.mean(returns)), returns.tolist()


def _run_of(trial: Any) -> str:
    """A trial's folder: its number, or that of the trial it continues (the journal is untrusted input)."""
    said = trial.user_attrs.get("run")
    return said if isinstance(said, str) and re.fullmatch(r"\d{4,9}", said) else f"{trial.number:04d}"


def is_whole(algorithm: Any, name: str) -> bool:
    """Whether a hyperparameter is an integer."""
    own = without_sweep(algorithm)
    kind = typing.get_type_hints(type(own)).get(name)
    return kind is int or int in typing.get_args(kind)
