"""The dataflow graph: results of `trace`."""

import jax
import jax.numpy as jnp
import pytest

import fdg
import policies
from fdg import jaxprs
from fdg.fragment import FragmentMark
from fdg.tracing.trace import name_fragments
from tests.refusing import refuses
from tests.user_algorithm import FEATURES, B, T, Walker


@pytest.fixture(scope="module")
def walker():
    return fdg.trace(Walker())


def edges(graph, source, target):
    return [e for e in graph.edges if (e.source, e.target) == (source, target)]


def test_fragments_and_calls(walker):
    found = {f.name: (f.role, f.parent, f.calls_per_iteration, f.batch_size) for f in walker.fragments}
    assert found == {
        "act": ("actor", None, T, B),
        "step": ("environment", None, T, B),
        "act.2": ("actor", None, 1, B // 2),
        "judge": ("critic_of_taste", None, 1, B),
        "learn": ("learner", None, 1, B),
        "gradient": ("gradient", "learn", 3, B * T),
        "update": ("update", "learn", 3, None),
    }


def test_flops_and_bytes_of_a_fragment():
    """y = x w for [B, 3] by [3, 2]: 2*B*3*2 FLOPs; reads 4*(3*2 + B*3) bytes, writes 4*B*2."""

    class Product:
        def init(self, key):
            return {"w": jnp.ones((3, 2)), "x": jnp.ones((8, 3))}

        def iterate(self, state):
            @fdg.fragment("actor", in_axes=(None, 0))
            def product(w, x):
                return x @ w

            y = product(state["w"], state["x"])
            return state, {"y": jnp.sum(y)}

    (fragment,) = fdg.trace(Product()).fragments
    assert fragment.flops_per_call == 2 * 8 * 3 * 2
    assert fragment.bytes_per_call == 4 * (3 * 2 + 8 * 3 + 8 * 2)


def test_edges(walker):
    # Actions [B] go to the environment in each step.
    (actions,) = edges(walker, "act", "step")
    assert (actions.bytes_per_crossing, actions.crossings_per_iteration, actions.delay) == (4 * B, T, "")
    # Positions [B, FEATURES] come back one step later.
    (positions,) = edges(walker, "step", "act")
    assert (positions.bytes_per_crossing, positions.crossings_per_iteration) == (4 * B * FEATURES, T)
    assert positions.delay == "step"
    # Rewards [B] of all T steps reach `judge` together, once per iteration.
    (rewards,) = edges(walker, "step", "judge")
    assert (rewards.bytes_per_crossing, rewards.crossings_per_iteration, rewards.delay) == (4 * B * T, 1, "")
    # The weight comes back to the actor once per iteration, not once per step.
    (weight,) = edges(walker, "learn", "act")
    assert (weight.bytes_per_crossing, weight.crossings_per_iteration) == (4 * FEATURES, 1)
    assert weight.delay == "iteration"
    # Inside the learner: gradients go to the update in the same step, the weight comes back one step later.
    assert [e.delay for e in edges(walker, "gradient", "update")] == [""]
    assert [e.delay for e in edges(walker, "update", "gradient")] == ["step"]
    assert not edges(walker, "learn", "judge")


def test_stacked_and_unstacked_values_are_separate_edges():
    """A weight that the loop passes through crosses once (4 bytes); rows [4] of three trips cross stacked."""

    class PassesThrough:
        def init(self, key):
            return {"w": jnp.float32(1), "x": jnp.ones(4)}

        def iterate(self, state):
            @fdg.fragment("actor", in_axes=(None, 0), out_axes=(None, 0))
            def act(w, x):
                return w, x * w

            @fdg.fragment("learner", in_axes=(None, 1), out_axes=None)
            def learn(w, xs):
                return w + jnp.mean(xs)

            def trip(carry, _):
                w, x = act(*carry)
                return (w, x), x

            (w, x), xs = jax.lax.scan(trip, (state["w"], state["x"]), None, length=3)
            return {"w": learn(w, xs), "x": x}, {}

    graph = fdg.trace(PassesThrough())
    sizes = [(e.bytes_per_crossing, e.crossings_per_iteration) for e in edges(graph, "act", "learn")]
    assert sorted(sizes) == [(4, 1), (3 * 4 * 4, 1)]
    assert "act" in str(graph)


def test_calls_of_one_fragment_have_unique_names(walker):
    """The jaxpr has the same unique names."""

    def marks(jaxpr):
        for eqn in jaxpr.eqns:
            mark = FragmentMark.of(eqn)
            if mark is not None:
                yield mark.name
            for body in jaxprs.bodies(eqn):
                yield from marks(body.jaxpr)

    assert list(marks(jaxprs.open_jaxpr(walker.jaxpr))) == [f.name for f in walker.fragments]
    assert name_fragments(walker.jaxpr) is walker.jaxpr


@pytest.mark.parametrize(
    ("given", "numbered"),
    [
        (["act", "act", "act"], ["act", "act.2", "act.3"]),
        (["act", "act", "act.2"], ["act", "act.2", "act.2.2"]),
        (["act.2", "act", "act"], ["act.2", "act", "act.2.2"]),
    ],
)
def test_duplicate_names_are_numbered(given, numbered):
    class Chain:
        def init(self, key):
            return jnp.ones(B)

        def iterate(self, state):
            for role, name in zip(["actor", "learner", "actor"], given, strict=True):
                state = fdg.fragment(role, name=name)(jnp.sin)(state)
            return state, {}

    graph = fdg.trace(Chain())
    assert [f.name for f in graph.fragments] == numbered
    assert name_fragments(graph.jaxpr) is graph.jaxpr


def test_batch_axes_of_the_state(walker):
    axes = jax.tree.unflatten(
        jax.tree.structure(walker.state), [a if a is not None else -1 for a in walker.state_axes]
    )
    assert axes == type(walker.state)(-1, -1, 0, 0, 0, -1, -1, -1)


def test_tracing_allocates_nothing():
    """A model of 2**50 parameters, 4 bytes each."""

    class Enormous:
        def init(self, key):
            return {"w": jax.random.normal(key, (2**25, 2**25)), "x": jnp.zeros((64, 2**25))}

        def iterate(self, state):
            @fdg.fragment("learner", in_axes=(None, 0), out_axes=None)
            def learn(w, x):
                return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

            return {**state, "w": learn(state["w"], state["x"])}, {}

    before = jax.live_arrays()  # held: otherwise a freed array could hide a new one
    graph = fdg.trace(Enormous())
    assert len(jax.live_arrays()) == len(before)
    (learn,) = graph.fragments
    assert learn.outputs[0].bytes == 2**52
    assert graph.state["w"].shape == (2**25, 2**25)
    assert "4.5 PB" in str(graph)


def test_calls_in_while_loops_and_branches_are_inexact():
    class Searcher:
        def init(self, key):
            return jnp.ones(4)

        def iterate(self, x):
            @fdg.fragment("actor")
            def halve(x):
                return x / 2

            @fdg.fragment("environment")
            def double(x):
                return x * 2

            x = jax.lax.while_loop(lambda x: jnp.max(x) > 0.1, halve, x)
            return jax.lax.cond(jnp.sum(x) < 1, double, lambda x: x, x), {}

    graph = fdg.trace(Searcher())
    assert [(f.name, f.calls_exact) for f in graph.fragments] == [("halve", False), ("double", False)]
    assert [(e.source, e.target, e.delay) for e in graph.edges] == [
        ("halve", "halve", "step"),
        ("halve", "double", ""),
        ("double", "halve", "iteration"),
    ]


def test_algorithm_without_fragments():
    class Counter:
        def init(self, key):
            return 0

        def iterate(self, n):
            return n + 1, {"n": n}

    (whole,) = fdg.trace(Counter()).fragments
    assert (whole.name, whole.role, whole.batch_size) == ("iterate", "iteration", None)


# --- invalid algorithms ---


def algorithm(iterate, init=lambda key: {"x": jnp.zeros(3)}):
    made = type("Mine", (), {"init": lambda self, key: init(key), "iterate": lambda self, s: iterate(s)})
    return made()


@pytest.mark.parametrize(
    ("iterate", "words"),
    [
        (lambda s: ({"x": s["x"][:2]}, {}), ["Mine.iterate", "state['x']", "float32[3]", "float32[2]"]),
        (lambda s: (s, {"m": {"n": 1.0}}), ["metric 'm'", "reduce it"]),
    ],
)
def test_invalid_iterate_is_refused(iterate, words):
    with refuses(*words, kind=fdg.GraphError):
        fdg.trace(algorithm(iterate))


# --- drawings ---


def test_text_mermaid_and_svg(walker):
    text = str(walker)
    assert "FDG of Walker: 7 fragments" in text
    assert "step -> act (next step)" in text
    mermaid = walker.to_mermaid()
    assert mermaid.startswith("flowchart LR")
    assert 'subgraph n4["learn' in mermaid and mermaid.count("end\n") >= 1
    drawing = walker._repr_svg_()
    assert drawing.startswith("<svg") and drawing.endswith("</svg>")
    import xml.etree.ElementTree

    xml.etree.ElementTree.fromstring(drawing)


def test_function_name_with_colons_is_no_fragment():
    def other(x):
        return 2 * x

    other.__name__ = "mine:actor:act"
    (call,) = jax.make_jaxpr(jax.jit(other))(1.0).eqns
    assert ":actor:" in call.params["name"] and FragmentMark.of(call) is None
    (call,) = jax.make_jaxpr(jax.jit(fdg.fragment("actor", None, None)(jnp.sin)))(1.0).eqns
    assert [str(mark) for mark in map(FragmentMark.of, call.params["jaxpr"].eqns) if mark]


class Switch:
    """One fragment sends a single bool to another."""

    def init(self, key):
        return jnp.zeros(4)

    def iterate(self, state):
        ready = fdg.fragment("environment", 0, None, name="look")(lambda x: x.sum() > 3)(state)
        after = fdg.fragment("learner", (0, None), 0, name="go")(lambda x, on: jnp.where(on, x, x + 1))(
            state, ready
        )
        return after, {}


def test_edge_of_one_byte():
    graph = fdg.trace(Switch())
    assert [(e.source, e.target, e.bytes_per_crossing) for e in graph.edges if e.source == "look"] == [
        ("look", "go", 1)
    ]
    plan = fdg.place(graph, policies.Environments(workers=1), 2)
    assert "1 B" in str(plan)
