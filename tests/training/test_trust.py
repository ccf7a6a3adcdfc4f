"""What a run is told of: losses that are not finite, foreign modules, damaged files, disks and folders."""

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
from fdg.commands.parse import parse
from fdg.errors import FdgWarning, RunError
from fdg.training import run_directory
from fdg.training.finite import FiniteCheck
from tests.refusing import refused

WALK = ["--algo", "tests.tiny:Walk", "--devices", "1", "--total-steps", "64"]


class Kept:
    """Checkpoints at 10 and 20, the newer one of a state that is not finite."""

    def __init__(self):
        self.protected = []

    def last_finite(self):
        return 10

    def protect(self, iteration):
        self.protected.append(iteration)


def finite(on_nan="stop", algorithm=None, steps=8):
    algorithm = SimpleNamespace(**vars(algorithm or SimpleNamespace()), steps_per_iteration=steps)
    return FiniteCheck(algorithm, Kept(), 5, on_nan == "warn")


GOOD = np.array([1.0, 2.0], np.float32)


def test_a_loss_that_is_not_a_number_stops_the_run():
    metrics = {
        "episode_return": np.full(2, np.nan),  # no episode ended: nothing is wrong with that
        "value_loss": np.array([1.0, np.nan], np.float32),
        "policy_loss": np.array([1.0, np.nan], np.float32),
        "updates": np.array([1, 2]),
    }
    with pytest.raises(RunError) as caught:
        finite().check(20, metrics)
    assert str(caught.value).startswith(
        "iteration 22: value_loss and policy_loss are not a number: training stops, the last good checkpoint"
    )
    with pytest.raises(RunError, match="iteration 21: loss is infinite"):
        finite().check(20, {"loss": np.array([np.inf, 0.0])})
    with pytest.raises(
        RunError, match=r"the last good .* reward_format is not finite either: check the reward function"
    ):
        finite().check(0, {"loss": np.full(1, np.nan), "reward_format": np.full(1, np.nan)})


def test_a_run_may_go_on_regardless():
    watch = finite("warn")
    bad = {"loss": np.array([1.0, np.nan])}
    with pytest.warns(
        FdgWarning, match="iteration 2: loss is not a number: training goes on, .* 10, and is kept"
    ):
        watch.check(0, bad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.check(2, bad)  # it was said
        watch.check(4, {"loss": GOOD})
    assert watch._checkpoints.protected == [10]


def test_of_several_agents_a_run_goes_on_while_one_is_well():
    watch = finite()
    one = np.array([[0.0, 1.0, 2.0], [0.0, np.nan, 2.0]])
    with pytest.warns(FdgWarning, match=r"for 1 of 3 agents \(seeds 6\): training goes on"):
        watch.check(0, {"loss": one})
    with pytest.raises(RunError, match=r"for 3 of 3 agents \(seeds 5, 6, 7\): training stops"):
        watch.check(2, {"loss": np.full((2, 3), np.nan)})


def test_before_learning_starts_there_are_no_losses():
    algorithm = SimpleNamespace(learning_starts=20)  # three iterations of eight steps
    watch = finite(algorithm=algorithm)
    watch.check(0, {"loss": np.array([np.nan, np.nan])})
    watch.check(2, {"loss": np.array([np.nan, 1.0])})
    with pytest.raises(RunError, match="iteration 4"):
        finite(algorithm=algorithm).check(2, {"loss": np.array([np.nan, np.nan])})
    with pytest.raises(RunError, match="iteration 1: loss is infinite"):
        finite(algorithm=algorithm).check(0, {"loss": np.array([np.inf])})


def test_a_run_that_diverges_ends_with_status_1(tmp_path, capsys):
    words = "--algo a2c --devices 1 --hidden 4 --total-steps 3200 --lr 1e30 --eval-episodes 0".split()
    assert train_main([*words, "--out", str(tmp_path / "run")]) == 1
    line = capsys.readouterr().err
    assert re.search("(not a number|infinite): training stops", line)
    assert "--on-nan warn" in line and line.count("\n") == 1


# --- modules of somebody else's ---


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run"
    assert train_main([*WALK, "--out", str(path)]) == 0
    (path / "summary.json").unlink()
    return path


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


# --- files ---


WRONG = {
    "algo": [None, 3, "", [], {}, "pppo", "a:b:c"],
    "policy": [None, 3, "gpu_onyl"],
    "env": [3, []],
    "seed": [2**32],  # settings of a job: test_settings.py
    "hyperparameters": [None, 3, [], {"strange": 1}, {"num_envs": "8"}, {"scale": {}}, {"widths": [[1]]}],
    "policy_fields": [None, 3, {"strange": 1}, {"model_parallel": None}, {"model_parallel": 0}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_a_configuration_edited_by_hand_is_one_line(copy, name, value, capsys):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, name: value}))
    refused(capsys, ["--resume", str(copy), "--trust"], train_main)


