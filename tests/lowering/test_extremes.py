"""Maxima and minima over devices: NaN stays NaN, and all other results are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import fdg
import policies
from fdg.lowering.extremes import keep_nan

SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1.5, -2.5)
SEGMENTS = np.arange(8) % 3

OPERATIONS = {
    "max": jnp.max,
    "min": lambda x: x.min(0),
    "of rows": lambda x: x.max(1),
    "masked": lambda x: jnp.max(x, where=x > 0, initial=-1.0),
    "segments": lambda x: jax.ops.segment_max(x, SEGMENTS, 4),
    "scattered": lambda x: jnp.zeros((3, 4), x.dtype).at[SEGMENTS].min(x),
    "by a name": lambda x: jax.vmap(lambda row: row - jax.lax.pmax(row, "i"), axis_name="i")(x),
    "clipped": lambda x: x / jnp.maximum(1, jnp.abs(x).max()),
    "where": lambda x: jnp.argmax(x, axis=0),
    "running": lambda x: jax.lax.cummax(x, axis=0),
    "branch": lambda x: jax.lax.cond(jnp.max(x) > 0, lambda: 1.0, lambda: 2.0),
    "gradient": jax.grad(lambda x: jnp.max(x) * 2),
    "softmax": lambda x: jax.nn.softmax(x, 0),
}


class Reads:
    """Computes `y` from `x`, in `init` and in a fragment."""

    def __init__(self, operation, x, axis):
        self.x, self.operation = x, operation
        self.fragment = fdg.fragment("learner", in_axes=axis, out_axes=None, name="f")(operation)

    def init(self, key):
        return {"x": self.x, "y": self.operation(self.x), "rows": jnp.ones(8)}

    def iterate(self, state):
        return {**state, "y": self.fragment(state["x"])}, {}


def values(seed, shape, dtype=jnp.float32):
    """Normal numbers, some of them replaced by special ones."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    return jnp.asarray(np.where(rng.random(shape) < 0.2, rng.choice(SPECIAL, shape), x), dtype)


def sharded(spec):
    return policies.GPUOnly(model_parallel=2, parameters=(("x", spec),))


@pytest.mark.parametrize(
    ("policy", "axis"),
    [(policies.GPUOnly(), 0), (sharded("model"), None), (sharded((None, ("batch", "model"))), None)],
    ids=["batch", "model", "both"],
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_nan_is_nan_on_several_devices(name, policy, axis, devices):
    operation, x = OPERATIONS[name], values(len(name), (8, 4))
    engine = fdg.compile(Reads(operation, x, axis), policy, devices[:4])
    state = engine.init(0)
    results = [np.asarray(state["y"]), np.asarray(engine.run(state)[0]["y"])]
    for result in results:
        np.testing.assert_allclose(result, jax.jit(operation)(x), rtol=1e-6)
    assert engine.unexplained() == ()


def test_maximum_is_one_all_reduce_of_its_size(devices):
    for name in ("max", "segments"):
        engine = fdg.compile(Reads(OPERATIONS[name], values(0, (8, 4)), 0), policies.GPUOnly(), devices[:4])
        (program,) = engine.programs
        (measured,) = program.collectives()
        (planned,) = engine.plan.movements
        assert (measured.kind, measured.bytes) == ("all-reduce", planned.bytes_per_crossing)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]
)
def test_extremes_of_each_dtype(dtype):
    """With NaN of either sign; the maximum over an empty axis is -inf."""
    for seed in range(20):
        x = values(seed, (5, 4), dtype)
        x = jnp.where(jnp.isnan(x) & (seed % 2 == 0), -x, x)
        for operation in (lambda x: jnp.max(x, 0), lambda x: jnp.min(x, 0)):
            (result,) = core.jaxpr_as_fun(keep_nan(jax.make_jaxpr(operation)(x)))(x)
            np.testing.assert_array_equal(result.astype(float), operation(x).astype(float))
    nothing = jax.make_jaxpr(lambda x: jnp.max(x, 0, initial=-jnp.inf))(jnp.zeros((0, 2)))
    assert core.jaxpr_as_fun(keep_nan(nothing))(jnp.zeros((0, 2)))[0].tolist() == [-np.inf, -np.inf]
