"""Options of `make bench`, and a fixture that records its figures."""

from functools import partial

import pytest

from bench.results import RESULTS, keep


def pytest_ignore_collect(collection_path):
    """Collects only test_*.py: other modules set XLA's flags at import, or need a peer's environment."""
    is_other = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if is_other else None


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="every size, seed, policy and algorithm")
    parser.addoption("--record", action="store_true", help=f"write the figures to {RESULTS.name}")


def pytest_configure(config):
    config.addinivalue_line("markers", "thorough: a benchmark that runs only with --thorough")


def pytest_collection_modifyitems(config, items):
    """Skips benchmarks that are marked as thorough, unless `--thorough` is set."""
    if config.getoption("--thorough"):
        return
    skip = pytest.mark.skip(reason="runs only with --thorough")
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker(skip)


@pytest.fixture
def record(request):
    """A function `(name, figures)` that writes figures to `RESULTS` if `--record` is set."""
    return partial(keep, "bench") if request.config.getoption("--record") else lambda name, figures: None
