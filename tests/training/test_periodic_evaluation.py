"""Evaluation during training (`eval_every`): rows, best checkpoint, early stops, metric loggers."""

import collections
import dataclasses
import importlib.util
import re
import sys
import time
import types
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

import fdg
from fdg.errors import FdgError, RunError
from fdg.training import loggers
from fdg.training.curves import plot_runs
from fdg.training.periodic_evaluation import EPISODES
from tests.tiny import Silent, Walk
from tests.training.trained import fitted, rows, small, untimed_rows


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out, algorithm = tmp_path_factory.mktemp("runs") / "a2c", small("a2c", hidden=(8,), learning_rate=0.01)
    return fitted(out, algorithm, iterations=9, eval_every=2, eval_episodes=64)


def test_evaluation_rows(run):
    evaluated = {row["iteration"]: row for row in rows(run.path) if "eval_return" in row}
    assert list(evaluated) == [2, 4, 6, 8]
    assert all(row["eval_episodes"] == EPISODES for row in evaluated.values())
    assert all(row["eval_return"] != row["eval_return_sampled"] for row in evaluated.values())


def test_best_checkpoint(run):
    values = {row["iteration"]: row["eval_return"] for row in rows(run.path) if "eval_return" in row}
    iteration = max(values, key=lambda key: (values[key], -key))
    summary = run.summary
    assert summary["best_iteration"] == iteration and summary["best_eval_return"] == values[iteration]
    assert fdg.load(run.path, checkpoint="best").iteration == iteration
    assert fdg.load(run.path).iteration == 9


@dataclasses.dataclass(frozen=True)
class Counter:
    """Its evaluation returns the number of iterations, times `factor`."""

    factor: float = 1.0
    steps_per_iteration: ClassVar[int] = 8

    def init(self, key):
        return jnp.int32(0)

    def iterate(self, state):
        return self.add(state), {"episode_return": jnp.float32(0)}

    @fdg.fragment("learner", in_axes=None, out_axes=None)
    def add(self, state):
        return state + 1

    def evaluate(self, state, key, episodes):
        return {"return": self.factor * state}


def test_resume_forgets_best_states_after_its_checkpoint(tmp_path):
    def fail(report):
        return report.iteration == 6 and 1 / 0

    with pytest.raises(RunError, match="ZeroDivisionError"):
        fitted(tmp_path, Counter(), iterations=10, eval_every=1, checkpoint_every=3, callbacks=[fail])
    run = fitted(tmp_path, Counter(), iterations=4, eval_every=4, resume=True)
    assert fdg.load(tmp_path, algorithm=Counter(), checkpoint="best").iteration == 4
    assert run.summary["best_iteration"] == 4


def test_resume_after_the_best_state_was_not_written(tmp_path):
    run = fitted(tmp_path, Counter(-1.0), iterations=2, eval_every=1)
    assert run.summary["best_iteration"] == 1
    for path in (run.path / "best_checkpoint", run.path / ".best_checkpoint"):
        path.rename(path.with_suffix(".lost"))
    run = fitted(tmp_path, Counter(-1.0), iterations=3, eval_every=1, resume=True)
    assert fdg.load(tmp_path, algorithm=Counter(-1.0), checkpoint="best").iteration == 3
    assert run.summary["best_iteration"] == 3


def test_evaluation_does_not_change_training(run, tmp_path):
    plain = fitted(tmp_path / "plain", run.algorithm, total_steps=None)
    names = rows(plain.path)[0].keys() - {"wall_s"}
    for ours, theirs in zip(rows(run.path), rows(plain.path), strict=True):
        assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}


def test_stop_at_return(tmp_path):
    algorithm = Counter()
    run = fitted(tmp_path / "run", algorithm, iterations=9, eval_every=3, stop_at=1.0)
    assert run.iteration == 3 and run.stopped.endswith("has reached 1") and not run.finished
    loaded = fdg.load(run.path, algorithm=algorithm)
    assert not loaded.finished and loaded.stopped == run.stopped
    again = fitted(tmp_path / "run", algorithm, iterations=9, eval_every=3, resume=True)
    assert again.finished and again.summary["best_iteration"] in range(3, 10, 3)


def test_run_that_reaches_its_return_at_the_end_is_complete(tmp_path):
    run = fitted(tmp_path / "run", Counter(), iterations=4, eval_every=4, stop_at=4.0)
    assert run.finished and run.stopped is None and "stopped" not in run.summary
    for name in ("summary.json", "metrics.jsonl"):  # as if it had been killed after its last checkpoint
        (run.path / name).unlink()
    again = fitted(tmp_path / "run", Counter(), iterations=4, resume=True)
    assert again.finished and again.summary["steps_per_s"] is None


