"""`Environments`: separate devices for the environments; all others act and learn."""

import dataclasses

from policies.single_learner_fine import SingleLearnerFine


@dataclasses.dataclass(frozen=True, repr=False)
class Environments(SingleLearnerFine):
    """`SingleLearnerFine` under MSRL's name, for jobs dominated by environments.

    The environments get separate devices. Fields and groups are those of `SingleLearnerFine`.
    """
