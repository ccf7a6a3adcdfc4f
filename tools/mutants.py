"""Measures how many small faults the tests detect: `make mutants ARGS="--sample 300 --seed 0"`.

Cosmic Ray (github.com/sixty-north/cosmic-ray) makes the faults: it changes an operator, number, comparison or
boolean, or removes a decorator. The sample draws a place in the code first, then one of the faults possible
there; otherwise arithmetic operators, which have many replacements, would dominate the sample. Each fault is
written into a copy of the repository. There the tests that run its line (recorded by `make covered`) run
until one fails. A fault whose tests take longer than `--limit` counts as timed out.

Survivors are printed as diffs. Add a fault without observable effect to `tools/equivalent_mutants.toml`, with
the reason. Later samples then leave it out.
"""

import argparse
import ast
import collections
import concurrent.futures
import dataclasses
import difflib
import fnmatch
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

from bench.harness import ROOT
from tools import covered

EQUIVALENT = ROOT / "tools" / "equivalent_mutants.toml"
MIN_KILLED_PERCENT = 95.0

# Tests for lines that `make covered` does not record: lines that run only at import, and files whose code
# runs in processes that tests start.
TESTS_OF_IMPORTS = ("tests/test_values.py", "tests/test_signatures.py", "tests/algos/test_settings.py")
PROCESS_TESTS = (
    ("fdg/processes/*", "tests/processes/test_rendezvous.py tests/processes/test_distributed.py"),
    ("fdg/launching/*", "tests/processes/test_launching.py tests/processes/test_deploy.py"),
    ("fdg/commands/*", "tests/processes/test_strangers.py"),
)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A module with one small fault.

    Attributes:
      module: path of the changed module within the repository.
      operator: Cosmic Ray's name of the change.
      occurrence: index of the change among all places in the module where the operator applies.
      position: line and column.
    """

    module: str
    operator: str
    occurrence: int
    position: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.module}:{self.position[0]} {self.operator.removeprefix('core/')}"


def mutants_of(module: str) -> Iterator[Mutant]:
    """All mutants of a module, except those in type annotations, which never run."""
    source = (ROOT / module).read_text()
    annotations = [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for parent in ast.walk(ast.parse(source))
        for node in (getattr(parent, "annotation", None), getattr(parent, "returns", None))
        if node is not None
    ]
    nodes = list(ast_nodes(get_ast(source)))
    for name in sorted(cosmic_ray.plugins.operator_names()):
        operator = cosmic_ray.plugins.get_operator(name)
        if operator.arguments() or name == "core/NoOp":
            continue
        positions = [start for node in nodes for start, _ in operator().mutation_positions(node)]
        for occurrence, start in enumerate(positions):
            if not any(begin <= start < end for begin, end in annotations):
                yield Mutant(module, name, occurrence, start)


def mutated_source(mutant: Mutant) -> str | None:
    """The module's text with the fault; None if it is not valid Python, or the same program."""
    source = (ROOT / mutant.module).read_text()
    operator = cosmic_ray.plugins.get_operator(mutant.operator)()
    try:
        changed = mutate_code(source, operator, mutant.occurrence)
    except AttributeError:  # a bug of Cosmic Ray: a tuple of exceptions with a dotted name
        return None
    try:
        same = changed is None or ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source))
    except SyntaxError:
        return None
    return None if same else changed


def diff_lines(mutant: Mutant) -> list[str]:
    """The lines of a mutant's diff, without the header."""
    changed = mutated_source(mutant)
    assert changed is not None
    before = (ROOT / mutant.module).read_text().splitlines()
    return list(difflib.unified_diff(before, changed.splitlines(), lineterm="", n=1))[2:]


def is_equivalent(mutant: Mutant, known: Sequence[dict[str, str]]) -> bool:
    """Whether a mutant has no observable effect, according to the reviewed list `known`.

    Entries match by module and by the code of the changed lines, without comments and line numbers. A `zip`
    that only loses `strict=True` is equivalent too, since both sides are equally long.
    """
    lines = [line.partition("  #")[0] for line in diff_lines(mutant)]
    removed, added = (
        " ".join(line[1:].strip() for line in lines if line.startswith(sign)).strip() for sign in "-+"
    )
    if "strict=True" in removed and removed.replace("strict=True", "strict=False", 1) == added:
        return True
    return (mutant.module, removed, added) in {
        (entry["module"], entry["was"], entry["is"]) for entry in known
    }


