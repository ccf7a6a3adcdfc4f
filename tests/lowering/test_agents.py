"""Agents of a device in chunks: each agent has the numbers of a single run, and a chunk fills the cache."""

import functools

import jax
import jax.numpy as jnp
import pytest

import algos
import envs
import fdg
import policies
from fdg import jaxprs
from fdg.agents import mapped
from fdg.batch.gradients import gradient_bytes
from fdg.lowering.programs import in_chunks
from fdg.placing import agents_per_device
from fdg.placing.agents_per_device import agents_per_vmap
from fdg.running import metrics
from tests.conformance.comparison import assert_same, plain, ppo
from tests.oracle.compare import limit_agents_per_vmap
from tests.tiny import Pupil
from tests.training.descent import Descent

AGENTS = 6
BREAKOUT = {"num_envs": 64, "convolve": False, "hidden": (128, 128)}
BYTES = 20 * 128 * 4  # of the gradient of `gradient_of`


@functools.cache
def algorithm(name):
    match name:
        case "ppo":
            return ppo("CartPole-v1")
        case "dqn":  # a replay buffer, written in place
            sizes = {"num_envs": 4, "num_steps": 4, "hidden": (8,), "buffer_size": 64, "batch_size": 8}
            return algos.DQN(env=envs.make("CartPole-v1"), learning_starts=8, **sizes)
        case "large":
            return ppo("CartPole-v1", num_envs=128, num_steps=32, hidden=(32,))
    return Pupil()


@functools.cache
def reference(name, agent):
    return plain(algorithm(name), init_of(name)(jax.random.key(5 + agent)), 5)


@functools.cache
def init_of(name):
    return jax.jit(algorithm(name).init)


@pytest.mark.parametrize(  # each algorithm, and each chunk size, on one device and on two
    ("name", "per_vmap", "count"),
    [("ppo", 1, 1), ("ppo", 2, 2), ("dqn", 2, 1), ("dqn", 3, 2), ("pupil", 3, 1), ("pupil", 1, 2)],
)
def test_each_agent_matches_a_single_run(name, per_vmap, count, devices, monkeypatch):
    """State and all metrics, over runs of more iterations than a program has rows of metrics."""
    monkeypatch.setattr(metrics, "ROWS", 2)
    with limit_agents_per_vmap(per_vmap):
        engine = fdg.compile(algorithm(name), policies.GPUOnly(), devices[:count], num_seeds=AGENTS)
    assert [len(group) for group in engine.plan.groups] == [count]
    state, first = engine.run(engine.init(5), 2)
    state, last = engine.run(state, 3)
    rows = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, last)
    for agent in range(AGENTS):
        actual = jax.tree.map(lambda x: x[agent], state), {k: x[:, agent] for k, x in rows.items()}  # noqa: B023
        assert_same(reference(name, agent), actual, 1e-4)


def test_chunks_of_agents_in_float64(devices):
    with jax.enable_x64(True), limit_agents_per_vmap(1):
        engine = fdg.compile(Descent(), policies.GPUOnly(), devices[:1], num_seeds=2)
        state, rows = engine.run(engine.init(0), 3)
        assert all(row.shape == (3, 2) for row in rows.values())
        for agent in range(2):
            want, _ = plain(Descent(), Descent().init(jax.random.key(agent)), 3)
            assert_same(want, jax.tree.map(lambda x: x[agent], state), 1e-9)  # noqa: B023


def counting(leaves, buffers, first):
    """A training loop of two rows: each adds 1 to its agents, and records them."""
    for row in range(2):
        leaves = [x + 1 for x in leaves]
        buffers = [
            jax.lax.dynamic_update_slice(buffer, x[None], (row, first))
            for buffer, x in zip(buffers, leaves, strict=True)
        ]
    return leaves, buffers


@pytest.mark.parametrize("per_vmap", [1, 2, 4])
def test_chunks_run_one_after_another(per_vmap):
    """Agents start from 0, 10, 20 and 30; each chunk writes its columns."""
    leaves, buffers = in_chunks(counting, 4, per_vmap)([10 * jnp.arange(4)], [jnp.zeros((2, 4), jnp.int32)])
    assert leaves[0].tolist() == [2, 12, 22, 32]
    assert buffers[0].tolist() == [[1, 11, 21, 31], [2, 12, 22, 32]]
    shapes = []

    def half(x):
        shapes.append(x.shape)
        return [x / 2]

    assert mapped(half, 4, per_vmap)(jnp.arange(4.0))[0].tolist() == [0, 0.5, 1, 1.5]
    assert shapes == [()]  # of one agent


