"""Operations that stand for a function of others (`HiPrim`): read as that function, with its own gradient."""

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
    """tanh(x @ w), and a gradient that is known from any other: seven of what comes back."""

    def __init__(self, x, w):
        self.in_avals, self.out_aval, self.params = (x, w), x, {}
        super().__init__()

    def expand(self, x, w):
        return jnp.tanh(x @ w)

    def vjp_fwd(self, nonzero, x, w):
        return self(x, w), w

    def vjp_bwd_retval(self, w, slope):
        return 7 * slope, jnp.zeros_like(w)


def layer(x, w=W):
    return Layer(jax.typeof(x), jax.typeof(w))(x, w)


def names(jaxpr):
    found = set()
    for eqn in jaxprs.open_jaxpr(jaxpr).eqns:
        found.add(eqn.primitive.name)
        for body in jaxprs.closed_bodies(eqn):
            found |= names(body)
    return found


class Learner:
    """Rows through the layer and its gradient; look-ups, draws and a loop around them."""

    def init(self, key):
        return {"x": jax.random.normal(key, (8, 3)), "key": key}

    @fdg.fragment("learner", in_axes=(0, 0))
    def learn(self, x, keys):
        def step(x, _):
            slope = jax.grad(lambda x: layer(x).sum())(x)
            return layer(x) + 0.01 * slope, jnp.searchsorted(jnp.arange(3.0), x)

        x, found = jax.lax.scan(step, x, length=2)
        drawn = jax.vmap(lambda key, row: jax.random.choice(key, 3, p=jax.nn.softmax(row)))(keys, x)
        places = jax.vmap(lambda row: jnp.nonzero(row > 0, size=2)[0])(x)
        return x + drawn[:, None], found.sum(0) + places.sum(-1, keepdims=True)

    def iterate(self, state):
        key, mine = jax.random.split(state["key"])
        x, found = self.learn(state["x"], jax.random.split(mine, 8))
        return {"x": x, "key": key}, {"sum": x.sum(), "found": found.sum()}


def test_rules_see_what_it_stands_for(devices):
    """Rows stay on their devices, and the numbers are those of plain calls of `iterate`."""
    graph = fdg.trace(Learner())
    assert {"tanh", "dot_general"} <= names(graph.jaxpr)
    assert not names(graph.jaxpr) & set(jax_internals.HIGH_LEVEL_PRIMITIVES)
    (learn,) = graph.fragments
    assert learn.flops_per_call >= 2 * 2 * (2 * 8 * 3 * 3)
    engine = fdg.compile(Learner(), policies.GPUOnly(), devices[:4])
    assert "no rule" not in str(engine.plan)
    assert {m.source for m in engine.plan.movements if m.how} == {
        "(between fragments)"
    }  # sums of the metrics
    state = Learner().init(jax.random.key(0))
    for _ in range(2):
        state, metrics = jax.jit(Learner().iterate)(state)
    found, rows = engine.run(engine.init(0), 2)
    np.testing.assert_allclose(found["x"], state["x"], rtol=1e-6)
    np.testing.assert_allclose(rows["found"][-1], metrics["found"])


def test_its_products_are_rounded_and_its_gradient_stays_its_own():
    x = jnp.linspace(0.1, 1.0, 12).reshape(4, 3)
    rounded = fdg.in_bfloat16(layer)
    exact, found = layer(x), rounded(x)
    assert 1e-5 < jnp.abs(exact - found).max() < 1e-2
    np.testing.assert_array_equal(jax.grad(lambda x: rounded(x).sum())(x), jnp.full((4, 3), 7.0))


def test_rows_with_a_gradient_of_their_own():
    """Also of what plain JAX could not differentiate: a solution that a loop finds."""

    def root(x):  # x / 2
        def solve(f, guess):
            return jax.lax.while_loop(lambda v: jnp.abs(f(v)).max() > 1e-6, lambda v: v - f(v) / 2, guess)

        return jax.lax.custom_root(lambda v: 2 * v - x, x, solve, lambda g, y: y / g(jnp.ones_like(y)))

    x = jnp.arange(4.0)
    by_rows = fdg.rowwise(lambda x: root(x) * (1 + jnp.searchsorted(jnp.array([1.5]), x)))
    np.testing.assert_allclose(jax.jit(by_rows)(x), [0, 0.5, 2, 3], atol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: fdg.rowwise(root)(x).sum())(x), [0.5] * 4)


def test_calls_of_the_host_within():
    """An effect of what it stands for is one of the call."""

    class Told(Layer):
        def __init__(self, x, w):
            super().__init__(x, w)
            (call,) = jax.make_jaxpr(lambda: jax.debug.print("x"))().eqns
            self.effects = frozenset(call.effects)

        def expand(self, x, w):
            jax.debug.print("x")
            return x

    x = jnp.ones((2, 3))
    lowered = jaxprs.lowered(jax.make_jaxpr(lambda x: Told(jax.typeof(x), jax.typeof(W))(x, W))(x))
    assert lowered.effects and names(lowered) & {"debug_callback", "debug_print"}
    core.check_jaxpr(jaxprs.open_jaxpr(lowered))


def test_a_loop_of_another_kind_is_refused():
    if not hasattr(jax.config, "jax_scan3"):
        pytest.skip("this JAX has no such loop")
    before = jax.config.jax_scan3
    jax.config.update("jax_scan3", True)
    try:
        with pytest.raises(fdg.FdgError, match=r"^JAX_SCAN3=1 makes jax.lax.scan a loop .* unset it"):
            fdg.trace(Learner())
    finally:
        jax.config.update("jax_scan3", before)


@pytest.mark.parametrize("module", ["clusters", "no_such_module"])
def test_what_a_version_of_jax_has_moved_is_named(module):
    with pytest.raises(
        fdg.FdgError, match=rf"JAX {jax.__version__} has no jax._src.{module}.Gone, .* to ask:"
    ):
        jax_internals.internal(module, "Gone", "ask")
