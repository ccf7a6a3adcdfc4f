"""How many small faults the tests notice: `make mutants ARGS="--sample 300 --seed 0"`.

Cosmic Ray (github.com/sixty-north/cosmic-ray) makes the faults: another operator, number, comparison or
boolean, a decorator less. A place in the code is drawn first, then one of the faults that can be made there,
or the many replacements of each arithmetic operator would crowd out all else. Each fault is put into a copy
of the repository, where the tests that run its line (noted by `make covered`, without which all that matter
for its module) do so until the first one fails. One that takes longer than `--limit` is counted apart: try it
again by itself.

What survived is shown as a diff. A fault that changes nothing that anybody could observe belongs into
`bench/equivalent_mutants.toml`, with the reason; it is not drawn again.
"""

import argparse
import ast
import collections
import concurrent.futures
import dataclasses
import difflib
import fnmatch
import hashlib
import itertools
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

from bench import covered

ROOT = Path(__file__).parents[1]
EQUIVALENT = ROOT / "bench" / "equivalent_mutants.toml"
PACKAGES = ("algos", "fdg", "policies")

# Tests that matter for a module, most telling first, besides its doctests, `test_<module>.py` wherever it
# is, and all of its room's. All lines that match count; `*` stays within a folder.
QUICK = (  # seconds: before all others
    ("algos/**.py", "tests/algos/test_settings.py"),
    ("**.py", "tests/test_values.py tests/test_signatures.py"),
    ("fdg/showing/**.py", "tests/showing/test_words.py tests/showing/test_golden_drawings.py"),
)
TESTS = (
    ("algos/ppo.py", "tests/algos/test_recurrent_ppo.py tests/algos/test_ippo.py"),
    ("algos/*actor*.py", "tests/algos/test_ppo.py tests/algos/test_a2c.py tests/algos/test_impala.py"),
    (
        "algos/agent.py",
        "tests/algos/test_modules.py tests/algos/test_ppo.py tests/algos/test_dqn.py tests/algos/test_sac.py",
    ),
    ("algos/*memory*.py", "tests/algos/test_recurrent.py tests/algos/test_recurrent_ppo.py"),
    ("algos/*multi*.py", "tests/algos/test_ippo.py tests/algos/test_mappo.py"),
    ("algos/rlhf/*.py", "tests/rlhf/*.py"),
    ("algos/language/*.py", "tests/language/*.py tests/rlhf/test_algorithms.py tests/rlhf/test_runs.py"),
    ("algos/presets/*.py", "tests/algos/test_presets.py tests/envs/test_families.py"),
    ("algos/replay*.py", "tests/algos/test_replay.py tests/algos/test_dqn.py tests/algos/test_sac.py"),
    ("algos/*distribution*.py", "tests/algos/test_c51.py tests/algos/test_qr_dqn.py"),
    ("fdg/costs/*.py", "tests/costs/*.py"),
    ("fdg/launching/*.py", "tests/processes/test_launching.py tests/processes/test_deploy.py"),
    ("fdg/profiling/*.py", "tests/profiling/*.py"),
    ("algos/q_learning.py", "tests/algos/test_dqn.py tests/algos/test_pqn.py"),
    (
        "algos/proximal.py",
        "tests/algos/test_ppo.py tests/algos/test_recurrent_ppo.py tests/algos/test_mappo.py",
    ),
    ("algos/*.py", "tests/algos/test_ppo.py tests/commands/test_cli.py tests/conformance/test_algorithms.py"),
    (
        "policies/*.py",
        "tests/placing/test_placement.py tests/policies/*.py tests/conformance/test_policies.py",
    ),
    ("policies/parameters.py", "tests/conformance/test_sharded_parameters.py"),
    ("fdg/fragment.py", "tests/tracing/test_graph.py tests/batch/test_following.py tests/test_engine.py"),
    (
        "fdg/jaxprs/**.py",
        "tests/jaxprs/*.py tests/tracing/test_graph.py tests/batch/test_following.py"
        " tests/placing/test_partition.py",
    ),
    ("fdg/keys.py", "tests/training/test_checkpoint.py tests/running/test_transfers.py"),
    ("fdg/drawn.py", "tests/showing/test_drawing.py"),
    ("fdg/errors.py", "tests/commands/test_cli.py"),
    ("fdg/batch/**.py", "tests/batch/*.py tests/oracle/test_oracle.py tests/conformance/test_bytes.py"),
    ("fdg/tracing/**.py", "tests/tracing/*.py tests/test_fragment.py tests/placing/test_placement.py"),
    ("fdg/placing/sharded.py", "tests/conformance/test_sharded_parameters.py"),
    (
        "fdg/placing/staleness/**.py",
        "tests/placing/test_staleness.py tests/placing/test_delayed.py tests/oracle/test_oracle.py",
    ),
    ("fdg/placing/regions/**.py", "tests/placing/test_regions.py tests/placing/test_effects.py"),
    ("fdg/placing/scheduling/**.py", "tests/placing/test_passes.py tests/placing/test_partition.py"),
    (
        "fdg/placing/**.py",
        "tests/placing/test_placement.py tests/placing/*.py tests/oracle/test_oracle.py"
        " tests/conformance/test_staleness.py tests/conformance/test_policies.py",
    ),
    (
        "fdg/lowering/**.py",
        "tests/lowering/*.py tests/test_engine.py tests/batch/*.py tests/conformance/test_policies.py"
        " tests/conformance/test_sharded_parameters.py",
    ),
    ("fdg/running/**.py", "tests/running/*.py tests/test_engine.py tests/conformance/test_bytes.py"),
    ("fdg/showing/**.py", "tests/showing/*.py tests/test_documents.py"),
    ("fdg/training/**.py", "tests/training/*.py tests/commands/test_cli.py"),
    (
        "fdg/commands/**.py",
        "tests/commands/*.py tests/training/test_train.py tests/processes/test_strangers.py",
    ),
    ("fdg/processes/**.py", "tests/processes/test_door.py tests/processes/*.py"),
    ("fdg/engine.py", "tests/test_engine.py tests/lowering/test_host_calls.py tests/envs/test_host.py"),
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
    known = [one for one in known if one["module"] == mutant.module]
    is_check = mutant.operator == "core/ReplaceTrueWithFalse"
    lines = diff(mutant) if known or is_check else []
    removed = " ".join(line[1:].strip() for line in lines if line.startswith("-")).strip()
    added = " ".join(line[1:].strip() for line in lines if line.startswith("+")).strip()
    if is_check and "strict=True" in removed and removed.replace("strict=True", "strict=False", 1) == added:
        return True
    return any((one["was"], one["is"]) == (removed, added) for one in known)


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


def fits(module: str, pattern: str) -> bool:
    """Whether a path is meant: `*` stays within a folder, `**` does not.

    >>> fits("fdg/batch/rules/sums.py", "fdg/batch/**.py"), fits("algos/rlhf/ppo.py", "algos/*.py")
    (True, False)
    """
    deep = "**" in pattern or module.count("/") == pattern.count("/")
    return deep and fnmatch.fnmatch(module, pattern)


def tests_for(module: str) -> list[str]:
    """What to run for a module, in order: paths of files."""

    def listed(table: Sequence[tuple[str, str]]) -> Iterator[str]:
        return itertools.chain(*(words.split() for pattern, words in table if fits(module, pattern)))

    patterns = [*listed(QUICK), f"tests/**/test_{Path(module).stem}.py", *listed(TESTS)]
    found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [module, *dict.fromkeys(str(p.relative_to(ROOT)) for p in found if p.name.startswith("test_"))]


def tests_of(
    mutant: Mutant, noted: covered.Covered | None, limit: float, killers: Sequence[str] = ()
) -> list[list[str]]:
    """What to run for a fault, one list after the other; first those that killed others in its module.

    If it is noted who runs its line: the quickest of them, the module's own first, for half the limit at
    most, those of the module that have come since, and then the tests that start processes: nothing is noted
    of them.
    """
    module, *files = tests_for(mutant.module)
    by_line = noted.tests(module, mutant.position[0]) if noted else []
    if not noted or not by_line:
        first = [test for test in killers if test.split("::")[0] in files]
        # The module's doctests together with a file of tests: without its settings they would start JAX.
        return [first] * bool(first) + [[module, *files[:1]], *([file] for file in files[1:])]
    own = [test for test in by_line if test.split("::")[0] in (module, *files)]
    others = [test for test in by_line if test not in set(own)]
    new = [test for test in noted.new if test.split("::")[0] in (module, *files)]
    tests = noted.within(own, limit / 3) + new + noted.within(others, limit / 6)
    tests = [test for test in killers if test in set(tests)][:2] + tests
    batches = [tests[i : i + 16] for i in range(0, len(tests), 16)]
    return batches + [[file] for file in files if file.startswith("tests/processes/")]


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
    def fault(self) -> tuple[str, ...]:
        """What it is wherever its lines stand by now: the module, and what the diff removes and adds."""
        changed = [line for line in self.diff.splitlines() if line.startswith(("-", "+"))]
        return (self.mutant.split(":")[0], *changed)


class Copy:
    """A copy of the repository, and a process that runs tests in it: see `bench/warm.py`."""

    def __init__(self, folder: Path, programs: str):
        self.folder = copied(folder)
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "JAX_COMPILATION_CACHE_DIR": programs}
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        environment.pop("PYTHONPATH", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.warm"],
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

    def tried(self, mutant: Mutant, tests: Sequence[Sequence[str]], limit: float) -> Found:
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
        return Found(str(mutant), "\n".join(diff(mutant)), outcome, by, round(time.monotonic() - begun, 1))

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


def main() -> int:
    """Draws, runs, and reports; the exit status says whether enough were noticed."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", default="*", help="modules, as in 'fdg/batch/*'")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds of CPU time for one (180)")
    parser.add_argument("--least", type=float, default=95.0, help="percent to be killed")
    parser.add_argument(
        "--results", type=Path, help="lines of JSON; what was killed there is not tried again"
    )
    parser.add_argument(
        "--covered", type=Path, default=covered.FOLDER, help="what `make covered` noted, if it is there"
    )
    parser.add_argument("--list", action="store_true", help="show the sample and its tests, and run nothing")
    options = parser.parse_args()
    modules = [
        str(path.relative_to(ROOT)) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
    ]
    modules = [module for module in modules if fnmatch.fnmatch(module, options.only)]
    sample = drawn(modules, options.sample, options.seed)
    if options.results:
        options.results.touch()
    noted = covered.Covered.read(options.covered) if (options.covered / covered.LINES).is_file() else None
    if options.list:
        for mutant in sample:
            tests = tests_of(mutant, noted, options.limit)
            print(mutant, *itertools.chain.from_iterable(tests))
        return 0
    results = options.results
    before = [Found(**json.loads(line)) for line in results.read_text().splitlines()] if results else []
    done = {one.fault: one for one in before if one.outcome == "killed"}
    killers: dict[str, dict[str, None]] = {}  # by module, the latest last
    for one in done.values():
        killers.setdefault(one.mutant.split(":")[0], {})[one.by] = None
    faults = {mutant: Found(str(mutant), "\n".join(diff(mutant)), "", "", 0.0).fault for mutant in sample}
    todo = [mutant for mutant in sample if faults[mutant] not in done]
    # Those whose tests start processes take minutes each: they come last.
    todo.sort(key=lambda mutant: any("/processes/" in test for test in tests_for(mutant.module)))
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
                first = list(killers.get(mutant.module, ()))[::-1][:8]
                return copy.tried(mutant, tests_of(mutant, noted, options.limit, first), options.limit)
            except Exception as error:  # this tool's, not the tests'; the others go on
                return Found(str(mutant), "\n".join(diff(mutant)), "unclear", f"{error!r}"[:2000], 0.0)
            finally:
                free.put(copy)

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            started = [pool.submit(one_of, mutant) for mutant in todo]
            for i, future in enumerate(concurrent.futures.as_completed(started), 1):
                found = future.result()
                done[found.fault] = found
                if found.outcome == "killed":
                    killers.setdefault(found.mutant.split(":")[0], {})[found.by] = None
                if results:
                    with results.open("a") as file:
                        print(json.dumps(dataclasses.asdict(found)), file=file)
                said = f"{found.outcome:9s} {found.seconds:5.0f} s  {found.mutant}  {found.by}"
                print(f"{i:3d}/{len(todo)} {said}", flush=True)
        drawn_now = [done[faults[mutant]] for mutant in sample]
        tests = sorted({one.by for one in drawn_now if "::" in one.by})
        bad = failing_anyway(tests, copies[0], 20 * options.limit)
        for copy in copies:
            copy.close()
    for test in sorted(bad):
        print(f"fails without a fault as well, and kills none: {test}")
    counts = collections.Counter({"killed": 0, "survived": 0, "timed out": 0, "unclear": 0})
    for one in sorted(drawn_now, key=lambda one: (one.outcome, one.mutant)):
        outcome = "unclear" if one.by in bad else one.outcome
        counts[outcome] += 1
        if outcome != "killed":
            print(f"\n{outcome}: {one.mutant}", one.diff, sep="\n")
    noticed = 100 * counts["killed"] / max(1, len(sample))
    said = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
    print(f"\n{len(sample)} mutants of seed {options.seed}: {said}: {noticed:.1f} % killed")
    return 0 if noticed >= options.least else 1


if __name__ == "__main__":
    raise SystemExit(main())
