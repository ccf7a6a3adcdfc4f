"""Lag in micro-batches: the parameter version that each of them reads, against a count in plain Python."""

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
    """Its metrics are the parameter versions with which micro-batches were generated."""

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


def metrics_of(graph, policy, iterations, devices=3):
    """Metrics of each iteration, evaluated without compiling."""
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


def versions_of(found, parts):
    return [row[f"read_{i}"] for row in found for i in range(parts)]


@pytest.mark.parametrize(
    ("parts", "lag"), [(1, 1), (1, 2), *((parts, lag) for parts in (3, 4) for lag in range(2 * parts + 1))]
)
def test_version_that_each_micro_batch_reads(parts, lag):
    policy = policies.Split(lag=lag)
    found = metrics_of(graph_of(parts), policy, 4)
    expected = [max(0, (n - lag) // parts) for n in range(4 * parts)]
    assert versions_of(found, parts) == expected
    assert all(row["in_order"] for row in found)
    assert [row["after"] for row in found] == expected[parts - 1 :: parts]
    delayed = fdg.place(graph_of(parts), policy, 3).delayed
    assert (0 if delayed is None else delayed.staleness) == -(-lag // parts)


@pytest.mark.parametrize("fields", [(4, True), (4, False, True)], ids=["in a call", "in reverse"])
def test_nested_or_reversed_scan(fields):
    """In reverse, the last micro-batch is generated first."""
    found = metrics_of(graph_of(*fields), policies.Split(lag=3), 3)
    first = [1.0, 0.0, 0.0, 0.0] if fields[2:] else [0.0, 0.0, 0.0, 1.0]
    assert [row[f"read_{i}"] for row in found[1:2] for i in range(4)] == first
    assert all(row["in_order"] for row in found)


@pytest.mark.parametrize("iterations", [1, 2])
def test_lag_of_full_iterations_equals_staleness(iterations):
    """The programs are the same, so results are bitwise equal."""
    policy = policies.SingleLearnerCoarse
    one, other = (
        fdg.place(graph_of(4), each, 2) for each in (policy(lag=4 * iterations), policy(staleness=iterations))
    )
    assert str(one.graph.jaxpr) == str(other.graph.jaxpr)
    assert str(one.schedule) == str(other.schedule)
    assert jax.tree.structure(one.graph.state) == jax.tree.structure(other.graph.state)


def test_lag_0_keeps_the_graph():
    assert fdg.place(graph_of(4), policies.Split(lag=0), 2).graph is graph_of(4)


def test_three_groups_on_separate_devices(devices):
    """Compiled as two loops; the versions are the counted ones."""
    engine = fdg.compile(
        Counting(2), policies.Standalone(references=0, rewards=1, lag=1), devices=devices[:3]
    )
    _, metrics = engine.run(engine.init(0), 3)
    reads = np.stack([metrics["read_0"], metrics["read_1"]], axis=1).reshape(-1)
    np.testing.assert_array_equal(reads, [max(0, (n - 1) // 2) for n in range(6)])


class LearnAfterScan(Counting):
    """Learns after a scan that only contains the actor."""

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


def test_trips_with_old_parameters_are_a_separate_program():
    """One program for all trips would wait for the newest parameters, and overlap with no update."""
    graph = fdg.trace(LearnAfterScan(4))
    for lag, programs in ((0, ["respond"]), (1, ["respond", "respond.2"]), (4, ["respond"])):
        plan = fdg.place(graph, policies.Split(lag=lag), 2)
        assert [p.name for p in plan.programs if p.group == "actors"] == programs
    made = np.cumsum([max(0, (n - 1) // 4) for n in range(12)])
    assert versions_of(metrics_of(graph, policies.Split(lag=1), 3), 4) == made.tolist()


class Stepping:
    """Environments, on a separate group, add the actions to their state."""

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
def test_environment_results_are_not_delayed(fields):
    """Only parameters are delayed: the actor reads what the environments returned in the trip before."""
    found = metrics_of(fdg.trace(Stepping()), policies.Workers(**fields), 4)
    lag = fields.get("lag", 4)
    expected = [max(0, (n - lag) // 4) for n in range(16)]
    assert versions_of(found, 4) == expected
    assert [row["rows"] for row in found] == np.cumsum(expected)[3::4].tolist()


# --- errors ---


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
def test_invalid_lag(algorithm, fields, message):
    with refuses(match=message, kind=PlanError):
        fdg.place(algorithm, policies.SingleLearnerCoarse(**fields), 2)


def test_lag_with_several_agents():
    plan = fdg.place(graph_of(4), policies.Split(lag=1), 2, 6)
    assert plan.graph.agents == 6 and plan.delayed == fdg.place(graph_of(4), policies.Split(lag=1), 2).delayed


def test_user_policy_with_lag():
    """Any policy with a field `lag`."""

    class Mine(Roles):
        lag = 1

    found = metrics_of(graph_of(2), Mine(FOUR), 3)
    assert versions_of(found, 2) == [0, 0, 0, 1, 1, 2]
