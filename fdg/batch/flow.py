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
    """The batch axes of one equation."""

    eqn: Any
    operands: tuple[Axis, ...]  # axes of its operands, after `gathered` and `sliced`
    results: tuple[Axis, ...]  # axes of its results
    gathered: tuple[int, ...] = ()  # positions of operands that are replicated first
    # (position, axis) of replicated operands of which each device takes its part
    sliced: tuple[tuple[int, int], ...] = ()
    reduced: bool = False  # whether each device has a share of the results, which are all-reduced
    local: bool = False  # whether each device runs it on its own part in a `shard_map`
    levels: tuple[int, ...] = ()  # the level of each operand
    bodies: tuple["Flow", ...] = ()  # flows of its bodies, as in `jaxprs.bodies`
    trips: int | None = None  # runs of the bodies; None if it is no loop
    agreed: bool = False  # whether devices agree on each further trip, by an all-reduce of one byte


@dataclasses.dataclass(frozen=True)
class Flow:
    """A jaxpr with the batch axes of all its values."""

    jaxpr: Any  # an open jaxpr
    inputs: tuple[AxisAndLevel, ...]  # axis and level of its inputs
    equations: tuple[EquationFlow, ...]
    # axes of its outputs, after `gathered` and `sliced`, which are as in `EquationFlow`
    outputs: tuple[Axis, ...]
    levels: tuple[int, ...]  # the levels of the outputs
    # for each replicated input, the one axis along which all its readers would take it split
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
