"""Results of a search as data, for reports and pictures."""

import dataclasses
import functools
from pathlib import Path

from envs.codesign import problem
from envs.codesign.found import Designs
from envs.codesign.problem import Problem, Scheduled, Specs


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of a search.

    Attributes:
      problem: whose specs designs are judged by.
      best: the best design, scalars: one that meets all specs, if one was evaluated.
      front: designs [points] of which none dominates another.
      samples: designs that were evaluated.
      seconds: of this process, compiling included.
      curve: (designs, score, violation) over time; not-a-number before the first complete design.
      least: the least latency, energy and area that were reached alone; None where a design meets all specs.
      path: the run directory.
      caught: the signal that ended it early; None if none did.
    """

    problem: Problem
    best: Designs
    front: Designs
    samples: int
    seconds: float
    curve: tuple[tuple[int, float, float], ...]
    least: Specs | None
    path: Path
    caught: int | None = None

    @property
    def is_feasible(self) -> bool:
        """Whether the best design meets all specs."""
        return bool(self.best.violation == 0)

    @functools.cached_property
    def scheduled(self) -> Scheduled:
        """The schedule of the best design, improved by moves that save energy: no slower than it."""
        specs = self.problem.specs._replace(latency_cycles=float(self.best.latency_cycles))
        return problem.scheduled(dataclasses.replace(self.problem, specs=specs), self.best.choices)