@pytest.mark.parametrize("content", ["", "[]", "null", "3", "{}", "[" * 100_000, '{"algo": "ppo"', "\\ud800"])
def test_a_configuration_that_is_none(copy, content, capsys):
    (copy / "config.json").write_bytes(content.encode())
    assert "config.json" in refused(capsys, ["--resume", str(copy)], train_main)
    (copy / "config.json").write_bytes(b"\xff\xfe")
    assert "cannot be read" in refused(capsys, ["--resume", str(copy)], train_main)


def test_a_bad_line_of_metrics_takes_no_good_row_along(copy, capsys):
    path = copy / "metrics.jsonl"
    lines = path.read_text().splitlines()
    bad = ["{broken", "3", '{"iteration": "x"}', "[" * 100_000]
    path.write_text("\n".join([*lines[:3], *bad, *lines[3:], '{"iterat']))
    assert len(list(run_directory.read_metrics(path))) == 8
    shutil.rmtree(copy / "checkpoints" / "8")
    (copy / ".checkpoints").unlink()
    assert train_main([*WALK, "--resume", str(copy)]) == 0
    said = capsys.readouterr().err
    assert "line 4, 5, 6 ... cannot be read" in said and said.count("\n") == 1
    assert [row["iteration"] for row in run_directory.read_metrics(path)] == list(range(1, 9))
    assert (copy / "metrics.unreadable").read_text().splitlines() == bad


def test_a_summary_that_cannot_be_read_is_written_again(copy):
    (copy / "summary.json").write_text("{")
    assert train_main([*WALK, "--resume", str(copy)]) == 0
    assert json.loads((copy / "summary.json").read_text())["iterations"] == 8


def test_steps_that_make_no_iteration_are_said(tmp_path, capsys):
    assert parse(WALK, "", "").rounded is None
    assert train_main([*WALK, "--total-steps", "70", "--out", str(tmp_path / "run")]) == 0
    assert (
        "70 steps are 8 iterations of 8, and 6 more, which are left out: 64 will be done"
        in capsys.readouterr().out
    )


def test_what_fails_before_training_leaves_no_folder(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr("fdg.engine.Engine.init", full)
    assert "out of memory" in refused(capsys, [*WALK, "--out", str(tmp_path / "some" / "run")], train_main)
    assert not (tmp_path / "some" / "run").exists()


# --- folders of one's own ---


@pytest.mark.parametrize("own", ["envs/__init__.py", "algos.py"])
def test_a_folder_that_hides_ours_is_named(own, tmp_path):
    (tmp_path / own).parent.mkdir(exist_ok=True)
    (tmp_path / own).write_text("")
    name = own.partition("/")[0].removesuffix(".py")
    code = "from fdg import shadowing; print(shadowing.shadowed_package())"
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert f"hides fdg's own package '{name}'" in done.stdout and str(tmp_path) in done.stdout, done.stderr
    assert "rename it" in done.stdout


def test_ours_have_a_second_name_and_a_folder_behind_them_is_told(tmp_path):
    """A project's own folder `envs/` without `__init__.py` cannot be imported where ours is."""
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "mine.py").write_text("")
    code = """
import fdg, fdg.envs, envs, algos, policies, pickle, sys
from fdg.envs.probe import Memory
from fdg.policies import GPUOnly
import envs.probe, fdg.algos.ppo
assert fdg.envs is envs and fdg.algos is algos and fdg.policies is policies
assert Memory is envs.probe.Memory and GPUOnly is policies.GPUOnly and fdg.algos.ppo is algos.ppo
assert [m.__spec__.name for m in (envs, envs.probe, algos.ppo)] == ["envs", "envs.probe", "algos.ppo"]
assert pickle.loads(pickle.dumps(GPUOnly())) == GPUOnly() and GPUOnly.__module__ == "policies.gpu_only"
assert "brax" not in sys.modules
try:
    import fdg.envs.absent
except ModuleNotFoundError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "No module named 'fdg.envs.absent'\n", done.stderr
    line = f"{tmp_path / 'envs'} has no __init__.py, so 'import envs' imports fdg's package"
    assert line in done.stderr and done.stderr.count("FdgWarning") == 1


def test_nothing_hides_ours_here(monkeypatch, capsys):
    assert shadowing.shadowed_package() is None
    monkeypatch.setattr("fdg.commands.cli.shadowed_package", lambda: "/home/me/envs hides ours")
    assert plan_main([]) == 2
    assert capsys.readouterr().err == "error: /home/me/envs hides ours\n"
