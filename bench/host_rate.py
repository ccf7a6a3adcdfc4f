"""Training in EnvPool's environments beside what EnvPool alone steps, with the same number of threads.

    python -m bench.host_rate                               # PPO on HalfCheetah-v4, of several sizes
    python -m bench.host_rate --sizes 8 64 -- --algo sac    # what follows `--` are flags of fdg.train

In turns: some iterations of `fdg.train`, in a process of its own that has compiled and waits, then random
actions through EnvPool alone, whose instances are made for it and closed again. The actions are as an
untrained policy draws them, for what a step takes depends on them: a HalfCheetah that thrashes keeps MuJoCo
less busy, by a quarter, than one that runs or lies there; so the rounds are short. Prints the median and
the middle half of the ratios. Target: 60% at one of the sizes.
"""

import statistics
import time

import numpy as np

import envs
from bench.harness import Spread, in_turns, parser
from bench.peers.alternate import Driver, ours
from envs.from_envpool import PREFIX, threads_for

AT_LEAST = 0.6


def steps_alone(name: str, size: int, seconds: float) -> float:
    """Steps/s of EnvPool's instances by themselves.

    Args:
      name: as EnvPool calls the environment.
      size: instances.
      seconds: to step them for.
    """
    import envpool

    pool = envpool.make_gymnasium(name, num_envs=size, num_threads=threads_for(size))
    pool.reset()
    space = envs.make(PREFIX + name).action_space
    rng = np.random.default_rng(0)
    actions = [_drawn(rng, space, size) for _ in range(16)]
    for action in actions:
        pool.step(action)
    made, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        pool.step(actions[made // size % len(actions)])
        made += size
    rate = made / (time.perf_counter() - begun)
    pool.close()
    return rate


def _drawn(rng: np.random.Generator, space: envs.Space, size: int) -> np.ndarray:
    if isinstance(space, envs.Box):
        return np.clip(rng.normal(size=(size, *space.shape)), space.low, space.high).astype(np.float64)
    return rng.integers(0, space.n, size).astype(np.int32)


def main() -> int:
    """Reads the command line, measures, prints; the status says whether one of the sizes gets there."""
    line = parser("bench.host_rate", __doc__)
    line.add_argument("--env", default="HalfCheetah-v4", help="one of EnvPool's")
    line.add_argument("--sizes", type=int, nargs="+", default=(8, 16, 64), help="numbers of environments")
    line.add_argument("--rounds", type=int, default=5, help="of each, in turns, after one more")
    line.add_argument("--steps", type=int, default=1 << 15, help="of a round of training")
    line.add_argument("--seconds", type=float, default=2.0, help="of a round of EnvPool alone")
    line.add_argument("flags", nargs="*", help="flags of fdg.train, after --")
    given = line.parse_args()
    reached = []
    for size in given.sizes:
        words = f"--env {PREFIX}{given.env} {' '.join(given.flags)} --num-envs {size}"
        with ours(f"{words} --total-steps {given.steps}", continues=True) as driver:

            def training(number: int, driver: Driver = driver) -> float:
                one = driver.round(number)
                return one["steps"] / one["seconds"]

            def alone(_: int, size: int = size) -> float:
                return steps_alone(given.env, size, given.seconds)

            rates = in_turns({"training": training, "alone": alone}, given.rounds)
        ratio = Spread.ratio(rates["training"], rates["alone"])
        reached.append(ratio.median)
        mine, theirs = (statistics.median(each) for each in rates.values())
        print(
            f"{size:>4} environments, {threads_for(size)} threads: training {mine:,.0f} steps/s, EnvPool"
            f" alone {theirs:,.0f}: {ratio:.2f} of it",
            flush=True,
        )
    return int(max(reached) < AT_LEAST)


if __name__ == "__main__":
    raise SystemExit(main())
