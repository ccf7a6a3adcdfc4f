"""Normalisation of observations and rewards in algorithms: learners, minibatches and actors against NumPy.

`test_normalize.py` tests `algos/normalize.py`; `test_ppo.py` compares PPO's learner.
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
from algos import normalize, replaying
from algos.on_policy import Trajectory
from algos.replay import Transition
from envs import TimeStep

STEPS, ENVIRONMENTS = 5, 4
ON_POLICY = {"num_envs": ENVIRONMENTS, "num_steps": STEPS, "hidden": (4,)}
BOTH = {"normalize_observation": True, "normalize_reward": True}


def random_rollout(rng):
    """A random rollout with Pendulum-v1's shapes, with terminations and truncations."""
    observation, final = rng.normal(1.0, 3.0, size=(2, STEPS, ENVIRONMENTS, 3)).astype(np.float32)
    terminated, truncated = rng.uniform(size=(2, STEPS, ENVIRONMENTS)) < 0.2
    reward = rng.normal(1.0, 30.0, size=(STEPS, ENVIRONMENTS)).astype(np.float32)
    action, zero = np.float32(rng.normal(size=(STEPS, ENVIRONMENTS, 1))), np.zeros((STEPS, ENVIRONMENTS))
    log_prob = rng.uniform(-2.0, -1.0, size=(STEPS, ENVIRONMENTS))
    time_step = TimeStep(None, reward, terminated, truncated, final, zero, zero)
    return jax.tree.map(jnp.asarray, Trajectory(observation, action, log_prob, time_step))


def test_on_policy_learner_matches_numpy():
    """Two updates of IMPALA match a plain IMPALA that gets observations and rewards normalised by NumPy.

    Observations are normalised by statistics of earlier rollouts, rewards scaled by returns that include this
    rollout; both are clipped to 10.
    """
    plain = algos.IMPALA(env=envs.make("Pendulum-v1"), **ON_POLICY)
    algorithm = algos.IMPALA(env=plain.env, **ON_POLICY, **BOTH)
    start = jax.jit(algorithm.init)(jax.random.key(0))
    learned = tuple(start[:4])
    expected, running_return = (*learned[:2], None, None), (start.running_return,)
    learn, learn_plainly = jax.jit(algorithm.learn), jax.jit(plain.learn)
    rng, earlier, returns, running = np.random.default_rng(0), [], [], np.zeros(ENVIRONMENTS)
    for _ in range(2):
        rollout = random_rollout(rng)
        learned, running_return, metrics = learn(learned, running_return, rollout)

        step = rollout.time_step
        mean, std = (np.mean(earlier, axis=0), np.std(earlier, axis=0)) if earlier else (0.0, 1.0)
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
        expected, _, losses = learn_plainly(expected, (None,), by_hand)
        earlier.extend(np.asarray(rollout.observation).reshape(-1, 3))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), expected[:2], learned[:2]
        )
        np.testing.assert_allclose(metrics["policy_loss"], losses["policy_loss"], rtol=1e-4)
    np.testing.assert_allclose(learned[2].mean, np.mean(earlier, axis=0), rtol=1e-4)
    np.testing.assert_allclose(learned[2].var, np.var(earlier, axis=0), rtol=1e-4)
    np.testing.assert_allclose(learned[3].var, np.var(returns), rtol=1e-4)
    np.testing.assert_allclose(running_return[0], running, rtol=1e-4, atol=1e-4)


OFF_POLICY = {
    "num_envs": ENVIRONMENTS, "num_steps": STEPS, "updates_per_step": 0.1, "batch_size": 8, "buffer_size": 40,
    "learning_starts": 0, "hidden": (4,),
}  # fmt: skip


