"""Offline algorithms: targets, losses and gradients by hand.

Equations: IQL (arXiv 2110.06169) 4 to 7; TD3+BC (arXiv 2106.06860) 3 and 5; ReBRAC (arXiv 2305.09836, its
section 3 and the authors' code); CQL (arXiv 2006.04779) 4 and appendix F.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos.offline import iql
from algos.offline.rebrac import Followed, Pairs
from algos.replay import Step, Transition
from algos.td3 import Parameters

HALF = jnp.float32(math.atanh(0.5))  # an actor that does one half
ONE = envs.make("probe:continuous")  # observations [1], actions [1] from -1 to 1


def of_action(c, observation, action):
    """Critics: the value of critic i is `c_i * action`."""
    return c[0] * action[:, 0], c[1] * action[:, 0]


def column(*numbers):
    return jnp.array(numbers)[:, None]


def keys(count, each=1):
    return jax.random.split(jax.random.key(0), (each, count))


CRITICS = algos.Network(lambda key, observation, action: jnp.zeros(2), of_action)
MEAN = algos.Network(
    lambda key, observation: jnp.float32(0.0), lambda x, observation: jnp.full((len(observation), 1), x)
)


class OneIQL(algos.IQL):
    """The actor's mean is one number, its deviation one; V is another number plus the observation."""

    _critics = CRITICS
    _actor = algos.Network(
        lambda key, observation: jnp.float32(0.0),
        lambda x, observation: jnp.stack([jnp.full(len(observation), x), jnp.zeros(len(observation))], 1),
    )
    _value = algos.Network(
        lambda key, observation: jnp.float32(0.0), lambda v, observation: v + observation[:, 0]
    )


def test_iql_by_hand():
    algorithm = OneIQL(env=ONE, expectile=0.75, advantage_scale=2.0, largest_weight=3.0)
    transition = Transition(
        observation=column(0.0, 0.0),
        action=column(1.0, -0.5),
        reward=jnp.array([1.0, 2.0]),
        discount=jnp.array([0.5, 0.0]),  # the second episode terminated
        next_observation=column(3.0, 7.0),
    )
    parameters = iql.Parameters(HALF, jnp.array([3.0, 2.0]), jnp.float32(1.0))
    gradient, losses = algorithm.gradient(parameters, jnp.array([2.0, 4.0]), transition)
    # The lower targets are 2 and -2, V is 1: advantages 1 and -3, of which the first is above zero.
    assert float(losses["value_loss"]) == pytest.approx((0.75 * 1.0 + 0.25 * 9.0) / 2)
    assert float(gradient.value) == pytest.approx((0.75 * -2.0 + 0.25 * 6.0) / 2, abs=1e-6)
    # Targets of the critics: 1 + 0.5 * (1 + 3) = 3, and 2. They give 3 and -1.5, and 2 and -1.
    assert float(losses["critic_loss"]) == pytest.approx(0.25 * (0.0 + 3.5**2 + 1.0 + 9.0))
    np.testing.assert_allclose(gradient.critics, [0.5 * (0 + -3.5 * -0.5), 0.5 * (-1 + -3 * -0.5)], rtol=1e-5)
    # Weights min(exp(2), 3) and exp(-6); the density's errors are 1/2 and -1, whose slope by the mean is 1.
    weights = np.array([3.0, math.exp(-6.0)])
    log_prob = -0.5 * np.array([0.25, 1.0]) - 0.5 * math.log(2 * math.pi)
    assert float(losses["actor_loss"]) == pytest.approx(-np.mean(weights * log_prob), rel=1e-5)
    slope = -np.mean(weights * np.array([0.5, -1.0])) * 0.75  # of the tanh at one half: 1 - 1/4
    assert float(gradient.actor) == pytest.approx(slope, rel=1e-5)


class OneTD3BC(algos.TD3BC):
    """The actor's number is its parameter, before the tanh."""

    _critics, _actor = CRITICS, MEAN


