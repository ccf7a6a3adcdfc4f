"""Lag in micro-batches: which version each of them reads, against a count in plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import fdg
import policies
from fdg.errors import PlanError
from tests.placing.versions import Roles
from tests.refusing import refuses

FOUR = (("actor", "actors"), ("reward", "judges"), ("learner", "learners"))


class Counting:
    """Its metrics say which version of the parameters each micro-batch was generated with."""

    def __init__(self, parts, nested=False, reverse=False):
        self.parts, self.nested, self.reverse = parts, nested, reverse

    def init(self, key):
        return {"version": jnp.float32(0), "rows": jnp.zeros(2)}

    def iterate(self, state):
        @fdg.fragment("actor", in_axes=(None, 0))
        def respond(version, rows):
            return jnp.zeros_like(rows) + version

        @fdg.fragment("reward")
        def judge(rows):
            return rows * 1.0

        @fdg.fragment("learner", in_axes=(None, 0, None), out_axes=None)
        def gradient(version, rows, total):
            return total + 1.0 + 0.0 * version * jnp.sum(rows)

        @fdg.fragment("learner", in_axes=None, out_axes=None)
        def update(version, total):
            return version + total / self.parts

        def one(total, part):
            rows = judge(respond(state["version"], state["rows"]))
            return gradient(state["version"], rows, total), (jnp.mean(rows), part)

        def scanned(total):
            return jax.lax.scan(one, total, jnp.arange(self.parts), reverse=self.reverse)

        total, (read, part) = (jax.jit(scanned) if self.nested else scanned)(jnp.float32(0))
        after = respond(state["version"], state["rows"])
        new = {"version": update(state["version"], total), "rows": state["rows"]}
        seen = {f"read_{i}": read[i] for i in range(self.parts)}
        return new, {**seen, "after": jnp.mean(after), "in_order": jnp.all(part == jnp.arange(self.parts))}


@functools.cache
def graph_of(*fields):
    return fdg.trace(Counting(*fields))


def seen(graph, policy, iterations, devices=3):
    """Metrics of iterations, without compiling any."""
    plan = fdg.place(graph, policy, devices)
    state = {"version": jnp.float32(0), "rows": jnp.zeros(2)}
    state = state if plan.delayed is None else plan.delayed.start(state)
    leaves, found = jax.tree.leaves(state), []
    with jax.disable_jit():
        for _ in range(iterations):
            ends = core.jaxpr_as_fun(plan.graph.jaxpr)(*leaves)
            leaves = ends[: len(leaves)]
            names = sorted(plan.graph.metrics)
            found.append({name: float(x) for name, x in zip(names, ends[len(leaves) :], strict=True)})
    return found


def read(found, parts):
    return [row[f"read_{i}"] for row in found for i in range(parts)]


@pytest.mark.parametrize(
    ("parts", "lag"), [(1, 1), (1, 2), *((parts, lag) for parts in (3, 4) for lag in range(2 * parts + 1))]
)
def test_a_micro_batch_reads_what_was_made_so_many_micro_batches_before(parts, lag):
    policy = policies.Split(lag=lag)
    found = seen(graph_of(parts), policy, 4)
    counted = [max(0, (n - lag) // parts) for n in range(4 * parts)]
    assert read(found, parts) == counted
    assert all(row["in_order"] for row in found)
    assert [row["after"] for row in found] == counted[parts - 1 :: parts]
    delayed = fdg.place(graph_of(parts), policy, 3).delayed
    assert (0 if delayed is None else delayed.staleness) == -(-lag // parts)


@pytest.mark.parametrize("fields", [(4, True), (4, False, True)], ids=["in a call", "in reverse"])
def test_the_scan_may_be_in_a_call_and_in_reverse(fields):
    """In reverse the last row is generated first."""
    found = seen(graph_of(*fields), policies.Split(lag=3), 3)
    first = [1.0, 0.0, 0.0, 0.0] if fields[2:] else [0.0, 0.0, 0.0, 1.0]
    assert [row[f"read_{i}"] for row in found[1:2] for i in range(4)] == first
    assert all(row["in_order"] for row in found)


@pytest.mark.parametrize("iterations", [1, 2])
def test_whole_iterations_are_a_staleness(iterations):
    """The same program, so the same bits."""
    policy = policies.SingleLearnerCoarse
    one, other = (
        fdg.place(graph_of(4), each, 2) for each in (policy(lag=4 * iterations), policy(staleness=iterations))
    )
    assert str(one.graph.jaxpr) == str(other.graph.jaxpr)
    assert str(one.schedule) == str(other.schedule)
    assert jax.tree.structure(one.graph.state) == jax.tree.structure(other.graph.state)


def test_without_lag_nothing_is_cut():
    assert fdg.place(graph_of(4), policies.Split(lag=0), 2).graph is graph_of(4)


def test_three_groups_on_their_devices(devices):
    """Compiled, in two loops; the numbers are those of one device."""
    engine = fdg.compile(
        Counting(2), policies.Standalone(references=0, rewards=1, lag=1), devices=devices[:3]
    )
    _, metrics = engine.run(engine.init(0), 3)
    reads = np.stack([metrics["read_0"], metrics["read_1"]], axis=1).reshape(-1)
    np.testing.assert_array_equal(reads, [max(0, (n - 1) // 2) for n in range(6)])


class Whole(Counting):
    """Learns after the scan, which actors then run by themselves."""

    def iterate(self, state):
        @fdg.fragment("actor", in_axes=(None, 0))
        def respond(version, rows):
            return rows + version

        @fdg.fragment("learner", in_axes=(None, 1), out_axes=None)
        def learn(version, rows):
            return version + 1.0 + 0.0 * jnp.sum(rows)

        def one(rows, _):
            rows = respond(state["version"], rows)
            return rows, rows

        rows, every = jax.lax.scan(one, state["rows"], None, self.parts)
        new = {"version": learn(state["version"], every), "rows": rows}
        return new, {f"read_{i}": jnp.mean(every[i]) for i in range(self.parts)}


def test_the_older_part_of_a_scan_is_a_program_that_does_not_wait():
    """Both parts in one program would wait for the newest parameters, and overlap with no update."""
    graph = fdg.trace(Whole(4))
    for lag, programs in ((0, ["respond"]), (1, ["respond", "respond.2"]), (4, ["respond"])):
        plan = fdg.place(graph, policies.Split(lag=lag), 2)
        assert [p.name for p in plan.programs if p.group == "actors"] == programs
    made = np.cumsum([max(0, (n - 1) // 4) for n in range(12)])
    assert read(seen(graph, policies.Split(lag=1), 3), 4) == made.tolist()


class Stepping:
    """Environments that add what the actor says, on devices of their own."""

    def init(self, key):
        return {"version": jnp.float32(0), "rows": jnp.zeros(2)}

    def iterate(self, state):
        @fdg.fragment("actor", in_axes=(None, 0))
        def act(version, rows):
            return rows * 0 + version

        @fdg.fragment("environment")
        def step(rows, action):
            return rows + action

        @fdg.fragment("learner", in_axes=(None, 0), out_axes=None)
        def learn(version, rows):
            return version + 1 + 0 * jnp.sum(rows)

        def one(rows, _):
            action = act(state["version"], rows)
            return step(rows, action), jnp.mean(action)

        rows, read = jax.lax.scan(one, state["rows"], None, 4)
        new = {"version": learn(state["version"], rows), "rows": rows}
        return new, {**{f"read_{i}": read[i] for i in range(4)}, "rows": jnp.mean(rows)}


@pytest.mark.parametrize("fields", [{"lag": 1}, {"lag": 6}, {"staleness": 1}])
def test_what_environments_apart_make_is_not_delayed(fields):
    """The actor waits for parameters alone: of one trip it acts on what the last one made."""
    found = seen(fdg.trace(Stepping()), policies.Workers(**fields), 4)
    lag = fields.get("lag", 4)
    counted = [max(0, (n - lag) // 4) for n in range(16)]
    assert read(found, 4) == counted
    assert [row["rows"] for row in found] == np.cumsum(counted)[3::4].tolist()


# --- what cannot be ---


class Once(Counting):
    """No scan calls the actor."""

    def iterate(self, state):
        @fdg.fragment("actor", in_axes=(None, 0))
        def respond(version, rows):
            return rows + version

        @fdg.fragment("learner", in_axes=0, out_axes=None)
        def update(rows):
            return jnp.sum(rows)

        rows = respond(state["version"], state["rows"])
        return {"version": update(rows), "rows": rows}, {}


class Twice(Counting):
    """Two scans call actors."""

    def iterate(self, state):
        state, metrics = super().iterate(state)
        return super().iterate(state)[0], metrics


WRONG = [
    (Once(1), {"lag": 3}, "lag=3 counts micro-batches, but no scan calls 'respond': use staleness=3"),
    (Twice(2), {"lag": 3}, r"calls actors in 2 scans \(of 2 and 2 trips\)"),
    (
        Counting(2),
        {"lag": 3, "staleness": 1},
        "staleness=1 counts iterations and lag=3 counts micro-batches: give only one",
    ),
    (Counting(2), {"lag": -1}, "lag=-1: give a whole number of micro-batches"),
    (Counting(2), {"lag": 1.5}, r"lag=1\.5: give a whole number of micro-batches"),
    (Counting(2), {"lag": 500}, "lag=500: give at most 400 micro-batches, which are 200 iterations"),
]


@pytest.mark.parametrize(("algorithm", "fields", "message"), WRONG)
def test_one_line_for_a_lag_that_cannot_be(algorithm, fields, message):
    with refuses(match=message, kind=PlanError):
        fdg.place(algorithm, policies.SingleLearnerCoarse(**fields), 2)


def test_agents_side_by_side_lag_each():
    plan = fdg.place(graph_of(4), policies.Split(lag=1), 2, 6)
    assert plan.graph.agents == 6 and plan.delayed == fdg.place(graph_of(4), policies.Split(lag=1), 2).delayed


def test_a_policy_of_ones_own_may_lag():
    """Whatever has the field."""

    class Mine(Roles):
        lag = 1

    found = seen(graph_of(2), Mine(FOUR), 3)
    assert read(found, 2) == [0, 0, 0, 1, 1, 2]
