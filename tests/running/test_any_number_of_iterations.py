"""One executable for any number of iterations; metrics cut on the host; effects in order."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import fdg
import policies
from fdg.placing.policy import Group
from fdg.running import many_programs, metrics
from fdg.running.metrics import rows_per_buffer
from tests.compilations import compilations
from tests.conformance.comparison import assert_same, leaves, plain, ppo
from tests.tiny import Pupil
from tests.user_algorithm import Walker

Coarse, Fine = policies.SingleLearnerCoarse, policies.SingleLearnerFine

# Algorithm, policy, number of devices, agents: one program on one device and on several, many programs.
SETUPS = {
    "one device": (Pupil, policies.GPUOnly(), 1, None),
    "one program": (Walker, policies.GPUOnly(), 4, None),
    "ppo": (lambda: ppo("CartPole-v1"), policies.GPUOnly(), 2, None),
    "agents": (Walker, policies.GPUOnly(), 2, 4),
    "coarse": (Pupil, Coarse(), 3, None),
    "stale": (Pupil, Coarse(staleness=2), 3, None),
    "stale ppo": (lambda: ppo("CartPole-v1"), Coarse(staleness=1), 2, None),
    "stale, one device": (Pupil, Coarse(staleness=1), 1, None),
    "fine": (Pupil, Fine(), 3, None),
    "central": (Pupil, policies.Central(), 3, None),
}


@pytest.fixture(scope="module")
def engine_of(devices):
    @functools.cache
    def compiled(setup):
        algorithm, policy, count, agents = SETUPS[setup]
        return fdg.compile(algorithm(), policy, devices[:count], agents)

    return compiled


@pytest.mark.parametrize("setup", SETUPS)
def test_other_numbers_of_iterations_do_not_recompile(setup, engine_of):
    engine = engine_of(setup)
    state, _ = engine.run(engine.init(0), 1)
    many = 1000 if setup == "one program" else 130  # to save time
    with compilations() as compiled:
        for n in (7, 1, many):
            state, found = engine.run(state, n)
            lead = (n,) if SETUPS[setup][3] is None else (n, SETUPS[setup][3])
            assert {m.shape for m in found.values()} == {lead}
        engine.compile(3)
        assert compiled == []
        jax.jit(lambda x: x + 17)(1)
    assert compiled, "the listener reports no compilation"


@pytest.mark.parametrize("setup", SETUPS)
def test_one_run_of_ten_equals_ten_runs_of_one(setup, engine_of):
    engine = engine_of(setup)
    expected = engine.run(engine.init(3), 10)
    state, parts = engine.init(3), []
    for _ in range(10):
        state, found = engine.run(state)
        parts.append(found)
    ones = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    for run in (ones, expected[1]):
        assert all(np.isfinite(x).any() for x in run.values()) and len(run) > 1
    for path, want in leaves(expected).items():
        np.testing.assert_array_equal(leaves((state, ones))[path], want, err_msg=path)


@dataclasses.dataclass(frozen=True)
class Reports:
    """Every kind of metric, from a learner and from actors."""

    def init(self, key):
        return {"n": jnp.int32(0), "x": jnp.zeros(4), "key": key}

    def iterate(self, state):
        x = fdg.fragment("actor")(lambda x: x + 1)(state["x"])
        total = fdg.fragment("learner", out_axes=None)(lambda x: jnp.sum(x) / 4)(x)
        n = state["n"] + 1
        key, _ = jax.random.split(state["key"])
        return {"n": n, "x": x, "key": key}, {
            "mean": total,
            "half": total.astype(jnp.bfloat16) / 2,
            "odd": n % 2 == 1,
            "small": n.astype(jnp.int8),
            "word": n.astype(jnp.uint32),
            "complex": total + 1j,
            "key": key,
            "always": 1.5,
        }


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("policy", [policies.GPUOnly(), Coarse()], ids=["one program", "coarse"])
def test_metrics_keep_their_dtypes_across_buffers(policy, n, devices, monkeypatch):
    for module in (metrics, many_programs):
        monkeypatch.setattr(module, "ROWS", 3)
    engine = fdg.compile(Reports(), policy, devices[:2])
    key = jax.random.key(5, impl="rbg")
    start = lambda: {**Reports().init(key), "key": jax.random.key(5)}  # noqa: E731
    assert_same(plain(Reports(), start(), n), engine.run(start(), n))


@pytest.mark.parametrize("setup", ["one device", "one program", "agents", "coarse", "stale"])
def test_runs_without_implicit_transfers(setup, engine_of):
    engine = engine_of(setup)
    state = engine.init(0)
    with jax.transfer_guard("disallow"):
        engine.run(state, 2)


def test_metrics_of_agents_keep_their_dtypes(devices, monkeypatch):
    monkeypatch.setattr(metrics, "ROWS", 3)
    engine = fdg.compile(Reports(), policies.GPUOnly(), devices[:2], num_seeds=4)
    _, found = engine.run(engine.init(0), 7)
    for agent in range(4):
        _, expected = plain(Reports(), Reports().init(jax.random.key(agent)), 7)
        assert_same(expected, {name: x[:, agent] for name, x in found.items()})


def test_metrics_combine_with_other_arrays(devices):
    """With metrics of another group, and with the state, which is on several devices."""
    engine = fdg.compile(Reports(), Coarse(), devices[:3])
    state, found = engine.run(engine.init(0), 2)
    assert found["mean"].tolist() == [1, 2]
    assert (found["mean"][1] + found["small"][0] + state["x"]).tolist() == [5, 5, 5, 5]


def scalars(count, *lead):
    return [jax.ShapeDtypeStruct(lead, jnp.float32)] * count


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([], 1024),
        (scalars(10), 1024),
        (scalars(8, 32), 1024),  # 32 agents: a row of 1 KiB
        (scalars(8, 256), 512),  # 4 MiB in rows of 8 KiB
        (scalars(8, 10**6), 16),  # the minimum: with fewer, devices would wait for the host
    ],
)
def test_rows_per_buffer(shapes, expected):
    assert rows_per_buffer(shapes) == expected


# --- asynchronous runs ---


class Busy:
    """Slow iterations. (With callbacks, a program would run before its call returned, on CPU.)"""

    def init(self, key):
        return jnp.eye(400)

    def iterate(self, state):
        x = fdg.fragment("learner", in_axes=None, out_axes=None)(lambda x: 2 * (x @ x) - x)(state)
        return x, {"x": x[0, 0]}


def test_start_does_not_wait(devices):
    engine = fdg.compile(Busy(), policies.GPUOnly(), devices[:1])
    state = jax.block_until_ready(engine.run(engine.init(0), 1)[0])
    state, first = engine.start(state, 300)
    state, second = engine.start(state, 2)
    assert not state.is_ready()
    assert second.result()["x"].tolist() == [1, 1]
    assert first.result()["x"].tolist() == [1] * 300
    assert first.result() is first.result()


# --- effects ---


class Recorder:
    """Records each iteration, in order."""

    def __init__(self):
        self.recorded = []

    def init(self, key):
        return jnp.int32(0)

    def iterate(self, state):
        @fdg.fragment("environment", in_axes=None, out_axes=None)
        def write(n):
            def record(n):
                self.recorded.append(int(n))
                return np.int32(n + 1)

            return io_callback(record, jax.ShapeDtypeStruct((), jnp.int32), n, ordered=True)

        def twice(n, _):
            return write(n), None

        n, _ = jax.lax.scan(twice, state, None, length=2)
        return n, {"n": n}


@pytest.mark.parametrize("rows", [2, 1024])
def test_effects_keep_their_order_and_number(rows, devices, monkeypatch):
    monkeypatch.setattr(metrics, "ROWS", rows)
    algorithm = Recorder()
    engine = fdg.compile(algorithm, policies.GPUOnly(), devices[:1])
    for n in (1, 3, 5):
        algorithm.recorded.clear()
        _, found = engine.run(engine.init(0), n)
        jax.effects_barrier()
        assert algorithm.recorded == list(range(2 * n))
        assert found["n"].tolist() == list(range(2, 2 * n + 1, 2))


@dataclasses.dataclass(frozen=True)
class TwoGroups:
    def place(self, devices):
        return {"environment": Group("ears", (0,)), "actor": Group("mouths", (1,))}


class Talk:
    """Unordered effects in two groups that share no array; the second fails on request."""

    def __init__(self):
        self.log, self.fails = [], False

    def init(self, key):
        return jnp.int32(0), jnp.int32(0)

    def iterate(self, state):
        shape = jax.ShapeDtypeStruct((), jnp.int32)

        def speak(n):
            self.log.append("speak")
            return np.int32(n + 1)

        def hear(n):
            if self.fails:
                raise ValueError("deaf")
            self.log.append("hear")
            return np.int32(n + 1)

        mouth = fdg.fragment("actor", None, None)(lambda n: io_callback(speak, shape, n, ordered=False))
        ear = fdg.fragment("environment", None, None)(lambda n: io_callback(hear, shape, n, ordered=False))
        spoken, heard = mouth(state[0]), ear(state[1])
        return (spoken, heard), {"spoken": spoken, "heard": heard}


def test_effects_run_after_those_of_the_previous_run(devices):
    """The token passes from run to run. (It is checked since calls on CPU would wait without it, too.)"""
    algorithm, tokens = Talk(), []
    engine = fdg.compile(algorithm, TwoGroups(), devices[:2])
    engine.compile()
    for program in engine.programs:

        def recording(*arguments, run=program.compiled):
            tokens.extend(int(x) for x in jax.tree.leaves(arguments) if x.dtype == jnp.uint32)
            return run(*arguments)

        program.compiled = recording
    state = engine.init(0)
    for _ in range(3):
        state, _ = engine.start(state, 2)
    jax.block_until_ready(state)
    assert set(tokens) | {12} == set(range(13))  # two effects per iteration, each after the previous one
    assert algorithm.log == ["speak", "hear"] * 6
    # A failed run is over: a new run does not wait for it.
    algorithm.fails = True
    with pytest.raises(fdg.FdgError, match="deaf"):
        engine.run(state, 1)
    algorithm.fails = False
    _, found = engine.run(engine.init(0), 2)
    assert found["heard"].tolist() == [1, 2]
