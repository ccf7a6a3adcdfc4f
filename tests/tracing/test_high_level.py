"""High-level primitives (`HiPrim`) are expanded to their functions, and keep their own gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import hijax
from jax.extend import core

import fdg
import policies
from fdg import jax_internals, jaxprs

W = 0.1 * jnp.arange(9.0).reshape(3, 3)


class Layer(getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive):
    """tanh(x @ w), with a recognizable gradient: 7 times the cotangent."""

    def __init__(self, x, w):
        self.in_avals, self.out_aval, self.params = (x, w), x, {}
        super().__init__()

    def expand(self, x, w):
        return jnp.tanh(x @ w)

    def vjp_fwd(self, nonzero, x, w):
        return self(x, w), w

    def vjp_bwd_retval(self, w, gradient):
        return 7 * gradient, jnp.zeros_like(w)


def layer(x, w=W):
    return Layer(jax.typeof(x), jax.typeof(w))(x, w)


def primitives(jaxpr):
    found = set()
    for eqn in jaxprs.open_jaxpr(jaxpr).eqns:
        found.add(eqn.primitive.name)
        for body in jaxprs.closed_bodies(eqn):
            found |= primitives(body)
    return found


class Learner:
    """The layer and its gradient in a loop, with `searchsorted`, `choice` and `nonzero`."""

    def init(self, key):
        return {"x": jax.random.normal(key, (8, 3)), "key": key}

    @fdg.fragment("learner", in_axes=(0, 0))
    def learn(self, x, keys):
        def step(x, _):
            gradient = jax.grad(lambda x: layer(x).sum())(x)
            return layer(x) + 0.01 * gradient, jnp.searchsorted(jnp.arange(3.0), x)

        x, index = jax.lax.scan(step, x, length=2)
        drawn = jax.vmap(lambda key, row: jax.random.choice(key, 3, p=jax.nn.softmax(row)))(keys, x)
        positive = jax.vmap(lambda row: jnp.nonzero(row > 0, size=2)[0])(x)
        return x + drawn[:, None], index.sum(0) + positive.sum(-1, keepdims=True)

    def iterate(self, state):
        key, row_key = jax.random.split(state["key"])
        x, index = self.learn(state["x"], jax.random.split(row_key, 8))
        return {"x": x, "key": key}, {"sum": x.sum(), "index": index.sum()}


def test_rules_apply_to_expanded_primitives(devices):
    """Rows stay on their devices, and the numbers equal plain calls of `iterate`."""
    graph = fdg.trace(Learner())
    assert {"tanh", "dot_general"} <= primitives(graph.jaxpr)
    assert not primitives(graph.jaxpr) & set(jax_internals.HIGH_LEVEL_PRIMITIVES)
    (learn,) = graph.fragments
    assert learn.flops_per_call >= 2 * 2 * (2 * 8 * 3 * 3)
    engine = fdg.compile(Learner(), policies.GPUOnly(), devices[:4])
    assert "no rule" not in str(engine.plan)
    assert {m.source for m in engine.plan.movements if m.how} == {
        "(between fragments)"
    }  # sums of the metrics
    state, iterate = Learner().init(jax.random.key(0)), jax.jit(Learner().iterate)
    for _ in range(2):
        state, metrics = iterate(state)
    final, rows = engine.run(engine.init(0), 2)
    np.testing.assert_allclose(final["x"], state["x"], rtol=1e-6)
    np.testing.assert_allclose(rows["index"][-1], metrics["index"])


def test_in_bfloat16_rounds_and_keeps_the_gradient():
    x = jnp.linspace(0.1, 1.0, 12).reshape(4, 3)
    rounded = fdg.in_bfloat16(layer)
    exact, result = layer(x), rounded(x)
    assert 1e-5 < jnp.abs(exact - result).max() < 1e-2
    np.testing.assert_array_equal(jax.grad(lambda x: rounded(x).sum())(x), jnp.full((4, 3), 7.0))


def test_rowwise_custom_root_gradient():
    """`rowwise` differentiates `custom_root`, whose while loop has no reverse-mode gradient."""

    def root(x):  # x / 2
        def solve(f, guess):
            return jax.lax.while_loop(lambda v: jnp.abs(f(v)).max() > 1e-6, lambda v: v - f(v) / 2, guess)

        return jax.lax.custom_root(lambda v: 2 * v - x, x, solve, lambda g, y: y / g(jnp.ones_like(y)))

    x = jnp.arange(4.0)
    by_rows = fdg.rowwise(lambda x: root(x) * (1 + jnp.searchsorted(jnp.array([1.5]), x)))
    np.testing.assert_allclose(jax.jit(by_rows)(x), [0, 0.5, 2, 3], atol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: fdg.rowwise(root)(x).sum())(x), [0.5] * 4)


def test_effects_are_kept():
    """Effects of the expanded function are effects of the call."""

    class Printing(Layer):
        def __init__(self, x, w):
            super().__init__(x, w)
            (call,) = jax.make_jaxpr(lambda: jax.debug.print("x"))().eqns
            self.effects = frozenset(call.effects)

        def expand(self, x, w):
            jax.debug.print("x")
            return x

    x = jnp.ones((2, 3))
    lowered = jaxprs.lowered(jax.make_jaxpr(lambda x: Printing(jax.typeof(x), jax.typeof(W))(x, W))(x))
    assert lowered.effects and primitives(lowered) & {"debug_callback", "debug_print"}
    core.check_jaxpr(jaxprs.open_jaxpr(lowered))


def test_jax_scan3_is_refused():
    if not hasattr(jax.config, "jax_scan3"):
        pytest.skip("this JAX has no such loop")
    before = jax.config.jax_scan3
    jax.config.update("jax_scan3", True)
    try:
        with pytest.raises(fdg.FdgError, match=r"^JAX_SCAN3=1 makes jax.lax.scan a loop .* unset it"):
            fdg.trace(Learner())
    finally:
        jax.config.update("jax_scan3", before)


def test_jax_disable_jit_is_refused():
    with jax.disable_jit(), pytest.raises(fdg.FdgError, match=r"^JAX_DISABLE_JIT=1 .* unset it"):
        fdg.trace(Learner())


@pytest.mark.parametrize("module", ["clusters", "no_such_module"])
def test_missing_jax_internal_is_named(module):
    with pytest.raises(
        fdg.FdgError, match=rf"JAX {jax.__version__} has no jax._src.{module}.Gone, .* to ask:"
    ):
        jax_internals.internal(module, "Gone", "ask")
