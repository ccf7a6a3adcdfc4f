"""What was once wrong on a split batch: other numbers, a crash, or an exchange that the plan did not name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fdg
import policies
from fdg.batch import follow as batch_flow
from tests.batch import sweep
from tests.batch.compared import assert_as_predicted, numbers
from tests.batch.draws import DRAWS, WHOLE
from tests.batch.rows import B, F


@pytest.mark.parametrize(
    "name",
    [
        "random.gamma / mapped / unsafe_rbg",
        "split / loop / unsafe_rbg",
        "expm / loop",
        "reduce_and bits / columns",
    ],
)
def test_numbers_and_exchanges(name, devices):
    function, implementation = sweep.program(name)
    x = numbers(B, F)
    if implementation is None:
        assert_as_predicted(lambda x: function(None, x), [0], devices[:4], x)
    else:
        keys = jax.random.split(jax.random.key(3, impl=implementation), B)
        assert_as_predicted(function, [0, 0], devices[:4], keys, x)


# Of which JAX 0.12 makes one operation each.
HIGH_LEVEL_PRIMITIVES = "searchsorted", "searchsorted own", "interp", "unique", "nonzero"


@pytest.mark.parametrize(
    "operation",
    ["conv both per row", "reduce pair", "fft2", "tridiagonal_solve", "solve shared", "custom_root"]
    + ["polynomial", "polynomial of many", "unstack", "qr with pivots", *HIGH_LEVEL_PRIMITIVES],
)
def test_rows_that_each_device_computes_alone(operation, devices):
    """The partitioner would gather, or does not know the operation."""
    function, _ = sweep.program(f"{operation} / mapped")
    assert not assert_as_predicted(lambda x: function(None, x), [0], devices[:2], numbers(B, F))


@pytest.mark.parametrize("name", ["batch dirichlet shape", "batch ball", "batch multinomial"])
def test_draws_for_a_batch_from_one_key(name, devices):
    """Read both whole and split, and in loops of loops whose test reads what they change."""
    assert_as_predicted(WHOLE[name], [None, 0], devices[:4], jax.random.key(3), numbers(B, F))


def shifted(x):
    return jnp.concatenate([jnp.ones((1, *x.shape[1:])), x])


SAME = {
    "slice of a concatenation": lambda x: shifted(x)[1:],
    "reshaped twice": lambda x: x.reshape(4, -1, *x.shape[1:]).reshape(x.shape),
    "negated twice": lambda x: jnp.negative(-shifted(x)[1:]),
    "handed on twice": lambda x: jax.jit(lambda y: jax.jit(lambda _: y)(0.0))(jax.jit(lambda _: x)(0.0)),
    "one of two names": lambda x: jax.jit(lambda _: (x, x))(0.0)[1],
    "by a branch": lambda x: lax.cond(x.sum() > 0, lambda: x, lambda: x),
    "by a loop": lambda x: lax.scan(lambda y, _: (y, None), x, None, 3)[0],
}


@pytest.mark.parametrize("same", SAME.values(), ids=SAME)
def test_what_is_whole_and_then_cut_under_another_name(same, devices):
    """XLA drops what changes nothing, and would give the other reader the cut one."""

    def function(x, y):
        whole = jnp.diff(x, axis=0, prepend=0.5)
        return same(whole) * y, shifted(whole)[:-1]

    assert_as_predicted(function, [0, 0], devices[:4], numbers(B, F), numbers(B, F))
    twice = lambda x: jnp.diff(jnp.diff(x, axis=0, prepend=0.5), axis=0, prepend=0.5)  # noqa: E731
    assert_as_predicted(twice, [0], devices[:4], numbers(B, F))


@pytest.mark.parametrize("same", SAME.values(), ids=SAME)
def test_what_a_fragment_cuts_under_another_name_stays_whole_for_the_state(same, devices):
    @fdg.fragment("learner", in_axes=(0, 0), out_axes=0)
    def weigh(x, y):
        return jnp.tanh(x * y)

    class Carrying:
        def init(self, key):
            return numbers(B, F), numbers(B, F)

        def iterate(self, state):
            whole = jnp.sin(state[0] + 0.2)
            return (whole, weigh(same(whole), state[1])), {}

    engine = fdg.compile(Carrying(), policies.GPUOnly(), devices=devices[:4])
    engine.compile()
    assert engine.state_shape[0].sharding.is_fully_replicated
    assert not engine.unexplained()


def test_a_branch_exchanges_nothing_for_a_result_that_nobody_reads(devices):
    """In a loop XLA keeps such a result, where a branch gives one value twice; the plan does not name it."""

    @fdg.fragment("actor")
    def running(x):
        return lax.map(jnp.sin, x)

    class Switching:
        def init(self, key):
            return jnp.int32(0), numbers(B), numbers(B)

        def iterate(self, state):
            which, x, y = state
            branches = [lambda x, y: (y, running(y)), lambda x, y: (y, x), lambda x, y: (x, x)]
            y, _ = lax.switch(which, branches, x, y)
            return (which, x, y), {}

    engine = fdg.compile(Switching(), policies.GPUOnly(), devices=devices[:4])
    engine.compile(3)
    assert not engine.unexplained()


def test_an_erf_of_an_erf_is_not_gathered(devices):
    def function(x):
        return lax.erf(jnp.sin(lax.erf(x)))

    assert not assert_as_predicted(function, [0], devices[:4], numbers(B, F))


@pytest.mark.parametrize("name", ["random.gamma scalar", "random.dirichlet"])
def test_draws_from_shared_keys_for_readers_of_a_part(name, devices):
    """Each device draws its rows by itself; XLA had them wait for each other's draws to be accepted."""
    rows = numbers(B, F)

    def function(keys, x):
        return x + jnp.reshape(jax.vmap(DRAWS[name])(keys, rows), (B, -1))[:, :1]

    keys = jax.random.split(jax.random.key(3), B)
    assert not assert_as_predicted(function, [None, 0], devices[:4], keys, numbers(B, F))