def gradient_of(steps):
    """An algorithm that takes `steps` gradient steps over 128 rows."""

    class Sums:
        def init(self, key):
            return {"w": jnp.zeros(8), "x": jax.random.normal(key, (128, 8)), "y": jnp.zeros(128)}

        def iterate(self, state):
            w = jax.lax.scan(
                lambda w, _: (self.slope(w, state["x"], state["y"]), None), state["w"], length=steps
            )
            halved = jax.lax.fori_loop(0, 2, lambda _, w: w / 2, w[0])  # without a batch axis
            return {**state, "w": halved}, {}

        @fdg.fragment("learner", in_axes=(None, 0, 0), out_axes=None)
        def slope(self, w, x, y):
            return (x @ w - y) @ x

    return fdg.trace(Sums())


def test_bytes_of_gradients():
    """Columns: x and y have 9, outside and inside the fragment; the product and the difference have 1."""
    for steps in (1, 5):
        graph = gradient_of(steps)
        assert gradient_bytes(graph.jaxpr, graph.state_axes) == (BYTES, BYTES * steps)
    assert gradient_bytes(fdg.trace(Descent()).jaxpr, (None, None)) == (0, 0)


@pytest.mark.parametrize(
    ("cache", "chosen"),
    [(1, 1), (BYTES, 1), (2 * BYTES, 2), (4 * BYTES, 4), (5 * BYTES, 6), (9 * BYTES, 12), (10**9, 12)],
)
def test_agents_that_fill_the_cache(cache, chosen, monkeypatch):
    """The divisor of 12 that is nearest by ratio: 5 / 4 is more than 6 / 5."""
    monkeypatch.setattr(agents_per_device, "TARGET_GRADIENT_BYTES", cache)
    monkeypatch.setattr(agents_per_device, "OPERATION_BYTES", 0)
    assert agents_per_vmap(gradient_of(1), 12, on_cpu=True) == chosen
    assert agents_per_vmap(gradient_of(1), 12, on_cpu=False) == 12
    text = str(fdg.place(gradient_of(1), policies.GPUOnly(), 64, num_seeds=64 * 12))  # each has a core
    sentence = "one after another" if chosen == 1 else f"{chosen} at a time"
    assert (f"each device trains its 12 agents {sentence}" in text) == (chosen < 12)


def test_small_operations_favour_one_vmap(monkeypatch):
    """Two agents fill the cache. They run apart from the others if gradients outweigh operations.

    An operation counts once for each core of a device, since its cores synchronize at each operation.
    """
    monkeypatch.setattr(agents_per_device, "TARGET_GRADIENT_BYTES", 2 * BYTES)
    for cores in (1, 3):
        for more, chosen in ((0, 2), (1, 12)):
            graph = gradient_of(1)
            operations = cores * jaxprs.equation_count(jaxprs.open_jaxpr(graph.jaxpr))
            monkeypatch.setattr(agents_per_device, "OPERATION_BYTES", 2 * BYTES // operations + more)
            assert agents_per_vmap(graph, 12, on_cpu=True, cores=cores) == chosen


def test_operations_of_loops_count_once_per_trip():
    def three_times(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(x) * 2, None), x + 1, length=3)[0]

    assert jaxprs.equation_count(jax.make_jaxpr(three_times)(1.0).jaxpr) == 1 + 3 * 2


@pytest.mark.parametrize(
    ("name", "env", "fields", "count", "best"),
    [
        ("PPO", "CartPole-v1", {}, 64, ({4, 8}, {64})),
        ("PPO", "Breakout-MinAtar", BREAKOUT, 8, ({1, 2}, {1, 2})),
        ("PQN", "CartPole-v1", {}, 16, ({4}, {4})),
        ("IMPALA", "CartPole-v1", {}, 16, ({16}, {16})),
    ],
    ids=["PPO", "PPO of images", "PQN", "IMPALA"],
)
def test_defaults_of_presets(name, env, fields, count, best):
    """The best chunk sizes measured on one core and on two, or within a tenth of the best (decision 073)."""
    graph = fdg.trace(getattr(algos, name)(env=envs.make(env), **fields))
    for cores in (1, 2):
        assert agents_per_vmap(graph, count, True, cores) in best[cores - 1]
