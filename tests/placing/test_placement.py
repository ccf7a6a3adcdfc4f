"""Plans: groups of fragments, idle devices, and moves."""

import dataclasses

import numpy as np
import pytest

import fdg
import policies
from fdg.placing.assignment import largest_divisor
from fdg.placing.policy import Group
from tests.tiny import Pupil
from tests.user_algorithm import Walker


@pytest.fixture(scope="module")
def walker():
    return fdg.trace(Walker())


def test_golden_plan(walker):
    """As printed; a role without a placement runs where its largest input is computed."""
    assert str(fdg.place(walker, policies.GPUOnly(), 4)) == GOLDEN


GOLDEN = """\
GPUOnly() places Walker on 4 devices

  fragment    role             group  devices  calls  batch/device
  act         actor            all    0-3          6             4
  step        environment      all    0-3          6             4
  act.2       actor            all    0-3          1             2
  judge       critic_of_taste  all    0-3          1             4
  learn       learner          all    0-3          1             4
    gradient  gradient         all    0-3          3            24
    update    update           all    0-3          3             -

  moves between devices  how         bytes/crossing  crossings  bytes/iteration
  (between fragments)    all-gather           192 B          1            192 B
  gradient               all-reduce            12 B          1             12 B
  (between fragments)    all-reduce            12 B          1             12 B
  5.47 kB per iteration pass between fragments on the same devices
  memory per device, about: 3.97 kB"""


def test_a_plan_needs_no_devices(walker):
    plan = fdg.place(walker, policies.GPUOnly(), 64)
    assert plan.groups == (Group("all", tuple(range(8))),)  # gcd of the batches 16, 8 and 96
    assert plan.idle == tuple(range(8, 64))


@pytest.mark.parametrize(("environments", "devices", "used"), [(64, 3, 2), (66, 4, 3), (4, 8, 4), (1, 2, 1)])
def test_largest_number_of_devices_that_divides_the_batch(environments, devices, used):
    plan = fdg.place(Pupil(environments), policies.GPUOnly(), devices)
    assert len(plan.groups[0]) == used
    assert plan.idle == tuple(range(used, devices))


def test_agents_are_divided_over_devices(walker):
    plan = fdg.place(walker, policies.GPUOnly(), 8, num_seeds=6)
    assert (len(plan.groups[0]), plan.idle) == (6, (6, 7))
    assert "nothing moves between devices" in str(plan)
    assert "idle: 6-7 (the largest number of them that divides 6 agents is 6)" in str(plan)


def test_largest_divisor():
    for number in range(1, 40):
        for limit in range(1, 40):
            expected = max(d for d in range(1, limit + 1) if number % d == 0)
            assert largest_divisor(number, limit) == expected


@dataclasses.dataclass(frozen=True)
class Apart:
    """Places environments and learners, and no other role."""

    def place(self, devices):
        return {"environment": Group("workers", (0, 1)), "learner": Group("learners", (2,))}


def test_staleness_of_numpy(walker):
    """Of a class that does not convert its fields."""

    @dataclasses.dataclass(frozen=True)
    class Stale(Apart):
        staleness: int = 0

    assert fdg.place(walker, Stale(np.int64(1)), 4).delayed == fdg.place(walker, Stale(1), 4).delayed


def test_unplaced_roles_follow_their_inputs(walker):
    plan = fdg.place(walker, Apart(), 4)
    assert dict(plan.assignment) == {
        "act": "workers",  # its largest input is the positions that `step` makes
        "step": "workers",
        "act.2": "workers",
        "judge": "workers",  # reads rewards
        "learn": "learners",
        "gradient": "learners",  # nested
        "update": "learners",
    }
    assert plan.idle == (3,)


def test_several_groups_are_planned_without_devices(walker):
    """A program for each group, and transfers; tests/running/test_execution.py runs the schedule."""
    plan = fdg.place(walker, Apart(), 4)
    assert [(p.group, p.fragments) for p in plan.programs] == [
        ("workers", ("act", "step", "act.2", "judge")),
        ("learners", ("learn", "gradient", "update")),
    ]
    up, down = [m for m in plan.movements if m.how == "transfer"]
    # Positions [T, B, 3] and scores [T, B] go to one learner, a weight [3] to each of two workers.
    assert (up.where, up.bytes_per_iteration) == ("workers -> learners", 4 * 6 * 16 * (3 + 1))
    assert (down.where, down.bytes_per_iteration, down.delay) == (
        "learners -> workers",
        4 * 3 * 2,
        "iteration",
    )


def test_policies_are_values():
    assert policies.GPUOnly() == policies.GPUOnly()
    assert hash(policies.GPUOnly()) == hash(policies.GPUOnly())
    assert policies.get("GPUOnly") is policies.get("gpu_only") is policies.GPUOnly
    with pytest.raises(fdg.UnknownNameError, match=r"unknown policy 'gpu_onyl': did you mean 'gpu_only'\?"):
        policies.get("gpu_onyl")
