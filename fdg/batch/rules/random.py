"""Batch rules (`result.Rule`) of random draws.

A threefry draw depends only on its own key. Draws of other generators may depend on all keys of the batch:
`keys.draws_depend_on_batch` finds them.
"""

from typing import Any

from fdg import jaxprs, keys
from fdg.batch.rules.elementwise import widen
from fdg.batch.rules.result import Axis, Rule, RuleResult, locally, same, shape_of


def _gamma(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """The axes of the keys are the leading axes of the result; there is one key per row of the parameter."""
    return same(eqn, operands) if operands[0] is not None and operands[1] in (None, operands[0]) else None


def can_create_split(eqn: Any, axis: Axis) -> bool:
    """Whether each device can compute its part of a result, split along `axis`, from replicated values.

    `batch.requested` calls this for a result that all its readers split along `axis`.
    """
    name = eqn.primitive.name
    if keys.draws_depend_on_batch(eqn):
        return False
    if name in ("random_bits", "random_split"):
        return axis is not None and axis >= len(shape_of(eqn.invars[0]))
    return name in ("iota", "empty") or (
        name == "broadcast_in_dim" and axis not in eqn.params["broadcast_dimensions"]
    )


def has_batch_dependent_draws(jaxpr: Any) -> bool:
    """Whether an open jaxpr, at any depth, draws numbers that depend on the whole batch of keys."""
    return any(map(keys.draws_depend_on_batch, jaxprs.walk(jaxpr.eqns)))


RULES: dict[str, Rule] = {  # by the name of the primitive
    **dict.fromkeys("random_clone random_fold_in threefry2x32".split(), same),
    # The axes of the keys are the leading axes of the result.
    **dict.fromkeys("random_bits random_split random_unwrap random_seed".split(), same),
    "random_wrap": widen,  # the last axis of key data becomes part of the key
    "random_gamma": locally(_gamma),
}
