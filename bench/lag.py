"""Compares the time of pipelines of micro-batches with its lower bound; stages sleep in host callbacks.

Each of the four stages (generation, reward, reference, learning) has a device; parameters change after the
last micro-batch. With `M` micro-batches, stages of `t` seconds and lag `d` (0 to 3), an iteration takes
`(M + 3 - d) * t` seconds at best, and `4 * M * t` if stages run one after the other. The bound of a run comes
from a simulation, in which a stage begins when the stage before it is done and its device is free. Runs take
turns. On busy cores sleeps end late; longer stages (`--milliseconds 200 --iterations 3`) hide that.

    python -m bench.lag
"""

import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import fdg
import policies
from bench.harness import in_turns, parser, seconds

MICRO_BATCHES, MILLISECONDS, ITERATIONS, ROUNDS = 8, 20, 8, 7  # milliseconds of a stage of relative time 1
EQUAL = (1, 1, 1, 1)  # relative times of the stages
RATIOS = {"3:1": (3, 0, 0, 1), "1:1": (1, 0, 0, 1), "1:3": (1, 0, 0, 3)}  # generation : learning


def sleep_then_return(x, duration):
    """Returns `x` after a host callback has slept for `duration` seconds; if 0, without a callback."""

    def sleep(x):
        time.sleep(duration)
        return np.asarray(x)

    return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x) if duration else x + 0


@dataclasses.dataclass(frozen=True)
class Stages:
    """An algorithm of four stages; its metrics are the weights that the first and last micro-batch used.

    Attributes:
      times: seconds of each stage.
      parts: micro-batches of an iteration.
    """

    times: tuple[float, ...]
    parts: int = MICRO_BATCHES

    def init(self, key):
        return {"weight": jnp.float32(0), "rows": jnp.zeros((4, 2))}

    def iterate(self, state):
        respond_s, judge_s, refer_s, learn_s = self.times

        @fdg.fragment("actor", in_axes=(None, None, 0))
        def respond(weight, part, rows):
            return sleep_then_return(rows + weight + 1e-6 * part, respond_s)

        @fdg.fragment("reward")
        def judge(rows):
            return sleep_then_return(rows, judge_s)

        @fdg.fragment("reference")
        def refer(rows):
            return sleep_then_return(rows, refer_s)

        @fdg.fragment("learner", in_axes=(None, 0), out_axes=None)
        def learn(total, rows):
            # With 0 in place of 1e-6, XLA would remove the other stages.
            return sleep_then_return(total + 1 + 1e-6 * jnp.sum(rows), learn_s)

        @fdg.fragment("learner", in_axes=None, out_axes=None)
        def update(weight, total):
            return weight + total / self.parts

        def micro_batch(total, part):
            # `respond` depends on `part`, so that XLA does not hoist it out of the loop.
            rows = respond(state["weight"], part, state["rows"])
            return learn(total, refer(judge(rows))), rows[0, 0]

        total, read = jax.lax.scan(micro_batch, jnp.float32(0), jnp.arange(self.parts))
        return {**state, "weight": update(state["weight"], total)}, {"read": read[0], "last": read[-1]}


def simulate_seconds(times, parts, lag, iterations):
    """Seconds of `iterations` iterations if every stage has a device and waits only for its inputs.

    `times` has the seconds of each stage, `parts` is the number of micro-batches per iteration, `lag` is in
    micro-batches.
    """
    device_free, parameters_ready, end = [0.0] * len(times), {0: 0.0}, 0.0
    for n in range(iterations * parts):
        end = parameters_ready[max(0, (n - lag) // parts)]
        for stage, duration in enumerate(times):
            end = device_free[stage] = max(end, device_free[stage]) + duration
        if n % parts == parts - 1:
            parameters_ready[n // parts + 1] = end
    return end


def runs_of(unit_s, iterations):
    """By name of a run: seconds of its stages, lag (None: one stage after the other), and bound in seconds.

    A stage of relative time 1 takes `unit_s` seconds.
    """
    settings = {"sequential": (EQUAL, None)} | {f"lag {lag}": (EQUAL, lag) for lag in (0, 1, 2, 4, 8)}
    settings |= {f"{name}, lag {lag}": (times, lag) for name, times in RATIOS.items() for lag in (0, 1)}
    scaled = {name: (tuple(unit_s * time for time in times), lag) for name, (times, lag) in settings.items()}
    return {
        name: (times, lag, iterations * MICRO_BATCHES * sum(times) if lag is None
               else simulate_seconds(times, MICRO_BATCHES, lag, iterations))
        for name, (times, lag) in scaled.items()
    }  # fmt: skip


def main():
    command = parser("bench.lag", __doc__)
    command.add_argument("--rounds", type=int, default=ROUNDS)
    command.add_argument("--iterations", type=int, default=ITERATIONS)
    command.add_argument("--milliseconds", type=float, default=MILLISECONDS, help="time of a stage")
    args = command.parse_args()
    fdg.host_devices(4)
    runs = runs_of(args.milliseconds / 1e3, args.iterations)

    def engine_of(times, lag):
        if lag is None:
            return fdg.compile(Stages(times), policies.GPUOnly(), jax.devices()[:1])
        return fdg.compile(Stages(times), policies.Standalone(rewards=1, lag=lag), jax.devices()[:4])

    def seconds_of(_, engine):
        state = jax.block_until_ready(engine.init(0))
        return seconds(lambda: engine.run(state, args.iterations))

    sides = {
        name: functools.partial(seconds_of, engine=engine_of(times, lag))
        for name, (times, lag, _) in runs.items()
    }
    timed = in_turns(sides, args.rounds)
    for name, (times, _, bound) in runs.items():
        median, sequential = statistics.median(timed[name]), sum(times) * MICRO_BATCHES * args.iterations
        print(
            f"{name:12}  {median:.3f} s ({min(timed[name]):.3f} to {max(timed[name]):.3f}),"
            f" bound {bound / median:.3f} of that, sum of its stages {sequential / median:.2f} times that"
        )


if __name__ == "__main__":
    main()
