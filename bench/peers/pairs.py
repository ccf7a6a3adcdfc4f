"""A pair of trainers to compare: a task, a peer's settings, and fdg's flags for the same work."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Pair:
    """A comparison of fdg with one peer: a row of the table of results.

    Attributes:
      peer: a name in `bench.peers.peers.PEERS`.
      task: the algorithm and the environment, as text.
      size: number of parallel environments.
      flags: flags of `python -m fdg.train`, without `--num-envs` and `--total-steps`.
      config: the configuration of the peer's driver.
      steps: environment steps per round; a round takes some seconds.
      target_ratio: the target for fdg's speed divided by the peer's.
      equal: the settings that are equal on both sides, as text.
      driver: a module in `bench/peers/drivers/`; the peer's name if empty.
      keeps_state: whether a round starts where the last one ended; otherwise it is a whole training.
    """

    peer: str
    task: str
    size: int
    flags: str
    config: Mapping[str, Any]
    steps: int
    target_ratio: float
    equal: str
    driver: str = ""
    keeps_state: bool = False

    @property
    def name(self) -> str:
        """The name on the command line and in the results."""
        return f"{self.peer}/{self.task}/{self.size}".replace(" ", "-")

    @property
    def our_flags(self) -> list[str]:
        """All flags of `python -m fdg.train`."""
        return [*self.flags.split(), "--num-envs", str(self.size), "--total-steps", str(self.steps)]

    @property
    def figures(self) -> dict[str, Any]:
        """The entries of the pair in the results, without measurements."""
        fields = {name: getattr(self, name) for name in ("peer", "task", "size", "equal")}
        return {**fields, "at_least": self.target_ratio, "flags": " ".join(self.our_flags)}
