"""Which leaves staleness delays for which fragments, and errors where a delay is impossible."""

import jax
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from tests.placing.versions import (
    COARSE,
    GROUPS,
    START,
    TWO,
    Looped,
    Unrolled,
    act,
    assert_equal,
    delayed_graph,
    learn,
    python,
    rewritten,
)
from tests.refusing import refuses

# --- what is delayed ---


def reads(graph, policy):
    """Names of the delayed parts of the state, and the fragments that read them."""
    delayed = fdg.place(graph, policy, 3).delayed
    paths = list(jax.tree_util.tree_leaves_with_path(graph.state))
    names = dict.fromkeys(jax.tree_util.keystr(paths[i][0][:1], simple=True) for i in delayed.leaves)
    return list(names), delayed.readers


def test_statistics_are_delayed_if_another_group_computes_them():
    """The learners' group computes them under Coarse, the workers' own group under Central."""
    environment = envs.make("Pendulum-v1")
    graph = fdg.trace(algos.PPO(env=environment, num_envs=8, hidden=(4,), normalize_observation=True))
    coarse, _ = reads(graph, policies.SingleLearnerCoarse(staleness=1))
    central, _ = reads(graph, policies.Central(staleness=1))
    assert coarse == ["parameters", "observation_statistics"] and central == ["parameters"]


@pytest.mark.parametrize(("trips", "names"), [(0, []), (1, ["w"]), (3, ["w"])])
def test_loop_with_zero_trips_delays_nothing(trips, names):
    """Without a trip, the actors' own group computes the weight."""

    def program(p, s):
        w = act(p, s["w"], s["x"])
        (w,) = p.loop(trips, lambda carry, _: (learn(p, carry[0], carry[0]),), (w,))
        return {"w": w, "v": s["v"], "x": s["x"]}, {}

    delayed = delayed_graph(program, START, COARSE, 1, Looped()).delayed
    assert [sorted(dict(START))[i] for i in delayed.leaves] == names


@pytest.mark.parametrize("trips", [1, 2, 3, 4])
def test_values_swapped_in_a_loop(trips):
    """After one trip w is the old v; after more trips a learner has computed it."""

    def program(p, s):
        x = act(p, s["w"], s["x"])
        w, v = p.loop(trips, lambda carry, _: (carry[1], learn(p, carry[0], x)), (s["w"], s["v"]))
        return {"w": w, "v": v, "x": x}, {}

    looped, unrolled = (
        delayed_graph(program, START, COARSE, 1, kind).delayed for kind in (Looped(), Unrolled())
    )
    assert looped.leaves == unrolled.leaves
    assert [sorted(dict(START))[i] for i in looped.leaves] == ([] if trips == 1 else ["w"])


def test_plan_says_that_staleness_has_no_effect():
    def program(p, s):
        y = act(p, s["x"], s["x"])
        return {"w": learn(p, s["w"], y), "v": s["v"], "x": y}, {}

    plan = delayed_graph(program, START, TWO, 2, Looped())
    assert plan.delayed.leaves == () and plan.delayed.readers == ()
    assert "staleness 2: has no effect: no group with an actor reads a result of another group" in str(plan)


# --- what cannot be delayed ---


def refused(program, *words, groups=COARSE):
    with refuses(*("staleness=1", *words), kind=fdg.PlanError):
        delayed_graph(program, START, groups, 1, Looped())


@pytest.mark.parametrize("how", ["branch", "while"])
def test_fragment_that_may_pass_its_input_through(how):
    def either(w, x):
        if how == "branch":
            return jax.lax.cond(x > 0, lambda w: w, lambda w: 2 * w, w), x
        return jax.lax.while_loop(lambda w: w < x, lambda w: 2 * w, w), x

    def program(p, s):
        w, x = p.fragment("actor", "act", either, s["w"], s["x"])
        return {"w": learn(p, w, x), "v": s["v"], "x": x}, {}

    refused(program, "'act' (actors)", "state['w']", "'learn'", "float32[]", "jnp.where", "staleness=0")


