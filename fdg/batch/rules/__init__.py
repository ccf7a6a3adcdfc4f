"""What each operation does with a batch axis: carries it along, consumes it, or needs it whole.

One rule an operation: (equation, axes of its operands, at least one of them not None) to a `RuleResult`.
An operation without a rule needs its operands whole; nothing is guessed. To add one: the rule beside its
kind, its name in that file's `RULES`, and a row in `tests/batch/sweep.py`, which compares it with the
partitioner.
"""

from fdg.batch.rules import declared, elementwise, lookup, products, random, reduce, shape
from fdg.batch.rules.result import Rule

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **shape.RULES,
    **reduce.RULES,
    **products.RULES,
    **lookup.RULES,
    **random.RULES,
    **declared.RULES,
}
