"""Bytes predicted by the plan equal the bytes that compiled programs move, and all movements are in the plan.

Collectives are read from the optimised HLO of each program; transfers are counted at run time.
"""

import collections
import dataclasses
import functools

import pytest

import fdg
import policies
from fdg.commands import cli
from fdg.placing.plans import BETWEEN
from tests.conformance import dialogue
from tests.conformance.comparison import ALGORITHMS, start

COLLECTIVES = ("all-reduce", "all-gather")

# (policy, number of devices): groups of one and of several, uneven, more devices than used.
SETUPS = {
    "gpu_only 1": (policies.GPUOnly(), 1),
    "gpu_only 3": (policies.GPUOnly(), 3),
    "multi_learner 4": (policies.MultiLearner(), 4),
    "coarse on one": (policies.SingleLearnerCoarse(), 1),
    "coarse 3+1": (policies.SingleLearnerCoarse(actors=3), 4),
    "coarse 4+2": (policies.SingleLearnerCoarse(actors=4, learners=2), 6),
    "coarse 4+2 stale": (policies.SingleLearnerCoarse(actors=4, learners=2, staleness=1), 6),
    "coarse 5+3": (policies.SingleLearnerCoarse(actors=5, learners=3), 8),
    "fine 4+2": (policies.SingleLearnerFine(workers=4, learners=2), 8),
    "environments 2+3": (policies.Environments(workers=2, learners=3), 8),
    "central 3+2": (policies.Central(workers=3, servers=2), 8),
    "central 4+2 stale": (policies.Central(workers=4, servers=2, staleness=2), 6),
    "workers 3+2+1": (policies.Workers(environments=3, actors=2), 6),
}
CASES = [("walker 48", setup) for setup in SETUPS if setup != "coarse 5+3"]
CASES += [("gardener", setup) for setup in ("coarse 5+3",)]
CASES += [
    ("discrete", "gpu_only 3"),
    ("discrete, time shuffle", "coarse 4+2"),
    ("discrete, time shuffle", "central 3+2"),
]


@pytest.fixture(scope="module")
def engine_of(devices):
    """Compiles the engine of an algorithm in a setup, cached for all tests."""

    @functools.cache
    def compiled(name, setup):
        policy, count = SETUPS[setup]
        engine = fdg.compile(ALGORITHMS[name](), policy, devices[:count])
        engine.compile(1)
        return engine

    return compiled


def planned(plan):
    """Planned bytes per iteration, by kind of movement."""
    total = collections.Counter()
    for movement in plan.movements:
        if movement.how:
            total[movement.how] += movement.bytes_per_iteration
    return dict(total)


def measured(engine):
    """Bytes per iteration of collectives in the compiled programs, by kind."""
    total = collections.Counter()
    for program in engine.programs:
        for collective in program.collectives():
            times = collective.calls * program.calls_per_iteration
            total[collective.kind] += collective.bytes * times
    return dict(total)


@pytest.mark.parametrize(("name", "setup"), CASES)
def test_planned_bytes_match_compiled_programs(name, setup, engine_of):
    engine = engine_of(name, setup)
    predicted = planned(engine.plan)
    transfers = predicted.pop("transfer", 0)
    found = measured(engine)
    assert predicted.keys() <= set(COLLECTIVES)
    assert predicted.keys() == found.keys(), (predicted, found)
    for kind in predicted:
        assert predicted[kind] == pytest.approx(found[kind], rel=0.05), (kind, predicted, found)
    assert engine.unexplained() == ()

    before = engine.moved_bytes
    state = start(name)
    if engine.plan.delayed is not None:
        state = engine.plan.delayed.start(state)
    for _ in range(2):
        state, _ = engine.run(state, 1)
    assert engine.moved_bytes - before == 2 * transfers
    assert (transfers > 0) == (len(engine.plan.groups) > 1)
    assert (sum(predicted.values()) > 0) == any(len(group) > 1 for group in engine.plan.groups)


def test_every_policy_is_listed():
    tested = {type(SETUPS[setup][0]) for _, setup in CASES}
    assert {policies.get(name) for name in set(policies.names()) - dialogue.POLICIES} == tested


# --- unexplained collectives are found ---


def without(plan, movements):
    removed = {(m.program, m.how, m.source) for m in movements}

    def remaining(program):
        named = [(c, (program.name, c.kind, c.fragment or BETWEEN)) for c in program.collectives]
        return dataclasses.replace(program, collectives=tuple(c for c, key in named if key not in removed))

    return dataclasses.replace(plan, programs=tuple(map(remaining, plan.programs)))


@pytest.mark.parametrize("setup", ["gpu_only 3", "coarse 4+2", "fine 4+2", "central 3+2"])
def test_unplanned_collective_is_unexplained(setup, engine_of, monkeypatch):
    """Collectives of any kind in any program. (XLA may merge several; the result has the name of one.)"""
    engine = engine_of("walker 48", setup)
    plan = engine.plan
    by_program = collections.defaultdict(list)
    for movement in plan.movements:
        if movement.how in COLLECTIVES:
            by_program[movement.program, movement.how].append(movement)
    assert by_program
    for (program, kind), movements in by_program.items():
        monkeypatch.setattr(engine, "plan", without(plan, movements))
        found = engine.unexplained()
        assert {(where, collective.kind) for where, collective in found} == {(program, kind)}
        size = sum(collective.bytes * collective.calls for _, collective in found)
        times = next(p.calls_per_iteration for p in engine.programs if p.name == program)
        assert size * times == sum(movement.bytes_per_iteration for movement in movements)


@pytest.mark.parametrize("drops", [False, True])
def test_training_prints_unexplained_collectives(drops, tmp_path, capsys, host_devices, monkeypatch):
    place = fdg.place

    def incomplete(*args):
        plan = place(*args)
        return without(plan, [m for m in plan.movements if m.how == "all-reduce" and m.source == "slope"])

    if drops:
        monkeypatch.setattr("fdg.engine.place", incomplete)
    words = ["--algo", "tests.tiny:Pupil", "--policy", "gpu_only", "--devices", "2", "--total-steps", "16"]
    assert cli.train_main([*words, "--out", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("unexplained:")]
    if not drops:
        assert lines == []
        return
    assert lines == [
        "unexplained: all-reduce of 12 B x 2 in program 'train' (learn, slope), which the plan does not name"
    ]