def test_conditional_update_with_one_version():
    """A learner that may skip its update: all readers read the same version of its result."""

    def program(p, s):
        x = act(p, s["w"], s["x"])
        (w,) = p.fragment(
            "learner",
            "learn",
            lambda w, x: (jax.lax.cond(x > 1, lambda w: w + x, lambda w: w, w),),
            s["w"],
            x,
        )
        return {"w": w, "v": act(p, s["v"], s["w"]), "x": x}, {}

    def reference(p, s):
        x = act(p, s["w"], s["x"])
        (w,) = p.fragment("learner", "learn", lambda w, x: (w + x * (x > 1),), s["w"], x)
        return {"w": w, "v": act(p, s["v"], s["w"]), "x": x}, {}

    expected = python(reference, START, TWO, 2, 6)
    assert_equal(expected, rewritten(program, START, TWO, 2, 6, Looped()))


@pytest.mark.parametrize("reader", ["none", "the update"])
@pytest.mark.parametrize("groups", ["coarse", "central", "three"])
def test_conditional_result_has_the_version_of_its_fragment(groups, reader):
    """Also where a loop without trips, or one branch, passes its input through."""

    def maybe(w, x):
        looped, _ = jax.lax.while_loop(lambda s: s[1] < x, lambda s: (s[0] / 2, s[1] + 1), (w, 0.0))
        return looped, jax.lax.cond(x > 1, lambda w: 3 * w, lambda w: w, w), w + x

    def reference(w, x):
        trips = np.maximum(np.ceil(x), 0)
        return w / 2**trips, 3 * w if x > 1 else w, w + x

    def program(function):
        def lines(p, s):
            looped, branched, x = p.fragment("actor", "act", function, s["w"], s["x"])
            nested = p.fragment("actor", "outer", lambda w, x: (function(w, x)[2],), s["w"], x)[0]
            if reader == "none":
                return {"w": learn(p, s["w"], nested, "update"), "v": s["v"], "x": x}, {}
            inside = act(p, looped, branched)
            return {"w": learn(p, s["w"], inside, "update"), "v": s["v"], "x": x}, {}

        return lines

    expected = python(program(reference), START, GROUPS[groups], 1, 4)
    assert_equal(expected, rewritten(program(maybe), START, GROUPS[groups], 1, 4, Looped()))


def test_effect_is_not_duplicated():
    def print_and_call(w):
        jax.debug.print("{}", w)
        return jax.experimental.io_callback(lambda w: w, w, w)

    def program(p, s):
        x = act(p, p.glue(print_and_call, s["w"]), s["x"])
        return {"w": learn(p, s["w"], x), "v": s["v"], "x": x}, {}

    refused(program, "io_callback", "has an effect", "state['w']", "'act' (actors)", groups=TWO)


def test_actor_and_learner_alternate_in_a_while_loop():
    def program(p, s):
        def trip(carry, i):
            w, x = carry
            return learn(p, w, x), act(p, p.glue(lambda w: 2 * w, w), x)

        w, x = p.loop(2, trip, (s["w"], s["x"]), "while")
        return {"w": w, "v": s["v"], "x": x}, {}

    refused(program, "'act' (actors)", "'learn' (learners)", "in one loop", "use staleness=0", groups=TWO)


def branch_program(within, reader):
    """A branch on the actor's weight contains a fragment of role `within`; `reader` reads its result."""

    def program(p, s):
        deep = lambda w, x: (act(p, w, x, within, "deep"),)  # noqa: E731
        (y,) = p.choose(s["w"], deep, lambda w, x: (x,), s["w"], s["x"])
        x = act(p, s["w"], y if reader == "actor" else s["x"])
        return {"w": learn(p, s["w"], y), "v": s["v"], "x": x}, {}

    return program


@pytest.mark.parametrize(
    ("within", "reader", "named"), [("actor", "learner", "'deep'"), ("learner", "actor", "'act'")]
)
def test_branch_on_two_versions(within, reader, named):
    """The actor is in the branch or reads its result, so the old and the new weight would select it."""
    words = ("branch (cond)", "state['w']", f"{named} (actors)", "compute the condition in a fragment")
    refused(branch_program(within, reader), *words, groups=TWO)


def test_branch_on_the_newest_version():
    program, arguments = branch_program("learner", "learner"), (START, TWO, 1, 4)
    assert_equal(python(program, *arguments), rewritten(program, *arguments, Looped()))
