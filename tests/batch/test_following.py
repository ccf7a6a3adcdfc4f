"""Following the batch axis: single operations by hand, and programs against their HLO."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fdg
import policies
from fdg.batch import follow as batch_flow
from fdg.batch.collective import Collective, unexplained
from fdg.batch.exchanges import WithoutRule, predict_exchanges
from fdg.running import hlo
from tests.batch.compared import assert_as_predicted, compiled, numbers, totals

# ruff: noqa: E501
B, F = 16, 6
X = jax.ShapeDtypeStruct((B, F), jnp.float32)
lax = jax.lax


def row_of(x):
    """Integers 0..7 of `x`, as indices."""
    return x.astype(jnp.int32) % 8


@fdg.fragment("learner")
def flip(x):
    return x[::-1] * x


@fdg.fragment("learner", in_axes=0, out_axes=1)
def turn(x):  # [B, B]: its border declares the result split along the other axis
    return x


# (function of x [B, F] and more, their shapes, [(kind, bytes, calls)]), with x split along axis 0.
REDUCE, GATHER, FULL = "all-reduce", "all-gather", 4 * B * F
CASES = {
    # The batch axis is kept.
    "elementwise": (jnp.tanh, [], []),
    "sum over features": (lambda x: x.sum(1), [], []),
    "dense layer": (lambda x, w: x @ w, [(F, 5)], []),
    "outer product": (lambda x: jnp.einsum("bf,bg->bfg", x, x), [], []),
    "flat and back": (lambda x: x.reshape(B * F).reshape(B, F).sum(1), [], []),
    "slice of features": (lambda x: x[:, 1:3], [], []),
    "sort of features": (lambda x: jnp.sort(x, 1), [], []),
    "cumsum of features": (lambda x: jnp.cumsum(x, 1), [], []),
    "set a column": (lambda x: x.at[:, 3].set(0.0), [], []),
    "pick per row": (lambda x: jnp.take_along_axis(x, jnp.argmax(x, 1)[:, None], 1), [], []),
    "gradient of pick per row": (lambda x: jax.grad(lambda x: jnp.take_along_axis(x, jnp.argmax(x, 1)[:, None], 1).sum())(x), [], []),
    "look-up in a table": (lambda x, w: w[row_of(x[:, 0])], [(8, 5)], []),
    "solve per row": (lambda x: jnp.linalg.solve(x[:, :, None] * x[:, None] + 9 * jnp.eye(F)[None], x[..., None]), [], []),
    "elements that loop inside": (lambda x: jax.scipy.special.gammainc(jnp.abs(x) + 1, jnp.abs(x)), [], []),
    "top k per row": (lambda x: lax.top_k(x, 2), [], []),
    "shared operands in the middle": (lambda x, a, b: x + jnp.concatenate([a, b]), [(B // 2, F)] * 2, []),
    "unused result": (lambda x: (x.sum(0), x)[1], [], []),
    # The batch axis is reduced.
    "sum": (lambda x: x.sum(0), [], [(REDUCE, 4 * F, 1)]),
    "max of sums": (lambda x: x.sum(1).max(), [], [(REDUCE, 4, 1)]),
    "any": (lambda x: jnp.any(x > 0, 0), [], [(REDUCE, F, 1)]),
    "mean, then standard deviation": (lambda x: x / x.std(0, keepdims=True), [], [(REDUCE, 4 * F * 2, 1)]),
    "contraction": (lambda x, y: x.T @ y, [(B, 5)], [(REDUCE, 4 * F * 5, 1)]),
    "gradient of a look-up": (lambda x, w: jax.grad(lambda w: (w[row_of(x[:, 0])] ** 2).sum())(w), [(8, 5)], [(REDUCE, 4 * 8 * 5, 1)]),
    "rows by shared indices": (lambda x, i: x[row_of(i)], [(4,)], [(REDUCE, 4 * 4 * F, 1)]),
    "one sum per trip": (lambda x: lax.scan(lambda c, _: (c * 0.9, c.sum(0)), x, None, length=7), [], [(REDUCE, 4 * F, 7)]),
    "the same sum in each trip": (lambda x: lax.scan(lambda c, _: (c * x.sum(0), None), jnp.ones(F), None, length=7), [], [(REDUCE, 4 * F, 1)]),
    "a carried value that becomes split": (lambda x: lax.scan(lambda c, _: (c + x, c.sum()), jnp.zeros((B, F)), None, length=7), [], [(REDUCE, 4, 7)]),
    "a stack of trips": (lambda x: lax.scan(lambda c, _: (c + 1, c), x, None, length=7)[1].sum(1), [], [(REDUCE, 4 * 7 * F, 1)]),
    # The batch is gathered.
    "slice": (lambda x: x[:8], [], [(GATHER, FULL, 1)]),
    "slice at a position": (lambda x, i: lax.dynamic_slice_in_dim(x, row_of(i)[0], 4), [(1,)], [(GATHER, FULL, 1)]),
    "update of a slice": (lambda x, u: lax.dynamic_update_slice_in_dim(x, u, 3, 0), [(2, F)], [(GATHER, FULL, 1)]),
    "concatenate": (lambda x: jnp.concatenate([x, x * 2]), [], [(GATHER, 2 * FULL, 1)]),
    "pad": (lambda x: jnp.pad(x, ((1, 1), (0, 0))), [], [(GATHER, FULL, 1)]),
    "flip": (lambda x: x[::-1] - x, [], [(GATHER, FULL, 1)]),
    "sort": (lambda x: jnp.sort(x, 0), [], [(GATHER, FULL, 1)]),
    "cumsum": (lambda x: jnp.cumsum(x, 0), [], [(GATHER, FULL, 1)]),
    "argmax": (lambda x: jnp.argmax(x, 0), [], [(GATHER, FULL, 1)]),
    "merged as the fast axis": (lambda x: x.T.reshape(-1), [], [(GATHER, FULL, 1)]),
    "split finer than by devices": (lambda x: x.reshape(4, 4, F).sum(1), [], [(GATHER, FULL, 1)]),
    "all pairs": (lambda x: x @ x.T, [], [(GATHER, FULL, 1)]),
    "rows by split indices": (lambda x: x[row_of(x[:, 0])], [], [(GATHER, FULL, 1)]),
    "two slices of one gather": (lambda x: x[:8] + x[8:], [], [(GATHER, FULL, 1)]),
    "gathered and summed": (lambda x: (jnp.tanh(x)[::-1], jnp.tanh(x).sum(0)), [], [(GATHER, FULL, 1), (REDUCE, 4 * F, 1)]),
    "an erf, which XLA would gather": (lambda x: (x[::-1], jnp.mean(0.5 * lax.erf(x) + 0.3)), [], [(GATHER, FULL, 1), (REDUCE, 4, 1)]),
    "roll and mean per trip": (lambda x: lax.scan(lambda c, _: (jnp.roll(c, 1, 0), c.mean()), x, None, length=5), [], [(GATHER, FULL, 5), (REDUCE, 4, 5)]),
    "scan over the batch": (lambda x: lax.scan(lambda c, r: (c + r, r), jnp.zeros(F), x), [], [(GATHER, FULL, 1)]),
    "in a branch": (lambda x, i: lax.cond(i[0] > 0, lambda x: x[::-1], lambda x: x * 2, x), [(1,)], [(GATHER, FULL, 1)]),
    "an unknown operation": (lambda x: lax.ragged_dot(x, jnp.ones((1, F, 2)), jnp.array([B])), [], [(GATHER, FULL, 1)]),
    # Loops while any row continues, on which devices agree before each trip (counted once).
    "while any": (lambda x: lax.while_loop(lambda c: jnp.any(c < 1), lambda c: jnp.where(c < 1, c + 1, c), x), [], [(REDUCE, 1, 1)]),
    "rows that depend on others": (lambda x: jax.vmap(lambda v: lax.while_loop(lambda c: c < 3, lambda c: c + 1 + 0 * x.mean(), v))(x[:, 0]), [], [(REDUCE, 4 + 1, 1)]),
}  # fmt: skip
AGAINST_HLO = [
    "solve per row", "elements that loop inside", "top k per row", "shared operands in the middle", "any",
    "mean, then standard deviation", "gradient of a look-up", "rows by shared indices", "one sum per trip",
    "the same sum in each trip", "a carried value that becomes split", "slice", "update of a slice", "concatenate",
    "flip", "split finer than by devices", "rows by split indices", "two slices of one gather",
    "gathered and summed", "roll and mean per trip", "scan over the batch", "in a branch", "while any",
    "rows that depend on others", "an erf, which XLA would gather",
]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_operation(name):
    function, shapes, expected = CASES[name]
    others = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    axes = [0, 0] if name == "contraction" else [0]
    found, _ = predict_exchanges(jax.make_jaxpr(function)(X, *others), axes)
    assert [(c.kind, c.bytes, c.calls) for c in found] == expected


@pytest.mark.parametrize("name", AGAINST_HLO)
def test_one_operation_against_hlo(name, devices):
    function, shapes, _ = CASES[name]
    count = (2, 4, 8)[AGAINST_HLO.index(name) % 3]
    assert_as_predicted(function, [0], devices[:count], numbers(B, F), *(numbers(*s) for s in shapes))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_fragments_and_code_between_them(count, devices):
    """Exchanges name the innermost fragment; a border along another axis is crossed by a gather."""

    def program(x, square):
        return flip(x)[:4], jnp.mean(flip(x)), turn(square)

    x, square = numbers(B, F), numbers(B, B)
    jaxpr = jax.make_jaxpr(program)(x, square)
    assert predict_exchanges(jaxpr, [0, 0])[0] == (
        Collective("all-gather", 2 * FULL, 1, ("flip",)),
        Collective("all-gather", FULL, 1),
        Collective("all-reduce", 4, 1),
        Collective("all-gather", 4 * B * B, 1, ("turn",)),
    )
    assert batch_flow.follow(jaxpr, [0, 0]).outputs == (None, None, 1)
    measured = assert_as_predicted(program, [0, 0], devices[:count], x, square)
    unnamed = [Collective("all-gather", 1, 1, ("other",)), Collective("all-reduce", 4, 1)]
    assert {c.kind for c in unexplained(measured, unnamed)} == {"all-gather"}


def test_sharding_of_shared_keys(devices):
    """Keys that are only read per row are created split; of other keys, devices take their part."""

    def split_only(key, x):
        keys = jax.random.split(key, (5, 2, B))
        return lax.scan(lambda c, k: (flip(c) + jax.vmap(jax.random.normal)(k[0])[:, None], None), x, keys)[0]

    def both(key, x):
        keys = jax.random.split(key, B)
        return x + jax.vmap(jax.random.normal)(keys)[:, None], jax.random.normal(keys[3])

    key, x = jax.random.key(0), numbers(B, F)
    assert_as_predicted(both, [None, 0], devices[:4], key, x)
    assert_as_predicted(split_only, [None, 0], devices[:4], key, x)
    flow = batch_flow.follow(jax.make_jaxpr(split_only)(key, x), [None, 0])
    split_step = next(step for step in flow.equations if step.eqn.primitive.name == "random_split")
    assert split_step.results == (2,)


# --- loops with a number of trips for each row ---


@fdg.fragment("environment")
def reject(keys, x):
    """Draws for each row until a draw is large enough; rows count their draws."""

    def one(key, row):
        def body(carry):
            key, _, draws = carry
            key, used = jax.random.split(key)
            return key, jax.random.normal(used) + row[0], draws + 1

        return lax.while_loop(lambda carry: carry[1] < 1.0, body, (key, -jnp.inf, 0))

    keys, value, draws = jax.vmap(one)(keys, x)
    return keys, x + value[:, None] * jnp.arange(float(B))[:, None], draws


@fdg.fragment("environment")
def nested(keys, x):
    """A loop with loops, scans and branches inside."""

    def one(key, row):
        def body(carry):
            a, b = carry
            inner = lax.while_loop(lambda t: t[0] < a, lambda t: (t[0] + 0.3, t[1] + 1), (0.0, 0))
            b, rows = lax.scan(lambda c, r: (c + r, c * r), b, jnp.arange(3.0))
            a = lax.cond(b > 2, lambda a: a + 1.0, lambda a: a + 2.0, a)
            return a + 0.1 * inner[1], b + rows.sum() + row[jnp.argmax(row)]

        return lax.while_loop(lambda carry: carry[0] < 5, body, (row[0], row[1]))

    return jax.vmap(one)(keys, x)


@pytest.mark.parametrize(("body", "count"), [(reject, 4), (nested, 4)])
def test_independent_rows_loop_without_communication(body, count, devices):
    """GSPMD would all-reduce the predicate in every trip."""
    keys = jax.random.split(jax.random.key(1), B)
    assert not assert_as_predicted(body, [0, 0], devices[:count], keys, numbers(B, F))


def test_loop_with_a_shared_counter_keeps_its_predicate(devices):
    """Devices that stopped early would count fewer trips."""

    def body(x):
        return lax.while_loop(lambda c: jnp.any(c[0] < 3), lambda c: (c[0] + 1, c[1] + 1), (x[:, 0], 0))

    measured = assert_as_predicted(body, [0], devices[:4], numbers(B, F))
    assert [(c.kind, c.bytes) for c in measured] == [("all-reduce", 1)]


def test_shared_numbers_of_trips(devices):
    """Only the carry is split: numbers of trips are shared, and each device takes its part of them."""

    def body(x, trips):
        def one(row, n):
            return lax.while_loop(lambda c: c[1] < n, lambda c: (jnp.sin(c[0]), c[1] + 1), (row, 0.0))[0]

        return jax.vmap(one)(x, trips)

    assert not assert_as_predicted(body, [0, None], devices[:4], numbers(B, F), jnp.arange(float(B)) % 3)


# --- random programs ---

PIECES = {
    "tanh": lambda a, b, axis: jnp.tanh(a),
    "slice": lambda a, b, axis: lax.slice_in_dim(a, 0, max(a.shape[axis] // 2, 1), axis=axis),
    "roll": lambda a, b, axis: jnp.roll(a, 1, axis),
    "sum": lambda a, b, axis: jnp.sum(a, axis),
    "center": lambda a, b, axis: a - jnp.mean(a, axis, keepdims=True),
    "transpose": lambda a, b, axis: a.T,
    "flat": lambda a, b, axis: a.reshape(-1),
    "concatenate": lambda a, b, axis: jnp.concatenate([a, 2 * a], axis),
    "cumsum": lambda a, b, axis: jnp.cumsum(a, axis),
    "add": lambda a, b, axis: a + b if a.shape == b.shape else a * jnp.sum(b),
    "square": lambda a, b, axis: jnp.tanh(a.T @ a) if a.ndim > 1 else a * a.sum(),
    "iota": lambda a, b, axis: a + lax.broadcasted_iota(jnp.float32, a.shape, axis),
    "scan": lambda a, b, axis: lax.scan(
        lambda c, _: (jnp.tanh(c) + a, c.sum(axis)), a, None, length=3
    )[0],
    "rows": lambda a, b, axis: lax.scan(lambda c, r: (c + r, c * r.sum()), jnp.zeros_like(a[0]), a)[1],
    "branch": lambda a, b, axis: lax.cond(
        jnp.sum(b) > 0, lambda a: jnp.flip(a, axis), lambda a: a * 2, a
    ),
}  # fmt: skip


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    pieces=st.lists(
        st.tuples(st.sampled_from(sorted(PIECES)), *[st.integers(0, 9)] * 3), min_size=2, max_size=6
    ),
    differentiated=st.booleans(),
)
def test_any_program_exchanges_what_is_predicted(pieces, differentiated):
    def program(x, y, w):
        values = [x, y, w]
        for name, first, second, axis in pieces:
            a, b = values[-1 - first % len(values)], values[-1 - second % len(values)]
            values.append(PIECES[name](a, b, axis % a.ndim) if a.ndim else a + b.sum())
        return values[-2:]

    def gradient(*arguments):
        return jax.grad(lambda *a: sum(jnp.sum(v**2) for v in program(*a)), (0, 1, 2))(*arguments)

    shapes = ((8, 3), (3, 8), (8, 3))
    arguments = [0.3 * numbers(*shape) for shape in shapes]
    function = gradient if differentiated else program
    jaxpr, compiled_, _ = compiled(function, [0, 1, None], jax.devices("cpu")[:4], *arguments)
    predicted, _ = predict_exchanges(jaxpr, [0, 1, None])
    measured = hlo.read_collectives(compiled_.as_text())
    assert totals(measured) == totals(predicted)
    assert not unexplained(measured, predicted)


# --- algorithms ---


@dataclasses.dataclass(frozen=True)
class Rejection:
    """A user's environment that loops for each row, under an actor and a learner."""

    def init(self, key):
        keys, start = jax.random.split(key)
        return jnp.zeros(F), jax.random.split(keys, B), jax.random.normal(start, (B, F))

    def iterate(self, state):
        weight, keys, x = state
        act = fdg.fragment("actor", in_axes=(None, 0))(_act)

        def one(carry, _):
            keys, x, draws = reject(carry[0], act(weight, carry[1]))
            return (keys, jnp.tanh(x)), draws

        (keys, x), draws = lax.scan(one, (keys, x), None, length=3)
        return (weight + 0.1 * jnp.mean(x, 0), keys, x), {"draws": jnp.sum(draws).astype(jnp.float32)}


