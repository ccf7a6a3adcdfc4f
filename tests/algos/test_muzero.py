"""Gumbel MuZero: targets, unrolled samples and the loss of Schrittwieser et al. 2020 (arXiv 1911.08265,
section 3 and appendix G) by hand; searches in a model whose best actions are known; probe environments.
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
from envs import TimeStep
from fdg.errors import FdgError
from tests.algos.probes import trained

pytest.importorskip("mctx")
KEY = jax.random.key(0)


class Line(nn.Module):
    """A model of numbers: an observation is multiplied by a parameter, an action adds to it."""

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


class OnALine(algos.MuZero):
    """MuZero with that model."""

    model = property(lambda self: Line())


def on_a_line(**fields):
    settings = {"num_envs": 2, "num_steps": 5, "num_minibatches": 1, "rescale": False, "discount": 0.5}
    return OnALine(env=envs.make("CartPole-v1"), **{**settings, **fields})


def column(*numbers):
    """`[T]` as `[T, B = 2]`: the second environment has the same."""
    return jnp.stack([jnp.array(numbers)] * 2, axis=1)


def time_step(reward, terminated, truncated, final):
    zero = jnp.zeros_like(reward)
    return TimeStep(
        observation=None, reward=reward, terminated=terminated, truncated=truncated,
        final_observation=final[..., None], episode_return=zero, episode_length=zero.astype(jnp.int32),
    )  # fmt: skip


# The second step terminates, the fourth is truncated.
ENDS = column(False, True, False, False, False), column(False, False, False, True, False)
STEP = time_step(column(1.0, 5.0, 2.0, 1.0, 3.0), *ENDS, final=column(0.0, 0.0, 0.0, -6.0, 4.0))
SEARCHED = column(10.0, 20.0, 30.0, 40.0, 50.0)
PARAMETERS = {"w": jnp.float32(1)}


@pytest.mark.parametrize(
    ("n_step", "expected"),
    [
        # The search's value of the next observation; none after the end; the model's, -6 and 4, after the
        # truncation and the rollout.
        (1, [1 + 20 / 2, 5, 2 + 40 / 2, 1 - 6 / 2, 3 + 4 / 2]),
        # Two rewards: of step 0 to the termination, of step 2 to the truncation.
        (2, [1 + 5 / 2, 5, 2 + 1 / 2 - 6 / 4, 1 - 6 / 2, 3 + 4 / 2]),
        (9, [1 + 5 / 2, 5, 2 + 1 / 2 - 6 / 4, 1 - 6 / 2, 3 + 4 / 2]),
    ],
)
def test_value_targets_by_hand(n_step, expected):
    found = on_a_line(n_step=n_step).targets(PARAMETERS, SEARCHED, STEP)
    np.testing.assert_allclose(found, column(*map(float, expected)), rtol=1e-6)


def test_the_models_value_is_rescaled():
    """After the rollout: 3 + h^-1(4) / 2."""
    found = on_a_line(rescale=True, n_step=1).targets(PARAMETERS, SEARCHED, STEP)
    np.testing.assert_allclose(found[4], 3 + unrescaled(jnp.float32(4)) / 2, rtol=1e-6)


def test_unrolled_samples_by_hand():
    """Three steps from each row: none of another episode counts, and what follows a termination is zero."""
    policy = column(*np.arange(5.0))[..., None]
    trajectory = Trajectory(
        observation=column(*np.arange(5.0))[..., None], action=column(*range(5)),
        decision=Search(column(*range(5)), policy, SEARCHED), time_step=STEP,
    )  # fmt: skip
    found = on_a_line(unroll_steps=3, n_step=1).samples(PARAMETERS, trajectory)
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


def test_the_loss_and_its_gradient_by_hand():
    """An observation of 2, actions 1 and 0, of which the second terminates: latent states 2, 3 and 3.

    Values 2, 3 and 3 have targets 1, 1 and 0 (7 does not count): 0.5 * (1 + (4 + 9) / 2) = 3.75. Rewards
    predicted are 4 and 6, those found 1 and 4: 0.5 * (9 + 4) / 2 = 3.25. Policies of two even logits cost
    log 2 each, the first and half of the second.

    By the parameter, 1, the derivative of the first latent state is 2, of the second 1 and of the third 1/2,
    as each of the dynamics halves it: of values 1 * 2 + (2 * 1 + 3 / 2) / 2 = 3.75; of rewards, each twice
    the halved state before, (3 * 2 * 1 + 2 * 2 / 2) / 2 = 4.
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
    algorithm = on_a_line(unroll_steps=2, value_coefficient=0.5, reward_coefficient=2.0)
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
    losses = on_a_line(unroll_steps=2, rescale=True).loss(PARAMETERS, sample)[1]
    np.testing.assert_allclose(losses["value_loss"], expected[0] + expected[1:3].mean(), rtol=1e-6)
    np.testing.assert_allclose(losses["reward_loss"], expected[3:].mean(), rtol=1e-6)


