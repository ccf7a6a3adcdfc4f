"""Schedules: as few programs and moves as the graph allows, carried out as planned, for any program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from fdg.placing.plans import SteppedPlan
from fdg.placing.policy import Group
from fdg.placing.scheduling.schedule import Call, Move, Repeat
from tests.compilations import compilations
from tests.conformance.comparison import assert_same, plain
from tests.placing.schedules import assert_valid, described
from tests.user_algorithm import Walker

# --- golden schedules, worked out by hand ---

FOUR = {  # policies on 3 + 1 devices
    "coarse": policies.SingleLearnerCoarse(),
    "late": policies.SingleLearnerCoarse(staleness=1),
    "fine": policies.SingleLearnerFine(),
    "environments": policies.Environments(),
    "central": policies.Central(),
}

# The learner needs the positions [T, B, FEATURES] that were seen and their scores [T, B] (the judge has no
# place of its own and goes where rewards are made); the actors need the weight. Nothing else has a reader on
# the other side: momentum stays with the learner, positions, ages and keys with the actors.
COARSE = """\
actors: act+step+act.2+judge
actors -> learners: f32[6,48,3] f32[6,48]
learners: learn+gradient+update
later: learners -> actors: f32[3]"""

# An action [B] goes out and a position [B, FEATURES] comes back, each step. The learner stacks the positions
# that it saw anyway; rewards stay with the workers until the judge has scored them, once. `act.2` needs the
# last positions, which have already come back for the next iteration's first step. Keys are split where they
# are used, with the learner; ahead of the loop each side makes the zeros that it stacks into.
FINE = """\
learners: glue
workers: glue
6 times:
  learners: act
  learners -> workers: f32[48]
  workers: step
  later: workers -> learners: f32[48,3]
