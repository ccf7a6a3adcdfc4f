"""The reference of the conformance tests, plain calls of `iterate`, and the comparison of results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import algos
import envs
from tests.user_algorithm import Gardener, Walker

ITERATIONS = 5
SMALL = {"num_envs": 48, "num_steps": 4, "num_epochs": 2, "num_minibatches": 2, "hidden": (8,)}


def ppo(env, **fields):
    return algos.PPO(env=envs.make(env), **{**SMALL, **fields})


ALGORITHMS = {
    "walker 48": lambda: Walker(48),
    "walker 60": lambda: Walker(60),  # divisible by 5 devices
    "gardener": lambda: Gardener(60),
    "discrete": lambda: ppo("CartPole-v1"),
    "discrete, time shuffle": lambda: ppo("CartPole-v1", shuffle="time"),
    "continuous": lambda: ppo("Pendulum-v1", normalize_observation=True, normalize_reward=True),
}


@functools.cache
def _start(name):
    return jax.jit(ALGORITHMS[name]().init)(jax.random.key(3))


def start(name):
    """An initial state, computed without the engine; it may be donated."""
    return copied(_start(name))


@jax.jit
def copied(state):
    """A copy that may be donated."""
    return jax.tree.map(jnp.copy, state)


@functools.cache
def reference(name):
    """State and metrics in plain JAX, without graph, plan or engine."""
    return plain(ALGORITHMS[name](), start(name), ITERATIONS)


def plain(algorithm, state, iterations):
    """(state, metrics) after `iterations` calls of `iterate`."""
    try:
        iterate = iterate_of(algorithm)
    except TypeError:  # unhashable: it has arrays
        iterate = jax.jit(algorithm.iterate)
    metrics = []
    for _ in range(iterations):
        state, one = iterate(state)
        metrics.append(one)
    return state, jax.tree.map(_stacked, *metrics)


@functools.cache
def iterate_of(algorithm):
    """The jitted `iterate`, cached by algorithm."""
    return jax.jit(algorithm.iterate)


def _stacked(*values):
    stack = jnp if jax.dtypes.issubdtype(values[0].dtype, jax.dtypes.prng_key) else np
    return stack.stack(values)


def leaves(tree):
    """{path: NumPy array} of all leaves; random keys as their key data."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        is_key = jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)
        found[jax.tree_util.keystr(path)] = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    return found


def assert_same(expected, actual, tolerance=1e-5):
    """Structure, dtypes and integers are equal; floats within `tolerance` of each array's largest value."""
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    expected, actual = leaves(expected), leaves(actual)
    assert expected.keys() == actual.keys()
    for path, want in expected.items():
        have = actual[path]
        assert (want.shape, want.dtype) == (have.shape, have.dtype), path
        if np.issubdtype(want.dtype, np.floating):
            scale = max(1.0, float(np.max(np.abs(want), initial=0, where=np.isfinite(want))))
            np.testing.assert_allclose(have, want, rtol=0, atol=tolerance * scale, err_msg=path)
        else:
            np.testing.assert_array_equal(have, want, err_msg=path)
