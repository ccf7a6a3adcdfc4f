"""PPO: probe environments, a rollout replayed in NumPy, and the sizes that it refuses.

The loss is equation 9 of Schulman et al. 2017 (arXiv 1707.06347), negated, its first part equation 7
(`test_losses.py`); advantages are equations 11 and 12 there, 16 of Schulman et al. 2016 (arXiv 1506.02438;
`test_returns.py`). The value's error is clipped as in CleanRL, which no equation of the paper says.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies

# --- probe environments: each isolates one thing that can be wrong ---

QUICK = {
    "num_envs": 16, "num_steps": 16, "num_epochs": 4, "num_minibatches": 4, "learning_rate": 3e-3,
    "anneal_learning_rate": False, "hidden": (32,), "total_steps": 1_000_000,
}  # fmt: skip


def trained(name, iterations, devices, **fields):
    algorithm = algos.PPO(env=envs.make(name), **{**QUICK, **fields})
    engine = fdg.compile(algorithm, policies.GPUOnly(), devices[:1])
    state, _ = engine.run(engine.init(0), iterations)
    return algorithm, state


def value(algorithm, state, *observations):
    shape = algorithm.env.observation_space.shape
    batch = jnp.asarray(observations, jnp.float32).reshape(-1, *shape)
    return np.asarray(algorithm._network.apply(state.parameters, batch)[1])


def score(algorithm, state):
    """Mean return of the most probable actions."""
    return float(algorithm.evaluate(state, jax.random.key(1), 64)["return"])


def test_value_of_a_constant(devices):
    """One action, one step, reward 1: V = 1."""
    algorithm, state = trained("probe:value", 40, devices)
    np.testing.assert_allclose(value(algorithm, state, 1.0), 1.0, atol=0.05)


def test_value_depends_on_the_observation(devices):
    """Reward equals the observation, -1 or 1."""
    algorithm, state = trained("probe:value_of_observation", 60, devices)
    np.testing.assert_allclose(value(algorithm, state, -1.0, 1.0), [-1.0, 1.0], atol=0.1)


def test_value_is_discounted(devices):
    """Two steps, reward 1 at the end: V = discount, then 1."""
    algorithm, state = trained("probe:discount", 60, devices, discount=0.5)
    np.testing.assert_allclose(value(algorithm, state, 0.0, 1.0), [0.5, 1.0], atol=0.05)


@pytest.mark.parametrize(
    ("name", "iterations"),
    [("probe:policy", 30), ("probe:policy_of_observation", 40), ("probe:multi_discrete", 80)],
)
def test_the_policy_becomes_optimal(name, iterations, devices):
    algorithm, state = trained(name, iterations, devices)
    assert score(algorithm, state) == pytest.approx(algorithm.env.single.optimal_return, abs=0.05)


def test_continuous_actions_reach_their_target(devices):
    algorithm, state = trained("probe:continuous", 150, devices, entropy_coefficient=0.0)
    assert score(algorithm, state) == pytest.approx(algorithm.env.single.optimal_return, abs=0.03)


def test_truncation_is_not_termination(devices):
    """Reward 1 for ever, cut off every few steps: V = 1 / (1 - discount) = 5, as if it were never cut.

    Taken for a termination the time limit would leave V well below: with 4 steps, at most
    (1 - 0.8**4) / 0.2 = 2.95.
    """
    algorithm, state = trained(
        "probe:truncation", 120, devices, discount=0.8, clip_value=False, value_coefficient=1.0
    )
    np.testing.assert_allclose(value(algorithm, state, 1.0), 5.0, atol=0.5)


def test_forbidden_actions_are_never_taken(devices):
    """The environment would pay 1,000 for a forbidden action: a mean above 1 would show even one."""
    algorithm = algos.PPO(env=envs.make("probe:masked"), **QUICK)
    engine = fdg.compile(algorithm, policies.SingleLearnerFine(workers=2, learners=1), devices[:3])
    state, metrics = engine.run(engine.init(0), 20)
    assert (
        bool(jnp.all(metrics["episode_return"] <= 1.0)) and float(metrics["entropy"][0]) <= np.log(2) + 1e-6
    )
    assert score(algorithm, state) == 1.0


def test_evaluation_sees_normalised_observations(devices):
    """The statistics in the state are those of the rollouts, and evaluation acts on them."""
    algorithm = algos.PPO(env=envs.make("Pendulum-v1"), num_envs=8, num_steps=16, normalize_observation=True)
    engine = fdg.compile(algorithm, policies.GPUOnly(), devices[:1])
    state, _ = engine.run(engine.init(0), 2)
    assert float(state.observation_statistics.count) == 2 * 8 * 16
    spread = np.sqrt(np.asarray(state.observation_statistics.var))
    assert spread[2] > spread[0] > 0  # the angular velocity spreads wider than a cosine
    evaluate = jax.jit(algorithm.evaluate, static_argnums=2)
    forgetful = state._replace(
        observation_statistics=algorithm.init(jax.random.key(0)).observation_statistics
    )
    assert float(evaluate(state, jax.random.key(0), 4)["return"]) != pytest.approx(
        float(evaluate(forgetful, jax.random.key(0), 4)["return"]), abs=1e-3
    )


# --- one rollout, replayed ---


def cartpole(state, action):
    """One step of the cart and pole in NumPy (Barto, Sutton and Anderson 1983; constants of Gymnasium)."""
    x, speed, angle, spin = state
    force = 10.0 if action == 1 else -10.0
    cos, sin = np.cos(angle), np.sin(angle)
    push = (force + 0.05 * spin**2 * sin) / 1.1
    twist = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    pull = push - 0.05 * twist * cos / 1.1
    return np.array([x + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * spin, spin + 0.02 * twist])


def test_metrics_are_those_of_a_numpy_replay(devices):
    """Take the actions of one iteration, step NumPy's cart and pole, and count episodes by hand."""
    steps, environments, limit = 64, 4, 20
    algorithm = algos.PPO(
        env=envs.make("CartPole-v1", max_steps_in_episode=limit), num_envs=environments, num_steps=steps
    )
    record = {}
    learn = algorithm.learn

    class Recording(algos.PPO):
        def learn(self, learned, running_return, trajectory, key):
            record["trajectory"] = jax.tree.map(np.asarray, trajectory)
            return learn(learned, running_return, trajectory, key)

    recording = Recording(env=algorithm.env, num_envs=environments, num_steps=steps)
    recording.iterate(recording.init(jax.random.key(2)))  # outside jit, so that the arrays can be kept
    observations, actions, _, time_step = record["trajectory"]

    returns, lengths = [], []
    for b in range(environments):
        episode, state = 0, observations[0, b].astype(np.float64)
        for t in range(steps):
            np.testing.assert_allclose(observations[t, b], state, atol=1e-5)
            state = cartpole(state, actions[t, b])
            episode += 1
            fell = abs(state[0]) > 2.4 or abs(state[2]) > 12 * 2 * np.pi / 360
            np.testing.assert_allclose(time_step.final_observation[t, b], state, atol=1e-5)
            assert time_step.terminated[t, b] == fell
            assert time_step.truncated[t, b] == (not fell and episode == limit)
            if fell or episode == limit:
                returns.append(episode)  # each step pays 1
                lengths.append(episode)
                episode = 0
                if t + 1 < steps:
                    state = observations[t + 1, b].astype(np.float64)
    assert len(returns) > 5 and limit in lengths  # both kinds of end occur

    engine = fdg.compile(algorithm, policies.GPUOnly(), devices[:4])
    _, metrics = engine.run(engine.init(2), 1)
    assert float(metrics["episodes"][0]) == len(returns)
    assert float(metrics["episode_return"][0]) == pytest.approx(np.mean(returns), rel=1e-6)
    assert float(metrics["episode_length"][0]) == pytest.approx(np.mean(lengths), rel=1e-6)


