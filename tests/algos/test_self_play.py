"""Self-play: which versions are stored and sampled, and that opponents act like the stored actors."""

import dataclasses
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from algos.evaluation import evaluate
from envs import games
from fdg.errors import FdgError
from tests.conformance.comparison import assert_same

ENV = envs.make("game:tic_tac_toe")
GAME = ENV.single.game


class CountingState(NamedTuple):
    weight: jax.Array  # [] float32, the number of iterations
    unread: jax.Array  # [1000], like a replay buffer, which actors do not read
    env_state: Any
    observation: Any


@dataclasses.dataclass(frozen=True)
class CountingAlgorithm:
    """Steps take the first legal move; the actor takes the first legal move from index `weight` on."""

    env: Any = ENV
    num_envs: int = 6
    steps_per_iteration: int = 6
    total_steps: int = 640

    def init(self, key):
        state, observation = self.env.reset(jax.random.split(key, self.num_envs))
        return CountingState(jnp.float32(0), jnp.zeros(1000), state, observation)

    def iterate(self, state):
        keys = jax.random.split(jax.random.key(state.weight.astype(jnp.int32)), self.num_envs)
        action = jnp.argmax(state.observation.action_mask, axis=1).astype(jnp.int32)
        env_state, step = self.step(keys, state.env_state, action)
        new = CountingState(state.weight + 1, state.unread + 1, env_state, step.observation)
        return new, {"opponents": jnp.sum(step.observation.observation[..., 1])}

    @fdg.fragment("environment")
    def step(self, keys, env_state, action):
        return self.env.step(keys, env_state, action)

    def actor(self, state):
        def act(memory, observation, start, keys, greedy):
            order = (jnp.arange(9) - state.weight.astype(jnp.int32)) % 9
            free = jnp.where(observation.action_mask, order[None], 9)
            return jnp.argmin(free, axis=1).astype(jnp.int32), memory

        return algos.Actor(lambda num_envs: (), act)

    def evaluate(self, state, key, episodes, greedy=True):
        return evaluate(self.env, self.actor(state), key, episodes, greedy)


def test_stored_versions_by_hand(devices):
    """Size 2, a version every 2 iterations: weights 2, 4 and 6 are stored after iterations 2, 4 and 6.

    Two devices, each with half of the games, give the same state.
    """
    algorithm = algos.SelfPlay(CountingAlgorithm(), size=2, every=2)
    state = jax.jit(algorithm.init)(jax.random.key(0))
    assert [version.shape for version in state.versions] == [(2,)], "only what the actor reads"
    iterate, stored = jax.jit(algorithm.iterate), []
    for _ in range(6):
        state, _ = iterate(state)
        stored.append((state.versions[0].tolist(), int(state.newest)))
    assert stored == [([0, 0], 0), ([0, 2], 1), ([0, 2], 1), ([4, 2], 0), ([4, 2], 0), ([4, 6], 1)]
    assert float(state.learner.weight) == 6 and int(state.iteration) == 6
    engine = fdg.compile(algorithm, policies.GPUOnly(), devices[:2])
    assert_same(state, engine.run(engine.init(0), 6)[0])


@pytest.mark.parametrize("latest", [0.0, 0.5, 1.0])
def test_sampling_of_versions(latest):
    """The newest version with probability `latest`, else one of all four."""
    algorithm = algos.SelfPlay(dataclasses.replace(CountingAlgorithm(), num_envs=512), size=4, latest=latest)
    state = jax.jit(algorithm.init)(jax.random.key(0))
    versions = [jnp.arange(4.0)]
    versions_met = []
    step = jax.jit(algorithm.step)
    env_state, observation = state.learner.env_state, state.learner.observation
    for i in range(9):
        keys = jax.random.split(jax.random.key(i), 512)
        action = jnp.argmax(observation.action_mask, axis=1).astype(jnp.int32)
        env_state, time_step = step(versions, jnp.int32(2), keys, env_state, action)
        observation = time_step.observation
        versions_met += np.asarray(env_state.inner.memory.version)[np.asarray(time_step.done)].tolist()
    frequencies = np.bincount(versions_met, minlength=4) / len(versions_met)
    expected = (1 - latest) / 4 + latest * (np.arange(4) == 2)
    assert len(versions_met) > 500
    np.testing.assert_allclose(frequencies, expected, atol=0.08)


