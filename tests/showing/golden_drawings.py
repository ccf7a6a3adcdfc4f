"""Drawings that were looked at and found good: `python -m tests.showing.golden_drawings` draws them anew.

Whoever changes how something is drawn does that, opens the files of `golden/` that have changed, and commits
them if they are better.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import fdg
import policies
from fdg.placing.policy import Group
from tests.user_algorithm import Walker

FOLDER = Path(__file__).parent / "golden"


@dataclasses.dataclass(frozen=True)
class Scattered:
    """Four groups, one with a long name and every other device, and loops of three groups."""

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
    """The graph of the tests' own algorithm."""
    return fdg.trace(Walker())


def plan(policy, devices: int, num_seeds: int | None = None) -> fdg.Plan:
    """Its plan."""
    return fdg.place(walker(), policy, devices, num_seeds)


STALE = policies.SingleLearnerCoarse(actors=4, learners=1, staleness=1)
PLANS: dict[str, Callable[[], fdg.Plan]] = {
    "coarse": lambda: plan(STALE, 8),
    "fine": lambda: plan(policies.SingleLearnerFine(), 8),
    "central": lambda: plan(policies.Central(), 5),
    "whole": lambda: plan(policies.GPUOnly(), 64),
    "agents": lambda: plan(policies.GPUOnly(), 4, 8),
    "scattered": lambda: plan(Scattered(), 64),
}
DRAWINGS: dict[str, Callable[[], str]] = {
    "graph.svg": lambda: walker()._repr_svg_(),
    "graph.mmd": lambda: walker().to_mermaid(),
    "graph.txt": lambda: str(walker()),
    **{f"{name}.svg": lambda made=made: made()._repr_svg_() for name, made in PLANS.items()},
    **{f"{name}.mmd": lambda made=made: made().to_mermaid() for name, made in PLANS.items()},
    **{f"{name}.txt": lambda made=made: str(made()) for name, made in PLANS.items()},
}


def lines(text: str) -> str:
    """The text with a line for each element of markup, so that a difference is short."""
    return text.replace("><", ">\n<").rstrip("\n") + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / name).write_text(lines(draw()))
