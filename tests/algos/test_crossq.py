"""CrossQ: batch renormalisation by hand and against Flax, its losses by hand, and its policy delay.

Batch renormalisation: Ioffe 2017 (arXiv 1702.03275), algorithm 1. CrossQ: Bhatt et al. 2024 (arXiv
1902.05605), section 3: no target network, one forward pass for both values, normalised critics.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos.crossq import BatchRenorm
from algos.replay import Transition
from algos.sac import Parameters
from tests.algos.by_hand import CRITICS, NARROW, keys, transitions

HALF = jnp.float32(math.atanh(0.5))  # actor parameter: tanh of it is the action 1/2

# --- batch renormalisation ---


def renormalized(x, mean=0.0, var=1.0, in_training=True, renormalize=True, decay=0.99):
    """Outputs of a layer with these running statistics, and the new statistics; scale 1, bias 0."""
    one = jnp.ones(1)
    variables = {
        "params": {"scale": one, "bias": 0 * one},
        "batch_stats": {"mean": mean * one, "var": var * one},
    }
    x = jnp.asarray(x)[:, None]
    y, after = BatchRenorm().apply(variables, x, in_training, renormalize, decay, mutable=["batch_stats"])
    return y[:, 0], {name: float(value[0]) for name, value in after["batch_stats"].items()}


def test_renormalisation_by_hand():
    """Batch mean 200 and deviation 100, running mean 0 and deviation 1: ratio and shift are clipped."""
    y, after = renormalized([100.0, 300.0])
    np.testing.assert_allclose(y, [-1.0 * 3.0 + 5.0, 1.0 * 3.0 + 5.0], rtol=1e-5)
    assert after == pytest.approx({"mean": 2.0, "var": 0.99 + 100.0}, rel=1e-5)
    y, _ = renormalized([100.0, 300.0], renormalize=False)
    np.testing.assert_allclose(y, [-1.0, 1.0], rtol=1e-5)
    # Batch deviation 0.005 = 0.156 * sqrt(0.005**2 + 0.001), running deviation 1: ratio is clipped to 1/3.
    y, _ = renormalized([100.0, 100.01], mean=100.0)
    np.testing.assert_allclose(y, [0.005 - 0.156 / 3, 0.005 + 0.156 / 3], atol=1e-3)


def test_unclipped_training_matches_acting():
    """In training and in acting, results are equal; plain batch normalisation differs."""
    x = np.random.default_rng(0).normal(1.5, 1.3, size=16).astype(np.float32)
    acting, after = renormalized(x, mean=1.0, var=2.0, in_training=False)
    np.testing.assert_allclose(acting, (x - 1.0) / np.sqrt(2.001), rtol=1e-5)
    assert after == pytest.approx({"mean": 1.0, "var": 2.0})
    np.testing.assert_allclose(renormalized(x, mean=1.0, var=2.0)[0], acting, atol=1e-5)
    plain = renormalized(x, mean=1.0, var=2.0, renormalize=False)[0]
    assert float(jnp.max(jnp.abs(plain - acting))) > 0.1


def test_no_renormalisation_matches_flax():
    """Values, gradients and running statistics."""
    x = jnp.asarray(np.random.default_rng(0).normal(1.5, 1.3, size=(8, 3)), jnp.float32)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(8, 3)), jnp.float32)
    theirs = nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-3, use_fast_variance=False)
    variables = jax.jit(theirs.init)(jax.random.key(0), x)

    def of(layer, *how):
        def loss(x):
            y, after = layer.apply(variables, x, *how, mutable=["batch_stats"])
            return jnp.sum(weight * y), (y, after)

        return jax.jit(jax.grad(loss, has_aux=True))(x)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        of(theirs),
        of(BatchRenorm(), True, False, 0.9),
    )


# --- losses, with networks of one parameter ---

SCALAR = {"actor_network": NARROW, "critic_network": CRITICS}


def gradients(is_due, log_temperature=-math.inf):
    algorithm = algos.CrossQ(env=envs.make("probe:continuous"), **SCALAR)
    parameters = Parameters(HALF, jnp.array([3.0, 2.0]), jnp.float32(log_temperature))
    transition = transitions(action=[1.0, -0.5], reward=[1.0, 2.0], discount=[0.5, 0.0])
    empty = jax.jit(algorithm.init)(jax.random.key(0)).learned.statistics
    gradient, _, _, losses = algorithm.gradient(
        parameters, empty, jnp.bool_(is_due), jnp.bool_(False), transition, keys(2, 2)
    )
    return gradient, losses


def test_gradients_by_hand():
    """Temperature 0. Gradients do not flow into targets, although there are no target critics."""
    gradient, losses = gradients(is_due=True)
    # The next action is 1/2: targets 1 + 1/2 * min(3, 2) * 1/2 = 1.5, and 2 where the episode terminated.
    # Critic 1: values 3 and -1.5, errors 1.5 and -3.5, gradient (1.5 * 1 + -3.5 * -0.5) / 2 = 1.625.
    # Critic 2: values 2 and -1, errors 0.5 and -3, gradient (0.5 + -3 * -0.5) / 2 = 1.
    np.testing.assert_allclose(gradient.critics, [1.625, 1.0], rtol=1e-5)
    assert float(losses["critic_loss"]) == pytest.approx(0.25 * (1.5**2 + 3.5**2 + 0.5**2 + 3.0**2), rel=1e-5)
    # Actor: -min(3, 2) * tanh(mean), whose slope is -2 * (1 - 1/4).
    assert float(gradient.actor) == pytest.approx(-1.5, rel=1e-5)


def test_temperature_in_targets_and_losses():
    """A deviation of exp(-20): entropy -20 + (1 + log 2 pi) / 2 + log(1 - 1/4) nats, about -19; target -1."""
    gradient, losses = gradients(is_due=True, log_temperature=math.log(0.25))
    entropy = float(losses["entropy"])
    assert entropy == pytest.approx(-20.0 + 0.5 * (1.0 + math.log(2.0 * math.pi)) + math.log(0.75), abs=2.0)
    assert float(gradient.log_temperature) == pytest.approx(0.25 * (entropy + 1.0), abs=1.0)
    # Only the first sample's target changes: 1.5 + 1/2 * 1/4 * entropy.
    target = 1.5 + 0.125 * entropy
    first = (3.0 - target) * 1.0 + -3.5 * -0.5
    assert float(gradient.critics[0]) == pytest.approx(first / 2, abs=0.2)


def test_delayed_actor_has_no_gradient():
    gradient, _ = gradients(is_due=False, log_temperature=0.0)
    assert float(gradient.actor) == float(gradient.log_temperature) == 0.0
    assert float(gradient.critics[0]) != 0.0


# --- joint forward pass, and the order of updates ---

SMALL = {
    "num_envs": 4, "batch_size": 8, "buffer_size": 64, "learning_starts": 0,
    "hidden": (4,), "critic_hidden": (4,),
}  # fmt: skip


def test_joint_normalisation_and_policy_delay():
    algorithm = algos.CrossQ(env=envs.make("Pendulum-v1"), **SMALL)
    learned = jax.jit(algorithm.init)(jax.random.key(0)).learned
    observation, following = np.random.default_rng(0).normal([1.0, 5.0], 1.0, size=(8, 3, 2)).T.swapaxes(1, 2)
    transition = Transition(
        jnp.float32(observation), jnp.full((8, 1), 0.5), jnp.ones(8), jnp.full(8, 0.9), jnp.float32(following)
    )
    update = jax.jit(algorithm._learn_from)
    moved = []
    for time in range(6):
        before = learned
        learned, *_ = update(learned, transition, keys(8, 2))
        moved.append(tuple(
            any(bool(jnp.any(a != b)) for a, b in zip(*map(jax.tree.leaves, (old, new)), strict=True))
            for old, new in zip(
                (before.parameters.critics, before.parameters.actor, before.parameters.log_temperature,
                 before.statistics.actor, before.optimizer_state.actor),
                (learned.parameters.critics, learned.parameters.actor, learned.parameters.log_temperature,
                 learned.statistics.actor, learned.optimizer_state.actor),
                strict=True,
            )
        ))  # fmt: skip
        if time == 0:  # running mean of the inputs: 0.01 of the mean over both minibatches
            mean = learned.statistics.critics["critic_1"]["BatchRenorm_0"]["mean"]
            both = np.concatenate([observation, following]).mean(axis=0)
            np.testing.assert_allclose(mean[:3], 0.01 * both, rtol=1e-4)
    not_due, due = (True, False, False, False, False), (True,) * 5
    assert moved == [not_due, not_due, due] * 2
