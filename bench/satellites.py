"""Compares Ray workers that act themselves (satellites) with workers that receive actions, on this machine.

Instances of the environment sleep in each step, so that many workers can share a few cores; the actor is a
small network. For a worker's *own rate*, this process acts for one worker's rows and steps them, without a
fleet. With `--kill N`, SIGKILL ends N workers between rounds; only episodes of their rows should be lost.
With `--numpy`, workers are Gymnasium's processes on this machine, which act with NumPy; their *own rate* is
that of the sleeps alone.

    python -m bench.satellites                           # 16 workers of 4 instances
    python -m bench.satellites --workers 64 --kill 8
    python -m bench.satellites --numpy --workers 256 --rows 1 --kill 20
"""

import os
import signal
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import algos
import fdg
from bench.harness import in_turns, parser, repeated, seconds, table
from bench.rings import Sleeping
from envs import HostEnvironment, from_ray, host, running_pools, satellites
from envs.from_gymnasium import GymnasiumSource
from envs.pools import ActorInputs
from fdg import ray_cluster

_SLEEPING = "gymnasium:bench.peers.sleeping:Sleeping-v0"


def timed_rollout(env: HostEnvironment, rows: int, steps: int) -> Any:
    """A function that takes `steps` steps with all instances, and returns the seconds."""
    algorithm = algos.IMPALA(env=env, num_envs=rows, num_steps=steps, total_steps=10**9)
    state = jax.jit(algorithm.init)(jax.random.key(0))

    @jax.jit
    def roll(state: Any) -> Any:
        act = lambda observation, keys: algorithm.act(  # noqa: E731
            state.parameters, state.observation_statistics, observation, keys
        )
        env_state, observation, _ = algos.rollout.rollout(
            act,
            key=state.key,
            env_state=state.env_state,
            observation=state.observation,
            **algorithm._rollout_arguments,
        )
        return state._replace(env_state=env_state, observation=observation), None

    run = repeated(roll, state)
    seconds(run)  # compiles, here and in the workers
    return lambda _: seconds(run)


def seconds_without_fleet(source: Any, rows: int, steps: int, rounds: int) -> float:
    """Seconds of a rollout if this process acts for the rows of one worker and steps them."""
    algorithm = algos.IMPALA(env=HostEnvironment(source), num_envs=rows, total_steps=10**9)
    network = algorithm._network
    zeros = jnp.zeros((rows, *source.observation_space.shape))
    parameters = jax.jit(network.init)(jax.random.key(0), zeros)

    def act(observation: jax.Array, key_data: jax.Array) -> Any:
        action, decision = algorithm.act(parameters, None, observation, jax.random.wrap_key_data(key_data))
        return action, (action, decision)

    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), (steps, rows))))
    argument_shapes = lambda count: (zeros[:count], keys[0, :count])  # noqa: E731
    fragment, operands = satellites.trace("sleeping", act, argument_shapes, [rows])
    pool, observation = source.start(rows), np.zeros(zeros.shape, np.float32)

    def run() -> None:
        inputs = ActorInputs(operands, [keys])
        satellites.run_segment(fragment.program, pool, observation, steps, inputs, None, 60.0)

    return statistics.median([seconds(run) for _ in range(rounds + 1)][1:])


def processes(source: Any) -> list[int]:
    """The numbers of the workers' processes."""
    if isinstance(source, GymnasiumSource):
        (pool,) = [x.pool for x in running_pools.POOLS._by_number.values() if x.environment.source == source]
        return [worker.process.pid for worker in pool._workers.values()]
    workers = from_ray.fleet(source)
    places = [workers.where(i) for i in range(len(workers))]
    return [int(place.rsplit("process ", 1)[1].rstrip(")")) for place in places]


def main() -> None:
    command = parser("bench.satellites", __doc__)
    command.add_argument("--workers", type=int, default=16)
    command.add_argument("--rows", type=int, default=4, help="instances of each worker")
    command.add_argument("--steps", type=int, default=64, help="steps of a rollout")
    command.add_argument("--milliseconds", type=float, default=5.0, help="sleep of an instance's step")
    command.add_argument("--rounds", type=int, default=7)
    command.add_argument("--kill", type=int, default=0, help="workers that are killed between rounds")
    command.add_argument("--numpy", action="store_true", help="local workers with NumPy, without Ray")
    args = command.parse_args()
    rows = args.workers * args.rows
    if args.numpy:
        options = (("milliseconds", args.milliseconds),)
        sources = [GymnasiumSource(_SLEEPING, options, args.workers, (), acts) for acts in (False, True)]
        own_seconds = args.steps * args.rows * args.milliseconds / 1e3
    else:
        source = Sleeping(args.milliseconds / 1e3)
        own_seconds = seconds_without_fleet(source, args.rows, args.steps, args.rounds)
        # more CPUs than the machine has, because instances sleep
        ray_cluster.connect(local_cpus=2 * args.workers + 1)
        sources = [from_ray.FleetSource(source, args.workers, 1.0, acts) for acts in (False, True)]
    sides = {
        name: timed_rollout(HostEnvironment(source, restarts=args.kill), rows, args.steps)
        for name, source in zip(("workers are sent actions", "satellites"), sources, strict=True)
    }
    medians = {name: statistics.median(times) for name, times in in_turns(sides, args.rounds).items()}
    cells = [
        (
            name,
            f"{rows * args.steps / median:.0f}",
            f"{own_seconds / median:.2f}",
            f"{1e3 * (median - own_seconds):.1f}",
        )
        for name, median in medians.items()
    ]
    print(table(("side", "steps/s", "of the workers' own rate", "ms more per rollout"), cells))
    if args.kill:
        for process in processes(sources[1])[: args.kill]:
            os.kill(process, signal.SIGKILL)
        before = host.losses()
        sides["satellites"](0)
        lost = host.losses()
        failures, episodes = lost.failures - before.failures, lost.episodes - before.episodes
        print(f"killed {args.kill}: {failures} failures, {episodes} of {rows} episodes lost")
    host.close()


if __name__ == "__main__":
    fdg.keep_programs()
    main()
