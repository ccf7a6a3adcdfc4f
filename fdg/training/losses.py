"""Episodes that a run has lost to failures of its environment's workers: counted, and said at its end."""

from typing import Any

from envs import host
from fdg.processes import distributed


class LostEpisodes:
    """How many running episodes were lost, over all sittings of a run.

    Only environments of the host that survive failures (`restarts`) lose any; of others nothing is said. An
    episode that was running where a worker failed counts as truncated there.

    Args:
      env: the run's environment; None where the algorithm has its own.
    """

    def __init__(self, env: Any):
        self._can = isinstance(env, host.HostEnvironment) and env.restarts > 0
        self._before, self._start = 0, host.losses()
        self._failures = self._episodes = 0

    def go_on(self, last: dict[str, Any] | None) -> None:
        """Counts on from a row of `metrics.jsonl` that an earlier sitting wrote."""
        self._before = int((last or {}).get("lost_episodes") or 0)

    def row(self) -> dict[str, int]:
        """What a row of metrics says of them until now. A collective: all processes call it."""
        if not self._can:
            return {}
        now = host.losses()
        mine = [now.failures - self._start.failures, now.episodes - self._start.episodes]
        self._failures, self._episodes = (
            sum(column) for column in zip(*distributed.exchange(mine), strict=True)
        )
        return {"lost_episodes": self._before + self._episodes}

    def summary(self) -> dict[str, int]:
        """What `summary.json` says of them, after the last `row`."""
        return {"lost_episodes": self._before + self._episodes} if self._can else {}

    def line(self) -> str:
        """What is said at the end of this sitting, after the last `row`; empty if none was lost."""
        if not self._failures:
            return ""
        counts = f"{self._episodes:,} running episode{'s' if self._episodes != 1 else ''}"
        causes = f"{self._failures:,} failure{'s' if self._failures != 1 else ''}"
        return f"lost {counts} to {causes} of the environment's workers: they count as truncated"