def test_stop_after_time_and_resume(tmp_path):
    algorithm = Walk()
    slow = {"callbacks": [lambda report: time.sleep(0.05)]}
    run = fitted(tmp_path / "run", algorithm, iterations=200, stop_after=0.5, **slow)
    assert 1 < run.iteration < 200 and re.search(r"trained for \d s \(--stop-after\)", run.stopped)
    assert run.summary["stopped"] == run.stopped and run.summary["iterations"] == run.iteration
    again = fitted(tmp_path / "run", algorithm, iterations=200, resume=True)
    reference = fitted(tmp_path / "reference", algorithm, iterations=200)
    assert again.finished and again.stopped is None
    assert untimed_rows(again.path) == untimed_rows(reference.path)


def test_iterations_per_call(tmp_path, monkeypatch):
    sizes: list[int] = []
    recorded = {"callbacks": [lambda report: sizes.append(len(report.rows))], "eval_episodes": 0}
    fitted(tmp_path / "quick", Walk(), iterations=200, **recorded)
    assert sizes[:3] == [1, 2, 1] and max(sizes) == 4 and sum(sizes) == 200
    sizes.clear()
    monkeypatch.setattr("fdg.training.loop._MAX_SECONDS_PER_CALL", 1e-9)
    fitted(tmp_path / "slow", Walk(), iterations=200, **recorded)
    assert sizes == [1] * 200


def test_several_seeds_and_algorithms_without_evaluation(tmp_path):
    run = fitted(tmp_path / "run", Walk(), iterations=2, eval_every=2, num_seeds=3)
    row = rows(run.path)[1]
    assert len(row["eval_returns"]) == 3 and row["eval_return"] == pytest.approx(np.mean(row["eval_returns"]))
    walk = fitted(tmp_path / "walk", Walk(), total_steps=32, eval_every=2)
    assert "eval_return" in rows(walk.path)[1] and "eval_return_sampled" not in rows(walk.path)[1]
    with pytest.warns(fdg.FdgWarning, match="^eval_every has no effect: the algorithm has no evaluate"):
        silent = fitted(tmp_path / "silent", Silent(), total_steps=4, eval_every=2)
    assert silent.finished and not (silent.path / "best_checkpoint").exists()


def test_rows_with_several_seeds_are_kept(tmp_path):
    settings = {"eval_every": 2, "num_seeds": 3, "checkpoint_every": 1}
    run = fitted(tmp_path / "run", Walk(), iterations=4, **settings)
    assert run.metrics == rows(run.path) and len(run.metrics) == 4
    best = run.summary["best_iteration"], run.summary["best_eval_return"]
    again = fitted(tmp_path / "run", Walk(), iterations=5, **settings, resume=True)
    assert rows(again.path)[:4] == run.metrics[:4] and not (again.path / "metrics.unreadable").exists()
    assert (again.summary["best_iteration"], again.summary["best_eval_return"]) == best
    for name in ("eval_returns", "episode_return_per_seed"):
        with pytest.raises(FdgError, match=f"has no metric '{name}': it has episode_return, episodes, eval_"):
            plot_runs([run.path], metric=name)


def test_trackers_get_metrics_with_names_like_evaluations(tmp_path, monkeypatch):
    class Named(Counter):
        def iterate(self, state):
            state, metrics = super().iterate(state)
            return state, {**metrics, "eval_accuracy": jnp.float32(state)}

    logged = []
    tracker = loggers.Logger(lambda steps, metrics: logged.append(metrics), lambda status: None)
    monkeypatch.setattr("fdg.training.loggers.open_loggers", lambda *_: [tracker])
    fitted(tmp_path / "run", Named(), iterations=4, eval_every=2, num_seeds=2)
    assert [row["eval_accuracy"] for row in logged] == [1, 2, 3, 4]
    assert [row.get("eval_return") for row in logged] == [None, 2, None, 4]


@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_missing_logger(tmp_path, kind, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(
        FdgError, match=rf"{kind} needs {kind}, .*: install it with pip install 'fdg\[{kind}\]'"
    ):
        fitted(tmp_path / "run", small(), **{kind: "project"})
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="fdg[wandb] is not installed")
def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = fitted(tmp_path / "run", small(), wandb="project")
    (file,) = run.path.glob("wandb/offline-run-*/run-*.wandb")
    assert file.stat().st_size > 500 and b"episode_length" in file.read_bytes()


