"""Faults injected into the engine, which the fuzzer has to find (`make fuzz ARGS="--break NAME"`).

Only this module patches the engine's internals. Each fault names the internals that it patches, and fails if
they no longer exist: adapt them when the engine changes.
"""

import importlib
from collections.abc import Callable
from typing import Any


def _patch_state_version(change: Callable[[Any, frozenset, frozenset], frozenset]) -> None:
    """Replaces the version that a reader reads by `change(reader, correct version, versions of all actors)`.

    Patches `placing.staleness.readers.Readers.state_version(reader)`, the version of the state that a
    fragment reads (None: the next state and metrics), and uses `Readers.actors`.
    """
    cls: Any = importlib.import_module("fdg.placing.staleness.readers").Readers
    original = cls.state_version

    def changed(self: Any, reader: Any) -> frozenset:
        cls.state_version = original  # it calls itself for the enclosing fragment
        try:
            by_actors = frozenset().union(*(original(self, actor) for actor in self.actors))
            return change(reader, original(self, reader), by_actors)
        finally:
            cls.state_version = changed

    cls.state_version = changed


def _staleness() -> None:
    """Every reader of a delayed value gets the old version."""
    _patch_state_version(lambda reader, own, by_actors: by_actors)


def _ages() -> None:
    """Versions are swapped between groups: actors read the newest, the others the delayed one."""
    _patch_state_version(lambda reader, own, by_actors: own if reader is None else by_actors - own)


def _effects() -> None:
    """Ordered effects get no tokens.

    Patches `placing.regions.opening.has_effect(equation)`, which chooses the equations with a token.
    """
    opening: Any = importlib.import_module("fdg.placing.regions.opening")
    assert callable(opening.has_effect)
    opening.has_effect = lambda eqn: False


def _axis() -> None:
    """Cumulative operations along the batch axis are computed per device, without the other rows.

    Patches `batch.rules.RULES`, by primitive, with a rule whose result is `local`.
    """
    rules: Any = importlib.import_module("fdg.batch.rules")
    result: Any = importlib.import_module("fdg.batch.rules.result")
    local = result.locally(result.same)
    for name in ("cumsum", "cumprod", "cummax", "cumlogsumexp"):
        assert name in rules.RULES
        rules.RULES[name] = local


def _nan() -> None:
    """Maxima and minima over devices are reduced as floats, where XLA drops NaN.

    Patches `lowering.constraints.may_lose_nan(equation)`, which chooses the equations reduced as integers.
    """
    constraints: Any = importlib.import_module("fdg.lowering.constraints")
    assert callable(constraints.may_lose_nan)
    constraints.may_lose_nan = lambda eqn: False


def _weak() -> None:
    """Every state leaf is strongly typed.

    Patches `tracing.trace.with_weakness(tree, weak)`, which sets the weak types for tracing.
    """
    trace: Any = importlib.import_module("fdg.tracing.trace")
    with_weakness = trace.with_weakness
    trace.with_weakness = lambda tree, weak: with_weakness(tree, [False] * len(weak))


def _host() -> None:
    """Host callbacks are hoisted out of loops and called once for all trips.

    Patches `lowering.hoisting._FIXED`, the operations that are not hoisted.
    """
    hoisting: Any = importlib.import_module("fdg.lowering.hoisting")
    assert "pure_callback" in hoisting._FIXED
    hoisting._FIXED = frozenset()


BREAKAGES: dict[str, Callable[[], None]] = {
    "staleness": _staleness,
    "ages": _ages,
    "effects": _effects,
    "axis": _axis,
    "nan": _nan,
    "weak": _weak,
    "host": _host,
}
