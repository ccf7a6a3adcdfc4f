"""`fdg.fit`: same results as the command line, callbacks, early stops, interrupt and resume."""

import dataclasses
import json
import os
import re
import shutil
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from fdg.commands.cli import train_main
from fdg.errors import FdgError, FdgWarning
from fdg.training import fit as fit_module
from tests.refusing import refuses
from tests.tiny import Pupil, Walk
from tests.training.descent import Descent
from tests.training.trained import assert_same, fitted, rows, small, untimed_rows


def test_fit_matches_the_command_line(tmp_path):
    run = fitted(tmp_path / "python", Walk(num_envs=4), seed=3, eval_episodes=8)
    words = "--algo tests.tiny:Walk --num-envs 4 --total-steps 32 --seed 3"
    words += f" --eval-episodes 8 --devices 1 --out {tmp_path / 'shell'}"
    assert train_main(words.split()) == 0
    assert untimed_rows(tmp_path / "python") == untimed_rows(tmp_path / "shell")
    theirs = fdg.load(tmp_path / "shell", trust=True)
    assert_same(run.state, theirs.state)
    ours, shell = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("python", "shell"))
    for name in ("algo", "env", "policy", "hyperparameters", "seed", "eval_episodes", "versions"):
        assert ours[name] == shell[name], name
    assert (
        "fdg.train --algo tests.tiny:Walk --num-envs 4" in shell["command"] and ours["command"] == "fdg.fit"
    )
    assert "git_commit" in shell and "100% iteration 4/4" in run.printed


@pytest.mark.parametrize("one", [np.int64(1), np.array(1), jnp.int32(1)], ids=["numpy", "0-d", "jax"])
def test_settings_may_be_scalar_arrays(tmp_path, one):
    settings = {"seed": one, "eval_every": one, "checkpoint_every": one, "stop_after": np.array(100.0)}
    fitted(tmp_path / "run", Walk(num_envs=4), **settings, total_steps=8 * one)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert {config[name] for name in ("seed", "eval_every", "checkpoint_every")} == {1}
    assert config["total_steps"] == 8


def test_no_device_is_refused(tmp_path):
    with refuses(match=r"devices=\[\]: give at least one device"):
        fitted(tmp_path / "run", Walk(), devices=[])


def test_options_of_jax_hold_in_every_thread(tmp_path):
    with jax.enable_x64(True):
        run = fitted(tmp_path / "run", Descent())
    assert run.state["x"].dtype == np.float64


def test_nan_that_jax_refuses(tmp_path):
    with jax.debug_nans(True), pytest.raises(FdgError, match=r"^jax_debug_nans .* unset JAX_DEBUG_NANS"):
        fitted(tmp_path / "run", Walk())
    assert not (tmp_path / "run").exists()


def test_metrics_are_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = fitted("run", Walk()), fdg.load("run", trust=True)
    monkeypatch.chdir("/")
    assert [len(run.metrics) for run in runs] == [4, 4] and all(run.summary for run in runs)


def test_callback_that_changes_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    run = fitted("run", Walk(), eval_every=2, callbacks=[lambda report: os.chdir(tmp_path / "other")])
    assert run.path == tmp_path / "run" and run.finished and len(run.metrics) == 4
    assert (tmp_path / "run" / "summary.json").exists() and not list((tmp_path / "other").iterdir())


class SlowAtTheEnd(Descent):
    """Iterations from the eighth on take 40 ms on the host."""

    def init(self, key):
        return {**super().init(key), "iteration": jnp.int32(1)}

    def iterate(self, state):
        wait = lambda i: time.sleep(0.04 if i > 7 else 0.0) or np.int32(i + 1)  # noqa: E731
        new, metrics = super().iterate(state)
        following = jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.int32), state["iteration"])
        return {**new, "iteration": following}, metrics


@pytest.mark.parametrize("waits", [False, True])
def test_wall_time_is_that_of_the_call_itself(tmp_path, monkeypatch, waits):
    """The last iteration sleeps for 40 ms, and its row says so.

    `start` waits for the end of the call if the environments are EnvPool's.
    """

    def start(self, state, iterations=1, start=fdg.Engine.start):
        state, metrics = start(self, state, iterations)
        if waits:
            jax.block_until_ready(state)
        return state, metrics

    monkeypatch.setattr(fdg.Engine, "start", start)
    run = fitted(tmp_path / "run", SlowAtTheEnd(), iterations=15)
    seconds = [row["wall_s"] for row in rows(run.path)]
    assert seconds[-1] - seconds[-2] >= 0.04


