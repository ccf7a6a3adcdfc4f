"""The batch rule (`result.Rule`) of functions declared as rowwise (`fdg.rowwise`)."""

from typing import Any

from fdg import jaxprs
from fdg.batch.rules.random import has_batch_dependent_draws
from fdg.batch.rules.result import Axis, Rule, RuleResult


def _rowwise(eqn: Any, operands: list[Axis]) -> RuleResult | None:
    """Chooses the declared split that fits most operands; operands that are split otherwise are gathered.

    A declared split is a pair: the axis of each operand, and the axis of each result.
    """
    if has_batch_dependent_draws(jaxprs.open_jaxpr(eqn.params["jaxpr"])):
        return None

    def num_matching(split: Any) -> int:
        return sum(a is not None and a == declared for a, declared in zip(operands, split[0], strict=True))

    inputs, results = max(eqn.params["splits"], key=num_matching)
    if not num_matching((inputs, results)):
        return None
    gathered = [i for i, (a, d) in enumerate(zip(operands, inputs, strict=True)) if a not in (None, d)]
    return RuleResult(results, tuple(gathered), local=True)


RULES: dict[str, Rule] = {"rowwise": _rowwise}
