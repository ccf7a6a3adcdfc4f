"""`MultiLearner`: a learner on every device, gradients all-reduced; environments on the host's CPU."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from fdg.placing.policy import Group
from policies.groups import accelerators_and_hosts
from policies.parameters import ShardsParameters


@dataclasses.dataclass(frozen=True, repr=False)
class MultiLearner(ShardsParameters):
    """Every device acts and learns on its share of the batch; the environments run on the host's CPU.

    With only CPUs, or only accelerators, environments share the learners' devices. This is the layout of
    data-parallel learners such as RLlib's DD-PPO (Wijmans et al., ICLR 2020).

    `model_parallel` and `parameters` (`ShardsParameters`) apply to the learners.
    """

    uses_host: ClassVar[bool] = True  # adds the host's CPU to accelerators (`fdg.placing.policy.with_host`)

    def place(self, devices: Sequence[str]) -> Mapping[str, Group]:
        """Puts environments on the host's CPUs, if there are both kinds; other roles on all accelerators."""
        accelerators, hosts = accelerators_and_hosts(devices)
        learners = self.with_sharding(Group("learners", tuple(accelerators)))
        environments = Group("environments", tuple(hosts)) if hosts else learners
        return {"environment": environments, **dict.fromkeys(("actor", "buffer", "learner"), learners)}
