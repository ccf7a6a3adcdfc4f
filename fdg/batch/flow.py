"""The result of batch-axis propagation: a `Flow`, with an `EquationFlow` per equation.

Flows are plain data. `follow` makes them, `exchanges` reads the collectives from them, and
`lowering.constraints` writes them into the jaxpr.
"""

import dataclasses
from typing import Any

from fdg.batch.rules.result import Axis

AxisAndLevel = tuple[Axis, int]
"""The batch axis of a value, and its level: the depth of the innermost loop in which the value changes.

A value outside of all loops has level 0. XLA moves loop-invariant values out of a loop, so their collectives
are counted outside of it.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class EquationFlow:
    """The batch axes of one equation."""

    eqn: Any
    operands: tuple[Axis, ...]  # the batch axes of its operands, after `gathered` and `sliced`
    results: tuple[Axis, ...]  # the batch axes of its results
    gathered: tuple[int, ...] = ()  # positions of operands that are replicated before the equation runs
    # (position, axis) of replicated operands of which each device takes its part
    sliced: tuple[tuple[int, int], ...] = ()
    reduced: bool = False  # True if each device has a summand of the results, which are all-reduced
    local: bool = False  # True if each device runs it on its part in a `shard_map`
    levels: tuple[int, ...] = ()  # the level of each operand
    bodies: tuple["Flow", ...] = ()  # flows of its bodies, in the order of `jaxprs.bodies`
    trips: int | None = None  # the number of trips of a loop; None if it is not a loop
    # True if devices decide together, by an all-reduce of one byte, whether a while loop makes another trip
    agrees_on_predicate: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Flow:
    """A jaxpr with the batch axes of all its values."""

    jaxpr: Any  # an open jaxpr
    inputs: tuple[AxisAndLevel, ...]  # axis and level of its inputs
    equations: tuple[EquationFlow, ...]
    outputs: tuple[Axis, ...]  # the batch axes of its outputs, after `gathered` and `sliced`
    levels: tuple[int, ...]  # the levels of the outputs
    # for each replicated input: an axis along which each device reads only its own part, or None
    requested_axes: tuple[Axis, ...]
    gathered: tuple[int, ...] = ()  # positions of outputs that are replicated at the end
    sliced: tuple[tuple[int, int], ...] = ()  # (position, axis) of replicated outputs to split at the end


MeshFlows = tuple[Flow | None, Flow | None]
"""The dimensions of a jaxpr's values that are split along `batch` and along `model`; None: none are."""


def steps_at(flows: MeshFlows, index: int) -> list[EquationFlow | None]:
    """The flows of one equation."""
    return [None if flow is None else flow.equations[index] for flow in flows]


def flows_of_bodies(steps: list[EquationFlow | None], count: int) -> list[MeshFlows]:
    """The flows of an equation's `count` bodies."""
    batch, model = ([None] * count if step is None else step.bodies for step in steps)
    return list(zip(batch, model, strict=True))


def results_of(steps: list[EquationFlow | None], count: int) -> list[tuple[Axis, Axis]]:
    """The axes along `batch` and `model` of an equation's `count` results."""
    batch, model = ([None] * count if step is None else step.results for step in steps)
    return list(zip(batch, model, strict=True))


def is_independent(flow: Flow) -> bool:
    """Whether devices can run a jaxpr on their parts without collectives and effects."""
    return not flow.gathered and all(
        not (step.gathered or step.reduced or step.agrees_on_predicate or step.eqn.effects)
        and all(map(is_independent, step.bodies))
        for step in flow.equations
    )
