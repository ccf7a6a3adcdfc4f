"""Plans of `Walker`, and a policy whose groups are hard to draw."""

import dataclasses
import functools

import fdg
from fdg.placing.policy import Group
from tests.user_algorithm import Walker


@dataclasses.dataclass(frozen=True)
class Scattered:
    """Four groups, one with a long name and every other device; loops span three groups."""

    def place(self, devices):
        n = len(devices)
        return {
            "environment": Group("environments_of_the_simulation_cluster", tuple(range(0, n // 2, 2))),
            "actor": Group("inference_servers", (n // 2,)),
            "learner": Group("learners", (n - 1,)),
            "gradient": Group("gradients", tuple(range(n // 2 + 1, n - 1))),
        }


@functools.cache
def walker() -> fdg.FDG:
    """The graph of `Walker`."""
    return fdg.trace(Walker())


def plan(policy, devices: int, num_seeds: int | None = None) -> fdg.Plan:
    """The plan of `Walker` under a policy."""
    return fdg.place(walker(), policy, devices, num_seeds)
