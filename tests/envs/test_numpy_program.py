"""Actors that run with NumPy, compared with JAX: every operation, the cut of an actor, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fdg
from envs import numpy_operations
from envs.numpy_actors import trace
from envs.numpy_program import NumpyProgram, Runner
from fdg.errors import FdgError
from tests.batch.operations import OPERATIONS, image
from tests.batch.rows import F, integers, positive, unit

T, N = 2, 3


def wide(row):
    """Numbers beyond the range of integers, and some that are not finite."""
    special = jnp.array([jnp.nan, jnp.inf, -jnp.inf, -0.0, 0.5, 1.5, -2.5], row.dtype)
    return jnp.concatenate([row * 1e12, row * 100, special])


def dilated(row):
    kernel = jnp.sin(jnp.arange(2 * 3 * 2 * 2, dtype=row.dtype)).reshape(2, 3, 2, 2)
    image_first = image(row).transpose(2, 0, 1)[None].astype(row.dtype)
    layout = ("NCHW", "OIHW", "NCHW")
    return lax.conv_general_dilated(image_first, kernel, (2, 1), [(1, 2), (0, 1)], None, (1, 2), layout)


def divided(row):
    x, y = integers(row) - 4, integers(jnp.roll(row, 1)) - 2
    lowest = jnp.iinfo(x.dtype).min  # whose absolute value is not in the dtype
    return lax.div(x, y), lax.rem(x, y), lax.div(lowest, y), lax.div(x, lowest)


# What `tests.batch.operations` lacks.
FURTHER = {
    **{
        f"to {dtype}": lambda r, dtype=dtype: wide(r).astype(dtype)
        for dtype in ("int8", "uint8", "int32", "uint32", "bool")
    },
    "narrower integers": lambda r: (integers(r) * 1000).astype(jnp.int8),
    "integer division": divided,
    "away from zero": lambda r: lax.round(wide(r), lax.RoundingMethod.AWAY_FROM_ZERO),
    "comparisons": lambda r: (r < 0.5, r <= 0.5, r > 0.5, r >= 0.5, r == r[0], r != r[0]),
    "bits": lambda r: (~integers(r), ~(r > 0), (r > 0) & (r < 1), (r > 0) | (r < 1), (r > 0) ^ (r < 1)),
    "inverse": lambda r: (jnp.arccosh(1 + positive(r)), jnp.arctanh(unit(r)), jnp.arccos(unit(r))),
    "inverse root": lambda r: lax.rsqrt(positive(r)),
    "error functions": lambda r: (lax.erf(r), lax.erfc(r)),
    "axes": lambda r: (r.reshape(2, 3).max(1), r.reshape(1, 2, 3).sum((0, 2)), (r > 0).any()),
    "dilated convolution": dilated,
    "log-probability": lambda r: jnp.take_along_axis(jax.nn.log_softmax(r), integers(r)[:1] % F, 0),
    "add_any": lambda r: jax.grad(lambda x: (x * x).sum() + jnp.sin(x).sum())(r),
}


def shapes(dtype):
    return lambda n: (jax.ShapeDtypeStruct((n, F), dtype), jax.ShapeDtypeStruct((n, 2), jnp.uint32))


def run(act, observation, keys, workers=(N,), operations=None):
    """What workers compute for `observation [T, B, F]` and `keys [T, B, 2]`: arrays `[T, B, ...]`."""
    actor, operands = trace("it", act, shapes(observation.dtype), workers)
    inputs, parts, start = jax.device_get(actor.inputs(operands, jnp.asarray(keys))), [], 0
    for n in workers:
        program, rows = NumpyProgram.deserialized(actor.program.serialized[n]), slice(start, start + n)
        runner, start = Runner(program), start + n
        runner.begin(inputs.fixed)
        steps = [runner.step(observation[t, rows], [x[t, rows] for x in inputs.per_step]) for t in range(T)]
        parts.append([np.stack(values) for values in zip(*steps, strict=True)])
        if operations is not None:
            operations.update(equation.operation for equation in program.equations)
    return [np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True)]


def batch(dtype=np.float32, size=N):
    keys = jax.random.key_data(jax.random.split(jax.random.key(1), (T, size)))
    return np.random.default_rng(0).normal(size=(T, size, F)).astype(dtype), np.asarray(keys)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_operations_equal_those_of_jax(dtype):
    table = {**OPERATIONS, **(FURTHER if dtype == "float32" else {})}
    if dtype == "float64":  # with 64-bit types these mix dtypes, which JAX refuses
        for name in ("bitcast to wide", "reduce generic", "reduce pair", "reduce_window generic", "scan"):
            del table[name]
    found, refused, operations = {}, {}, set()
    with jax.enable_x64(dtype == "float64"):
        observation, keys = batch(dtype)
        for name, function in table.items():
            try:
                act = lambda rows, _, function=function: (jax.vmap(function)(rows), ())  # noqa: E731
                found[name] = run(act, observation, keys, operations=operations)
            except FdgError as error:
                refused[name] = str(error)
        expected = jax.jit(lambda x: {name: jax.vmap(jax.vmap(table[name]))(x) for name in found})(
            observation
        )
    tolerance = 1e-4 if dtype == "float32" else 1e-9
    for name, arrays in found.items():
        for x, y in zip(arrays, jax.tree.leaves(expected[name]), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype), name
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=name)
    assert len(found) > 200
    assert all("workers with NumPy cannot run" in reason for reason in refused.values())
    if dtype == "float32":
        known = {*numpy_operations._ELEMENTWISE, *numpy_operations._WITH_PARAMETERS}
        assert operations == known


def policy(scale):
    """An actor with parameters, noise, and arrays that depend on neither noise nor observation."""

    def act(rows, key_data):
        keys = jax.random.wrap_key_data(key_data)
        noise = jax.vmap(lambda key: jax.random.normal(key, (F,)))(keys)
        repeated = jnp.broadcast_to(jnp.exp(scale), rows.shape)
        row_number = jnp.arange(len(rows))[:, None] * scale[0]
        action = jnp.tanh(rows @ jnp.outer(scale, scale)) + repeated * noise + row_number
        return action, {"noise": noise, "largest": jnp.argmax(action, axis=1), "unused": key_data}

    return act


def test_what_reads_no_observation_is_evaluated_in_the_program():
    scale = jnp.linspace(-0.5, 0.5, F)
    observation, keys = batch(size=5)
    for workers in ((5,), (3, 2)):
        found = run(policy(scale), observation, keys, workers)
        expected = jax.tree.leaves(jax.jit(jax.vmap(policy(scale)))(observation, keys))
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    actor, operands = trace("it", policy(scale), shapes(np.float32), (3, 2))
    program = NumpyProgram.deserialized(actor.program.serialized[3])
    assert "random_bits" not in {equation.operation for equation in program.equations}
    inputs = actor.inputs(operands, jnp.asarray(keys))
    assert all(x.shape[:2] == (T, 5) for x in inputs.per_step)
    assert sum(x.size for x in inputs.fixed) <= 2 * F * F  # parameters are not repeated for each row


def test_constants_of_calls():
    @fdg.fragment("actor")
    def scaled(rows):
        return rows * np.arange(F, dtype=np.float32)[None]

    observation, keys = batch()
    (found,) = run(lambda rows, keys: (scaled(rows), ()), observation, keys)
    np.testing.assert_array_equal(found, observation * np.arange(F, dtype=np.float32))


REFUSED = {
    "cannot run the operation sort: leave out acts=True, or write ray:it": lambda rows, keys: jnp.sort(rows),
    "cannot run the operation scan": lambda rows, keys: lax.map(jnp.sin, rows),
    "cannot run the operation debug_print": lambda rows, keys: (jax.debug.print("{}", rows), rows)[1],
    r"cannot run random_seed in key<fry>": lambda rows, keys: jax.vmap(
        lambda row: jax.random.normal(jax.random.key(row[0].astype(jnp.uint32)))
    )(rows),
    "cannot run convert_element_type in bfloat16": lambda rows, keys: rows.astype(jnp.bfloat16),
    r"cannot use an array of shape \(\) that depends on random keys": lambda rows, keys: rows + keys[0].sum(),
    r"cannot use an array of shape \(6, 5\) ": lambda rows, keys: rows @ (keys[:, :1] * jnp.ones((1, F))).T,
    "operations depend on the number of environments": lambda rows, keys: (
        jnp.sin(rows) if len(rows) % 2 else rows
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_actors(message):
    with pytest.raises(FdgError, match=message):
        trace("it", lambda rows, keys: (REFUSED[message](rows, keys), ()), shapes(np.float32), (3, 2))
