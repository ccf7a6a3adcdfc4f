"""`Engine`: seeds, state layout, donation, devices, programs, collectives, initialisation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from fdg.errors import FdgError
from fdg.keys import to_data
from fdg.running.hlo import read_collectives
from tests.user_algorithm import Walker


@pytest.fixture(scope="module")
def walker(devices):
    engine = fdg.compile(Walker(), policies.GPUOnly(), devices[:4])
    engine.compile(2)
    return engine


def test_metrics_have_one_row_per_iteration(walker):
    state, metrics = walker.run(walker.init(0), 2)
    assert {name: (m.shape, m.dtype.name) for name, m in metrics.items()} == {
        "reward": ((2,), "float32"),
        "bonus": ((2,), "float32"),
        "alive": ((2,), "int32"),
    }
    assert isinstance(state, type(Walker().init(jax.random.key(0))))


def test_compile_and_init_returns_the_state_of_init(devices):
    engine = fdg.compile(Walker(), policies.GPUOnly(), devices[:2])
    for one, other in zip(
        *map(jax.tree.leaves, (engine.compile_and_init(seed=3), engine.init(3))), strict=True
    ):
        np.testing.assert_array_equal(to_data(one), to_data(other))
    with pytest.warns(DeprecationWarning, match="write compile_and_init"):
        engine.compile_init()


@pytest.mark.parametrize("seed", [jax.random.key(0), 1.5, None, 2**63])
def test_invalid_seed(seed, walker):
    with pytest.raises(FdgError, match=r"^init\(.*: give an integer below 2\*\*63, such as init\(0\)"):
        walker.init(seed)


def test_state_is_sharded_by_batch_axis(walker):
    state = walker.init(0)
    assert state.position.sharding.spec == jax.sharding.PartitionSpec("batch")
    assert state.weight.sharding.is_fully_replicated
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), walker.state_shape
    )


def test_run_defaults_to_one_iteration(walker):
    state, metrics = walker.run(walker.init(0))
    also, pending = walker.start(walker.init(0))
    assert {name: len(m) for name, m in metrics.items()} == {"reward": 1, "bonus": 1, "alive": 1}
    jax.tree.map(np.testing.assert_array_equal, pending.result(), metrics)
    np.testing.assert_array_equal(also.position, state.position)


def test_donated_state_is_refused(walker):
    state = walker.init(0)
    walker.run(state, 2)
    with pytest.raises(
        fdg.FdgError, match="donated to an earlier run: continue from the state that it returned"
    ):
        walker.run(state, 2)


def test_foreign_state_is_refused(walker):
    state = walker.init(0)
    with pytest.raises(fdg.FdgError, match="not a state of Walker"):
        walker.run(tuple(state), 2)
    with pytest.raises(fdg.FdgError, match=r"float32\[7\], not float32\[3\]"):
        walker.run(state._replace(weight=jnp.zeros(7)), 2)


@pytest.mark.parametrize("iterations", [0, -1, 1.5])
def test_invalid_iterations(walker, iterations):
    for call in (lambda: walker.run(walker.init(0), iterations), lambda: walker.compile(iterations)):
        with pytest.raises(fdg.FdgError, match="at least 1"):
            call()


def test_host_arrays_are_resharded(walker):
    """A restored checkpoint may consist of NumPy arrays, or of arrays on one device."""
    expected, _ = walker.run(walker.init(1), 2)
    state = walker.init(1)
    host = state._replace(
        weight=np.asarray(state.weight), position=jax.device_put(np.asarray(state.position))
    )
    actual, _ = walker.run(host, 2)
    np.testing.assert_array_equal(np.asarray(expected.weight), np.asarray(actual.weight))


def test_number_of_devices(host_devices):
    engine = fdg.compile(Walker(), policies.GPUOnly(), devices=2)
    assert list(engine.devices) == jax.devices()[:2]
    with pytest.raises(fdg.PlanError, match=r"devices=99: there are 8.*fdg.host_devices\(99\)"):
        fdg.compile(Walker(), policies.GPUOnly(), devices=99)


def test_program_attributes(walker):
    (program,) = walker.programs
    assert program.devices == walker.devices
    assert set(program.fragments) == {f.name for f in walker.plan.graph.fragments}
    assert program.hlo().startswith("HloModule")
    cost = program.cost()
    assert cost["flops"] > 0 and cost["argument_bytes"] > 0


# --- collectives ---


# ruff: noqa: E501
HLO = """
HloModule jit_train

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%body (arg: (f32[4], f32[2,3])) -> (f32[4], f32[2,3]) {
  %both = (f32[4]{0}, /*index=1*/bf16[2,3]{1,0}) all-reduce(%a, %b), to_apply=%add, metadata={op_name="jit(train)/while/body/jit(fdg:learner:learn)/jit(fdg:gradient:grad)/add"}
}