def test_value_rescaling_and_its_inverse():
    """h(3) = sqrt(4) - 1 + 0.003, h is odd, and the inverse gives back what it was given."""
    np.testing.assert_allclose(rescaled(jnp.array([-3.0, 0.0, 3.0])), [-1.003, 0.0, 1.003], rtol=1e-6)
    numbers = jnp.array([-1e4, -7.0, -1e-3, 0.0, 1e-3, 0.5, 300.0, 1e5])
    np.testing.assert_allclose(unrescaled(rescaled(numbers)), numbers, rtol=2e-5, atol=2e-7)


# --- searches ---

# Four states, two actions: where they lead, and what they pay. From state 0, action 0 pays nothing, and 4
# after it; action 1 pays 1, and nothing after it.
NEXT = jnp.array([[1, 2], [3, 3], [3, 3], [3, 3]])
REWARD = jnp.array([[0.0, 1.0], [4.0, 0.0], [0.0, 0.0], [0.0, 0.0]])


@pytest.mark.parametrize(
    ("discount", "allowed", "pays", "best"),
    [
        (0.5, (True, True), 1.0, 0),  # 0.5 * 4 is more than 1
        (0.2, (True, True), 1.0, 1),  # 0.2 * 4 is less
        (0.5, (False, True), 1.0, 1),
        (0.5, (True, True), 0.0, None),  # without rewards, there is nothing to choose by
    ],
)
def test_a_search_finds_the_best_action_of_a_known_model(discount, allowed, pays, best):
    def evaluate(parameters, latent):
        return jnp.zeros((latent.shape[0], 2)), jnp.zeros(latent.shape[0])

    def imagine(parameters, latent, action):
        state = latent[:, 0].astype(jnp.int32)
        return NEXT[state, action].astype(jnp.float32)[:, None], pays * REWARD[state, action]

    found = latent_search(
        evaluate, imagine, (), KEY, jnp.zeros(1), jnp.array(allowed), 32, scale=0.0, discount=discount
    )
    if best is None:
        np.testing.assert_allclose(found.policy, [0.5, 0.5], rtol=1e-5)
        assert found.value == 0
        return
    assert found.action == best and found.policy[best] > 0.9
    np.testing.assert_allclose(jnp.sum(found.policy), 1.0, rtol=1e-6)
    # The mean of what was visited: at most what the best is worth.
    assert 0.5 < found.value <= max(4 * discount, 1.0) + 1e-6


# --- probe environments ---

SMALL = {
    "num_envs": 16, "num_steps": 8, "num_simulations": 4, "hidden": (16,), "latent_size": 8,
    "unroll_steps": 2, "n_step": 2, "learning_rate": 3e-3, "num_minibatches": 2,
}  # fmt: skip


def mean_return(algorithm, iterations):
    state = trained(algorithm, iterations)
    return float(jax.jit(lambda state: algorithm.evaluate(state, KEY, 64, False)["return"])(state))


def test_it_learns_what_an_observation_asks_for():
    env = envs.make("probe:policy_of_observation")
    assert mean_return(algos.MuZero(env=env, total_steps=128 * 60, **SMALL), 60) > 0.9


@pytest.mark.parametrize("name", ["probe:masked", "probe:parts?length=4"])
def test_it_learns_a_probe(name):
    name, options = envs.parse(name)
    env = envs.make(name, **options)
    found = mean_return(algos.MuZero(env=env, total_steps=128 * 150, **SMALL), 150)
    assert found > 0.9 * env.optimal_return


def test_without_rewards_in_the_search_it_learns_nothing():
    """Nor, in mctx's own way, if the least difference of values is stretched to the whole range."""

    class Unpaid(algos.MuZero):
        def _imagine(self, parameters, latent, action):
            latent, reward = super()._imagine(parameters, latent, action)
            return latent, jnp.zeros_like(reward)

    env = envs.make("probe:policy_of_observation")
    assert mean_return(Unpaid(env=env, total_steps=128 * 60, **SMALL), 60) < 0.7
    stretched = algos.MuZero(env=env, total_steps=128 * 60, least_range=1e-8, **SMALL)
    assert mean_return(stretched, 60) < 0.7


def test_mistakes():
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