def test_an_iteration_in_which_no_episode_ends_has_no_return(devices):
    algorithm = algos.PPO(env=envs.make("Pendulum-v1"), num_envs=4, num_steps=8)
    _, metrics = jax.jit(algorithm.iterate)(algorithm.init(jax.random.key(0)))
    assert np.isnan(metrics["episode_return"]) and metrics["episodes"] == 0


# --- the loss, by hand ---


def test_loss_by_hand():
    """Two samples, two actions, probabilities 1/2 (logits 0), value 0.

    Ratios: 0.5 / 0.25 = 2 and 0.5 / 0.5 = 1; advantages 1 and -3, not normalised; epsilon 0.2.
    Policy: min(2 * 1, 1.2 * 1) = 1.2 and min(1 * -3, 1 * -3) = -3; loss = -(1.2 - 3) / 2 = 0.9.
    Value: old 1 and 0, targets 2 and 1. Clipped: 1 + clip(0 - 1, +-0.2) = 0.8 and 0.
    Errors: max((0 - 2)^2, (0.8 - 2)^2) = 4 and max(1, 1) = 1; loss = 0.5 * 2.5 = 1.25.
    Entropy: log 2. Total: 0.9 + 0.5 * 1.25 - 0.01 * 0.6931472 = 1.5180685.
    """
    from algos.ppo import Decision, Minibatch

    network = algos.Network(
        init=lambda key, observation: {},
        apply=lambda parameters, observation: (jnp.zeros((2, 2)), jnp.zeros(2)),
    )
    algorithm = algos.PPO(env=envs.make("CartPole-v1"), normalize_advantage=False, network=network)
    minibatch = Minibatch(
        observation=jnp.zeros((2, 4)),
        action=jnp.array([0, 1]),
        decision=Decision(jnp.log(jnp.array([0.25, 0.5])), jnp.array([1.0, 0.0])),
        advantage=jnp.array([1.0, -3.0]),
        target=jnp.array([2.0, 1.0]),
    )
    loss, parts = algorithm._loss({}, minibatch)
    assert float(loss) == pytest.approx(1.5180685, rel=1e-6)
    assert float(parts["policy_loss"]) == pytest.approx(0.9, rel=1e-6)
    assert float(parts["value_loss"]) == pytest.approx(1.25, rel=1e-6)
    assert float(parts["clip_fraction"]) == 0.5


