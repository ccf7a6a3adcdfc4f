"""ReBRAC: targets and the actor's loss by hand (section 3 of Tarasov et al. 2023, arXiv 2305.09836)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
from algos.offline.td3 import ReplayWithNextAction, TransitionWithNextAction
from algos.replay import Step
from algos.td3 import Parameters
from tests.algos.by_hand import CRITICS, HALF, MEAN, ONE, column, keys


class ScalarReBRAC(algos.ReBRAC):
    """Actor and critics with one parameter each."""

    _critics, _actor = CRITICS, MEAN


def test_rebrac_by_hand():
    algorithm = ScalarReBRAC(env=ONE, actor_penalty=0.5, critic_penalty=2.0, target_noise=0.0)
    transition = TransitionWithNextAction(
        *(column(0.0, 0.0, 0.0), column(1.0, 0.0, 0.0), jnp.ones(3), jnp.array([0.5, 0.0, 0.5])),
        next_observation=column(0.0, 0.0, 0.0),
        next_action=column(-0.5, 0.0, -1.0),
        follows=jnp.array([True, False, False]),  # the second terminated, the third was truncated
    )
    target = algorithm._target(Parameters(HALF, jnp.array([8.0, 20.0])), transition, keys(3)[0])
    # The policy's next action is 1/2, at a distance of 1 from the dataset's: 1 + 0.5 * (4 - 2 * 1).
    np.testing.assert_allclose(target, [2.0, 1.0, 3.0], rtol=1e-6)
    loss = algorithm._actor_loss(HALF, jnp.array([4.0, 2.0]), transition)
    assert float(loss) == pytest.approx(0.5 * 0.25 - 1.0)  # the lower value 1, divided by its magnitude


def test_next_action_is_from_the_same_episode():
    replay = ReplayWithNextAction(num_envs=1, buffer_size=4, batch_size=64, n_step=2, discount=0.5)
    index = jnp.arange(4.0)[:, None]
    terminated = jnp.array([[False], [True], [False], [False]])
    steps = Step(
        index[..., None],
        10 * index[..., None],
        index,
        terminated,
        ~terminated & (index == 3),
        index[..., None] + 1,
    )
    state = replay.add(replay.init(jnp.zeros((1, 1)), jnp.zeros((1, 1))), steps)
    drawn = replay.sample(state, jax.random.key(0)).transition
    first = np.asarray(drawn.observation[:, 0])
    assert set(first) == {0.0, 1.0, 2.0}  # no window starts at the last step
    np.testing.assert_array_equal(drawn.next_action[:, 0], 10 * (first + 1))
    np.testing.assert_array_equal(drawn.follows, first != 1)
    np.testing.assert_array_equal(drawn.reward, first)
    np.testing.assert_array_equal(drawn.discount, np.where(first == 1, 0.0, 0.5))
