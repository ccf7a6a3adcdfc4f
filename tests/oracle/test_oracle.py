"""Random programs against plain JAX, and tests of the fuzzer against hand-worked numbers."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from fdg.batch.rules import RULES
from fdg.placing.policy import Group
from tests.oracle.breakage import BREAKAGES
from tests.oracle.compare import Expected, check
from tests.oracle.generate import generate
from tests.oracle.interpret import Algorithm, Host, output_types
from tests.oracle.operations import OPERATIONS, WANTS
from tests.oracle.placements import Placement, Scattered, groups_of
from tests.oracle.program import Block, Leaf, Line, Program, Value, is_well_formed, text, walk
from tests.oracle.shrink import shrunk
from tests.oracle.staleness import UnclearError, delayed_leaves, delayed_leaves_by_chain, stale_run

# Together they use most operations, and every structure, effect and kind of placement.
SAMPLE = (1057, 666, 408, 147, 842, 341, 255, 1188, 630)


@pytest.mark.parametrize("seed", SAMPLE)
def test_random_program_matches_plain_jax(seed, devices):
    algorithm, placements = generate(seed)
    expected = Expected(algorithm.program)
    for placement in placements:
        verdict = check(algorithm.program, placement, expected)
        assert not verdict.is_bad, f"{verdict}\n{placement}\n{text(algorithm.program)}"


# --- programs ---


def test_seed_determines_program():
    first, second = generate(11), generate(11)
    assert (first[0].program, first[1]) == (second[0].program, second[1])
    assert first[0].program != generate(12)[0].program


def value(name, *shape, kind="f"):
    return Value(name, kind, shape)


EXAMPLES = [
    *[
        Value("", "f", shape)
        for shape in [(), (3,), (3, 3), (12,), (12, 3), (2, 12), (2, 12, 3), (36,), (3, 8), (8, 3)]
    ],
    *[Value("", kind, shape) for kind in "ibk" for shape in [(), (12,)]],
]


def test_operation_outputs_have_at_most_one_batch_axis():
    for name, operation in OPERATIONS.items():
        for first in [v for v in EXAMPLES if WANTS[operation.wants[0]](v)][:2]:
            others = [first if w == "=" else next(filter(WANTS[w], EXAMPLES)) for w in operation.wants[1:]]
            (output,) = output_types(Line("op", name, (first, *others), (), 1))
            assert output.shape.count(12) <= 1, name


# --- staleness, by hand ---


def op(name, inputs, output, number=0):
    return Line("op", name, tuple(inputs), (output,), number)


def fragment(role, inputs, outputs, lines, params, results):
    axes = tuple(v.axis for v in inputs), tuple(v.axis for v in results), ""
    block = Block(tuple(params), tuple(lines), tuple(results))
    return Line("fragment", f"{role}s", tuple(inputs), tuple(outputs), 0, (block,), role, axes)


W, SEEN, NEXT = value("w"), value("seen"), value("next")
# An actor returns its weight unchanged, and half of it; the learner updates the weight from the actor.
PASSED, HALF = value("passed"), value("half")
P, Q, R, S = value("p"), value("q"), value("r"), value("s")
PROGRAM = Program(
    (Leaf(W, 1), Leaf(SEEN, 2)),
    (
        fragment("actor", [W], [PASSED, HALF], [op("shrink", [P], Q)], [P], [P, Q]),
        fragment("learner", [PASSED], [NEXT], [op("bend", [R], S)], [R], [S]),
    ),
    (NEXT, HALF),
    (PASSED, HALF),
)
APART = {"actors": "a", "learners": "b"}


def bend(w):
    return 0.8 * np.sin(w)


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_stale_run_by_hand(staleness):
    """The learner updates the newest weights, since the actor only passes them through."""
    state = [jnp.float32(0.7), jnp.float32(0)]
    (w, seen), metrics = stale_run(PROGRAM, state, 6, APART, staleness, Host())
    weights = [0.7]
    for _ in range(6):
        weights.append(bend(weights[-1]))
    used = [weights[max(0, t - staleness)] for t in range(6)]
    np.testing.assert_allclose(w, weights[6], rtol=1e-6)
    np.testing.assert_allclose(metrics["m0"], weights[:6], rtol=1e-6)  # the newest, passed through
    np.testing.assert_allclose(metrics["m1"], 0.5 * np.asarray(used), rtol=1e-6)
    np.testing.assert_allclose(seen, 0.5 * used[-1], rtol=1e-6)


def test_delayed_leaves_by_hand():
    assert delayed_leaves(PROGRAM, APART) == {"a": {0}}
    assert delayed_leaves(PROGRAM, {"actors": "a", "learners": "a"}) == {"a": set()}


def test_two_versions_in_one_loop():
    """In one loop, code between fragments reads the newest version and the actor the delayed one."""
    w, x, output, glue = value("lw"), value("lx"), value("made"), value("glue")
    inner = fragment("actor", [w], [output], [op("shrink", [P], Q)], [P], [Q])
    body = Block((w, x), (inner, op("mix", [w, w], glue)), (w, output, glue))
    out = [value(name) for name in ("w2", "x2")] + [value("g", 2)]
    loop = Line("scan", "scan", (W, SEEN), tuple(out), 2, (body,), "", (2, "", ()))
    learn = fragment("learner", [out[0]], [NEXT], [op("bend", [R], S)], [R], [S])
    program = Program((Leaf(W, 0), Leaf(SEEN, 1)), (loop, learn), (NEXT, out[1]), (out[2],))
    _, metrics = stale_run(program, [jnp.float32(0.7), jnp.float32(0)], 2, APART, 1, Host())
    mixed = [0.6 * np.sin(w) + 0.3 * np.tanh(w) for w in (0.7, bend(0.7))]
    np.testing.assert_allclose(metrics["m0"], mixed, rtol=1e-6)


def test_actor_in_a_while_loop():
    """It reads the delayed weight in each of two trips, and then the learner updates the newest one."""
    count, x, last = value("count", kind="i"), value("lx"), value("x2")
    output = value("made")
    inner = fragment("actor", [W, x], [output], [op("mix", [P, Q], R)], [P, Q], [R])
    loop = Line("while", "while", (count, SEEN), (last,), 0, (Block((x,), (inner,), (output,)),))
    learn = fragment("learner", [W], [NEXT], [op("bend", [R], S)], [R], [S])
    program = Program((Leaf(W, 0), Leaf(SEEN, 1), Leaf(count, 2)), (loop, learn), (NEXT, last, count), ())
    state = [jnp.float32(0.7), jnp.float32(0), jnp.int32(2)]
    (_, seen, _), _ = stale_run(program, state, 2, APART, 1, Host())
    expected = 0.0
    for _ in range(4):  # two trips in each of two iterations, which read the initial weight
        expected = 0.6 * np.sin(0.7) + 0.3 * np.tanh(expected)
    np.testing.assert_allclose(seen, expected, rtol=1e-6)


def test_loops_keep_weak_types():
    """Loop counters, and carries that start as Python numbers, are weakly typed; `wrap` detects it."""
    count, fixed, rows = value("count", kind="i"), value("fixed", kind="i"), value("rows", 12, kind="i")
    trip, carry, last = (value(name, kind="i") for name in ("trip", "carry", "last"))
    first, second, stack = (value(name, *n, 12, kind="i") for name, n in (("u", ()), ("v", ()), ("vs", (2,))))
    fori = Line("fori", "fori", (count,), (last,), 3, (Block((trip, carry), (), (trip,)),))
    body = Block((carry,), (op("wrap", [rows, carry], second),), (fixed, second))
    scan = Line("scan", "scan", (count,), (value("end", kind="i"), stack), 2, (body,), "", (1, "", ()))
    program = Program(
        (Leaf(count, 51, is_number=True), Leaf(fixed, 7), Leaf(rows, 53)),
        (fori, op("wrap", [rows, last], first), scan),
        (count, fixed, rows),
        (first, stack),
    )
    algorithm = Algorithm(program)
    state = algorithm.init(jax.random.key(0))
    _, expected = algorithm.iterate(state)
    _, metrics = stale_run(program, state, 1, {}, 1, Host())
    assert expected and {k: float(x[0]) for k, x in metrics.items()} == {
        k: float(x) for k, x in expected.items()
    }


def test_nested_fragment_versions():
    """A learner that calls the actor: the nested actor reads the newest weight, as the learner does."""
    inner = Line("fragment", "inner", (R,), (HALF,), 0,
                 (Block((P,), (op("shrink", [P], Q),), (Q,)),), "actor", ((), (), ""))  # fmt: skip
    act = fragment("actor", [W], [SEEN], [op("shrink", [P], Q)], [P], [Q])
    learn = fragment("learner", [W], [NEXT, PASSED], [inner, op("bend", [R], S)], [R], [S, HALF])
    program = Program((Leaf(W, 1),), (act, learn), (NEXT,), (SEEN, PASSED))
    groups = {"actors": "a", "inner": "a", "learners": "b"}
    _, metrics = stale_run(program, [jnp.float32(0.7)], 4, groups, 1, Host())
    weights = [0.7]
    for _ in range(3):
        weights.append(bend(weights[-1]))
    np.testing.assert_allclose(metrics["m0"], 0.5 * np.asarray([0.7, *weights[:3]]), rtol=1e-6)
    np.testing.assert_allclose(metrics["m1"], 0.5 * np.asarray(weights), rtol=1e-6)
    # A critic nested in an actor reads the delayed weight, unless the critic's group produces that weight.
    inside = {"actors": "a", "critics": "c", "learners": "b"}
    nested = fragment("critic", [P], [HALF], [op("shrink", [R], S)], [R], [S])
    outer = fragment("actor", [W], [SEEN], [nested], [P], [HALF])
    learn = fragment("learner", [W], [NEXT], [op("bend", [R], S)], [R], [S])
    program = Program((Leaf(W, 1),), (outer, learn), (NEXT,), (SEEN,))
    assert delayed_leaves_by_chain(program, inside)["a", "c"] == {0}
    assert delayed_leaves_by_chain(program, {**inside, "critics": "b"})["a", "b"] == set()


def test_branch_on_delayed_value_is_unclear():
    n, q = value("n", kind="i"), value("q1", kind="i")
    act = fragment("actor", [n], [q], [op("next", [value("pn", kind="i")], value("qn", kind="i"))],
                   [value("pn", kind="i")], [value("qn", kind="i")])  # fmt: skip
    branch = Block((), (), (W,))
    choice = Line("cond", "cond", (q,), (value("c"),), 0, (branch, branch))
    with pytest.raises(UnclearError, match="choice"):
        delayed_leaves(Program((Leaf(n, 0), Leaf(W, 0)), (act, choice), (n, W), ()), {"actors": "a"})


def test_effect_in_branch_is_unclear():
    """The reference runs all branches, so it would perform effects of branches not taken (seed 1383)."""
    n, sent = value("n", kind="i"), value("sent", 12)
    inside = [op("shrink", [P], Q), Line("effect", "send", (P,), ())]
    sender = fragment("actor", [W], [sent], inside, [P], [Q])
    choice = Line("cond", "cond", (n,), (value("c"),), 0, (Block((), (sender,), (W,)), Block((), (), (W,))))
    program = Program((Leaf(n, 0), Leaf(W, 0)), (choice,), (n, W), ())
    with pytest.raises(UnclearError, match="effect in a branch"):
        stale_run(program, [jnp.int32(1), jnp.float32(0.5)], 1, {"actors": "a"}, 1, Host())


# --- detection of wrong results ---


def test_wrong_result_is_found_and_shrunk(monkeypatch, devices):
    """`check` detects an engine that runs another operation; `shrunk` keeps only that operation."""
    wrong = dataclasses.replace(OPERATIONS["shrink"], run=lambda c, x: 0.51 * x)

    class Wrong(Algorithm):
        def iterate(self, state):
            with monkeypatch.context() as patch:
                patch.setitem(OPERATIONS, "shrink", wrong)
                return super().iterate(state)

    monkeypatch.setattr("tests.oracle.compare.under_test", Wrong)
    placement = Placement(policies.GPUOnly(), 1)
    verdict = check(PROGRAM, placement)
    assert verdict.kind == "wrong" and "differs by" in verdict.detail
    small = shrunk(PROGRAM, lambda program: any(line.name == "shrink" for line in walk(program.lines)))
    assert [line.name for line in walk(small.lines)] == ["shrink"] and is_well_formed(small)


@pytest.mark.parametrize(
    ("message", "kind"),
    [("'actors' cannot go there", "refused"), ("no", "vague"), ("iterate changes state[0] so", "vague")],
)
def test_refusal_must_name_a_cause(message, kind, monkeypatch):
    def refuse(*_):
        raise fdg.PlanError(message)

    monkeypatch.setattr(fdg, "compile", refuse)
    assert check(PROGRAM, Placement(policies.GPUOnly(), 1)).kind == kind


def test_groups_of_fragments():
    policy = Scattered((("actor", Group("a", (0,))), ("learner", Group("b", (1,)))))
    assert groups_of(PROGRAM, Placement(policy, 2)) == APART
    only = Scattered((("actor", Group("a", (0,))),))
    assert groups_of(PROGRAM, Placement(only, 2)) is None


def test_breakage_is_found():
    """An engine that computes cumulative sums on each device alone."""
    x, y, p, q = (value(name, 12) for name in "xypq")
    program = Program(
        (Leaf(x, 1),), (fragment("learner", [x], [y], [op("cumsum", [p], q)], [p], [q]),), (y,), (y,)
    )
    placement = Placement(policies.GPUOnly(), 3)
    assert check(program, placement).kind == "right"
    with mock.patch.dict(RULES):
        BREAKAGES["axis"]()
        assert check(program, placement).kind == "wrong"
