"""Batch rules (`result.Rule`) of elementwise operations."""

from typing import Any

from fdg.batch.rules.result import Axis, Rule, RuleResult, every_result, locally, same, shape_of
from fdg.jaxprs.classes import CLASSES

# `random` replaces the rule of `random_gamma`, which is among the special functions.
_ELEMENTWISE = CLASSES["elementwise"] | CLASSES["transcendental"] | CLASSES["special"]
_OTHERS = "copy name pvary reduce_precision stop_gradient tie".split()  # they keep all axes, too

# XLA expands these into while loops, which its partitioner would run with communication in each trip. So each
# device runs them on its own rows.
_LOOPS = "igamma igammac igamma_grad_a polygamma regularized_incomplete_beta zeta".split()


def widen(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """A cast to a narrower type adds a last axis, to a wider type removes it; other axes are kept."""
    rank = len(shape_of(eqn.outvars[0]))
    return None if operands[0] is not None and operands[0] >= rank else every_result(eqn, operands[0])


def _pass_through(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """Each result equals the operand at its position, unless a `device_put` names a device."""
    return None if any(d is not None for d in eqn.params.get("devices", ())) else RuleResult(tuple(operands))


RULES: dict[str, Rule] = {  # by the name of the primitive
    **dict.fromkeys((*_ELEMENTWISE, *_OTHERS), same),
    **dict.fromkeys(_LOOPS, locally(same)),
    "bitcast_convert_type": widen,
    "optimization_barrier": _pass_through,
    "device_put": _pass_through,
}
