"""Overheads of the cost model: what does not follow from a program's work and bytes. Fitted to timed jobs.

    a further core for an operation      speeds it up less within a program than alone: `divided`
    CPU devices of one process           share threads: each doubling adds a fraction `slowed` to the time
    a collective of the plan             is `meetings` collectives in the compiled program
    a program whose inputs are ready     starts after `start` seconds
    each array of a transfer             adds `array` seconds on the host, and `arrival` seconds

Overheads and the fractions of `program_time.SHARES_AFTER_FUSION` were fitted together; use both together.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Overheads:
    """Overheads of a platform; the defaults are those of a platform without overheads."""

    # the speedup that each additional core adds to an operation within a program, as a fraction of the
    # speedup that it adds when the operation runs alone
    divided: float = 1.0
    shared: float = 1.0  # fraction of a machine's cores that programs of several groups can use
    slowed: float = 0.0  # fraction of a program's time that each doubling of the process's devices adds
    meetings: float = 1.0  # number of collectives in the compiled program per collective of the plan
    start: float = 0.0  # seconds from when the inputs of a program on one device are ready to its start
    further: float = 0.0  # fraction of `start` that each further device adds
    array: float = 0.0  # host seconds per array that a transfer moves between groups
    arrival: float = 0.0  # seconds per such array, in addition to the time of its bytes

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
        # Xeon and of an AMD EPYC, 1 to 8 devices. Most of these times are due to waking threads.
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
