"""Environments on the host: step order, failures, and the lifetime of pools."""

import functools
import json
import logging
import os
import signal
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from envs import from_envpool, host
from fdg.commands.cli import train_main
from fdg.errors import FdgError, PlanError
from fdg.training.run_directory import read_metrics
from tests.envs.conformance import COMPILE_FAST

COUNTING = "gymnasium:tests.envs.faulty:Counting-v0"


@pytest.fixture(autouse=True)
def _close_pools():
    yield
    host.close()


def keys(number, seed=0):
    return jax.random.split(jax.random.key(seed), number)


@pytest.fixture(autouse=True)
def _marker(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTY_MARKER", str(tmp_path / "marker"))


def counting(fault="none", workers=2, **overrides):
    return envs.make(COUNTING, fault=fault, workers=workers, **overrides)


def run_steps(env, state, steps, seed=1):
    """Runs `steps` steps with action 1 in one program; returns the state and a `TimeStep [T, B]`."""

    number = state.running_length.shape[0]
    return _steps(env)(state, jax.random.split(jax.random.key(seed), (steps, number)))


@functools.cache
def _steps(env):
    def one(state, keys):
        return env.step(keys, state, jnp.ones(keys.shape[0], jnp.int32))

    return jax.jit(lambda state, keys: jax.lax.scan(one, state, keys), compiler_options=COMPILE_FAST)


def small_ppo(env, **fields):
    return algos.PPO(
        env=env,
        **{"num_envs": 4, "num_steps": 8, "num_epochs": 1, "num_minibatches": 2, "hidden": (4,), **fields},
    )


# --- order and seeds ---


def test_step_order_and_time_limit():
    env = counting()
    state, first = jax.jit(env.reset)(keys(3))
    assert first.dtype == "float32" and (first[:, 1] == 0).all() and len(set(first[:, 0].tolist())) == 3
    state, step = run_steps(env, state, 12)
    times = np.tile(np.arange(12)[:, None] % 5 + 1, 3)
    np.testing.assert_array_equal(step.final_observation[..., 1], times)
    np.testing.assert_array_equal(step.truncated, times == 5)
    np.testing.assert_array_equal(step.observation[..., 1], times % 5)
    assert not step.terminated.any()
    np.testing.assert_array_equal(step.reward, 1.0)  # Gymnasium gets action 6: its space starts at 5
    np.testing.assert_array_equal(step.episode_return, np.where(times == 5, 5.0, 0.0))
    np.testing.assert_array_equal(step.episode_length, np.where(times == 5, 5, 0))
    # A second program continues from the state of the first.
    _, step = run_steps(env, state, 1)
    np.testing.assert_array_equal(step.final_observation[..., 1], 3)


# --- failures ---

FAULTS = {
    "cut": r"worker \d \(process \d+\) was killed by signal 9, saying: out of memory",
    "die": r"worker \d \(process \d+\) was killed by signal 9, saying: out of memory",
    "raise": r"worker \d \(process \d+\): its instance 0 raised ValueError: the wheels fell off \(\w+.py, l",
    "hang": r"worker \d \(process \d+\) was not done in 2 s",
    "cut, then hang": r"worker \d \(process \d+\) was not done in 2 s",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_worker_failures_are_named(fault):
    env = counting(fault, timeout=2.0)
    state, _ = jax.jit(env.reset)(keys(2))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=f"HostError: environment '{COUNTING}': .*{FAULTS[fault]}"
    ):
        jax.block_until_ready(run_steps(env, state, 6))
    assert host.running() == 0


@pytest.mark.parametrize("fault", ["cut", "die", "hang", "cut, then hang"])
def test_restart_replaces_lost_instances(fault, caplog):
    env = counting(fault, timeout=2.0, restarts=1)
    state, first = jax.jit(env.reset)(keys(2))
    state, step = jax.tree.map(np.asarray, run_steps(env, state, 6))
    (lost,) = np.flatnonzero(step.truncated[2])  # the instance that reached step 3 first
    other = 1 - lost
    assert [
        message
        for message in caplog.messages
        if "1 of its 2 instances start anew (restart 1 of 1)" in message
    ]
    assert step.reward[2, lost] == 0 and step.reward[2, other] == 1
    # Its last observation ends the episode, and a new episode starts.
    np.testing.assert_array_equal(step.final_observation[2, lost], step.observation[1, lost])
    assert step.observation[2, lost, 1] == 0 and step.observation[2, lost, 0] != first[lost, 0]
    np.testing.assert_array_equal(step.final_observation[:, lost, 1], [1, 2, 2, 1, 2, 3])
    np.testing.assert_array_equal(step.final_observation[:, other, 1], [1, 2, 3, 4, 5, 1])
    assert step.episode_return[2, lost] == 2 and step.episode_length[2, lost] == 3


def test_worker_that_dies_at_its_start_is_replaced(caplog):
    env = counting("die at its start", restarts=1)
    state, first = jax.jit(env.reset)(keys(2))
    assert "at its start, worker" in caplog.text and "(restart 1 of 1)" in caplog.text
    _, step = run_steps(env, state, 2)
    np.testing.assert_array_equal(step.observation[:, :, 1], [[1, 1], [2, 2]])
    np.testing.assert_array_equal(step.observation[0, :, 0], first[:, 0])
    assert not step.truncated.any()


def test_worker_that_dies_at_its_start_without_restarts():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"at its start, worker .* killed by signal 9"):
        jax.block_until_ready(jax.jit(counting("die at its start").reset)(keys(2)))


