"""Batch rules: for each operation, whether it keeps a batch axis, reduces it, or needs the whole axis.

A rule maps (equation, axes of its operands, at least one of them not None) to a `RuleResult`. Operands of an
operation without a rule are gathered. To add a rule, write it into the file of its kind, add its name to that
file's `RULES`, and add a row to `tests/batch/operations.py`, which compares rules with XLA's partitioner.
"""

from fdg.batch.rules import declared, elementwise, lookup, products, random, reduce, shape
from fdg.batch.rules.result import Rule

RULES: dict[str, Rule] = {  # by the name of the primitive
    **elementwise.RULES,
    **shape.RULES,
    **reduce.RULES,
    **products.RULES,
    **lookup.RULES,
    **random.RULES,
    **declared.RULES,
}
