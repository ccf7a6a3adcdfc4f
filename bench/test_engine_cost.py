"""Measures the cost of the engine: compares `Engine.run` with the same PPO as a plain `jax.jit` function.

The plain PPO runs the same functions without fragments. A second benchmark compares the engine, whose number
of iterations is an argument, with a scan of a fixed length. The two sides take turns in one process; the
result is the median of the ratios, because the machine's speed drifts.
"""

import dataclasses
import functools

import jax
import pytest
from jax.extend import core

import algos
import envs
import fdg
import policies
from bench.harness import Spread, repeated, timed_in_turns

PAIRS = 15  # calls of each side
SIZES = {
    "CleanRL's: 4 envs x 128 steps": {"num_envs": 4, "num_steps": 128, "iterations": 60},
    "1,024 envs x 32 steps": {"num_envs": 1024, "num_steps": 32, "iterations": 4},
}


class PPOWithoutFragments(algos.PPO):
    """PPO with the plain functions that `fdg.fragment` wraps."""

    act, step, learn, gradient, update = (
        getattr(algos.PPO, name).__wrapped__ for name in ("act", "step", "learn", "gradient", "update")
    )


def train_with_scan(algorithm, iterations):
    """A jitted `state -> (state, metrics)`, which scans `iterate`."""

    def train(state):
        return jax.lax.scan(lambda state, _: algorithm.iterate(state), state, None, length=iterations)

    return jax.jit(train, donate_argnums=0)


def train_with_fixed_length(algorithm, iterations):
    """The engine's loop with a fixed number of iterations."""
    graph = fdg.trace(algorithm)
    iterate, count = core.jaxpr_as_fun(graph.jaxpr), len(graph.state_axes)

    def train(state):
        def iteration(leaves, _):
            results = iterate(*leaves)
            return list(results[:count]), list(results[count:])

        leaves, metrics = jax.lax.scan(iteration, jax.tree.leaves(state), None, length=iterations)
        return jax.tree.unflatten(jax.tree.structure(graph.state), leaves), metrics

    return jax.jit(train, donate_argnums=0)


def ppo(size):
    """PPO of a size, and the number of iterations per call."""
    fields = dict(SIZES[size])
    iterations = fields.pop("iterations")
    return algos.PPO(env=envs.make("CartPole-v1"), total_steps=10**9, **fields), iterations


def measure_ratio(name, train, size, benchmark, plain=None):
    """The median ratio of the engine's steps/s to those of another loop over the algorithm.

    Args:
      name: the other loop's name.
      train: makes the other loop, from an algorithm and a number of iterations.
      size: a key of `SIZES`.
      benchmark: the fixture of pytest-benchmark.
      plain: the algorithm of the other loop; None: the engine's.
    """
    algorithm, iterations = ppo(size)
    other_algorithm = plain or algorithm
    engine = fdg.compile(algorithm, policies.GPUOnly(), jax.devices()[:1])
    engine_call = repeated(functools.partial(engine.run, iterations=iterations), engine.init(0))
    other_call = repeated(
        train(other_algorithm, iterations), jax.jit(other_algorithm.init)(jax.random.key(0))
    )
    seconds = timed_in_turns({"engine": engine_call, name: other_call}, PAIRS)
    ratio = Spread.ratio(seconds[name], seconds["engine"])
    benchmark.extra_info.update(ratio.figures)
    benchmark.pedantic(lambda: jax.block_until_ready(engine_call()), rounds=3)
    steps = iterations * algorithm.steps_per_iteration
    speeds = (f"{side} {steps / Spread.of(times).median:,.0f} steps/s" for side, times in seconds.items())
    print(f"\n{size}: {', '.join(speeds)}; engine/{name} {ratio:.3f}, {PAIRS} pairs")
    return ratio.median


@pytest.mark.parametrize("size", SIZES)
def test_engine_against_plain_jit(size, benchmark):
    algorithm, _ = ppo(size)
    plain = PPOWithoutFragments(**{f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)})
    assert "fdg" not in str(jax.make_jaxpr(plain.iterate)(jax.eval_shape(plain.init, jax.random.key(0))))
    assert measure_ratio("plain", train_with_scan, size, benchmark, plain) >= 0.98


@pytest.mark.parametrize("size", SIZES)
def test_any_number_of_iterations_against_a_fixed_one(size, benchmark):
    assert measure_ratio("fixed", train_with_fixed_length, size, benchmark) >= 0.99
