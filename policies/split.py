"""`Split`: generating on some devices, training on the others."""

import dataclasses
from collections.abc import Mapping, Sequence

from fdg.placing.policy import Group
from policies.colocated import LEARNING
from policies.groups import divide
from policies.parameters import Lags, generating


@dataclasses.dataclass(frozen=True, repr=False)
class Split(Lags):
    """Prompts, generation and rewards on some devices; reference, critic and training on the others.

    Samples go up and parameters come down, once an iteration. With `staleness` both sides work at the same
    time: asynchronous RLHF (Noukhovitch et al., arXiv 2410.18252).

    Attributes:
      actors: devices that generate, None for all that remain.
      learners: devices that train.
      generation_parallel: actors that split parameters among them, rows of so many devices.
      rewards: devices of the role `reward` alone; None: the actors'.
      staleness: how many iterations old the actors' parameters are; 0 is synchronous.

    `lag` (`Lags`) is `staleness` in micro-batches. `model_parallel` and `parameters` (`ShardsParameters`) are
    of the learners.
    """

    actors: int | None = dataclasses.field(
        default=None, metadata={"devices": True, "help": "devices that generate; None: the rest"}
    )
    learners: int = dataclasses.field(default=1, metadata={"devices": True, "help": "devices that train"})
    generation_parallel: int = dataclasses.field(
        default=1, metadata={"help": "devices that split parameters to generate"}
    )
    rewards: int | None = dataclasses.field(
        default=None, metadata={"help": "devices of the reward alone; None: those that generate"}
    )
    staleness: int = 0

    def place(self, devices: Sequence[str]) -> Mapping[str, Group]:
        """Two sides, and the reward apart where it has devices of its own."""
        wanted = {"rewards": self.rewards} if self.rewards is not None else {}
        actors, *judging, learners = divide(
            self, devices, actors=self.actors, **wanted, learners=self.learners
        )
        learners = self.sharded(learners)
        if self.generation_parallel > 1:
            actors = generating(self.sharded(actors), "actors", self.generation_parallel)
        return {
            "environment": actors,
            "actor": actors,
            "reward": judging[0] if judging else actors,
            **dict.fromkeys(LEARNING, learners),
        }
