"""`Workers`: environments, inference, buffers and learning on separate devices."""

import dataclasses
from collections.abc import Mapping, Sequence

from fdg.placing.policy import Group
from policies.groups import divide
from policies.parameters import Lags, device_count, group_size


@dataclasses.dataclass(frozen=True, repr=False)
class Workers(Lags):
    """Actor workers step environments, policy workers infer actions, trainer workers learn.

    The layout of SRL (Mei et al., arXiv 2306.16688). Observations and actions are exchanged at every step,
    trajectories and parameters once per iteration. With `staleness`, acting and learning work at the same
    time. With the algorithm's `rings`, environments step while policy workers infer.

    Attributes:
      environments: devices for environments; None for all remaining devices.
      actors: devices that infer actions, the batch split over them.
      learners: devices that learn, the batch split over them.
      buffers: devices for the role `buffer` (replay, transforms); 0 for the learners'.
      staleness: age of the actors' parameters in iterations; 0 is synchronous.

    `lag` (`Lags`) is the staleness in micro-batches. `model_parallel` and `parameters` (`ShardsParameters`)
    apply to the learners; actors hold whole parameters.
    """

    environments: int | None = group_size(None, "devices for environments; None: the rest")
    actors: int = group_size(1, "devices that act")
    learners: int = group_size(1, "devices that learn")
    buffers: int = device_count(0, "devices of replay and transforms; 0: those that learn", least=0)
    staleness: int = 0

    def place(self, devices: Sequence[str]) -> Mapping[str, Group]:
        """A group for each role."""
        sizes = {"buffers": self.buffers} if self.buffers else {}
        environments, actors, *buffers, learners = divide(
            self, devices, environments=self.environments, actors=self.actors, **sizes, learners=self.learners
        )
        learners = self.with_sharding(learners)
        buffer = dataclasses.replace(buffers[0], optional=True) if buffers else learners
        return {"environment": environments, "actor": actors, "buffer": buffer, "learner": learners}
