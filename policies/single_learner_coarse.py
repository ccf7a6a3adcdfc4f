"""`SingleLearnerCoarse`: actors collect whole rollouts, a learner updates once per iteration."""

import dataclasses
from collections.abc import Mapping, Sequence

from fdg.placing.policy import Group
from policies.groups import divide
from policies.parameters import Lags, group_size


@dataclasses.dataclass(frozen=True, repr=False)
class SingleLearnerCoarse(Lags):
    """Environments and actors on some devices, the learner on others.

    Trajectories go to the learner and parameters to the actors, once per iteration. With `staleness` both
    sides work at the same time: the layout of IMPALA (Espeholt et al., arXiv 1802.01561), Acme (Hoffman et
    al., arXiv 2006.00979) and Podracer's Sebulba (Hessel et al., arXiv 2104.06272).

    Attributes:
      actors: devices that act; None for all remaining devices.
      learners: devices that learn, the batch split over them.
      staleness: age of the actors' parameters in iterations; 0 is synchronous.

    `lag` (`Lags`) is the staleness in micro-batches. `model_parallel` and `parameters` (`ShardsParameters`)
    apply to the learners; actors hold whole parameters.
    """

    actors: int | None = group_size(None, "devices that act; None: the rest")
    learners: int = group_size(1, "devices that learn")
    staleness: int = 0

    def place(self, devices: Sequence[str]) -> Mapping[str, Group]:
        """A group for acting, and one for learning."""
        actors, learners = divide(self, devices, actors=self.actors, learners=self.learners)
        learners = self.with_sharding(learners)
        return {"environment": actors, "actor": actors, "buffer": learners, "learner": learners}
