"""Random network distillation: what is new by hand, returns that no episode ends, and what PPO makes of them.

Of Burda et al. 2018 (arXiv 1810.12894): the error of equation 1 and algorithm 1; section 2.3 for returns
that go on from episode to episode; section 2.4 for what observations and rewards are divided by.
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
    """A time step `[T, B]` of random observations, where some episodes end."""
    keys = jax.random.split(jax.random.key(seed), 3)
    zero = jnp.zeros((T, B))
    return TimeStep(
        observation=None, reward=zero, terminated=jax.random.bernoulli(keys[0], 0.3, (T, B)),
        truncated=zero > 0, final_observation=jax.random.uniform(keys[1], (T, B, 2)), episode_return=zero,
        episode_length=zero.astype(jnp.int32),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def judged(distillation, step, running):
    """Parameters, what `evaluate_rollout` gives, and the loss over all of it with its gradient."""
    seen = jax.random.uniform(jax.random.key(1), (T, B, 2))
    parameters, known, _ = distillation.begin(jax.random.key(0), (), seen[0])
    found = distillation.evaluate_rollout(
        parameters, known, running, (seen, seen[0]), step, jax.random.key(2)
    )
    rows = jax.tree.map(lambda x: x.reshape(T * B, *x.shape[2:]), found[1])
    value = distillation._value.apply(parameters.value, seen.reshape(T * B, 2)).reshape(T, B)
    loss = jax.value_and_grad(distillation.loss, has_aux=True)(parameters, rows, seen.reshape(T * B, 2), 0.5)
    predicted = distillation._predictor.apply(parameters.predictor, rows.observation)
    target = distillation._target.apply(known.target, rows.observation)
    return found, value, loss, (predicted.reshape(T, B, 3), target.reshape(T, B, 3))


@pytest.fixture(scope="module")
def distillation():
    return Distillation(SPACE, Layers((4,)), 3, discount=0.5, lambda_=0.5, share=1.0)


def test_weights_begin_as_the_authors_have_them(distillation):
    """Orthogonal: of target and predictor so that features have a deviation of one, of values without."""
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


def test_what_is_new_by_hand(distillation):
    """Errors by their deviation; returns of them that no end of an episode cuts; advantages written out."""
    step, before = rollout(0), jnp.array([0.0, 1.0, 2.0])
    found, value, ((loss, parts), _), (predicted, target) = judged(distillation, step, before)
    advantage, samples, known, running, metrics = found
    # Observations by the statistics of this rollout, within five deviations.
    seen = step.final_observation
    statistics = normalize.update(normalize.init((2,)), seen)
    np.testing.assert_allclose(
        samples.observation, np.clip(normalize.normalize(statistics, seen), -5, 5), rtol=1e-5
    )
    np.testing.assert_allclose(samples.features, target, rtol=1e-5)
    new = np.mean(np.square(predicted - target), axis=-1)
    assert float(metrics["novelty"]) == pytest.approx(new.mean(), rel=1e-5)
    returns, carry = [], np.asarray(before)
    for row in new:
        carry = 0.5 * carry + row
        returns.append(carry)
    np.testing.assert_allclose(running, carry, rtol=1e-5)
    assert float(known.return_statistics.var) == pytest.approx(np.var(returns), rel=1e-4)
    reward = new / np.std(returns)
    after = np.concatenate([value[1:], value[:1]])  # the last step led to what the first one saw
    expected = np.zeros((T + 1, B))
    for t in reversed(range(T)):
        expected[t] = reward[t] + 0.5 * after[t] - value[t] + 0.25 * expected[t + 1]
    np.testing.assert_allclose(advantage, expected[:T], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(samples.value_target, expected[:T] + value, rtol=1e-4, atol=1e-5)
    # The loss: of the value its half square, of the predictor its error.
    assert float(parts["predictor_loss"]) == pytest.approx(new.mean(), rel=1e-5)
    assert float(loss) == pytest.approx(new.mean() + 0.25 * np.mean(np.square(expected[:T])), rel=1e-4)


@pytest.mark.parametrize("agents", [0, 2])
def test_novelty_as_a_bonus_by_hand(agents):
    """Half of the scaled errors; then one step of Adam on their mean: the step size, against the slope."""
    env = envs.make("probe:agents" if agents else "probe:continuous")
    algorithm = (algos.VDN if agents else algos.SAC)(env=env, num_envs=B, hidden=(4,), rnd=True, batch_size=B)
    bonus, distillation = rnd.bonus(algorithm, jax.random.key(0)), algorithm.novelty.of(algorithm)
    size = env.observation_space.shape[0]
    of_each = (agents,) if agents else ()
    state = bonus.init(jnp.zeros((B, *of_each, size)))
    assert state.running.shape == (B, *of_each)
    seen = jax.random.uniform(jax.random.key(1), (T, B, *of_each, size))
    step = rollout(0)._replace(final_observation=seen, reward=jnp.zeros((T, B, *of_each)))
    after, reward = jax.jit(bonus.apply)(state, step)

    shown = np.clip(normalize.normalize(normalize.update(normalize.init((size,)), seen), seen), -5, 5)
    predicted = distillation._predictor.apply(state.predictor, shown.reshape(-1, size))
    target = distillation._target.apply(state.known.target, shown.reshape(-1, size))
    new = np.mean(np.square(predicted - target), axis=-1).reshape(seen.shape[:-1])
    returns, carry = [], 0.0
    for row in new:
        carry = 0.99 * carry + row
        returns.append(carry)
    np.testing.assert_allclose(reward, 0.5 * new / np.std(returns), rtol=1e-4)
    np.testing.assert_allclose(after.running, carry, rtol=1e-4)
    slope = jax.grad(lambda p: distillation.predictor_loss(
        p, jnp.asarray(shown).reshape(-1, size), target, jnp.ones(new.size, bool)
    ))(state.predictor)  # fmt: skip
    for old, now, by in zip(*map(jax.tree.leaves, (state.predictor, after.predictor, slope)), strict=True):
        clear = np.abs(by) > 1e-4
        expected = -algorithm.learning_rate * np.sign(by)
        np.testing.assert_allclose((now - old)[clear], expected[clear], rtol=1e-2)


def test_both_bonuses_are_added():
    """The user's and that of novelty, in one metric, each with a state of its own."""
    count = algos.Bonus(lambda seen: jnp.int32(0), lambda n, step: (n + 1, jnp.full_like(step.reward, 3.0)))
    fields = {"env": envs.make("probe:continuous"), "num_envs": B, "hidden": (4,), "batch_size": B}
    metrics = {}
    for name, given in {"novelty": {"rnd": True}, "both": {"rnd": True, "bonus": count}}.items():
        algorithm = algos.SAC(**fields, **given)
        state, metrics[name] = jax.jit(algorithm.iterate)(algorithm.init(jax.random.key(0)))
    assert float(metrics["both"]["bonus"]) == pytest.approx(3 + float(metrics["novelty"]["bonus"]), rel=1e-6)
    assert int(state.bonus[0]) == 1


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.25, 4)])
def test_the_predictor_learns_from_a_share(share, count):
    """Its loss is the mean over that share alone; of no samples it is zero, and so is its gradient."""
    distillation = Distillation(SPACE, Layers((4,)), 3, 0.5, 0.5, share)
    (_, samples, *_), _, ((_, parts), slope), (predicted, target) = judged(
        distillation, rollout(0), jnp.zeros(B)
    )
    trains = np.asarray(samples.trains)
    assert trains.sum() == count
    error = np.mean(np.square(predicted - target), axis=-1)[trains]
    assert float(parts["predictor_loss"]) == pytest.approx(error.mean() if count else 0.0, rel=1e-5)
    assert any(np.any(x) for x in jax.tree.leaves(slope.predictor)) == (count > 0)


@pytest.mark.parametrize("kind", [algos.DQN, algos.SAC, algos.A2C, algos.RecurrentPPO, algos.VDN])
def test_its_networks_are_drawn_by_keys_of_their_own(kind):
    """No key of the state's is used twice: none that an iteration splits off is that of a network."""
    env = envs.make({algos.SAC: "probe:continuous", algos.VDN: "probe:agents"}.get(kind, "CartPole-v1"))
    key = kind(env=env, num_envs=4, rnd=True).init(jax.random.key(0)).key
    own = jax.random.key_data(jax.random.split(jax.random.fold_in(key, rnd._SALT), 3))
    for count in range(2, 6):
        for one in jax.random.split(key, count):
            split_again = jax.random.key_data(jax.random.split(one, (4, 2, 4))).reshape(-1, own.shape[-1])
            assert not np.any(np.all(split_again[:, None] == own[None], axis=-1))
