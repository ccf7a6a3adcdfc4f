"""The probe environments that a feed-forward actor-critic solves, and what solving each of them means."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs

# Probe: what differs from the algorithm's own settings, then observations and the values that they have.
VALUES = {
    "probe:value": ({}, [1.0], [1.0]),
    "probe:value_of_observation": ({}, [-1.0, 1.0], [-1.0, 1.0]),
    "probe:discount": ({"discount": 0.5}, [0.0, 1.0], [0.5, 1.0]),
    # Never terminates: 1 / (1 - discount), though the time limit cuts every 10 steps. Taken for a
    # termination, that would leave at most (1 - 0.8**10) / 0.2 = 4.5, and less on average.
    "probe:truncation": ({"discount": 0.8}, [1.0], [5.0]),
}
POLICIES = {
    "probe:policy": {},
    "probe:policy_of_observation": {},
    "probe:multi_discrete": {},
    "probe:masked": {},
    "probe:continuous": {"entropy_coefficient": 0.0, "initial_log_std": -1.0},
}
NAMES = [*VALUES, *POLICIES]


def trained(algorithm, iterations):
    """The state after so many iterations, in one program."""

    @jax.jit
    def run(key):
        return jax.lax.scan(
            lambda state, _: algorithm.iterate(state), algorithm.init(key), length=iterations
        )[0]

    return run(jax.random.key(0))


def assert_solves(kind, name, iterations, **fields):
    """An algorithm of this class (or function that makes one) solves the probe within so many iterations."""
    env = envs.make(name)
    changes, observations, values = VALUES.get(name) or (POLICIES[name], (), ())
    algorithm = kind(env=env, **{**fields, **changes})
    state = trained(algorithm, iterations)
    if values:
        _, actual = algorithm._policy(state.parameters, jnp.asarray(observations)[:, None])
        np.testing.assert_allclose(actual, values, atol=0.05, rtol=0.05)
    else:
        score = jax.jit(algorithm.evaluate, static_argnums=2)(state, jax.random.key(1), 64)["return"]
        assert float(score) == pytest.approx(env.single.optimal_return, abs=0.05)
