"""Which version of each value a fragment reads: plain Python that keeps old parameters by group is the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
from fdg.placing.staleness.flow import Flow
from tests.placing.versions import (
    Looped,
    Python,
    Roles,
    Same,
    Algorithm,
    Unrolled,
    Versions,
    assert_equal,
    delayed_graph,
    python,
    rewritten,
)

COARSE = {
    "environment": "actors",
    "encoder": "actors",
    "actor": "actors",
    "learner": "learners",
    "update": "learners",
}
CENTRAL = {
    "environment": "workers",
    "encoder": "workers",
    "actor": "workers",
    "learner": "workers",
    "update": "servers",
}
THREE = {"environment": "a", "encoder": "b", "actor": "a", "learner": "c", "update": "b"}
GROUPS = {"coarse": COARSE, "central": CENTRAL, "three": THREE}
START = (("w", 1.0), ("v", 2.0), ("x", 0.5))


def act(p, w, x, role="actor", name="act"):
    return p.fragment(role, name, lambda w, x: (0.5 * w + x,), w, x)[0]


def hand_on(p, w, x, role="actor", name="hand"):
    return p.fragment(role, name, lambda w, x: (Same(0), w - 0.25 * x), w, x)


def learn(p, w, y, role="learner", name="learn"):
    return p.fragment(role, name, lambda w, y: (w + 1.0 + 0.125 * y,), w, y)[0]


def scanned_hand_on(p, s):
    """The carry holds what the actor hands on; a metric reads the weight in the loop."""

    def trip(carry, i):
        w, x, seen = carry
        w, x = hand_on(p, w, x)
        return w, x, p.glue(lambda seen, w, i: seen + w * (i + 1), seen, w, i)

    w, x, seen = p.loop(3, trip, (s["w"], s["x"], p.glue(lambda x: 0 * x, s["x"])))
    new = learn(p, w, x)
    return {"w": new, "v": s["v"], "x": x}, {"seen": seen, "w": w}


def two_readers(p, s):
    """Code between fragments that leads to both groups, in a loop and outside of it."""
    halved = p.glue(lambda w: 0.5 * w, s["w"])

    def trip(carry, i):
        x, y = carry
        twice = p.glue(lambda h, i: 2 * h + 0.1 * i, halved, i)
        return act(p, twice, x), learn(p, twice, y, "update", "step_learn")

    x, y = p.loop(2, trip, (s["x"], s["v"]))
    return {"w": learn(p, s["w"], y, "update"), "v": y, "x": x}, {"h": halved}


def everyone_reads(p, s):
    """Every fragment of the actors' group reads the old weight: encoder, environment and actor."""

    def trip(carry, i):
        (x,) = carry
        e = act(p, s["w"], x, "encoder", "encode")
        a = act(p, s["w"], e)
        return (act(p, s["w"], a, "environment", "step"),)

    (x,) = p.loop(2, trip, (s["x"],), "while")
    w = learn(p, s["w"], x, "update")
    return {"w": w, "v": act(p, s["v"], w), "x": x}, {"w": s["w"]}


def nested(p, s):
    """Loops in loops and calls; the inner hands the weight on, the outer carries it."""

    def inner(carry, i):
        w, x = carry
        return p.call("remat", lambda w, x: hand_on(p, w, x), w, x)

    def outer(carry, i):
        w, x, total = carry
        w, x = p.loop(2, inner, (w, x))
        total = p.call("jit", lambda t, w: (p.glue(lambda t, w: t + w, t, w),), total, w)[0]
        return w, act(p, w, x, "environment", "step"), total

    w, x, total = p.loop(2, outer, (s["w"], s["x"], s["v"]))
    w, y = p.call("custom_vjp", lambda w, x: hand_on(p, w, x, name="again"), w, x)
    return {"w": learn(p, w, y, "update"), "v": total, "x": y}, {"total": total}


def taking_turns(p, s):
    """A gradient on the workers and an update on the servers alternate; only the first trip reads an old weight."""

    def trip(carry, i):
        w, x = carry
        g = act(p, w, x, "learner", "gradient")
        return learn(p, w, g, "update"), p.glue(lambda x, g: x + 0.1 * g, x, g)

    x = act(p, s["w"], s["x"])
    w, x = p.loop(3, trip, (s["w"], x))
    return {"w": w, "v": act(p, s["w"], w), "x": x}, {"x": x}