def _act(weight, x):
    return x * (1 + weight[None])


def test_environment_with_loops_matches_one_device(devices):
    one, many = (fdg.compile(Rejection(), policies.GPUOnly(), devices[:n]) for n in (1, 8))
    expected, actual = (engine.run(engine.init(0), 2) for engine in (one, many))
    np.testing.assert_allclose(actual[0][0], expected[0][0], atol=1e-6)
    np.testing.assert_array_equal(jax.random.key_data(actual[0][1]), jax.random.key_data(expected[0][1]))
    np.testing.assert_array_equal(actual[1]["draws"], expected[1]["draws"])
    assert not [c for c in many.programs[0].collectives() if c.fragments]


# --- operations without a rule ---


def test_operations_without_a_rule_are_listed():
    """By name, fragment, bytes gathered and calls; not those whose rule requires a gather."""

    @fdg.fragment("learner")
    def ragged(x):
        return lax.ragged_dot(x, jnp.ones((1, F, 2)), jnp.array([B]))

    def program(x):
        rows, _ = lax.scan(lambda c, _: (c + ragged(c).sum(1, keepdims=True), None), x, None, length=3)
        lax.ragged_dot(x, jnp.ones((1, F, 5)), jnp.array([B]))  # unused
        wide = lax.ragged_dot(x, jnp.ones((1, F, 4)), jnp.array([B]))
        return rows, jnp.sort(x, 0), jnp.fft.fft(x, axis=1), wide

    jaxpr = jax.make_jaxpr(program)(X)
    assert predict_exchanges(jaxpr, [0])[1] == (
        WithoutRule("ragged_dot_general", "ragged", FULL, 3),
        WithoutRule("ragged_dot_general", None, FULL, 1),
    )


