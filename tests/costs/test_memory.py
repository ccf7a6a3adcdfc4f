"""The estimate of memory beside XLA's own."""

import pytest

from bench import costs_memory

_LAID_OUT = [job for job in costs_memory.jobs() if str(job) in costs_memory.xla_bytes()]


@pytest.mark.parametrize("job", _LAID_OUT, ids=str)
def test_what_is_estimated_is_near_what_xla_sets_aside(job):
    """Of programs that XLA laid out once (`python -m bench.costs memory`). Where devices have a core each,
    gradients run in tiles (`lowering.tiles`), and need less than the estimate.
    """
    for group, estimated, xla in costs_memory.compare(job):
        assert costs_memory.MIN_RATIO <= estimated / xla <= costs_memory.max_ratio(job), (
            group,
            estimated,
            xla,
        )
