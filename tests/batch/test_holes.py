"""Regressions on a split batch: wrong numbers, crashes, and exchanges that the plan did not predict."""

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
from tests.batch.draws import BATCH_DRAWS, DRAWS
from tests.batch.rows import B, F
from tests.running.order import is_in_order


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


# JAX 0.12 makes one operation of each.
HIGH_LEVEL_PRIMITIVES = "searchsorted", "searchsorted own", "interp", "unique", "nonzero"


@pytest.mark.parametrize(
    "operation",
    ["conv both per row", "reduce pair", "fft2", "tridiagonal_solve", "solve shared", "custom_root"]
    + ["polynomial", "polynomial of many", "unstack", "qr with pivots", *HIGH_LEVEL_PRIMITIVES],
)
def test_operations_without_communication(operation, devices):
    """The partitioner would gather, or does not know the operation."""
    function, _ = sweep.program(f"{operation} / mapped")
    assert not assert_as_predicted(lambda x: function(None, x), [0], devices[:2], numbers(B, F))


@pytest.mark.parametrize("name", ["batch dirichlet shape", "batch ball", "batch multinomial"])
def test_draws_for_a_batch_from_one_key(name, devices):
    """Draws that are read gathered and split, and nested loops whose condition reads their carry."""
    assert_as_predicted(BATCH_DRAWS[name], [None, 0], devices[:4], jax.random.key(3), numbers(B, F))


def shifted(x):
    return jnp.concatenate([jnp.ones((1, *x.shape[1:])), x])


IDENTITIES = {
    "slice of a concatenation": lambda x: shifted(x)[1:],
    "reshaped twice": lambda x: x.reshape(4, -1, *x.shape[1:]).reshape(x.shape),
    "negated twice": lambda x: jnp.negative(-shifted(x)[1:]),
    "through two calls": lambda x: jax.jit(lambda y: jax.jit(lambda _: y)(0.0))(jax.jit(lambda _: x)(0.0)),
    "one of two results": lambda x: jax.jit(lambda _: (x, x))(0.0)[1],
    "through a branch": lambda x: lax.cond(x.sum() > 0, lambda: x, lambda: x),
    "through a loop": lambda x: lax.scan(lambda y, _: (y, None), x, None, 3)[0],
}


@pytest.mark.parametrize("identity", IDENTITIES.values(), ids=IDENTITIES)
def test_gathered_value_that_is_also_split(identity, devices):
    """XLA drops identities, and would give the split value to the reader of the gathered one."""

    def function(x, y):
        gathered = jnp.diff(x, axis=0, prepend=0.5)
        return identity(gathered) * y, shifted(gathered)[:-1]

    assert_as_predicted(function, [0, 0], devices[:4], numbers(B, F), numbers(B, F))
    twice = lambda x: jnp.diff(jnp.diff(x, axis=0, prepend=0.5), axis=0, prepend=0.5)  # noqa: E731
    assert_as_predicted(twice, [0], devices[:4], numbers(B, F))


@pytest.mark.parametrize("identity", IDENTITIES.values(), ids=IDENTITIES)
def test_replicated_state_that_a_fragment_splits(identity, devices):
    @fdg.fragment("learner", in_axes=(0, 0), out_axes=0)
    def weigh(x, y):
        return jnp.tanh(x * y)

    class Carrying:
        def init(self, key):
            return numbers(B, F), numbers(B, F)

        def iterate(self, state):
            replicated = jnp.sin(state[0] + 0.2)
            return (replicated, weigh(identity(replicated), state[1])), {}

    engine = fdg.compile(Carrying(), policies.GPUOnly(), devices=devices[:4])
    engine.compile()
    assert engine.state_shape[0].sharding.is_fully_replicated
    assert not engine.unexplained()


def test_unused_branch_result_is_not_exchanged(devices):
    """In a loop, XLA keeps such a result if a branch returns a value twice; the plan does not predict it."""

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


def test_nested_erf_is_not_gathered(devices):
    def function(x):
        return lax.erf(jnp.sin(lax.erf(x)))

    assert not assert_as_predicted(function, [0], devices[:4], numbers(B, F))


@pytest.mark.parametrize("name", ["random.gamma scalar", "random.dirichlet"])
def test_draws_from_shared_keys_with_split_readers(name, devices):
    """Each device draws only its rows; partitioned by XLA, devices waited for each other's rejections."""
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
    """Of a batch of keys, only draws that are hashed from each key alone."""
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
    assert batch_flow.follow(jax.make_jaxpr(draw)(keys), [0]).outputs == (0 if split else None,)


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Draws for each row from that row's key, of one implementation."""

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
def test_agents_draw_as_single_runs(implementation, devices):
    """With `vmap` over agents, all would draw from the first agent's key."""
    many = fdg.compile(Drawing(implementation), policies.GPUOnly(), devices[:2], num_seeds=4)
    state, metrics = many.run(many.init(3), 2)
    iterate = jax.jit(Drawing(implementation).iterate)
    for agent in range(4):
        reference = Drawing(implementation).init(jax.random.key(3 + agent))
        means = []
        for _ in range(2):
            reference, measured = iterate(reference)
            means.append(measured["mean"])
        np.testing.assert_array_equal(
            jax.random.key_data(state[0][agent]), jax.random.key_data(reference[0]), strict=True
        )
        np.testing.assert_allclose(state[1][agent], reference[1], rtol=1e-6)
        np.testing.assert_allclose(metrics["mean"][:, agent], means, rtol=1e-6)


