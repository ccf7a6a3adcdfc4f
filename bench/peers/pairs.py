"""What is compared: each pair a task, a peer's settings, and the flags of fdg that make it the same work."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Pair:
    """One row.

    Attributes:
      peer: a name in `bench.peers.peers.PEERS`.
      task: what is trained, for people: algorithm, environment.
      size: environments stepped together.
      flags: of `python -m fdg.train`, apart from `--num-envs` and `--total-steps`.
      config: of the peer's driver.
      steps: environment steps of a round; a round takes some seconds.
      at_least: the ratio of speeds that is asked for.
      equal: what is the same on both sides.
      driver: a module in `bench/peers/drivers/`; the peer's name if empty.
      continues: a round goes on where the last one ended; else it is a whole training.
    """

    peer: str
    task: str
    size: int
    flags: str
    config: Mapping[str, Any]
    steps: int
    at_least: float
    equal: str
    driver: str = ""
    continues: bool = False

    @property
    def name(self) -> str:
        """As the command line takes it, and as it stands in the results."""
        return f"{self.peer}/{self.task}/{self.size}".replace(" ", "-")

    @property
    def our_flags(self) -> list[str]:
        """A whole command line of `python -m fdg.train`."""
        return [*self.flags.split(), "--num-envs", str(self.size), "--total-steps", str(self.steps)]

    @property
    def figures(self) -> dict[str, Any]:
        """What results keep of it."""
        of = {name: getattr(self, name) for name in ("peer", "task", "size", "equal", "at_least")}
        return {**of, "flags": " ".join(self.our_flags)}