@pytest.mark.parametrize(
    ("implementation", "operation", "split"),
    [
        ("threefry2x32", "random_bits", True),
        ("rbg", "random_bits", False),
        ("unsafe_rbg", "random_bits", False),
        ("rbg", "random_split", True),
        ("unsafe_rbg", "random_split", False),
        ("rbg", "random_gamma", False),
        ("unsafe_rbg", "random_fold_in", False),
        ("unsafe_rbg", "random_seed", True),
    ],
)
def test_which_draws_stay_split(implementation, operation, split):
    """Of a batch of keys, only what is hashed from each key alone."""
    draw = {
        "random_bits": lambda k: jax.vmap(jax.random.bits)(k),
        "random_split": lambda k: jax.vmap(jax.random.split)(k),
        "random_gamma": lambda k: jax.vmap(lambda k: jax.random.gamma(k, 2.0))(k),
        "random_fold_in": lambda k: jax.vmap(lambda k: jax.random.fold_in(k, 3))(k),
        "random_seed": lambda k: jax.vmap(lambda w: jax.random.key(w[0], impl=implementation))(
            jax.random.key_data(k)
        ),
    }[operation]
    keys = jax.random.split(jax.random.key(0, impl=implementation), B)
    assert batch_flow.axes_of_outputs(jax.make_jaxpr(draw)(keys), [0]) == [0 if split else None]


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Draws for each of its rows from keys of the rows' own, of one implementation."""

    implementation: str

    def init(self, key):
        keys = jax.random.key(jax.random.bits(key) % 1000, impl=self.implementation)
        return jax.random.split(keys, B), jnp.zeros((B, F))

    def iterate(self, state):
        keys, x = drawn(*state)
        return (keys, x), {"mean": jnp.mean(x)}


@fdg.fragment("environment")
def drawn(keys, x):
    def one(key, row):
        key, used, other = jax.random.split(key, 3)
        return key, row + jax.random.normal(used, row.shape) + jax.random.gamma(other, 2.0)

    return jax.vmap(one)(keys, x)


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_seeds_draw_as_single_runs_do(implementation, devices):
    """Mapped over agents, all would draw from the first agent's key."""
    many = fdg.compile(Drawing(implementation), policies.GPUOnly(), devices[:2], num_seeds=4)
    state, metrics = many.run(many.init(3), 2)
    iterate = jax.jit(Drawing(implementation).iterate)
    for agent in range(4):
        alone = Drawing(implementation).init(jax.random.key(3 + agent))
        means = []
        for _ in range(2):
            alone, measured = iterate(alone)
            means.append(measured["mean"])
        np.testing.assert_array_equal(
            jax.random.key_data(state[0][agent]), jax.random.key_data(alone[0]), strict=True
        )
        np.testing.assert_allclose(state[1][agent], alone[1], rtol=1e-6)
        np.testing.assert_allclose(metrics["mean"][:, agent], means, rtol=1e-6)


def test_an_effect_is_never_split_nor_dropped():
    """Whatever its operation's rule says; a loop with one in it does not run on parts."""

    def loop(x):
        def body(row):
            jax.debug.callback(lambda _: None, row.sum())
            return row + 1

        return jax.vmap(lambda row: lax.while_loop(lambda row: row[0] < 3, body, row))(x)

    x = jax.ShapeDtypeStruct((B, F), jnp.float32)
    # An elementwise operation, as if it had an effect: its operands are whole, and so is its result.
    (sine,) = jax.make_jaxpr(jnp.sin)(x).eqns
    (call,) = [
        e for e in jax.make_jaxpr(lambda x: jax.debug.callback(lambda _: None, x))(x).eqns if e.effects
    ]
    marked = sine.replace(effects=call.effects)
    assert batch_flow.equation_axes(sine, [0]) == [0]
    assert batch_flow.equation_axes(marked, [0]) == [None]
    (step,) = batch_flow.follow(jax.make_jaxpr(loop)(x), [0]).equations
    assert not step.local and step.agrees_on_predicate


IN_A_BODY = {
    "jit": lambda f, x: jax.jit(f)(x),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "two deep": lambda f, x: jax.checkpoint(jax.jit(f))(x),
    "cond": lambda f, x: lax.cond(jnp.sum(x) > 0, f, lambda x: f(x + 1), x),
    "scan": lambda f, x: lax.scan(lambda carry, _: (f(carry[0]), None), f(x), length=2)[0],
    "fori": lambda f, x: lax.fori_loop(0, 2, lambda _, carry: f(carry[0]), f(x)),
}  # fmt: skip


@pytest.mark.parametrize("call", IN_A_BODY.values(), ids=IN_A_BODY)
def test_a_whole_value_that_is_cut_outside_of_the_body_that_reads_it(call, devices):
    """XLA would give the body's own reader the part, and so need an exchange that the plan does not name."""

    @fdg.fragment("learner", in_axes=1, out_axes=(1, None))
    def learner(x):
        return call(lambda x: ((whole := jnp.sort(x, axis=1)), jnp.max(whole.astype(jnp.float16), 1)), x)

    class Sorting:
        def init(self, key):
            return numbers(2, B), jnp.zeros(2, jnp.float16)

        def iterate(self, state):
            return learner(state[0]), {}

    engine = fdg.compile(Sorting(), policies.GPUOnly(), devices=devices[:4])
    engine.compile(3)
    assert not engine.unexplained()
