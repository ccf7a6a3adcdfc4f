"""Networks, memories and observations in parts under every policy, against plain calls of `iterate`.

`python -m bench.network_conformance [WORD ...]`: those whose name has one of the words; all take an hour.
What the test suite runs of this is in `tests/conformance/`.
"""

import functools
import sys
import time

import flax.linen as nn
import jax
from flax import nnx

import algos
import envs
import fdg
from fdg.running.host_devices import make_host_devices
from tests.conformance.comparison import ITERATIONS, assert_same, copied, plain

TINY = {"num_envs": 8, "num_steps": 4, "num_epochs": 1, "num_minibatches": 2}
MEMORY = {**TINY, "memory_size": 4, "memory_heads": 2, "memory_window": 3, "sequence_length": 2, "burn_in": 1}


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x), nn.Dense(1)(x)[:, 0]


class Nnx(nnx.Module):
    def __init__(self, *, rngs):
        self.policy, self.value = nnx.Linear(4, 2, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.policy(x), self.value(x)[:, 0]


def equinox_network():
    import equinox

    class Equinox(equinox.Module):
        both: equinox.nn.Linear

        def __init__(self, *, key):
            self.both = equinox.nn.Linear(4, 3, key=key)

        def __call__(self, x):
            y = self.both(x)
            return y[:2], y[2]

    return Equinox


def cases():
    cartpole, parts = envs.make("CartPole-v1"), functools.partial(envs.make, "probe:parts")
    for kind in ("gru", "lstm", "mingru", "transformer"):
        yield f"recurrent_ppo {kind}", algos.RecurrentPPO(env=parts(length=3), memory=kind, **MEMORY)
        yield f"mappo unlike {kind}", algos.MAPPO(env=envs.make("probe:unlike"), memory=kind, **MEMORY)
    for name, network in (("linen", Linen()), ("nnx", Nnx), ("equinox", equinox_network())):
        yield f"ppo {name}", algos.PPO(env=cartpole, network=network, **TINY)
    yield "ppo parts", algos.PPO(env=parts(), hidden=(8,), normalize_observation=True, **TINY)
    replay = {"num_envs": 8, "batch_size": 16, "buffer_size": 64, "hidden": (8,)}
    yield (
        "dqn parts",
        algos.DQN(env=parts(), num_steps=2, updates_per_step=0.125, learning_starts=32, **replay),
    )
    yield "pqn parts", algos.PQN(env=parts(), hidden=(8,), **TINY)
    yield (
        "sac parts",
        algos.SAC(env=parts(continuous=True), updates_per_step=0.25, learning_starts=16, **replay),
    )
    for algorithm in (algos.A2C, algos.A3C, algos.IMPALA):
        yield (
            f"{algorithm.__name__.lower()} parts",
            algorithm(env=parts(), num_envs=8, num_steps=4, hidden=(8,)),
        )


def main(words):
    make_host_devices(8)
    from tests.conformance.test_algorithms import SETUPS

    failed = 0
    for name, algorithm in cases():
        if words and not any(word in name for word in words):
            continue
        state = jax.jit(algorithm.init)(jax.random.key(3))
        expected = plain(algorithm, copied(state), ITERATIONS)
        for setup, (policy, count) in SETUPS.items():
            began = time.perf_counter()
            try:
                engine = fdg.compile(algorithm, policy, jax.devices()[:count])
                assert_same(expected, engine.run(copied(state), ITERATIONS))
                verdict = "same" if not engine.unexplained() else f"unexplained: {engine.unexplained()}"
            except AssertionError as error:
                verdict, failed = f"DIFFERS: {str(error).strip().splitlines()[-1]}", failed + 1
            print(f"{name:28} {setup:24} {verdict} ({time.perf_counter() - began:.0f} s)", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
