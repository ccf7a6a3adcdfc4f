"""`Environments`: devices of their own for the environments, the others act and learn."""

import dataclasses

from policies.single_learner_fine import SingleLearnerFine


@dataclasses.dataclass(frozen=True, repr=False)
class Environments(SingleLearnerFine):
    """`SingleLearnerFine` under MSRL's name for jobs whose time goes into the environments.

    The environments get devices of their own. Fields and groups are those of `SingleLearnerFine`.
    """