def test_callbacks(tmp_path):
    reports = []

    def callback(report):
        reports.append(report)
        return report.iteration >= 4

    run = fitted(tmp_path / "run", Walk(), iterations=20, callbacks=[callback])
    seen = [row["iteration"] for report in reports for row in report.rows]
    assert seen == list(range(1, len(seen) + 1)) and reports[0].num_iterations == 20
    assert reports[-1].env_steps == 8 * reports[-1].iteration
    assert not run.finished and run.stopped == "a callback ended it" and 4 <= run.iteration < 20
    assert f"stopped at iteration {run.iteration} of 20: a callback ended it" in run.printed
    assert json.loads((run.path / "summary.json").read_text())["stopped"] == "a callback ended it"
    assert len(rows(run.path)) == run.iteration
    # Resumed, it matches an uninterrupted run.
    again = fitted(tmp_path / "run", Walk(), iterations=20, resume=True)
    assert again.finished and again.iteration == 20
    assert untimed_rows(run.path) == untimed_rows(fitted(tmp_path / "new", Walk(), iterations=20).path)


@pytest.mark.parametrize("name", ["one program", "several groups"])
def test_interrupt_and_resume(tmp_path, name, monkeypatch):
    """Ctrl-C during training: the returned run resumes to the state of an uninterrupted run."""
    settings = {} if name == "one program" else {"policy": policies.SingleLearnerCoarse(), "devices": 2}
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    algorithm = Pupil()
    reference = fitted(tmp_path / "reference", algorithm, iterations=12, **settings)
    out = tmp_path / "cut"
    stopped = fitted(out, algorithm, iterations=12, callbacks=[interrupt_at(3)], **settings)
    assert stopped.stopped == "interrupted" and 3 <= stopped.iteration < 12
    assert f"fdg.fit(..., out='{out}', resume=True)" in stopped.printed
    again = fitted(out, algorithm, iterations=12, resume=True, **settings)
    assert_same(again.state, reference.state)
    assert untimed_rows(out) == untimed_rows(reference.path)


def test_script_exits_after_saving(tmp_path):
    with pytest.raises(KeyboardInterrupt, match="saved at iteration"):
        fitted(tmp_path / "run", Walk(), iterations=12, callbacks=[interrupt_at(3)])
    assert 3 <= fdg.load(tmp_path / "run", trust=True).iteration < 12


def interrupt_at(iteration):
    """A callback that sends SIGINT once, at this iteration."""
    pressed: list[int] = []

    def press(report):
        if report.iteration >= iteration and not pressed:
            pressed.append(report.iteration)
            os.kill(os.getpid(), signal.SIGINT)

    return press


def test_fit_in_a_thread(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(fitted(tmp_path / "run", Walk(), iterations=2)))
    thread.start()
    thread.join()
    assert found[0].finished


def test_extend_a_finished_run(tmp_path, capsys):
    fitted(tmp_path / "run", Walk(), total_steps=16)
    run = fitted(tmp_path / "run", Walk(), total_steps=40, resume=True)
    assert run.iteration == 5 and len(rows(run.path)) == 5
    assert_same(run.state, fitted(tmp_path / "whole", Walk(), total_steps=40).state)
    config = json.loads((run.path / "config.json").read_text())
    assert config["total_steps"] == 40 and config["resumes"][0]["changes"]["total_steps"] == [16, 40]
    assert fitted(tmp_path / "run", Walk(), total_steps=40, resume=True).iteration == 5
    with pytest.raises(FdgError, match="has already run 5 iterations, but --total-steps asks for 2"):
        fitted(tmp_path / "run", Walk(), total_steps=16, resume=True)
    assert train_main(["--resume", str(run.path), "--total-steps", "48", "--trust"]) == 0
    assert "resuming at iteration 5 of 6" in capsys.readouterr().out