def test_stopped_workers_share_one_limit():
    pool = envs.make("gymnasium:tests.envs.faulty:Wide", workers=3).source.start(3)
    for process in pool.reset(np.arange(3), np.arange(3), 60.0)[:, 0]:
        os.kill(int(process), signal.SIGSTOP)
    start = time.monotonic()
    assert len(pool.step(np.zeros((3, 200_000), np.float32), 3.0).failures) == 3
    assert 3.0 <= time.monotonic() - start < 5.0  # sending the actions and waiting for replies together
    pool.close()


def test_hanging_worker_ends_after_its_parent():
    """After Ctrl-C or a kill of the run, no worker is left, even if its environment never returns."""
    pool = envs.make(COUNTING, fault="hang", workers=1).source.start(1)
    pool.reset(np.arange(1), np.arange(1), 60.0)
    for _ in range(2):
        pool.step(np.zeros(1, np.int32), 60.0)
    pool.send(np.zeros(1, np.int32), 60.0)
    (worker,) = pool._workers.values()
    worker.connection.close()  # as at the end of this process
    assert worker.process.wait(20) == -signal.SIGKILL
    pool.close()


def test_numbers_beyond_float32_become_infinite(recwarn):
    env = counting("huge")
    state, first = env.reset(keys(1))
    _, step = env.step(keys(1), state, jnp.zeros(1, jnp.int32))
    assert np.isposinf([first[0, 0], step.observation[0, 0]]).all()
    assert not [warning for warning in recwarn if "overflow" in str(warning.message)]


def test_constructor_failure():
    env = counting("constructor")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"at its start, worker . .*OSError: no such model"):
        jax.block_until_ready(jax.jit(env.reset)(keys(2)))
    assert host.running() == 0


class _Faulty:
    """EnvPool's CartPole with a fault at its third step."""

    def __init__(self, env, fault):
        self.env, self.fault, self.count = env, fault, 0

    def reset(self, *arguments):
        return self.env.reset(*arguments)

    def step(self, action):
        self.count += 1
        if self.count == 3:
            self.fault()
        return self.env.step(action)


def _raise():
    raise RuntimeError("mj_step\ndiverged")


def _hang():
    time.sleep(3)
    raise RuntimeError("long after")


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (_raise, "a step raised RuntimeError: mj_step diverged"),
        (_hang, "was not done in 0.5 s"),
    ],
)
def test_envpool_failures(fault, error, monkeypatch, caplog):
    make = from_envpool._make
    made = []

    def faulty_once(*arguments, **options):
        made.append(make(*arguments, **options))
        return _Faulty(made[0], fault) if len(made) == 1 else made[-1]

    monkeypatch.setattr(from_envpool, "_make", faulty_once)
    env = envs.make("envpool:CartPole-v1", timeout=0.5)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"environment 'envpool:CartPole-v1': .*{error}"):
        jax.block_until_ready(run_steps(env, env.reset(keys(2))[0], 5))
    made.clear()
    env = envs.make("envpool:CartPole-v1", timeout=0.5, restarts=1)
    _, step = run_steps(env, env.reset(keys(2))[0], 5)
    np.testing.assert_array_equal(step.truncated[2], True)
    np.testing.assert_array_equal(step.final_observation[2], step.observation[1])
    assert (step.observation[2] != step.final_observation[2]).any() and len(made) == 2
    assert "2 of its 2 instances start anew (restart 1 of 1)" in caplog.text


# --- pools ---


def test_lost_instances_start_new_episodes(caplog):
    env = counting()
    state, _ = run_steps(env, env.reset(keys(2))[0], 3)
    host.close()  # as in another process, where a checkpoint is restored
    _, step = jax.tree.map(np.asarray, run_steps(env, state, 3))
    assert caplog.messages == [
        f"environment '{COUNTING}': the instances that this state was made with are gone (no checkpoint holds"
        " them): 2 new episodes start here"
    ]
    np.testing.assert_array_equal(step.truncated, [[True] * 2, [False] * 2, [False] * 2])
    np.testing.assert_array_equal(step.reward, [[0.0] * 2, [1.0] * 2, [1.0] * 2])
    np.testing.assert_array_equal(step.final_observation[0], state.inner.observation)
    np.testing.assert_array_equal(step.final_observation[..., 1], [[3.0] * 2, [1.0] * 2, [2.0] * 2])
    np.testing.assert_array_equal(step.episode_length[0], 4)


# --- tracing, placing and training ---


