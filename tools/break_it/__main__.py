"""Tries to break fdg by random command lines, kills, lost processes and Ctrl-C, in numbered tries.

    python -m tools.break_it flags --count 10000     command lines run, or end with one line of error
    python -m tools.break_it kills --count 34        kill -9 and resume, three times: all bits are equal
    python -m tools.break_it language --count 12     the same for SFT, DPO, GRPO and PPO-RLHF
    python -m tools.break_it streams --count 10      the same for streams, also with SIGTERM and Ctrl-C
    python -m tools.break_it many --count 6          the same for 16 processes, one of which is killed
    python -m tools.break_it losses --count 24       one of two processes is lost; the error names it
    python -m tools.break_it studies --count 1       a study of 12 cells is killed twice: the same tables
    python -m tools.break_it interrupts --count 50   Ctrl-C at any moment: status 130 within 2 s

build/break_it/ has the finished tries and their circumstances; a second start runs only the missing tries.
`--only 17` repeats one try. For runs on a Ray cluster: `python -m tools.break_it.ray`; for damaged runs:
`python -m tests.hostile`.
"""

import functools
import json
from collections.abc import Callable

from bench import harness
from tools.break_it.flags import run_random_command
from tools.break_it.interrupts import interrupt_start
from tools.break_it.kills import LANGUAGE, MANY, STREAMS, kill_run
from tools.break_it.losses import lose_process
from tools.break_it.processes import FOLDER, count_circumstances
from tools.break_it.studies import kill_study

# Each function makes a try by its number; it returns what went wrong, or None.
CHECKS: dict[str, Callable[[int], str | None]] = {
    "flags": run_random_command,
    "kills": kill_run,
    "language": functools.partial(kill_run, runs=LANGUAGE, check="language"),
    "streams": functools.partial(kill_run, runs=STREAMS, check="streams"),
    "many": functools.partial(kill_run, runs=MANY, check="many"),
    "losses": lose_process,
    "studies": kill_study,
    "interrupts": interrupt_start,
}


def main() -> int:
    """Runs tries of one kind; returns 1 if any failed."""
    parser = harness.parser("tools.break_it", __doc__)
    parser.add_argument("what", choices=CHECKS)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--only", type=int)
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if args.only is not None:
        print(CHECKS[args.what](args.only) or "nothing is wrong")
        return 0
    path = FOLDER / f"{args.what}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    failures = {row["number"]: row["wrong"] for row in map(json.loads, lines)}
    with path.open("a") as file:
        for number in range(args.count):
            if number in failures:
                continue
            failures[number] = CHECKS[args.what](number)
            print(json.dumps({"number": number, "wrong": failures[number]}), file=file, flush=True)
            if failures[number]:
                print(f"{number}: {failures[number]}", flush=True)
    if circumstances := count_circumstances(args.what):
        print(f"circumstances: {circumstances}")
    results = [text for number, text in failures.items() if number < args.count]
    print(f"{args.what}: {sum(map(bool, results))} of {len(results)} went wrong ({path})")
    return int(any(results))


if __name__ == "__main__":
    raise SystemExit(main())
