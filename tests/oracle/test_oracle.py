"""A fixed sample of random programs; and the oracle itself, against numbers worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from fdg.placing.policy import Group
from tests.oracle.breakage import BREAKAGES
from tests.oracle.compare import Expected, check
from tests.oracle.generate import program_of
from tests.oracle.interpret import Algorithm, Host, made_by
from tests.oracle.operations import OPERATIONS, WANTS
from tests.oracle.placements import Placement, Scattered, groups_of
from tests.oracle.program import Block, Leaf, Line, Program, Value, features, is_well_formed, text, walk
from tests.oracle.shrink import shrunk
from tests.oracle.staleness import UnclearError, delayed_leaves, old_leaves, stale_run

# Chosen so that together they have most operations and every structure, effect and kind of placement.
SAMPLE = (1057, 666, 408, 147, 842, 341, 255, 1188, 630)


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_random_program_has_the_numbers_of_plain_jax(seed, devices):
    algorithm, placements = program_of(seed)
    expected = Expected(algorithm.program)
    for placement in placements:
        verdict = check(algorithm.program, placement, expected)
        assert not verdict.is_bad, f"{verdict}\n{placement}\n{text(algorithm.program)}"


# --- programs ---


def test_a_seed_is_always_the_same_program():
    first, second = program_of(11), program_of(11)
    assert (first[0].program, first[1]) == (second[0].program, second[1])
    assert first[0].program != program_of(12)[0].program


def value(name, *shape, kind="f"):
    return Value(name, kind, shape)


EXAMPLES = [
    *[
        Value("", "f", shape)
        for shape in [(), (3,), (3, 3), (12,), (12, 3), (2, 12), (2, 12, 3), (36,), (3, 8), (8, 3)]
    ],
    *[Value("", kind, shape) for kind in "ibk" for shape in [(), (12,)]],
]


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_take_what_they_want_and_keep_numbers_tame(name):
    operation = OPERATIONS[name]
    for first in [v for v in EXAMPLES if WANTS[operation.wants[0]](v)][:2]:
        reads = [
            first,
            *[first if w == "=" else next(filter(WANTS[w], EXAMPLES)) for w in operation.wants[1:]],
        ]
        line = Line("op", name, tuple(reads), (), 1)
        (made,) = made_by(line)
        assert made.shape.count(12) <= 1


def test_every_operation_is_drawn_by_some_program():
    drawn = set().union(*(features(program_of(seed)[0].program) for seed in range(60)))
    assert len(drawn & set(OPERATIONS)) > 80


# --- staleness, by hand ---


def op(name, reads, made, number=0):
    return Line("op", name, tuple(reads), (made,), number)


def fragment(role, reads, makes, lines, params, results):
    axes = tuple(v.axis for v in reads), tuple(v.axis for v in results), ""
    block = Block(tuple(params), tuple(lines), tuple(results))
    return Line("fragment", f"{role}s", tuple(reads), tuple(makes), 0, (block,), role, axes)


W, SEEN, NEXT = value("w"), value("seen"), value("next")
# An actor hands its weight on and gives half of it; the learner changes what came out of the actor.
HANDED, HALF = value("handed"), value("half")
P, Q, R, S = value("p"), value("q"), value("r"), value("s")
RECORDER = Program(
    (Leaf(W, 1), Leaf(SEEN, 2)),
    (
        fragment("actor", [W], [HANDED, HALF], [op("shrink", [P], Q)], [P], [P, Q]),
        fragment("learner", [HANDED], [NEXT], [op("bend", [R], S)], [R], [S]),
    ),
    (NEXT, HALF),
    (HANDED, HALF),
)
APART = {"actors": "a", "learners": "b"}


def bend(w):
    return 0.8 * np.sin(w)


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_the_reference_of_staleness_by_hand(staleness):
    """The learner's weights are those without staleness, for the actor only handed them on."""
    state = [jnp.float32(0.7), jnp.float32(0)]
    (w, seen), metrics = stale_run(RECORDER, state, 6, APART, staleness, Host())
    weights = [0.7]
    for _ in range(6):
        weights.append(bend(weights[-1]))
    used = [weights[max(0, t - staleness)] for t in range(6)]
    np.testing.assert_allclose(w, weights[6], rtol=1e-6)
    np.testing.assert_allclose(metrics["m0"], weights[:6], rtol=1e-6)  # what was handed on is the newest
    np.testing.assert_allclose(metrics["m1"], 0.5 * np.asarray(used), rtol=1e-6)
    np.testing.assert_allclose(seen, 0.5 * used[-1], rtol=1e-6)


