"""Busy time of groups, for runs whose end the test decides."""

import subprocess
import sys
import threading
import time

import jax
import jax.experimental
import jax.numpy as jnp
import pytest

import fdg
import policies
from fdg.errors import HostError
from fdg.running.timeline import Timeline, may_watch

TICK = 0.1  # seconds


class Result:
    """A result that is ready when the test calls `finish`, like an array on a device."""

    def __init__(self):
        self._ready = threading.Event()

    def block_until_ready(self):
        self._ready.wait()
        return self

    def finish(self):
        self._ready.set()


class Fails:
    def block_until_ready(self):
        raise RuntimeError("the device is gone")


def start(timeline, group, *dependencies):
    run, done = timeline.start(group, dependencies), Result()
    timeline.register(group, run, done)
    return run, done


def wait(count):
    """Sleeps; returns the ticks that passed, which are more on a busy machine."""
    begun = time.perf_counter()
    time.sleep(count * TICK)
    return (time.perf_counter() - begun) / TICK


def ticks(timeline):
    """`busy_at_end`, in ticks."""
    return {
        group: pytest.approx(seconds / TICK, abs=0.5) for group, seconds in timeline.busy_at_end().items()
    }


@pytest.fixture
def timeline():
    timeline = Timeline(["actors", "learners"])
    timeline.begin()
    return timeline


def test_concurrent_groups_are_both_busy(timeline):
    _, acted = start(timeline, "actors")
    _, learned = start(timeline, "learners")
    acting = wait(2)
    acted.finish()
    learning = acting + wait(1)
    learned.finish()
    assert ticks(timeline) == {"actors": acting, "learners": learning}


def test_waiting_group_is_idle(timeline):
    """The learner's runs are queued at once, and start when the actors finish."""
    run, acted = start(timeline, "actors")
    learning, learned = start(timeline, "learners", run, run, None)
    _, learned_again = start(timeline, "learners", learning)  # depends on a run of its own group
    acting = wait(3)
    acted.finish()
    first = wait(1)
    learned.finish()
    second = wait(1)
    learned_again.finish()
    assert ticks(timeline) == {"actors": acting, "learners": first + second}


def test_queued_runs_are_not_counted_twice(timeline):
    """A group executes them in order; time between runs does not count either."""
    done = [start(timeline, "actors")[1] for _ in range(3)]
    acting = 0.0
    for one in done:
        acting += wait(1)
        one.finish()
    wait(2)
    _, last = start(timeline, "actors")
    acting += wait(1)
    last.finish()
    assert ticks(timeline) == {"actors": acting, "learners": 0}
    assert timeline.last_results() == [last]


def test_failed_run_ends(timeline):
    """The timeline continues after it."""
    run = timeline.start("actors", [])
    timeline.register("actors", run, Fails())
    _, learned = start(timeline, "learners", run)
    learned.finish()
    assert ticks(timeline) == {"actors": 0, "learners": 0}
    assert run.dependencies == [] and run.is_finished.is_set()


def test_few_of_many_short_iterations_are_measured():
    """The first four, then one whenever measuring has taken at most 1% of the time so far."""
    measured = []
    for i in range(100):  # of 10 ms and 10 programs, which take 1 ms to measure
        if may_watch(len(measured), 10, i * 0.01 + 1e-6):
            measured.append(i)
    assert measured == [0, 1, 2, 3, 40, 50, 60, 70, 80, 90]


class Slow:
    """Acting and learning that take 2 ticks and 1 tick, on any machine."""

    def init(self, key):
        return {"weight": jnp.ones(4), "walks": jnp.zeros((2, 4))}

    def iterate(self, state):
        @fdg.fragment("actor", in_axes=(None, 0))
        def act(weight, walks):
            return sleep(walks + weight[None], 2 * TICK)

        @fdg.fragment("learner", in_axes=(None, 0), out_axes=None)
        def learn(weight, walks):
            return sleep(weight + jnp.mean(walks), TICK)

        walks = act(state["weight"], state["walks"])
        return {"weight": learn(state["weight"], walks), "walks": walks}, {}


