"""SAC: its three losses by hand, an update, and initial random actions.

Haarnoja et al. 2018 (arXiv 1812.05905): critic loss, equation 5, with targets by 2 and 3; actor loss,
equation 7, with actions by 9; temperature loss, equation 18; the lower of two critics, section 6; an
update, algorithm 1.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import algos
import envs
import fdg
import policies
from algos import off_policy, sac
from algos.replay import Replay
from algos.sac import Learned, Parameters
from tests.algos.by_hand import CRITICS, NARROW, keys, transitions

# --- losses, with networks of one parameter ---


class ScalarSAC(algos.SAC):
    """The actor's mean is its parameter, its deviation near 0; critic i returns `c_i * action`."""

    _actor, _critics = NARROW, CRITICS


def scalar_sac(**fields):
    return ScalarSAC(env=envs.make("probe:continuous"), **fields)


def test_targets_by_hand():
    """Discount 1/2. The first step continues, the second terminates, the third is truncated."""
    transition = transitions(action=[0.0] * 3, reward=[1.0, 1.0, 1.0], discount=[0.5, 0.0, 0.5])
    following = jnp.array([4.0, 4.0, -4.0]), jnp.array([10.0, 10.0, -10.0])
    cost = 0.5 * jnp.array([-2.0, -2.0, 4.0])  # the temperature times the log-probability
    target = algos.SAC.grid.critic_kind.target(transition.reward, transition.discount, *following, cost)
    # Lower values 4, 4 and -10 (of the second critic); minus the cost 4 + 1, 4 + 1 and -10 - 2.
    assert target.tolist() == [1.0 + 0.5 * 5.0, 1.0, 1.0 + 0.5 * -12.0]


def test_gradients_by_hand():
    """With temperature 0, each loss has gradients only for its own parameters."""
    algorithm = scalar_sac()
    mean, c = math.atanh(0.5), jnp.array([3.0, 2.0])
    parameters = Parameters(jnp.float32(mean), c, jnp.float32(-jnp.inf))
    transition = transitions(action=[1.0, -0.5], reward=[1.0, 2.0], discount=[0.5, 0.0])
    gradient, _, losses = algorithm.gradient(parameters, jnp.array([4.0, 6.0]), transition, keys(2, 2))
    # The next action is 1/2: targets 1 + 1/2 * min(4, 6) * 1/2 = 2, and 2.
    # Critic 1: values 3 and -1.5, errors 1 and -3.5, gradient (1 * 1 + -3.5 * -0.5) / 2 = 1.375.
    # Critic 2: values 2 and -1, errors 0 and -3, gradient (0 + -3 * -0.5) / 2 = 0.75.
    np.testing.assert_allclose(gradient.critics, [1.375, 0.75], rtol=1e-5)
    assert float(losses["critic_loss"]) == pytest.approx(0.25 * (1.0 + 3.5**2 + 0.0 + 3.0**2), rel=1e-5)
    # Actor: -min(3, 2) * tanh(mean), whose slope is -2 * (1 - 1/4).
    assert float(gradient.actor) == pytest.approx(-1.5, rel=1e-5)
    assert float(losses["actor_loss"]) == pytest.approx(-1.0, rel=1e-5)


@pytest.mark.parametrize("target", [-100.0, 0.0])
def test_temperature_gradient(target):
    """A deviation of exp(-20) has an entropy of about -19 nats."""
    algorithm = scalar_sac(target_entropy=target)
    parameters = Parameters(jnp.float32(0.0), jnp.zeros(2), jnp.log(jnp.float32(0.25)))
    transition = transitions(action=[0.0] * 512, reward=[0.0] * 512, discount=[0.0] * 512)
    gradient, _, losses = algorithm.gradient(parameters, jnp.zeros(2), transition, keys(512, 2))
    # Entropy of a normal: log std + (1 + log 2 pi) / 2; the tanh changes nothing at 0.
    entropy = -20.0 + 0.5 * (1.0 + math.log(2.0 * math.pi))
    assert float(losses["entropy"]) == pytest.approx(entropy, abs=0.1)
    # Derivative of equation 18 by log alpha: alpha * (entropy - target). If negative, descent raises alpha.
    assert float(gradient.log_temperature) == pytest.approx(0.25 * (entropy - target), abs=0.05)
    assert (gradient.log_temperature < 0) == (entropy < target)


def test_actor_entropy_gradient():
    """The entropy term pulls the mean to 0: d log_prob / d mean = 2 tanh(mean)."""
    parameters = Parameters(jnp.float32(math.atanh(0.5)), jnp.zeros(2), jnp.log(jnp.float32(0.25)))
    transition = transitions(action=[0.0], reward=[0.0], discount=[0.0])
    gradient, *_ = scalar_sac().gradient(parameters, jnp.zeros(2), transition, keys(1, 2))
    assert float(gradient.actor) == pytest.approx(0.25 * 2.0 * 0.5, rel=1e-5)