%cond (arg: (f32[4], f32[2,3])) -> pred[] {
  ROOT %more = pred[] constant(true)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %loop = (f32[4], f32[2,3]) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %all = u32[8]{0} all-gather(%p), dimensions={0}
}
"""


def test_read_collectives():
    reduce, gather = read_collectives(HLO)
    assert (reduce.kind, reduce.bytes, reduce.calls) == ("all-reduce", 4 * 4 + 6 * 2, 5)
    assert reduce.fragments == ("learn", "grad")
    assert (gather.kind, gather.bytes, gather.calls, gather.fragments) == ("all-gather", 32, 1, ())


def test_agents_need_no_collectives(devices):
    engine = fdg.compile(Walker(), policies.GPUOnly(), devices[:4], num_seeds=4)
    assert engine.programs[0].collectives() == ()
    assert not re.search(r" all-reduce\(", engine.programs[0].hlo())


class _CustomReduction:
    """`init` reduces the batch by a user-defined function."""

    def init(self, key):
        x = jax.random.normal(key, (8,))
        return {"x": x, "total": _compounded(x)}

    def iterate(self, state):
        total = fdg.fragment("learner", out_axes=None)(_compounded)(state["x"])
        return {**state, "total": total}, {"total": total}


def _compounded(x):
    return jax.lax.reduce(x, np.float32(1), lambda a, b: a * b + a + b, (0,))


@pytest.mark.parametrize("agents", [None, 2, 4])
def test_init_with_custom_reduction(agents):
    engine = fdg.compile(_CustomReduction(), policies.GPUOnly(), devices=2, num_seeds=agents)
    state = engine.init(seed=0)
    expected = [_compounded(jax.random.normal(jax.random.key(i), (8,))) for i in range(agents or 1)]
    np.testing.assert_allclose(state["total"], expected if agents else expected[0], rtol=1e-5)


class _FromHost:
    """`init` calls the host, as a data set does."""

    def init(self, key):
        data = jax.pure_callback(
            lambda: np.arange(8, dtype=np.float32), jax.ShapeDtypeStruct((8,), np.float32)
        )
        return {"data": data, "x": jax.random.normal(key, (8,))}

    def iterate(self, state):
        return {**state, "x": state["x"] + state["data"]}, {}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("agents", [None, 1, 2, 4])
def test_init_with_host_callback(agents, devices):
    engine = fdg.compile(_FromHost(), policies.GPUOnly(), devices=devices, num_seeds=agents)
    state, _ = engine.run(engine.init(seed=0), 3)
    expected = np.arange(8) if agents is None else np.tile(np.arange(8), (agents, 1))
    np.testing.assert_array_equal(state["data"], expected)


class Constants:
    def init(self, key):
        return jnp.zeros(4)

    def iterate(self, state):
        return fdg.fragment("learner", name="work")(jnp.sin)(state), {"done": True, "rate": 0.5, "step": 3}


def test_metrics_may_be_constants(devices):
    engine = fdg.compile(Constants(), policies.GPUOnly(), devices[:2])
    _, metrics = engine.run(engine.init(0), 2)
    assert {name: metric.tolist() for name, metric in metrics.items()} == {
        "done": [True, True],
        "rate": [0.5, 0.5],
        "step": [3, 3],
    }