def draw_mutants(modules: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Draws mutants that are not known to be equivalent.

    Each place is hashed with its module, its line's text and the seed; the places with the lowest hashes are
    drawn. So two versions of the code have nearly the same sample.
    """
    known = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    ranked = list[tuple[str, list[Mutant]]]()
    for module in modules:
        lines = (ROOT / module).read_text().splitlines()
        places: dict[tuple[int, int], list[Mutant]] = {}
        for mutant in mutants_of(module):
            places.setdefault(mutant.position, []).append(mutant)
        repeats = collections.Counter[tuple[str, int]]()
        for (line, column), mutants in sorted(places.items()):
            text = lines[line - 1]
            place = (text.strip(), column - len(text) + len(text.lstrip()))
            ranked.append((_hash(seed, module, *place, repeats[place]), mutants))
            repeats[place] += 1
    sample: list[Mutant] = []
    for rank, mutants in sorted(ranked, key=lambda pair: pair[0]):
        if len(sample) == count:
            break
        first = mutants[0].occurrence
        mutant = min(mutants, key=lambda m: _hash(rank, m.operator, m.occurrence - first))
        if mutated_source(mutant) is not None and not is_equivalent(mutant, known):
            sample.append(mutant)
    return sample


def _hash(*values: object) -> str:
    return hashlib.sha256("\n".join(map(str, values)).encode()).hexdigest()


def tests_of(
    mutant: Mutant, coverage: covered.CoverageRecord, limit: float, killers: Sequence[str]
) -> list[list[str]]:
    """Batches of tests to run for a fault, in order; `limit` is in seconds.

    First come up to two tests that killed other faults of the module, then the tests that run the line, the
    quickest first, for at most half of the limit. If no tests are recorded, `TESTS_OF_IMPORTS` and the tests
    named like the module run. The tests that start processes come last.
    """
    tests = coverage.first_within(coverage.tests(mutant.module, mutant.position[0]), limit / 2)
    if not tests:
        named = ROOT.glob(f"tests/**/test_{Path(mutant.module).stem}.py")
        tests = [*TESTS_OF_IMPORTS, *(str(path.relative_to(ROOT)) for path in sorted(named))]
    tests = [test for test in killers if test in set(tests)][:2] + tests
    batches = [tests[i : i + 16] for i in range(0, len(tests), 16)]
    return batches + [
        files.split() for pattern, files in PROCESS_TESTS if fnmatch.fnmatch(mutant.module, pattern)
    ]


def copy_repository(target: Path) -> Path:
    """Copies the working tree, without ignored files, to `target`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listing.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a mutant: "killed" by a test, "survived", "timed out" or "unclear"."""

    mutant: str
    diff: str
    outcome: str
    by: str  # the failed test; if unclear, the error
    seconds: float

    @property
    def module(self) -> str:
        return self.mutant.split(":")[0]

    @property
    def fault(self) -> tuple[str, ...]:
        """The module and the changed lines, which identify the fault if lines move."""
        changed = [line for line in self.diff.splitlines() if line.startswith(("-", "+"))]
        return (self.module, *changed)


class Copy:
    """A copy of the repository, with a process that runs tests in it (`tools/warm.py`)."""

    def __init__(self, folder: Path, cache: str):
        self.folder = copy_repository(folder)
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "JAX_COMPILATION_CACHE_DIR": cache}
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        environment.pop("PYTHONPATH", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.warm"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, tests: Sequence[Sequence[str]], limit: float) -> tuple[str, str]:
        """Runs tests; returns the outcome, and the failed test if there is one."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps({"tests": tests, "limit": limit}), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        if answer["outcome"] == "broken":
            raise RuntimeError(f"the process that runs the tests failed: {answer['by']}")
        return answer["outcome"], answer["by"]

    def run_on_fault(
        self, mutant: Mutant, result: Result, tests: Sequence[Sequence[str]], limit: float
    ) -> Result:
        """Runs tests on a fault; returns its pending `result` with the outcome."""
        text = mutated_source(mutant)
        assert text is not None
        start = time.monotonic()
        (self.folder / mutant.module).write_text(text)
        try:
            outcome, by = self.run(tests, limit)
        finally:
            shutil.copy2(ROOT / mutant.module, self.folder / mutant.module)
        outcome = {"passed": "survived", "failed": "killed"}.get(outcome, outcome)
        return dataclasses.replace(result, outcome=outcome, by=by, seconds=round(time.monotonic() - start, 1))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def tests_failing_without_fault(tests: Sequence[str], copy: Copy, limit: float) -> set[str]:
    """The tests that also fail without a fault: their failures kill no mutant."""
    passing, failing = list(tests), set[str]()
    while passing:
        outcome, by = copy.run([passing], limit)
        if outcome == "passed":
            break
        failing.add(by)
        if by not in passing:
            break
        passing.remove(by)
    return failing


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--only", default="*", help="a pattern of modules, such as 'fdg/batch/*'")
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel jobs")
    parser.add_argument("--limit", type=float, default=180.0, help="CPU seconds per mutant (180)")
    parser.add_argument("--results", type=Path, help="a file of JSON lines; mutants killed in it are skipped")
    return parser.parse_args()


def main() -> int:
    """Draws, runs and reports mutants; returns exit status 1 if too few were killed."""
    options = parse_arguments()
    sources = [
        path.relative_to(ROOT) for name in covered.PACKAGES for path in sorted((ROOT / name).rglob("*.py"))
    ]
    modules = [str(module) for module in sources if fnmatch.fnmatch(str(module), options.only)]
    coverage = covered.CoverageRecord.read()
    sample = draw_mutants(modules, options.sample, options.seed)
    done: dict[tuple[str, ...], Result] = {}
    if options.results and options.results.exists():
        before = [Result(**json.loads(line)) for line in options.results.read_text().splitlines()]
        done = {result.fault: result for result in before if result.outcome == "killed"}
    # The tests that killed a mutant, by module, in the order of their last kill.
    killers = collections.defaultdict[str, dict[str, None]](dict)
    for known in done.values():
        killers[known.module][known.by] = None
    pending = {mutant: Result(str(mutant), "\n".join(diff_lines(mutant)), "", "", 0.0) for mutant in sample}
    todo = [mutant for mutant in sample if pending[mutant].fault not in done]
    # Mutants whose tests start processes take minutes each, so they come last.
    todo.sort(key=lambda mutant: any(fnmatch.fnmatch(mutant.module, pattern) for pattern, _ in PROCESS_TESTS))
    print(f"{len(sample)} mutants, {len(sample) - len(todo)} of them known to be killed", flush=True)
    with tempfile.TemporaryDirectory(prefix="fdg-mutants-") as scratch:
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(Path(scratch, "programs"))
        idle_copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        copies = [Copy(Path(scratch, str(i)), cache) for i in range(options.jobs)]
        for copy in copies:
            idle_copies.put(copy)

        def run_mutant(mutant: Mutant) -> Result:
            copy = idle_copies.get()
            try:
                tests = tests_of(mutant, coverage, options.limit, list(killers[mutant.module])[::-1][:8])
                return copy.run_on_fault(mutant, pending[mutant], tests, options.limit)
            except Exception as error:  # an error of this tool, which does not stop the other mutants
                return dataclasses.replace(pending[mutant], outcome="unclear", by=f"{error!r}"[:2000])
            finally:
                idle_copies.put(copy)

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            futures = [pool.submit(run_mutant, mutant) for mutant in todo]
            for i, future in enumerate(concurrent.futures.as_completed(futures), 1):
                result = future.result()
                done[result.fault] = result
                if result.outcome == "killed":
                    killers[result.module].pop(result.by, None)
                    killers[result.module][result.by] = None
                if options.results:
                    with options.results.open("a") as file:
                        print(json.dumps(dataclasses.asdict(result)), file=file)
                line = f"{result.outcome:9s} {result.seconds:5.0f} s  {result.mutant}  {result.by}"
                print(f"{i:3d}/{len(todo)} {line}", flush=True)
        results = [done[pending[mutant].fault] for mutant in sample]
        killing_tests = sorted({result.by for result in results if "::" in result.by})
        failing = tests_failing_without_fault(killing_tests, copies[0], 20 * options.limit)
        for copy in copies:
            copy.close()
    return report(results, failing, options)


def report(results: Sequence[Result], failing: set[str], options: argparse.Namespace) -> int:
    """Prints survivors and counts; returns 1 if too few mutants were killed."""
    for test in sorted(failing):
        print(f"also fails without a fault, so its kills are unclear: {test}")
    counts = collections.Counter({"killed": 0, "survived": 0, "timed out": 0, "unclear": 0})
    for result in sorted(results, key=lambda result: (result.outcome, result.mutant)):
        outcome = "unclear" if result.by in failing else result.outcome
        counts[outcome] += 1
        if outcome != "killed":
            print(f"\n{outcome}: {result.mutant}", result.diff, sep="\n")
    killed = 100 * counts["killed"] / max(1, len(results))
    totals = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
    print(f"\n{len(results)} mutants of seed {options.seed}: {totals}: {killed:.1f} % killed")
    return int(killed < MIN_KILLED_PERCENT)


if __name__ == "__main__":
    raise SystemExit(main())
