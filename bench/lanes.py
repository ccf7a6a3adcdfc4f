"""Two groups of stubs that sleep in a function on the host: how near lanes come to their overlap's bound.

With parameters of one iteration ago acting and learning do not wait for each other, so n iterations of two
stubs of s seconds take at least (n + 1) s; one after the other they take 2 n s. One call of `run` each.

    python -m bench.lanes
"""

import dataclasses
import statistics

import jax
import jax.numpy as jnp

import fdg
import policies
from bench.harness import in_turns, seconds
from bench.lag import slept

ROUNDS, ITERATIONS, SECONDS = 7, 20, 0.05


@dataclasses.dataclass(frozen=True)
class Stubs:
    """Acting and learning that sleep."""

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
        k: fdg.compile(Stubs(), policies.SingleLearnerCoarse(staleness=k), jax.devices()[:2]) for k in (0, 1)
    }
    bounds = {0: 2 * ITERATIONS * SECONDS, 1: (ITERATIONS + 1) * SECONDS}

    def run(engine):
        state = jax.block_until_ready(engine.init(0))
        return seconds(lambda: engine.run(state, ITERATIONS))

    sides = {k: lambda _, engine=engine: run(engine) for k, engine in engines.items()}
    for k, each in in_turns(sides, ROUNDS).items():
        median = statistics.median(each)
        print(f"staleness {k}: {median:.3f} s, bound {bounds[k]:.2f} s: {bounds[k] / median:.3f} of it")


if __name__ == "__main__":
    main()
