"""Opened iterations: they compute what the jaxpr computes, and are opened just as far as they must be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import fdg
import policies
from fdg import jaxprs
from fdg.fragment import boundary_p
from fdg.placing.regions.opening import open_iteration
from fdg.placing.regions.region import Loop, Operation
from tests.conformance.comparison import leaves, ppo
from tests.user_algorithm import Gardener, Walker


def evaluate(region, values):
    """The outputs of a region, one item after the other: what whatever runs it has to agree with."""
    memory = dict(zip(region.inputs, values, strict=True))
    for item in region.items:
        if isinstance(item, Operation):
            jaxpr = jaxprs.build(item.inputs, item.outputs, [item.eqn])
            results = core.jaxpr_as_fun(jaxpr)(*[memory[v] for v in item.inputs])
            memory.update(zip(item.outputs, results, strict=True))
            continue
        carried = [memory[v] for v in item.starts]
        for _ in range(item.trips):
            carried = evaluate(item.body, [*(memory[v] for v in item.constants), *carried])
        memory.update(zip(item.results, carried, strict=True))
    return [memory[v] for v in region.outputs]


def everyone_alone(graph):
    """Every fragment on a group of its own: all that can be opened is."""
    return {f.name: f.name for f in graph.fragments}


def by_role(graph, **groups):
    return {f.name: groups.get(f.role, "rest") for f in graph.fragments}


def items_of(region):
    for item in region.items:
        yield item
        if isinstance(item, Loop):
            yield from items_of(item.body)


def fragments_of(region):
    return [item.fragments for item in region.items if isinstance(item, Operation) and item.fragments]


def test_an_opened_iteration_computes_the_same():
    algorithm = Gardener(4)
    graph = fdg.trace(algorithm)
    state = jax.tree.leaves(jax.jit(algorithm.init)(jax.random.key(1)))
    expected = jax.jit(core.jaxpr_as_fun(graph.jaxpr))(*state)
    for assignment in (everyone_alone(graph), by_role(graph, environment="a")):
        opened = open_iteration(graph.jaxpr, assignment, "a policy")
        actual = jax.jit(lambda values, region=opened.region: evaluate(region, values))(
            [*state, *opened.constants]
        )
        for path, want in leaves(list(expected)).items():
            have = leaves(actual)[path]
            assert (have.dtype, have.shape) == (want.dtype, want.shape)
            np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "algorithm", [Walker(), Gardener(), ppo("CartPole-v1")], ids=["walker", "gardener", "ppo"]
)
def test_one_group_opens_nothing(algorithm):
    graph = fdg.trace(algorithm)
    opened = open_iteration(graph.jaxpr, by_role(graph), "a policy")
    assert not [item for item in items_of(opened.region) if isinstance(item, Loop)]
    names = [name for found in fragments_of(opened.region) for name in found]
    assert names == [f.name for f in graph.fragments]
    assert {item.group for item in opened.region.items} <= {"rest", None}


def test_a_scan_of_two_groups_is_a_loop():
    """The actor and the environment take turns; the learner, of one group, stays whole."""
    graph = fdg.trace(Walker(16))
    opened = open_iteration(graph.jaxpr, by_role(graph, environment="workers"), "a policy")
    (loop,) = [item for item in opened.region.items if isinstance(item, Loop)]
    assert loop.trips == 6
    assert fragments_of(loop.body) == [("act",), ("step",)]
    assert ("learn", "gradient", "update") in fragments_of(opened.region)
    # The weight, and the keys that each trip takes a row of.
    assert sorted(v.aval.shape for v in loop.constants) == [(3,), (6, 16)]
    # Position, age, alive; positions and rewards, stacked; the trip's number.
    assert [v.aval.str_short(short_dtypes=True) for v in loop.results] == [
        "f32[16,3]", "i32[16]", "bool[16]", "f32[6,16,3]", "f32[6,16]", "i32[]",
    ]  # fmt: skip
    rows = [item.row.aval.shape for item in loop.body.items if item.row is not None]
    assert rows == [(16, 3), (16,)]


def test_an_opened_fragment_leaves_its_code_to_its_group():
    """Central's learner is opened for the update inside it; what it computes around that stays its own."""
    graph = fdg.trace(Walker(16))
    opened = open_iteration(graph.jaxpr, by_role(graph, update="servers"), "a policy")
    assert "learn" not in {
        name for item in items_of(opened.region) if isinstance(item, Operation) for name in item.fragments
    }
    flattened = [item for item in items_of(opened.region) if isinstance(item, Operation)]
    assert not [op for op in flattened if op.eqn.primitive is boundary_p]
    around = {
        op.group for op in flattened if op.eqn.primitive.name in ("transpose", "reshape") and not op.fragments
    }
    assert "rest" in around
    # The borders of what was opened still say where the batch is: positions and scores [T, B].
    assert {(v.aval.shape, axis) for v, axis in opened.declared.items()} >= {((6, 16, 3), 1), ((6, 16), 1)}


def test_names_count_as_in_the_graph():
    """`act` and `act.2`, also where one of the calls is opened and the other is not."""
    graph = fdg.trace(Gardener())
    opened = open_iteration(graph.jaxpr, everyone_alone(graph), "a policy")
    found = [
        name for item in items_of(opened.region) if isinstance(item, Operation) for name in item.fragments
    ]
    around = {f.parent for f in graph.fragments}
    assert sorted(found) == sorted(f.name for f in graph.fragments if f.name not in around)


