"""Which tests run which line, and how long each takes: `make covered`, half an hour on two cores.

Coverage.py (coverage.readthedocs.io) notes the lines of every test by its name; `bench/mutants.py` reads them
and gives a fault to the tests that run it, quickest first. What is noted is of the code as it was: lines that
have moved since are looked up where they stood, so note again before a sample is reported.
"""

import argparse
import ast
import bisect
import dataclasses
import json
import tempfile
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "covered"
LINES, SECONDS = "lines.sqlite", "seconds.json"
PACKAGES = ("algos", "fdg", "policies")

_SETTINGS = """
[run]
source = {packages}
relative_files = true
data_file = {data}
"""


class Seconds:
    """A plugin of pytest that adds up what each test took, its fixtures included."""

    def __init__(self) -> None:
        self.by_test: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of one phase of one test, from whichever process ran it."""
        self.by_test[report.nodeid] = self.by_test.get(report.nodeid, 0.0) + report.duration


def note(folder: Path, arguments: list[str]) -> int:
    """Runs the suite and writes both files into the folder; pytest's exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    seconds = Seconds()
    with tempfile.TemporaryDirectory() as scratch:
        settings = Path(scratch, "coveragerc")
        settings.write_text(_SETTINGS.format(packages=",".join(PACKAGES), data=folder / LINES))
        words = ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
        status = pytest.main([*words, *arguments], plugins=[seconds])
    (folder / SECONDS).write_text(json.dumps(seconds.by_test, indent=0, sort_keys=True))
    return int(status)


def header(source: str, line: int) -> range:
    """The lines of the innermost statement that a line belongs to, without the statements within it.

    >>> text = "def f(x):\\n    if (x and\\n        1):\\n        return g(\\n            x)\\n"
    >>> header(text, 3), header(text, 5)
    (range(2, 4), range(4, 6))
    """
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        inner = [child.lineno for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        last = min([one - 1 for one in inner if one > node.lineno], default=node.end_lineno or node.lineno)
        if line <= last or last < node.lineno:
            found = range(node.lineno, max(last, node.lineno) + 1)
    return found


@dataclasses.dataclass(frozen=True)
class Covered:
    """What `note` wrote.

    Attributes:
      data: Coverage.py's, with the name of a test and its phase as context.
      seconds: of each test.
    """

    data: coverage.CoverageData
    seconds: dict[str, float]

    @classmethod
    def read(cls, folder: Path) -> "Covered":
        """From the folder that `note` filled; FileNotFoundError where it did not."""
        data = coverage.CoverageData(basename=str(folder / LINES))
        data.read()
        return cls(data, json.loads((folder / SECONDS).read_text()))

    def tests(self, module: str, line: int) -> list[str]:
        """Those that run the statement at a line, quickest first; none for what only importing runs."""
        by_line = self.data.contexts_by_lineno(module)
        lines = header((ROOT / module).read_text(), line)
        names = {context.rpartition("|")[0] for one in lines for context in by_line.get(one, ())}
        return sorted(names - {""}, key=lambda name: (self.seconds.get(name, 0.0), name))

    def within(self, tests: list[str], seconds: float) -> list[str]:
        """The first of the tests, as many as take so long together."""
        ends, total = [], 0.0
        for test in tests:
            total += self.seconds.get(test, 0.0)
            ends.append(total)
        return tests[: bisect.bisect_right(ends, seconds)]


def main() -> int:
    """Notes, with pytest's arguments where others than two processes and the whole suite are meant."""
    parser = argparse.ArgumentParser(prog="make covered", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write")
    options, rest = parser.parse_known_args()
    return note(options.folder, rest or ["-q", "--numprocesses", "2", "--dist", "loadscope"])


if __name__ == "__main__":
    raise SystemExit(main())
