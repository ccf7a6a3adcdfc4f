"""Batch-axis rules of elementwise operations."""

from typing import Any

from fdg.batch.rules.result import Axis, Rule, RuleResult, every_result, locally, same, shape_of

_ELEMENTWISE = """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt
    ceil clamp clz complex conj convert_element_type copy cos cosh digamma div eq
    eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le le_to
    lgamma log log1p log2 logistic lt lt_to max min mul mulhi name ne neg nextafter not
    one_minus_square or polynomial population_count pow pvary real reduce_precision rem round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh tie xor zeros_like""".split()

# XLA expands these into while loops, which its partitioner would run with communication in each trip. So each
# device runs them on its own rows.
_LOOPS = "igamma igammac igamma_grad_a polygamma regularized_incomplete_beta zeta".split()


def widen(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """A narrower type adds a last axis, and a wider type removes the last axis."""
    rank = len(shape_of(eqn.outvars[0]))
    return None if operands[0] is not None and operands[0] >= rank else every_result(eqn, operands[0])


def _pass_through(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """Each result equals the operand at its position, unless a `device_put` names a device."""
    return None if any(d is not None for d in eqn.params.get("devices", ())) else RuleResult(tuple(operands))


RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, same),
    **dict.fromkeys(_LOOPS, locally(same)),
    "bitcast_convert_type": widen,
    "optimization_barrier": _pass_through,
    "device_put": _pass_through,
}