workers: judge
workers -> learners: f32[6,48]
learners: act.2+learn+gradient+update"""

# The worker takes gradients on the samples that it has; only they and the weight cross, each update.
CENTRAL = """\
workers: act+step+act.2+judge
3 times:
  workers: gradient
  workers -> servers: f32[3]
  servers: update
  later: servers -> workers: f32[3]"""


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        # One late weight is one more array of the state, kept by the actors: the same programs and moves.
        *[("coarse", COARSE), ("late", COARSE)],
        # They differ in where roles go that Walker does not have.
        *[("fine", FINE), ("environments", FINE)],
        ("central", CENTRAL),
    ],
)
def test_golden_schedules_of_walker(policy, expected):
    plan = fdg.place(Walker(48), FOUR[policy], 4)
    assert "\n".join(described(plan.schedule)) == expected
    assert_valid(plan.schedule)


@pytest.mark.parametrize("policy", [policies.GPUOnly(), policies.MultiLearner(), policies.Central()])
def test_groups_on_the_same_devices_are_one_program(policy):
    plan = fdg.place(Walker(48), policy, 1 if policy == policies.Central() else 4)
    assert not isinstance(plan, SteppedPlan)
    assert [p.name for p in plan.programs] == ["train"]
    assert not [m for m in plan.movements if m.how == "transfer"]


# --- a schedule that is wrong is seen to be ---


def changed(schedule, change):
    """The schedule with `change(steps)` for the steps at every depth."""

    def walk(steps):
        steps = [dataclasses.replace(s, steps=walk(s.steps)) if isinstance(s, Repeat) else s for s in steps]
        return tuple(change(steps))

    return dataclasses.replace(schedule, steps=walk(schedule.steps))


def moves_dropped(steps):
    return [step for step in steps if not isinstance(step, Move)]


def moves_doubled(steps):
    return [twin for step in steps for twin in ([step, step] if isinstance(step, Move) else [step])]


def programs_first(steps):
    """Every move is too late by one step."""
    return sorted(steps, key=lambda step: isinstance(step, Move))


def one_value_dropped(steps):
    return [
        dataclasses.replace(s, pairs=s.pairs[1:], freed=frozenset()) if isinstance(s, Move) else s
        for s in steps
    ]


def freed_too_early(steps):
    return [
        dataclasses.replace(s, freed=frozenset(range(len(s.inputs)))) if isinstance(s, Call) else s
        for s in steps
    ]


@pytest.mark.parametrize("policy", ["coarse", "fine", "central"])
def test_a_wrong_schedule_is_not_valid(policy):
    schedule = fdg.place(Walker(48), FOUR[policy], 4).schedule
    assert_valid(changed(schedule, list))
    for change in (moves_dropped, moves_doubled, programs_first, one_value_dropped):
        with pytest.raises(AssertionError):
            assert_valid(changed(schedule, change))
    if policy == "fine":
        with pytest.raises(AssertionError):
            assert_valid(changed(schedule, freed_too_early))


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


def reverse_scan(x):
    last, rows = jax.lax.scan(
        lambda c, r: (there(here(c + r)), c * r), x, jnp.outer(jnp.arange(4.0), x), reverse=True
    )
    return (last + rows[0] - rows[3],), {}


def nested_scans(x):
    def inner(c, _):
        c = there(here(c))
        return c, here(c)

    def outer(c, r):
        c, rows = jax.lax.scan(inner, c + r, None, length=2)
        return there(c), rows

    last, rows = jax.lax.scan(outer, x, jnp.outer(jnp.arange(3.0), x))
    return (last,), {"rows": jnp.sum(rows)}


def keys_stacked(x, keys):
    def one(c, _):
        x, keys = c
        keys = on("here")(lambda keys: jax.vmap(lambda key: jax.random.split(key, 1)[0])(keys))(keys)
        return (there(x + on("here")(jax.vmap(jax.random.uniform))(keys)), keys), keys

    (x, _), stacked = jax.lax.scan(one, (x, keys), None, length=3)
    return (x, stacked[1]), {}


def captured(x):
    between, inside = jnp.asarray(X), np.asarray(X)  # one of them a value, the other written into a fragment
    x = on("there")(lambda x: x + inside)(here(x) * between)
    return (x + between,), {}


def captured_in_calls(x):
    """In scans, two deep; one of the arrays twice."""
    both = jax.jit(lambda x: there(here(x) * jnp.asarray(X)) + jnp.asarray(1 - X))

    def outer(x, _):
        return both(jax.lax.scan(lambda x, _: (both(x), None), x, None, length=2)[0]), None

    return (jax.lax.scan(outer, x, None, length=3)[0],), {}


def captured_in_a_fragment(x):
    """Which is opened, in a scan, for the fragment of the other group inside it."""
    inner = on("here")(lambda x: 0.5 * x)
    outer = on("there")(lambda x: x - 0.1 * inner(x * jnp.asarray(X)))
    return (jax.lax.scan(lambda x, _: (outer(x), None), x, None, length=2)[0],), {}


def one_array_twice(x, y):
    x = there(here(x + y))
    return (x, x), {}


def leaf_as_metric(x, n):
    return (there(here(x)), n + 1), {"n": n + 1, "old": n}


def carries_of_one_start(x):
    zero = jnp.zeros_like(x)
    (a, b), _ = jax.lax.scan(
        lambda c, _: ((here(c[0] + x), there(c[1] + c[0])), None), (zero, zero), None, length=3
    )
    return (a + b,), {}


def one_trip(x):
    return (jax.lax.scan(lambda c, _: (there(here(c)), None), x, None, length=1)[0],), {}


def no_trip(x):
    last, rows = jax.lax.scan(lambda c, r: (there(here(c)), c + r), x, jnp.zeros((0, 12)))
    return (there(here(last)),), {"rows": jnp.sum(rows)}


def literals(x, n):
    return (there(here(x)), jnp.int32(7)), {"one": 1.0, "two": jnp.float32(2)}


def inside_calls(x):
    both = jax.jit(lambda x: there(here(x)))
    x = both(x) + jax.checkpoint(both)(x)
    return (x + jax.grad(lambda x: jnp.sum(jax.checkpoint(both)(x) ** 2))(x),), {}


@jax.custom_vjp
def _clipped(x):
    return there(here(x))


_clipped.defvjp(lambda x: (_clipped(x), x), lambda x, g: (here(g) + x,))


def custom_vjp(x):
    return (_clipped(x) + jax.grad(lambda x: jnp.sum(_clipped(x) * x))(x),), {}


def passing_carry(x, y):
    (a, b, c), _ = jax.lax.scan(
        lambda c, _: ((there(here(c[0] + c[1])), c[1], c[0]), None), (x, y, x), None, length=3
    )
    return (a + c, b), {}


def swapped_leaves(x, y, z):
    return (y, z, there(here(x))), {}


def swapped_carries(x, y):
    (a, b, c), _ = jax.lax.scan(
        lambda c, _: ((c[1], c[2], there(here(c[0]))), None), (x, y, x), None, length=4
    )
    return (a + b, c), {}


def integers_and_bools(x, n, flags):
    n = on("here")(lambda n, flags: jnp.where(flags, n + 1, n))(n, flags)
    flags = on("there")(lambda n: n % 3 == 0)(n)
    return (x + flags * 1.0, n, ~flags), {"flags": jnp.sum(flags)}


def untouched(x, y):
    return (there(here(x)), y), {}


def nothing_between(x):
    """No fragment at one end: the leaf is handed from one group to the other and back."""
    return (here(there(x)),), {"mean": jnp.mean(x)}


TRAPS = {
    reverse_scan: (X,),
    nested_scans: (X,),
    keys_stacked: (X, "keys"),
    captured: (X,),
    captured_in_calls: (X,),
    captured_in_a_fragment: (X,),
    one_array_twice: (X, X),
    leaf_as_metric: (X, np.int32(0)),
    carries_of_one_start: (X,),
    one_trip: (X,),
    no_trip: (X,),
    literals: (X, np.int32(0)),
    inside_calls: (X,),
    custom_vjp: (X,),
    passing_carry: (X, X),
    swapped_leaves: (X, X + 1, X + 2),
    swapped_carries: (X, X + 1),
    integers_and_bools: (X, np.arange(12, dtype=np.int32), X > 0.5),
    untouched: (X, np.arange(3, dtype=np.uint8)),
    nothing_between: (X,),
}


@pytest.mark.parametrize("body", TRAPS, ids=lambda body: body.__name__)
def test_traps(body, devices):
    keys = jax.random.split(jax.random.key(1), 12)
    start = tuple(keys if isinstance(x, str) else x for x in TRAPS[body])
    algorithm = Trap(start, body)
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


def branch(x):
    return (jax.lax.cond(jnp.sum(x) > 1, here, there, x),), {}


@pytest.mark.parametrize(("body", "kind"), [(while_loop, "while loop"), (branch, "branch (cond)")])
def test_loops_of_unknown_length_and_branches_are_refused(body, kind):
    with pytest.raises(fdg.PlanError) as error:
        fdg.place(Trap((X,), body), Two(), 5)
    for word in (
        "Two() places fragments of one",
        kind,
        " on left",
        " on right",
        "together, or use jax.lax.scan",
    ):
        assert word in str(error.value), str(error.value)


def test_they_are_fine_within_one_group(devices):
    def body(x):
        x = jax.lax.while_loop(lambda x: jnp.max(x) > 0.6, lambda x: 0.9 * here(x), x)
        return (there(jax.lax.cond(jnp.sum(x) > 1, here, lambda x: x + 1, x)),), {}

    engine = fdg.compile(Trap((X,), body), Two(), devices[:5])
    assert_same(plain(engine.algorithm, engine.algorithm.init(None), 2), engine.run(engine.init(0), 2))
