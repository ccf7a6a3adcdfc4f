"""RecurrentPPO: initial memories of sequences, resets, truncations, burn-in, and a memory probe.

The loss is PPO's, equation 9 of Schulman et al. 2017 (arXiv 1707.06347; by hand in `test_ppo.py`), over
sequences. Stored memories and burn-in are those of Kapturowski et al. 2019 (R2D2, ICLR), section 3.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos.on_policy import Epochs
from algos.recurrent import Output
from algos.recurrent_ppo import Minibatch
from tests.algos.probes import trained

FROZEN = {"learning_rate": 1e-20, "anneal_learning_rate": False}  # no learning


def leaky(keep):
    """A network for tests by hand: `memory = keep * memory + w * observation`, initially `w = 1`.

    The value is the memory; the logits of two actions are the memory and 0.
    """

    def unroll(parameters, memory, observation, start):
        def step(memory, inputs):
            inputs, start = inputs
            memory = keep * jnp.where(start, 0.0, memory) + parameters["w"] * inputs
            return memory, memory

        _, memories = jax.lax.scan(step, memory, (observation[..., 0], start))
        logits = jnp.stack([memories, jnp.zeros_like(memories)], axis=-1)
        return Output(policy=logits, value=memories, memory=memories)

    return algos.RecurrentNetwork(
        init=lambda key, observation: {"w": jnp.ones(())}, memory=jnp.zeros, unroll=unroll
    )


COUNTING = leaky(1.0)  # counts steps if all observations are 1


@dataclasses.dataclass(frozen=True)
class RecordingEpochs(Epochs):
    predict: Any = None

    def learn(self, key, samples, num_envs, parameters, *extra):
        *updated, losses = super().learn(key, samples, num_envs, parameters, *extra)
        return *updated, {**losses, "samples": samples, "predicted": self.predict(parameters, samples)}


class Recording(algos.RecurrentPPO):
    """Returns the samples of each iteration and the network's predictions before the update as metrics."""

    @property
    def epochs(self):
        return RecordingEpochs(self.num_epochs, self.num_minibatches, self.shuffle, self._predict)


def recorded(iterations, cls=Recording, **fields):
    """The algorithm, and (samples, (policy, value)) of each iteration."""
    algorithm = cls(**{"num_envs": 2, "num_epochs": 1, "num_minibatches": 1, **fields})

    @jax.jit
    def program(key):
        return jax.lax.scan(lambda s, _: algorithm.iterate(s), algorithm.init(key), length=iterations)

    _, metrics = program(jax.random.key(0))
    rows = [jax.tree.map(lambda x, i=i: np.asarray(x[i]), metrics) for i in range(iterations)]
    return algorithm, [(one["samples"], one["predicted"]) for one in rows]


# --- by hand ---


def test_truncation_bootstraps_with_final_memory():
    """Reward 1, discount 1/2, lambda 0: target = 1 + next value / 2. Episodes are truncated after 3 steps.

    Memory and value count the observations of an episode, including the final observation (next value 4,
    not 1 as after a reset). Rollouts have 4 steps:

        count       1    2    3    1  |  2    3    1    2
        next value  2    3    4    2  |  3    4    2    3
        target      2    2.5  3    2  |  2.5  3    2    2.5
    """
    _, (first, second) = recorded(
        2,
        env=envs.make("probe:truncation", steps=3),
        network=COUNTING,
        num_steps=4,
        discount=0.5,
        gae_lambda=0.0,
        **FROZEN,
    )
    for (samples, _), values, targets, starts in [
        (first, [1, 2, 3, 1], [2, 2.5, 3, 2], [1, 0, 0, 1]),
        (second, [2, 3, 1, 2], [2.5, 3, 2, 2.5], [0, 0, 1, 0]),
    ]:
        np.testing.assert_allclose(samples.decision.value, [values] * 2)
        np.testing.assert_allclose(samples.target, [targets] * 2)
        np.testing.assert_array_equal(samples.start, np.array([starts] * 2, bool))


def test_termination_has_no_bootstrap():
    """`probe:discount`: two steps, observations 0 and 1, reward 1 at the end, no bootstrap."""
    _, ((samples, _),) = recorded(
        1,
        env=envs.make("probe:discount"),
        network=COUNTING,
        num_steps=4,
        discount=0.5,
        gae_lambda=0.0,
        **FROZEN,
    )
    np.testing.assert_allclose(samples.decision.value, [[0, 1, 0, 1]] * 2)
    np.testing.assert_allclose(samples.target, [[0.5, 1, 0.5, 1]] * 2)


