"""Trying to break it: random command lines, kills, lost processes and Ctrl-C, each by its number.

    python -m tools.break_it flags --count 10000     in process: each is a run, or one clear line and status 2
    python -m tools.break_it kills --count 34        kill -9, three times each, resumed: not a bit differs
    python -m tools.break_it language --count 12     the same for SFT, DPO, GRPO and PPO-RLHF
    python -m tools.break_it streams --count 10      the same for streams, with SIGTERM and Ctrl-C between
    python -m tools.break_it many --count 6          the same for 16 processes, of which one is killed
    python -m tools.break_it losses --count 24       one of two processes lost: named, none left, resumed
    python -m tools.break_it interrupts --count 50   Ctrl-C from the first moment on: status 130 in 2 s

What was done, and what it met, is in build/break_it/: started again, each continues where it was. `--only 17`
replays one. Runs on a Ray cluster: `python -m tools.break_it.ray`; damaged
run directories: `python -m tests.hostile`.
"""

import functools
import json
from collections.abc import Callable

from bench import harness
from tools.break_it.flags import flags
from tools.break_it.interrupts import interrupts
from tools.break_it.kills import LANGUAGE, MANY, STREAMS, kills
from tools.break_it.losses import losses
from tools.break_it.processes import KEPT, noted

CHECKS: dict[str, Callable[[int], str | None]] = {
    "flags": flags,
    "kills": kills,
    "language": functools.partial(kills, kinds=LANGUAGE, check="language"),
    "streams": functools.partial(kills, kinds=STREAMS, check="streams"),
    "many": functools.partial(kills, kinds=MANY, check="many"),
    "losses": losses,
    "interrupts": interrupts,
}


def main() -> int:
    """Runs one kind of tries; 1 if one of them went wrong."""
    parser = harness.parser("tools.break_it", __doc__)
    parser.add_argument("what", choices=CHECKS)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--only", type=int)
    args = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    if args.only is not None:
        print(CHECKS[args.what](args.only) or "nothing is wrong")
        return 0
    path = KEPT / f"{args.what}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    wrong_of = {row["number"]: row["wrong"] for row in map(json.loads, lines)}
    with path.open("a") as file:
        for number in range(args.count):
            if number in wrong_of:
                continue
            wrong_of[number] = CHECKS[args.what](number)
            print(json.dumps({"number": number, "wrong": wrong_of[number]}), file=file, flush=True)
            if wrong_of[number]:
                print(f"{number}: {wrong_of[number]}", flush=True)
    if met := noted(args.what):
        print(f"met: {met}")
    tried = [text for number, text in wrong_of.items() if number < args.count]
    print(f"{args.what}: {sum(map(bool, tried))} of {len(tried)} went wrong ({path})")
    return int(any(tried))


if __name__ == "__main__":
    raise SystemExit(main())