def test_opponent_acts_like_stored_actor():
    """Compares the step with an environment whose opponent is the version's actor."""
    ppo = algos.PPO(env=ENV, num_envs=8, num_steps=4, num_minibatches=2, hidden=(8,))
    algorithm = algos.SelfPlay(ppo, size=2, latest=1.0)
    state = jax.jit(algorithm.init)(jax.random.key(0))
    second = jax.jit(algorithm.init)(jax.random.key(1))
    versions = [jnp.stack([a[0], b[0]]) for a, b in zip(state.versions, second.versions, strict=True)]
    assert len(versions) < len(jax.tree.leaves(state.learner.parameters)), "the critic is not stored"
    after, _ = jax.eval_shape(algorithm.iterate, state)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    trained = games.Trained(GAME, ppo.actor(second.learner), greedy=False)
    env = envs.vectorize(games.Against(GAME, trained))
    keys = jax.random.split(jax.random.key(3), 8)
    memory = state.learner.env_state.inner.memory._replace(version=jnp.ones(8, jnp.int32))
    env_state = state.learner.env_state
    env_state = env_state._replace(inner=env_state.inner._replace(memory=memory))
    reference_state = env_state._replace(inner=env_state.inner._replace(memory=((), jnp.ones((8, 1), bool))))
    observation = state.learner.observation
    step, reference_of = jax.jit(algorithm.step), jax.jit(env.step)
    same = np.ones(8, bool)  # where the first game has not ended: a new game uses other keys
    for _ in range(2):
        action = jnp.argmax(observation.action_mask, axis=1).astype(jnp.int32)
        env_state, ours_step = step(versions, jnp.int32(1), keys, env_state, action)
        reference_state, reference_step = reference_of(keys, reference_state, action)
        same &= ~np.asarray(ours_step.done)
        for ours, expected in zip(jax.tree.leaves(ours_step), jax.tree.leaves(reference_step), strict=True):
            np.testing.assert_array_equal(np.asarray(ours)[same], np.asarray(expected)[same])
        observation = ours_step.observation
    assert same.any()


def test_ppo_learns_tic_tac_toe():
    ppo = algos.PPO(
        env=ENV,
        num_envs=32,
        num_steps=16,
        learning_rate=2.5e-3,
        anneal_learning_rate=False,
        hidden=(64,),
    )
    algorithm = algos.SelfPlay(ppo, size=2, every=5)
    state, iterate = jax.jit(algorithm.init)(jax.random.key(0)), jax.jit(algorithm.iterate)
    evaluate = jax.jit(lambda state: algorithm.evaluate(state, jax.random.key(1), 256)["return"])
    before = float(evaluate(state))
    for _ in range(60):
        state, _ = iterate(state)
    assert before + 0.15 < float(evaluate(state)), "against random moves, which it never trained with"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("size", "'size': write settings such as size=4 every=10 latest=0.5"),
        ("sise=2", "'sise=2': write settings such as size=4"),
        ("size=two", "--self-play size=two: 'two' is not an integer"),
        ("latest=2", "latest=2.0: give a probability"),
        ("size=4 size=8", "--self-play: size is given twice"),
    ],
)
def test_invalid_text(text, said):
    with pytest.raises(FdgError, match=re.escape(said)):
        algos.SelfPlay.from_text(algos.PPO(env=ENV), text)


def test_invalid_settings():
    with pytest.raises(FdgError, match="'CartPole-v1', not a game against an opponent"):
        algos.SelfPlay(algos.PPO(env=envs.make("CartPole-v1")))
    for field, value in (("size", 0), ("every", 1.5), ("latest", 2)):
        with pytest.raises(FdgError, match=f"{field}={value}"):
            algos.SelfPlay(CountingAlgorithm(), **{field: value})
    with pytest.raises(FdgError, match="AlphaZero already has self-play"):
        algos.SelfPlay(algos.AlphaZero(env=ENV))
    with pytest.raises(FdgError, match="has no method init"):
        algos.SelfPlay(ENV)
