"""Busy time of groups, of runs that end when the test says so."""

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
    """What a run makes: there after so many ticks, as an array of a device would be."""

    def __init__(self):
        self._there = threading.Event()

    def block_until_ready(self):
        self._there.wait()
        return self

    def comes(self):
        self._there.set()


class Fails:
    def block_until_ready(self):
        raise RuntimeError("the device is gone")


def start(timeline, group, *made_by):
    run, done = timeline.start(group, made_by), Result()
    timeline.register(group, run, done)
    return run, done


def wait(count):
    """Sleeps; returns how many ticks that took, which are more on a busy machine."""
    begun = time.perf_counter()
    time.sleep(count * TICK)
    return (time.perf_counter() - begun) / TICK


def ticks(timeline):
    """`settle`, in ticks."""
    return {
        group: pytest.approx(seconds / TICK, abs=0.5) for group, seconds in timeline.busy_at_end().items()
    }


@pytest.fixture
def timeline():
    timeline = Timeline(["actors", "learners"])
    timeline.begin()
    return timeline


def test_groups_that_run_at_the_same_time_are_both_busy(timeline):
    _, acted = start(timeline, "actors")
    _, learned = start(timeline, "learners")
    acting = wait(2)
    acted.comes()
    learning = acting + wait(1)
    learned.comes()
    assert ticks(timeline) == {"actors": acting, "learners": learning}


def test_a_group_that_waits_for_another_is_idle(timeline):
    """The learner has its runs at once, and begins when the actors are done."""
    run, acted = start(timeline, "actors")
    learning, learned = start(timeline, "learners", run, run, None)
    _, learned_again = start(timeline, "learners", learning)  # a run of its own group: nothing to wait for
    acting = wait(3)
    acted.comes()
    first = wait(1)
    learned.comes()
    second = wait(1)
    learned_again.comes()
    assert ticks(timeline) == {"actors": acting, "learners": first + second}


def test_runs_handed_over_together_are_not_counted_twice(timeline):
    """A group works through them in order; nor does time between runs count."""
    done = [start(timeline, "actors")[1] for _ in range(3)]
    acting = 0.0
    for one in done:
        acting += wait(1)
        one.comes()
    wait(2)
    _, last = start(timeline, "actors")
    acting += wait(1)
    last.comes()
    assert ticks(timeline) == {"actors": acting, "learners": 0}
    assert timeline.last_results() == [last]


def test_a_run_that_fails_ends(timeline):
    """Whoever waits for its results hears of it; the watch goes on."""
    run = timeline.start("actors", [])
    timeline.register("actors", run, Fails())
    _, learned = start(timeline, "learners", run)
    learned.comes()
    assert ticks(timeline) == {"actors": 0, "learners": 0}
    assert run.dependencies == [] and run.is_finished.is_set()


def test_of_many_short_iterations_a_few_are_watched():
    """The first four, then one whenever watching all so far has taken no more than 1% of the time."""
    watched = []
    for i in range(100):  # of 10 ms each and 10 programs, which take 1 ms to watch
        if may_watch(len(watched), 10, i * 0.01 + 1e-6):
            watched.append(i)
    assert watched == [0, 1, 2, 3, 40, 50, 60, 70, 80, 90]


class Slow:
    """Acting and learning that take as long as they say, on any machine."""

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


def test_a_synchronous_group_idles_while_the_other_works(devices):
    """Of 3 ticks an iteration actors work 2 and learners 1."""
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


class Fragile(Slow):
    """Acting that fails in the third iteration."""

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


def test_a_run_whose_program_fails_is_over_for_all_groups(devices):
    """Who runs it hears of it, busy seconds do not wait for it, and another run can begin."""
    algorithm = Fragile()
    engine = fdg.compile(algorithm, policies.SingleLearnerCoarse(), devices[:2])
    with pytest.raises(HostError, match=r"act.*the simulator is gone"):
        engine.run(engine.init(0), 6)
    asked = threading.Thread(target=engine.busy_seconds, daemon=True)
    asked.start()
    asked.join(20)
    assert not asked.is_alive()
    _, metrics = engine.run(engine.init(0), 2)
    assert metrics["mean"].shape == (2,) and engine.busy_seconds().keys() == {"actors", "learners"}


def test_a_run_begins_when_what_it_reads_is_known_to_be_there(timeline):
    """Who watches the learners may be told first."""
    acting, acted = start(timeline, "actors")
    _, learned = start(timeline, "learners", acting)
    time.sleep(TICK)
    learned.comes()
    time.sleep(TICK)
    acted.comes()
    assert ticks(timeline) == {"actors": 2, "learners": 0}


def test_python_may_end_while_a_program_runs():
    """A thread that still waited in XLA then would abort the process."""
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
