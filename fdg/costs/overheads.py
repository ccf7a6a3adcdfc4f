"""Overheads of a platform that work and bytes do not explain, fitted to timed jobs.

    an operation on several cores                           its gain is `divided` times that measured alone
    host devices of one process, which share threads        a program is `slowed` longer for each doubling
    all-reduces                                             XLA runs `meetings` for each that the plan names
    a program whose inputs are ready                        starts after `start` seconds
    each array of a transfer                                `array` seconds of the host, `arrival` on the way

These numbers were fitted together with the fractions of `program_time.JOINED`; use them together.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Overheads:
    """Overheads of a platform. The defaults mean none."""

    # parallel efficiency: gain from extra cores within a program, relative to the operation alone
    divided: float = 1.0
    shared: float = 1.0  # fraction of a host's cores that is available to programs that run concurrently
    slowed: float = 0.0  # fraction of a program's time that each doubling of its process's devices adds
    meetings: float = 1.0  # collectives in the compiled program for each that the plan names
    start: float = 0.0  # seconds from when a program's inputs are ready until it starts, on one device
    further: float = 0.0  # fraction of `start` that each further device adds
    array: float = 0.0  # host seconds for each array that a transfer moves between groups
    arrival: float = 0.0  # seconds that each such array takes in addition to its bytes

    def cores(self, cores: float) -> float:
        """The effective number of cores for operations within a program, on a device with `cores` cores."""
        return 1 + self.divided * (max(1.0, cores) - 1)

    def stretch(self, devices: int) -> float:
        """The factor by which a program takes longer if its process has `devices` busy devices."""
        return 1 + self.slowed * math.log2(max(1, devices))

    def seconds_to_start(self, devices: int) -> float:
        """Seconds until a program on `devices` devices starts."""
        return self.start * (1 + self.further * (devices - 1))


OVERHEADS: Mapping[str, Overheads] = MappingProxyType(
    {
        # Fitted to one half of the cells of `python -m bench.costs` (docs/scale.md): two cores of an Intel
        # Xeon and of an AMD EPYC, 1 to 8 devices. Most of these seconds are spent waking threads.
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
        # Not fitted: no such device was available.
        "gpu": Overheads(),
        "tpu": Overheads(),
    }
)
"""Overheads by platform, for machines that were not calibrated."""
