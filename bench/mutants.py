"""How many small faults the tests notice: `make mutants ARGS="--sample 300 --seed 0"`.

Cosmic Ray (github.com/sixty-north/cosmic-ray) makes the faults: another operator, number, comparison or
boolean, a decorator less. A place in the code is drawn first, then one of the faults that can be made there,
or the many replacements of each arithmetic operator would crowd out all else. Each fault is put into a copy
of the repository, where the tests that matter for its module run until the first one fails. One that takes
longer than `--limit` is counted apart: try it again by itself.

What survived is shown as a diff. A fault that changes nothing that anybody could observe belongs into
`bench/equivalent_mutants.toml`, with the reason; it is not drawn again.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import dataclasses
import difflib
import fnmatch
import itertools
import os
import queue
import random
import shutil
import signal
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

ROOT = Path(__file__).parents[1]
EQUIVALENT = ROOT / "bench" / "equivalent_mutants.toml"
PACKAGES = ("algos", "fdg", "policies")

# Tests that matter for a module, most telling first, besides its doctests, `test_<module>.py` wherever it
# is, and `tests/<room>/`. All lines that match count.
TESTS = (
    ("algos/ppo.py", "tests/algos/test_recurrent_ppo.py tests/algos/test_ippo.py"),
    ("algos/*actor*.py", "tests/algos/test_ppo.py tests/algos/test_a2c.py tests/algos/test_impala.py"),
    ("algos/agent.py", "tests/algos/test_ppo.py tests/algos/test_dqn.py tests/algos/test_sac.py"),
    ("algos/*memory*.py", "tests/algos/test_recurrent.py tests/algos/test_recurrent_ppo.py"),
    ("algos/*multi*.py", "tests/algos/test_ippo.py tests/algos/test_mappo.py"),
    ("algos/q_learning.py", "tests/algos/test_dqn.py tests/algos/test_pqn.py"),
    ("algos/*.py", "tests/algos/test_ppo.py tests/conformance/test_algorithms.py"),
    ("policies/*.py", "tests/**/test_placement.py tests/**/test_place.py tests/conformance/test_policies.py"),
    ("fdg/fragment.py", "tests/**/test_graph.py tests/**/test_engine.py"),
    ("fdg/jaxprs.py", "tests/**/test_graph.py tests/**/test_batch_flow.py tests/**/test_partition.py"),
    ("fdg/keys.py", "tests/**/test_checkpoint.py tests/**/test_transfers.py"),
    ("fdg/drawn.py", "tests/**/test_drawing.py"),
    ("fdg/errors.py", "tests/**/test_cli.py"),
    ("fdg/batch/*.py", "tests/**/test_batch_flow.py tests/conformance/test_bytes.py"),
    ("fdg/tracing/*.py", "tests/**/test_graph.py tests/**/test_fragment.py"),
    (
        "fdg/placing/*.py",
        "tests/**/test_placement.py tests/**/test_regions.py tests/**/test_partition.py"
        " tests/conformance/test_staleness.py tests/conformance/test_policies.py",
    ),
    ("fdg/lowering/*.py", "tests/**/test_engine.py tests/conformance/test_policies.py"),
    (
        "fdg/running/*.py",
        "tests/**/test_execution.py tests/**/test_transfers.py tests/**/test_timeline.py"
        " tests/**/test_engine.py tests/conformance/test_bytes.py",
    ),
    ("fdg/showing/*.py", "tests/**/test_drawing.py tests/test_documents.py"),
    ("fdg/training/*.py", "tests/**/test_train.py tests/**/test_checkpoint.py"),
    ("fdg/commands/*.py", "tests/**/test_cli.py tests/processes/test_strangers.py"),
    ("fdg/processes/*.py", "tests/processes/test_strangers.py tests/processes/test_distributed.py"),
    ("fdg/engine.py", "tests/**/test_engine.py tests/lowering/test_host_calls.py tests/envs/test_host.py"),
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
    changed = mutate_code(source, operator, mutant.occurrence)
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
    """Whether it stands in the reviewed list: by module and by its lines, wherever these are by now."""
    lines = diff(mutant)
    removed = " ".join(line[1:].strip() for line in lines if line.startswith("-"))
    added = " ".join(line[1:].strip() for line in lines if line.startswith("+"))
    return any((one["module"], one["was"], one["is"]) == (mutant.module, removed, added) for one in known)


def drawn(modules: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """A sample without those known to change nothing; the same for the same code, numbers and list."""
    numbers = random.Random(seed)
    places: dict[tuple[str, tuple[int, int]], list[Mutant]] = {}
    for module in modules:
        for mutant in mutants_of(module):
            places.setdefault((module, mutant.position), []).append(mutant)
    order = sorted(places)
    numbers.shuffle(order)
    known = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    sample: list[Mutant] = []
    for place in order:
        mutant = numbers.choice(places[place])
        if len(sample) < count and applied(mutant) is not None and not is_equivalent(mutant, known):
            sample.append(mutant)
    return sample


def tests_for(module: str) -> list[str]:
    """What to run for a module, in order."""
    path = Path(module)
    room = path.parts[-2]
    patterns = [f"tests/**/test_{path.stem}.py", f"tests/{room}/test_*.py" if room not in PACKAGES else ""]
    more = [words.split() for pattern, words in TESTS if fnmatch.fnmatch(module, pattern)]
    found = [
        str(found.relative_to(ROOT))
        for pattern in [patterns[0], *itertools.chain(*more), patterns[1]]
        if pattern
        for found in sorted(ROOT.glob(pattern))
    ]
    return [module, *dict.fromkeys(found)]


def copied(target: Path) -> Path:
    """A copy of the repository as it is, without what git ignores."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def tried(mutant: Mutant | None, module: str, folder: Path, limit: float, programs: str) -> tuple[str, float]:
    """Runs the tests in a copy: "killed", "survived" or "timed out", and the seconds that it took."""
    text = (ROOT / module).read_text() if mutant is None else applied(mutant)
    assert text is not None
    (folder / module).write_text(text)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "JAX_COMPILATION_CACHE_DIR": programs}
    environment.pop("PYTHONPATH", None)
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests_for(module)]
    begun = time.monotonic()
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        status = process.wait(limit)
        outcome = "survived" if status == 0 else "killed"
    except subprocess.TimeoutExpired:
        outcome = "timed out"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with all that the tests have started
        process.wait()
        shutil.copy2(ROOT / module, folder / module)
    return outcome, time.monotonic() - begun


