"""Agents with a non-finite loss: reported, and excluded from means."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
from fdg.errors import FdgWarning, RunError
from fdg.training import curves
from fdg.training.finite import failed_agents
from tests.refusing import refuses
from tests.tiny import Walk


class HalfFail(Walk):
    """About half of the agents have a NaN loss."""

    def iterate(self, state):
        bad = jax.random.bernoulli(jax.random.fold_in(state["keys"][0], 3))
        state, metrics = super().iterate(state)
        return state, {**metrics, "loss": jnp.where(bad, jnp.nan, 1.0)}


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    out = tmp_path_factory.mktemp("failed") / "run"
    sizes = {"total_steps": 32, "num_seeds": 4, "eval_episodes": 2, "devices": 1}
    with pytest.warns(FdgWarning, match="not a number for"):
        return fdg.fit(HalfFail(), out=out, seed=5, progress=False, **sizes)


def test_failed_seeds_are_reported_and_excluded(failing):
    summary = json.loads((failing.path / "summary.json").read_text())
    bad = [seed - 5 for seed in summary["failed_seeds"]]
    good = [i for i in range(4) if i not in bad]
    assert bad and good  # some seeds fail, some do not
    assert bad == [i for i, loss in enumerate(failing.metrics[-1]["loss_per_seed"]) if loss is None]
    mean = np.mean([summary["eval_returns"][i] for i in good])
    assert summary["eval_return"] == pytest.approx(mean) and failing.failed == bad
    for run in (failing, fdg.load(failing.path, algorithm=failing.algorithm)):
        found = run.evaluate()
        assert found.mean == summary["eval_return"] and len(found.means) == 4
        assert f"of each of {len(good)} agents" in str(found) and "which failed" in str(found)
    _, (curve,) = curves.plot_runs([failing.path])
    assert list(np.flatnonzero(curve.failed)) == bad
    line = curves.returns_table([curve])
    assert all(str(seed) in line.split("left out:")[1] for seed in summary["failed_seeds"])
    failing.path.joinpath("summary.json").write_text(json.dumps({**summary, "eval_returns": [1e6] * 4}))
    assert f"{len(good)} seed" in curves.returns_table(curves.plot_runs([failing.path])[1])
    failing.path.joinpath("summary.json").write_text(json.dumps(summary))


class AllFail(HalfFail):
    """Each agent has a NaN loss, half of them another one than the others."""

    def iterate(self, state):
        state, metrics = super().iterate(state)
        return state, {**metrics, "value_loss": jnp.where(jnp.isnan(metrics["loss"]), 1.0, jnp.nan)}


def test_training_stops_if_agents_fail_by_different_losses(tmp_path):
    sizes = {"total_steps": 32, "num_seeds": 4, "eval_episodes": 0, "devices": 1}
    with refuses("loss and value_loss are not a number for 4 of 4 agents", "training stops", kind=RunError):
        fdg.fit(AllFail(), out=tmp_path / "run", seed=5, progress=False, **sizes)


def test_failed_agents_of_a_row():
    config = {"hyperparameters": {"learning_starts": 100}}
    row = {"env_steps": 200, "loss": 1.0, "loss_per_seed": [1.0, None, math.inf], "episode_return": None}
    assert failed_agents(row, config, 3) == [1, 2]
    assert failed_agents({**row, "env_steps": 100}, config, 3) == []
    assert failed_agents({"env_steps": 200, "grad_norm": math.nan}, config, 3) == [0, 1, 2]
    assert failed_agents({"env_steps": 200, "loss": None}, {}, None) == [0]
    assert failed_agents({"env_steps": 200, "graduated": None, "grade": None}, config, 3) == []
    assert failed_agents(None, config, 3) == []


def test_evaluation_mean_excludes_failed_agents():
    means = np.array([1.0, 100.0, 3.0], np.float32)
    found = fdg.training.evaluation.Evaluation(True, means, 1, means[:, None], several=True)
    one = dataclasses.replace(found, failed=(1,), seeds=(5, 6, 7), infos={"won": means[:, None]})
    assert one.mean == 2.0 and one.reported == {"won": 2.0} and "without seed 6, which failed" in str(one)
    assert repr(one) == f"<Evaluation {one}>" and "\n" not in repr(one)
    assert math.isnan(dataclasses.replace(one, failed=(0, 1, 2)).mean)
