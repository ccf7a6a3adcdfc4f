"""Gradient clipping and learning-rate annealing of every algorithm's optimiser."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import algos
import envs
from algos import optimizers
from tests.refusing import refuses

TWO_UPDATES = {"num_epochs": 1, "num_minibatches": 2}
REPLAYED = {"num_envs": 4, "num_steps": 1, "updates_per_step": 0.5, "batch_size": 8, "learning_starts": 0}
# Settings for two updates per iteration; A2C and IMPALA have one.
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


def make(name, **fields):
    env = envs.make(ENVIRONMENTS.get(name, "CartPole-v1"))
    return algos.get(name)(env=env, **FIELDS[name], **fields)


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "sac"])
def test_gradient_clipping(name):
    """With a maximum of 1/2, gradients of norm 50 and 1/2 agree; one of norm 1/4 differs."""
    optimizer = make(name, max_grad_norm=0.5)._optimizer

    def after(*gradient):
        _, state = optimizer.update(jnp.array(gradient), optimizer.init(jnp.zeros(2)), jnp.zeros(2))
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state)])

    np.testing.assert_allclose(after(30.0, 40.0), after(0.3, 0.4), rtol=1e-5)
    assert np.abs(after(0.15, 0.2) - after(0.3, 0.4)).max() > 1e-4


@pytest.mark.parametrize("annealed", [True, False])
@pytest.mark.parametrize("name", FIELDS)
def test_learning_rate_annealing(name, annealed):
    """With annealing, the last update still moves parameters and any later one does not."""
    algorithm = make(name, anneal_learning_rate=annealed, learning_rate=0.1)
    algorithm = make(
        name,
        anneal_learning_rate=annealed,
        learning_rate=0.1,
        total_steps=2 * algorithm.steps_per_iteration + 1,  # a partial iteration is not run
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


@pytest.mark.parametrize("cls", [algos.TD3, algos.REDQ])
def test_annealing_of_delayed_updates(cls):
    """The actor's step size falls with the critics' updates: Adam's constant steps are the step size."""
    algorithm = cls(
        env=envs.make("probe:continuous"), learning_rate=0.5, anneal_learning_rate=True, policy_delay=4,
        num_envs=1, total_steps=8, learning_starts=0, updates_per_step=1.0, hidden=(1,),
    )  # fmt: skip
    learned = jax.jit(algorithm.init)(jax.random.key(0)).learned
    gradient, actors = jax.tree.map(jnp.ones_like, learned.parameters), []
    update = jax.jit(algorithm.update)
    for i in range(8):
        actors.append(jax.tree.leaves(learned.parameters.actor)[0])
        learned = update(gradient, learned, (i + 1) % 4 == 0)
    actors.append(jax.tree.leaves(learned.parameters.actor)[0])
    moves = [float(jnp.max(before - after)) for before, after in itertools.pairwise(actors)]
    np.testing.assert_allclose(moves, [0, 0, 0, 0.5 * 5 / 8, 0, 0, 0, 0.5 / 8], atol=1e-5)


@pytest.mark.parametrize("name", ["dqn", "sac", "vdn"])
def test_annealing_begins_with_learning(name):
    """The step size reaches zero with the end of the run, not later by the iterations before learning."""
    sizes = {"num_envs": 2, "num_steps": 2, "batch_size": 2, "learning_starts": 10, "total_steps": 24}
    updates = {"num_updates": 1} if name == "vdn" else {"updates_per_step": 0.5}
    env = envs.make({"sac": "probe:continuous", "vdn": "probe:agents"}.get(name, "CartPole-v1"))
    algorithm = algos.get(name)(
        env=env, hidden=(1,), learning_rate=0.5, anneal_learning_rate=True, **sizes, **updates
    )
    state, step_sizes = jax.jit(algorithm.init)(jax.random.key(0)), []
    iterate = jax.jit(algorithm.iterate)
    schedule = algos.optimizers.step_size_of(algorithm)
    for _ in range(algorithm.num_iterations):
        state = iterate(state)[0]
        counts = optax.tree_utils.tree_get_all_with_path(state.learned.optimizer_state, "count")
        step_sizes.append(float(schedule(max(int(count) for _, count in counts))))
    np.testing.assert_allclose(step_sizes[-1], 0, atol=1e-6)
    assert 0 < step_sizes[-2] < step_sizes[-3]


@pytest.mark.filterwarnings("ignore:Specifying a key:UserWarning")  # optax's noisy_sgd
@pytest.mark.parametrize("name", optimizers.NAMES)
def test_every_named_optimizer_takes_a_step(name):
    parameters, gradient = {"kernel": jnp.ones((2, 3))}, {"kernel": jnp.full((2, 3), 0.5)}
    optimizer = optimizers.user_optimizer(name, 1e-3)
    new, _ = optimizers.apply_update(optimizer, gradient, optimizer.init(parameters), parameters)
    assert np.isfinite(new["kernel"]).all()


def test_optimizer_without_schedule_names_the_fix():
    with refuses("optimizer=sm3 fails", "or anneal_learning_rate=False if it takes no schedule"):
        optimizers.user_optimizer("sm3", optax.constant_schedule(1e-3))
