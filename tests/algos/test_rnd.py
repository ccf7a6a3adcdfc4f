"""Random network distillation: novelty, non-episodic returns, advantages, the loss and the bonus by hand.

Burda et al. 2018 (arXiv 1810.12894): the error of equation 1 and algorithm 1; section 2.3 for returns
across episodes; section 2.4 for the normalisation of observations and rewards.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos import normalize, rnd
from algos.rnd import Distillation
from algos.values import Layers
from envs import TimeStep

SPACE = envs.Box(-1.0, 1.0, (2,))
T, B = 4, 3


@functools.cache
def rollout(seed):
    """A time step `[T, B]` with random observations and terminations."""
    keys = jax.random.split(jax.random.key(seed), 3)
    zero = jnp.zeros((T, B))
    return TimeStep(
        observation=None, reward=zero, terminated=jax.random.bernoulli(keys[0], 0.3, (T, B)),
        truncated=zero > 0, final_observation=jax.random.uniform(keys[1], (T, B, 2)), episode_return=zero,
        episode_length=zero.astype(jnp.int32),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def evaluate(distillation, step, running):
    """Results of `evaluate_rollout`, values, loss with gradient, predicted and target features."""
    obs = jax.random.uniform(jax.random.key(1), (T, B, 2))
    parameters, state, _ = distillation.begin(jax.random.key(0), (), obs[0])
    found = distillation.evaluate_rollout(parameters, state, running, (obs, obs[0]), step, jax.random.key(2))
    rows = jax.tree.map(lambda x: x.reshape(T * B, *x.shape[2:]), found[1])
    value = distillation._value.apply(parameters.value, obs.reshape(T * B, 2)).reshape(T, B)
    loss = jax.value_and_grad(distillation.loss, has_aux=True)(parameters, rows, obs.reshape(T * B, 2), 0.5)
    predicted = distillation._predictor.apply(parameters.predictor, rows.observation)
    target = distillation._target.apply(state.target, rows.observation)
    return found, value, loss, (predicted.reshape(T, B, 3), target.reshape(T, B, 3))


@pytest.fixture(scope="module")
def distillation():
    return Distillation(SPACE, Layers((4,)), 3, discount=0.5, lambda_=0.5, share=1.0)


def test_initial_weights(distillation):
    """Orthogonal initialisation: gain sqrt(2) for target and predictor, 1 for the value network."""
    for network, gain in (
        (distillation._target, 2.0),
        (distillation._predictor, 2.0),
        (distillation._value, 1.0),
    ):
        kernels = [
            x for x in jax.tree.leaves(network.init(jax.random.key(0), jnp.zeros((1, 2)))) if x.ndim == 2
        ]
        product = kernels[-1].T @ kernels[-1]
        np.testing.assert_allclose(product, gain * np.eye(len(product)), atol=1e-5)


def test_novelty_by_hand(distillation):
    """Scaled prediction errors, returns that ignore the end of episodes, and advantages in NumPy."""
    step, before = rollout(0), jnp.array([0.0, 1.0, 2.0])
    found, value, ((loss, parts), _), (predicted, target) = evaluate(distillation, step, before)
    advantage, samples, state, running, metrics = found
    # Observations are normalised by this rollout's statistics and clipped to five deviations.
    obs = step.final_observation
    statistics = normalize.update(normalize.init((2,)), obs)
    np.testing.assert_allclose(
        samples.observation, np.clip(normalize.normalize(statistics, obs), -5, 5), rtol=1e-5
    )
    np.testing.assert_allclose(samples.target_features, target, rtol=1e-5)
    novelty = np.mean(np.square(predicted - target), axis=-1)
    assert float(metrics["novelty"]) == pytest.approx(novelty.mean(), rel=1e-5)
    returns, carry = [], np.asarray(before)
    for row in novelty:
        carry = 0.5 * carry + row
        returns.append(carry)
    np.testing.assert_allclose(running, carry, rtol=1e-5)
    assert float(state.return_statistics.var) == pytest.approx(np.var(returns), rel=1e-4)
    reward = novelty / np.std(returns)
    after = np.concatenate([value[1:], value[:1]])  # the last step's next observation is the first one
    expected = np.zeros((T + 1, B))
    for t in reversed(range(T)):
        expected[t] = reward[t] + 0.5 * after[t] - value[t] + 0.25 * expected[t + 1]
    np.testing.assert_allclose(advantage, expected[:T], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(samples.value_target, expected[:T] + value, rtol=1e-4, atol=1e-5)
    # The loss: half the squared error of the value, and the error of the predictor.
    assert float(parts["predictor_loss"]) == pytest.approx(novelty.mean(), rel=1e-5)
    assert float(loss) == pytest.approx(novelty.mean() + 0.25 * np.mean(np.square(expected[:T])), rel=1e-4)


@pytest.mark.parametrize("agents", [0, 2])
def test_bonus_by_hand(agents):
    """The bonus is half the scaled error; then one step of Adam: the learning rate against the sign."""
    env = envs.make("probe:agents" if agents else "probe:continuous")
    algorithm = (algos.VDN if agents else algos.SAC)(env=env, num_envs=B, hidden=(4,), rnd=True, batch_size=B)
    bonus, distillation = rnd.bonus(algorithm, jax.random.key(0)), algorithm.novelty.of(algorithm)
    size = env.observation_space.shape[0]
    axes = (agents,) if agents else ()
    state = bonus.init(jnp.zeros((B, *axes, size)))
    assert state.running.shape == (B, *axes)
    obs = jax.random.uniform(jax.random.key(1), (T, B, *axes, size))
    step = rollout(0)._replace(final_observation=obs, reward=jnp.zeros((T, B, *axes)))
    after, reward = jax.jit(bonus.apply)(state, step)

    normalized = np.clip(normalize.normalize(normalize.update(normalize.init((size,)), obs), obs), -5, 5)
    predicted = distillation._predictor.apply(state.predictor, normalized.reshape(-1, size))
    target = distillation._target.apply(state.known.target, normalized.reshape(-1, size))
    novelty = np.mean(np.square(predicted - target), axis=-1).reshape(obs.shape[:-1])
    returns, carry = [], 0.0
    for row in novelty:
        carry = 0.99 * carry + row
        returns.append(carry)
    np.testing.assert_allclose(reward, 0.5 * novelty / np.std(returns), rtol=1e-4)
    np.testing.assert_allclose(after.running, carry, rtol=1e-4)
    slope = jax.jit(jax.grad(lambda p: distillation.predictor_loss(
        p, jnp.asarray(normalized).reshape(-1, size), target, jnp.ones(novelty.size, bool)
    )))(state.predictor)  # fmt: skip
    for old, now, grad in zip(*map(jax.tree.leaves, (state.predictor, after.predictor, slope)), strict=True):
        large = np.abs(grad) > 1e-4
        expected = -algorithm.learning_rate * np.sign(grad)
        np.testing.assert_allclose((now - old)[large], expected[large], rtol=1e-2)


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.25, 4)])
def test_predictor_share(share, count):
    """The predictor's loss is the mean over that share; without samples, loss and gradient are 0."""
    distillation = Distillation(SPACE, Layers((4,)), 3, 0.5, 0.5, share)
    (_, samples, *_), _, ((_, parts), slope), (predicted, target) = evaluate(
        distillation, rollout(0), jnp.zeros(B)
    )
    trains = np.asarray(samples.trains)
    assert trains.sum() == count
    error = np.mean(np.square(predicted - target), axis=-1)[trains]
    assert float(parts["predictor_loss"]) == pytest.approx(error.mean() if count else 0.0, rel=1e-5)
    assert any(np.any(x) for x in jax.tree.leaves(slope.predictor)) == (count > 0)


@pytest.mark.parametrize("kind", [algos.DQN, algos.SAC, algos.A2C, algos.RecurrentPPO, algos.VDN])
def test_network_keys_are_unique(kind):
    """No key that an iteration splits off equals a key of the RND networks."""
    env = envs.make({algos.SAC: "probe:continuous", algos.VDN: "probe:agents"}.get(kind, "CartPole-v1"))
    algorithm = kind(env=env, num_envs=4, rnd=True)
    key = jax.jit(lambda key: algorithm.init(key).key)(jax.random.key(0))
    ours = jax.random.key_data(jax.random.split(jax.random.fold_in(key, rnd._SALT), 3))
    for count in range(2, 6):
        for one in jax.random.split(key, count):
            split_again = jax.random.key_data(jax.random.split(one, (4, 2, 4))).reshape(-1, ours.shape[-1])
            assert not np.any(np.all(split_again[:, None] == ours[None], axis=-1))
