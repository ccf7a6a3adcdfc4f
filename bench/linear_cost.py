"""Whether a step takes as long among many environments as among few, as `fdg.train` runs it.

    python -m bench.linear_cost                             # PPO on CartPole-v1, 1,024 against 16,384
    python -m bench.linear_cost --sizes 64 1024 16384 -- --env Breakout-MinAtar
    python -m bench.linear_cost -- --devices 1              # and not on as many devices as it chooses

What follows `--` are flags of `fdg.train`. Each size is a process of its own, which has compiled and waits;
they train in turns. Prints steps/s and processor time a step of each, and how much longer a step takes among
the most environments than among the fewest: the median of the rounds, and the middle half. Asked: 1.
"""

import argparse
import contextlib
import statistics
import sys
from pathlib import Path

from bench.peers.alternate import Driver, middle_half

SIZES = (1_024, 16_384)


def main() -> int:
    """Reads the command line, measures, prints; the status says whether it is at most 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of environments")
    parser.add_argument("--rounds", type=int, default=5, help="of each size, in turns, after one more")
    parser.add_argument("--steps", type=int, default=1 << 22, help="of a round")
    parser.add_argument("flags", nargs="*", help="flags of fdg.train, after --")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        drivers: dict[int, Driver] = {}
        for size in given.sizes:
            words = [*given.flags, "--num-envs", str(size), "--total-steps", str(given.steps)]
            driver = Driver(Path(sys.executable), "ours", {"flags": words, "continues": True})
            stack.callback(driver.close)
            drivers[size] = driver
        rounds = [{size: one.round(i) for size, one in drivers.items()} for i in range(given.rounds + 1)][1:]
    for size, driver in drivers.items():
        seconds, work = (
            statistics.median(one[size][name] / one[size]["steps"] for one in rounds)
            for name in ("seconds", "cpu_seconds")
        )
        print(
            f"{size:>8,} environments on {driver.facts['devices']} devices:"
            f" {1 / seconds:,.0f} steps/s, {work * 1e6:.3f} us of processor time a step"
        )
    few, many = min(drivers), max(drivers)

    def longer(name: str) -> list[float]:
        each = [{size: one[size][name] / one[size]["steps"] for size in (few, many)} for one in rounds]
        return [one[many] / one[few] for one in each]

    by_clock, by_work = longer("seconds"), longer("cpu_seconds")
    low, high = middle_half(by_clock)
    print(
        f"a step among {many:,} takes {statistics.median(by_clock):.3f} ({low:.3f} to {high:.3f}) of one"
        f" among {few:,}, and {statistics.median(by_work):.3f} of the processor time (asked: at most 1)"
    )
    return int(statistics.median(by_clock) > 1)


if __name__ == "__main__":
    raise SystemExit(main())
