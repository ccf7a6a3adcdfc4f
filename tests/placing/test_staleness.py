"""The version that each fragment reads, against plain Python that keeps old parameters per group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from tests.placing.versions import (
    CENTRAL,
    COARSE,
    GROUPS,
    START,
    TWO,
    Algorithm,
    Looped,
    Roles,
    act,
    assert_equal,
    learn,
    pass_through,
    python,
    rewritten,
)


def scanned_pass_through(p, s):
    """The carry holds a weight that the actor passes through; a metric reads it in the loop."""

    def trip(carry, i):
        w, x, seen = carry
        w, x = pass_through(p, w, x)
        return w, x, p.glue(lambda seen, w, i: seen + w * (i + 1), seen, w, i)

    w, x, seen = p.loop(3, trip, (s["w"], s["x"], p.glue(lambda x: 0 * x, s["x"])))
    new = learn(p, w, x)
    return {"w": new, "v": s["v"], "x": x}, {"seen": seen, "w": w}


def two_readers(p, s):
    """Code between fragments that both groups read, in a loop and outside of it."""
    halved = p.glue(lambda w: 0.5 * w, s["w"])

    def trip(carry, i):
        x, y = carry
        twice = p.glue(lambda h, i: 2 * h + 0.1 * i, halved, i)
        return act(p, twice, x), learn(p, twice, y, "update", "step_learn")

    x, y = p.loop(2, trip, (s["x"], s["v"]))
    return {"w": learn(p, s["w"], y, "update"), "v": y, "x": x}, {"h": halved}


def alternating(p, s):
    """Workers' gradients and servers' updates alternate; the first trip reads an old weight."""

    def trip(carry, i):
        w, x = carry
        g = act(p, w, x, "learner", "gradient")
        return learn(p, w, g, "update"), p.glue(lambda x, g: x + 0.1 * g, x, g)

    x = act(p, s["w"], s["x"])
    w, x = p.loop(3, trip, (s["w"], x))
    return {"w": w, "v": act(p, s["w"], w), "x": x}, {"x": x}


def shifted(p, s):
    """After one trip the first carried value is the weight; its two readers read two versions."""

    def trip(carry, i):
        learn(p, s["x"], s["x"], "update")
        return carry[1], s["w"]

    moved, _ = p.loop(1, trip, (s["x"], s["w"]))
    x = act(p, moved, s["x"])
    return {"w": learn(p, s["w"], x), "v": moved, "x": x}, {"moved": moved}


PROGRAMS = [scanned_pass_through, two_readers, alternating, shifted]


# --- against plain Python ---

CASES = [(program, groups, k) for i, program in enumerate(PROGRAMS) for j, groups in enumerate(GROUPS)
         for k in ((1, 2, 4), (1, 0), (1, 2))[j]]  # fmt: skip


@pytest.mark.parametrize(("program", "groups", "staleness"), CASES)
def test_loops_against_plain_python(program, groups, staleness):
    arguments = START, GROUPS[groups], staleness, 6
    assert_equal(python(program, *arguments), rewritten(program, *arguments, Looped()))


# --- numbers worked by hand ---


def run(iterate, init, groups, staleness, iterations, devices):
    """(metrics, engine) of an algorithm under a policy that assigns groups to roles."""
    made = type("Mine", (), {"init": lambda self, key: init, "iterate": lambda self, state: iterate(state)})()
    engine = fdg.compile(made, Roles(tuple(groups.items()), staleness), devices)
    return engine.run(engine.init(0), iterations)[1], engine


@fdg.fragment("actor", in_axes=(None, 0), out_axes=(None, 0), name="act")
def act_and_pass(w, x):
    return w, x * w


@fdg.fragment("learner", in_axes=(None, 0), out_axes=None, name="learn")
def add_one(w, y):
    return w + 1 + 0 * jnp.sum(y)


@pytest.mark.parametrize("count", [1, 2])
def test_learner_reads_the_newest_passed_through_value(count, devices):
    """w starts at 1 and grows by 1; each of the two trips of iteration t multiplies y by the w of t - 1."""

    def iterate(state):
        (w, y), _ = jax.lax.scan(lambda c, _: (act_and_pass(*c), None), (state["w"], jnp.ones(2)), None, 2)
        return {"w": add_one(w, y)}, {"w": add_one(w, y), "passed": w, "y": jnp.max(y)}

    metrics, _ = run(iterate, {"w": jnp.float32(1)}, TWO, 1, 5, devices[:count])
    np.testing.assert_array_equal(metrics["w"], [2, 3, 4, 5, 6])
    np.testing.assert_array_equal(metrics["passed"], [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(metrics["y"], [1, 1, 4, 9, 16])


def test_two_versions_in_one_loop(devices):
    """In one trip the actor reads the w of two iterations ago, the metric and the learner the newest."""

    @fdg.fragment("learner", in_axes=(None, 0))
    def judge(w, x):
        return w + 0 * x

    def iterate(state):
        def trip(total, _):
            _, a = act_and_pass(state["w"], jnp.ones(2))
            return total + jnp.stack([a[0], judge(state["w"], a)[0], state["w"]]), None

        total, _ = jax.lax.scan(trip, jnp.zeros(3), None, 2)
        w = add_one(state["w"], jnp.zeros(2) + total[0])
        return {"w": w}, {"actor": total[0], "judge": total[1], "between": total[2]}

    metrics, engine = run(iterate, {"w": jnp.float32(1)}, TWO, 2, 5, devices[:1])
    np.testing.assert_array_equal(metrics["actor"], [2, 2, 2, 4, 6])
    np.testing.assert_array_equal(metrics["judge"], [2, 4, 6, 8, 10])
    np.testing.assert_array_equal(metrics["between"], [2, 4, 6, 8, 10])
    assert engine.plan.delayed.readers == ("act",)


def test_mapped_and_differentiated_actors_read_old_parameters(devices):
    """At x = (1, 1), the gradient of sum(w^2 x) is 4 w, and the largest value over (w, 2 w) is 4 w^2."""

    @fdg.fragment("actor", in_axes=(None, 0))
    def square(w, x):
        return w * w * x

    def iterate(state):
        w, x = state["w"], jnp.ones(2)
        slope = jax.grad(lambda w: jnp.sum(square(w, x)))(w)  # 4 w
        mapped = jax.vmap(square, in_axes=(0, None))(jnp.stack([w, 2 * w]), x)  # w^2, 4 w^2
        new = add_one(w, x + slope)
        return {"w": new}, {"slope": slope, "mapped": jnp.max(mapped), "w": w}

    metrics, engine = run(iterate, {"w": jnp.float32(1)}, TWO, 1, 4, devices[:1])
    np.testing.assert_array_equal(metrics["slope"], [4, 4, 8, 12])
    np.testing.assert_array_equal(metrics["mapped"], [4, 4, 16, 36])
    np.testing.assert_array_equal(metrics["w"], [1, 2, 3, 4])
    assert engine.plan.delayed.readers == ("square", "square.2", "square.3")


# --- nested fragments ---


AROUND = {
    "loss": lambda f, w: jax.grad(lambda w: jnp.sum(f(w)))(w),
    "call": lambda f, w: jnp.max(jax.jit(f)(w)),
    "checkpoint": lambda f, w: jnp.max(jax.checkpoint(f)(w)),
    "loop": lambda f, w: jnp.max(jax.lax.scan(lambda c, _: (c, f(c)), w, None, 2)[1]),
    "map": lambda f, w: jnp.max(jax.vmap(f)(jnp.stack([w, w]))),
    "branch": lambda f, w: jnp.max(jax.lax.cond(w > 0, f, lambda w: jnp.zeros(2), w)),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("depth", [1, 2])
def test_actor_within_the_learner_reads_new_parameters(around, depth, devices):
    """It squares w, which grows by 1: the w of t - 1 between fragments, the w of t within the learner."""

    @fdg.fragment("actor", in_axes=(None, 0), name="act")
    def square(w, x):
        return w * w * x

    def loss(w, x):
        return AROUND[around](lambda w: square(w, x), w)

    inner = fdg.fragment("gradient", in_axes=(None, 0), out_axes=None, name="slope")(loss)

    @fdg.fragment("learner", in_axes=(None, 0), out_axes=(None, None))
    def learn(w, x):
        return w + 1 + 0 * jnp.sum(x), (inner if depth == 2 else loss)(w, x)

    def iterate(state):
        x = jnp.ones(2)
        new, inside = learn(state["w"], square(state["w"], x) * 0 + x)
        return {"w": new}, {"between": jnp.max(square(state["w"], x)), "inside": inside}

    groups = {**TWO, "gradient": "learners"}
    metrics, _ = run(iterate, {"w": jnp.float32(1)}, groups, 1, 4, devices[:2])
    np.testing.assert_array_equal(metrics["between"], [1, 1, 4, 9])
    np.testing.assert_array_equal(metrics["inside"], [4, 8, 12, 16] if around == "loss" else [1, 4, 9, 16])


def test_fragments_nested_in_an_actor_read_old_parameters(devices):
    """Except a fragment of the group that computes them, here `update`."""

    def nested(role):
        return fdg.fragment(role, in_axes=(None, 0), name=f"inner_{role}")(lambda w, x: w * x)

    @fdg.fragment("actor", in_axes=(None, 0))
    def act(w, x):
        return w * x, nested("critic")(w, x), nested("update")(w, x)

    @fdg.fragment("update", in_axes=(None, 0), out_axes=None)
    def grow(w, x):
        return w + 1 + 0 * jnp.sum(x)

    def iterate(state):
        found = act(state["w"], jnp.ones(2))
        return {"w": grow(state["w"], found[0])}, dict(zip("abc", map(jnp.max, found), strict=True))

    groups = {"actor": "actors", "critic": "critics", "update": "servers"}
    metrics, engine = run(iterate, {"w": jnp.float32(1)}, groups, 2, 5, devices[:3])
    np.testing.assert_array_equal(metrics["a"], [1, 1, 1, 2, 3])
    np.testing.assert_array_equal(metrics["b"], [1, 1, 1, 2, 3])
    np.testing.assert_array_equal(metrics["c"], [1, 2, 3, 4, 5])
    assert engine.plan.delayed.readers == ("act", "inner_critic")


# --- on separate devices ---


@pytest.mark.parametrize(
    ("program", "groups"), [(scanned_pass_through, COARSE), (alternating, CENTRAL), (two_readers, COARSE)]
)
def test_groups_on_separate_devices(program, groups, devices):
    """Programs that exchange values agree with plain Python."""
    algorithm = Algorithm(program, Looped(), START)
    graph = fdg.trace(algorithm)
    used = {groups[f.role] for f in graph.fragments}
    placed = tuple((role, group) for role, group in groups.items() if group in used)
    engine = fdg.compile(algorithm, Roles(placed, 2), devices[: len(used)])
    state, metrics = engine.run(engine.init(0), 5)
    expected, each = python(program, START, groups, 2, 5)
    assert_equal((expected, each[-1]), (state.state, {name: m[-1] for name, m in metrics.items()}))


@jax.custom_jvp
def second(_, x):
    return x


second.defjvp(lambda primals, tangents: (primals[1], tangents[1]))

BODIES = {
    "call": lambda f, x: jax.jit(f)(x),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "loop": lambda f, x: jax.lax.scan(lambda c, _: (c, f(x)), 0.0, None, 2)[1][0],
    "carry": lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 2)[0],
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_unused_operand_with_only_an_old_version(body, devices):
    """Only the actor's older version of `body`'s result exists; `second` ignores it."""

    class IgnoredOperand:
        def init(self, key):
            return jnp.linspace(0, 1, 12), jnp.ones((12, 3))

        @fdg.fragment("actor", in_axes=(0, None), out_axes=0)
        def act(self, seen, w):
            return w + seen

        @fdg.fragment("learner", in_axes=(0, 0), out_axes=0)
        def learn(self, w, x):
            return w + 0.1 * x[:, None]

        def iterate(self, state):
            x, w = state

            def inner(w):
                seen = jnp.sin(w)
                self.act(seen, w)
                return seen

            newest = second(body(inner, w), w)
            return (x, self.learn(w, x)), {"newest": newest.mean()}

    algorithm = IgnoredOperand()
    engine = fdg.compile(algorithm, policies.SingleLearnerCoarse(staleness=1), devices[:2])
    state, metrics = engine.run(engine.init(0), 3)
    plain, expected = algorithm.init(None), []
    for _ in range(3):
        plain, row = algorithm.iterate(plain)
        expected.append(row["newest"])
    np.testing.assert_allclose(metrics["newest"], expected, rtol=1e-6)
    np.testing.assert_allclose(engine.algorithm_state(state)[1], plain[1], rtol=1e-6)