def test_td3_bc_by_hand():
    algorithm = OneTD3BC(env=ONE, value_weight=2.0, normalize_observation=False)
    transition = Transition(column(0.0, 0.0), column(1.0, 0.0), *jnp.zeros((2, 2)), column(0.0, 0.0))
    loss, slope = jax.value_and_grad(algorithm._actor_loss)(HALF, jnp.array([-4.0, 9.0]), transition)
    # The first critic gives -2 for both, so lambda is 2 / 2 and a constant; errors are 1/4 and 1/4.
    assert float(loss) == pytest.approx(0.25 - 1.0 * -2.0)
    assert float(slope) == pytest.approx((0.5 * (2 * -0.5 + 2 * 0.5) + 4.0) * 0.75, rel=1e-5)


class OneReBRAC(algos.ReBRAC):
    """As `OneTD3BC`."""

    _critics, _actor = CRITICS, MEAN


def test_rebrac_by_hand():
    algorithm = OneReBRAC(env=ONE, actor_penalty=0.5, critic_penalty=2.0, target_noise=0.0)
    transition = Followed(
        *(column(0.0, 0.0, 0.0), column(1.0, 0.0, 0.0), jnp.ones(3), jnp.array([0.5, 0.0, 0.5])),
        next_observation=column(0.0, 0.0, 0.0),
        next_action=column(-0.5, 0.0, -1.0),
        follows=jnp.array([True, False, False]),  # the second terminated, the third was truncated
    )
    target = algorithm._target(Parameters(HALF, jnp.array([8.0, 20.0])), transition, keys(3)[0])
    # The next action is 1/2, at a distance of 1 to the first: 1 + 0.5 * (4 - 2 * 1).
    np.testing.assert_allclose(target, [2.0, 1.0, 3.0], rtol=1e-6)
    loss = algorithm._actor_loss(HALF, jnp.array([4.0, 2.0]), transition)
    assert float(loss) == pytest.approx(0.5 * 0.25 - 1.0)  # the lower critic's 1, divided by its size


def test_pairs_have_the_next_action_of_the_same_episode():
    replay = Pairs(num_envs=1, buffer_size=4, batch_size=64, n_step=2, discount=0.5)
    number = jnp.arange(4.0)[:, None]
    ended = jnp.array([[False], [True], [False], [False]])
    steps = Step(
        number[..., None],
        10 * number[..., None],
        number,
        ended,
        ~ended & (number == 3),
        number[..., None] + 1,
    )
    state = replay.add(replay.init(jnp.zeros((1, 1)), jnp.zeros((1, 1))), steps)
    drawn = replay.sample(state, jax.random.key(0)).transition
    first = np.asarray(drawn.observation[:, 0])
    assert set(first) == {0.0, 1.0, 2.0}  # no window begins with the last one
    np.testing.assert_array_equal(drawn.next_action[:, 0], 10 * (first + 1))
    np.testing.assert_array_equal(drawn.follows, first != 1)
    np.testing.assert_array_equal(drawn.reward, first)
    np.testing.assert_array_equal(drawn.discount, np.where(first == 1, 0.0, 0.5))


class OneCQL(algos.CQL):
    """Critics that are numbers, whatever the action, or their product with it; a standard Gaussian actor."""

    _critics = CRITICS
    _actor = algos.Network(
        lambda key, observation: jnp.zeros(()), lambda x, observation: jnp.zeros((len(observation), 2)) + x
    )


def test_the_gap_of_cql_by_hand():
    algorithm = OneCQL(env=ONE, num_actions=1)
    transition = Transition(column(0.0), column(1.0), *jnp.zeros((2, 1)), column(0.0))
    # Three actions with densities 1/2, 1/4 and 1; the first critic gives 2, 1 and 0 for them.
    actions, log_density = (
        jnp.array([1.0, 0.5, 0.0])[:, None, None],
        jnp.log(jnp.array([[0.5], [0.25], [1.0]])),
    )
    gap = algorithm._gap(jnp.array([2.0, 0.0]), transition, actions, log_density)
    first = math.log((math.exp(2) / 0.5 + math.exp(1) / 0.25 + 1.0) / 3) - 2.0
    second = math.log((1 / 0.5 + 1 / 0.25 + 1.0) / 3) - 0.0
    assert float(gap) == pytest.approx(first + second, rel=1e-5)