def test_wandb_runs_of_folders_with_the_same_name(tmp_path, monkeypatch):
    calls = []

    def init(**options):
        calls.append((options["name"], options["id"]))
        return types.SimpleNamespace(log=lambda metrics, step: None, finish=lambda exit_code: None)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for folder in "ab":
        fitted(tmp_path / folder / "run", Counter(), iterations=1, wandb="project")
    fitted(tmp_path / "a" / "run", Counter(), iterations=2, wandb="project", resume=True)
    (name, first), (_, second), (_, resumed) = calls
    assert name == "run" and first == resumed != second


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="fdg[mlflow] is not installed")
def test_mlflow_in_a_file(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = fitted(tmp_path / "run 1?#%41", small(), mlflow="experiment")
    (losses,) = run.path.glob("mlruns/*/*/metrics/loss")
    steps = [int(line.split()[2]) for line in losses.read_text().splitlines()]
    assert steps == [row["env_steps"] for row in rows(run.path)]


class FakeMlflow:
    """The functions of `mlflow` that fdg calls; records created runs, logged values and final statuses."""

    runs: ClassVar[list] = []
    logged: ClassVar[list] = []
    statuses: ClassVar[list] = []

    class entities:
        Param = collections.namedtuple("Param", "key value")
        Metric = collections.namedtuple("Metric", "name value time step")

    MlflowClient = classmethod(lambda cls, tracking_uri: cls())

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id=name)

    def search_runs(self, experiments, query, max_results):
        return [one for one in self.runs if query == f"tags.fdg_run = {one.tag!r}"][:max_results]

    def create_run(self, experiment, run_name, tags):
        info = types.SimpleNamespace(run_id=f"{run_name}-{len(self.runs)}")
        self.runs.append(types.SimpleNamespace(tag=tags["fdg_run"], info=info))
        return self.runs[-1]

    def log_batch(self, run, params=(), metrics=()):
        self.logged.append((run, params, metrics))

    def get_metric_history(self, run, name):
        return [x for other, _, metrics in self.logged for x in metrics if (other, x.name) == (run, name)]

    def set_terminated(self, run, status="FINISHED"):
        self.statuses.append(status)


@pytest.fixture
def mlflow(monkeypatch):
    for name in ("runs", "logged", "statuses"):
        monkeypatch.setattr(FakeMlflow, name, [])
    monkeypatch.setitem(sys.modules, "mlflow", FakeMlflow)
    return FakeMlflow


def test_mlflow_resumes_the_run_of_the_same_id(tmp_path, mlflow):
    for folder in "ab":
        fitted(tmp_path / folder / "bo's run", Counter(), iterations=1, mlflow="project")
    fitted(tmp_path / "a" / "bo's run", Counter(), iterations=2, mlflow="project", resume=True)
    found = list(dict.fromkeys(run for run, _, metrics in mlflow.logged if metrics))
    assert found == ["bo's run-0", "bo's run-1"] and mlflow.logged[-1][0] == "bo's run-0"


def test_mlflow_after_a_failure_and_a_resume(tmp_path, mlflow):
    """A failed run has that status, and iterations after its last checkpoint are logged once."""

    def fail(report):
        if report.iteration == 3:
            raise ValueError("user code")

    settings = {"iterations": 4, "mlflow": "project", "checkpoint_every": 4}
    with pytest.raises(RunError, match="user code"):
        fitted(tmp_path / "run", Counter(), callbacks=[fail], **settings)
    assert mlflow.statuses == ["FAILED"]
    fitted(tmp_path / "run", Counter(), resume=True, **settings)
    assert len(mlflow.runs) == 1 and mlflow.statuses == ["FAILED", "FINISHED"]
    steps = [metric.step for metric in mlflow().get_metric_history("run-0", "iteration")]
    assert steps == [row["env_steps"] for row in rows(tmp_path / "run")]


def test_failure_of_a_tracker_is_one_line(tmp_path, monkeypatch, mlflow):
    def fail(*values, **options):
        raise ConnectionError("the server\nis gone")

    monkeypatch.setattr(mlflow, "log_batch", fail)
    monkeypatch.setattr(loggers, "read_config", lambda path: {})
    message = "--mlflow: cannot log there: ConnectionError: the server is gone"
    with pytest.raises(FdgError, match=message) as refused:
        loggers.open_loggers({"mlflow": "project"}, tmp_path, {"lr": 1}, 0)
    assert refused.type is FdgError, "the run is refused: a launcher does not restart it, and a study ends"
    (logger,) = loggers.open_loggers({"mlflow": "project"}, tmp_path, {"lr": 1}, 8)
    with pytest.raises(RunError, match=message):
        logger.log(8, {"loss": 0.5})


def test_tensorboard_drops_all_entries_at_a_restart(tmp_path, monkeypatch):
    """A run that was killed before its first checkpoint logs again from its first step."""
    calls = []

    def writer(path, purge_step):
        calls.append(purge_step)
        return types.SimpleNamespace(close=None)

    monkeypatch.setattr("tensorboardX.SummaryWriter", writer)
    for steps in (0, 32):
        loggers.open_loggers({"tensorboard": True}, tmp_path, {}, steps)
    assert calls == [1, 33]
