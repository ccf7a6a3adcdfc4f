"""Stages that sleep: how near streams and lags in micro-batches come to what a pipeline can do.

Each micro-batch is generated, judged, scored by a reference and learned from, by stubs that sleep in a
function on the host, each on a device of its own; parameters change after the last micro-batch. With `M`
micro-batches, stages of `s` seconds and lag `d` (0 to 3), an iteration takes `(M + 3 - d) s` at best, and
`4 M s` one after the other. Each run is compared with a simulation of all of it, in which a stage begins when
the one before it and its device are done. One call of `run` each, in turns. Cores that have other work wake a
stage up late; longer stages (`--milliseconds 200 --iterations 3`) show how the rest overlaps there.

    python -m bench.lag
"""

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import fdg
import policies
from bench.harness import in_turns, parser, seconds

PARTS, MILLISECONDS, ITERATIONS, ROUNDS = 8, 20, 8, 7
EQUAL = (1, 1, 1, 1)  # times of the stages
RATIOS = {"3:1": (3, 0, 0, 1), "1:1": (1, 0, 0, 1), "1:3": (1, 0, 0, 3)}  # generating and training


def slept(x, count):
    """`x`, after that many seconds in a function on the host; 0 calls none."""

    def sleep(x):
        time.sleep(count)
        return np.asarray(x)

    return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x) if count else x + 0


@dataclasses.dataclass(frozen=True)
class Stages:
    """Four stages of a micro-batch.

    Attributes:
      times: seconds of each; one of none calls nothing.
      parts: micro-batches of an iteration.
    """

    times: tuple[float, ...]
    parts: int = PARTS

    def init(self, key):
        return {"weight": jnp.float32(0), "rows": jnp.zeros((4, 2))}

    def iterate(self, state):
        respond_s, judge_s, refer_s, learn_s = self.times

        @fdg.fragment("actor", in_axes=(None, None, 0))
        def respond(weight, part, rows):
            return slept(rows + weight + 1e-6 * part, respond_s)

        @fdg.fragment("reward")
        def judge(rows):
            return slept(rows, judge_s)

        @fdg.fragment("reference")
        def refer(rows):
            return slept(rows, refer_s)

        @fdg.fragment("learner", in_axes=(None, 0), out_axes=None)
        def learn(total, rows):
            return slept(total + 1 + 1e-6 * jnp.sum(rows), learn_s)  # by zero, stages would be left out

        @fdg.fragment("learner", in_axes=None, out_axes=None)
        def update(weight, total):
            return weight + total / self.parts

        def one(total, part):
            rows = respond(state["weight"], part, state["rows"])  # of its own, so that no loop moves it out
            return learn(total, refer(judge(rows))), rows[0, 0]

        total, read = jax.lax.scan(one, jnp.float32(0), jnp.arange(self.parts))
        return {**state, "weight": update(state["weight"], total)}, {"read": read[0], "last": read[-1]}


def simulated(times, parts, lag, iterations):
    """Seconds of some iterations; stages of one device each, none that waits for more than it reads."""
    free, made, ends = [0.0] * len(times), {0: 0.0}, 0.0
    for n in range(iterations * parts):
        ready = made[max(0, (n - lag) // parts)]
        for stage, count in enumerate(times):
            ready = free[stage] = max(ready, free[stage]) + count
        ends = ready
        if n % parts == parts - 1:
            made[n // parts + 1] = ends
    return ends


def sides(unit, iterations):
    """By name: seconds of the stages, the lag (None: one after the other), and of the whole run at best."""
    settings = {"sequential": (EQUAL, None)} | {f"lag {lag}": (EQUAL, lag) for lag in (0, 1, 2, 4, 8)}
    settings |= {f"{name}, lag {lag}": (times, lag) for name, times in RATIOS.items() for lag in (0, 1)}
    scaled = {name: (tuple(unit * one for one in times), lag) for name, (times, lag) in settings.items()}
    return {
        name: (times, lag, iterations * PARTS * sum(times) if lag is None
               else simulated(times, PARTS, lag, iterations))
        for name, (times, lag) in scaled.items()
    }  # fmt: skip


def main():
    """Prints a line for each side."""
    line = parser("bench.lag", __doc__)
    line.add_argument("--rounds", type=int, default=ROUNDS)
    line.add_argument("--iterations", type=int, default=ITERATIONS)
    line.add_argument("--milliseconds", type=float, default=MILLISECONDS, help="of a stage")
    args = line.parse_args()
    fdg.host_devices(4)
    wanted = sides(args.milliseconds / 1e3, args.iterations)

    def engine_of(times, lag):
        if lag is None:
            return fdg.compile(Stages(times), policies.GPUOnly(), jax.devices()[:1])
        return fdg.compile(Stages(times), policies.Standalone(rewards=1, lag=lag), jax.devices()[:4])

    def run(engine):
        state = jax.block_until_ready(engine.init(0))
        return seconds(lambda: engine.run(state, args.iterations))

    engines = {name: engine_of(times, lag) for name, (times, lag, _) in wanted.items()}
    timed = in_turns({name: lambda _, one=one: run(one) for name, one in engines.items()}, args.rounds)
    for name, (times, _, bound) in wanted.items():
        median, apart = statistics.median(timed[name]), sum(times) * PARTS * args.iterations
        print(
            f"{name:12}  {median:.3f} s ({min(timed[name]):.3f} to {max(timed[name]):.3f}),"
            f" {bound / median:.3f} of its bound, {apart / median:.2f} times the sum of its stages"
        )


if __name__ == "__main__":
    main()