def test_constants_come_after_the_leaves():
    table = np.linspace(0, 1, 5, dtype=np.float32)

    class Constant:
        def init(self, key):
            return jnp.zeros(5)

        def iterate(self, x):
            x = fdg.fragment("a")(jnp.sin)(x + jnp.asarray(table))
            return fdg.fragment("b")(jnp.cos)(x), {}

    graph = fdg.trace(Constant())
    opened = open_iteration(graph.jaxpr, {"sin": "a", "cos": "b"}, "a policy")
    assert len(opened.region.inputs) == 1 + len(opened.constants)
    for value in opened.constants:
        np.testing.assert_array_equal(value, table)
    expected = np.cos(np.sin(table))
    (actual,) = evaluate(opened.region, [jnp.zeros(5), *map(jnp.asarray, opened.constants)])
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_what_is_carried_has_memory_of_its_own():
    """Results may be written over what they replace, so no two may be one array, and none another's start."""
    graph = fdg.trace(Gardener())
    opened = open_iteration(graph.jaxpr, everyone_alone(graph), "a policy")

    def check(starts, ends):
        assert len(set(ends)) == len(ends)
        return set(ends) & set(starts)

    count = len(graph.state_axes)
    check(opened.region.inputs[:count], opened.region.outputs[:count])
    assert not set(opened.region.outputs[count:]) & {*opened.region.inputs, *opened.region.outputs[:count]}
    for item in items_of(opened.region):
        if isinstance(item, Loop):
            check(item.body.inputs[len(item.constants) :], item.body.outputs)


def test_refusals_name_group_and_fragment():
    class Searcher:
        def init(self, key):
            return jnp.ones(4)

        def iterate(self, x):
            a, b = fdg.fragment("a", name="first")(jnp.sin), fdg.fragment("b", name="second")(jnp.cos)
            return jax.lax.while_loop(lambda x: x[0] > 0.5, lambda x: a(b(x)), x), {}

    graph = fdg.trace(Searcher())
    with pytest.raises(
        fdg.PlanError, match=r"mine places .* one while loop .*'second' on y, 'first' on x.*scan"
    ):
        open_iteration(graph.jaxpr, {"second": "y", "first": "x"}, "mine")


# --- arrays captured inside what is opened ---

TABLE, OTHER = np.linspace(0.5, 1.5, 4, dtype=np.float32), np.linspace(-1.0, 1.0, 4, dtype=np.float32)


class Capturing:
    """Calls with captured arrays, opened inside scans: two deep, and one array captured twice."""

    def init(self, key):
        return jnp.linspace(0.1, 0.4, 4)

    def iterate(self, x):
        act, step = fdg.fragment("a", name="act")(jnp.sin), fdg.fragment("b", name="step")(jnp.cos)

        @jax.jit
        def both(x):
            return step(act(x) * jnp.asarray(TABLE)) + jnp.asarray(OTHER)

        def inner(x, _):
            return both(x), None

        def outer(x, _):
            x = jax.lax.scan(inner, x, None, length=2)[0]
            return both(x), None

        return jax.lax.scan(outer, x, None, length=3)[0], {}


def test_arrays_captured_by_calls_that_are_opened_in_scans():
    """They are inputs of the whole, once each, and constants of every loop on the way."""
    graph = fdg.trace(Capturing())
    opened = open_iteration(graph.jaxpr, everyone_alone(graph), "a policy")
    assert sorted(map(tuple, opened.constants)) == sorted(map(tuple, (TABLE, OTHER)))
    start = Capturing().init(None)
    expected, _ = Capturing().iterate(start)
    (actual,) = evaluate(opened.region, [start, *opened.constants])
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    (outer,) = [item for item in opened.region.items if isinstance(item, Loop)]
    (inner,) = [item for item in outer.body.items if isinstance(item, Loop)]
    assert len(outer.constants) >= len(inner.constants) == 2


def test_a_region_prints_as_its_operations():
    graph = fdg.trace(Capturing())
    text = str(open_iteration(graph.jaxpr, everyone_alone(graph), "a policy"))
    assert "3 trips of (" in text and "2 trips of (" in text and "= act(" in text, text


@dataclasses.dataclass(frozen=True)
class Learning:
    """`update` calls `gradient`, which captures an array, in a scan: under Central it has to be opened."""

    def init(self, key):
        return {"w": jnp.ones(4), "x": jnp.linspace(0.0, 1.0, 8)}

    def iterate(self, state):
        @fdg.fragment("gradient", in_axes=(None, 0), out_axes=None, name="slope")
        def slope(w, x):
            return jnp.mean(x) * w

        @fdg.fragment("update", in_axes=(None, 0), out_axes=None, name="update")
        def update(w, x):
            return w - 0.1 * slope(w * jnp.asarray(TABLE), x)

        @fdg.fragment("environment", name="step")
        def step(x):
            return jnp.cos(x)

        x = step(state["x"])
        w = jax.lax.scan(lambda w, _: (update(w, x), None), state["w"], None, length=2)[0]
        return {"w": w, "x": x}, {"size": jnp.sum(w)}


def test_a_captured_array_under_central_in_a_run(devices):
    engine = fdg.compile(Learning(), policies.Central(), devices[:2])
    state, _ = engine.run(engine.init(0), 2)
    expected = Learning().init(None)
    for _ in range(2):
        expected, _ = Learning().iterate(expected)
    np.testing.assert_allclose(state["w"], expected["w"], rtol=1e-6)
