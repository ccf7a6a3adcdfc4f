"""What carries out a plan: the whole loop as one program, or a schedule of several that the host steps."""

from collections.abc import Callable, Sequence
from typing import Protocol

import jax

from fdg.placing.plan import Plan
from fdg.running.many_programs import ManyPrograms
from fdg.running.metrics import PendingMetrics
from fdg.running.one_program import OneProgram
from fdg.running.program import Program
from fdg.running.timeline import Timeline
from fdg.tracing.graph import FDG


class Execution(Protocol):
    """Runs iterations on the leaves of a state.

    Attributes:
      programs: the XLA programs.
      shapes: of the state's leaves, with shardings.
      timeline: how long each group was busy; None where there is one group only.
    """

    programs: tuple[Program, ...]
    shapes: list[jax.ShapeDtypeStruct]
    timeline: Timeline | None

    @property
    def moved_bytes(self) -> int:
        """Bytes that were moved between groups since this was made."""

    def compile(self) -> None:
        """Compiles all programs, unless that was done: nothing depends on the number of iterations."""

    def start(
        self, leaves: list[jax.Array], iterations: int, stop: Callable[[], bool]
    ) -> tuple[list[jax.Array], PendingMetrics]:
        """Hands iterations over to the devices, once compiled.

        Args:
          leaves: of the state, laid out as `shapes`, no two of them in the same memory. Donated.
          iterations: at least 1.
          stop: looked at between iterations where the host steps them: whether to do no more of them.

        Returns:
          The new leaves, and the metrics; both may still have to be computed.
        """


def execution(graph: FDG, plan: Plan, devices: Sequence[jax.Device]) -> Execution:
    """What carries out a plan on devices."""
    if plan.schedule is None:
        return OneProgram(graph, plan, devices)
    return ManyPrograms(graph, plan, devices)
