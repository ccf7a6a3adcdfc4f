"""`Environments`: devices of their own for the environments, the others act and learn."""

import dataclasses

from policies.single_learner_fine import SingleLearnerFine


@dataclasses.dataclass(frozen=True, repr=False)
class Environments(SingleLearnerFine):
    """`SingleLearnerFine` by MSRL's name for it, for jobs whose time goes into the environments.

    They get devices that do nothing else. Fields and groups are those of `SingleLearnerFine`; the name says
    what the devices are divided for.
    """
