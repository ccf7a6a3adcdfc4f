"""Estimated memory, compared with XLA's own figure."""

import pytest

from bench import costs_memory

_JOBS = [job for job in costs_memory.jobs() if str(job) in costs_memory.xla_bytes()]


@pytest.mark.parametrize("job", _JOBS, ids=str)
def test_estimate_is_near_xlas(job):
    """`python -m bench.costs memory` stored XLA's figures. If each device has one core, gradients run in
    tiles (`lowering.tiles`) and need less than the estimate.
    """
    for group, estimated, xla in costs_memory.compare(job):
        assert costs_memory.MIN_RATIO <= estimated / xla <= costs_memory.max_ratio(job), (
            group,
            estimated,
            xla,
        )
