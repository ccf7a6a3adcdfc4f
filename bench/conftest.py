"""Options of `make bench`, and where its figures are kept."""

import pytest

from bench.results import RESULTS, keep

# Not tests, and not to be imported for doctests: two set XLA's flags, others need a peer's environment or
# torch.
collect_ignore_glob = [
    "overlap.py",
    "language_placements.py",
    "peers/drivers/*",
    "language_reference.py",
    "rlhf_oracle.py",
]


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="every size, seed, policy and algorithm")
    parser.addoption("--record", action="store_true", help=f"keep the figures in {RESULTS.name}")


def pytest_configure(config):
    config.addinivalue_line("markers", "thorough: a benchmark that runs only with --thorough")


def pytest_collection_modifyitems(config, items):
    """Without `--thorough`, sizes that are marked so are left out."""
    if config.getoption("--thorough"):
        return
    skip = pytest.mark.skip(reason="one of the sizes of --thorough")
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker(skip)


@pytest.fixture
def record(request):
    """A function `(name, figures)` that keeps figures, where that is asked for."""

    def recorded(name, figures):
        if request.config.getoption("--record"):
            keep("bench", name, figures)

    return recorded
