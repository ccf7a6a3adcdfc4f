"""`Environments`: devices of their own for the environments, the others act and learn."""

import dataclasses
from collections.abc import Mapping, Sequence

from fdg.placing.policy import Group
from policies.groups import divide
from policies.parameters import ShardsParameters


@dataclasses.dataclass(frozen=True, repr=False)
class Environments(ShardsParameters):
    """For jobs whose time goes into the environments: they get devices that do nothing else.

    Observations and actions cross at every step, from all workers to all learners.

    Attributes:
      workers: devices for environments, None for all that remain.
      learners: devices that act and learn, the batch split over them.

    `model_parallel` and `parameters` (`ShardsParameters`) are of the learners.
    """

    workers: int | None = dataclasses.field(
        default=None, metadata={"help": "devices for environments; None: the rest"}
    )
    learners: int = dataclasses.field(default=1, metadata={"help": "devices that act and learn"})

    def place(self, devices: Sequence[str]) -> Mapping[str, Group]:
        """Environments here, all else there."""
        workers, others = divide(self, devices, workers=self.workers, learners=self.learners)
        others = self.sharded(others)
        return {"environment": workers, **dict.fromkeys(("actor", "buffer", "learner"), others)}
