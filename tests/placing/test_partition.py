"""Partition into groups: code between fragments, holders of the state, moves, and programs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
from fdg.placing.policy import Group
from tests.placing.schedules import assert_valid, described


def mark(role, name):
    return fdg.fragment(role, name=name)


here, here2, here3 = (mark("here", name)(lambda *xs: sum(map(jnp.sin, xs))) for name in ("h", "h2", "h3"))
there, there2 = (mark("there", name)(lambda *xs: sum(map(jnp.cos, xs))) for name in ("t", "t2"))


@dataclasses.dataclass(frozen=True)
class Two:
    def place(self, devices):
        return {"here": Group("left", (0, 1)), "there": Group("right", (2,))}


def schedule(iterate, devices=3, **leaves):
    """The schedule of an iteration `(**leaves) -> (new leaves, metrics)` on two groups."""

    class Mine:
        def init(self, key):
            return {name: jnp.asarray(x) for name, x in leaves.items()}

        def iterate(self, state):
            new, metrics = iterate(**state)
            return {**state, **new}, metrics

    found = fdg.place(Mine(), Two(), devices).schedule
    assert_valid(found)
    return found


def steps(iterate, **leaves):
    return described(schedule(iterate, **leaves))


def primitives(found, group):
    """Names of the operations that a group runs between fragments."""
    return {
        eqn.primitive.name
        for call, _ in found.calls()
        if call.group == group
        for eqn in call.equations
        if not str(eqn.params.get("name", "")).startswith("fdg:")
    }


X = np.linspace(0, 1, 8, dtype=np.float32)


# --- code between fragments ---


def test_code_runs_with_its_consumer():
    """The fragment's result moves, and the consumer computes exp."""

    def iterate(x):
        return {"x": there(jnp.exp(here(x)))}, {}

    found = schedule(iterate, x=X)
    assert "exp" in primitives(found, "right") and "exp" not in primitives(found, "left")


def test_cheap_code_is_copied():
    """Both groups need exp(y), and y is on the left: one move, and exp on each group."""

    def iterate(x):
        z = jnp.exp(here(x))
        return {"x": here2(z)}, {"m": jnp.sum(there(z))}

    found = schedule(iterate, x=X)
    assert "exp" in primitives(found, "left") & primitives(found, "right")
    assert described(found) == ["left: h+h2", "left -> right: f32[8]", "right: t"]


def test_cheap_code_has_less_than_a_million_operations():
    big = jnp.ones((1024, 1024))
    small = jnp.ones((512, 512))
    for x, copied in ((small, True), (big, False)):

        def iterate(x):
            z = jnp.exp(x)
            return {"x": here(z)}, {"m": jnp.sum(there(z))}

        found = schedule(iterate, x=x)
        assert ("exp" in primitives(found, "left") & primitives(found, "right")) == copied


def test_code_without_a_consumer_stays_with_its_inputs():
    def iterate(x, y):
        return {"x": here(x), "y": there(y)}, {"mine": jnp.max(here2(x)), "yours": jnp.min(there2(y))}

    found = schedule(iterate, x=X, y=X)
    assert "reduce_max" in primitives(found, "left") and "reduce_min" in primitives(found, "right")
    assert not list(found.moves())
    assert [value.group for value in found.metrics] == ["left", "right"]


def test_code_runs_with_its_largest_inputs():
    def iterate(x, y):
        a, b = here(x), there(y)
        return {"x": a, "y": b}, {"m": jnp.sum(jnp.concatenate([a, b]))}

    small, large = jnp.zeros(2), jnp.zeros(64)
    for x, y, group in ((large, small, "left"), (small, large, "right")):
        (metric,) = schedule(iterate, x=x, y=y).metrics
        assert metric.group == group


def test_code_without_inputs_or_readers_runs_on_the_first_group():
    def iterate(x, n):
        return {"x": there(here(x)), "n": n + 1}, {"seven": jnp.arange(8)[7]}

    found = schedule(iterate, x=X, n=jnp.int32(0))
    assert [value.group for value in found.metrics] == ["left"]


# --- which groups hold the state ---


def holders_of(found, **leaves):
    return {
        name: [value.group for value in places]
        for name, places in zip(sorted(leaves), found.leaves, strict=True)
    }


