"""Whether a step costs as much among many environments as among few: CPU time a step, in turns.

    python -m bench.linear_cost                             # PPO on CartPole-v1, 1,024 against 16,384
    python -m bench.linear_cost --sizes 64 1024 16384 -- --env Breakout-MinAtar

What follows `--` are flags of `fdg.train`. Processor time of all threads, not the clock, so that other work
on the machine counts for little; the least of the rounds. Prints a line for each size, and the last against
the first, which is asked to be at most 1.
"""

import argparse
import time

import jax

import fdg
from fdg.commands.parse import parse

SIZES = (1_024, 16_384)


def main() -> None:
    """Reads the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of environments")
    parser.add_argument("--rounds", type=int, default=3, help="of each size, in turns")
    parser.add_argument("flags", nargs="*", help="flags of fdg.train, after --")
    given = parser.parse_args()
    engines, states, least = {}, {}, {}
    for size in given.sizes:
        words = ["--num-envs", str(size), "--total-steps", str(10**9), "--devices", "1"]
        job = parse([*given.flags, *words], "bench.linear_cost", "measures")
        engine = fdg.compile(job.algorithm, job.policy, jax.devices()[:1])
        engines[size] = engine, job.steps_per_iteration
        states[size], _ = engine.run(engine.init(0), 1)  # compiled, and warm
    for _ in range(given.rounds):
        for size, (engine, steps) in engines.items():
            iterations = max(1, 2 * max(n for _, n in engines.values()) // steps // 4)
            began = time.process_time()
            states[size], metrics = engine.run(states[size], iterations)
            jax.block_until_ready((states[size], metrics))
            spent = (time.process_time() - began) / (iterations * steps)
            least[size] = min(spent, least.get(size, spent))
    for size, seconds in least.items():
        print(f"{size:>8,} environments: {seconds * 1e6:.3f} us of CPU time a step")
    first, last = given.sizes[0], given.sizes[-1]
    print(
        f"a step among {last:,} costs {least[last] / least[first]:.3f} of one among {first:,} (asked: <= 1)"
    )


if __name__ == "__main__":
    main()