def test_effects_are_not_split():
    """Whatever the rule of their operation; a loop with an effect does not run on parts of the batch."""

    def loop(x):
        def body(row):
            jax.debug.callback(lambda _: None, row.sum())
            return row + 1

        return jax.vmap(lambda row: lax.while_loop(lambda row: row[0] < 3, body, row))(x)

    x = jax.ShapeDtypeStruct((B, F), jnp.float32)
    # An elementwise operation, as if it had an effect: its operands and its result are not split.
    (sine,) = jax.make_jaxpr(jnp.sin)(x).eqns
    (call,) = [
        e for e in jax.make_jaxpr(lambda x: jax.debug.callback(lambda _: None, x))(x).eqns if e.effects
    ]
    marked = sine.replace(effects=call.effects)
    assert batch_flow.equation_axes(sine, [0], B) == [0]
    assert batch_flow.equation_axes(marked, [0], B) == [None]
    (step,) = batch_flow.follow(jax.make_jaxpr(loop)(x), [0]).equations
    assert not step.local and step.agrees_on_predicate


@pytest.mark.parametrize("num_devices", [1, 4])
def test_function_without_results(num_devices, devices, capfd):
    @jax.jit
    def log(x):
        jax.debug.print("sum {}", jnp.sum(x))

    @fdg.fragment("learner", in_axes=0)
    def learner(x):
        log(x)
        return x + 1

    class Logging:
        def init(self, key):
            return jnp.arange(8.0)

        def iterate(self, x):
            return learner(x), {}

    engine = fdg.compile(Logging(), policies.GPUOnly(), devices=devices[:num_devices])
    state, _ = engine.run(engine.init(0), 2)
    jax.effects_barrier()
    np.testing.assert_array_equal(state, np.arange(8) + 2)
    assert capfd.readouterr().out == "sum 28.0\nsum 36.0\n"


IN_A_BODY = {
    "jit": lambda f, x: jax.jit(f)(x),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "two deep": lambda f, x: jax.checkpoint(jax.jit(f))(x),
    "cond": lambda f, x: lax.cond(jnp.sum(x) > 0, f, lambda x: f(x + 1), x),
    "scan": lambda f, x: lax.scan(lambda carry, _: (f(carry[0]), None), f(x), length=2)[0],
    "fori": lambda f, x: lax.fori_loop(0, 2, lambda _, carry: f(carry[0]), f(x)),
}  # fmt: skip


@pytest.mark.parametrize("call", IN_A_BODY.values(), ids=IN_A_BODY)
def test_gathered_value_in_a_body_that_is_split_outside(call, devices):
    """XLA would give the split value to the reader in the body: an exchange that is not in the plan."""

    @fdg.fragment("learner", in_axes=1, out_axes=(1, None))
    def learner(x):
        return call(lambda x: ((full := jnp.sort(x, axis=1)), jnp.max(full.astype(jnp.float16), 1)), x)

    class Sorting:
        def init(self, key):
            return numbers(2, B), jnp.zeros(2, jnp.float16)

        def iterate(self, state):
            return learner(state[0]), {}

    engine = fdg.compile(Sorting(), policies.GPUOnly(), devices=devices[:4])
    engine.compile(3)
    assert not engine.unexplained()


def assert_splits(function, arguments, devices, out_axes=None):
    """Checks that a fragment of a batch gives the numbers of one device on two."""
    fragment = fdg.fragment("learner", in_axes=0, out_axes=out_axes, name="work")(function)

    class Working:
        def init(self, key):
            return arguments, jax.tree.map(jnp.zeros_like, jax.eval_shape(function, *arguments))

        def iterate(self, state):
            return (state[0], fragment(*state[0])), {}

    engine = fdg.compile(Working(), policies.GPUOnly(), devices[:2])
    (_, results), _ = engine.run(engine.init(0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), results, function(*arguments))
    assert not engine.unexplained()
    assert is_in_order(engine)


def test_products_of_booleans(devices):
    assert_splits(lambda x: (x > 0).T @ (x > 1), [numbers(B, F)], devices)


def test_mutable_arrays(devices):
    """`jax.new_ref` in loops with collectives, which are ordered, and read by a result that is split."""

    def function(x):
        memory, total = jax.new_ref(x), jax.new_ref(jnp.zeros(()))

        def trip(_, row):
            memory[1] = row
            total[...] += jnp.sum(jnp.sort(x, axis=0) * memory[...])
            return None, memory[0] + jnp.mean(x) * row

        _, rows = lax.scan(trip, None, jnp.ones((3, F)))
        _, more = lax.scan(trip, None, jnp.ones((3, F)))
        return x * rows[:1], memory[...] + more[:1] + total[...]

    assert_splits(function, [numbers(B, F)], devices, out_axes=0)


def test_key_data_with_the_length_of_the_batch(devices):
    """The axis of an old-style key, uint32[2], becomes part of the key."""
    data = jnp.arange(2, dtype=jnp.uint32)
    assert_splits(lambda data: jax.random.key_data(jax.random.wrap_key_data(data)), [data], devices)
