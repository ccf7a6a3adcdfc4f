"""PPO: probe environments, metrics, the loss by hand, and the learner against NumPy.

The loss is the negative of equation 9 of Schulman et al. 2017 (arXiv 1707.06347), with equation 7
(`test_losses.py`); advantages are equations 11 and 12 there, and 16 of Schulman et al. 2016 (arXiv
1506.02438; `test_returns.py`). The value error is clipped as in CleanRL; the paper has no equation for it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from algos import distributions, normalize
from algos.losses import Decision, ProximalLoss
from algos.on_policy import Trajectory
from algos.rollout import episode_metrics
from envs import TimeStep

# --- probe environments: each tests one possible error ---

QUICK = {
    "num_envs": 16, "num_steps": 16, "num_epochs": 4, "num_minibatches": 4, "learning_rate": 3e-3,
    "anneal_learning_rate": False, "hidden": (32,), "total_steps": 1_000_000,
}  # fmt: skip


def trained(name, iterations, devices, **fields):
    algorithm = algos.PPO(env=envs.make(name), **{**QUICK, **fields})
    engine = fdg.compile(algorithm, policies.GPUOnly(), devices[:1])
    state, _ = engine.run(engine.init(0), iterations)
    return algorithm, state


def score(algorithm, state):
    """Mean return of greedy actions."""
    return float(algorithm.evaluate(state, jax.random.key(1), 64)["return"])


@pytest.mark.parametrize(
    ("name", "iterations"),
    [("probe:policy", 30), ("probe:policy_of_observation", 40), ("probe:multi_discrete", 80)],
)
def test_learns_probes(name, iterations, devices):
    algorithm, state = trained(name, iterations, devices)
    assert score(algorithm, state) == pytest.approx(algorithm.env.single.optimal_return, abs=0.05)


# --- metrics ---


def test_episode_metrics():
    """Of three episodes, `[T, B]`: returns 3, 5 and 10 after 2, 1 and 3 steps. Without ends: not-a-number."""
    terminated = jnp.array([[0, 1], [0, 0], [0, 1]], bool)
    truncated = jnp.array([[0, 0], [1, 0], [0, 0]], bool)
    returns, lengths = jnp.array([[0.0, 5], [3, 0], [0, 10]]), jnp.array([[0, 1], [2, 0], [0, 3]])
    rows = jnp.zeros((3, 2))
    step = TimeStep(None, rows, terminated, truncated, rows, returns, lengths)
    metrics = episode_metrics(step)
    assert [float(metrics[name]) for name in ("episode_return", "episode_length", "episodes")] == [6, 2, 3]
    never = jnp.zeros((3, 2), bool)
    without = episode_metrics(step._replace(terminated=never, truncated=never, episode_return=rows))
    assert np.isnan(without["episode_return"]) and without["episodes"] == 0


# --- the loss, by hand ---


@pytest.mark.parametrize(
    ("fields", "policy_loss", "value_loss"),
    [
        ({}, -0.1, 0.41),
        ({"normalize_advantage": False}, -3.5, 0.41),
        ({"clip_value": False}, -0.1, 0.2525),
    ],
)
def test_loss_by_hand(fields, policy_loss, value_loss):
    """Two samples, action probabilities 1/2; old probabilities 1/4 and 1/2: ratios 2 and 1. Epsilon 0.2.

    Advantages 5 and 1, mean 3 and deviation 2: normalised 1 and -1. Policy: -(min(2, 1.2) - 1) / 2 = -0.1;
    not normalised, -(min(10, 6) + 1) / 2 = -3.5.
    Values 1.9 and 0, old values 1 and 0, targets 2 and 1. Squared errors 0.01 and 1; with the clipped value
    1.2, 0.64 and 1. Half their means: 0.2525 and 0.41.
    Entropy: log 2. Weights 0.5 and 0.1.
    """
    from algos.ppo import Minibatch

    network = algos.Network(
        init=lambda key, observation: {},
        apply=lambda parameters, observation: (jnp.zeros((2, 2)), jnp.array([1.9, 0.0])),
    )
    coefficients = {"clip_ratio": 0.2, "value_coefficient": 0.5, "entropy_coefficient": 0.1}
    algorithm = algos.PPO(env=envs.make("CartPole-v1"), network=network, **coefficients, **fields)
    minibatch = Minibatch(
        observation=jnp.zeros((2, 4)),
        action=jnp.array([0, 1]),
        decision=Decision(jnp.log(jnp.array([0.25, 0.5])), jnp.array([1.0, 0.0])),
        advantage=jnp.array([5.0, 1.0]),
        target=jnp.array([2.0, 1.0]),
    )
    loss, parts = algorithm.loss({}, minibatch)
    assert float(parts["policy_loss"]) == pytest.approx(policy_loss, rel=1e-5)
    assert float(parts["value_loss"]) == pytest.approx(value_loss, rel=1e-5)
    assert float(parts["entropy"]) == pytest.approx(0.6931472, rel=1e-6)
    assert float(loss) == float(parts["loss"])
    assert float(loss) == pytest.approx(policy_loss + 0.5 * value_loss - 0.06931472, rel=1e-5)
    assert float(parts["clip_fraction"]) == 0.5
    assert float(parts["approx_kl"]) == pytest.approx(0.1534264, rel=1e-5)


def test_loss_of_one_sample():
    """A single advantage is not normalised (Stable-Baselines3 too): with a ratio of 1 the loss is -5."""
    from algos.ppo import Minibatch

    decision = Decision(jnp.log(jnp.full(1, 0.5)), jnp.zeros(1))
    minibatch = Minibatch(jnp.zeros((1, 4)), jnp.zeros(1, int), decision, jnp.full(1, 5.0), jnp.zeros(1))
    policy = distributions.Categorical(jnp.zeros((1, 2)))
    assert float(ProximalLoss().of(policy, jnp.zeros(1), minibatch)[1]["policy_loss"]) == -5.0


# --- the learner, compared with NumPy ---

LINEAR = algos.Network(  # two actions
    init=lambda key, observation: {"policy": jnp.zeros((2, 2)), "value": jnp.zeros(2)},
    apply=lambda parameters, x: (x @ parameters["policy"], x @ parameters["value"]),
)


def gradient_by_hand(w, v, x, action, old_log_prob, old_value, advantage, target, clip=0.2):
    """Gradient of the loss over samples `[N]` by weights of logits and value; coefficients 0.5 and 0.1."""
    logits = x @ w
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    one_hot = np.eye(2)[action]
    ratio = (p * one_hot).sum(axis=1) / np.exp(old_log_prob)
    advantage = (advantage - advantage.mean()) / advantage.std()
    unclipped = ratio * advantage <= np.clip(ratio, 1 - clip, 1 + clip) * advantage
    d_policy = -(unclipped * advantage * ratio)[:, None] * (one_hot - p)
    entropy = -(p * np.log(p)).sum(axis=1, keepdims=True)
    d_entropy = -p * (np.log(p) + entropy)
    value = x @ v
    clipped = old_value + np.clip(value - old_value, -clip, clip)
    d_value = np.where((value - target) ** 2 >= (clipped - target) ** 2, value - target, 0.0)
    return x.T @ (d_policy - 0.1 * d_entropy) / len(x), 0.5 * x.T @ d_value / len(x)


def test_learner_matches_numpy():
    """Normalised observations and rewards, GAE, two epochs, Adam with clipped gradients and annealing."""
    steps, environments, rate = 5, 2, 0.1
    algorithm = algos.PPO(
        env=envs.make("CartPole-v1"), network=LINEAR, num_envs=environments, num_steps=steps, num_epochs=2,
        num_minibatches=1, total_steps=40, learning_rate=rate, discount=0.9, gae_lambda=0.7,
        entropy_coefficient=0.1, max_grad_norm=0.01, normalize_observation=True, normalize_reward=True,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    w, v = rng.normal(size=(2, 2)), rng.normal(size=2)
    parameters = {"policy": jnp.asarray(w, jnp.float32), "value": jnp.asarray(v, jnp.float32)}
    learned = (
        parameters, algorithm._optimizer.init(parameters), normalize.init((2,)), normalize.init(()), None
    )  # fmt: skip
    running_return = (jnp.zeros(environments), None)
    first, second = np.zeros(6), np.zeros(6)  # Adam's moments
    observed, returns, running, count = [], [], np.zeros(environments), 0
    terminated = np.array([[0, 0], [1, 0], [0, 0], [0, 0], [0, 0]], bool)
    truncated = np.array([[0, 0], [0, 0], [0, 1], [0, 0], [1, 0]], bool)

    for _ in range(2):
        x, final = rng.normal(1.0, 2.0, size=(2, steps, environments, 2))
        reward, old_value = rng.normal(1.0, 3.0, size=(2, steps, environments))
        action = rng.integers(2, size=(steps, environments))
        old_log_prob = np.log(rng.uniform(0.2, 0.9, size=(steps, environments)))
        zero = jnp.zeros((steps, environments))
        time_step = TimeStep(
            None, *map(jnp.float32, [reward]), jnp.array(terminated), jnp.array(truncated),
            jnp.float32(final), zero, zero,
        )  # fmt: skip
        decision = Decision(jnp.float32(old_log_prob), jnp.float32(old_value))
        trajectory = Trajectory(jnp.float32(x), jnp.array(action), decision, time_step)
        learned, running_return, metrics = algorithm.learn(
            learned, running_return, trajectory, jax.random.key(0)
        )

        mean, std = (np.mean(observed, axis=0), np.std(observed, axis=0)) if observed else (0.0, 1.0)
        observed.extend(x.reshape(-1, 2))  # after normalisation
        x, final = (x - mean) / std, (final - mean) / std
        for t in range(steps):
            running = 0.9 * running + reward[t]
            returns.extend(running)
            running = np.where(terminated[t] | truncated[t], 0.0, running)
        reward = np.clip(reward / np.std(returns), -10, 10)
        advantage, following = np.zeros((steps, environments)), np.zeros(environments)
        for t in reversed(range(steps)):
            # Within an episode the next row's value; at a truncation or the last row the final observation's.
            last = t == steps - 1
            next_value = np.where(truncated[t] | last, final[t] @ v, old_value[(t + 1) % steps])
            delta = reward[t] + 0.9 * next_value * ~terminated[t] - old_value[t]
            following = delta + 0.9 * 0.7 * following * ~(terminated[t] | truncated[t])
            advantage[t] = following
        target = advantage + old_value
        expected = 1 - np.var(target - old_value) / np.var(target)
        assert float(metrics["explained_variance"]) == pytest.approx(expected, rel=1e-4)
        flat = [a.reshape(10, *a.shape[2:]) for a in (x, action, old_log_prob, old_value, advantage, target)]
        for _ in range(2):
            gradient = np.concatenate([g.ravel() for g in gradient_by_hand(w, v, *flat)])
            gradient *= min(1.0, 0.01 / np.linalg.norm(gradient))
            count += 1
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            step = first / (1 - 0.9**count) / (np.sqrt(second / (1 - 0.999**count)) + 1e-5)
            step *= rate * (1 - ((count - 1) // 2) / 4)  # four iterations with two updates each
            w, v = w - step[:4].reshape(2, 2), v - step[4:]

        parameters, _, observation_statistics, return_statistics, _ = learned
        np.testing.assert_allclose(parameters["policy"], w, atol=2e-5)
        np.testing.assert_allclose(parameters["value"], v, atol=2e-5)
        np.testing.assert_allclose(observation_statistics.mean, np.mean(observed, axis=0), rtol=1e-4)
        np.testing.assert_allclose(observation_statistics.var, np.var(observed, axis=0), rtol=1e-4)
        np.testing.assert_allclose(return_statistics.var, np.var(returns), rtol=1e-4)
        np.testing.assert_allclose(running_return[0], running, rtol=1e-4)


# --- minibatches ---


def test_time_shuffle():
    """Rows are time steps: each minibatch has the same steps of all environments."""
    algorithm = algos.PPO(env=envs.make("CartPole-v1"), num_envs=3, num_steps=8, shuffle="time")
    samples = (jnp.arange(3)[:, None] * 100 + jnp.arange(8)[None]).reshape(-1)  # environment-major: 100 b + t
    minibatch = algorithm.epochs.minibatch(samples, jnp.array([[5, 2]]), num_envs=3)
    assert minibatch.tolist() == [5, 2, 105, 102, 205, 202]