def branches(p, s):
    """One branch hands on, another makes; code after it reads the choice."""
    w, x = s["w"], s["x"]
    choice = p.glue(lambda v: jnp.sin(3 * v), s["v"])
    w2, y = p.choose(
        choice,
        lambda w, x: hand_on(p, w, x),
        lambda w, x: (learn(p, w, x, "update", "other"), act(p, w, x)),
        w, x,
    )  # fmt: skip
    z = act(p, w2, y)
    q = p.glue(lambda w, z: w - z, w2, z)
    return {"w": learn(p, w2, z, "update"), "v": p.glue(lambda v: v + 1, s["v"]), "x": q}, {"z": z, "q": q}


def made_within(p, s):
    """What another group makes within the iteration is read as it is."""
    new = learn(p, s["w"], s["x"], "update")
    w, x = hand_on(p, new, s["x"])
    _, x = hand_on(p, s["v"], x)
    return {"w": w, "v": learn(p, s["v"], w, "update"), "x": x}, {"w": w}


PROGRAMS = [scanned_hand_on, two_readers, everyone_reads, nested, taking_turns, branches, made_within]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_loops_calls_and_unrolled_code_against_plain_python(program, groups, staleness):
    arguments = START, GROUPS[groups], staleness, 6
    expected = python(program, *arguments)
    assert_equal(expected, rewritten(program, *arguments, Looped()))
    if staleness in (0, 2):
        assert_equal(expected, rewritten(program, *arguments, Unrolled()))


# --- random programs ---

ROLES = ("actor", "environment", "encoder", "learner", "update")
HOWS = ("jit", "remat", "custom_vjp", "custom_jvp")


class Random:
    """A program of random lines; drawn anew, but the same, for each interpreter."""

    def __init__(self, seed):
        self.seed = seed

    def __call__(self, p, s):
        self.counter = s["t"]
        draw = np.random.default_rng(self.seed)
        values = self._lines(p, draw, [s["w"], s["v"], s["x"]], 6, 2)
        # So that there is somebody who waits, and something to wait for.
        made = learn(p, values[draw.integers(3)], values[-1], "update")
        values.append(act(p, values[draw.integers(3)], made))
        values.append(made)
        ends = draw.integers(len(values), size=3)
        squashed = [p.glue(lambda x: 2 * jnp.tanh(0.5 * x), values[i]) for i in ends]
        metrics = {f"m{i}": values[i] for i in draw.integers(len(values), size=3)}
        return dict(zip("wvx", squashed, strict=True)) | {"t": p.glue(lambda t: t + 1, s["t"])}, metrics

    def _lines(self, p, draw, values, count, depth):
        values = list(values)
        for _ in range(count):
            kind = draw.choice(
                ["fragment", "fragment", "hand_on", "glue", *["loop", "call", "choose"] * (depth > 0)]
            )
            a, b, c = (values[i] for i in draw.integers(len(values), size=3))
            role, state = str(draw.choice(ROLES)), int(draw.integers(2**31))
            if kind == "fragment":
                values += p.fragment(role, role, lambda a, b: (jnp.sin(a) + 0.5 * b, a * 0.5), a, b)
            elif kind == "hand_on":
                values += p.fragment(role, f"hand_{role}", lambda a, b: (Same(1), jnp.cos(b), Same(0)), a, b)
            elif kind == "glue":
                values.append(p.glue(lambda a, b: 0.6 * a - 0.3 * b, a, b))
            elif kind == "call":
                values += p.call(str(draw.choice(HOWS)), self._inner(p, state, depth), a, b, c)
            elif kind == "choose":
                choice = p.glue(lambda x: jnp.sin(x), self.counter)
                values += p.choose(
                    choice, self._inner(p, state, depth), self._inner(p, state + 1, depth), a, b, c
                )
            else:
                inner = self._inner(p, state, depth)
                keep, how = draw.random() < 0.5, str(draw.choice(["scan", "while"]))

                def trip(carry, i, inner=inner, keep=keep):
                    first, *others = inner(*carry)
                    return (first, carry[1], others[1]) if keep else (first, *others)

                values += p.loop(int(draw.integers(2, 4)), trip, (a, b, c), how)
        return values

    def _inner(self, p, seed, depth):
        def function(a, b, c):
            draw = np.random.default_rng(seed)
            values = self._lines(p, draw, [a, b, c], 2, depth - 1)
            return tuple(values[i] for i in draw.integers(len(values), size=3))

        return function
