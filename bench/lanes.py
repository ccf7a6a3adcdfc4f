"""How near lanes come to the bound of their overlap: an actor and a learner that sleep in host callbacks.

With a staleness of 1, acting and learning do not wait for each other: n iterations of two fragments of s
seconds each take at least (n + 1) s; with a staleness of 0 they take 2 n s. Each measurement is one `run`.

    python -m bench.lanes
"""

import dataclasses
import statistics

import jax
import jax.numpy as jnp

import fdg
import policies
from bench.lag import slept, timed_runs

ROUNDS, ITERATIONS, SECONDS = 7, 20, 0.05


@dataclasses.dataclass(frozen=True)
class Sleeping:
    def init(self, key):
        return {"weight": jnp.ones(4), "walks": jnp.zeros((2, 4))}

    def iterate(self, state):
        @fdg.fragment("actor", in_axes=(None, 0))
        def act(weight, walks):
            return slept(walks + weight[None], SECONDS)

        @fdg.fragment("learner", in_axes=(None, 0), out_axes=None)
        def learn(weight, walks):
            return slept(weight + jnp.mean(walks), SECONDS)

        walks = act(state["weight"], state["walks"])
        return {"weight": learn(state["weight"], walks), "walks": walks}, {"mean": jnp.mean(walks)}


def main():
    fdg.host_devices(2)
    engines = {
        k: fdg.compile(Sleeping(), policies.SingleLearnerCoarse(staleness=k), jax.devices()[:2])
        for k in (0, 1)
    }
    bounds = {0: 2 * ITERATIONS * SECONDS, 1: (ITERATIONS + 1) * SECONDS}
    for k, seconds in timed_runs(engines, ITERATIONS, ROUNDS).items():
        median = statistics.median(seconds)
        print(f"staleness {k}: {median:.3f} s, bound {bounds[k]:.2f} s: {bounds[k] / median:.3f} of it")


if __name__ == "__main__":
    main()
