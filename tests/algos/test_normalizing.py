"""Agents that normalise: what their losses see and their statistics become, in NumPy; and who acts on them.

`algos/normalize.py` has tests of its own (`test_normalize.py`); PPO's learner is replayed in `test_ppo.py`.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from algos import normalize
from algos.actor_critic import Trajectory
from algos.replay import Transition
from envs import TimeStep

STEPS, ENVIRONMENTS = 5, 4
ON_POLICY = {"num_envs": ENVIRONMENTS, "num_steps": STEPS, "hidden": (4,)}
BOTH = {"normalize_observation": True, "normalize_reward": True}


def a_rollout(rng):
    """Some steps of Pendulum-v1 that nobody took, with ends of both kinds inside."""
    observation, final = rng.normal(1.0, 3.0, size=(2, STEPS, ENVIRONMENTS, 3)).astype(np.float32)
    terminated, truncated = rng.uniform(size=(2, STEPS, ENVIRONMENTS)) < 0.2
    reward = rng.normal(1.0, 30.0, size=(STEPS, ENVIRONMENTS)).astype(np.float32)
    action, zero = np.float32(rng.normal(size=(STEPS, ENVIRONMENTS, 1))), np.zeros((STEPS, ENVIRONMENTS))
    log_prob = rng.uniform(-2.0, -1.0, size=(STEPS, ENVIRONMENTS))
    time_step = TimeStep(None, reward, terminated, truncated, final, zero, zero)
    return jax.tree.map(jnp.asarray, Trajectory(observation, action, log_prob, time_step))


def test_the_learner_against_numpy():
    """Two updates: they are those of plain agents, on what NumPy makes of observations and rewards.

    Observations are normalised by what was seen before this rollout, rewards scaled by the returns of this
    one too; either is cut off at ten.
    """
    plain = algos.IMPALA(env=envs.make("Pendulum-v1"), **ON_POLICY)
    algorithm = algos.IMPALA(env=plain.env, **ON_POLICY, **BOTH)
    start = jax.jit(algorithm.init)(jax.random.key(0))
    learned = tuple(start[:4])
    expected, running_return = (*learned[:2], None, None), start.running_return
    learn, learn_plainly = jax.jit(algorithm.learn), jax.jit(plain.learn)
    rng, seen, returns, running = np.random.default_rng(0), [], [], np.zeros(ENVIRONMENTS)
    for _ in range(2):
        rollout = a_rollout(rng)
        learned, running_return, metrics = learn(learned, running_return, rollout)

        step = rollout.time_step
        mean, std = (np.mean(seen, axis=0), np.std(seen, axis=0)) if seen else (0.0, 1.0)
        for reward, done in zip(np.asarray(step.reward), np.asarray(step.done), strict=True):
            running = 0.99 * running + reward
            returns.extend(running)
            running = np.where(done, 0.0, running)
        observation, final = (
            jnp.clip((np.asarray(x) - mean) / std, -10, 10)
            for x in (rollout.observation, step.final_observation)
        )
        reward = jnp.clip(step.reward / np.std(returns), -10, 10)
        by_hand = rollout._replace(
            observation=observation, time_step=step._replace(reward=reward, final_observation=final)
        )
        expected, _, losses = learn_plainly(expected, None, by_hand)
        seen.extend(np.asarray(rollout.observation).reshape(-1, 3))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), expected[:2], learned[:2]
        )
        np.testing.assert_allclose(metrics["policy_loss"], losses["policy_loss"], rtol=1e-4)
    np.testing.assert_allclose(learned[2].mean, np.mean(seen, axis=0), rtol=1e-4)
    np.testing.assert_allclose(learned[2].var, np.var(seen, axis=0), rtol=1e-4)
    np.testing.assert_allclose(learned[3].var, np.var(returns), rtol=1e-4)
    np.testing.assert_allclose(running_return, running, rtol=1e-4, atol=1e-4)


OFF_POLICY = {
    "num_envs": ENVIRONMENTS, "num_steps": STEPS, "updates_per_step": 0.1, "batch_size": 8, "buffer_size": 40,
    "learning_starts": 0, "hidden": (4,),
}  # fmt: skip


def test_minibatches_against_numpy():
    """Of two updates off policy: those of a plain agent, on what NumPy makes of the minibatches.

    Statistics are those before this iteration's steps, which join them afterwards, once each.
    """
    plain = algos.TD3(env=envs.make("Pendulum-v1"), **OFF_POLICY)
    algorithm = algos.TD3(env=plain.env, **OFF_POLICY, normalize_observation=True)
    rng = np.random.default_rng(0)
    seen, observed = rng.normal(1.0, 3.0, size=(2, STEPS, ENVIRONMENTS, 3)).astype(np.float32)
    statistics = normalize.update(normalize.init((3,)), jnp.asarray(seen))
    observation, following = rng.normal(1.0, 3.0, size=(2, 2, 8, 3)).astype(np.float32)
    action, ones = np.float32(rng.uniform(-1.0, 1.0, size=(2, 8, 1))), np.ones((2, 8), np.float32)
    drawn = Transition(*map(jnp.asarray, (observation, action, -ones, 0.9 * ones, following)))
    learned, key, now = plain.init(jax.random.key(1)).learned, jax.random.key(2), jnp.bool_(True)
    new, losses = jax.jit(algorithm.learn)(learned, statistics, drawn, key, now)
    after = algorithm.observe(statistics, jnp.asarray(observed))

    mean, std = seen.mean(axis=(0, 1)), seen.std(axis=(0, 1))
    observation, following = (jnp.asarray((x - mean) / std) for x in (observation, following))
    by_hand = drawn._replace(observation=observation, next_observation=following)
    expected, told = jax.jit(plain.learn)(learned, None, by_hand, key, now)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), (expected, told), (new, losses)
    )
    both = np.concatenate([seen, observed]).reshape(-1, 3)
    np.testing.assert_allclose(after.mean, both.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(after.var, both.var(axis=0), rtol=1e-4)


@pytest.mark.parametrize(("kind", "fields"), [(algos.A3C, ON_POLICY), (algos.SAC, OFF_POLICY)])
def test_who_acts_sees_what_was_learned_from(kind, fields):
    """The same action for an observation and statistics as for what they make of it, without statistics."""
    plain = kind(env=envs.make("Pendulum-v1"), **fields)
    algorithm = kind(env=plain.env, **fields, normalize_observation=True)
    state = algorithm.init(jax.random.key(0))
    seen = np.random.default_rng(0).normal(1.0, 3.0, size=(9, 3)).astype(np.float32)
    statistics = normalize.update(state.observation_statistics, seen)
    state = state._replace(observation_statistics=statistics)
    observation = jnp.array([[0.5, -0.5, 3.0]])
    normalized = (observation - statistics.mean[None]) / jnp.sqrt(statistics.var[None])

    def acts(agent, observation):
        actor, keys = agent.actor(state), jax.random.split(jax.random.key(0), 1)
        return actor.act(actor.memory(1), observation, jnp.ones(1, bool), keys, True)[0]

    np.testing.assert_allclose(acts(algorithm, observation), acts(plain, normalized), rtol=1e-4)
    assert abs(float((acts(algorithm, observation) - acts(plain, observation))[0, 0])) > 1e-4


@dataclasses.dataclass(frozen=True)
class Room:
    """One of four rooms, which are no numbers."""

    name: ClassVar[str] = "room"
    observation_space: ClassVar[envs.Discrete] = envs.Discrete(4)
    action_space: ClassVar[envs.Discrete] = envs.Discrete(2)
    max_episode_steps: ClassVar[int | None] = 1

    def reset(self, key):
        return jnp.int32(0), jnp.int32(0)

    def step(self, key, state, action):
        return state, jnp.int32(1), jnp.float32(1), jnp.bool_(False), jnp.bool_(True)


@pytest.mark.parametrize("kind", [algos.A2C, algos.IMPALA, algos.PPO])
def test_what_has_no_statistics_is_refused(kind):
    with pytest.raises(fdg.FdgError, match=r"normalize_observation=True: .* has no mean or variance"):
        kind(env=envs.vectorize(Room()), normalize_observation=True)


@pytest.mark.parametrize("kind", [algos.IMPALA, algos.SAC])
def test_statistics_are_as_late_as_parameters(kind):
    """Under staleness the actor waits for both; of what the learner has, it waits for nothing else."""
    fields = OFF_POLICY if kind is algos.SAC else ON_POLICY
    algorithm = kind(env=envs.make("Pendulum-v1"), **fields, normalize_observation=True)
    delayed = fdg.place(algorithm, policies.SingleLearnerCoarse(actors=2, staleness=2), 3).delayed
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    late = [paths[i] for i in delayed.leaves]
    acting = ".parameters[" if kind is algos.IMPALA else ".learned.parameters.actor["
    assert late and all(path.startswith((acting, ".observation_statistics.")) for path in late), late
    assert {".observation_statistics.mean", ".observation_statistics.var"} <= set(late)
