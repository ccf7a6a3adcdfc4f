"""`SingleLearnerFine`: environments on workers, all inference and learning on the learner's device."""

import dataclasses
from collections.abc import Mapping, Sequence

from fdg.placing.policy import Group
from policies.groups import divide
from policies.parameters import ShardsParameters, group_size


@dataclasses.dataclass(frozen=True, repr=False)
class SingleLearnerFine(ShardsParameters):
    """Environments on some devices; acting and learning on others. Parameters are never sent.

    Observations go to the learners and actions to the environments at every step. The layout of SEED RL
    (Espeholt et al., arXiv 1910.06591).

    Attributes:
      workers: devices for environments; None for all remaining devices.
      learners: devices that act and learn, the batch split over them.

    `model_parallel` and `parameters` (`ShardsParameters`) apply to the learners.
    """

    workers: int | None = group_size(None, "devices for environments; None: the rest")
    learners: int = group_size(1, "devices that act and learn")

    def place(self, devices: Sequence[str]) -> Mapping[str, Group]:
        """A group for the environments, and one for all other roles."""
        workers, learners = divide(self, devices, workers=self.workers, learners=self.learners)
        learners = self.with_sharding(learners)
        return {"environment": workers, **dict.fromkeys(("actor", "buffer", "learner"), learners)}
