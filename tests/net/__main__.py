"""`python -m tests.net`: compares trainings, plans and messages before and after a refactoring.

    python -m tests.net check --base e217e55           # record that commit, then this tree, and compare
    python -m tests.net check --base e217e55 --jobs 'train.ppo.*' 'plan.*'
    python -m tests.net record --out build/net/mine    # this tree
    python -m tests.net compare build/net/one build/net/other

XLA's results differ between processors and versions: make both recordings on one machine.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.net.comparing import compare, read_expected
from tests.net.jobs import Job, select_jobs
from tests.net.recording import NetError, digest, record

_ROOT = Path(__file__).parents[2]
_EXPECTED = Path(__file__).with_name("expected.toml")


def main(argv: list[str] | None = None) -> int:
    """Command line; returns 0 if all differences are expected, 1 if not, 2 for a usage error."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.net", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="run the jobs with the code in the current folder")
    recording.add_argument("--out", type=Path, required=True, help="folder of the recording")
    comparing = verbs.add_parser("compare", help="print what differs between two recordings")
    comparing.add_argument("a", type=Path)
    comparing.add_argument("b", type=Path)
    checking = verbs.add_parser("check", help="record a commit and the current folder, and compare")
    checking.add_argument("--base", required=True, help="the commit")
    for verb in (recording, comparing, checking):
        verb.add_argument("--jobs", nargs="+", default=[], metavar="PATTERN", help="only jobs of these names")
    for verb in (recording, checking):
        verb.add_argument("--processes", type=int, default=2, help="number of parallel jobs (2)")
        verb.add_argument("--cache", type=Path, help="folder of compiled programs (build/net/programs)")
    for verb in (comparing, checking):
        verb.add_argument("--expected", type=Path, default=_EXPECTED, help="intended differences")
    arguments = parser.parse_args(argv)
    try:
        jobs = select_jobs(arguments.jobs)
        if not jobs:
            raise NetError(f"--jobs {' '.join(arguments.jobs)}: no job has such a name")
        if arguments.verb == "compare":
            return _report(arguments.a, arguments.b, jobs if arguments.jobs else None, arguments.expected)
        cache = (arguments.cache or _ROOT / "build/net/programs").absolute()
        if arguments.verb == "record":
            record(Path.cwd(), arguments.out, jobs, arguments.processes, cache)
            return 0
        expected = arguments.expected
        read_expected(expected)  # fails before the long recordings
        base = _record_commit(arguments.base, jobs, arguments.processes, cache)
        now = _ROOT / "build/net" / digest(Path.cwd())
        record(Path.cwd(), now, jobs, arguments.processes, cache)
        return _report(base, now, jobs, expected)
    except NetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _record_commit(base: str, jobs: list[Job], processes: int, cache: Path) -> Path:
    commit = _git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}")
    if commit is None:
        raise NetError(f"--base {base}: there is no such commit")
    out = _ROOT / "build/net" / commit[:12]
    with tempfile.TemporaryDirectory(prefix="fdg-net-base-") as folder:
        tree = Path(folder) / "tree"
        if _git("worktree", "add", "--detach", "--quiet", str(tree), commit) is None:
            raise NetError(f"--base {base}: git worktree add failed in {_ROOT}")
        try:
            record(tree, out, jobs, processes, cache)
        finally:
            _git("worktree", "remove", "--force", str(tree))
    return out


def _git(*argv: str) -> str | None:
    """Output of a git command, or None if it fails."""
    ran = subprocess.run(["git", "-C", os.fspath(_ROOT), *argv], capture_output=True, text=True)
    return ran.stdout.strip() if ran.returncode == 0 else None


def _report(a: Path, b: Path, jobs: list[Job] | None, expected_in: Path) -> int:
    """Prints the differences and their number; returns the exit status."""
    expected = read_expected(expected_in)
    found = compare(a, b, None if jobs is None else [job.name for job in jobs])
    unexpected = 0
    for difference in found:
        entry = next((entry for entry in expected if entry.matches(difference)), None)
        unexpected += entry is None
        note = "" if entry is None else f"  (expected: {entry.reason}, {entry.decision})"
        print(f"{difference}{note}")
    print(f"{unexpected} differences, and {len(found) - unexpected} that were expected, of {b} from {a}")
    return int(unexpected > 0)


if __name__ == "__main__":
    raise SystemExit(main())