def test_the_gap_of_cql_estimates_an_integral():
    """Critic 1 is the action itself: the log of the integral of exp(a) from -1 to 1 is log(e - 1/e)."""
    algorithm = OneCQL(env=ONE, num_actions=4_000)
    transition = Transition(column(0.0), column(0.0), *jnp.zeros((2, 1)), column(0.0))
    actions, log_density = algorithm._drawn(jnp.float32(0.0), transition, keys(1, 3))
    assert actions.shape == (12_000, 1, 1) and float(jnp.max(jnp.abs(actions))) <= 1.0
    gap = algorithm._gap(jnp.array([1.0, 1.0]), transition, actions, log_density)
    assert float(gap) == pytest.approx(2 * math.log(math.e - 1 / math.e), abs=0.05)


def test_the_loss_of_cql_is_that_of_sac_and_the_gap():
    """By the critics alone: the actor's and the temperature's gradients are those of SAC."""
    how = {"env": ONE, "hidden": (8,), "layer_norm": False}
    algorithm, sac = algos.CQL(conservatism=3.0, num_envs=1, batch_size=4, **how), algos.SAC(**how)
    seen, done = jnp.ones((4, 1)), jnp.full((4, 1), 0.5)
    learned = sac._first(*jax.random.split(jax.random.key(1)), seen, done)
    transition = Transition(seen, done, jnp.ones(4), jnp.full(4, 0.9), seen)
    drawn = keys(4, 5)
    mine, _, metrics = algorithm.gradient(learned.parameters, learned.target_critics, transition, drawn)
    theirs, _, _ = sac.gradient(learned.parameters, learned.target_critics, transition, drawn[:2])
    for part in ("actor", "log_temperature"):
        jax.tree.map(np.testing.assert_array_equal, getattr(mine, part), getattr(theirs, part))
    gap = jax.grad(
        lambda critics: algorithm._gap(
            critics, transition, *algorithm._drawn(learned.parameters.actor, transition, drawn[2:])
        )
    )(learned.parameters.critics)
    expected = jax.tree.map(lambda x, y: x + 3.0 * y, theirs.critics, gap)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), mine.critics, expected)
    assert float(metrics["conservative_gap"]) > 0


def test_cloning_by_hand():
    """Two logits, log 3 and 0, are odds of 3 to 1; of a Gaussian of deviation one only the error counts."""

    class Discrete(algos.BC):
        _actor = algos.Network(lambda key, o: jnp.zeros(2), lambda x, o: jnp.broadcast_to(x, (len(o), 2)))

    transition = Transition(jnp.zeros((2, 4)), jnp.array([0, 1]), *jnp.zeros((2, 2)), jnp.zeros((2, 4)))
    loss, losses = Discrete(env=envs.make("CartPole-v1")).loss(
        algos.offline.bc.Parameters(jnp.array([math.log(3.0), 0.0])), transition
    )
    assert float(loss) == pytest.approx(-0.5 * (math.log(0.75) + math.log(0.25)))
    assert float(losses["squared_error"]) == 0.5

    class Gaussian(algos.BC):
        _actor = OneIQL._actor

    transition = Transition(column(0.0), column(-0.5), *jnp.zeros((2, 1)), column(0.0))
    gradient, losses = Gaussian(env=ONE).gradient(algos.offline.bc.Parameters(HALF), transition)
    assert float(losses["loss"]) == pytest.approx(0.5 + 0.5 * math.log(2 * math.pi))
    assert float(gradient.actor) == pytest.approx(1.0 * 0.75, rel=1e-5)
