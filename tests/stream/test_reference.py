"""`fdg.stream` compared with the reference in plain Python. More settings: `python -m tests.stream.clock`."""

import pytest

from tests.stream.clock import check_bounds, check_through_xla
from tests.stream.reference import Clock, Sizes

# Together they cover both orders, waiting and masking, groups, micro-batches, and one or several prefills.
SAMPLE = (16, 17, 22)


def test_documented_example():
    """docs/streaming.md, "By hand"."""
    clock = Clock(Sizes(batch=2, slots=2, ahead=1, prefills=1), lambda response: 4 if response == 1 else 1)
    takes = [clock.take(version) for version in range(3)]
    assert [take.responses for take in takes] == [(0, 2), (1, 3), (4, 5)]
    assert [[tick.slots for tick in take.ticks] for take in takes] == [
        [(0, 1), (2, 1)],
        [(3, 1), (4, 1)],
        [(5, 6)],
    ]
    assert takes[1].drawn[0] == ((0, 0), (1, 0), (2, 1), (3, 1))
    assert clock.counts() == {"ticks": 5, "busy": 10, "started": 7, "trained": 6, "queued": 1, "running": 0}


def test_reference_bounds():
    for seed in range(100):
        check_bounds(seed)


@pytest.mark.parametrize("seed", SAMPLE)
def test_stream_matches_reference(seed):
    check_through_xla(seed)
