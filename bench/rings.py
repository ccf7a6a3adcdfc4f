"""Measures the speed of rollouts in rings, with environments and inference that sleep in host callbacks.

Rings are parts of the environments that take turns: some step while the actor infers for others. *Even*: a
step sleeps s seconds for each instance in turn, and inference sleeps f seconds for each row; with R rings, a
rollout is at most min(R, 1 + s / f) times as fast. *Uneven*: every instance has its own worker with lognormal
step times; the bound is the speed of free-running workers, which do not wait for each other.

    python -m bench.rings even
    python -m bench.rings uneven --rounds 3 --workers 64 --median 0.1 --steps 32
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from algos.rings import in_parts, of_parts
from algos.rollout import rollout
from bench.harness import Spread, in_turns, parser, repeated, seconds
from envs import Box, Discrete, HostEnvironment, host
from envs.pools import Transition

# Even: steps of a rollout, environments, seconds of inference per row; then s / f, and numbers of rings.
STEPS, ROWS, INFERENCE = 16, 8, 0.01
RATIOS, RINGS = (1, 3), (1, 2, 4)
OBSERVATIONS, ACTIONS = Box(-1.0, 1.0, (1,)), Discrete(2)
SIGMAS = (0.5, 1.0)  # uneven, by default: standard deviations of the logarithm of step times


@dataclasses.dataclass(frozen=True)
class Sleeping:
    """A `Source` of instances that sleep `seconds` in a step, one after the other.

    With `sigma`, instances sleep in parallel, for lognormal times with the median `seconds`.
    """

    seconds: float
    sigma: float | None = None
    name: str = "sleeping"
    observation_space: Any = OBSERVATIONS
    action_space: Any = ACTIONS
    max_episode_steps: int | None = None

    def start(self, size: int) -> "SleepingPool":
        return SleepingPool(self, size)

    def durations(self, seed: int, steps: int) -> np.ndarray:
        """Seconds of each step of an instance."""
        return self.seconds * np.random.default_rng(seed).lognormal(0, self.sigma, steps)


class SleepingPool:
    """A `Pool` of sleeping instances: `recv` waits until the slowest of them is done."""

    def __init__(self, source: Sleeping, size: int):
        self._source, self._size, self._step = source, size, 0
        self._durations = np.full((size, 1), source.seconds * size)
        self._end = 0.0

    def reset(self, rows: np.ndarray, seeds: np.ndarray, timeout: float) -> np.ndarray:
        if self._source.sigma is not None:
            # After 4,096 steps the durations start again.
            self._durations = np.stack([self._source.durations(int(seed), 4096) for seed in seeds])
        return np.zeros((len(rows), 1), np.float32)

    def send(self, action: np.ndarray, timeout: float) -> None:
        duration = self._durations[:, self._step % self._durations.shape[1]].max()
        self._end, self._step = time.perf_counter() + duration, self._step + 1

    def ready(self) -> bool:
        return time.perf_counter() >= self._end

    def recv(self, timeout: float) -> Transition:
        time.sleep(max(0.0, self._end - time.perf_counter()))
        return Transition.empty(self._size, self._source.observation_space)

    def step(self, action: np.ndarray, timeout: float) -> Transition:
        self.send(action, timeout)
        return self.recv(timeout)

    def close(self) -> None:
        pass


def act(row_seconds: float, observation: jax.Array, keys: jax.Array) -> tuple[jax.Array, None]:
    """Zero actions, after a sleep of `row_seconds` per row."""
    if not row_seconds:
        return jnp.zeros(keys.shape, jnp.int32), None

    def sleep(observation: jax.Array) -> np.ndarray:
        time.sleep(row_seconds * len(observation))
        return np.zeros(len(observation), np.int32)

    return jax.pure_callback(sleep, jax.ShapeDtypeStruct(keys.shape, jnp.int32), observation), None


def timed_rollout(source: Sleeping, rows: int, rings: int, inference: float, steps: int = STEPS) -> Any:
    """A function that takes `steps` steps with all instances, and returns the seconds.

    `rows` is the number of instances, `inference` the seconds of inference per row.
    """
    env = HostEnvironment(source)
    step = env.step if rings == 1 else (env.send, env.recv, env.ready)

    def reset(keys: jax.Array) -> Any:
        with host.in_parts(rings):
            return env.reset(keys)

    @jax.jit
    def begin(keys: jax.Array) -> Any:
        return jax.tree.map(of_parts, jax.lax.map(reset, in_parts(keys, rings)))

    @functools.partial(jax.jit, static_argnums=2)
    def run_rollout(state: Any, observation: Any, steps: int) -> Any:
        state, observation, _ = rollout(
            functools.partial(act, inference), step, jax.random.key(1), state, observation, steps, rings
        )
        return (state, observation), None

    first = jax.block_until_ready(begin(jax.random.split(jax.random.key(0), rows)))
    run = repeated(lambda pair: run_rollout(*pair, steps), first)
    seconds(run)  # compiles
    return lambda _: seconds(run)


def measure_even(rounds: int, inference: float = INFERENCE) -> bool:
    """Prints the gain for each s / f and number of rings; returns whether all reach 0.9 of the bound."""
    all_reached = True
    for ratio in RATIOS:
        sides = {r: timed_rollout(Sleeping(ratio * inference), ROWS, r, inference) for r in RINGS}
        times = in_turns(sides, rounds)
        for rings in RINGS[1:]:
            gain = Spread.ratio(times[1], times[rings]).median
            bound = min(rings, 1 + ratio)
            all_reached &= gain >= 0.9 * bound
            print(f"s / f = {ratio}, {rings} rings: {gain:.2f} times one, bound {bound}: {gain / bound:.2f}")
    return all_reached


def measure_uneven(rounds: int, workers: int, median: float, steps: int, sigmas: Sequence[float]) -> None:
    """Prints the speed in one ring, and in one ring per instance, relative to free-running workers."""
    for sigma in sigmas:
        source = Sleeping(median, sigma)

        def run_freely(_: int, source: Sleeping = source) -> float:
            def work(seed: int) -> float:
                durations, begin = source.durations(seed, steps), time.perf_counter()
                for duration in durations:
                    time.sleep(duration)
                return steps / (time.perf_counter() - begin)

            with ThreadPoolExecutor(workers) as threads:
                rate = sum(threads.map(work, range(workers)))  # workers never wait for each other
            return workers * steps / rate

        sides: dict[Any, Any] = {"free": run_freely}
        sides |= {rings: timed_rollout(source, workers, rings, 0.0, steps) for rings in (1, workers)}
        medians = {side: statistics.median(times) for side, times in in_turns(sides, rounds, 0).items()}
        shares = [medians["free"] / medians[rings] for rings in (1, workers)]
        mean = 1e3 * median * math.exp(sigma**2 / 2)
        print(
            f"{workers} workers, {steps} steps of {mean:.0f} ms, sigma {sigma}: share of free-running workers"
            f" {shares[0]:.2f} in one ring, {shares[1]:.2f} in {workers} rings",
            flush=True,
        )


def main() -> int:
    """Returns exit status 1 if a bound is missed."""
    command = parser("bench.rings", __doc__)
    command.add_argument("which", choices=("even", "uneven"))
    command.add_argument("--rounds", type=int, default=7)
    command.add_argument("--inference", type=float, default=INFERENCE, help="even: seconds per row")
    command.add_argument("--workers", type=int, default=64, help="uneven: instances")
    command.add_argument("--median", type=float, default=0.1, help="uneven: median seconds of a step")
    command.add_argument("--steps", type=int, default=32, help="uneven: steps of a rollout")
    command.add_argument("--sigmas", type=float, nargs="+", default=SIGMAS, help="uneven: of log step times")
    args = command.parse_args()
    if args.which == "even":
        return 0 if measure_even(args.rounds, args.inference) else 1
    measure_uneven(args.rounds, args.workers, args.median, args.steps, args.sigmas)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
