"""A3C: its schedule against a plain loop, and A2C as the special case of one worker.

The loss is A2C's (by hand in `test_a2c.py`). The schedule is the asynchronous update at the end of each
pass of the loop in algorithm S3 of Mnih et al. 2016 (arXiv 1602.01783); the workers take turns.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import algos
import envs


def small(**fields):
    fields = {"num_envs": 6, "num_workers": 3, "num_steps": 5, "hidden": (4,), **fields}
    return algos.A3C(env=envs.make("CartPole-v1", max_steps_in_episode=8), **fields)


def recorded(algorithm, state):
    """The state after one iteration, and the arguments of `learn`."""

    return recording_iterate(algorithm)(state)


@functools.cache
def recording_iterate(algorithm):
    class Recording(algos.A3C):
        def learn(self, *arguments):
            record.append(arguments)
            return algorithm.learn(*arguments)

    recording, record = Recording(**vars(algorithm)), []

    @jax.jit
    def iterate(state):
        return recording.iterate(state)[0], record.pop()

    return iterate


def assert_close(expected, actual):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), expected, actual)


def test_gradients_are_applied_sequentially():
    """Two iterations against a loop over workers that uses only A2C's gradient and the optimiser.

    In the second iteration the three workers compute gradients with different parameters.
    """
    algorithm = small()
    gradient = jax.jit(algos.A2C(env=algorithm.env, num_envs=2, num_steps=5, hidden=(4,)).gradient)
    update = jax.jit(algorithm._one_update)
    state = jax.jit(algorithm.init)(jax.random.key(1))
    workers = [state.parameters] * 3
    for _ in range(2):
        state, ((parameters, optimizer_state, *_), own, _, trajectory) = recorded(algorithm, state)
        for w in range(3):
            assert_close(workers[w], jax.tree.map(lambda x, w=w: x[w], own))
            one, _ = gradient(workers[w], jax.tree.map(lambda x, w=w: x[:, w], trajectory))
            parameters, optimizer_state = update(one, optimizer_state, parameters)
            workers[w] = parameters
        assert_close((parameters, optimizer_state), (state.parameters, state.optimizer_state))
        assert_close(jax.tree.map(lambda *w: jnp.stack(w), *workers), state.worker_parameters)
    # A worker's parameters exclude the gradients of later workers.
    assert float(optax.tree.norm(optax.tree.sub(workers[0], workers[2]))) > 1e-4


def test_workers_act_with_their_parameters():
    """Only the bias of worker 1 favours action 1 (push right)."""
    algorithm = small()
    state = jax.jit(algorithm.init)(jax.random.key(0))
    head = state.worker_parameters["actor"]["head"]
    head["bias"] = head["bias"].at[1].add(jnp.array([-20.0, 20.0])).at[2].add(jnp.array([20.0, -20.0]))
    observation = jnp.zeros((3, 64, 4))
    wide = small(num_envs=192)
    action, _ = wide.act(state.worker_parameters, None, observation, jax.random.split(jax.random.key(0), 3))
    assert jnp.mean(action, axis=1)[1:].tolist() == [1.0, 0.0]
    assert 0.2 < float(jnp.mean(action[0])) < 0.8
