"""How many small faults the tests notice: `make mutants ARGS="--sample 300 --seed 0"`.

Cosmic Ray (github.com/sixty-north/cosmic-ray) makes the faults: another operator, number, comparison or
boolean, a decorator less. A place in the code is drawn first, then one of the faults that can be made there,
or the many replacements of each arithmetic operator would crowd out all else. Each fault is put into a copy
of the repository, where the tests that run its line (noted by `make covered`) do so until the first one
fails. One that takes longer than `--limit` is counted apart: try it again by itself.

What survived is shown as a diff. A fault that changes nothing that anybody could observe belongs into
`tools/equivalent_mutants.toml`, with the reason; it is not drawn again.
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

from tools import covered

ROOT = Path(__file__).parents[1]
EQUIVALENT = ROOT / "tools" / "equivalent_mutants.toml"
LEAST = 95.0  # percent that are to be killed

# Of these nothing is noted: what an import alone runs, and what runs in processes that tests start.
IMPORTED = ("tests/test_values.py", "tests/test_signatures.py", "tests/algos/test_settings.py")
IN_PROCESSES = (
    ("fdg/processes/*", "tests/processes/test_rendezvous.py tests/processes/test_distributed.py"),
    ("fdg/launching/*", "tests/processes/test_launching.py tests/processes/test_deploy.py"),
    ("fdg/commands/*", "tests/processes/test_strangers.py"),
)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault that can be made.

    Attributes:
      module: path within the repository.
      operator: Cosmic Ray's name.
      occurrence: which of the places in the module that the operator applies to.
      position: line and column.
    """

    module: str
    operator: str
    occurrence: int
    position: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.module}:{self.position[0]} {self.operator.removeprefix('core/')}"


def mutants_of(module: str) -> Iterator[Mutant]:
    """All that Cosmic Ray can make of a module, types aside: nothing runs them."""
    source = (ROOT / module).read_text()
    types = [
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
            if not any(begin <= start < end for begin, end in types):
                yield Mutant(module, name, occurrence, start)


def applied(mutant: Mutant) -> str | None:
    """The module's text with the fault; None where that is no Python, or the same program."""
    source = (ROOT / mutant.module).read_text()
    operator = cosmic_ray.plugins.get_operator(mutant.operator)()
    try:
        changed = mutate_code(source, operator, mutant.occurrence)
    except AttributeError:  # Cosmic Ray's: an exception that is named with a dot, in a tuple of several
        return None
    try:
        same = changed is None or ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source))
    except SyntaxError:
        return None
    return None if same else changed


def diff(mutant: Mutant) -> list[str]:
    """Its lines, without the header's."""
    changed = applied(mutant)
    assert changed is not None
    before = (ROOT / mutant.module).read_text().splitlines()
    return list(difflib.unified_diff(before, changed.splitlines(), lineterm="", n=1))[2:]


def is_equivalent(mutant: Mutant, known: Sequence[dict[str, str]]) -> bool:
    """Whether it stands in the reviewed list, by module and by its lines, wherever these are by now.

    Or whether it is a `zip` that does not insist any more that both sides are equally long: they are.
    """
    lines = diff(mutant)
    removed, added = (
        " ".join(line[1:].strip() for line in lines if line.startswith(sign)).strip() for sign in "-+"
    )
    if "strict=True" in removed and removed.replace("strict=True", "strict=False", 1) == added:
        return True
    return (mutant.module, removed, added) in {(one["module"], one["was"], one["is"]) for one in known}