RULED = {
    "fourier": (lambda x: jnp.fft.rfft(x, axis=1), [0]),
    "tile": (lambda x: jnp.tile(x, (1, 3)), [0]),
    "tile along the batch": (lambda x: jnp.tile(x, (2, 1)), [None]),
    "bits of a wider type": (lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint8), jnp.int32), [0]),
    "a reduction by a function": (lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a * 0.5 + b, (1,)), [0]),
    "a reduction by a function over the batch": (lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a * 0.5 + b, (0,)), [None]),
    "bitwise": (lambda x: lax.reduce_xor_p.bind(x.astype(jnp.int32), axes=(1,)), [0]),
    "approximate top k": (lambda x: lax.approx_max_k(x, 2), [0, 0]),
    "right-hand sides": (lambda x: jax.scipy.linalg.solve_triangular(jnp.eye(F), x.T), [1]),
    "tridiagonal": (lambda x: lax.linalg.tridiagonal_solve(x, x + 3, x, x[:, :, None]), [0]),
    "eigenvalues": (lambda x: jnp.linalg.eigvals(x[:, :, None] * x[:, None]), [0]),
    "transposed and merged": (lambda x: lax.reshape(x, (F * B,), (0, 1)), [0]),
    "transposed, merged as the fast axis": (lambda x: lax.reshape(x, (F * B,), (1, 0)), [None]),
}  # fmt: skip