def test_off_policy_learner_matches_numpy():
    """Two updates of TD3 match a plain TD3 that gets minibatches normalised by NumPy.

    The statistics exclude this iteration's steps, which are added afterwards, once each.
    """
    plain = algos.TD3(env=envs.make("Pendulum-v1"), **OFF_POLICY)
    algorithm = algos.TD3(env=plain.env, **OFF_POLICY, normalize_observation=True)
    rng = np.random.default_rng(0)
    earlier, observed = rng.normal(1.0, 3.0, size=(2, STEPS, ENVIRONMENTS, 3)).astype(np.float32)
    statistics = normalize.update(normalize.init((3,)), jnp.asarray(earlier))
    observation, following = rng.normal(1.0, 3.0, size=(2, 2, 8, 3)).astype(np.float32)
    action, ones = np.float32(rng.uniform(-1.0, 1.0, size=(2, 8, 1))), np.ones((2, 8), np.float32)
    minibatch = Transition(*map(jnp.asarray, (observation, action, -ones, 0.9 * ones, following)))
    learned, key, now = jax.jit(plain.init)(jax.random.key(1)).learned, jax.random.key(2), jnp.bool_(True)
    new, _, losses = jax.jit(algorithm.learn)(learned, statistics, minibatch, key, now)
    after = algorithm.observe(statistics, jnp.asarray(observed))

    mean, std = earlier.mean(axis=(0, 1)), earlier.std(axis=(0, 1))
    observation, following = (jnp.asarray((x - mean) / std) for x in (observation, following))
    by_hand = minibatch._replace(observation=observation, next_observation=following)
    ref, _, ref_losses = jax.jit(plain.learn)(learned, (None,), by_hand, key, now)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), (ref, ref_losses), (new, losses)
    )
    combined = np.concatenate([earlier, observed]).reshape(-1, 3)
    np.testing.assert_allclose(after.mean, combined.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(after.var, combined.var(axis=0), rtol=1e-4)


@pytest.mark.parametrize("agents", [False, True])
def test_replay_reward_scaling_matches_numpy(agents):
    """Replay stores unscaled rewards; learning divides them by the standard deviation of returns."""
    given = {"normalize_reward": True, "buffer_size": 400}
    if agents:
        algorithm = algos.VDN(env=envs.make("probe:unlike"), **{**TEAM, **given})
    else:
        algorithm = algos.TD3(env=envs.make("Pendulum-v1"), **{**OFF_POLICY, **given})
    state, iterate = jax.jit(algorithm.init)(jax.random.key(0)), jax.jit(algorithm.iterate)
    for _ in range(3):
        state, _ = iterate(state)
    stored = state.replay.rings.experience
    rows, steps = stored.steps if agents else stored, 3 * algorithm.num_steps
    rewards = np.asarray(rows.reward).reshape(ENVIRONMENTS, -1, *([2] if agents else []))[:, :steps]
    done = np.asarray(rows.terminated | rows.truncated).reshape(ENVIRONMENTS, -1, *([1] if agents else []))
    running, returns = np.zeros_like(rewards[:, 0]), []
    for t in range(steps):
        running = 0.99 * running + rewards[:, t]
        returns.append(running)
        running = np.where(done[:, t], 0.0, running)
    statistics, running_now = state.returns
    np.testing.assert_allclose(statistics.var, np.var(returns), rtol=1e-4)
    np.testing.assert_allclose(running_now, running, rtol=1e-4, atol=1e-4)

    minibatch = jax.tree.map(lambda x: x[None, :2], rows)
    given = stored._replace(steps=minibatch) if agents else minibatch
    after = replaying.transform_and_scale(algorithm, state, given, state.learned, jax.random.key(0))
    found = (after.steps if agents else after).reward
    np.testing.assert_allclose(found, np.clip(minibatch.reward / np.std(returns), -10, 10), rtol=1e-4)


def test_scaled_n_step_rewards_have_the_bound_of_their_sum():
    """Three rewards of 6 with discount 1/2 are 10.5 deviations; three of 20 are each clipped to 10."""
    algorithm = algos.TD3(
        env=envs.make("Pendulum-v1"),
        **{**OFF_POLICY, "normalize_reward": True, "n_step": 3, "discount": 0.5, "learning_starts": 64},
    )
    state = jax.jit(algorithm.init)(jax.random.key(0))
    state = state._replace(returns=(normalize.init(()), state.returns[1]))
    zeros = jnp.zeros((1, 2, 1))
    given = Transition(zeros, zeros, jnp.array([[10.5, 35.0]]), jnp.zeros((1, 2)), zeros)
    after = replaying.transform_and_scale(algorithm, state, given, state.learned, jax.random.key(0))
    np.testing.assert_allclose(after.reward, [[10.5, 17.5]], rtol=1e-5)


VALUES = {**OFF_POLICY, "num_steps": 4, "learning_starts": 8, "updates_per_step": 0.0625}
TEAM = {**VALUES, "num_updates": 1, "sequence_length": 2}
del TEAM["updates_per_step"]


ACTING = {
    algos.PPO: ("Pendulum-v1", {**ON_POLICY, "num_minibatches": 1}),
    algos.A3C: ("Pendulum-v1", ON_POLICY),
    algos.SAC: ("Pendulum-v1", OFF_POLICY),
    algos.C51: ("CartPole-v1", VALUES),
    algos.QMIX: ("probe:agents", TEAM),
}


@pytest.mark.parametrize("kind", ACTING)
def test_actor_normalises_observations(kind):
    """Actions with statistics match those of a plain algorithm with normalised observations."""
    name, fields = ACTING[kind]
    plain = kind(env=envs.make(name), **fields)
    algorithm = kind(env=plain.env, **fields, normalize_observation=True)
    state = jax.jit(algorithm.init)(jax.random.key(0))
    shape = (*((2,) if kind is algos.QMIX else ()), *plain.env.observation_space.shape)
    earlier, observation = np.random.default_rng(0).normal(1.0, 3.0, size=(2, 32, *shape)).astype(np.float32)
    statistics = normalize.update(state.observation_statistics, earlier)
    state = state._replace(observation_statistics=statistics)
    normalized = (observation - np.asarray(statistics.mean)) / np.sqrt(statistics.var)

    def act(agent, observation):
        actor, keys = agent.actor(state), jax.random.split(jax.random.key(0), 32)
        return actor.act(actor.memory(32), jnp.asarray(observation), jnp.ones(32, bool), keys, True)[0]

    np.testing.assert_allclose(act(algorithm, observation), act(plain, normalized), rtol=1e-3, atol=1e-5)
    assert np.abs(act(algorithm, observation) - act(plain, observation)).max() > 1e-4


@dataclasses.dataclass(frozen=True)
class CategoricalEnv:
    """The observation is one of four categories."""

    name: ClassVar[str] = "room"
    observation_space: ClassVar[envs.Discrete] = envs.Discrete(4)
    action_space: ClassVar[envs.Discrete] = envs.Discrete(2)
    max_episode_steps: ClassVar[int | None] = 1

    def reset(self, key):
        return jnp.int32(0), jnp.int32(0)

    def step(self, key, state, action):
        return state, jnp.int32(1), jnp.float32(1), jnp.bool_(False), jnp.bool_(True)


@pytest.mark.parametrize("kind", [algos.A2C, algos.IMPALA, algos.PPO, algos.DQN, algos.PQN])
def test_categorical_observations_raise(kind):
    with pytest.raises(fdg.FdgError, match=r"normalize_observation=True: .* has no mean or variance"):
        kind(env=envs.vectorize(CategoricalEnv()), normalize_observation=True)


@pytest.mark.parametrize(
    ("kind", "name", "fields", "prefix"),
    [
        (algos.IMPALA, "Pendulum-v1", ON_POLICY, ".parameters["),
        (algos.SAC, "Pendulum-v1", OFF_POLICY, ".learned.parameters.actor["),
        (algos.DQN, "CartPole-v1", VALUES, ".learned.parameters["),
        (algos.PQN, "CartPole-v1", {**ON_POLICY, "num_minibatches": 1}, ".parameters["),
        (algos.QMIX, "probe:agents", TEAM, ".learned.parameters.agents["),
    ],
)
def test_statistics_are_delayed_with_parameters(kind, name, fields, prefix):
    """Under staleness, the actor's parameters and observation statistics are delayed, and nothing else."""
    algorithm = kind(env=envs.make(name), **fields, normalize_observation=True)
    delayed = fdg.place(algorithm, policies.SingleLearnerCoarse(actors=2, staleness=2), 3).delayed
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    late = [paths[i] for i in delayed.leaves]
    assert late and all(path.startswith((prefix, ".observation_statistics.")) for path in late), late
    assert {".observation_statistics.mean", ".observation_statistics.var"} <= set(late)
