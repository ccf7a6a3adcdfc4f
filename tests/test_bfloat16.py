"""`in_bfloat16`: products, gradients, custom gradients, and what it leaves unchanged."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fdg
import policies
from algos import memories
from fdg import fragment, jaxprs
from fdg.bfloat16 import in_bfloat16
from fdg.errors import GraphError
from fdg.rowwise import rowwise


def products(jaxpr):
    """Operand dtypes of every product in a jaxpr, nested jaxprs included."""
    found = []
    for eqn in jaxprs.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            found.append(tuple(str(v.aval.dtype) for v in eqn.invars))
        for body in jaxprs.bodies(eqn):
            found += products(body.jaxpr)
    return found


def rounded(x):
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def test_layer_and_gradient_round_operands():
    """NumPy reference: y = tanh(x) w; for sum(y c), dw = tanh(x)' c and dx = (c w') (1 - tanh(x)^2)."""
    x, w, c = normal(0, 5, 4), normal(1, 4, 3), normal(2, 5, 3)

    @jax.jit
    def layer(x, w):
        return in_bfloat16(lambda x, w: jnp.tanh(x) @ w)(x, w)

    hidden = np.asarray(jnp.tanh(x))
    np.testing.assert_allclose(layer(x, w), rounded(hidden) @ rounded(w), atol=2e-6)
    by_x, by_w = jax.jit(jax.grad(lambda x, w: jnp.sum(layer(x, w) * c), (0, 1)))(x, w)
    np.testing.assert_allclose(by_w, rounded(hidden).T @ rounded(c), atol=2e-6)
    np.testing.assert_allclose(by_x, rounded(c) @ rounded(w).T * (1 - hidden**2), atol=2e-6)
    assert np.max(np.abs(layer(x, w) - hidden @ w)) > 1e-3, "operands must be rounded"


@pytest.fixture(scope="module")
def cell():
    """Parameters of a GRU, initial memory, and a sequence of inputs and episode starts."""
    memory, inputs = jnp.zeros((4, 5)), normal(1, 6, 4, 3)
    parameters = nn.GRUCell(5).init(jax.random.key(0), memory, inputs[0])["params"]
    return parameters, memory, inputs, jax.random.bernoulli(jax.random.key(2), 0.2, (6, 4))


def scanned(parameters, memory, inputs, start):
    """Reference for `gru_unroll`: a scan with JAX's own gradient."""

    def step(memory, row):
        inputs, start = row
        memory, _ = nn.GRUCell(5).apply(
            {"params": parameters}, jnp.where(start[:, None], 0.0, memory), inputs
        )
        return memory, memory

    return jax.lax.scan(step, memory, (inputs, start))[1]


def test_custom_vjp_in_bfloat16(cell):
    def slope(unroll):
        return jax.grad(lambda parameters: jnp.sum(in_bfloat16(unroll)(parameters, *cell[1:]) ** 2))

    assert set(products(jax.make_jaxpr(slope(memories.gru_unroll))(cell[0]))) == {("bfloat16", "bfloat16")}
    custom, reference = (jax.jit(slope(unroll))(cell[0]) for unroll in (memories.gru_unroll, scanned))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), custom, reference)


def test_other_products_are_unchanged():
    exact = jax.lax.Precision.HIGHEST
    x, n = normal(0, 2, 2), jnp.ones((2, 2), int)

    def mixed(x, n):
        return jnp.matmul(x, x, precision=exact), n @ n, x.astype(jnp.float16) @ x.astype(jnp.float16)

    traced = jax.make_jaxpr(in_bfloat16(mixed))(x, n)
    assert products(traced) == [(kind, kind) for kind in ("float32", "int32", "float16")]
    relu = jax.make_jaxpr(in_bfloat16(jax.nn.relu))(x)
    assert str(relu) == str(jax.make_jaxpr(jax.nn.relu)(x)), "a function without products is unchanged"


