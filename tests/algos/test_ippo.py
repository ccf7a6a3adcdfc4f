"""IPPO: with one agent it matches PPO; advantages at the end of episodes by hand.

The loss is PPO's, equation 9 of Schulman et al. 2017 (arXiv 1707.06347; by hand in `test_ppo.py`), averaged
over agents too: de Witt et al. 2020 (arXiv 2011.09533), section 4, "Independent PPO". MAPPO's losses are
PPO's as well, with its clipped value: Yu et al. 2022 (arXiv 2103.01955), appendix A, "MAPPO details".
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import algos
import envs
from algos.recurrent_ppo import ends_per_agent
from envs import TimeStep
from envs.probe import PolicyOfObservation
from tests.algos.probes import trained


@dataclasses.dataclass(frozen=True)
class SingleAgent(PolicyOfObservation):
    """The probe with an axis for its single agent."""

    num_agents: int = 1

    def reset(self, key):
        x, observation = super().reset(key)
        return x, observation[None]

    def step(self, key, state, action):
        state, observation, reward, terminated, truncated = super().step(key, state, action[0])
        return state, observation[None], reward[None], terminated, truncated


def test_one_agent_matches_ppo():
    """Parameters, statistics and last observations are equal."""
    fields = {"num_envs": 4, "num_steps": 8, "num_epochs": 2, "num_minibatches": 2, "hidden": (8,)}
    fields |= {"normalize_observation": True, "normalize_reward": True}
    ppo = algos.PPO(env=envs.make("probe:policy_of_observation"), **fields)
    ippo = algos.IPPO(env=envs.vectorize(SingleAgent()), **fields)
    single, multi = trained(ppo, 2), trained(ippo, 2)
    for field in ("parameters", "observation_statistics", "return_statistics"):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5),
            getattr(single, field),
            getattr(multi, field),
        )
    np.testing.assert_array_equal(single.observation, multi.observation[:, 0])
    assert float(jnp.max(jnp.abs(single.parameters["actor"]["head"]["bias"]))) > 0.0  # it has learned


def test_episodes_end_for_all_agents():
    """Three steps of two agents: the first terminates, the second is truncated. Discount 1/2, lambda 1.

    Agent 0: rewards 1, 2, 3, values 0, next values 10: 1 (terminated: no bootstrap); 2 + 5 = 7 (truncated:
    bootstrapped, without the next advantage); 3 + 5 = 8. Agent 1: rewards 0, next values 10: 0, 5, 5.
    """
    algorithm = algos.IPPO(env=envs.make("probe:agents"), discount=0.5, gae_lambda=1.0)
    reward = jnp.array([[[1.0, 0.0]], [[2.0, 0.0]], [[3.0, 0.0]]])  # [T, B, A]
    zeros = jnp.zeros((3, 1))
    time_step = TimeStep(
        observation=None,
        reward=reward,
        terminated=jnp.array([[True], [False], [False]]),
        truncated=jnp.array([[False], [True], [False]]),
        final_observation=None,
        episode_return=zeros,
        episode_length=zeros,
    )
    advantage, target = algorithm.advantage(
        reward, jnp.zeros_like(reward), jnp.full_like(reward, 10.0), ends_per_agent(time_step)
    )
    assert advantage[:, 0].tolist() == target[:, 0].tolist() == [[1.0, 0.0], [7.0, 5.0], [8.0, 5.0]]
