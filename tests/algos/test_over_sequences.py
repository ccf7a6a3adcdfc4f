"""`over_sequences` and `SequenceReplay` by hand, with a network whose memory is the sum of its inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos.memories import RecurrentNetwork
from algos.replay import Step
from algos.replaying import ActorMemory
from algos.rollout import Recollection
from algos.sequences import MemoryNetworks, SequenceReplay, Sequences, over_sequences


def unroll(parameters, memory, observation, start, *extra):
    """Sums `parameters * observation`; the sum is both output and memory."""

    def step(memory, row):
        observation, start = row
        memory = jnp.where(start, 0.0, memory) + parameters * observation[:, 0]
        return memory, memory

    _, sums = jax.lax.scan(step, memory, (observation, start))
    return (sums + extra[0][..., 0] if extra else sums), sums


SUMS = RecurrentNetwork(lambda key, observation: jnp.float32(1), jnp.zeros, unroll)
BUFFER = SequenceReplay(
    num_envs=1, buffer_size=64, batch_size=1, sequence_length=4, burn_in=4, n_step=2, discount=0.5
)


def sequence(**ends):
    """Eight steps: observation t = 1 to 8, reward 10 t, next observation t + 1.5."""
    observed = jnp.arange(1.0, 9.0)[None, :, None]
    never = jnp.zeros((1, 8), bool)
    steps = Step(observed, jnp.zeros((1, 8), jnp.int32), 10 * observed[..., 0], never, never, observed + 1.5)
    return Sequences(jnp.array([100.0]), never, steps._replace(**ends))


def test_outputs_after_burn_in():
    """Memory after burn-in: 100 + 1 + 2 + 3 + 4 = 110. Windows have two steps, the last window one."""
    transition, weight = BUFFER.transitions(sequence(), jnp.array([0.5]))
    network = over_sequences(SUMS)
    now = network.apply(1.0, transition.observation)
    assert now.tolist() == [115, 121, 128, 136]
    following = network.apply(1.0, transition.next_observation)
    assert following.tolist() == [121 + 7.5, 128 + 8.5, 136 + 9.5, 136 + 9.5]
    assert transition.reward.tolist() == [50 + 30, 60 + 35, 70 + 40, 80]
    assert transition.discount.tolist() == [0.25, 0.25, 0.25, 0.5]
    assert weight.tolist() == [0.5] * 4


def test_windows_and_memory_end_with_episode():
    """The sixth step is truncated: its next value uses its memory; the seventh step starts without memory."""
    truncated = jnp.zeros((1, 8), bool).at[0, 5].set(True)
    starts = jnp.zeros((1, 8), bool).at[0, 6].set(True)
    transition, _ = BUFFER.transitions(sequence(truncated=truncated)._replace(start=starts), None)
    network = over_sequences(SUMS)
    assert network.apply(1.0, transition.observation).tolist() == [115, 121, 7, 15]
    assert network.apply(1.0, transition.next_observation).tolist() == [128.5, 128.5, 24.5, 24.5]
    assert transition.reward.tolist() == [80, 60, 110, 80]
    assert transition.discount.tolist() == [0.25, 0.5, 0.25, 0.5]


def test_no_gradient_through_burn_in():
    """Gradient of the summed outputs: only the four learned steps count, 5 + 11 + 18 + 26."""
    transition, _ = BUFFER.transitions(sequence(), None)

    def total(parameters):
        return jnp.sum(over_sequences(SUMS).apply(parameters, transition.observation))

    assert float(jax.grad(total)(1.0)) == 60


def test_additional_network_inputs():
    transition, _ = BUFFER.transitions(sequence(), None)
    action = jnp.array([[0.1], [0.2], [0.3], [0.4]])
    found = over_sequences(SUMS).apply(1.0, transition.observation, action)
    np.testing.assert_allclose(found, [115.1, 121.2, 128.3, 136.4], rtol=1e-6)
    found = over_sequences(SUMS).apply(1.0, transition.next_observation, action)
    np.testing.assert_allclose(found, [128.6, 136.7, 145.8, 145.9], rtol=1e-6)


def test_single_step_is_a_sequence_of_length_one():
    memory = MemoryNetworks((SUMS,), (), sequence_length=4, burn_in=0)
    before = Recollection(ActorMemory(jnp.array([10.0, 20.0]), None), jnp.array([False, True]))
    observed = memory.as_sequences(jnp.array([[2.0], [3.0]]), before)
    assert over_sequences(SUMS).apply(1.0, observed).tolist() == [12, 3]
    assert memory.next_memory(1.0, observed).tolist() == [12, 3]


def test_priority_mixes_maximum_and_mean_error():
    """0.9 * max + 0.1 * mean: 0.9 * 4 + 0.1 * (1 + 2 + 3 + 4) / 4 (R2D2, section 2.3)."""
    assert BUFFER.priority(jnp.array([1.0, -2.0, 3.0, -4.0])).tolist() == pytest.approx([3.85])


def test_burn_in_samples_are_contiguous():
    """Steps are numbered from 0. A sample is two sequences of four steps, with the memory of the first."""
    buffer = SequenceReplay(num_envs=1, buffer_size=16, batch_size=32, sequence_length=4, burn_in=4)
    state = buffer.init(jnp.zeros((1, 1)), jnp.zeros(1, jnp.int32), jnp.zeros(1))
    time = jnp.arange(16.0)[:, None]
    never = jnp.zeros((16, 1), bool)
    steps = Step(time[..., None], time.astype(jnp.int32), time, never, never, time[..., None] + 1)
    state = buffer.add(state, buffer.as_rows(time[::4] + 100, never, steps))
    drawn = buffer.sample(state, jax.random.key(0)).transition
    assert np.unique(drawn.memory).tolist() == [100, 104, 108]
    np.testing.assert_array_equal(drawn.steps.reward, drawn.memory[:, None] - 100 + jnp.arange(8.0)[None])


TRAINING = {
    "memory_size": 16, "hidden": (16,), "num_envs": 8, "num_steps": 6, "batch_size": 32, "sequence_length": 3,
    "burn_in": 3, "buffer_size": 4800, "learning_starts": 480, "updates_per_step": 1 / 24,
    "total_steps": 24_000,
}  # fmt: skip


def score(algorithm):
    """The mean return of 256 episodes after training."""

    @jax.jit
    def run(key):
        state = algorithm.init(key)
        return jax.lax.scan(lambda state, _: algorithm.iterate(state), state, length=500)[0]

    found = jax.jit(algorithm.evaluate, static_argnums=2)(run(jax.random.key(0)), jax.random.key(1), 256)
    return float(found["return"])


@pytest.mark.whole
@pytest.mark.parametrize("memory", [None, "gru"])
@pytest.mark.parametrize("name", ["dqn", "sac", "td3", "fast_td3"])
def test_memory_solves_memory_probe(name, memory):
    """The cue was shown two steps ago: without a memory, every policy has a mean return of 0."""
    env = envs.make("probe:memory", delay=2, continuous=name != "dqn")
    own = {
        "dqn": {"target_period": 20},
        "sac": {"target_rate": 0.05, "initial_temperature": 0.02},
        "td3": {"target_rate": 0.05},
        "fast_td3": {
            "target_rate": 0.05, "target_noise": 0.2, "critic_hidden": (16,), "value_min": -2.0,
            "value_max": 2.0, "normalize_observation": False,
        },
    }  # fmt: skip
    found = score(algos.get(name)(env=env, memory=memory, learning_rate=2e-3, **own[name], **TRAINING))
    assert found == pytest.approx(1.0, abs=0.1) if memory else abs(found) < 0.3