def test_what_is_delayed_by_hand():
    assert delayed_leaves(RECORDER, APART) == {"a": {0}}
    assert delayed_leaves(RECORDER, {"actors": "a", "learners": "a"}) == {"a": set()}


def test_two_versions_in_one_loop():
    """Code between fragments reads the newest, the actor beside it in the same loop the oldest."""
    w, x, made, glue = value("lw"), value("lx"), value("made"), value("glue")
    inner = fragment("actor", [w], [made], [op("shrink", [P], Q)], [P], [Q])
    body = Block((w, x), (inner, op("mix", [w, w], glue)), (w, made, glue))
    out = [value(name) for name in ("w2", "x2")] + [value("g", 2)]
    loop = Line("scan", "scan", (W, SEEN), tuple(out), 2, (body,), "", (2, "", ()))
    learn = fragment("learner", [out[0]], [NEXT], [op("bend", [R], S)], [R], [S])
    program = Program((Leaf(W, 0), Leaf(SEEN, 1)), (loop, learn), (NEXT, out[1]), (out[2],))
    _, metrics = stale_run(program, [jnp.float32(0.7), jnp.float32(0)], 2, APART, 1, Host())
    mixed = [0.6 * np.sin(w) + 0.3 * np.tanh(w) for w in (0.7, bend(0.7))]
    np.testing.assert_allclose(metrics["m0"], mixed, rtol=1e-6)


