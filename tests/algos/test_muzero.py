"""Gumbel MuZero: targets, unrolled samples and the loss of Schrittwieser et al. 2020 (arXiv 1911.08265,
section 3 and appendix G) by hand; searches in known models; probe environments.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos.muzero import Sample
from algos.on_policy import Trajectory
from algos.returns import rescaled, unrescaled
from algos.search import Search, latent_search
from fdg.errors import FdgError
from tests.algos.by_hand import in_two_envs as column
from tests.algos.by_hand import time_step
from tests.algos.probes import trained

pytest.importorskip("mctx")
KEY = jax.random.key(0)


class ScalarModel(nn.Module):
    """A scalar model: the latent is `w * observation`; an action is added to the latent."""

    def setup(self):
        self.w = self.param("w", nn.initializers.ones_init(), ())

    def __call__(self, observation):
        return self.predict(self.represent(observation))

    def represent(self, observation):
        return self.w * observation

    def imagine(self, latent, action):
        return latent + action[:, None], 2.0 * latent[:, 0]

    def predict(self, latent):
        return jnp.zeros((latent.shape[0], 2)), latent[:, 0]


class ScalarMuZero(algos.MuZero):
    """MuZero with the scalar model."""

    model = property(lambda self: ScalarModel())


def scalar_muzero(**fields):
    settings = {"num_envs": 2, "num_steps": 5, "num_minibatches": 1, "rescale": False, "discount": 0.5}
    return ScalarMuZero(env=envs.make("CartPole-v1"), **{**settings, **fields})


# The second step terminates, the fourth is truncated.
ENDS = column(False, True, False, False, False), column(False, False, False, True, False)
STEP = time_step(column(1.0, 5.0, 2.0, 1.0, 3.0), *ENDS, final=column(0.0, 0.0, 0.0, -6.0, 4.0))
SEARCH_VALUES = column(10.0, 20.0, 30.0, 40.0, 50.0)
PARAMETERS = {"w": jnp.float32(1)}


@pytest.mark.parametrize(
    ("n_step", "expected"),
    [
        # The search's value of the next observation; 0 after a termination; the model's values -6 and 4 after
        # the truncation and the rollout.
        (1, [1 + 20 / 2, 5, 2 + 40 / 2, 1 - 6 / 2, 3 + 4 / 2]),
        # Two rewards: step 0 up to the termination, step 2 up to the truncation.
        (2, [1 + 5 / 2, 5, 2 + 1 / 2 - 6 / 4, 1 - 6 / 2, 3 + 4 / 2]),
        (9, [1 + 5 / 2, 5, 2 + 1 / 2 - 6 / 4, 1 - 6 / 2, 3 + 4 / 2]),
    ],
)
def test_value_targets_by_hand(n_step, expected):
    found = scalar_muzero(n_step=n_step).targets(PARAMETERS, SEARCH_VALUES, STEP)
    np.testing.assert_allclose(found, column(*map(float, expected)), rtol=1e-6)


def test_model_value_is_rescaled():
    """The bootstrap value after the rollout: 3 + h^-1(4) / 2."""
    found = scalar_muzero(rescale=True, n_step=1).targets(PARAMETERS, SEARCH_VALUES, STEP)
    np.testing.assert_allclose(found[4], 3 + unrescaled(jnp.float32(4)) / 2, rtol=1e-6)


def test_unrolled_samples_by_hand():
    """Three steps from each row: other episodes are masked, and values after a termination are zero."""
    policy = column(*np.arange(5.0))[..., None]
    trajectory = Trajectory(
        observation=column(*np.arange(5.0))[..., None], action=column(*range(5)),
        decision=Search(column(*range(5)), policy, SEARCH_VALUES), time_step=STEP,
    )  # fmt: skip
    found = scalar_muzero(unroll_steps=3, n_step=1).samples(PARAMETERS, trajectory)
    assert found.action.shape == (5, 2, 3) and found.policy.shape == (5, 2, 4, 1)
    playing = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    known = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    for of_env in (0, 1):
        np.testing.assert_array_equal(found.playing[:, of_env], playing)
        np.testing.assert_array_equal(found.known[:, of_env], known)
        np.testing.assert_array_equal(found.action[1, of_env], [1, 2, 3])
        np.testing.assert_array_equal(found.reward[1, of_env], [5.0, 2.0, 1.0])
        np.testing.assert_array_equal(found.policy[0, of_env, :, 0], [0, 1, 2, 3])
        np.testing.assert_array_equal(found.value[0, of_env], [11.0, 5.0, 22.0, -2.0])


def test_loss_and_gradient_by_hand():
    """Observation 2, actions 1 and 0, the second terminates: latent states 2, 3 and 3.

    Values 2, 3 and 3 have targets 1, 1 and 0 (7 is ignored): 0.5 * (1 + (4 + 9) / 2) = 3.75. Predicted
    rewards are 4 and 6, targets 1 and 4: 0.5 * (9 + 4) / 2 = 3.25. Policies with equal logits have a loss of
    log 2 each: the first, and half of the second.

    Derivatives by the parameter, 1: of the first latent state 2, of the second 1 and of the third 1/2, since
    dynamics halve gradients. Values: 1 * 2 + (2 * 1 + 3 / 2) / 2 = 3.75. Rewards, each twice the previous
    latent with its halved gradient: (3 * 2 * 1 + 2 * 2 / 2) / 2 = 4.
    """
    sample = Sample(
        observation=jnp.array([[2.0]]),
        action=jnp.array([[1, 0]]),
        reward=jnp.array([[1.0, 4.0]]),
        policy=jnp.full((1, 3, 2), 0.5),
        value=jnp.array([[1.0, 1.0, 7.0]]),
        playing=jnp.array([[True, True, False]]),
        known=jnp.array([[True, True, True]]),
    )
    algorithm = scalar_muzero(unroll_steps=2, value_coefficient=0.5, reward_coefficient=2.0)
    gradient, losses = algorithm.gradient(PARAMETERS, sample)
    np.testing.assert_allclose(losses["policy_loss"], 1.5 * np.log(2), rtol=1e-6)
    np.testing.assert_allclose(losses["value_loss"], 3.75, rtol=1e-6)
    np.testing.assert_allclose(losses["reward_loss"], 3.25, rtol=1e-6)
    np.testing.assert_allclose(losses["entropy"], np.log(2), rtol=1e-6)
    np.testing.assert_allclose(losses["loss"], 1.5 * np.log(2) + 0.5 * 3.75 + 2 * 3.25, rtol=1e-6)
    np.testing.assert_allclose(gradient["w"], 0.5 * 3.75 + 2 * 4, rtol=1e-6)
    unknown = sample._replace(known=jnp.array([[True, True, False]]))
    np.testing.assert_allclose(algorithm.loss(PARAMETERS, unknown)[1]["value_loss"], 0.5 * (1 + 4 / 2))
    targets = rescaled(jnp.array([1.0, 1.0, 0.0, 1.0, 4.0]))
    expected = 0.5 * np.square(np.array([2, 3, 3, 4, 6]) - targets)
    losses = scalar_muzero(unroll_steps=2, rescale=True).loss(PARAMETERS, sample)[1]
    np.testing.assert_allclose(losses["value_loss"], expected[0] + expected[1:3].mean(), rtol=1e-6)
    np.testing.assert_allclose(losses["reward_loss"], expected[3:].mean(), rtol=1e-6)


def test_value_rescaling_and_its_inverse():
    """h(3) = sqrt(4) - 1 + 0.003; h is odd; unrescaled inverts rescaled."""
    np.testing.assert_allclose(rescaled(jnp.array([-3.0, 0.0, 3.0])), [-1.003, 0.0, 1.003], rtol=1e-6)
    values = jnp.array([-1e4, -7.0, -1e-3, 0.0, 1e-3, 0.5, 300.0, 1e5])
    np.testing.assert_allclose(unrescaled(rescaled(values)), values, rtol=2e-5, atol=2e-7)


# --- searches ---

# Four states, two actions: next states and rewards. From state 0, action 0 has reward 0 and then up to 4;
# action 1 has reward 1 and then 0.
NEXT = jnp.array([[1, 2], [3, 3], [3, 3], [3, 3]])
REWARD = jnp.array([[0.0, 1.0], [4.0, 0.0], [0.0, 0.0], [0.0, 0.0]])


@jax.jit
def search_from_first_state(discount, allowed, reward_scale):
    def evaluate(parameters, latent):
        return jnp.zeros((latent.shape[0], 2)), jnp.zeros(latent.shape[0])

    def imagine(parameters, latent, action):
        state = latent[:, 0].astype(jnp.int32)
        return NEXT[state, action].astype(jnp.float32)[:, None], reward_scale * REWARD[state, action]

    return latent_search(evaluate, imagine, (), KEY, jnp.zeros(1), allowed, 32, scale=0.0, discount=discount)


@pytest.mark.parametrize(
    ("discount", "allowed", "reward_scale", "best"),
    [
        (0.5, (True, True), 1.0, 0),  # 0.5 * 4 is more than 1
        (0.2, (True, True), 1.0, 1),  # 0.2 * 4 is less
        (0.5, (False, True), 1.0, 1),
        (0.5, (True, True), 0.0, None),  # without rewards, all actions are equal
    ],
)
def test_search_in_known_model(discount, allowed, reward_scale, best):
    found = search_from_first_state(discount, jnp.array(allowed), reward_scale)
    if best is None:
        np.testing.assert_allclose(found.policy, [0.5, 0.5], rtol=1e-5)
        assert found.value == 0
        return
    assert found.action == best and found.policy[best] > 0.9
    np.testing.assert_allclose(jnp.sum(found.policy), 1.0, rtol=1e-6)
    # The mean over visits is at most the best action's value.
    assert 0.5 < found.value <= max(4 * discount, 1.0) + 1e-6


# --- probe environments ---

SMALL = {
    "num_envs": 16, "num_steps": 8, "num_simulations": 4, "hidden": (16,), "latent_size": 8,
    "unroll_steps": 2, "n_step": 2, "learning_rate": 3e-3, "num_minibatches": 2,
}  # fmt: skip


def mean_return(algorithm, iterations):
    state = trained(algorithm, iterations)
    return float(jax.jit(lambda state: algorithm.evaluate(state, KEY, 64, False)["return"])(state))


def test_learns_policy_of_observation():
    env = envs.make("probe:policy_of_observation")
    assert mean_return(algos.MuZero(env=env, total_steps=128 * 60, **SMALL), 60) > 0.9


def test_invalid_settings():
    with pytest.raises(FdgError, match=r"cannot act in the action space Box.*use .*SAC"):
        algos.MuZero(env=envs.make("Pendulum-v1"))
    for name in ("n_step", "unroll_steps", "num_simulations", "max_considered", "latent_size"):
        with pytest.raises(FdgError, match=name):
            algos.MuZero(env=envs.make("CartPole-v1"), **{name: 0})
    with pytest.raises(FdgError, match="least_range"):
        algos.MuZero(env=envs.make("CartPole-v1"), least_range=0.0)
    with pytest.raises(FdgError, match="num_minibatches=3 does not divide num_envs"):
        algos.MuZero(env=envs.make("CartPole-v1"), num_minibatches=3)
    assert {"muzero"} <= set(algos.able_in(envs.make("game:hex"))) & set(
        algos.able_in(envs.make("Breakout-MinAtar"))
    )
