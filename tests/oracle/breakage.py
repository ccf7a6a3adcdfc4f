"""The engine, broken on purpose: what the oracle has to find. Everything that reaches into the engine is here.

After a change of the engine, these are the places to adapt; each says what it relies on.
"""

from collections.abc import Callable
from typing import Any


def _staleness() -> None:
    """Whatever reads a delayed leaf reads it late, between fragments and in every group.

    Relies on `fdg.placing.staleness._Flow.reached(eqn, position)`, the fragments that read an operand, and on
    `delay` reading old versions wherever an actor is among them.
    """
    from fdg.placing import staleness

    def reached(self: Any, eqn: Any, position: int) -> list[str]:
        return [next(f.name for f in self.graph.fragments if f.role == "actor")]

    staleness._Flow.reached = reached  # type: ignore[method-assign]


def _effects() -> None:
    """Ordered effects reach the engine as unordered ones: nothing says in which order calls come.

    Relies on `compare.under_test` alone, for it is what the engine sees of the program that changes.
    """
    from tests.oracle import compare

    compare.under_test = lambda program: compare.Algorithm(program, ordered=False)


def _axis() -> None:
    """`cumsum` along the batch is said to need no other rows, so that each device sums its own alone.

    Relies on `fdg.batch.rules.RULES`, by primitive, and on a rule's result with `local=True`.
    """
    from fdg.batch import rules

    rules.RULES["cumsum"] = rules._locally(rules._same)


BREAKAGES: dict[str, Callable[[], None]] = {"staleness": _staleness, "effects": _effects, "axis": _axis}
