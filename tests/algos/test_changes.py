"""Algorithms changed by a user (`tests/user_changes.py`) give the same results under every policy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import algos
import envs
import fdg
import policies
from algos import networks
from algos.losses import Decision
from algos.ppo import Minibatch
from tests import user_changes
from tests.conformance.comparison import assert_same, plain
from tests.refusing import refuses

ENV = envs.make("CartPole-v1")
ON_POLICY = {"env": ENV, "num_envs": 8, "num_steps": 4, "num_epochs": 1, "num_minibatches": 2}
PPO = {**ON_POLICY, "hidden": (8,)}
REPLAYED = {
    "env": ENV,
    "num_envs": 8,
    "num_steps": 4,
    "batch_size": 16,
    "learning_starts": 16,
    "hidden": (8,),
}
CONTROL = {**REPLAYED, "env": envs.make("Pendulum-v1"), "total_steps": 512, "updates_per_step": 0.125}
RECURRENT = {**PPO, "memory_size": 8}

CHANGES = {
    "an auxiliary loss": lambda: user_changes.Predicting(
        **ON_POLICY, network=user_changes.with_forward_model(ENV)
    ),
    "another advantage": lambda: user_changes.OneStep(**PPO),
    "another optimiser": lambda: algos.PPO(**PPO, optimizer=optax.contrib.muon),
    "a name of an optimiser": lambda: algos.DQN(**REPLAYED, optimizer="lion"),
    "a shared trunk": lambda: algos.PPO(**ON_POLICY, network=user_changes.Shared),
    "a bonus on PPO": lambda: user_changes.curious(algos.PPO)(**PPO),
    "a bonus on recurrent PPO": lambda: user_changes.curious(algos.RecurrentPPO)(**RECURRENT),
    "a bonus on DQN": lambda: user_changes.curious(algos.DQN)(**REPLAYED),
    "visits on PPO": lambda: algos.PPO(**PPO, bonus=user_changes.by_visits),
    "visits on recurrent PPO": lambda: algos.RecurrentPPO(**RECURRENT, bonus=user_changes.by_visits),
    "visits on DQN": lambda: algos.DQN(**REPLAYED, bonus="tests.user_changes:by_visits"),
    "a replay and an exploration": lambda: algos.DQN(
        **REPLAYED, replay=user_changes.signs, explore=user_changes.sticky, n_step=2
    ),
    "a normaliser on PPO": lambda: algos.PPO(**PPO, normalize=user_changes.by_largest),
    "a normaliser on recurrent PPO": lambda: algos.RecurrentPPO(
        **RECURRENT, normalize=user_changes.by_largest
    ),
    "all three on TD3": lambda: algos.TD3(
        **CONTROL,
        replay="tests.user_changes:signs",
        explore=user_changes.sticky,
        normalize=user_changes.by_largest,
    ),
    "priorities on SAC": lambda: algos.SAC(**CONTROL, priority_exponent=0.6, n_step=2),
    "a memory and priorities": lambda: algos.DQN(
        **REPLAYED,
        memory="gru",
        memory_size=8,
        sequence_length=2,
        burn_in=2,
        priority_exponent=0.6,
        n_step=2,
        double=True,
    ),
    "an exploration": lambda: user_changes.CosineDQN(**REPLAYED, epsilon_end=0.5),
    "a histogram": lambda: user_changes.Histogram(**PPO),
    "frozen parameters": lambda: algos.PPO(**PPO, optimizer=user_changes.frozen_critic),
    "a penalty that adapts": lambda: user_changes.PenalizedPPO(**PPO, kl_target=1e-4, learning_rate=0.03),
    "a penalty on torques": lambda: user_changes.PenalizedPPO(**{**PPO, "env": envs.make("Pendulum-v1")}),
}
POLICIES = {
    "gpu_only": policies.GPUOnly(),
    "single_learner_coarse": policies.SingleLearnerCoarse(),
    "multi_learner": policies.MultiLearner(),
}


@pytest.fixture(autouse=True)
def allow_rank_promotion():
    """Allows rank promotion for user code; tests/conftest.py makes it an error elsewhere."""
    with jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def plain_result(change):
    """The algorithm, and its state and metrics after plain calls of `iterate`."""
    algorithm = CHANGES[change]()
    return algorithm, plain(algorithm, jax.jit(algorithm.init)(jax.random.key(0)), 3)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_agree_under_every_policy(change, policy):
    algorithm, expected = plain_result(change)
    engine = fdg.compile(algorithm, POLICIES[policy], jax.devices()[:4])
    state, metrics = engine.run(engine.init(0), 3)
    assert_same(expected, (engine.algorithm_state(state), metrics))


@pytest.mark.parametrize("change, target", [("a penalty that adapts", 1e-4), ("a penalty on torques", 0.01)])
def test_adaptive_penalty_follows_kl(change, target):
    _, (state, metrics) = plain_result(change)
    penalty, expected = 1.0, []
    for kl in np.asarray(metrics["kl"]):
        penalty *= 2 if kl > 1.5 * target else 0.5 if kl < target / 1.5 else 1
        expected.append(penalty)
    assert len(set(expected)) > 1
    np.testing.assert_array_equal(metrics["penalty"], expected)
    assert float(state.penalty) == penalty


def test_histogram_counts_samples_in_range():
    algorithm, zeros = user_changes.Histogram(**PPO), jnp.zeros(6)
    advantage = jnp.array([-3.0, -1.5, -0.5, 0.5, 0.6, 2.5])  # the first and the last are out of range
    decision = Decision(log_prob=zeros, value=zeros)
    minibatch = Minibatch(jnp.zeros((6, 4)), jnp.zeros(6, jnp.int32), decision, advantage, target=zeros)
    _, metrics = jax.jit(algorithm.loss)(jax.jit(algorithm.init)(jax.random.key(0)).parameters, minibatch)
    assert [float(metrics[f"advantage_{i}"]) for i in range(4)] == [1, 1, 2, 0]


def test_replaced_part_gets_settings():
    algorithm = user_changes.CosineDQN(**REPLAYED, epsilon_end=0.5)
    half = algorithm.exploration.epsilon(jnp.int32(5), 10)
    assert float(half) == pytest.approx(0.5 + 0.5 * np.cos(np.pi / 4), rel=1e-6)
    assert isinstance(algorithm.exploration, user_changes.Cosine)


def test_count_bonus_by_hand():
    """Counts of 16 cells: each step is counted once, and the mean bonus is 0.1 / sqrt(count) by hand."""
    algorithm = algos.PPO(**PPO, bonus=user_changes.by_visits)
    state, iterate = jax.jit(algorithm.init)(jax.random.key(0)), jax.jit(algorithm.iterate)
    state, _ = iterate(state)
    before = np.asarray(state.bonus)
    state, metrics = iterate(state)
    counts = np.asarray(state.bonus)
    assert counts.sum() == 2 * algorithm.steps_per_iteration
    mean = np.sum((counts - before) * 0.1 / np.sqrt(np.maximum(counts, 1))) / algorithm.steps_per_iteration
    assert float(metrics["bonus"]) == pytest.approx(mean, rel=1e-5)


def test_network_values_set_fields():
    gru = algos.RecurrentPPO(env=ENV, network=networks.gru(64, 32))
    assert gru == algos.RecurrentPPO(env=ENV, memory="gru", memory_size=64, hidden=(32,))
    assert algos.PQN(env=ENV, network=networks.mlp(32)) == algos.PQN(env=ENV, hidden=(32,), convolve=False)
    mlp = algos.DQN(env=ENV, network=networks.mlp(32, 32, activation="tanh"))
    assert mlp == algos.DQN(env=ENV, hidden=(32, 32), activation="tanh", convolve=False)
    with pytest.raises(
        fdg.FdgError, match=r"memory_size=64: use A2C, .*C51, DQN, .*IPPO, MAPPO, .*RecurrentPPO"
    ):
        algos.PPO(env=ENV, network=networks.gru(64))


@pytest.mark.parametrize(
    ("bonus", "words"),
    [
        (3, r"bonus=3: it must be an algos.Bonus\(init, apply\), 'module:name' of one, or None"),
        ("tests.user_changes:nothing", "--bonus"),
    ],
)
def test_invalid_bonus(bonus, words):
    with pytest.raises(fdg.FdgError, match=words):
        algos.PPO(env=ENV, bonus=bonus)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (5, "optimizer=5 is int: give a name"),
        ("lionn", "unknown optimizer 'lionn': did you mean 'lion'?"),
        ("no:such", "there is no module 'no'"),
        (lambda: optax.sgd(0.1), "fails if it gets only a step size"),
        (lambda step_size: 3, "returns int for a step size: it must return an optax.GradientTransformation"),
    ],
)
def test_invalid_optimizer(optimizer, words):
    with refuses(words):
        algos.PPO(**PPO, optimizer=optimizer)
