"""`Split`: generation on some devices, training on the others."""

import dataclasses
from collections.abc import Mapping, Sequence

from fdg.placing.policy import Group
from policies.colocated import LEARNING_ROLES
from policies.groups import divide
from policies.parameters import Lags, device_count, generation_group, group_size


@dataclasses.dataclass(frozen=True, repr=False)
class Split(Lags):
    """Prompts, generation and rewards on some devices; reference, critic and training on the others.

    Samples go to the learners and parameters to the actors, once per iteration. With `staleness` both sides
    work at the same time: asynchronous RLHF (Noukhovitch et al., arXiv 2410.18252).

    Attributes:
      actors: devices that generate; None for all remaining devices.
      learners: devices that train.
      generation_parallel: number of actors over which parameters are split in generation.
      rewards: devices for the role `reward`; None for the actors'.
      staleness: age of the actors' parameters in iterations; 0 is synchronous.

    `lag` (`Lags`) is the staleness in micro-batches. `model_parallel` and `parameters` (`ShardsParameters`)
    apply to the learners, and to the actors if `generation_parallel` is above 1.
    """

    actors: int | None = group_size(None, "devices that generate; None: the rest")
    learners: int = group_size(1, "devices that train")
    generation_parallel: int = device_count(
        1, "devices over which parameters are split for generation", least=1
    )
    rewards: int | None = device_count(None, "devices of the reward alone; None: those that generate")
    staleness: int = 0

    def place(self, devices: Sequence[str]) -> Mapping[str, Group]:
        """Two groups, and a third for rewards if they have separate devices."""
        sizes = {"rewards": self.rewards} if self.rewards is not None else {}
        actors, *rewards, learners = divide(
            self, devices, actors=self.actors, **sizes, learners=self.learners
        )
        learners = self.with_sharding(learners)
        if self.generation_parallel > 1:
            actors = generation_group(self.with_sharding(actors), "actors", self.generation_parallel)
        return {
            "environment": actors,
            "actor": actors,
            "reward": rewards[0] if rewards else actors,
            **dict.fromkeys(LEARNING_ROLES, learners),
        }