def main() -> int:
    """Draws, runs, and reports; the exit status says whether enough were noticed."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", default="*", help="modules, as in 'fdg/batch/*'")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one")
    parser.add_argument("--least", type=float, default=95.0, help="percent to be killed")
    parser.add_argument("--list", action="store_true", help="show the sample and its tests, and run nothing")
    options = parser.parse_args()
    modules = [
        str(path.relative_to(ROOT)) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
    ]
    modules = [module for module in modules if fnmatch.fnmatch(module, options.only)]
    sample = drawn(modules, options.sample, options.seed)
    if options.list:
        for mutant in sample:
            print(mutant, *tests_for(mutant.module)[1:])
        return 0
    programs = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    counts = {"killed": 0, "survived": 0, "timed out": 0}
    noticed_not: list[tuple[Mutant, str]] = []
    with tempfile.TemporaryDirectory(prefix="fdg-mutants-") as scratch:
        programs = programs or str(Path(scratch, "programs"))
        free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for i in range(options.jobs):
            free.put(copied(Path(scratch, str(i))))

        def one(mutant: Mutant) -> tuple[Mutant, str, float]:
            folder = free.get()
            try:
                return mutant, *tried(mutant, mutant.module, folder, options.limit, programs)
            finally:
                free.put(folder)

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            done = [pool.submit(one, mutant) for mutant in sample]
            for i, future in enumerate(concurrent.futures.as_completed(done), 1):
                mutant, outcome, seconds = future.result()
                counts[outcome] += 1
                print(f"{i:3d}/{len(sample)} {outcome:9s} {seconds:5.0f} s  {mutant}", flush=True)
                if outcome != "killed":
                    noticed_not.append((mutant, outcome))
    for mutant, outcome in sorted(noticed_not, key=lambda pair: (pair[1], str(pair[0]))):
        print(f"\n{outcome}: {mutant}", *diff(mutant), sep="\n")
    noticed = 100 * counts["killed"] / max(1, len(sample))
    said = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
    print(f"\n{len(sample)} mutants of seed {options.seed}: {said}: {noticed:.1f} % killed")
    return 0 if noticed >= options.least else 1


if __name__ == "__main__":
    raise SystemExit(main())
