"""`GPUOnly`: everything on every device, the whole training loop one XLA program."""

import dataclasses
from collections.abc import Mapping, Sequence

from fdg.placing.policy import Group


@dataclasses.dataclass(frozen=True)
class GPUOnly:
    """All fragments share all devices, each batch split over them; only gradients are exchanged.

    The layout of WarpDrive (Lan et al., JMLR 2022), Podracer's Anakin (Hessel et al., arXiv 2104.06272)
    and PureJaxRL (Lu et al., NeurIPS 2022). Any number of devices of any kind, despite its name.
    """

    def place(self, devices: Sequence[str]) -> Mapping[str, Group]:
        """One group of all devices."""
        everyone = Group("all", tuple(range(len(devices))))
        return dict.fromkeys(("environment", "actor", "buffer", "learner"), everyone)