def test_update_by_hand():
    """Adam's first step is the learning rate times the sign; targets move 1/4 of the way."""
    algorithm = scalar_sac(learning_rate=0.5, target_rate=0.25)
    parameters = Parameters(jnp.float32(0.0), jnp.zeros(2), jnp.float32(0.0))
    learned = Learned(parameters, jnp.array([4.0, 8.0]), algorithm._optimizer.init(parameters))
    gradient = Parameters(jnp.float32(-2.0), jnp.array([3.0, 0.0]), jnp.float32(1.0))
    after = algorithm.update(gradient, learned)
    np.testing.assert_allclose(after.parameters.actor, 0.5, rtol=1e-5)
    np.testing.assert_allclose(after.parameters.critics, [-0.5, 0.0], rtol=1e-5)
    np.testing.assert_allclose(after.parameters.log_temperature, -0.5, rtol=1e-5)
    np.testing.assert_allclose(after.target_critics, [4.0 + 0.25 * (-0.5 - 4.0), 6.0], rtol=1e-5)


def test_minibatches_cover_all_environments():
    samples = 100 * jnp.repeat(jnp.arange(3), 4) + jnp.tile(jnp.arange(4), 3)  # environment-major: 100 b + i
    assert off_policy.minibatches(samples, num_envs=3, updates=2).tolist() == [
        [0, 1, 100, 101, 200, 201],
        [2, 3, 102, 103, 202, 203],
    ]


def test_default_target_entropy():
    for target_entropy, expected in ((None, -3.0), (0.0, 0.0)):
        temperature_loss = sac.Entropy(target_entropy=target_entropy).losses(
            jnp.zeros(()), jnp.array([-5.0]), jnp.zeros(1), shape=(3,)
        )[1]
        assert float(temperature_loss) == 5.0 - expected


def test_buffer_settings():
    for total_steps, length in ((41, 40), (1_000, 100)):  # 41 steps are 20 iterations of two
        algorithm = scalar_sac(
            num_envs=2, batch_size=4, buffer_size=100, discount=0.9, total_steps=total_steps
        )
        assert algorithm.buffer == Replay(num_envs=2, buffer_size=length, batch_size=8, discount=0.9)


def test_initial_temperature_and_maximum_std():
    algorithm = scalar_sac(initial_temperature=0.5)
    assert float(algorithm.init(jax.random.key(0)).learned.parameters.log_temperature) == pytest.approx(
        math.log(0.5)
    )
    wide = algos.Network(lambda *_: (), lambda _, x: jnp.concatenate([0.0 * x, 0.0 * x + 99.0], axis=-1))
    policy = algos.SAC(env=algorithm.env, actor_network=wide)._policy((), jnp.ones((3, 1)))
    assert policy.log_std.tolist() == [[2.0]] * 3  # the upper bound of the authors' code


# --- before learning starts ---


def test_initial_actions_are_uniform():
    algorithm = scalar_sac()
    keys = jax.random.split(jax.random.key(0), 4096)
    uniform = algorithm.act(jnp.float32(5.0), None, jnp.bool_(False), None, jnp.zeros((4096, 1)), None, keys)[
        0
    ]
    assert uniform.shape == (4096, 1)
    counts, _ = np.histogram(uniform, bins=4, range=(-1.0, 1.0))
    np.testing.assert_allclose(counts / 4096, 0.25, atol=0.03)
    chosen = algorithm.act(jnp.float32(5.0), None, jnp.bool_(True), None, jnp.zeros((4096, 1)), None, keys)[0]
    np.testing.assert_allclose(chosen, np.tanh(5.0), rtol=1e-4)


@pytest.mark.parametrize("kind", ["sac", "td3", "redq", "crossq"])
def test_no_gradient_step_is_computed_until_learning_starts(kind, devices):
    """Four steps an iteration, two updates: learning starts after 16 steps, in the fifth iteration."""
    computed = []

    def count(gradient, _parameters=None):
        leaves, tree = jax.tree.flatten(gradient)
        leaves[0] = jax.pure_callback(lambda x: computed.append(1) or x, leaves[0], leaves[0])
        return tree.unflatten(leaves)

    algorithm = algos.make(
        kind, env=envs.make("probe:continuous"), num_envs=4, learning_starts=16, updates_per_step=0.5,
        batch_size=8, buffer_size=64, hidden=(8,), total_steps=100,
        optimizer=optax.chain(optax.stateless(count), optax.adam(1e-3)),
    )  # fmt: skip
    engine = fdg.compile(algorithm, policies.Central(), devices[:1])
    state, metrics = jax.block_until_ready(engine.run(engine.init(0), 4))
    assert not computed
    assert all(np.isnan(loss).all() for name, loss in metrics.items() if "loss" in name)
    jax.block_until_ready(engine.run(state, 1))
    assert computed


@dataclasses.dataclass(frozen=True)
class Lasting:
    """Reward 1 for every action; truncated after four steps."""

    name: ClassVar[str] = "lasting"
    observation_space: ClassVar[envs.Space] = envs.Box(1.0, 1.0, (1,))
    action_space: ClassVar[envs.Space] = envs.Box(-1.0, 1.0, (1,))
    max_episode_steps: ClassVar[int | None] = 4

    def reset(self, key):
        return (), jnp.ones(1)

    def step(self, key, state, action):
        return (), jnp.ones(1), jnp.float32(1), jnp.bool_(False), jnp.bool_(False)