def test_loops_have_the_types_of_plain_jax():
    """`wrap` tells a Python number from an array: a loop's counter is one, and a carry that was one first."""
    count, fixed, rows = value("count", kind="i"), value("fixed", kind="i"), value("rows", 12, kind="i")
    trip, carry, last = (value(name, kind="i") for name in ("trip", "carry", "last"))
    first, second, stack = (value(name, *n, 12, kind="i") for name, n in (("u", ()), ("v", ()), ("vs", (2,))))
    counted = Line("fori", "fori", (count,), (last,), 3, (Block((trip, carry), (), (trip,)),))
    body = Block((carry,), (op("wrap", [rows, carry], second),), (fixed, second))
    fixing = Line("scan", "scan", (count,), (value("end", kind="i"), stack), 2, (body,), "", (1, "", ()))
    program = Program(
        (Leaf(count, 51, is_number=True), Leaf(fixed, 7), Leaf(rows, 53)),
        (counted, op("wrap", [rows, last], first), fixing),
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


def test_a_fragment_within_another_reads_what_that_one_reads():
    """A learner whose loss calls the actor: half of the newest weight; as an update, of what it updates."""
    inner = Line("fragment", "inner", (R,), (HALF,), 0,
                 (Block((P,), (op("shrink", [P], Q),), (Q,)),), "actor", ((), (), ""))  # fmt: skip
    act = fragment("actor", [W], [SEEN], [op("shrink", [P], Q)], [P], [Q])
    learn = fragment("learner", [W], [NEXT, HANDED], [inner, op("bend", [R], S)], [R], [S, HALF])
    program = Program((Leaf(W, 1),), (act, learn), (NEXT,), (SEEN, HANDED))
    groups = {"actors": "a", "inner": "a", "learners": "b"}
    _, metrics = stale_run(program, [jnp.float32(0.7)], 4, groups, 1, Host())
    weights = [0.7]
    for _ in range(3):
        weights.append(bend(weights[-1]))
    np.testing.assert_allclose(metrics["m0"], 0.5 * np.asarray([0.7, *weights[:3]]), rtol=1e-6)
    np.testing.assert_allclose(metrics["m1"], 0.5 * np.asarray(weights), rtol=1e-6)
    # The other way round: within an actor, a critic reads the old weight, and who makes it the newest.
    inside = {"actors": "a", "critics": "c", "learners": "b"}
    nested = fragment("critic", [P], [HALF], [op("shrink", [R], S)], [R], [S])
    outer = fragment("actor", [W], [SEEN], [nested], [P], [HALF])
    learn = fragment("learner", [W], [NEXT], [op("bend", [R], S)], [R], [S])
    program = Program((Leaf(W, 1),), (outer, learn), (NEXT,), (SEEN,))
    assert old_leaves(program, inside)["a", "c"] == {0}
    assert old_leaves(program, {**inside, "critics": "b"})["a", "b"] == set()


def test_a_choice_that_hangs_on_what_is_late_is_unclear():
    n, q = value("n", kind="i"), value("q1", kind="i")
    act = fragment("actor", [n], [q], [op("next", [value("pn", kind="i")], value("qn", kind="i"))],
                   [value("pn", kind="i")], [value("qn", kind="i")])  # fmt: skip
    branch = Block((), (), (W,))
    choice = Line("cond", "cond", (q,), (value("c"),), 0, (branch, branch))
    with pytest.raises(UnclearError, match="choice"):
        delayed_leaves(Program((Leaf(n, 0), Leaf(W, 0)), (act, choice), (n, W), ()), {"actors": "a"})


def test_an_effect_in_a_branch_is_unclear():
    """The reference runs all branches, and would perform it though the branch is not taken (seed 1383)."""
    n, told = value("n", kind="i"), value("told", 12)
    inside = [op("shrink", [P], Q), Line("effect", "send", (P,), ())]
    tell = fragment("actor", [W], [told], inside, [P], [Q])
    choice = Line("cond", "cond", (n,), (value("c"),), 0, (Block((), (tell,), (W,)), Block((), (), (W,))))
    program = Program((Leaf(n, 0), Leaf(W, 0)), (choice,), (n, W), ())
    with pytest.raises(UnclearError, match="effect in a branch"):
        stale_run(program, [jnp.int32(1), jnp.float32(0.5)], 1, {"actors": "a"}, 1, Host())


# --- what the oracle finds ---


def test_a_wrong_number_is_found_and_made_small(monkeypatch, devices):
    """Of an engine that runs another program, one operation is left."""
    wrong = dataclasses.replace(OPERATIONS["shrink"], run=lambda c, x: 0.51 * x)

    class Wrong(Algorithm):
        def iterate(self, state):
            with monkeypatch.context() as patch:
                patch.setitem(OPERATIONS, "shrink", wrong)
                return super().iterate(state)

    monkeypatch.setattr("tests.oracle.compare.under_test", Wrong)
    placement = Placement(policies.GPUOnly(), 1)
    verdict = check(RECORDER, placement)
    assert verdict.kind == "wrong" and "differs by" in verdict.detail
    small = shrunk(RECORDER, lambda program: any(line.name == "shrink" for line in walk(program.lines)))
    assert [line.name for line in walk(small.lines)] == ["shrink"] and is_well_formed(small)


@pytest.mark.parametrize(
    ("message", "kind"),
    [("'actors' cannot go there", "refused"), ("no", "vague"), ("iterate changes state[0] so", "vague")],
)
def test_refusals_must_name_a_cause(message, kind, monkeypatch):
    def refuse(*_):
        raise fdg.PlanError(message)

    monkeypatch.setattr(fdg, "compile", refuse)
    assert check(RECORDER, Placement(policies.GPUOnly(), 1)).kind == kind


def test_fragments_that_the_policy_does_not_name_have_their_parents_group():
    policy = Scattered((("actor", Group("a", (0,))), ("learner", Group("b", (1,)))))
    assert groups_of(RECORDER, Placement(policy, 2)) == APART
    only = Scattered((("actor", Group("a", (0,))),))
    assert groups_of(RECORDER, Placement(only, 2)) is None


def test_breakages_have_names():
    assert set(BREAKAGES) == {"staleness", "ages", "effects", "axis", "nan", "weak", "host"}