@pytest.mark.parametrize("setting", [None, "highest", "tensorfloat32", "bfloat16"])
def test_explicit_precision_is_kept(setting):
    """JAX writes the default precision into every product; a different precision is the user's choice."""
    x, other = normal(0, 2, 2), "high" if setting == "highest" else "highest"
    both = in_bfloat16(lambda x: (jnp.matmul(x, x), jnp.matmul(x, x, precision=other)))
    with jax.default_matmul_precision(setting):
        assert products(jax.make_jaxpr(both)(x)) == [("bfloat16", "bfloat16"), ("float32", "float32")]


def test_unused_gradients_are_not_computed():
    """Without a gradient of the observations, a first layer has two products, not three."""
    images, kernel = normal(0, 2, 6, 6, 1), normal(1, 3, 3, 1, 2)

    def loss(kernel):
        convolved = in_bfloat16(nn.Conv(2, (3, 3), use_bias=False).apply)
        return jnp.sum(convolved({"params": {"kernel": kernel}}, images) ** 2)

    assert len(products(jax.make_jaxpr(jax.grad(loss))(kernel))) == 2


def test_vmap_keeps_dtypes():
    x, w = normal(0, 3, 5, 4), normal(1, 3, 4, 2)
    one = in_bfloat16(lambda x, w: {"y": x @ w, "n": jnp.argmax(x, axis=-1)})
    both = jax.vmap(one)(x, w)
    assert both["y"].dtype == jnp.float32
    assert both["n"].dtype == jnp.int32
    np.testing.assert_allclose(both["y"][1], one(x[1], w[1])["y"], atol=1e-6)


def test_rowwise_functions_are_traced_again_in_bfloat16():
    """By `vmap`, by gradients, and for the rows of each device."""
    x, w = normal(0, 8, 4), normal(1, 4, 3)

    class Layer:
        act = staticmethod(
            fragment("actor", (None, 0))(in_bfloat16(rowwise(lambda w, x: x @ w, in_axes=(None, 0))))
        )
        init = staticmethod(lambda key: (w, x))
        iterate = staticmethod(lambda state: (state, {"y": jnp.sum(jnp.abs(Layer.act(*state)))}))

    expected = rounded(x) @ rounded(w)
    np.testing.assert_allclose(jax.vmap(Layer.act, (0, None))(w[None], x)[0], expected, atol=1e-6)
    slope = jax.grad(lambda w: jnp.sum(Layer.act(w, x)))(w)
    np.testing.assert_allclose(slope, rounded(x).T @ np.ones((8, 3)), atol=1e-6)
    engine = fdg.compile(Layer(), policies.GPUOnly(), devices=4)
    np.testing.assert_allclose(
        engine.run(engine.init(seed=0), iterations=1)[1]["y"][0], np.sum(np.abs(expected)), rtol=1e-6
    )


def test_rule_of_custom_vmap_in_bfloat16():
    """`vmap`, as over agents, calls the rule and not the function."""

    @jax.custom_batching.custom_vmap
    def layer(parameters, x):
        return {"y": x @ parameters["w"], "n": parameters["n"]}

    @layer.def_vmap
    def rule(size, batched, parameters, x):
        assert size == 3 and batched == [{"w": False, "n": False}, True]
        return {"y": x @ parameters["w"], "n": parameters["n"]}, {"y": True, "n": False}

    x, parameters = normal(0, 3, 5, 4), {"w": normal(1, 4, 2), "n": jnp.int32(7)}
    result = jax.vmap(in_bfloat16(layer), (None, 0))(parameters, x)
    np.testing.assert_allclose(result["y"], rounded(x) @ rounded(parameters["w"]), atol=2e-6)
    assert result["n"].tolist() == [7, 7, 7]


@pytest.mark.parametrize("mark", [in_bfloat16, rowwise])
def test_non_arrays_are_refused(mark):
    x = jnp.ones(3)
    for function, argument, said in (
        (lambda x: {"a": object()}, x, r"result\['a'\] is <object"),
        (lambda x: x, ["b"], r"argument\[0\]\[0\] is 'b'"),
    ):
        with pytest.raises(GraphError, match=f"{mark.__name__} '<lambda>': {said}.*must be an array"):
            mark(function)(argument)