def drawn(modules: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """A sample without those known to change nothing; of two versions of the code, nearly the same.

    Each place has a number that its module, its line's words and the seed make; the lowest are drawn.
    """
    known = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    ranked = list[tuple[str, list[Mutant]]]()
    for module in modules:
        lines = (ROOT / module).read_text().splitlines()
        places: dict[tuple[int, int], list[Mutant]] = {}
        for mutant in mutants_of(module):
            places.setdefault(mutant.position, []).append(mutant)
        seen = collections.Counter[tuple[str, int]]()
        for (line, column), mutants in sorted(places.items()):
            words = lines[line - 1]
            place = (words.strip(), column - len(words) + len(words.lstrip()))
            ranked.append((_number(seed, module, *place, seen[place]), mutants))
            seen[place] += 1
    sample: list[Mutant] = []
    for rank, mutants in sorted(ranked, key=lambda pair: pair[0]):
        if len(sample) == count:
            break
        mutant = min(
            mutants, key=lambda one: _number(rank, one.operator, one.occurrence - mutants[0].occurrence)
        )
        if applied(mutant) is not None and not is_equivalent(mutant, known):
            sample.append(mutant)
    return sample


def _number(*words: object) -> str:
    """Digits that look random, the same for the same words."""
    return hashlib.sha256("\n".join(map(str, words)).encode()).hexdigest()


def tests_of(
    mutant: Mutant, noted: covered.Covered, limit: float, killers: Sequence[str] = ()
) -> list[list[str]]:
    """What to run for a fault, one list after the other, for half the limit at most.

    Those that killed others in its module, then all that run its line, the quickest first; where only
    importing runs it, the tests called as the module; last the tests that start processes.
    """
    tests = noted.within(noted.tests(mutant.module, mutant.position[0]), limit / 2)
    if not tests:
        named = ROOT.glob(f"tests/**/test_{Path(mutant.module).stem}.py")
        tests = [*IMPORTED, *(str(path.relative_to(ROOT)) for path in sorted(named))]
    tests = [test for test in killers if test in set(tests)][:2] + tests
    batches = [tests[i : i + 16] for i in range(0, len(tests), 16)]
    return batches + [files.split() for part, files in IN_PROCESSES if fnmatch.fnmatch(mutant.module, part)]


def copied(target: Path) -> Path:
    """A copy of the repository as it is, without what git ignores."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


@dataclasses.dataclass(frozen=True)
class Found:
    """What became of a mutant: "killed" by a test, "survived", "timed out", "unclear"; `seconds` taken."""

    mutant: str
    diff: str
    outcome: str
    by: str
    seconds: float

    @property
    def module(self) -> str:
        """Its path."""
        return self.mutant.split(":")[0]

    @property
    def fault(self) -> tuple[str, ...]:
        """What it is wherever its lines stand by now: the module, and what the diff removes and adds."""
        changed = [line for line in self.diff.splitlines() if line.startswith(("-", "+"))]
        return (self.module, *changed)


class Copy:
    """A copy of the repository, and a process that runs tests in it: see `tools/warm.py`."""

    def __init__(self, folder: Path, programs: str):
        self.folder = copied(folder)
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "JAX_COMPILATION_CACHE_DIR": programs}
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
        """The outcome, and the test that failed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps({"tests": tests, "limit": limit}), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        if answer["outcome"] == "broken":
            raise RuntimeError(answer["by"])
        return answer["outcome"], answer["by"]

    def tried(self, result: Found, mutant: Mutant, tests: Sequence[Sequence[str]], limit: float) -> Found:
        """What the tests say to a fault."""
        text = applied(mutant)
        assert text is not None
        begun = time.monotonic()
        (self.folder / mutant.module).write_text(text)
        try:
            outcome, by = self.run(tests, limit)
        finally:
            shutil.copy2(ROOT / mutant.module, self.folder / mutant.module)
        outcome = {"passed": "survived", "failed": "killed"}.get(outcome, outcome)
        return dataclasses.replace(result, outcome=outcome, by=by, seconds=round(time.monotonic() - begun, 1))

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def failing_anyway(tests: Sequence[str], copy: Copy, limit: float) -> set[str]:
    """Those of the tests that fail without a fault as well: what they killed says nothing."""
    good, bad = list(tests), set[str]()
    while good:
        outcome, by = copy.run([good], limit)
        if outcome == "passed":
            break
        bad.add(by)
        if by not in good:
            break
        good.remove(by)
    return bad


def arguments() -> argparse.Namespace:
    """The command line."""
    line = argparse.ArgumentParser(prog="make mutants", description=__doc__.splitlines()[0])
    line.add_argument("--sample", type=int, default=300, help="how many")
    line.add_argument("--seed", type=int, default=0, help="of the sample")
    line.add_argument("--only", default="*", help="modules, as in 'fdg/batch/*'")
    line.add_argument("--jobs", type=int, default=2, help="at a time")
    line.add_argument("--limit", type=float, default=180.0, help="seconds of CPU time for one (180)")
    line.add_argument("--results", type=Path, help="lines of JSON; what was killed there is not tried again")
    return line.parse_args()


def main() -> int:
    """Draws, runs, and reports; the exit status says whether enough were noticed."""
    options = arguments()
    sources = [
        path.relative_to(ROOT) for name in covered.PACKAGES for path in sorted((ROOT / name).rglob("*.py"))
    ]
    modules = [str(module) for module in sources if fnmatch.fnmatch(str(module), options.only)]
    noted = covered.Covered.read()
    sample = drawn(modules, options.sample, options.seed)
    done: dict[tuple[str, ...], Found] = {}
    if options.results and options.results.exists():
        before = [Found(**json.loads(line)) for line in options.results.read_text().splitlines()]
        done = {one.fault: one for one in before if one.outcome == "killed"}
    killers = collections.defaultdict[str, dict[str, None]](dict)  # by module, the latest last
    for known in done.values():
        killers[known.module][known.by] = None
    faults = {mutant: Found(str(mutant), "\n".join(diff(mutant)), "", "", 0.0) for mutant in sample}
    todo = [mutant for mutant in sample if faults[mutant].fault not in done]
    # Those whose tests start processes take minutes each: they come last.
    todo.sort(key=lambda mutant: any(fnmatch.fnmatch(mutant.module, part) for part, _ in IN_PROCESSES))
    print(f"{len(sample)} mutants, {len(sample) - len(todo)} of them known to be killed", flush=True)
    with tempfile.TemporaryDirectory(prefix="fdg-mutants-") as scratch:
        programs = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(Path(scratch, "programs"))
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        copies = [Copy(Path(scratch, str(i)), programs) for i in range(options.jobs)]
        for copy in copies:
            free.put(copy)

        def one_of(mutant: Mutant) -> Found:
            copy = free.get()
            try:
                first = list(killers[mutant.module])[::-1][:8]
                return copy.tried(
                    faults[mutant], mutant, tests_of(mutant, noted, options.limit, first), options.limit
                )
            except Exception as error:  # this tool's, not the tests'; the others continue
                return dataclasses.replace(faults[mutant], outcome="unclear", by=f"{error!r}"[:2000])
            finally:
                free.put(copy)

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            started = [pool.submit(one_of, mutant) for mutant in todo]
            for i, future in enumerate(concurrent.futures.as_completed(started), 1):
                one = future.result()
                done[one.fault] = one
                if one.outcome == "killed":
                    killers[one.module][one.by] = None
                if options.results:
                    with options.results.open("a") as file:
                        print(json.dumps(dataclasses.asdict(one)), file=file)
                said = f"{one.outcome:9s} {one.seconds:5.0f} s  {one.mutant}  {one.by}"
                print(f"{i:3d}/{len(todo)} {said}", flush=True)
        drawn_now = [done[faults[mutant].fault] for mutant in sample]
        bad = failing_anyway(
            sorted({one.by for one in drawn_now if "::" in one.by}), copies[0], 20 * options.limit
        )
        for copy in copies:
            copy.close()
    return report(drawn_now, bad, options)


def report(results: Sequence[Found], bad: set[str], options: argparse.Namespace) -> int:
    """Prints what was not noticed, and counts; 1 if too little was noticed."""
    for test in sorted(bad):
        print(f"fails without a fault as well, and kills none: {test}")
    counts = collections.Counter({"killed": 0, "survived": 0, "timed out": 0, "unclear": 0})
    for one in sorted(results, key=lambda one: (one.outcome, one.mutant)):
        outcome = "unclear" if one.by in bad else one.outcome
        counts[outcome] += 1
        if outcome != "killed":
            print(f"\n{outcome}: {one.mutant}", one.diff, sep="\n")
    noticed = 100 * counts["killed"] / max(1, len(results))
    totals = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
    print(f"\n{len(results)} mutants of seed {options.seed}: {totals}: {noticed:.1f} % killed")
    return int(noticed < LEAST)


if __name__ == "__main__":
    raise SystemExit(main())
