"""Operations that XLA partitions wrongly if parameters are split over `model`: the numbers of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fdg
import policies


def convolution(x, groups=1):
    """Along the last axis, of eight channels."""
    kernel = jnp.cos(x[:, : 8 // groups, :4])
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", feature_group_count=groups)


def largest(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 4, 2), (1, 2, 1), "SAME")


def integers(x):
    return (100 * x).astype(jnp.int32)


def scattered(x, name):
    """Scatters an odd number of updates, which devices cannot share evenly."""
    odd = x[:7, :, :7]
    return getattr(odd.at[:, :, integers(odd)[0, 0] % 8], name)(odd[..., ::-1], mode="drop")


def gradient(function):
    return jax.grad(lambda x: jnp.sum(function(x) ** 2))


OPERATIONS = {
    "convolve": lambda x: jnp.convolve(x[0, 0], x[0, 0], "same"),
    "correlate": lambda x: jnp.correlate(x[0, 0], x[0, 1], "same"),
    "convolution": convolution,
    "convolution gradient": gradient(convolution),
    "in groups": lambda x: convolution(x, 4),
    "max pooling": largest,
    "max pooling gradient": gradient(largest),
    **{f"scatter {name}": functools.partial(scattered, name=name) for name in ("multiply", "min")},
    "look-up": lambda x: x.reshape(64, 8)[integers(x)[0, :, :7] % 64],
    "look-up gradient": gradient(lambda x: jnp.take(x[..., :7], integers(x)[0, 0, :7] % 7, 2)),
    "custom reduce": lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a + b + 0.1 * a * b, (2,)),
    "xor of integers": lambda x: lax.reduce_xor(integers(x), (2,)),
    "and of integers": lambda x: lax.reduce_and(integers(x), (0, 1, 2)),
    "or of booleans": lambda x: lax.reduce_or(x > 1, (1, 2)),
    "max of complex numbers": lambda x: lax.reduce_max(x.astype(int) + 1j * x, (0, 1)).real,
    "min of complex numbers": lambda x: lax.reduce_min(x + 1j * x[:1], (2,)).imag,
    "dilating pad": lambda x: lax.pad(x, jnp.float32(0), [(-1, 2, 1)] * 3),
}


class Applies:
    """Applies an operation to a parameter, between fragments, next to a batch and in a rowwise function."""

    def __init__(self, operation):
        def add(x, p):
            return x + operation(p).sum()

        self.operation, rowwise = operation, fdg.rowwise(add, in_axes=(0, None))
        self.fragment = fdg.fragment("learner", in_axes=(0, None), name="f")(
            lambda x, p: add(x, p) + rowwise(x, p)
        )

    def init(self, key):
        parameter = jax.random.normal(jax.random.key(1), (8, 8, 8))
        return {"p": parameter, "made": self.operation(parameter), "rows": jnp.zeros(8)}

    def iterate(self, state):
        rows = self.fragment(state["rows"], state["p"])
        return {"p": state["p"], "made": self.operation(state["p"]), "rows": rows}, {}


class Initial:
    """Initialises a batch by an operation."""

    def init(self, key):
        return lax.pad(jax.random.normal(key, (4,)), 0.0, [(-1, 2, 1)])  # [8]

    def iterate(self, state):
        return fdg.fragment("learner", in_axes=0)(jnp.sin)(state), {}


def test_initial_batch_is_that_of_one_device(devices):
    state = fdg.compile(Initial(), policies.GPUOnly(), devices[:4]).init(0)
    np.testing.assert_allclose(state, Initial().init(jax.random.key(0)), rtol=1e-6)


class Scans:
    """Loops over the rows of a parameter whose dimensions no number of devices divides."""

    def init(self, key):
        return {"p": jnp.arange(15.0).reshape(5, 3), "x": jnp.zeros(8)}

    def iterate(self, state):
        def add(x, p):
            return x + lax.scan(lambda c, row: (c + row.sum(), None), 0.0, p)[0]

        return {**state, "x": fdg.fragment("learner", in_axes=(0, None))(add)(state["x"], state["p"])}, {}


def test_scan_over_a_parameter_that_is_not_split(devices):
    engine = fdg.compile(Scans(), policies.GPUOnly(parameters="fsdp"), devices[:4])
    state, _ = engine.run(engine.init(0), 1)
    np.testing.assert_array_equal(state["x"], np.full(8, 105))


@pytest.mark.parametrize("spec", [(None, None, "model"), ("batch", None, "model"), (None, "model", "batch")])
@pytest.mark.parametrize("name", OPERATIONS)
def test_numbers_are_those_of_one_device(name, spec, devices):
    algorithm = Applies(OPERATIONS[name])
    expected = jax.jit(algorithm.iterate)(algorithm.init(None))[0]
    policy = policies.GPUOnly(model_parallel=2, parameters=(("'p'", spec),))
    engine = fdg.compile(algorithm, policy, devices[:4])
    state, _ = engine.run(engine.init(0))
    for key in state:
        np.testing.assert_allclose(state[key], expected[key], rtol=1e-4, atol=1e-3, err_msg=key)
