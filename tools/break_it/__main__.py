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
    given = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    if given.only is not None:
        print(CHECKS[given.what](given.only) or "nothing is wrong")
        return 0
    path = KEPT / f"{given.what}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    done = {row["number"]: row["wrong"] for row in map(json.loads, lines)}
    with path.open("a") as file:
        for number in range(given.count):
            if number in done:
                continue
            done[number] = CHECKS[given.what](number)
            print(json.dumps({"number": number, "wrong": done[number]}), file=file, flush=True)
            if done[number]:
                print(f"{number}: {done[number]}", flush=True)
    if met := noted(given.what):
        print(f"met: {met}")
    tried = [text for number, text in done.items() if number < given.count]
    print(f"{given.what}: {sum(map(bool, tried))} of {len(tried)} went wrong ({path})")
    return int(any(tried))


if __name__ == "__main__":
    raise SystemExit(main())
