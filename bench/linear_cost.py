"""Whether a step takes as long among many environments as among few, as `fdg.train` runs it.

    python -m bench.linear_cost                             # PPO on CartPole-v1, 1,024 against 16,384
    python -m bench.linear_cost --sizes 64 1024 16384 -- --env Breakout-MinAtar
    python -m bench.linear_cost -- --devices 1              # and not on as many devices as it chooses

What follows `--` are flags of `fdg.train`. Each size is a process of its own, which has compiled and waits;
they train in turns. Prints steps/s and processor time a step of each, and how much longer a step takes among
the most environments than among the fewest: the median of the rounds, and the middle half. Target: 1.
"""

import contextlib
import statistics

from bench.harness import Spread, in_turns, parser
from bench.peers.alternate import ours


def main() -> int:
    """Reads the command line, measures, prints; the status says whether it is at most 1."""
    line = parser("bench.linear_cost", __doc__)
    line.add_argument("--sizes", type=int, nargs="+", default=(1_024, 16_384), help="of environments")
    line.add_argument("--rounds", type=int, default=5, help="of each size, in turns, after one more")
    line.add_argument("--steps", type=int, default=1 << 22, help="of a round")
    line.add_argument("flags", nargs="*", help="flags of fdg.train, after --")
    given = line.parse_args()
    more = f"{' '.join(given.flags)} --total-steps {given.steps}"
    with contextlib.ExitStack() as stack:
        drivers = {
            size: stack.enter_context(ours(f"{more} --num-envs {size}", continues=True))
            for size in given.sizes
        }
        rounds = in_turns({size: driver.round for size, driver in drivers.items()}, given.rounds)
    a_step = {
        (size, name): [one[name] / one["steps"] for one in ones]
        for size, ones in rounds.items()
        for name in ("seconds", "cpu_seconds")
    }
    for size, driver in drivers.items():
        speed = 1 / statistics.median(a_step[size, "seconds"])
        work = 1e6 * statistics.median(a_step[size, "cpu_seconds"])
        print(
            f"{size:>8,} environments on {driver.facts['devices']} devices:"
            f" {speed:,.0f} steps/s, {work:.3f} us of processor time a step"
        )
    few, many = min(drivers), max(drivers)
    by_clock, by_work = (
        Spread.ratio(a_step[many, name], a_step[few, name]) for name in ("seconds", "cpu_seconds")
    )
    print(
        f"a step among {many:,} takes {by_clock:.3f} of one among {few:,},"
        f" and {by_work.median:.3f} of the processor time (target: at most 1)"
    )
    return int(by_clock.median > 1)


if __name__ == "__main__":
    raise SystemExit(main())