def test_leaf_is_held_by_its_readers():
    """`both` is read by both groups and computed on the right: owned there, replicated on the left."""

    def iterate(mine, yours, both, unused):
        mine = here(mine, both)
        made = there(yours, both)
        return {"mine": mine, "yours": made, "both": there2(made)}, {}

    leaves = dict.fromkeys(("mine", "yours", "both", "unused"), X)
    found = schedule(iterate, **leaves)
    assert holders_of(found, **leaves) == {
        "both": ["right", "left"],
        "mine": ["left"],
        "unused": ["left"],  # the first fragment's group
        "yours": ["right"],
    }
    # The replica is updated once per iteration, for the next one.
    assert [(m.delay, m.source, m.target) for m, _ in found.moves()] == [("iteration", "right", "left")]


def test_write_only_leaf_is_held_where_it_is_computed():
    found = schedule(lambda x, y: ({"x": here(x), "y": there(here(x))}, {}), x=X, y=X)
    assert holders_of(found, x=X, y=X) == {"x": ["left"], "y": ["right"]}


def test_keys_are_split_on_both_groups():
    """Splitting a key is cheap, so each group does it and no key moves."""

    def iterate(key, x):
        key, a, b = jax.random.split(key, 3)
        draw = mark("here", "draw")(lambda x, keys: x + jax.vmap(jax.random.uniform)(keys))
        stir = mark("there", "stir")(lambda x, keys: x - jax.vmap(jax.random.uniform)(keys))
        x = stir(draw(x, jax.random.split(a, 8)), jax.random.split(b, 8))
        return {"key": key, "x": x}, {}

    found = schedule(iterate, key=jax.random.key(0), x=X)
    assert {m.source for m, _ in found.moves()} == {"left", "right"}
    assert all(len(m.pairs) == 1 and m.pairs[0][0].shape == (8,) for m, _ in found.moves())
    assert all(jnp.issubdtype(m.pairs[0][0].variable.aval.dtype, jnp.floating) for m, _ in found.moves())


# --- moves ---


def test_value_moves_once():
    """Two fragments of the other group read it, one of them later and after a round trip."""

    def iterate(x):
        a = here(x)
        b = there(a)
        c = here2(b)
        return {"x": there2(a, b, c)}, {}

    assert steps(iterate, x=X) == [
        "left: h",
        "left -> right: f32[8]",
        "right: t",
        "right -> left: f32[8]",
        "left: h2",
        "left -> right: f32[8]",
        "right: t2",
        "later: right -> left: f32[8]",
    ]


def test_values_move_together():
    def iterate(x, y):
        a, b = here(x), here2(y)
        c = there(a, b)
        return {"x": c, "y": b}, {}

    moves = [move for move, _ in schedule(iterate, x=X, y=X).moves()]
    assert [(m.source, len(m.pairs)) for m in moves] == [("left", 2), ("right", 1)]


def test_constants_are_placed_and_never_moved():
    table = np.linspace(1, 2, 8, dtype=np.float32)

    def iterate(x):
        t = jnp.asarray(table)
        return {"x": there(here(x) * t) + t}, {}

    found = schedule(iterate, x=X)
    assert {value.group for _, value in found.constants} <= {"left", "right"}
    assert len(set(found.constants)) == len(found.constants)
    moved = {a.variable for m, _ in found.moves() for a, _ in m.pairs}
    assert moved.isdisjoint(value.variable for _, value in found.constants)


def test_loop_constants_move_once():
    """The left group's result is read in every trip on the right, and moves before the loop.

    The initial carry does not move: the right group holds it from the previous iteration.
    """

    def iterate(x):
        a = here(x)

        def one(c, _):
            return here2(there(c, a)), None

        return {"x": jax.lax.scan(one, x, None, length=5)[0]}, {}

    found = schedule(iterate, x=X)
    crossings = {(m.source, times): len(m.pairs) for m, times in found.moves()}
    assert crossings == {("left", 1): 1, ("right", 5): 1, ("left", 5): 1}


def test_move_names_the_fragments_behind_a_carried_value():
    """The value is computed from w: from the previous trip, or at first from the previous iteration."""

    def iterate(w, x):
        def one(carry, _):
            w, x = carry
            costly = jnp.exp(w)  # computed on one group and moved, since it has over a million operations
            return (here(w, costly), there(x, costly)), None

        (w, x), _ = jax.lax.scan(one, (w, x), None, length=2)
        return {"w": here2(w), "x": x}, {}

    large = np.zeros((1024, 1024), np.float32)
    ((move, times),) = schedule(iterate, w=large, x=large).moves()
    assert (move.source, set(move.sources), times) == ("left", {"h", "h2"}, 2)


# --- programs ---


def test_consecutive_fragments_of_a_group_are_one_program():
    def iterate(x, y):
        return {"x": there(here3(here2(here(x)))), "y": there2(y)}, {}

    assert [(c.group, c.fragments) for c, _ in schedule(iterate, x=X, y=X).calls()] == [
        ("left", ("h", "h2", "h3")),
        ("right", ("t2", "t")),  # fragments that wait for nothing come first
    ]


