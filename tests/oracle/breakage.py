"""The engine, broken on purpose: what the oracle has to find. All that reaches into the engine is here.

After a change of the engine, these are the places to adapt; each says what it relies on, by name, and
fails if that is gone.
"""

import importlib
from collections.abc import Callable
from typing import Any


def _old(change: Callable[[Any, frozenset, frozenset], frozenset]) -> None:
    """Readers get other versions: `change` of the reader, what it should read, and what any actor should.

    Relies on `placing.staleness.readers.Readers.state_version(reader)`, the version of the state that a
    fragment reads (None: the state and metrics), and on its `actors`.
    """
    readers: Any = importlib.import_module("fdg.placing.staleness.readers").Readers
    old = readers.state_version

    def changed(self: Any, reader: Any) -> frozenset:
        readers.state_version = old  # which calls itself, for the fragment around
        try:
            every = frozenset().union(*(old(self, actor) for actor in self.actors))
            return change(reader, old(self, reader), every)
        finally:
            readers.state_version = changed

    readers.state_version = changed


def _staleness() -> None:
    """A reader of a value of which there is an older version gets that one."""
    _old(lambda reader, own, every: every)


def _ages() -> None:
    """Groups read each other's versions: those that wait the newest, others the older ones."""
    _old(lambda reader, own, every: own if reader is None else every - own)


def _effects() -> None:
    """No operation has an effect, so that no token is carried from one to the next.

    Relies on `placing.regions.opening.has_effect(equation)`, which says what gets a token.
    """
    opening: Any = importlib.import_module("fdg.placing.regions.opening")
    assert callable(opening.has_effect)
    opening.has_effect = lambda eqn: False


def _axis() -> None:
    """What accumulates along the batch is said to need no other rows: each device goes over its own alone.

    Relies on `batch.rules.RULES`, by primitive, and on rules whose result is `local`.
    """
    rules: Any = importlib.import_module("fdg.batch.rules")
    if hasattr(rules, "_locally"):
        local = rules._locally(rules._same)
    else:
        result: Any = importlib.import_module("fdg.batch.rules.result")
        local = result.locally(result.same)
    for name in ("cumsum", "cumprod", "cummax", "cumlogsumexp"):
        assert name in rules.RULES
        rules.RULES[name] = local


def _nan() -> None:
    """Devices combine extremes as floats, from which XLA drops NaN.

    Relies on `lowering.constraints.may_lose_nan(equation)`, which says what is combined as integers.
    """
    constraints: Any = importlib.import_module("fdg.lowering.constraints")
    assert callable(constraints.may_lose_nan)
    constraints.may_lose_nan = lambda eqn: False


def _weak() -> None:
    """Every leaf of the state is strongly typed.

    Relies on `tracing.trace.with_weakness(tree, weak)`, which types what an iteration is traced with.
    """
    trace: Any = importlib.import_module("fdg.tracing.trace")
    with_weakness = trace.with_weakness
    trace.with_weakness = lambda tree, weak: with_weakness(tree, [False] * len(weak))


def _host() -> None:
    """Functions on the host are called before a loop, for all of its trips together.

    Relies on `lowering.hoisting._FIXED`, the operations that stay in their loop.
    """
    ahead: Any = importlib.import_module("fdg.lowering.hoisting")
    assert "pure_callback" in ahead._FIXED
    ahead._FIXED = frozenset()


BREAKAGES: dict[str, Callable[[], None]] = {
    "staleness": _staleness,
    "ages": _ages,
    "effects": _effects,
    "axis": _axis,
    "nan": _nan,
    "weak": _weak,
    "host": _host,
}
