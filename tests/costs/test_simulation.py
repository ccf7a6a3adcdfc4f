"""The simulation, compared with schedules computed by hand."""

import math

import pytest

from fdg.costs.simulation import Simulation


def test_tasks_of_a_lane_run_in_order():
    simulation = Simulation()
    first = simulation.add("a", ("x",), 2.0)
    second = simulation.add("b", ("x",), 3.0)
    other = simulation.add("c", ("y",), 1.0, [first])
    trace = simulation.run()
    assert [trace.starts[i] for i in (first, second, other)] == [0.0, 2.0, 2.0]
    assert max(trace.ends) == 5.0
    assert trace.critical_path(second) == [first, second]
    assert simulation.busy(trace, 0.0, 4.0) == {"x": 4.0, "y": 1.0}


def test_task_on_two_lanes_waits_for_both():
    simulation = Simulation()
    simulation.add("a", ("x",), 2.0)
    simulation.add("b", ("y",), 5.0)
    both = simulation.add("c", ("x", "y"), 1.0)
    assert simulation.run().starts[both] == 5.0


@pytest.mark.parametrize("cores", [math.inf, 4.0])
def test_actors_and_learners_overlap_with_staleness(cores):
    """Acting takes 3 s and learning 2 s: 5 s per iteration in turns, 3 s if they overlap."""
    simulation = Simulation(cores)
    acted = simulation.add("act", ("actors",), 3.0, cores=1.0)
    for _ in range(4):
        learned = simulation.add("learn", ("learners",), 2.0, [acted], cores=1.0)
        acted = simulation.add("act", ("actors",), 3.0, [learned], cores=1.0)
    assert max(simulation.run().ends) == pytest.approx(3 + 4 * 5)
    simulation = Simulation(cores)
    for _ in range(4):
        acted = simulation.add("act", ("actors",), 3.0, cores=1.0)
        simulation.add("learn", ("learners",), 2.0, [acted], cores=1.0)
    assert max(simulation.run().ends) == pytest.approx(4 * 3 + 2)


def test_tasks_share_cores():
    """Two tasks of 2 s on 2 cores each, of 2: both take 4 s. A task without cores is not slowed."""
    simulation = Simulation(2.0)
    one = simulation.add("a", ("x",), 2.0, cores=2.0)
    two = simulation.add("b", ("y",), 2.0, cores=2.0)
    link = simulation.add("c", ("z",), 2.0)
    after = simulation.add("d", ("z",), 1.0, [one], cores=1.0)
    trace = simulation.run()
    assert [trace.ends[i] for i in (one, two, link, after)] == pytest.approx([4.0, 4.0, 2.0, 5.0])


def test_later_task_slows_a_running_one():
    """2 cores. `a` (1 core, 3 s) runs for 1 s; then `b` (3 cores, 1 s) starts, and each has one core.

    `a` keeps its core and ends at 3 s. `b` has then done two thirds at a third of its speed; the rest takes
    half a second on two of the three cores that it needs.
    """
    simulation = Simulation(2.0)
    before = simulation.add("start", ("host",), 1.0)
    a = simulation.add("a", ("x",), 3.0, cores=1.0)
    b = simulation.add("b", ("y",), 1.0, [before], cores=3.0)
    trace = simulation.run()
    assert trace.ends[a] == pytest.approx(3.0) and trace.ends[b] == pytest.approx(3.5)