def test_fragment_joins_the_program_of_its_reader():
    """Only h3 reads h2, and h3 waits for the right group: one program for both."""

    def iterate(x, y):
        c = there(y)
        return {"x": here3(here2(x), c), "y": c}, {}

    assert [(c.group, c.fragments) for c, _ in schedule(iterate, x=X, y=X).calls()] == [
        ("right", ("t",)),
        ("left", ("h2", "h3")),
    ]


def test_results_for_other_groups_are_computed_first():
    """h's result goes to the right, so h runs at once; h2 may run in either program."""

    def iterate(x, y):
        c = there(here(x))
        return {"x": here3(here2(y), c)}, {}

    found = [(c.group, c.fragments) for c, _ in schedule(iterate, x=X, y=X).calls()]
    assert [group for group, _ in found] == ["left", "right", "left"]
    assert found[1] == ("right", ("t",))


def test_last_reader_donates():
    """The last reader of the old x donates it, but not y, which is unchanged state."""

    def iterate(x, y):
        return {"x": here(x, y)}, {"m": jnp.sum(there(y))}

    found = schedule(iterate, x=X, y=X)
    (call,) = [c for c, _ in found.calls() if c.group == "left"]
    freed = [call.inputs[i] for i in call.freed]
    kept = [value for i, value in enumerate(call.inputs) if i not in call.freed]
    (x, *_), (y, *_) = found.leaves
    assert freed == [x]
    assert {value.variable for value in kept} == {y.variable}
    assert call.donated == call.freed


# --- layouts ---


def test_carried_leaf_has_one_layout():
    """The leaf is split where it is read, and its next value comes from code that mixes the batch."""

    def iterate(x, y):
        a = here(x)
        y = there(y)
        rotated = jnp.roll(jnp.sort(a)[::-1], 3)  # sorting mixes the batch
        (x, _), _ = jax.lax.scan(
            lambda c, _: ((here2(c[0]), there2(c[1])), None), (rotated, y), None, length=2
        )
        return {"x": jnp.sort(x), "y": y}, {}

    found = schedule(iterate, x=X, y=X)
    (x, *_), _ = found.leaves
    assert x.axis == 0
    assert all(a.axis == b.axis for a, b in found.carry)


@pytest.mark.parametrize("swapped", [False, True])
def test_swapped_leaves_have_one_layout(swapped):
    """For fragments, one leaf is split and the other replicated; swapped leaves must suit both."""
    share = fdg.fragment("there", in_axes=None, out_axes=None, name="share")(jnp.sin)

    def iterate(x, y):
        a, b = here(x), share(y)
        return ({"x": y, "y": a} if swapped else {"x": a, "y": b}), {"m": jnp.sum(b)}

    found = schedule(iterate, x=X, y=X)
    axes = [places[0].axis for places in found.leaves]
    assert axes == ([0, 0] if swapped else [0, None])


REORDERINGS = {
    "swap": lambda a, b, c, x: (b, a, c),
    "rotate": lambda a, b, c, x: (b, c, a),
    "shift": lambda a, b, c, x: (b, c, x),
}


@pytest.mark.parametrize("reorder", REORDERINGS)
@pytest.mark.parametrize("reader", [None, here2, there2])
@pytest.mark.parametrize("depth", [1, 2])
def test_reordered_carry_of_a_loop(reorder, reader, depth, devices):
    """No trip reads the reordered values, so only a reader after the loop, if any, determines their group."""

    def loop(carry, x, depth):
        def trip(carry, _):
            y, others = carry
            carry = there(here(y)), REORDERINGS[reorder](*others, x)
            return (loop(carry, x, depth - 1) if depth > 1 else carry), None

        return jax.lax.scan(trip, carry, None, 2 + depth)[0]

    class Mine:
        def init(self, key):
            return {name: jnp.arange(4.0) + i for i, name in enumerate("abcx")}

        def iterate(self, s):
            y, (a, _, _) = loop((s["x"], (s["a"], s["b"], s["c"])), s["x"], depth)
            return {**s, "a": s["b"], "b": s["a"], "x": y if reader is None else reader(y, a)}, {}

    algorithm = Mine()
    engine = fdg.compile(algorithm, Two(), devices[:3])
    assert_valid(engine.plan.schedule)
    state, _ = engine.run(engine.init(0), 2)
    expected = jax.jit(lambda s: algorithm.iterate(algorithm.iterate(s)[0])[0])(algorithm.init(None))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), expected, engine.algorithm_state(state)
    )
