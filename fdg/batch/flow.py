"""The result of batch-axis propagation: an `EquationFlow` for each equation, in a `Flow`.

Plain data. `follow` makes it, `prune` removes unused parts, `exchanges` reads off the collectives, and
`lowering.constraints` writes it into the jaxpr.
"""

import dataclasses
from typing import Any

from fdg.batch.rules.result import Axis

AxisAndLevel = tuple[Axis, int]
"""The axis of a value, and how many of the loops around it, from the outermost, it changes in.

XLA moves what does not change in a loop out of it, and so its exchanges are counted outside of it.
"""


@dataclasses.dataclass(frozen=True)
class EquationFlow:
    """The batch axes of one equation.

    Attributes:
      operands: axes of its operands, after `gathered` and `sliced`.
      results: axes of its results.
      gathered: positions of operands that are replicated first.
      sliced: (position, axis) of replicated operands of which each device takes its part.
      reduced: whether each device has a share of the results, which are all-reduced.
      local: whether each device runs it on its own part in a `shard_map`.
      levels: the level of each operand.
      bodies: flows of its bodies, as in `jaxprs.bodies`.
      trips: runs of the bodies; None if it is no loop.
      agreed: whether devices agree on each further trip, by an all-reduce of one byte.
    """

    eqn: Any
    operands: tuple[Axis, ...]
    results: tuple[Axis, ...]
    gathered: tuple[int, ...] = ()
    sliced: tuple[tuple[int, int], ...] = ()
    reduced: bool = False
    local: bool = False
    levels: tuple[int, ...] = ()
    bodies: tuple["Flow", ...] = ()
    trips: int | None = None
    agreed: bool = False


@dataclasses.dataclass(frozen=True)
class Flow:
    """A jaxpr with the batch axes of all its values.

    Attributes:
      jaxpr: an open jaxpr.
      inputs: axis and level of its inputs.
      outputs: axes of its outputs, after `gathered` and `sliced`, which are as in `EquationFlow`.
      levels: the levels of the outputs.
      requested_axes: for each replicated input, the one axis along which all its readers would take it split.
    """

    jaxpr: Any
    inputs: tuple[AxisAndLevel, ...]
    equations: tuple[EquationFlow, ...]
    outputs: tuple[Axis, ...]
    levels: tuple[int, ...]
    requested_axes: tuple[Axis, ...]
    gathered: tuple[int, ...] = ()
    sliced: tuple[tuple[int, int], ...] = ()


def is_independent(flow: Flow) -> bool:
    """Whether devices can run a jaxpr on their own parts, without collectives and effects."""
    return not flow.gathered and all(
        not (each.gathered or each.reduced or each.agreed or each.eqn.effects)
        and all(map(is_independent, each.bodies))
        for each in flow.equations
    )