def sleep(x, seconds):
    def wait(x):
        time.sleep(seconds)
        return x

    return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_synchronous_groups_idle_in_turn(devices):
    """Of 3 ticks per iteration, actors are busy for 2 and learners for 1."""
    engine = fdg.compile(Slow(), policies.SingleLearnerCoarse(), devices[:2])
    engine.compile(6)
    state = engine.init(0)
    jax.block_until_ready(state)
    begun = time.perf_counter()
    jax.block_until_ready(engine.run(state, 6))
    wall = time.perf_counter() - begun
    busy = engine.busy_seconds()
    assert busy["actors"] == pytest.approx(12 * TICK, rel=0.2)
    assert busy["learners"] == pytest.approx(6 * TICK, rel=0.2)
    idle = {group: wall - seconds for group, seconds in busy.items()}
    assert idle["actors"] == pytest.approx(busy["learners"], abs=2 * TICK)
    assert idle["learners"] == pytest.approx(busy["actors"], abs=2 * TICK)
    assert fdg.compile(Slow(), policies.GPUOnly(), devices[:1]).busy_seconds() == {}


class SlowLearner(Slow):
    """Learning multiplies matrices, without Python."""

    def iterate(self, state):
        @fdg.fragment("actor", in_axes=(None, 0))
        def act(weight, walks):
            return walks + weight[None]

        @fdg.fragment("learner", in_axes=(None, 0), out_axes=None)
        def learn(weight, walks):
            matrix = jnp.ones((300, 300)) * jnp.mean(walks)
            return weight + jnp.mean(jax.lax.fori_loop(0, 300, lambda i, x: x @ x * 1e-3, matrix))

        walks = act(state["weight"], state["walks"])
        return {"weight": learn(state["weight"], walks), "walks": walks}, {}


def test_stale_actor_does_not_wait_for_the_learner(devices):
    """The next acting ends while the learner still runs, also if new parameters are on their way to it."""
    engine = fdg.compile(SlowLearner(), policies.SingleLearnerCoarse(staleness=1), devices[:2])
    state, _ = engine.run(engine.init(0), 1)
    ends = {(bar.group, bar.iteration): bar.end for bar in engine.timeline(state, 4)}
    early = [ends["actors", i + 1] < ends["learners", i] for i in range(3)]
    assert any(early), ends


class Fragile(Slow):
    """Acting fails in the third iteration."""

    def __init__(self):
        self.calls = 0

    def iterate(self, state):
        def wait(x):
            self.calls += 1
            if self.calls == 3:
                raise ValueError("the simulator is gone")
            return x

        @fdg.fragment("actor", in_axes=(None, 0))
        def act(weight, walks):
            shape = jax.ShapeDtypeStruct(walks.shape, walks.dtype)
            return jax.experimental.io_callback(wait, shape, walks + weight[None])

        @fdg.fragment("learner", in_axes=(None, 0), out_axes=None)
        def learn(weight, walks):
            return weight + jnp.mean(walks)

        walks = act(state["weight"], state["walks"])
        return {"weight": learn(state["weight"], walks), "walks": walks}, {"mean": jnp.mean(walks)}


def test_failed_program_ends_the_run_for_all_groups(devices):
    """The caller gets the error, `busy_seconds` does not wait for the run, and another run can start."""
    algorithm = Fragile()
    engine = fdg.compile(algorithm, policies.SingleLearnerCoarse(), devices[:2])
    with pytest.raises(HostError, match=r"act.*the simulator is gone"):
        engine.run(engine.init(0), 6)
    reader = threading.Thread(target=engine.busy_seconds, daemon=True)
    reader.start()
    reader.join(20)
    assert not reader.is_alive()
    _, metrics = engine.run(engine.init(0), 2)
    assert metrics["mean"].shape == (2,) and engine.busy_seconds().keys() == {"actors", "learners"}


def test_run_starts_when_its_inputs_are_known_to_be_ready(timeline):
    """The thread that watches the learners may be notified first."""
    acting, acted = start(timeline, "actors")
    _, learned = start(timeline, "learners", acting)
    time.sleep(TICK)
    learned.finish()
    time.sleep(TICK)
    acted.finish()
    assert ticks(timeline) == {"actors": 2, "learners": 0}


def test_python_exits_while_a_program_runs():
    """A thread that still waits in XLA would abort the process."""
    code = """
import time
import jax, jax.numpy as jnp
from fdg.running.timeline import Timeline

program = jax.jit(lambda x: jax.lax.fori_loop(0, 500, lambda i, x: x @ x * 1e-3, x))
jax.block_until_ready(program(jnp.ones((300, 300))))
timeline = Timeline(["learners"])
timeline.begin()
run = timeline.start("learners", ())
timeline.register("learners", run, program(jnp.ones((300, 300))))
time.sleep(0.05)
assert not run.is_finished.is_set()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
