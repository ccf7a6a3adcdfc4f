"""Runs tests quickly, in forks of a process that has imported libraries, but not the code under test.

`tools/mutants.py` starts this process in a copy of the repository. For each run, it sends a line of JSON with
`tests` (lists of test files and test names, run in order until a test fails) and `limit` (CPU seconds, see
`bench.forks.forked`). The answer is a line of JSON with `outcome` ("passed", "failed", "timed out", or
"broken" if this tool failed) and `by` (the failed test, or the error).
"""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Sequence

import pytest

from bench.forks import LateError, LostError, forked

# Libraries that are slow to import. They must not import this repository's code, nor start JAX's backends as
# gymnax and brax do, since forks lose their threads.
LIBRARIES = ("jax", "scipy.stats", "flax.linen", "optax", "chex", "orbax.checkpoint", "jaxopt", "hypothesis")
LIBRARIES += ("pandas", "seaborn", "matplotlib.pyplot", "mujoco.mjx", "gymnasium", "envpool", "rich")

OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:xdist")
OPTIONS += ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # plugins are already imported


class NamedTests:
    """A plugin of pytest that runs named files and tests in order, and records the first failure.

    Pytest's command line cannot select a test whose parameters contain `::`.
    """

    def __init__(self, names: Sequence[str]):
        self.files = list(dict.fromkeys(name.split("::")[0] for name in names))
        self.failed: str | None = None
        self._rank = {name: i for i, name in enumerate(names)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keeps tests that are named or in a named file; sorts them by the order of the names."""
        not_named = len(self._rank)
        ranks = [
            min(self._rank.get(name, not_named) for name in (item.nodeid, item.nodeid.split("::")[0]))
            for item in items
        ]
        selected = [(rank, item) for rank, item in zip(ranks, items, strict=True) if rank < not_named]
        items[:] = [item for _, item in sorted(selected, key=lambda pair: pair[0])]

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    pytest_collectreport = pytest_runtest_logreport


def run_tests(tests: Sequence[Sequence[str]]) -> dict[str, str]:
    """Runs the tests in this process; returns `outcome` and `by`."""
    for names in tests:
        plugin = NamedTests(names)
        status = pytest.main([*OPTIONS, *plugin.files], plugins=[plugin])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return {"outcome": "failed", "by": plugin.failed or f"exit status {int(status)}"}
    return {"outcome": "passed", "by": ""}


def run_in_fork(tests: Sequence[Sequence[str]], limit: float) -> dict[str, str]:
    """Runs the tests in a fork; returns `outcome` and `by`."""
    try:
        return forked(lambda: run_tests(tests), limit)
    except LateError:
        return {"outcome": "timed out", "by": ""}
    except LostError as error:
        process_ended = str(error).startswith("the process")
        return {"outcome": "failed" if process_ended else "broken", "by": str(error)}


def main() -> None:
    """Answers each line of standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard error
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(run_in_fork(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
