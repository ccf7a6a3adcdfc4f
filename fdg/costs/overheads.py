"""What is lost between programs and devices, beside work and bytes: fitted, by platform.

    an operation that several cores divide                  gains `divided` of what such operations gain alone
    host devices of one process share a pool of threads     each is slower by `slowed` a doubling
    sums that wait for each other                           `meetings` all-reduces for one of the plan
    a program that may begin                                begins after `start`
    an array of a transfer                                  `array` of the host, and `arrival` on the way

The numbers belong to the fractions of `program_time.JOINED`: both were fitted together.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Overheads:
    """What is lost on a platform.

    Attributes:
      divided: the share of what further cores gain an operation by itself that they gain it within a program.
      shared: the share of a host's cores that programs which run at once have between them.
      slowed: the share of a program's time that each doubling of its process's devices adds.
      meetings: collectives of a compiled program for one that the plan names.
      start: seconds from when a program may begin until it does, on one device.
      further: the share of `start` that each further device adds.
      array: seconds of the host for each array that is moved from group to group.
      arrival: seconds that each such array takes besides its bytes.
    """

    divided: float = 1.0
    shared: float = 1.0
    slowed: float = 0.0
    meetings: float = 1.0
    start: float = 0.0
    further: float = 0.0
    array: float = 0.0
    arrival: float = 0.0

    def cores(self, cores: float) -> float:
        """As many as operations within a program gain by, where a device has so many."""
        return 1 + self.divided * (max(1.0, cores) - 1)

    def stretch(self, devices: int) -> float:
        """How many times as long a program takes where a process has so many devices at work."""
        return 1 + self.slowed * math.log2(max(1, devices))

    def seconds_to_start(self, devices: int) -> float:
        """Until a program of so many devices begins."""
        return self.start * (1 + self.further * (devices - 1))


OVERHEADS: Mapping[str, Overheads] = MappingProxyType(
    {
        # Fitted to one half of the cells of `python -m bench.costs` (docs/scale.md): two cores of an Intel
        # Xeon and of an AMD EPYC, 1 to 8 devices. The seconds are those of threads that are woken.
        "cpu": Overheads(
            divided=0.57,
            shared=0.7,
            slowed=0.11,
            meetings=0.98,
            start=7.3e-5,
            further=0.4,
            array=1.4e-5,
            arrival=6.6e-6,
        ),
        # Not fitted: none was at hand.
        "gpu": Overheads(),
        "tpu": Overheads(),
    }
)
"""By platform."""
