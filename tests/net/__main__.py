"""`python -m tests.net`: what a redesign must not change, recorded before it and compared after it.

    python -m tests.net check --base e217e55           # record that commit, then this tree, and compare
    python -m tests.net check --base e217e55 --jobs 'train.ppo.*' 'plan.*'
    python -m tests.net record --out build/net/mine    # this tree
    python -m tests.net compare build/net/one build/net/other

XLA's bits differ between processors and versions: recordings compare where they were made.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.net.comparing import compare, read_expected
from tests.net.jobs import Job, chosen
from tests.net.recording import NetError, digest, record

_ROOT = Path(__file__).parents[2]
_EXPECTED = Path(__file__).with_name("expected.toml")


def main(words: list[str] | None = None) -> int:
    """The command line; returns 0 without differences but expected ones, 1 with others, 2 for a mistake."""
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
        verb.add_argument("--processes", type=int, default=2, help="that run jobs at the same time (2)")
        verb.add_argument("--cache", type=Path, help="folder of compiled programs (build/net/programs)")
    for verb in (comparing, checking):
        verb.add_argument("--expected", type=Path, default=_EXPECTED, help="differences that are meant")
    given = parser.parse_args(words)
    try:
        jobs = chosen(given.jobs)
        if not jobs:
            raise NetError(f"--jobs {' '.join(given.jobs)}: no job has such a name")
        if given.verb == "compare":
            return _report(given.a, given.b, jobs if given.jobs else None, given.expected)
        cache = (given.cache or _ROOT / "build/net/programs").absolute()
        if given.verb == "record":
            record(Path.cwd(), given.out, jobs, given.processes, cache)
            return 0
        expected = given.expected
        read_expected(expected)  # before what takes long
        base = _record_commit(given.base, jobs, given.processes, cache)
        now = _ROOT / "build/net" / digest(Path.cwd())
        record(Path.cwd(), now, jobs, given.processes, cache)
        return _report(base, now, jobs, expected)
    except NetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _record_commit(base: str, jobs: list[Job], processes: int, cache: Path) -> Path:
    named = _git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}")
    if named is None:
        raise NetError(f"--base {base}: there is no such commit")
    out = _ROOT / "build/net" / named[:12]
    with tempfile.TemporaryDirectory(prefix="fdg-net-base-") as folder:
        tree = Path(folder) / "tree"
        if _git("worktree", "add", "--detach", "--quiet", str(tree), named) is None:
            raise NetError(f"--base {base}: git worktree add failed in {_ROOT}")
        try:
            record(tree, out, jobs, processes, cache)
        finally:
            _git("worktree", "remove", "--force", str(tree))
    return out


def _git(*words: str) -> str | None:
    """What git prints; None where it fails."""
    ran = subprocess.run(["git", "-C", os.fspath(_ROOT), *words], capture_output=True, text=True)
    return ran.stdout.strip() if ran.returncode == 0 else None


def _report(a: Path, b: Path, jobs: list[Job] | None, expected_in: Path) -> int:
    """Prints each difference and how many there are; the exit status."""
    expected = read_expected(expected_in)
    found = compare(a, b, None if jobs is None else [job.name for job in jobs])
    unexpected = 0
    for difference in found:
        why = next((entry for entry in expected if entry.matches(difference)), None)
        unexpected += why is None
        note = "" if why is None else f"  (expected: {why.reason}, {why.decision})"
        print(f"{difference}{note}")
    print(f"{unexpected} differences, and {len(found) - unexpected} that were expected, of {b} from {a}")
    return int(unexpected > 0)


if __name__ == "__main__":
    raise SystemExit(main())