def test_extended_run_is_unfinished(tmp_path):
    """A finished run is unfinished while it trains for more steps."""
    fitted(tmp_path / "run", Walk(), total_steps=16)

    def dies(report):
        raise MemoryError

    settings = {"total_steps": 40, "checkpoint_every": 1, "resume": True}
    with pytest.raises(FdgError, match="MemoryError"):
        fitted(tmp_path / "run", Walk(), **settings, callbacks=[dies])
    assert not fdg.load(tmp_path / "run", trust=True).finished
    assert fitted(tmp_path / "run", Walk(), **settings).finished
    (tmp_path / "run" / "summary.json").unlink()  # killed before it was written
    assert fitted(tmp_path / "run", Walk(), **settings).finished


def test_resume_with_other_settings_is_refused(tmp_path):
    fitted(tmp_path / "run", Walk(), iterations=1)
    with pytest.raises(FdgError, match=r"resume=True: scale=0.5 contradicts the 0.1 of the run"):
        fitted(tmp_path / "run", Walk(scale=0.5), iterations=1, resume=True)
    with pytest.raises(FdgError, match="already contains a run"):
        fitted(tmp_path / "run", Walk(), iterations=1)


def test_resume_without_checkpoint_starts_from_the_same_weights(tmp_path, capsys):
    first, fixed = fitted(tmp_path / "first", Descent()), Descent(rate=0.0)
    settings = {"seed": 9, "start_from": first.path}
    second = fitted(tmp_path / "second", fixed, **settings)
    shutil.rmtree(second.path / "checkpoints")  # as if it had been killed before its first checkpoint
    (second.path / ".checkpoints").unlink()
    for again in ({"start_from": None}, {}):
        shutil.copytree(second.path, tmp_path / f"copy-{len(again)}")
        run = fitted(tmp_path / f"copy-{len(again)}", fixed, resume=True, **settings | again)
        assert_same(run.state["x"], first.state["x"])
    algo = "tests.training.descent:Descent"
    shutil.copytree(second.path, tmp_path / "copy")
    assert train_main(["--resume", str(tmp_path / "copy"), "--algo", algo]) == 0
    assert_same(fdg.load(tmp_path / "copy", algorithm=fixed).state["x"], first.state["x"])
    first.path.rename(tmp_path / "moved")
    capsys.readouterr()
    assert train_main(["--resume", str(second.path), "--algo", algo]) == 2
    assert re.search(r"has no checkpoint yet.*: no run in .*first .*: bring it back", capsys.readouterr().err)


def test_start_from(tmp_path):
    given = {"name": "a2c", "hidden": (8,), "normalize_observation": True, "num_steps": 4}
    first = fitted(tmp_path / "first", small(**given))
    changed = small(**given | {"learning_rate": 1e-9, "num_envs": 8})
    second = fitted(tmp_path / "second", changed, seed=9, start_from=first.path, iterations=1)
    assert f"arrays of weights from {first.path}, iteration 4" in second.printed
    parameters = (jax.tree.leaves(one.state.parameters) for one in (first, second))
    for ours, theirs in zip(*parameters, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert float(second.state.observation_statistics.count) == 4 * 16 + 32
    assert int(second.state.iteration) == 1  # counters start at 0
    config = json.loads((second.path / "config.json").read_text())
    assert config["from"]["run"] == str(first.path)
    assert config["from"]["changes"]["learning_rate"] == [first.algorithm.learning_rate, 1e-9]
    with pytest.raises(FdgError, match=r"\[8\] in that run and float32\[16\] here: .*hidden=8 \(here 16\)"):
        fitted(tmp_path / "third", small(**given | {"hidden": (16,)}), start_from=first.path)
    other = dataclasses.replace(changed, env=envs.make("Pendulum-v1"))
    with pytest.raises(
        FdgError, match=r"environment is CartPole-v1, .* 2 actions; Pendulum-v1 .* actions \[1\]: choose"
    ):
        fitted(tmp_path / "third", other, start_from=first.path)
    assert not (tmp_path / "third").exists()


def test_interrupt_during_engine_run():
    """`engine.interrupted()` returns the state and metrics of an interrupted `engine.run`."""
    for policy, devices in ((policies.GPUOnly(), 1), (policies.SingleLearnerCoarse(), 2)):
        engine = fdg.compile(Pupil(), policy, jax.devices()[:devices])
        state, _ = engine.run(engine.init(0), 1)
        expected, _ = engine.run(engine.init(0), 6)
        with pytest.raises(FdgError, match="no run was interrupted"):
            engine.interrupted()
        start = engine._execution.start

        def interrupted(*arguments, start=start):
            os.kill(os.getpid(), signal.SIGINT)
            return start(*arguments)

        engine._execution.start = interrupted
        with pytest.raises(KeyboardInterrupt):
            engine.run(state, 5)
        engine._execution.start = start
        with pytest.raises(
            FdgError, match=r"donated .*, or, since it was interrupted, from engine.interrupted\(\)"
        ):
            engine.run(state, 1)
        state, metrics = engine.interrupted()
        done = len(metrics["size"])
        assert done == 5 if devices == 1 else 1 <= done <= 5
        if done < 5:
            state, _ = engine.run(state, 5 - done)
        assert_same(state, expected)


def test_results_of_an_interrupted_run_are_not_those_of_a_later_one(monkeypatch):
    engine = fdg.compile(Pupil(), policies.GPUOnly(), jax.devices()[:1])
    start = engine._execution.start

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return start(*arguments)

    def failing(*arguments):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine._execution, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.run(engine.init(0), 2)
    state, _ = engine.interrupted()
    monkeypatch.setattr(engine._execution, "start", failing)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.run(state, 1)
    with pytest.raises(FdgError, match="no run was interrupted"):
        engine.interrupted()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"devices": 99}, "devices=99: there are"),
        ({"total_steps": 3}, "total_steps=3 is less than one iteration"),
        ({"eval_every": 0}, "eval_every=0: it must be at least 1"),
        ({"resume": True, "out": None}, "resume=True: give the run directory"),
        ({"start_from": "nowhere"}, "no run in nowhere"),
    ],
)
def test_one_line_errors(tmp_path, settings, message):
    with refuses(match=message):
        fitted(**{"out": tmp_path / "run", "algorithm": small(), **settings})


