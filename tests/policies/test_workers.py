"""`Workers`: its groups, errors and flags."""

import pytest

import fdg
import policies
from fdg.commands.parse import parse
from policies import Workers


def names(policy, count):
    return {role: (g.name, g.devices) for role, g in policy.place(["cpu"] * count).items()}


def test_groups():
    assert names(Workers(), 1) == {
        "environment": ("environments", (0,)),
        "actor": ("actors", (0,)),
        "buffer": ("learners", (0,)),
        "learner": ("learners", (0,)),
    }
    assert names(Workers(actors=2, learners=3, buffers=1), 8) == {
        "environment": ("environments", (0, 1)),
        "actor": ("actors", (2, 3)),
        "buffer": ("buffers", (4,)),
        "learner": ("learners", (5, 6, 7)),
    }
    cpu_first = Workers().place(["gpu", "cpu", "gpu"])
    assert cpu_first["environment"].devices == (1,) and cpu_first["actor"].devices == (0,)


def test_invalid_fields_are_refused():
    with pytest.raises(
        fdg.PlanError, match=r"1 environments . 1 actors . 1 learners = 3 devices, but there a"
    ):
        Workers().place(["cpu"] * 2)
    with pytest.raises(fdg.PlanError, match="actors=0: give a whole number of at least 1"):
        Workers(actors=0).place(["cpu"] * 4)
    with pytest.raises(fdg.PlanError, match="Workers: buffers=-1: give a number of devices, 0 for none"):
        Workers(buffers=-1)


def test_name_and_flags():
    words = "--policy workers --environments 2 --actors 3 --buffers 1 --staleness 1 --devices 8 --rings 2"
    job = parse(words.split(), "", "")
    assert job.policy == Workers(environments=2, actors=3, buffers=1, staleness=1)
    assert job.algorithm.rings == 2 and policies.get("workers") is Workers
