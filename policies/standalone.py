"""`Standalone`: separate devices for each model of RLHF."""

import dataclasses
from collections.abc import Mapping, Sequence

from fdg.placing.policy import Group
from policies.groups import divide
from policies.parameters import Lags, device_count, generation_group, group_size


@dataclasses.dataclass(frozen=True, repr=False)
class Standalone(Lags):
    """Actors, learner and reference each on their own devices; if requested, also critic and reward.

    The layout of OpenRLHF (Hu et al., arXiv 2405.11143). If the algorithm lacks a role, its devices are idle;
    the plan names them.

    Attributes:
      actors: devices that generate; None for all remaining devices.
      learners: devices that train.
      references: devices for the role `reference`; 0 for the learners'.
      critics: devices for the role `critic`; 0 for the learners'.
      rewards: devices for the role `reward`; 0 for the actors'.
      generation_parallel: number of actors over which parameters are split in generation.
      staleness: age of the actors' parameters in iterations; 0 is synchronous.

    `lag` (`Lags`) is the staleness in micro-batches. `model_parallel` and `parameters` (`ShardsParameters`)
    apply to the learners.
    """

    actors: int | None = group_size(None, "devices that generate; None: the rest")
    learners: int = group_size(1, "devices that train")
    references: int = device_count(1, "devices of the reference; 0: those that train", least=0)
    critics: int = device_count(0, "devices of the critic; 0: those that train", least=0)
    rewards: int = device_count(0, "devices of the reward; 0: those that generate", least=0)
    generation_parallel: int = device_count(1, "devices that split parameters to generate", least=1)
    staleness: int = 0

    def place(self, devices: Sequence[str]) -> Mapping[str, Group]:
        """A group for each role with separate devices."""
        names = ("rewards", "references", "critics")
        sizes = {name: getattr(self, name) for name in names if getattr(self, name)}
        actors, *others, learners = divide(self, devices, actors=self.actors, **sizes, learners=self.learners)
        learners = self.with_sharding(learners)
        if self.generation_parallel > 1:
            actors = generation_group(self.with_sharding(actors), "actors", self.generation_parallel)
        separate = {g.name: dataclasses.replace(g, optional=True) for g in others}
        return {
            "environment": actors,
            "actor": actors,
            "reward": separate.get("rewards", actors),
            "reference": separate.get("references", learners),
            "critic": separate.get("critics", learners),
            "buffer": learners,
            "learner": learners,
        }
