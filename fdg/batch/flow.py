"""What following a batch axis through a jaxpr finds: one `EquationFlow` for each equation, in a `Flow`.

Plain data. `follow` makes it, `prune` drops what nothing reads, `exchanges` reads off what devices
send to each other, and `lowering.constraints` writes it into the jaxpr.
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
    """What one equation does with the batch axis.

    Attributes:
      eqn: the equation.
      operands: axes of its operands as it takes them, after `gathered` and `sliced`.
      results: axes of its results.
      gathered: positions of operands that are made whole on every device first.
      sliced: (position, axis) of shared operands of which each device takes its part.
      reduced: whether each device has a share of the results, and they are added up.
      local: whether each device runs it on its own part, out of the partitioner's sight.
      levels: the level of each operand.
      bodies: the jaxprs inside it, as in `jaxprs.bodies`.
      trips: how often the bodies run each time, None for what is no loop.
      agreed: whether devices agree before each trip if there is another one, by a reduction of one byte.
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
    """A jaxpr with the batch axes of everything in it.

    Attributes:
      jaxpr: an open jaxpr.
      inputs: axis and level of its inputs.
      equations: one for each equation.
      outputs: axes of its outputs, after those of `gathered` and `sliced`, which are as in `EquationFlow`.
      levels: of the outputs.
      requested_axes: for each shared input, the one axis along which all that reads it would take it split.
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
    """Whether devices can run a jaxpr each on its own part: no exchange in it, and no effect."""
    return not flow.gathered and all(
        not (each.gathered or each.reduced or each.agreed or each.eqn.effects)
        and all(map(is_independent, each.bodies))
        for each in flow.equations
    )
