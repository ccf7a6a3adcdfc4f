"""Measures the cost of running a schedule from the host, with many short programs and transfers.

The policy is `SingleLearnerFine`. In one process on two host devices, PPO's rollout (acting and stepping, 128
times) is measured:

- the time of the host's thread for each program or transfer that it starts;
- an iteration, compared with its two programs alone: each is called equally often on its own device, on
  arrays that are ready, without a schedule or transfers.

    make bench ARGS="-k stepping -s"
"""

import concurrent.futures
import dataclasses
import multiprocessing
import statistics
import time

import jax
import jax.numpy as jnp
import pytest

import algos
import envs
import fdg
import policies
from algos.rollout import rollout
from bench.harness import Spread, in_turns, seconds, zeros_and_keys

ROUNDS, ITERATIONS = 9, 3


class ActingOnly(algos.PPO):
    """PPO that never learns."""

    def iterate(self, state):
        key, rollout_key = jax.random.split(state.key)
        env_state, observation, (_, _, time_step) = rollout(
            act=lambda observation, keys: self.act(
                state.parameters, state.observation_statistics, observation, keys
            ),
            step=self.step,
            key=rollout_key,
            env_state=state.env_state,
            observation=state.observation,
            num_steps=self.num_steps,
        )
        state = state._replace(env_state=env_state, observation=observation, key=key)
        return state, {"reward": jnp.mean(time_step.reward)}


@dataclasses.dataclass
class Figures:
    """Medians over the rounds.

    Attributes:
      host_us: CPU microseconds of the host's thread per program or transfer.
      items: number of programs and transfers per iteration.
      engine: seconds of an iteration.
      alone: seconds per iteration of each program alone.
      ratio: seconds of the programs alone, relative to those of the schedule.
    """

    host_us: float
    items: int
    engine: float
    alone: dict[str, float]
    ratio: Spread

    def __str__(self):
        alone = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in self.alone.items())
        return (
            f"host {self.host_us:.0f} us each of {self.items} programs and transfers; an iteration "
            f"{self.engine * 1e3:.1f} ms, by themselves {alone}: ratio {self.ratio:.2f}"
        )


def measure(num_envs):
    """Measures `Figures` with PPO on CartPole."""
    fdg.host_devices(2)
    algorithm = ActingOnly(env=envs.make("CartPole-v1"), num_envs=num_envs, num_steps=128, total_steps=10**9)
    engine = fdg.compile(algorithm, policies.SingleLearnerFine(), jax.devices()[:2])
    state, _ = engine.run(engine.init(0), ITERATIONS + 4)  # the engine times the first iterations
    # The rollout's programs: all others run once per iteration.
    calls = {call.name: call for call, count in engine.plan.calls() if count > 1}
    chains = {p.name: _repeated_program(p, calls[p.name]) for p in engine.programs if p.name in calls}
    num_transfers = sum(count for _, count in engine.plan.moves())
    items = num_transfers + sum(count for _, count in engine.plan.calls())
    host_seconds = []

    def schedule(_):
        nonlocal state
        thread_begun = time.thread_time()
        begun = time.perf_counter()
        state, metrics = engine.start(state, ITERATIONS)
        host_seconds.append((time.thread_time() - thread_begun) / ITERATIONS)
        jax.block_until_ready(state)
        iteration_seconds = (time.perf_counter() - begun) / ITERATIONS
        metrics.result()
        return iteration_seconds

    sides = {name: lambda _, chain=chain: seconds(chain) for name, chain in chains.items()}
    rounds = in_turns({**sides, "schedule": schedule}, ROUNDS, warm_up=0)
    iteration_seconds = rounds.pop("schedule")
    return Figures(
        statistics.median(host_seconds) / items * 1e6,
        items,
        statistics.median(iteration_seconds),
        {name: statistics.median(times) for name, times in rounds.items()},
        Spread.ratio(map(sum, zip(*rounds.values(), strict=True)), iteration_seconds),
    )


def _repeated_program(program, call):
    """A function that runs a program as often as an iteration does; its results replace donated arguments."""
    arguments = jax.tree.leaves(zeros_and_keys(program.arguments))
    free_outputs, output_of = list(range(len(call.outputs))), {}  # output_of: donated argument -> result
    for i in sorted(call.donated):
        shape_key = _shape_key(call.inputs[i])
        output_of[i] = next(j for j in free_outputs if _shape_key(call.outputs[j]) == shape_key)
        free_outputs.remove(output_of[i])

    def run():
        for _ in range(program.calls_per_iteration):
            results = program.compiled(*arguments)
            for i, j in output_of.items():
                arguments[i] = results[j]
        jax.block_until_ready(results)

    run()
    return run


def _shape_key(value):
    """What a result and a donated argument must have in common."""
    return value.shape, value.dtype, value.axis


def _measure_in_process(num_envs):
    """Measures in a new process, which needs two host devices; JAX may have started here with one."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, num_envs).result()


@pytest.mark.parametrize("num_envs", [64, 256, 1024])
def test_what_stepping_costs(num_envs, benchmark):
    figures = benchmark.pedantic(_measure_in_process, (num_envs,), rounds=1)
    print(f"\n{num_envs} environments: {figures}")
    benchmark.extra_info.update(dataclasses.asdict(figures))
    assert figures.host_us <= 60
    assert figures.ratio.median >= 0.8
