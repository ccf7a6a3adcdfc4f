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

    problem: Problem  # whose specs designs are judged by
    best: Designs  # the best design, scalars: one that meets all specs, if one was evaluated
    front: Designs  # designs [points] of which none dominates another
    samples: int  # designs that were evaluated
    seconds: float  # of this process, compiling included
    # (designs, score, violation) over time; not-a-number before the first complete design
    curve: tuple[tuple[int, float, float], ...]
    # the least latency, energy and area that were reached alone; None where a design meets all specs
    least: Specs | None
    path: Path  # the run directory
    caught: int | None = None  # the signal that ended it early; None if none did

    @property
    def is_feasible(self) -> bool:
        """Whether the best design meets all specs."""
        return bool(self.best.violation == 0)

    @functools.cached_property
    def scheduled(self) -> Scheduled:
        """The schedule of the best design, improved by moves that save energy: no slower than it."""
        specs = self.problem.specs._replace(latency_cycles=float(self.best.latency_cycles))
        return problem.scheduled(dataclasses.replace(self.problem, specs=specs), self.best.choices)
