"""Rewriting and interpreting jaxprs, on random programs with every kind of body."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

import fdg
from fdg import jaxprs


@jax.custom_jvp
def with_custom_jvp(x):
    return jnp.sin(x) * 0.5


with_custom_jvp.defjvp(lambda xs, ts: (with_custom_jvp(*xs), jnp.cos(xs[0]) * ts[0] * 0.5))


@jax.custom_vjp
def with_custom_vjp(x):
    return jnp.sin(x) + 1


with_custom_vjp.defvjp(lambda x: (with_custom_vjp(x), x), lambda x, g: (g * jnp.cos(x),))


@jax.jit
def helper(x):
    """All its calls share one jaxpr."""
    return jnp.sin(x) - 0.25 * x


LINES = {
    "sin": lambda a, b: jnp.sin(a) * b,
    "helper": lambda a, b: helper(a) + b,
    "custom_jvp": lambda a, b: with_custom_jvp(a) + b,
    "custom_vjp": lambda a, b: with_custom_vjp(a) + b,
    "pass-through": lambda a, b: jax.jit(lambda a, b: (b, a))(a, b)[0],
}
BODIES = {
    "jit": lambda inner, a, b: jax.jit(inner)(a) + b,
    "remat": lambda inner, a, b: jax.checkpoint(inner)(a) * b,
    "scan": lambda inner, a, b: jax.lax.scan(
        lambda c, row: (0.5 * inner(c) + row, c), a, jnp.stack([a, b]), reverse=True
    )[0],
    "while": lambda inner, a, b: jax.lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.tanh(inner(c[1]) + b)), (0, a)
    )[1],
    "cond": lambda inner, a, b: jax.lax.cond(b.sum() > a.sum(), inner, lambda a: jnp.sin(a) + 1, a),
}


def program(seed, depth=2):
    """A random function of an array `[3]`, with loops, branches, calls and gradients."""

    def function(x):
        draw = np.random.default_rng(seed)
        values = [x, x + 1]
        for _ in range(4):
            a, b = (values[i] for i in draw.integers(len(values), size=2))
            inner, kind = int(draw.integers(2**31)), str(draw.choice([*LINES, *BODIES, "grad"]))
            if kind == "grad":
                slope = jax.grad(lambda a, inner=inner: jnp.tanh(program(inner, 0)(a)).sum())
                values.append(slope(a) + b)
            elif kind in LINES or not depth:
                values.append(LINES.get(kind, LINES["sin"])(a, b))
            else:
                values.append(BODIES[kind](program(inner, depth - 1), a, b))
        return jnp.tanh(values[-1] + values[-2]) + jnp.sin(x)

    return function


X = jnp.array([0.1, -0.7, 1.3])
SEEDS = range(7)


@functools.cache
def traced(seed):
    return jax.make_jaxpr(program(seed))(X)


def run(closed):
    return np.asarray(jax.jit(core.jaxpr_as_fun(closed))(X)[0])


def primitives_of(closed):
    return [eqn.primitive.name for eqn in jaxprs.walk(jaxprs.open_jaxpr(closed).eqns)]


def interpret(closed, values, of_sin=jnp.sin):
    """The outputs, with another function instead of each sine: the reference for rules."""

    def equation(eqn, values):
        if eqn.primitive.name == "sin":
            return [of_sin(*values)]
        functions = [functools.partial(interpret, body, of_sin=of_sin) for body in jaxprs.closed_bodies(eqn)]
        return jaxprs.run_bodies(eqn, functions, values) if functions else jaxprs.bind(eqn, values)

    return jaxprs.evaluate_jaxpr(jaxprs.open_jaxpr(closed), jaxprs.constants_of(closed), values, equation)


def cubic(x):
    """Replaces sines."""
    y = x * x
    return x - y * x / 7


def sin_to_cubic(eqn, inside):
    if eqn.primitive.name == "sin":
        return jaxprs.traced(cubic, eqn.invars, eqn.outvars)[0]
    return inside(eqn)


@pytest.mark.parametrize("seed", SEEDS)
def test_identity_rule_returns_the_same_object(seed):
    assert jaxprs.rewrite(traced(seed), lambda eqn, inside: inside(eqn)) is traced(seed)
    assert jaxprs.lowered(traced(seed)) is traced(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_copying_rule_gives_an_equal_program(seed):
    new = jaxprs.rewrite(traced(seed), lambda eqn, inside: inside(eqn).replace())
    assert new is not traced(seed) and str(new) == str(traced(seed))
    core.check_jaxpr(jaxprs.open_jaxpr(new))


@pytest.mark.parametrize("seed", SEEDS)
def test_rule_matches_interpreter(seed):
    new = jaxprs.rewrite(traced(seed), sin_to_cubic)
    core.check_jaxpr(jaxprs.open_jaxpr(new))
    assert "sin" in primitives_of(traced(seed)) and "sin" not in primitives_of(new)
    both = jax.jit(lambda x: (core.jaxpr_as_fun(new)(x)[0], interpret(traced(seed), [x], cubic)[0]))
    np.testing.assert_allclose(*both(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_interpreter_matches_jax(seed):
    both = jax.jit(lambda x: (core.jaxpr_as_fun(traced(seed))(x)[0], interpret(traced(seed), [x])[0]))
    np.testing.assert_allclose(*both(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_body_is_rewritten_once(seed):
    seen = []

    def rule(jaxpr, context, inside):
        seen.append(id(jaxpr))
        return [inside(eqn).replace() for eqn in jaxpr.eqns]

    jaxprs.rewrite_blocks(traced(seed), rule)
    assert len(seen) == len(set(seen))


def test_body_is_rewritten_once_per_context():
    closed = jax.make_jaxpr(lambda x: helper(helper(x)))(X)

    def rule(jaxpr, context, inside):
        for i, eqn in enumerate(jaxpr.eqns):
            wanted = context == 1 and eqn.primitive.name == "sin"
            yield from sin_to_cubic(eqn, inside) if wanted else [inside(eqn, i)]

    new = jaxprs.rewrite_blocks(closed, rule)
    np.testing.assert_allclose(
        run(new), cubic(helper(X)) - 0.25 * helper(X), rtol=1e-6
    )  # only the second call


def test_functions_traced_twice_have_distinct_variables():
    """JAX caches the trace of a function with its variables; the first result is used after the second."""
    first, second = (jax.make_jaxpr(lambda x: x)(X).jaxpr.invars[0] for _ in range(2))
    eqns, (one,) = jaxprs.traced(cubic, [first])
    more, (other,) = jaxprs.traced(cubic, [second])
    closed = jaxprs.build([first, second], [one, other], [*eqns, *more])
    found = core.jaxpr_as_fun(closed)(X, 2 * X)
    np.testing.assert_array_equal(found, [cubic(X), cubic(2 * X)])


@pytest.mark.parametrize("seed", SEEDS)
def test_inline(seed):
    def body_of(eqn):
        called = eqn.primitive.name in ("jit", "pjit", "custom_jvp_call")
        return jaxprs.bodies(eqn)[0].jaxpr if called else None

    new = jaxprs.inline(jaxprs.open_jaxpr(traced(seed)), body_of)
    core.check_jaxpr(new)
    assert not {"jit", "pjit", "custom_jvp_call"} & {eqn.primitive.name for eqn in new.eqns}
    np.testing.assert_allclose(run(jaxprs.with_jaxpr(traced(seed), new)), run(traced(seed)), rtol=1e-6)


def test_removed_effects():
    def prints(x):
        jax.debug.print("{}", x)
        return jnp.sin(x), None

    closed = jax.make_jaxpr(lambda x: jax.lax.scan(lambda x, _: jax.jit(prints)(x), x, length=3)[0])(X)
    assert closed.effects
    quiet = jaxprs.rewrite(
        closed, lambda eqn, inside: [] if eqn.primitive.name.startswith("debug") else inside(eqn)
    )
    core.check_jaxpr(jaxprs.open_jaxpr(quiet))
    assert not quiet.effects and not any(eqn.effects for eqn in jaxprs.open_jaxpr(quiet).eqns)
    np.testing.assert_allclose(run(quiet), jnp.sin(jnp.sin(jnp.sin(X))), rtol=1e-6)


@pytest.mark.parametrize("checked", [False, True])
def test_rewrite_in_shard_map(checked, devices):
    """A rule that traces skips a `shard_map` with `check_vma`; other rules apply in both."""
    mesh, split = Mesh(np.array(devices[:2]), ("d",)), PartitionSpec("d")
    by_two = jax.shard_map(jnp.sin, mesh=mesh, in_specs=split, out_specs=split, check_vma=checked)
    x, seen = jnp.arange(4.0), []
    closed = jax.make_jaxpr(by_two)(x)
    new = jaxprs.rewrite(closed, sin_to_cubic)
    expected = jnp.sin(x) if checked else cubic(x)
    np.testing.assert_allclose(jax.jit(core.jaxpr_as_fun(new))(x)[0], expected, rtol=1e-6)

    def rule(jaxpr, context, inside):
        seen.extend(eqn.primitive.name for eqn in jaxpr.eqns)
        return map(inside, jaxpr.eqns)

    assert jaxprs.rewrite_blocks(closed, rule, traces=False) is closed and "sin" in seen


def test_rewrite_in_linear_solve():
    def solved(x):
        return jax.lax.custom_linear_solve(lambda v: 2 * v, x, lambda _, b: jnp.sin(b) / 2)

    new = jaxprs.rewrite(jax.make_jaxpr(solved)(X), sin_to_cubic)
    np.testing.assert_allclose(run(new), cubic(X) / 2, rtol=1e-6)


def test_constants():
    table = np.arange(3.0, dtype=np.float32)
    closed = jax.make_jaxpr(lambda x: jax.jit(lambda x: jnp.sin(x) + table)(x) * table)(X)
    np.testing.assert_allclose(
        run(jaxprs.rewrite(closed, sin_to_cubic)), (cubic(X) + table) * table, rtol=1e-6
    )


@pytest.mark.parametrize("bound", [0, 1, 7, 300])
def test_trips_of_while_loops(bound):
    """The trips are unknown (1) if the counter starts at 1, steps by 2, or the test is an `or`."""

    def trips(begin, by, test):
        def run(x):
            step = lambda c: (c[0] + by, c[1] * 2)  # noqa: E731
            return jax.lax.while_loop(test, step, (jnp.asarray(begin, jnp.int32), x))

        (eqn,) = [
            e for e in jaxprs.walk(jax.make_jaxpr(run)(jnp.ones(3)).eqns) if e.primitive.name == "while"
        ]
        return {body.trips for body in jaxprs.bodies(eqn)}

    both = lambda c: (c[0] < bound) & ~jnp.all(c[1] > 9)  # noqa: E731
    either = lambda c: (c[0] < bound) | jnp.any(c[1] < 9)  # noqa: E731
    assert trips(0, 1, both) == {bound}
    assert trips(1, 1, both) == trips(0, 2, both) == trips(0, 1, either) == {1}
    declared = [lambda c: fdg.expect_trips(either(c), 12), jax.jit(lambda c: fdg.expect_trips(both(c), 12))]
    assert [trips(0, 1, test) for test in declared] == [{12}, {12}]


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("index", range(-1, 4))
def test_all_branches_selects_the_results_of_one(index, x64):
    """With `x64`, Python's numbers are int64, and indices of branches still int32."""
    table = np.arange(3.0)
    branches = [lambda x, y: (x, y), lambda x, y: (y + table, x * y), lambda x, y: (jnp.zeros(3), y)]

    def rule(eqn, inside):
        return jaxprs.all_branches(eqn) if eqn.primitive.name == "cond" else inside(eqn)

    operands = index, table, table + 1
    with jax.enable_x64(x64):
        closed = jax.make_jaxpr(lambda i, x, y: jax.lax.switch(i, branches, x, y))(*operands)
        new = jaxprs.rewrite(closed, rule)
        assert "cond" not in {eqn.primitive.name for eqn in jaxprs.walk(jaxprs.open_jaxpr(new).eqns)}
        for expected, found in zip(
            core.jaxpr_as_fun(closed)(*operands), core.jaxpr_as_fun(new)(*operands), strict=True
        ):
            np.testing.assert_array_equal(expected, found)