def test_burn_in_by_hand():
    """Memory 2; one step of burn-in and one of the sequence, both with observation 1; w = 3, keep = 1.

    Burn-in 2 + 3 = 5, step 5 + 3 = 8: value 8. Its gradient by w is 1, from the step only (2 with the
    burn-in's). If an episode starts inside the burn-in, the value is 0 + 3 + 3 = 6.
    """
    algorithm = algos.RecurrentPPO(env=envs.make("probe:policy"), network=COUNTING, num_steps=4, burn_in=1)
    one, no = jnp.ones((2, 1, 1)), jnp.zeros((2, 1), bool)

    def value(w, start):
        zeros = jnp.zeros((2, 1))
        minibatch = Minibatch(jnp.full(2, 2.0), (one, start), one, no, zeros, zeros, zeros, zeros)
        return algorithm._predict({"w": w}, minibatch)[1][:, 0]

    assert value(3.0, jnp.array([[False], [True]])).tolist() == [8.0, 6.0]
    assert jax.jit(jax.jacobian(value))(3.0, no).tolist() == [1.0, 1.0]


# --- learner against actor ---

SEQUENCES = [(2, 0), (None, 3), (4, 2), (2, 2)]  # length and burn-in; rollouts have 8 steps


@pytest.mark.parametrize(("sequence_length", "burn_in"), SEQUENCES)
def test_learner_matches_actor(sequence_length, burn_in):
    """The learner's policy and values match the recorded ones: every ratio starts at 1.

    Episodes of 5 steps end inside sequences and at their borders. Parameters are constant, so burn-in
    reproduces the actor's memory.
    """
    fields = {"env": envs.make("probe:memory", delay=4), "network": leaky(0.9), "num_steps": 8, **FROZEN}
    fields |= {"sequence_length": sequence_length, "burn_in": burn_in}
    _, iterations = recorded(3, **fields)
    length = sequence_length or 8
    for samples, (policy, value) in iterations:
        assert samples.action.shape == (2 * 8 // length, length)
        np.testing.assert_allclose(value, samples.decision.value, atol=1e-6)
        np.testing.assert_allclose(policy.log_prob(samples.action), samples.decision.log_prob, atol=1e-6)
    assert any(samples.start[:, 1:].any() for samples, _ in iterations)
    assert max(np.abs(samples.memory).max() for samples, _ in iterations) > 0.1


def test_burn_in_updates_memories():
    """After parameters change, burn-in computes the memory with the new parameters."""
    algorithm, iterations = recorded(
        2, env=envs.make("probe:truncation", steps=100), network=COUNTING, num_steps=4, burn_in=4, **FROZEN
    )
    samples, _ = iterations[1]
    assert samples.memory.tolist() == [0.0, 0.0]  # at the start of the episode, 4 steps earlier
    doubled = {"w": 2.0}
    _, value = algorithm._predict(doubled, samples)
    np.testing.assert_allclose(value, [[10.0, 12.0, 14.0, 16.0]] * 2)
    stored = samples._replace(memory=jnp.full(2, 4.0), burn_in=None)
    np.testing.assert_allclose(algorithm._predict(doubled, stored)[1], [[6.0, 8.0, 10.0, 12.0]] * 2)


# --- memory probe ---


def test_learns_memory_probe():
    """The cue is shown at the first of 5 steps and needed at the last."""
    algorithm = algos.RecurrentPPO(
        env=envs.make("probe:memory"), num_envs=16, num_steps=16, memory_size=16, sequence_length=8,
        burn_in=4, learning_rate=3e-3, anneal_learning_rate=False,
    )  # fmt: skip
    state = trained(algorithm, 60)
    assert jax.jit(algorithm.evaluate, static_argnums=2)(state, jax.random.key(1), 256)["return"] > 0.95


# --- minibatches ---


def test_time_shuffle():
    """Rows are sequences, in [0, T / L): a minibatch has complete sequences of all environments."""
    algorithm = algos.RecurrentPPO(
        env=envs.make("CartPole-v1"), num_envs=3, num_steps=8, sequence_length=2, shuffle="time"
    )
    samples = (jnp.arange(3)[:, None] * 100 + jnp.arange(4)[None]).reshape(-1)  # 100 b + sequence
    assert algorithm.epochs.minibatch(samples, jnp.array([[3, 1]]), 3).tolist() == [3, 1, 103, 101, 203, 201]
