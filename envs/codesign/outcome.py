"""Results of a search as data, for reports and pictures."""

import dataclasses
import functools
from pathlib import Path

from envs.codesign import problem
from envs.codesign.found import Designs
from envs.codesign.problem import Problem, Scheduled, Specs


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of a search."""

    problem: Problem  # defines the specs
    best: Designs  # scalars; it meets all specs, if any evaluated design does
    front: Designs  # the Pareto front, [points]
    samples: int  # evaluated designs
    seconds: float  # of this process, compiling included
    # (designs, score, violation) over time; NaN before the first complete design
    curve: tuple[tuple[int, float, float], ...]
    # the least latency, energy and area, each minimised alone; None if a design meets all specs
    least: Specs | None
    path: Path  # the run directory
    caught: int | None = None  # the signal that ended it early; None for none

    @property
    def is_feasible(self) -> bool:
        """True if the best design meets all specs."""
        return bool(self.best.violation == 0)

    @functools.cached_property
    def scheduled(self) -> Scheduled:
        """The schedule of the best design, improved by moves that save energy, and no slower."""
        specs = self.problem.specs._replace(latency_cycles=float(self.best.latency_cycles))
        return problem.improved_schedule(dataclasses.replace(self.problem, specs=specs), self.best.choices)
