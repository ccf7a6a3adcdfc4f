"""A preset: tuned settings of one algorithm for a family of environments, and their source."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Entry:
    """Settings of one algorithm for one family of environments, or for one environment."""

    source: str  # where the settings come from, and how they were changed
    values: Mapping[str, Any]  # by field of the algorithm; other fields keep their defaults
    # Values that override these on a CPU. Mostly fewer environments: with thousands of them, a CPU makes no
    # more steps per second than with hundreds, and would take minutes for an iteration.
    on_cpu: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def for_backend(self) -> dict[str, Any]:
        """The settings for JAX's default backend, which is looked up only if `on_cpu` is set."""
        if self.on_cpu and jax.default_backend() == "cpu":
            return {**self.values, **self.on_cpu}
        return dict(self.values)

    def with_changes(self, source: str, on_cpu: Mapping[str, Any] | None = None, **changes: Any) -> "Entry":
        """A copy with changed settings, for an environment that differs from its family."""
        on_cpu = self.on_cpu if on_cpu is None else on_cpu
        return Entry(f"{self.source}; {source}", {**self.values, **changes}, on_cpu)
