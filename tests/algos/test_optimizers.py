"""What every algorithm's optimiser does with a gradient that is too long, and at the end of a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs

TWO_UPDATES = {"num_epochs": 1, "num_minibatches": 2}
REPLAYED = {"num_envs": 4, "num_steps": 1, "updates_per_step": 0.5, "batch_size": 8, "learning_starts": 0}
# What makes two updates an iteration; A2C and IMPALA make one.
FIELDS = {
    "ppo": TWO_UPDATES,
    "recurrent_ppo": TWO_UPDATES,
    "ippo": TWO_UPDATES,
    "pqn": TWO_UPDATES,
    "a2c": {},
    "impala": {},
    "a3c": {"num_workers": 2},
    "dqn": REPLAYED,
    "sac": REPLAYED,
}
ENVIRONMENTS = {"sac": "probe:continuous", "ippo": "probe:agents"}


def made(name, **fields):
    env = envs.make(ENVIRONMENTS.get(name, "CartPole-v1"))
    return algos.get(name)(env=env, **FIELDS[name], **fields)


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "sac"])
def test_gradients_are_clipped_to_the_norm_asked_for(name):
    """A norm of 50 counts as one of 1/2, which counts as it is; one of 1/4 is another."""
    optimizer = made(name, max_grad_norm=0.5)._optimizer

    def after(*gradient):
        _, state = optimizer.update(jnp.array(gradient), optimizer.init(jnp.zeros(2)), jnp.zeros(2))
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state)])

    np.testing.assert_allclose(after(30.0, 40.0), after(0.3, 0.4), rtol=1e-5)
    assert np.abs(after(0.15, 0.2) - after(0.3, 0.4)).max() > 1e-4


@pytest.mark.parametrize("annealed", [True, False])
@pytest.mark.parametrize("name", FIELDS)
def test_the_step_size_falls_to_zero_over_the_run_where_it_is_told_to(name, annealed):
    """The last update of the last iteration moves parameters, those of one iteration more would not."""
    algorithm = made(name, anneal_learning_rate=annealed, learning_rate=0.1)
    algorithm = made(
        name,
        anneal_learning_rate=annealed,
        learning_rate=0.1,
        total_steps=2 * algorithm.steps_per_iteration + 1,  # what does not fill an iteration is not run
    )
    count = 2 * algorithm.updates_per_iteration
    assert algorithm.num_iterations == 2 and count == (2 if name in ("a2c", "impala") else 4)

    @jax.jit
    def update(parameters, state):
        return algorithm._one_update(jnp.ones(2), state, parameters)

    parameters, moves = jnp.zeros(2), []
    state = algorithm._optimizer.init(parameters)
    for _ in range(count + algorithm.updates_per_iteration + 1):
        before = parameters
        parameters, state = update(parameters, state)
        moves.append(float(jnp.abs(parameters - before).max()))
    assert min(moves[:count]) > 0
    assert [move == 0 for move in moves[count:]] == [annealed] * len(moves[count:])
