"""Compares two lanes, an actor and a learner that only sleep, with the shortest possible time.

A lane is a host thread that starts the programs of one group. With a staleness of 1, acting and learning do
not wait for each other. If each of the two fragments takes t seconds, n iterations take at least (n + 1) * t
seconds with a staleness of 1, and 2 * n * t seconds with a staleness of 0. A measurement is one `Engine.run`.

    python -m bench.lanes
"""

import dataclasses
import statistics

import jax
import jax.numpy as jnp

import fdg
import policies
from bench.lag import sleep_then_return, timed_runs

ROUNDS, ITERATIONS, SECONDS = 7, 20, 0.05


@dataclasses.dataclass(frozen=True)
class Sleeping:
    """An algorithm whose actor and learner only sleep."""

    def init(self, key):
        return {"weight": jnp.ones(4), "batch": jnp.zeros((2, 4))}

    def iterate(self, state):
        @fdg.fragment("actor", in_axes=(None, 0))
        def act(weight, batch):
            return sleep_then_return(batch + weight[None], SECONDS)

        @fdg.fragment("learner", in_axes=(None, 0), out_axes=None)
        def learn(weight, batch):
            return sleep_then_return(weight + jnp.mean(batch), SECONDS)

        batch = act(state["weight"], state["batch"])
        return {"weight": learn(state["weight"], batch), "batch": batch}, {"mean": jnp.mean(batch)}


def main():
    fdg.host_devices(2)
    engines = {
        staleness: fdg.compile(
            Sleeping(), policies.SingleLearnerCoarse(staleness=staleness), jax.devices()[:2]
        )
        for staleness in (0, 1)
    }
    bounds = {0: 2 * ITERATIONS * SECONDS, 1: (ITERATIONS + 1) * SECONDS}
    for staleness, seconds in timed_runs(engines, ITERATIONS, ROUNDS).items():
        median = statistics.median(seconds)
        share = bounds[staleness] / median
        print(
            f"staleness {staleness}: {median:.3f} s; the bound, {bounds[staleness]:.2f} s,"
            f" is {share:.1%} of that"
        )


if __name__ == "__main__":
    main()
