"""Runs tests in forks of a process that has imported the libraries they need, and nothing of what they test.

`tools/mutants.py` starts one in a copy of the repository and sends it a line for each run: JSON with `tests`
(lists of files and of names of tests, run one after the other until one fails) and `limit` (seconds of CPU
time, so that other work on the machine makes no difference, and as many on the clock without any). The answer
is a line of JSON with `outcome` ("passed", "failed", "timed out") and `by`, the test that failed.
"""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Sequence

import pytest

from bench.forks import LateError, LostError, forked

# What is slow to import. None of it may import this repository's code, nor start JAX's backends as gymnax and
# brax do: their threads would not be there in a fork.
LIBRARIES = ("jax", "scipy.stats", "flax.linen", "optax", "chex", "orbax.checkpoint", "jaxopt", "hypothesis")
LIBRARIES += ("pandas", "seaborn", "matplotlib.pyplot", "mujoco.mjx", "gymnasium", "envpool", "rich")

OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:xdist")
OPTIONS += ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # plugins that are imported already


class Named:
    """A plugin of pytest that runs what is named, in that order, and remembers which test failed first.

    A name is of a file, which runs whole, or of a test; on pytest's command line one with `::` in its
    parameters would be no name.
    """

    def __init__(self, names: Sequence[str]):
        self.files = list(dict.fromkeys(name.split("::")[0] for name in names))
        self.failed: str | None = None
        self._place = {name: i for i, name in enumerate(names)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves the others out, and keeps to the order of the names."""
        places = [(self._at(item.nodeid.split("::")[0]), self._at(item.nodeid), item) for item in items]
        there = [(min(file, test), item) for file, test, item in places if min(file, test) < self._none]
        items[:] = [item for _, item in sorted(there, key=lambda pair: pair[0])]

    def _at(self, name: str) -> int:
        return self._place.get(name, self._none)

    @property
    def _none(self) -> int:
        return len(self._place)

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Of a test or its fixtures; of a file that cannot be imported."""
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    pytest_collectreport = pytest_runtest_logreport


def run(tests: Sequence[Sequence[str]]) -> dict[str, str]:
    """Runs the tests in this process."""
    for some in tests:
        named = Named(some)
        status = pytest.main([*OPTIONS, *named.files], plugins=[named])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return {"outcome": "failed", "by": named.failed or f"exit status {int(status)}"}
    return {"outcome": "passed", "by": ""}


def answer(tests: Sequence[Sequence[str]], limit: float) -> dict[str, str]:
    """The outcome of the tests in a fork."""
    try:
        return forked(lambda: run(tests), limit)
    except LateError:
        return {"outcome": "timed out", "by": ""}
    except LostError as error:
        ended = str(error).startswith("the process")
        return {
            "outcome": "failed" if ended else "broken",
            "by": str(error),
        }  # broken: this tool, not the tests


def main() -> None:
    """Answers each line of the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries say while they are imported is no answer
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
