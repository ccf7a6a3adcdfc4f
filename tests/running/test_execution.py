"""Schedules, carried out as planned, for any program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from fdg.placing.plans import SteppedPlan
from fdg.placing.policy import Group
from tests.compilations import compilations
from tests.conformance.comparison import assert_same, plain
from tests.placing.schedules import assert_valid
from tests.refusing import refuses
from tests.user_algorithm import Walker


@pytest.mark.parametrize("policy", [policies.GPUOnly(), policies.MultiLearner(), policies.Central()])
def test_groups_on_the_same_devices_are_one_program(policy):
    plan = fdg.place(Walker(48), policy, 1 if policy == policies.Central() else 4)
    assert not isinstance(plan, SteppedPlan)
    assert [p.name for p in plan.programs] == ["train"]
    assert not [m for m in plan.movements if m.how == "transfer"]


# --- each trap by itself ---


def on(role, *axes, out=0):
    """A fragment of a role, from a function of any number of arrays [B]."""
    return fdg.fragment(role, in_axes=axes or 0, out_axes=out)


def here(x, y=0.0):
    return on("here")(lambda x: jnp.sin(x))(x) + y


def there(x):
    return on("there")(lambda x: 0.5 * jnp.cos(x))(x)


@dataclasses.dataclass(frozen=True)
class Two:
    """`here` on three devices, `there` on two."""

    def place(self, devices):
        return {"here": Group("left", (0, 1, 2)), "there": Group("right", (3, 4))}


@dataclasses.dataclass(frozen=True)
class Trap:
    """An algorithm of one function of the state."""

    start: tuple
    body: object

    def init(self, key):
        return jax.tree.map(jnp.asarray, dict(enumerate(self.start)))

    def iterate(self, state):
        new, metrics = self.body(*state.values())
        return dict(enumerate(new)), metrics


X = np.linspace(0, 1, 12, dtype=np.float32)


def nested_scans(x):
    def inner(c, _):
        c = there(here(c))
        return c, here(c)

    def outer(c, r):
        c, rows = jax.lax.scan(inner, c + r, None, length=2)
        return there(c), rows

    last, rows = jax.lax.scan(outer, x, jnp.outer(jnp.arange(3.0), x))
    return (last,), {"rows": jnp.sum(rows)}


def captured_in_a_fragment(x):
    """Which is opened, in a scan, for the fragment of the other group inside it."""
    inner = on("here")(lambda x: 0.5 * x)
    outer = on("there")(lambda x: x - 0.1 * inner(x * jnp.asarray(X)))
    return (jax.lax.scan(lambda x, _: (outer(x), None), x, None, length=2)[0],), {}


def leaf_as_metric(x, n):
    return (there(here(x)), n + 1), {"n": n + 1, "old": n}


def no_trip(x):
    last, rows = jax.lax.scan(lambda c, r: (there(here(c)), c + r), x, jnp.zeros((0, 12)))
    return (there(here(last)),), {"rows": jnp.sum(rows)}


def inside_calls(x):
    both = jax.jit(lambda x: there(here(x)))
    x = both(x) + jax.checkpoint(both)(x)
    return (x + jax.grad(lambda x: jnp.sum(jax.checkpoint(both)(x) ** 2))(x),), {}


def passing_carry(x, y):
    (a, b, c), _ = jax.lax.scan(
        lambda c, _: ((there(here(c[0] + c[1])), c[1], c[0]), None), (x, y, x), None, length=3
    )
    return (a + c, b), {}


def branch(x, t):
    """Taken in turns; one branch has a fragment of each group, and the other has none."""
    x, rows = jax.lax.cond(t % 2 == 0, lambda x: (there(here(x)), jnp.sum(x)), lambda x: (x, 0.0), x)
    return (x, t + 1), {"rows": rows}


def switch(x, t):
    """Indices from -1 to 4 for three branches, so that it is clamped; one is a constant."""
    branches = [lambda x: there(x), lambda x: there(here(x)), lambda x: jnp.full_like(x, 0.25)]
    return (here(jax.lax.switch(t, branches, x)), t + 1), {}


def branch_in_a_scan(x, t):
    """In a scan, within another branch, and with random keys among its results."""

    def both(x, key):
        return jax.lax.cond(x[0] > 0.4, lambda x: there(here(x)), lambda x: here(x) + 0.1, x), key

    def step(carry, i):
        x, key = carry
        other = lambda x, key: (there(x) + here(x), jax.random.split(key)[0])  # noqa: E731
        return jax.lax.cond((i + t) % 2 == 0, both, other, x, key), None

    (x, key), _ = jax.lax.scan(step, (x, jax.random.key(0)), jnp.arange(3))
    return (x + jax.random.uniform(key, x.shape), t + 1), {}


def untouched(x, y):
    return (there(here(x)), y), {}


TRAPS = {
    nested_scans: (X,),
    captured_in_a_fragment: (X,),
    leaf_as_metric: (X, np.int32(0)),
    no_trip: (X,),
    inside_calls: (X,),
    passing_carry: (X, X),
    branch: (X, np.int32(0)),
    switch: (X, np.int32(-1)),
    branch_in_a_scan: (X, np.int32(0)),
    untouched: (X, np.arange(3, dtype=np.uint8)),
}


@pytest.mark.parametrize("body", TRAPS, ids=lambda body: body.__name__)
def test_traps(body, devices):
    algorithm = Trap(TRAPS[body], body)
    engine = fdg.compile(algorithm, Two(), devices[:5])
    assert len(engine.plan.groups) == 2
    assert_valid(engine.plan.schedule)
    engine.compile(4)
    state = jax.device_put(algorithm.init(None), jax.tree.map(lambda s: s.sharding, engine.state_shape))
    with compilations() as heard:
        actual = engine.run(state, 4)
    assert [name for name in heard if "backend_compile" in name] == []
    assert_same(plain(algorithm, algorithm.init(None), 4), actual)
    planned = sum(m.bytes_per_iteration for m in engine.plan.movements if m.how == "transfer")
    assert engine.moved_bytes == 4 * planned


# --- what cannot be stepped is refused ---


def while_loop(x):
    return (jax.lax.while_loop(lambda x: jnp.max(x) > 0.1, lambda x: there(here(x)), x),), {}


def branch_with_effects(x):
    def noisy(x):
        jax.debug.callback(lambda: None)
        return there(x)

    return (jax.lax.cond(jnp.sum(x) > 1, here, noisy, x),), {}


def branch_with_a_loop(x):
    halve = lambda x: jax.lax.while_loop(lambda x: jnp.max(x) > 0.1, lambda x: 0.5 * x, there(x))  # noqa: E731
    return (jax.lax.cond(jnp.sum(x) > 1, here, halve, x),), {}


BRANCH = "branch (cond)"


@pytest.mark.parametrize(
    ("body", "kind"),
    [(while_loop, "while loop"), (branch_with_effects, BRANCH), (branch_with_a_loop, BRANCH)],
)
def test_refused_loops_and_branches(body, kind):
    words = "Two() places fragments of one", kind, " on left", " on right", "together, or use jax.lax.scan"
    with refuses(*words, kind=fdg.PlanError):
        fdg.place(Trap((X,), body), Two(), 5)


def test_they_are_fine_within_one_group(devices):
    def body(x):
        x = jax.lax.while_loop(lambda x: jnp.max(x) > 0.6, lambda x: 0.9 * here(x), x)
        return (there(jax.lax.cond(jnp.sum(x) > 1, here, lambda x: x + 1, x)),), {}

    engine = fdg.compile(Trap((X,), body), Two(), devices[:5])
    assert_same(plain(engine.algorithm, engine.algorithm.init(None), 2), engine.run(engine.init(0), 2))
