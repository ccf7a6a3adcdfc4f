"""Records which tests run each line, and their durations: `make covered`, half an hour on two cores.

Coverage.py (coverage.readthedocs.io) records the lines that each test runs; `tools/mutants.py` runs the tests
of a mutant's line, quickest first. Line numbers are those of the recorded code, so record again after changes
of the code.
"""

import ast
import bisect
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import coverage
import pytest

from bench.harness import ROOT

FOLDER = ROOT / "build" / "covered"
LINES, SECONDS = "lines.sqlite", "seconds.json"  # files in `FOLDER`
PACKAGES = ("algos", "fdg", "policies")

_SETTINGS = """
[run]
source = {packages}
relative_files = true
data_file = {data}
"""


class DurationPlugin:
    """A plugin of pytest that measures the seconds of each test, with its fixtures."""

    def __init__(self) -> None:
        self.by_test: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.by_test[report.nodeid] = self.by_test.get(report.nodeid, 0.0) + report.duration


def record(arguments: list[str]) -> int:
    """Runs tests, and writes `LINES` and `SECONDS`; returns pytest's exit status."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    seconds = DurationPlugin()
    with tempfile.TemporaryDirectory() as scratch:
        settings = Path(scratch, "coveragerc")
        settings.write_text(_SETTINGS.format(packages=",".join(PACKAGES), data=FOLDER / LINES))
        options = ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
        status = pytest.main([*options, *arguments], plugins=[seconds])
    (FOLDER / SECONDS).write_text(json.dumps(seconds.by_test, indent=0, sort_keys=True))
    return int(status)


def statement_lines(source: str, line: int) -> range:
    """The lines of the innermost statement at a line, without nested statements.

    >>> text = "def f(x):\\n    if (x and\\n        1):\\n        return g(\\n            x)\\n"
    >>> statement_lines(text, 3), statement_lines(text, 5)
    (range(2, 4), range(4, 6))
    """
    lines = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        inner_starts = [child.lineno for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        last = min(
            [start - 1 for start in inner_starts if start > node.lineno],
            default=node.end_lineno or node.lineno,
        )
        if line <= last or last < node.lineno:
            lines = range(node.lineno, max(last, node.lineno) + 1)
    return lines


def reading_lines(source: str, line: int) -> set[int]:
    """The lines that use what a line defines: a name, or the default value of a parameter.

    >>> text = "SIZE = 3\\n\\ndef f(x=1):\\n    return SIZE * x\\n"
    >>> reading_lines(text, 1), reading_lines(text, 3)
    ({4}, {4})
    """
    reading, defined = set[int](), set[str]()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        lines = range(getattr(node, "lineno", 0), (getattr(node, "end_lineno", 0) or 0) + 1)
        if isinstance(node, ast.FunctionDef):
            first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first_line <= line < node.body[0].lineno:
                reading |= {*range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and line in lines:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", None)
        if name in defined and (isinstance(node, ast.Name | ast.Attribute)):
            reading |= {*statement_lines(source, node.lineno)}
    return reading - {*statement_lines(source, line)}


@dataclasses.dataclass(frozen=True)
class CoverageRecord:
    """The result of `record`.

    Attributes:
      data: Coverage.py's data; its contexts are names of tests with their phases.
      seconds: seconds of each test.
    """

    data: coverage.CoverageData
    seconds: dict[str, float]

    @classmethod
    def read(cls) -> "CoverageRecord":
        if not (FOLDER / LINES).is_file():
            raise SystemExit(
                f"error: {FOLDER} has no record of which tests run which line: run `make covered` first"
            )
        data = coverage.CoverageData(basename=str(FOLDER / LINES))
        data.read()
        return cls(data, json.loads((FOLDER / SECONDS).read_text()))

    def tests(self, module: str, line: int) -> list[str]:
        """The tests that run the statement at a line, quickest first.

        If the statement runs only at import, the result is the tests of its `reading_lines`.
        """
        by_line = self.data.contexts_by_lineno(module)
        source = (ROOT / module).read_text()
        for lines in (statement_lines(source, line), reading_lines(source, line)):
            names = {context.rpartition("|")[0] for at in lines for context in by_line.get(at, ())}
            if names - {""}:
                return sorted(names - {""}, key=lambda name: (self.seconds.get(name, 0.0), name))
        return []

    def first_within(self, tests: list[str], seconds: float) -> list[str]:
        """The first tests, as many as take at most `seconds` together."""
        ends, total = [], 0.0
        for test in tests:
            total += self.seconds.get(test, 0.0)
            ends.append(total)
        return tests[: bisect.bisect_right(ends, seconds)]


if __name__ == "__main__":
    raise SystemExit(record(sys.argv[1:] or ["-q", "--numprocesses", "2", "--dist", "loadscope"]))
