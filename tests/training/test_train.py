"""`fdg.train`: files of a run, printed output, resume, and results equal to `Engine.run`."""

import dataclasses
import errno
import io
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from fdg.commands.cli import train_main
from fdg.commands.parse import parse
from fdg.errors import FdgError, FdgWarning, UnwritableError
from fdg.training import curves, progress, run_directory, statistics
from fdg.training import loop as train
from fdg.training.checkpoint import Checkpoints
from tests.refusing import refuses
from tests.tiny import Pupil, Walk
from tests.training.trained import fitted, rows, strict_json, untimed_rows

WALK = ["--algo", "tests.tiny:Walk", "--devices", "1"]
PUPIL = ["--algo", "tests.tiny:Pupil"]


def test_run_directory(tmp_path, curves, capsys):
    run = tmp_path / "some" / "where"
    words = [*WALK, "--total-steps", "167", "--seed", "3", "--eval-episodes", "2", "--out", str(run)]
    assert train_main(words) == 0
    assert {path.name for path in run.iterdir() if not path.name.startswith(".")} == set(run_directory.FILES)
    config = strict_json((run / "config.json").read_text())
    assert config["algo"] == "tests.tiny:Walk" and config["env"] is None and config["seed"] == 3
    assert config["hyperparameters"]["num_envs"] == 8 and config["hyperparameters"]["widths"] == [2, 3]

    # 167 steps are 20 complete iterations of 8 steps. The metrics are those of `Engine.run`.
    engine = fdg.compile(Walk(), policies.GPUOnly(), jax.devices()[:1])
    state, metrics = engine.run(engine.init(3), 20)
    lines = rows(run)
    assert [line["iteration"] for line in lines] == list(range(1, 21))
    assert [line["env_steps"] for line in lines] == list(range(8, 161, 8))
    assert all(a["wall_s"] <= b["wall_s"] for a, b in itertools.pairwise(lines))
    for line, episode_return in zip(lines, metrics["episode_return"], strict=True):
        if math.isnan(episode_return):
            assert line["episode_return"] is None and line["episodes"] == 0
        else:
            assert np.float32(line["episode_return"]) == episode_return and line["episodes"] == 1

    summary = strict_json((run / "summary.json").read_text())
    assert summary["env_steps"] == 160 and summary["iterations"] == 20
    assert summary["eval_return"] == pytest.approx(float(np.mean(state["walks"])), rel=1e-6)
    assert summary["wall_s"] > 0 and summary["compile_s"] > 0
    assert summary["steps_per_s"] == pytest.approx(160 / summary["wall_s"])
    assert summary["seeds"] == [3] and summary["policy"] == "GPUOnly()" and len(summary["devices"]) == 1
    assert {"fdg", "jax", "python"} <= summary["versions"].keys()
    picture = (run / "learning_curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5_000

    text = capsys.readouterr().out
    assert (
        text.index("places Walk on 1 device") < text.index("compiled in") < text.index("100% iteration 20/20")
    )
    assert f"evaluation return {statistics.format_numbers(summary['eval_return'])[0]} over 2 episodes" in text
    assert text.endswith(f"run directory {run}\n")


def test_minimal_algorithm(tmp_path, capsys):
    run = tmp_path / "run"
    words = ["--algo", "tests.tiny:Silent", "--devices", "1", "--total-steps", "7", "--out", str(run)]
    assert train_main(words) == 0
    assert [line.keys() for line in rows(run)] == [{"iteration", "env_steps", "wall_s"}] * 7
    assert "evaluation" not in capsys.readouterr().out
    assert "eval_return" not in strict_json((run / "summary.json").read_text())


# --- several groups ---


def stored(run, iteration):
    """The arrays of a checkpoint, by name."""
    return Checkpoints(run / "checkpoints").arrays(iteration)


POLICIES = {  # flags, and the number of devices of each group
    "single_learner_coarse --devices 6 --actors 4 --learners 2": {"actors": 4, "learners": 2},
    "single_learner_fine --devices 2": {"learners": 1, "workers": 1},
    "central --devices 5": {"workers": 4, "servers": 1},
}


@pytest.mark.parametrize("words", POLICIES)
def test_summary_of_several_groups(words, tmp_path, host_devices):
    """Busy and idle time of each group, and bytes moved; the results are those of one group."""
    run = tmp_path / "run"
    flags = ["--total-steps", "96", "--seed", "4", "--out", str(run), "--timeline"]
    assert train_main([*PUPIL, "--policy", *words.split(), *flags]) == 0
    events = strict_json((run / "timeline.json").read_text())["traceEvents"]
    assert {each["args"]["name"] for each in events if each["ph"] == "M"} == set(POLICIES[words])
    assert {each["args"]["iteration"] for each in events if each["ph"] == "X"} == set(range(6))
    assert all(group in (run / "timeline.svg").read_text() for group in POLICIES[words])
    summary = strict_json((run / "summary.json").read_text())
    assert {name: group["devices"] for name, group in summary["groups"].items()} == POLICIES[words]
    for group in summary["groups"].values():
        assert group["busy_s"] > 0 and group["idle_s"] >= 0
        assert group["busy_s"] + group["idle_s"] == pytest.approx(summary["wall_s"], abs=2e-4)
    policy = parse([*PUPIL, "--policy", *words.split()], "", "").policy
    plan = fdg.place(Pupil(), policy, len(summary["devices"]))
    moves = sum(m.bytes_per_iteration for m in plan.movements if m.how == "transfer")
    assert summary["moved_bytes"] == 12 * moves > 0

    engine = fdg.compile(Pupil(), policies.GPUOnly(), host_devices[:1])
    state, metrics = engine.run(engine.init(4), 12)
    size = [line["size"] for line in rows(run)]
    np.testing.assert_allclose(size, metrics["size"], rtol=1e-5)
    assert summary["eval_return"] == pytest.approx(float(np.sum(state["weight"])), rel=1e-5)


def test_one_group_has_no_group_summary(tmp_path, capsys, host_devices):
    words = [*PUPIL, "--policy", "gpu_only", "--devices", "2", "--total-steps", "16", "--timeline"]
    assert train_main([*words, "--out", str(tmp_path / "run")]) == 0
    assert "no timeline: all fragments are one program" in capsys.readouterr().out
    assert not {"groups", "moved_bytes"} & strict_json((tmp_path / "run" / "summary.json").read_text()).keys()


@pytest.mark.parametrize(
    ("policy", "delay", "number"), [("single_learner_coarse", "lag", 3), ("central", "staleness", 2)]
)
def test_stale_runs_resume(policy, delay, number, tmp_path, monkeypatch, capsys, host_devices):
    """Checkpoints hold the older parameters too, so a resumed run is bit-exact."""
    words = [*PUPIL, "--policy", policy, f"--{delay}", str(number), "--devices", "3", "--num-updates", "1"]
    words += ["--total-steps", "400", "--checkpoint-every", "10", "--out"]
    reference, stopped = tmp_path / "reference", tmp_path / "stopped"
    assert train_main([*words, str(reference)]) == 0
    update = progress.Progress.update

    def interrupt(self, iteration, *values):
        update(self, iteration, *values)
        if iteration == 17:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(progress.Progress, "update", interrupt)
        assert train_main([*words, str(stopped)]) == 143
    assert 17 <= len(rows(stopped)) < 50
    history = [name for name in stored(stopped, len(rows(stopped))) if "history" in name]
    assert len(history) == 2  # of 1 and 2 iterations ago; a lag of 3 is 1.5 iterations
    capsys.readouterr()
    assert train_main([*PUPIL, "--resume", str(stopped)]) == 0
    assert f"{delay}={number}" in capsys.readouterr().out
    assert untimed_rows(stopped) == untimed_rows(reference)
    resumed, expected = stored(stopped, 50), stored(reference, 50)
    assert resumed.keys() == expected.keys()
    for name in resumed:
        np.testing.assert_array_equal(resumed[name], expected[name], err_msg=name)
    summaries = [strict_json((run / "summary.json").read_text()) for run in (reference, stopped)]
    assert summaries[0]["eval_return"] == summaries[1]["eval_return"]
    for group in summaries[1]["groups"].values():  # of the second session only
        assert 0 < group["busy_s"] + group["idle_s"] < summaries[1]["wall_s"]

    assert train_main([*PUPIL, "--resume", str(stopped), f"--{delay}", "1"]) == 2
    assert f"--{delay} 1 contradicts the run's {number}" in capsys.readouterr().err


def test_intervals_longer_than_the_run_warn(tmp_path, capsys):
    words = [*WALK, "--total-steps", "16", "--eval-episodes", "0", "--checkpoint-every", "3"]
    assert train_main([*words, "--eval-every", "2", "--out", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().err == (
        "warning: --checkpoint-every 3 counts iterations, and the run has 2: no checkpoint is written before"
        " its end\n"
    )
    assert train_main(["--resume", str(tmp_path / "a"), "--timeline", "--trust"]) == 0
    assert "no iteration ran" in capsys.readouterr().out
    with pytest.warns(FdgWarning, match=r"^eval_every=100000 counts iterations, and the run has 2: nothing"):
        fdg.fit(Walk(), total_steps=16, eval_every=100_000, out=tmp_path / "b", devices=1, progress=False)
    with pytest.raises(FdgError, match=rf"give {tmp_path}/a or {tmp_path}/b$"):
        fdg.load(tmp_path)


def test_default_run_directory_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*WALK, "--seed", "5", "--total-steps", "8", "--eval-episodes", "0"]
    assert train_main(words) == train_main(words) == 0
    names = [path.name for path in (tmp_path / "runs").iterdir()]
    assert len(names) == 2 and all(name.startswith("Walk-5-2") for name in names)


def test_interrupted_run_resumes(tmp_path, capsys, monkeypatch):
    words = [*WALK, "--total-steps", "1600", "--checkpoint-every", "1000", "--out"]
    reference, stopped = tmp_path / "reference", tmp_path / "stopped"
    assert train_main([*words, str(reference)]) == 0
    update = progress.Progress.update

    def interrupt(self, iteration, *values):
        update(self, iteration, *values)
        if iteration == 52:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(progress.Progress, "update", interrupt)
    before = signal.getsignal(signal.SIGINT)
    capsys.readouterr()
    assert train_main([*words, str(stopped)]) == 130
    assert signal.getsignal(signal.SIGINT) == before
    assert f"go on with --resume {stopped}" in capsys.readouterr().out.splitlines()[-1]
    assert 52 <= len(rows(stopped)) < 200 and not (stopped / "summary.json").exists()
    assert (stopped / "checkpoints" / str(len(rows(stopped)))).exists()
    monkeypatch.undo()

    # A truncated row and a row beyond the checkpoint are ignored.
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**rows(stopped)[-1], "iteration": 1 + len(rows(stopped))}) + '\n{"iterat')
    assert train_main([*WALK, "--out", str(stopped), "--resume"]) == 0
    assert untimed_rows(stopped) == untimed_rows(reference)
    assert all(a["wall_s"] <= b["wall_s"] for a, b in itertools.pairwise(rows(stopped)))

    capsys.readouterr()
    assert train_main([*WALK, "--resume", str(stopped)]) == 0
    assert "is complete: all of its 200 iterations are done" in capsys.readouterr().out


