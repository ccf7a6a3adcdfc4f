"""`fdg.fragment`: execution outside an engine, JAX transformations, batch axes, errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from fdg.fragment import FragmentMark, boundary_p
from tests.refusing import refuses


@fdg.fragment("actor", in_axes=(None, 0))
def scale(weight, x):
    return jnp.tanh(weight * x)


def marks(function, *arguments):
    """(role, name, batch axes) of all fragment calls in a function's jaxpr, nested ones included."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            mark = FragmentMark.of(eqn)
            if mark:
                inside = eqn.params["jaxpr"].jaxpr
                axes = [e.params["axis"] for e in inside.eqns if e.primitive is boundary_p]
                found.append((mark.role, mark.name, axes))
            for inner in jaxprs_of(eqn):
                walk(inner)

    walk(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found


def jaxprs_of(eqn):
    values = [v for value in eqn.params.values() for v in (value if isinstance(value, tuple) else (value,))]
    return [getattr(v, "jaxpr", v) for v in values if hasattr(v, "eqns") or hasattr(v, "jaxpr")]


X = jnp.arange(4.0)


def test_runs_outside_engine():
    np.testing.assert_allclose(scale(2.0, X), np.tanh(2.0 * np.arange(4.0)), rtol=1e-6)


def test_jit_scan_and_nesting():
    @fdg.fragment("learner", in_axes=(None, 0))
    def outer(weight, x):
        return jax.lax.scan(lambda c, _: (scale(weight, c), None), x, None, length=3)[0]

    assert marks(jax.jit(outer), 2.0, X) == [
        ("learner", "outer", [None, 0, 0]),
        ("actor", "scale", [None, 0, 0]),
    ]


def test_vmap_moves_batch_axis():
    """vmap over a new leading axis moves batch axis 0 to 1."""
    mapped = jax.vmap(scale, in_axes=(None, 0))
    assert marks(mapped, 2.0, jnp.ones((5, 4))) == [("actor", "scale", [None, 1, 1])]
    behind = jax.vmap(scale, in_axes=(None, 1), out_axes=1)
    assert marks(behind, 2.0, jnp.ones((4, 5))) == [("actor", "scale", [None, 0, 0])]
    np.testing.assert_allclose(mapped(2.0, jnp.ones((5, 4))), jnp.tanh(jnp.full((5, 4), 2.0)), rtol=1e-6)


def test_backward_pass_is_same_fragment():
    def loss(weight, x):
        return jnp.sum(scale(weight, x))

    np.testing.assert_allclose(jax.grad(loss)(0.5, X), jnp.sum(X * (1 - jnp.tanh(0.5 * X) ** 2)), rtol=1e-5)
    names = {(role, name) for role, name, _ in marks(jax.grad(loss), 0.5, X)}
    assert names == {("actor", "scale")}
    backward = marks(jax.grad(loss), 0.5, X)[-1]
    assert backward[2] == [0, None]  # the input cotangent is split, the weight's gradient is not


def test_keys_integers_and_booleans():
    @fdg.fragment("environment")
    def mixed(keys, count, flag):
        return keys, count + 1, ~flag

    keys = jax.random.split(jax.random.key(0), 3)
    out = mixed(keys, jnp.arange(3), jnp.zeros(3, bool))
    assert jnp.all(jax.random.key_data(out[0]) == jax.random.key_data(keys))
    assert out[1].dtype == jnp.int32 and out[2].dtype == jnp.bool_


def test_in_axes_of_method_exclude_self():
    @dataclasses.dataclass(frozen=True)
    class Scaler:
        factor: float

        @fdg.fragment("actor", in_axes=(0, None), out_axes=0)
        def apply(self, x, offset):
            return self.factor * x + offset

    assert Scaler(2.0).apply(X, 1.0).tolist() == [1.0, 3.0, 5.0, 7.0]
    assert Scaler(3.0).apply(X, 1.0).tolist() == [1.0, 4.0, 7.0, 10.0]


def test_method_of_unhashable_object():
    @dataclasses.dataclass
    class Mutable:
        factor: float

        @fdg.fragment("actor")
        def apply(self, x):
            return self.factor * x

    with pytest.raises(fdg.GraphError, match=r"'apply' \(actor\).*Mutable.*frozen=True"):
        Mutable(2.0).apply(X)


def test_axes_are_pytree_prefixes():
    @fdg.fragment("learner", in_axes=({"shared": None, "split": 1},), out_axes=(1, None))
    def prefixed(tree):
        return tree["split"], tree["shared"]

    tree = {"shared": {"a": X, "none": None}, "split": (jnp.ones((2, 3)), jnp.ones((4, 3)))}
    assert marks(prefixed, tree) == [("learner", "prefixed", [None, 1, 1, 1, 1, None])]


def test_keyword_arguments_use_axis_0():
    @fdg.fragment("actor", in_axes=None)
    def keyword(weight, *, x):
        return weight * x

    assert marks(lambda w, x: keyword(w, x=x), 2.0, X) == [("actor", "keyword", [None, 0, 0])]


def assert_refused(in_axes, out_axes, arguments, *words, result=lambda *a: a[-1]):
    wrong = fdg.fragment("actor", in_axes, out_axes, name="wrong")(result)
    with refuses(*("'wrong' (actor)", *words), kind=fdg.GraphError):
        wrong(*arguments)


def test_invalid_axes():
    assert_refused(1, 0, (X,), "in[0]", "batch axis 1", "shape (4,)", "use an axis below 1")
    assert_refused((0, 0), 0, (X,), "names 2 arguments", "called with 1", "give one axis")
    assert_refused((0, 0), 0, (X, jnp.ones(5)), "differ in size", "in[0]: 4", "in[1]: 5", "set in_axes")
    assert_refused(0, 1, (X,), "out", "batch axis 1")
    assert_refused("0", 0, (X,), "axis '0'", "use an integer")
    assert_refused(({"a": 0},), 0, (X,), "not a pytree prefix", "give one axis")
    assert_refused(0, 0, (X,), "differ in size", "out: 2", result=lambda x: x[:2])


@pytest.mark.parametrize("word", ["actor:critic", "", "two\nlines", "\x1b[31mred"])
def test_invalid_role(word):
    with pytest.raises(fdg.GraphError, match="words without ':'"):
        fdg.fragment(word)(lambda x: x)


@pytest.mark.parametrize("value", ["3", 3, max, dict])
def test_non_functions_are_refused(value):
    with pytest.raises(fdg.GraphError, match="it has no signature: give a function"):
        fdg.fragment("actor")(value)


class Growing:
    """An algorithm whose rate may change between two traces."""

    def __init__(self, rate):
        self.rate = rate

    def init(self, key):
        return jnp.zeros(4)

    @fdg.fragment("learner")
    def learn(self, x):
        return x + self.rate

    def iterate(self, x):
        x = self.learn(x)
        return x, {"sum": x.sum()}


def test_changed_attributes_are_traced_again():
    algorithm = Growing(1.0)
    sums = []
    for algorithm.rate in (1.0, 2.0):
        engine = fdg.compile(algorithm, policies.GPUOnly(), devices=1)
        sums.append(float(engine.run(engine.init(seed=0), iterations=1)[1]["sum"][0]))
    assert sums == [4.0, 8.0]


def test_fields_without_comparison_are_distinguished():
    @dataclasses.dataclass(frozen=True)
    class Part:
        table: np.ndarray = dataclasses.field(compare=False)

    @dataclasses.dataclass(frozen=True)
    class Whole:
        part: Part

        @fdg.fragment("actor")
        def act(self, x):
            return x + self.part.table

    one, two = (Whole(Part(np.full(4, number))) for number in (1.0, 2.0))
    assert one == two
    np.testing.assert_array_equal(one.act(X), X + 1)
    np.testing.assert_array_equal(two.act(X), X + 2)
