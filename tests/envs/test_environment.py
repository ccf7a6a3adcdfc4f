"""`vectorize` against hand-worked episodes, and environments that break the contract."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs import Box, Discrete
from envs.environment import Vectorized
from fdg.errors import FdgError
from tests.envs.conformance import assert_conforms

GO, STOP = 0, 1


@dataclasses.dataclass(frozen=True)
class Counting:
    """Counts from `start`; the reward is the count; STOP terminates; `max_episode_steps` truncates."""

    start: int = 10
    max_episode_steps: int | None = 3
    name: ClassVar[str] = "counting"
    observation_space: ClassVar[Any] = Box(0.0, float("inf"), (1,))
    action_space: ClassVar[Any] = Discrete(2)

    def reset(self, key):
        return {"count": self.start, "key": key}, jnp.full(1, self.start)

    def step(self, key, state, action):
        count = state["count"] + 1
        return {"count": count, "key": key}, count[None], count, action == STOP, False


def keys(seed: int = 0, num_envs: int = 2) -> jax.Array:
    return jax.random.split(jax.random.key(seed), num_envs)


def test_episodes_worked_by_hand():
    env = envs.vectorize(Counting())
    state, observation = env.reset(keys())
    assert observation.tolist() == [[10.0], [10.0]]
    steps = []
    #          both go     1 stops     0 truncates (3 steps)  0 restarts; 1 stops at its limit: terminated
    for t, action in enumerate([[GO, GO], [GO, STOP], [GO, GO], [GO, GO], [STOP, STOP]]):
        state, step = env.step(keys(t), state, jnp.asarray(action))
        steps.append(step)
    got = jax.tree.map(lambda *leaves: np.stack(leaves).tolist(), *steps)
    assert got.reward == [[11, 11], [12, 12], [13, 11], [11, 12], [12, 13]]
    assert got.terminated == [[False, False], [False, True], [False, False], [False, False], [True, True]]
    assert got.truncated == [[False, False], [False, False], [True, False], [False, False], [False, False]]
    assert got.observation == [[[11], [11]], [[12], [10]], [[10], [11]], [[11], [12]], [[10], [10]]]
    assert got.final_observation == [[[11], [11]], [[12], [12]], [[13], [11]], [[11], [12]], [[12], [13]]]
    assert got.episode_return == [[0, 0], [0, 23], [36, 0], [0, 0], [23, 36]]
    assert got.episode_length == [[0, 0], [0, 2], [3, 0], [0, 0], [2, 3]]
    assert [step.done.tolist() for step in steps] == [
        [t or u for t, u in zip(*row, strict=True)] for row in zip(got.terminated, got.truncated, strict=True)
    ]
    assert state.running_return.tolist() == [0, 0] and state.running_length.tolist() == [0, 0]


def test_no_time_limit():
    env = envs.vectorize(Counting(max_episode_steps=None))
    state, _ = env.reset(keys())
    for t in range(5):
        state, step = env.step(keys(t), state, jnp.zeros(2, jnp.int32))
    assert not step.done.any()
    assert state.running_length.tolist() == [5, 5] and state.running_return.tolist() == [65, 65]


def test_state_may_hold_python_numbers_and_keys():
    assert_conforms(envs.vectorize(Counting()))


def test_vectorized_is_a_value():
    assert envs.vectorize(Counting()) == envs.vectorize(Counting())
    assert hash(envs.vectorize(Counting())) == hash(envs.vectorize(Counting()))
    assert envs.vectorize(Counting()) != envs.vectorize(Counting(start=3))


class RandomStart(Counting):
    """Counting from a random start in every episode."""

    def reset(self, key):
        start = jax.random.randint(key, (), 0, 1000)
        return {"count": start, "key": key}, start[None]


@pytest.mark.parametrize("repeat_start", [False, True])
def test_repeat_start(repeat_start):
    env = envs.vectorize(RandomStart(max_episode_steps=2), repeat_start)
    state, first = env.reset(keys())
    starts = [first]
    for t in range(6):
        state, step = env.step(keys(t), state, jnp.zeros(2, jnp.int32))
        if t % 2:
            assert step.truncated.all() and (step.episode_return == 2 * starts[-1][:, 0] + 3).all()
            starts.append(step.observation)
    same = np.asarray([start == first for start in starts[1:]])
    assert same.all() if repeat_start else not same.any()
    assert first[0] != first[1]


def test_repeat_start_conforms():
    assert_conforms(envs.vectorize(Masking(), repeat_start=True))
    assert envs.vectorize(Masking(), repeat_start=True) != envs.vectorize(Masking())


class Masking(Counting):
    """Counting where STOP is allowed at even counts only."""

    def reset(self, key):
        state, observation = super().reset(key)
        return state, self.masked(observation)

    def step(self, key, state, action):
        state, observation, *rest = super().step(key, state, action)
        return state, self.masked(observation), *rest

    def masked(self, observation):
        return envs.MaskedObservation(observation, jnp.array([True, observation[0] % 2 == 0]))


def test_masks_reset_with_observations():
    env = envs.vectorize(Masking(start=11, max_episode_steps=2))
    state, observation = env.reset(keys())
    assert observation.observation.tolist() == [[11], [11]]
    assert observation.action_mask.tolist() == [[True, False], [True, False]]
    _, step = env.step(keys(), state, jnp.array([GO, STOP]))  # the second terminates and resets
    assert step.final_observation.action_mask.tolist() == [[True, True], [True, True]]
    assert step.observation.observation.tolist() == [[12], [11]]
    assert step.observation.action_mask.tolist() == [[True, True], [True, False]]


class MultiAgent(Counting):
    """Three agents share one count; the reward of agent `a` is `a` times the count; any STOP terminates."""

    num_agents: ClassVar[int] = 3

    def reset(self, key):
        state, observation = super().reset(key)
        return state, jnp.tile(observation, (3, 1))

    def step(self, key, state, action):
        state, observation, reward, _, _ = super().step(key, state, action[0])
        return state, jnp.tile(observation, (3, 1)), reward * jnp.arange(3), jnp.any(action == STOP), False


def test_multi_agent_episode_by_hand():
    env = envs.vectorize(MultiAgent())
    assert env.num_agents == envs.num_agents(env) == 3
    state, observation = env.reset(keys())
    assert observation.tolist() == [[[10]] * 3] * 2
    # all go; an agent of the second environment stops; all go, and the first environment truncates
    for t, action in enumerate([[[GO] * 3] * 2, [[GO] * 3, [GO, STOP, GO]], [[GO] * 3] * 2]):
        state, step = env.step(keys(t), state, jnp.asarray(action))
        if t == 1:
            assert step.reward.tolist() == [[0, 12, 24], [0, 12, 24]]
            assert step.terminated.tolist() == [False, True]
            assert step.observation.tolist() == [[[12]] * 3, [[10]] * 3]
            assert step.final_observation.tolist() == [[[12]] * 3] * 2
            # The mean over the agents' returns: (0 + 11 + 22) / 3 + (0 + 12 + 24) / 3.
            assert step.episode_return.tolist() == [0, 23] and step.episode_length.tolist() == [0, 2]
    assert step.truncated.tolist() == [True, False]
    assert step.episode_return.tolist() == [11 + 12 + 13, 0] and step.episode_length.tolist() == [3, 0]


# Single environments that break the contract: `vectorize` names the fault.


class ObservationOfAnotherShape(Counting):
    def reset(self, key):
        return super().reset(key)[0], jnp.zeros(2)


class OneRewardForAll(MultiAgent):
    def step(self, key, state, action):
        state, observation, reward, *rest = super().step(key, state, action)
        return state, observation, reward[0], *rest


class OneObservationForAll(MultiAgent):
    def reset(self, key):
        state, observation = super().reset(key)
        return state, observation[0]


class MaskOfAnotherShape(Masking):
    def masked(self, observation):
        return envs.MaskedObservation(observation, jnp.ones(3, bool))


class MaskOfNumbers(Masking):
    action_space = Box(0.0, 1.0, (2,))


class ObservationInParts(Counting):
    def reset(self, key):
        state, observation = super().reset(key)
        return state, {"count": observation}


class RewardWithAnAxis(Counting):
    def step(self, key, state, action):
        state, observation, reward, terminated, truncated = super().step(key, state, action)
        return state, observation, reward[None], terminated, truncated


class StateThatChangesDtype(Counting):
    def step(self, key, state, action):
        state, *rest = super().step(key, state, action)
        return {**state, "count": state["count"] + 0.5}, *rest


class StateThatGrows(Counting):
    def step(self, key, state, action):
        state, *rest = super().step(key, state, action)
        return {**state, "more": jnp.zeros(())}, *rest


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            ObservationOfAnotherShape(),
            r"reset gives an observation of shape \(2,\).*observation_space has \(1,\)",
        ),
        (
            MaskOfAnotherShape(),
            r"reset gives an action_mask of shape \(3,\), but for Discrete\(n=2\) it must be \(2,\)",
        ),
        (MaskOfNumbers(), r"action_mask.* only discrete actions can be masked"),
        (ObservationInParts(), r"reset gives a dict as observation, expected one array"),
        (RewardWithAnAxis(), r"reward of shape \(1,\), expected a scalar"),
        (StateThatChangesDtype(), r"state\['count'\] as int32\[\], but step as float32\[\]"),
        (StateThatGrows(), r"only reset's has \[\], only step's has \[\"\['more'\]\"\]"),
        (OneRewardForAll(), r"reward of shape \(\), expected \(3,\), one an agent"),
        (OneObservationForAll(), r"of shape \(1,\), but its observation_space of 3 agents has \(3, 1\)"),
    ],
)
def test_broken_single_environment_is_refused(broken, message):
    env = envs.vectorize(broken)
    agents = envs.num_agents(env)
    action = jnp.zeros(2 if agents is None else (2, agents), jnp.int32)
    with pytest.raises(FdgError, match=f"environment '{broken.name}': .*{message}"):
        env.step(keys(), env.reset(keys())[0], action)


@pytest.mark.parametrize("wrong", [jax.random.key(0), jax.random.PRNGKey(0), 3], ids=["one", "raw", "number"])
def test_keys_must_be_one_typed_key_per_environment(wrong):
    with pytest.raises(FdgError, match=r"one typed PRNG key per environment.*jax\.random\.split"):
        envs.vectorize(Counting()).reset(wrong)


def test_action_shape_is_checked():
    env = envs.vectorize(Counting())
    state, _ = env.reset(keys())
    with pytest.raises(FdgError, match=r"action has shape \(2, 1\), expected \(2,\)"):
        env.step(keys(), state, jnp.zeros((2, 1), jnp.int32))


# Batched environments that break the contract: the conformance check must reject each.


@dataclasses.dataclass(frozen=True)
class Broken(Vectorized):
    def step(self, keys, state, action):
        return self.corrupt(keys, *super().step(keys, state, action))

    def corrupt(self, keys, state, step):
        raise NotImplementedError


class IgnoresTheLimit(Broken):
    def step(self, keys, state, action):
        return Vectorized(dataclasses.replace(self.single, max_episode_steps=None)).step(keys, state, action)


class TruncatesWhatTerminates(Broken):
    def corrupt(self, keys, state, step):
        return state, step._replace(truncated=step.truncated | step.terminated)


class StatisticsEveryStep(Broken):
    def corrupt(self, keys, state, step):
        return state, step._replace(episode_return=step.episode_return + state.running_return)


class StatisticsNeverCleared(Broken):
    def corrupt(self, keys, state, step):
        return state._replace(running_return=state.running_return + step.episode_return), step


class FinalObservationAfterReset(Broken):
    def corrupt(self, keys, state, step):
        return state, step._replace(final_observation=jnp.roll(step.observation, 1, axis=0))


class OneKeyForTheBatch(Broken):
    def corrupt(self, keys, state, step):
        noise = jax.random.uniform(keys[0], step.observation.shape) - 2
        final = jnp.where(step.done[:, None], noise, step.final_observation)
        return state, step._replace(final_observation=final)


class WeakState(Broken):
    """Resets to a weakly typed number; `step` returns a strong type."""

    def corrupt(self, keys, state, step):
        return state, step

    def reset(self, keys):
        state, observation = super().reset(keys)
        return state._replace(running_return=jnp.broadcast_to(0.0, keys.shape)), observation


class Wide(Counting):
    """Counting with unbounded observations; STOP terminates and the limit truncates."""

    observation_space = Box(float("-inf"), float("inf"), (1,))


def test_conformance_check_accepts_correct_environment():
    step = assert_conforms(envs.vectorize(Wide())).step
    assert step.terminated.any() and step.truncated.any()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (IgnoresTheLimit, "goes on after its limit"),
        (TruncatesWhatTerminates, "set truncated to False where terminated is True"),
        (StatisticsEveryStep, "must be 0 before the episode ends"),
        (StatisticsNeverCleared, "but rewards add up to"),
        (FinalObservationAfterReset, "observation and final_observation differ"),
        (OneKeyForTheBatch, "depends on more than its own key"),
        (WeakState, "changes a shape, dtype or weak type"),
    ],
)
def test_conformance_check_rejects_broken_environment(broken, message):
    with pytest.raises((AssertionError, FdgError), match=message):
        assert_conforms(broken(Wide()))
