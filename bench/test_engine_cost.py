"""What the engine costs: `Engine.run` against the same PPO as one plain `jax.jit` function.

The plain PPO runs the very same functions with their fragment marks taken off, so that nothing of `fdg`
is left in it. Besides, what it costs that the number of iterations is an argument of the executable: the
engine against the same iteration in a scan of that length. Two alternate, in one process; what counts is the
ratio of each pair, and its median over the pairs, since the machine's speed drifts. A whole-process
comparison would measure imports.
"""

import dataclasses
import functools
import statistics
import time

import jax
import pytest
from jax.extend import core

import algos
import envs
import fdg
import policies

PAIRS = 15
SIZES = {
    "CleanRL's: 4 envs x 128 steps": {"num_envs": 4, "num_steps": 128, "iterations": 60},
    "1,024 envs x 32 steps": {"num_envs": 1024, "num_steps": 32, "iterations": 4},
}


class Plain(algos.PPO):
    """PPO without fragments: its functions as they were before `fdg.fragment` marked them."""

    act, step, learn, gradient, update = (
        getattr(algos.PPO, name).__wrapped__ for name in ("act", "step", "learn", "gradient", "update")
    )


def plain_train(algorithm, iterations):
    def train(state):
        return jax.lax.scan(lambda state, _: algorithm.iterate(state), state, None, length=iterations)

    return jax.jit(train, donate_argnums=0)


def static_train(algorithm, iterations):
    """The loop that the engine runs, of a length written into the program: another one for each length."""
    graph = fdg.trace(algorithm)
    iterate, count = core.jaxpr_as_fun(graph.jaxpr), len(graph.state_axes)

    def train(state):
        def one(leaves, _):
            results = iterate(*leaves)
            return list(results[:count]), list(results[count:])

        leaves, metrics = jax.lax.scan(one, jax.tree.leaves(state), None, length=iterations)
        return jax.tree.unflatten(jax.tree.structure(graph.state), leaves), metrics

    return jax.jit(train, donate_argnums=0)


def paired(first, second, pairs=PAIRS):
    """Seconds of each, alternating which goes first; each is a call that returns arrays to wait for."""
    seconds = {first: [], second: []}
    for pair in range(pairs):
        for call in (first, second) if pair % 2 else (second, first):
            begun = time.perf_counter()
            jax.block_until_ready(call())
            seconds[call].append(time.perf_counter() - begun)
    return seconds[first], seconds[second]


def running(step, state):
    """A call that goes on from where the last one stopped: states are donated."""
    holder = [state]

    def call():
        holder[0], metrics = step(holder[0])
        return metrics

    return call


def ppo(size):
    """PPO at a size, and how many iterations a call does."""
    fields = dict(SIZES[size])
    iterations = fields.pop("iterations")
    return algos.PPO(env=envs.make("CartPole-v1"), total_steps=10**9, **fields), iterations


def engine_of(algorithm, iterations):
    """A call of the engine's `run`."""
    engine = fdg.compile(algorithm, policies.GPUOnly(), jax.devices()[:1])
    return running(functools.partial(engine.run, iterations=iterations), engine.init(0))


def speed(ours, theirs, name, size, benchmark):
    """Steps/s of the engine by those of something else, in pairs: the median."""
    algorithm, iterations = ppo(size)
    for call in (ours, theirs):
        jax.block_until_ready(call())  # compiles
    our_seconds, their_seconds = paired(ours, theirs)
    ratios = sorted(t / o for o, t in zip(our_seconds, their_seconds, strict=True))
    steps = iterations * algorithm.steps_per_iteration
    ratio = statistics.median(ratios)
    benchmark.extra_info.update(ratio=ratio, lowest=ratios[0], highest=ratios[-1])
    benchmark.pedantic(lambda: jax.block_until_ready(ours()), rounds=3)
    print(
        f"\n{size}: engine {steps / statistics.median(our_seconds):,.0f} steps/s, {name} "
        f"{steps / statistics.median(their_seconds):,.0f}; engine/{name} {ratio:.3f} "
        f"(middle half {ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}, {PAIRS} pairs)"
    )
    return ratio


@pytest.mark.parametrize("size", SIZES)
def test_engine_against_plain_jit(size, benchmark):
    algorithm, iterations = ppo(size)
    plain = Plain(**{f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)})
    assert "fdg" not in str(jax.make_jaxpr(plain.iterate)(jax.eval_shape(plain.init, jax.random.key(0))))
    theirs = running(plain_train(plain, iterations), jax.jit(plain.init)(jax.random.key(0)))
    assert speed(engine_of(algorithm, iterations), theirs, "plain", size, benchmark) >= 0.98


@pytest.mark.parametrize("size", SIZES)
def test_any_number_of_iterations_against_a_fixed_one(size, benchmark):
    """What one executable for all numbers of iterations costs."""
    algorithm, iterations = ppo(size)
    theirs = running(static_train(algorithm, iterations), jax.jit(algorithm.init)(jax.random.key(0)))
    assert speed(engine_of(algorithm, iterations), theirs, "fixed", size, benchmark) >= 0.99
