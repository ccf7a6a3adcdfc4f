"""`GPUOnly`: everything on every device, the whole training loop in one XLA program."""

import dataclasses
from collections.abc import Mapping, Sequence

from fdg.placing.policy import Group
from policies.parameters import ShardsParameters


@dataclasses.dataclass(frozen=True, repr=False)
class GPUOnly(ShardsParameters):
    """All fragments share all devices; each batch is split over the devices, which only exchange gradients.

    The layout of WarpDrive (Lan et al., JMLR 2022), Podracer's Anakin (Hessel et al., arXiv 2104.06272) and
    PureJaxRL (Lu et al., NeurIPS 2022). Works on any number of devices of any kind, CPUs included.

    `model_parallel` and `parameters` (`ShardsParameters`) apply to all devices.
    """

    def place(self, devices: Sequence[str]) -> Mapping[str, Group]:
        """One group of all devices."""
        all_devices = self.with_sharding(Group("all", tuple(range(len(devices)))))
        return dict.fromkeys(("environment", "actor", "buffer", "learner"), all_devices)
