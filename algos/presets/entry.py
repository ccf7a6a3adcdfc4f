"""A preset: settings that were found good for a family of environments, and who found them so."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Entry:
    """Settings of one algorithm for one family of environments, or for one environment."""

    source: str  # where they come from, and what was changed
    values: Mapping[str, Any]  # by field of the algorithm; what is not there keeps its default
    # those that differ where there is no accelerator: mostly fewer environments, for a CPU steps a few
    # hundred at once as quickly as a few thousand, and would wait for minutes until it learns
    on_cpu: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def here(self) -> dict[str, Any]:
        """The settings for the devices at hand; looks for these only where they matter."""
        if self.on_cpu and jax.default_backend() == "cpu":
            return {**self.values, **self.on_cpu}
        return dict(self.values)

    def but(self, source: str, on_cpu: Mapping[str, Any] | None = None, **changes: Any) -> "Entry":
        """A copy with some settings changed, for an environment that differs from its family."""
        on_cpu = self.on_cpu if on_cpu is None else on_cpu
        return Entry(f"{self.source}; {source}", {**self.values, **changes}, on_cpu)