@pytest.mark.parametrize("name", RULED)
def test_axes_by_rule(name):
    function, expected = RULED[name]
    jaxpr = jax.make_jaxpr(function)(X)
    assert list(batch_flow.follow(jaxpr, [0]).outputs) == expected
    assert predict_exchanges(jaxpr, [0])[1] == ()


@pytest.mark.parametrize("of_kernel", [False, True])
def test_convolution_with_a_split_operand(of_kernel):
    """Images stay split; a kernel split by output features splits features; input features are reduced."""
    images = jax.ShapeDtypeStruct((8, 5, 5, 4), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 4, 16), jnp.float32)
    layout = ("NHWC", "HWIO", "NHWC")
    convolve = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout)  # noqa: E731
    jaxpr = jax.make_jaxpr(convolve)(images, kernel)

    def steps(axes):
        (step,) = batch_flow.follow(jaxpr, axes, 4).equations
        return step.results, step.gathered, step.reduced

    if of_kernel:
        assert steps((None, 3)) == ((3,), (), False)
        assert steps((None, 2)) == ((None,), (), True)
    else:
        assert steps((0, None)) == ((0,), (), False)
        assert steps((3, None)) == ((None,), (), True)


@fdg.fragment("learner", in_axes=(0, None, None))
def two_layers(x, w, v):
    return fdg.rowwise(lambda h, v: h @ v, (0, None))(jnp.tanh(x @ w), v)


def steps_of(flow):
    """The operations of a flow at any depth, without borders."""
    for step in flow.equations:
        if step.bodies:
            for body in step.bodies:
                yield from steps_of(body)
        elif step.eqn.primitive.name != "fragment_boundary":
            yield step


@pytest.mark.parametrize("axis_of_x", [None, 1])
def test_axes_of_parameters_pass_borders_and_rowwise_calls(axis_of_x):
    """w [F, 8] is split by columns and v [8, 5] by rows: hidden units are split, and the last product is a sum.

    If the features of x are split too, x is gathered for the first product, not w.
    """
    shapes = [X, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((F, 8), (8, 5)))]
    jaxpr = jax.make_jaxpr(two_layers)(*shapes)
    flow = batch_flow.follow(jaxpr, (axis_of_x, 1, 0), 2, borders=False)
    first, tanh, last = steps_of(flow)
    assert (first.results, first.reduced, tanh.results) == ((1,), False, (1,))
    assert first.operands == (None, 1) and last.operands == (1, 0)
    assert last.results == (None,) and last.reduced
