"""Errors and warnings of a run: non-finite losses, damaged files, shadowed packages."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from fdg import shadowing
from fdg.commands.cli import plan_main, train_main
from fdg.errors import FdgWarning, RunError
from fdg.training import run_directory
from fdg.training.finite import FiniteCheck
from tests.refusing import refused

WALK = ["--algo", "tests.tiny:Walk", "--devices", "1", "--total-steps", "64"]


class FakeCheckpoints:
    """Checkpoints of which the one of iteration 10 is the last finite one."""

    def __init__(self):
        self.protected = []

    def last_finite(self):
        return 10

    def protect(self, iteration):
        self.protected.append(iteration)


def make_check(on_nan="stop", algorithm=None, steps=8):
    algorithm = SimpleNamespace(**vars(algorithm or SimpleNamespace()), steps_per_iteration=steps)
    return FiniteCheck(algorithm, FakeCheckpoints(), 5, on_nan == "warn")


FINITE = np.array([1.0, 2.0], np.float32)


def test_nan_loss_stops_the_run():
    metrics = {
        "episode_return": np.full(2, np.nan),  # no episode ended: not an error
        "value_loss": np.array([1.0, np.nan], np.float32),
        "policy_loss": np.array([1.0, np.nan], np.float32),
        "updates": np.array([1, 2]),
    }
    with pytest.raises(RunError) as caught:
        make_check().check(20, metrics)
    assert str(caught.value).startswith(
        "iteration 22: value_loss and policy_loss are not a number: training stops, the last good checkpoint"
    )
    with pytest.raises(RunError, match="iteration 21: loss is infinite"):
        make_check().check(20, {"loss": np.array([np.inf, 0.0])})
    with pytest.raises(
        RunError, match=r"the last good .* reward_format is not finite either: check the reward function"
    ):
        make_check().check(0, {"loss": np.full(1, np.nan), "reward_format": np.full(1, np.nan)})


def test_huge_return_is_named_as_the_cause():
    bad = {"loss": np.full(1, np.nan), "episodes": np.ones(1), "episode_return": np.full(1, 1e25, np.float32)}
    with pytest.raises(RunError, match="episode returns are too large to be squared: fix the environment's"):
        make_check().check(0, bad)


def test_on_nan_warn():
    watch = make_check("warn")
    bad = {"loss": np.array([1.0, np.nan])}
    with pytest.warns(
        FdgWarning, match="iteration 2: loss is not a number: training goes on, .* 10, and is kept"
    ):
        watch.check(0, bad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.check(2, bad)  # warned already
        watch.check(4, {"loss": FINITE})
    assert watch._checkpoints.protected == [10]


def test_run_continues_while_one_agent_is_finite():
    watch = make_check()
    one = np.array([[0.0, 1.0, 2.0], [0.0, np.nan, 2.0]])
    with pytest.warns(FdgWarning, match=r"for 1 of 3 agents \(seeds 6\): training goes on"):
        watch.check(0, {"loss": one})
    with pytest.raises(RunError, match=r"for 3 of 3 agents \(seeds 5, 6, 7\): training stops"):
        watch.check(2, {"loss": np.full((2, 3), np.nan)})


def test_nan_before_learning_starts_is_ignored():
    algorithm = SimpleNamespace(learning_starts=20)  # three iterations of eight steps
    watch = make_check(algorithm=algorithm)
    watch.check(0, {"loss": np.array([np.nan, np.nan])})
    watch.check(2, {"loss": np.array([np.nan, 1.0])})
    with pytest.raises(RunError, match="iteration 4"):
        make_check(algorithm=algorithm).check(2, {"loss": np.array([np.nan, np.nan])})
    with pytest.raises(RunError, match="iteration 1: loss is infinite"):
        make_check(algorithm=algorithm).check(0, {"loss": np.array([np.inf])})


def test_divergence_exits_with_status_1(tmp_path, capsys):
    words = "--algo tests.training.test_fit:Diverging --devices 1 --total-steps 4".split()
    assert train_main([*words, "--out", str(tmp_path / "run")]) == 1
    line = capsys.readouterr().err
    assert re.search("(not a number|infinite): training stops", line)
    assert "--on-nan warn" in line and line.count("\n") == 1


# --- damaged files ---


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run"
    assert train_main([*WALK, "--out", str(path)]) == 0
    (path / "summary.json").unlink()
    return path


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


WRONG = {
    "algo": [None, 3, "", [], {}, "pppo", "a:b:c"],
    "policy": [None, 3, "gpu_onyl"],
    "env": [3, []],
    "seed": [2**32],  # more in test_settings.py
    "hyperparameters": [None, 3, [], {"strange": 1}, {"num_envs": "8"}, {"scale": {}}, {"widths": [[1]]}],
    "policy_fields": [None, 3, {"strange": 1}, {"model_parallel": None}, {"model_parallel": 0}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_invalid_config_entry(copy, name, value, capsys):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, name: value}))
    refused(capsys, ["--resume", str(copy), "--trust"], train_main)


@pytest.mark.parametrize("content", ["", "[]", "null", "3", "{}", "[" * 100_000, '{"algo": "ppo"', "\\ud800"])
def test_unreadable_config(copy, content, capsys):
    (copy / "config.json").write_bytes(content.encode())
    assert "config.json" in refused(capsys, ["--resume", str(copy)], train_main)
    (copy / "config.json").write_bytes(b"\xff\xfe")
    assert "cannot be read" in refused(capsys, ["--resume", str(copy)], train_main)


def test_bad_metrics_lines_are_set_aside(copy, capsys):
    path = copy / "metrics.jsonl"
    lines = path.read_text().splitlines()
    bad = ["{broken", "3", '{"iteration": "x"}', "[" * 100_000]
    path.write_text("\n".join([*lines[:3], *bad, *lines[3:], '{"iterat']))
    assert len(list(run_directory.read_metrics(path))) == 8
    shutil.rmtree(copy / "checkpoints" / "8")
    (copy / ".checkpoints").unlink()
    assert train_main([*WALK, "--resume", str(copy)]) == 0
    error = capsys.readouterr().err
    assert "line 4, 5, 6 ... cannot be read" in error and error.count("\n") == 1
    assert [row["iteration"] for row in run_directory.read_metrics(path)] == list(range(1, 9))
    assert (copy / "metrics.unreadable").read_text().splitlines() == bad


def test_unreadable_summary_is_rewritten(copy):
    (copy / "summary.json").write_text("{")
    assert train_main([*WALK, "--resume", str(copy)]) == 0
    assert json.loads((copy / "summary.json").read_text())["iterations"] == 8


def test_early_failure_leaves_no_directory(tmp_path, capsys, monkeypatch):
    def out_of_memory(*_):
        raise MemoryError

    monkeypatch.setattr("fdg.engine.Engine.init", out_of_memory)
    assert "out of memory" in refused(capsys, [*WALK, "--out", str(tmp_path / "some" / "run")], train_main)
    assert not (tmp_path / "some" / "run").exists()


# --- shadowed packages ---


@pytest.mark.parametrize("file", ["envs/__init__.py", "algos.py"])
def test_shadowing_package_is_named(file, tmp_path):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    name = file.partition("/")[0].removesuffix(".py")
    code = "from fdg import shadowing; print(shadowing.shadowed_package())"
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert f"hides fdg's own package '{name}'" in done.stdout and str(tmp_path) in done.stdout, done.stderr
    assert "rename it" in done.stdout


def test_no_package_is_shadowed(monkeypatch, capsys):
    assert shadowing.shadowed_package() is None
    monkeypatch.setattr("fdg.commands.cli.shadowed_package", lambda: "/home/me/envs hides ours")
    assert plan_main([]) == 2
    assert capsys.readouterr().err == "error: /home/me/envs hides ours\n"
