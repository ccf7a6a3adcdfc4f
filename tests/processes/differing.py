"""An algorithm whose program depends on the process that traces it."""

import dataclasses
import os

import fdg
from tests.tiny import Pupil


@dataclasses.dataclass(frozen=True)
class Differing(Pupil):
    @fdg.fragment("update", in_axes=None, out_axes=None)
    def update(self, weight, slope):
        return weight - float(os.environ.get("FDG_TEST_RATE", "0.1")) * slope