def test_run_without_checkpoint_restarts(tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:

        def killed(*_):
            raise KeyboardInterrupt

        patch.setattr(fdg.Engine, "compile", killed)
        assert train_main([*WALK, "--total-steps", "16", "--out", str(run)]) == 130
    assert train_main([*WALK, "--resume", str(run)]) == 0
    assert len(rows(run)) == 2


def test_run_directory_is_locked(tmp_path):
    run = run_directory.RunDirectory.create(tmp_path / "run", {"algo": "ppo"})
    code = f"""
from fdg.training.run_directory import *
path = Path({str(run.path)!r})
try:
    RunDirectory.reopen(path)
except FdgError as error:
    print(error, flush=True)
input()
RunDirectory.reopen(path)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        assert "is in use by a run that has not ended" in other.stdout.readline()
        run.close()
        other.communicate("\n")
    assert other.returncode == 0


def test_iterations_per_call():
    for count, steps in itertools.product((1, 7, 49, 50, 100, 976, 977, 1952, 10**6), (1, 512, 8_192, 10**7)):
        size = train.iterations_per_call(count, steps)
        assert count % size == 0
        assert size == 1 or (size * steps <= 65_536 and count // size >= 50)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with progress.Progress(10, 100, file=terminal) as bar:
        bar.update(4, 12.5)
        bar.update(5)
    last = terminal.getvalue()
    assert "50%" in last and "iteration 5/10" in last and "500 steps" in last and "return 12.5" in last


def test_progress_on_a_terminal_that_cannot_update_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    with progress.Progress(10, 100, file=terminal) as bar:
        bar.update(5)
        assert terminal.getvalue().startswith(" 50% iteration 5/10")


def test_progress_without_stdout(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    with progress.Progress(10, 100) as bar:
        bar.update(10)
        bar.say("nobody reads this")


@pytest.mark.parametrize("started", [False, True])
def test_closed_stdout(started, tmp_path, capsys, monkeypatch):
    """As in `| head -3`: a started run can be resumed; another leaves no directory."""

    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr(*((progress.Progress, "update") if started else (train._Session, "_start")), closed)
    with pytest.raises(BrokenPipeError):
        train.carry_out(parse([*WALK, "--total-steps", "32", "--out", str(tmp_path / "run")], "", ""))
    message = f"standard output was closed: go on with --resume {tmp_path / 'run'}\n"
    assert capsys.readouterr().err == (message if started else "") and (tmp_path / "run").exists() == started


def test_full_disk_of_stdout(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(progress.Progress, "update", full)
    message = "standard output cannot be written (No space left on device): make room there, and go on with"
    with refuses(message, f"--resume {tmp_path / 'run'}", kind=UnwritableError):
        train.carry_out(parse([*WALK, "--total-steps", "32", "--out", str(tmp_path / "run")], "", ""))


def test_progress_in_a_log():
    log = io.StringIO()
    with progress.Progress(1000, 8, start=500, file=log) as bar:
        for iteration in range(501, 1001):
            bar.update(iteration, 1.0 if iteration < 900 else None)
    lines = log.getvalue().splitlines()
    assert [line[:4] for line in lines] == [" 60%", " 70%", " 80%", " 90%", "100%"]
    assert "iteration 1,000/1,000" in lines[-1] and "8,000 steps" in lines[-1] and "return 1.0" in lines[-1]
    assert "\x1b" not in log.getvalue()


def test_learning_curve_without_episodes(tmp_path):
    run = run_directory.RunDirectory.create(tmp_path, {})
    curves.draw_learning_curve(run, "nothing")
    assert (tmp_path / "learning_curve.png").stat().st_size > 1_000
    assert (tmp_path / "learning_curve.png").stat().st_mode & 0o777 == (
        tmp_path / "config.json"
    ).stat().st_mode & 0o777
    run.close()


@dataclasses.dataclass  # not frozen, so not hashable
class Speaker:
    """An algorithm with sample tables: the reward is the number of iterations."""

    steps_per_iteration: ClassVar[int] = 1

    def init(self, key):
        return jnp.zeros(())

    def iterate(self, state):
        return state + 1, {"loss": state}

    def examples(self, state, key, count):
        return jnp.full(count, state)

    def example_rows(self, rewards):
        return [{"prompt": "1+1=", "response": "2", "reward": float(reward)} for reward in rewards]


def test_sample_tables_of_an_algorithm_that_is_not_hashable(tmp_path):
    run = fitted(tmp_path / "run", Speaker(), iterations=2)
    for iteration in (0, 2):
        lines = (run.path / "samples" / f"{iteration:08d}.jsonl").read_text().splitlines()
        assert [json.loads(line)["reward"] for line in lines] == [iteration] * 8