# --- sizes and values ---


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_envs": 0}, "num_envs=0: it must be above zero"),
        ({"num_minibatches": 3}, "num_minibatches=3 does not divide num_envs * num_steps=512"),
        ({"num_minibatches": 3, "shuffle": "time"}, "does not divide num_steps=128"),
        ({"discount": 1.5}, "discount=1.5: it must be from 0 to 1"),
        ({"shuffle": "some"}, "shuffle='some'"),
        ({"hidden": (64, 0)}, "hidden=(64, 0)"),
    ],
)
def test_values_out_of_range_are_refused(fields, words):
    with pytest.raises(fdg.FdgError) as error:
        algos.PPO(env=envs.make("CartPole-v1"), **fields)
    assert words in str(error.value)


def test_it_is_a_value():
    assert algos.PPO(env=envs.make("CartPole-v1")) == algos.PPO(env=envs.make("CartPole-v1"))
    assert hash(algos.PPO(env=envs.make("CartPole-v1"))) == hash(algos.PPO(env=envs.make("CartPole-v1")))


def test_presets_make_algorithms():
    for name in ("Pendulum-v1", "CartPole-v1"):
        assert algos.make("ppo", envs.make(name)).env.name == name
    assert algos.make("PPO", envs.make("Pendulum-v1"), num_envs=8).num_envs == 8


def test_minibatches_of_the_time_shuffle_take_whole_steps():
    """Rows are time steps: each minibatch has all environments at the same steps."""
    algorithm = algos.PPO(env=envs.make("CartPole-v1"), num_envs=3, num_steps=8, shuffle="time")
    samples = (jnp.arange(3)[:, None] * 100 + jnp.arange(8)[None]).reshape(-1)  # environment-major: 100 b + t
    taken = algorithm._take(samples, jnp.array([5, 2]))
    assert taken.tolist() == [5, 2, 105, 102, 205, 202]