def test_tracing_and_placing_start_no_pool():
    algorithm = small_ppo(counting())
    graph = fdg.trace(algorithm)
    assert [f.name for f in graph.fragments if f.role == "environment"] == ["step"]
    fdg.place(graph, policies.SingleLearnerCoarse(actors=1, learners=4), 5)
    assert host.running() == 0


@pytest.mark.parametrize(
    ("policy", "devices", "error"),
    [
        (
            policies.GPUOnly(),
            2,
            r"GPUOnly\(\) on 2 devices: .* the 2 devices of group 'all': use one device, or",
        ),
        (policies.MultiLearner(), 4, "the 4 devices of group 'learners': use one device, or a policy"),
        (policies.SingleLearnerCoarse(), 4, "the 2 devices of group 'actors': use actors=1"),
        (policies.SingleLearnerFine(workers=2), 3, "the 2 devices of group 'workers': use workers=1"),
        (policies.Environments(workers=4), 8, "the 4 devices of group 'workers': use workers=1"),
        (policies.Central(), 3, "the 2 devices of group 'workers': use workers=1"),
    ],
)
def test_policies_that_split_it_are_refused(policy, devices, error):
    algorithm = small_ppo(counting())
    what = f"environment '{COUNTING}' in fragment 'step' .environment. runs on the host, and cannot be split"
    with pytest.raises(PlanError, match=f"{what} over {error}" if not error.startswith("GPU") else error):
        fdg.place(algorithm, policy, devices)
    assert host.running() == 0


def test_training_from_the_command_line(tmp_path, capsys, caplog, host_devices):
    """A worker dies once: its running episode is lost and counted."""
    out = tmp_path / "run"
    flags = "--algo a2c --num-envs 2 --num-steps 8 --hidden 4 --devices 1"
    command = [
        *f"--env {COUNTING}?fault=die&restarts=2 {flags} --total-steps 64 --eval-episodes 0".split(),
        *"--env-workers 2".split(),
        "--out",
        str(out),
    ]
    assert train_main(command) == 0
    output = capsys.readouterr().out
    assert "lost 1 running episode to 1 failure of the environment's workers: they count as" in output
    assert json.loads((out / "summary.json").read_text())["lost_episodes"] == 1
    assert [row["lost_episodes"] for row in read_metrics(out / "metrics.jsonl")][-1] == 1
    # The same run, as if it had been killed before its last checkpoint.
    host.close()
    (out / "summary.json").unlink()
    newest = max(
        (out / "checkpoints").iterdir(), key=lambda path: int(path.name) if path.name.isdigit() else -1
    )
    subprocess.run(["rm", "-r", str(newest)], check=True)
    caplog.clear()
    assert train_main(["--resume", str(out), "--trust", "--eval-episodes", "0"]) == 0
    (note,) = (record.getMessage() for record in caplog.records if record.name == "envs.running_pools")
    assert "2 new episodes start here" in note
    assert json.loads((out / "summary.json").read_text())["lost_episodes"] == 1  # of both runs together
    assert "lost 1" not in capsys.readouterr().out


# --- values and packages ---


def test_values_out_of_range_are_refused():
    for fields, error in {
        ("timeout", 0.0): "timeout=0.0 must be above 0 and at most 1e6 seconds",
        ("timeout", float("inf")): "timeout=inf must be above 0 and at most 1e6 seconds",
        ("restarts", -1): "restarts=-1 must be 0 or more",
        ("workers", 0): "workers=0 must be an integer of at least 1",
    }.items():
        with pytest.raises(FdgError, match=error):
            envs.make("gymnasium:CartPole-v1", **dict([fields]))
    env = envs.make("gymnasium:CartPole-v1")
    with pytest.raises(FdgError, match=r"action has shape \(3,\), expected \(2,\)"):
        env.step(keys(2), env.reset(keys(2))[0], jnp.zeros(3, jnp.int32))
    with pytest.raises(FdgError, match="keys must be one typed PRNG key per environment"):
        env.reset(jax.random.key(0))


@pytest.mark.parametrize("package", ["envpool", "gymnasium"])
def test_missing_package(package, monkeypatch):
    find = from_envpool.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(FdgError, match=rf"not installed: pip install 'fdg\[{package}\]'"):
        envs.make(f"{package}:Pendulum-v1", max_episode_steps=3)


def test_environments_are_values():
    short = {"max_episode_steps": 7}
    for name in ("envpool:CartPole-v1", "gymnasium:CartPole-v1"):
        assert envs.make(name, **short) == envs.make(name, **short) != envs.make(name)
        assert hash(envs.make(name, **short)) == hash(envs.make(name, **short))
        assert envs.make(name).name == name and envs.make(name, **short).max_episode_steps == 7


def test_jax_log_filter(caplog):
    """JAX's log omits only fdg's own errors, which JAX raises again."""
    for error in (fdg.errors.HostError("x"), ValueError("y")):
        logging.getLogger("jax._src.callback").error("failed", exc_info=(type(error), error, None))
    assert [record.exc_info[0] for record in caplog.records] == [ValueError]
