"""Estimated memory, compared with XLA's own figure."""

import pytest

from bench import costs_memory
from fdg.training.reference_jobs import ReferenceJob

MIN_RATIO = 0.6  # the smallest accepted ratio
_JOBS = [job for job in costs_memory.jobs() if str(job) in costs_memory.xla_bytes()]


def max_ratio(job: ReferenceJob) -> float:
    """The largest accepted ratio of estimate to XLA's bytes.

    The limit is higher on several devices, where each device has one core: it computes gradients in tiles,
    which need less memory than estimated.
    """
    return 1.5 if job.devices == 1 else 2.6


@pytest.mark.parametrize("job", _JOBS, ids=str)
def test_estimate_is_near_xlas(job):
    """`python -m bench.costs memory` stored XLA's figures. If each device has one core, gradients run in
    tiles (`lowering.tiles`) and need less than the estimate.
    """
    for group, estimated, xla in costs_memory.compare(job):
        assert MIN_RATIO <= estimated / xla <= max_ratio(job), (
            group,
            estimated,
            xla,
        )