def test_live_plot(tmp_path, monkeypatch):
    shown = []

    class Handle:
        def update(self, image):
            shown.append(image)

    def display(image, display_id):
        shown.append(image)
        return Handle()

    import IPython.display

    monkeypatch.setattr(IPython.display, "display", display)
    monkeypatch.setattr(fit_module, "_SECONDS_BETWEEN_PLOTS", 0.0)
    fitted(tmp_path / "run", Walk(), iterations=6, live_plot=True)
    assert len(shown) > 2 and all(image.data.startswith(b"\x89PNG") for image in shown)
    assert not fit_module.in_notebook()
    kernel = type("ZMQInteractiveShell", (), {})
    for shell in (kernel, type("Shell", (kernel,), {})):  # Jupyter's, and Google Colab's
        monkeypatch.setattr(IPython, "get_ipython", shell)
        assert fit_module.in_notebook()


class Diverging:
    """An algorithm without a learning rate, whose loss is NaN from the second iteration on."""

    steps_per_iteration = 1

    def init(self, key):
        return jnp.ones(())

    def iterate(self, state):
        return jnp.nan * state, {"loss": state}


def test_losses_that_are_not_finite(tmp_path):
    message = "training stops, .*: try smaller updates, or continue with .*on_nan='warn'"
    with pytest.raises(FdgError, match=message):
        fdg.fit(Diverging(), total_steps=4, devices=1, out=tmp_path / "a", progress=False)
    with pytest.warns(FdgWarning, match="training goes on"):
        run = fdg.fit(
            Diverging(), total_steps=4, devices=1, out=tmp_path / "b", progress=False, on_nan="warn"
        )
    assert run.iteration == 4


def test_no_function_has_the_name_of_a_command():
    for name in ("train", "plan", "launch", "evaluate", "play", "export", "plot"):
        assert name not in fdg.__all__
    assert all(hasattr(fdg, name) for name in fdg.__all__)
    assert isinstance(algos.PPO(env=envs.make("CartPole-v1")), algos.PPO)


def test_leftover_steps_are_reported_once(tmp_path, capsys):
    algorithm = Walk(num_envs=4)
    steps = algorithm.steps_per_iteration
    settings = {"devices": 1, "eval_episodes": 0}
    run = fdg.fit(algorithm, total_steps=2 * steps + 1, out=tmp_path / "run", **settings)
    output = capsys.readouterr().out
    assert run.iteration == 2
    assert output.count(f"and 1 more, which are left out: {2 * steps} will be done") == 1
