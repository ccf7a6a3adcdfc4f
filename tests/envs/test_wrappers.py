"""Wrappers: values worked by hand, errors, names, run directories and policies."""

import dataclasses
from typing import ClassVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import algos
import envs
import fdg
from algos.evaluation import evaluate
from envs import Box, Discrete
from fdg.errors import FdgError
from tests.refusing import refuses
from tests.training.trained import small


@dataclasses.dataclass(frozen=True)
class Counter:
    """Observes the step and twice the step; the reward is the step; terminates at `length`; has an info."""

    length: int = 5
    limit: int | None = None
    name: ClassVar[str] = "counter"
    observation_space: ClassVar[Box] = Box(0.0, 100.0, (2,))
    action_space: ClassVar[Discrete] = Discrete(2)

    @property
    def max_episode_steps(self):
        return self.limit

    def reset(self, key):
        return jnp.int32(0), jnp.zeros(2)

    def step(self, key, state, action):
        state = state + 1
        info = {"is_success": action == 1, "steps": state}
        return state, jnp.array([1.0, 2.0]) * state, state, state >= self.length, False, info


def run_steps(env, actions):
    """First observation and `T` time steps of the first of two instances."""
    keys = jax.random.split(jax.random.key(0), 2)
    state, first = env.reset(keys)
    found = []
    for action in actions:
        state, step = env.step(keys, state, jnp.full(2, action))
        found.append(jax.tree.map(lambda x: np.asarray(x)[0].tolist(), step))
    return jax.tree.map(lambda x: np.asarray(x)[0].tolist(), first), found


def test_frame_stack():
    env = envs.FrameStack(envs.vectorize(Counter(3)), 3)
    first, steps = run_steps(env, [0] * 4)
    assert env.observation_space == Box(0.0, 100.0, (6,)) and first == [0.0] * 6
    assert [step.final_observation for step in steps] == [
        [0, 0, 0, 0, 1, 2],
        [0, 0, 1, 2, 2, 4],
        [1, 2, 2, 4, 3, 6],  # terminated
        [0, 0, 0, 0, 1, 2],
    ]
    assert steps[2].observation == [0.0] * 6 and steps[3].observation == [0, 0, 0, 0, 1, 2]


def test_action_repeat():
    env = envs.ActionRepeat(envs.vectorize(Counter(5), info=("is_success", "steps")), 2)
    _, steps = run_steps(env, [1, 1, 1, 0])
    assert [step.reward for step in steps] == [1 + 2, 3 + 4, 5, 1 + 2]
    assert [step.terminated for step in steps] == [False, False, True, False]
    assert [step.final_observation[0] for step in steps] == [2, 4, 5, 2]
    assert [step.observation[0] for step in steps] == [2, 4, 0, 2]
    assert (steps[2].episode_return, steps[2].episode_length) == (15, 3)
    assert steps[2].episode_info == {"is_success": 1.0, "steps": 5.0}
    assert steps[1].episode_info == {"is_success": 0.0, "steps": 0.0}
    limited = envs.ActionRepeat(envs.vectorize(Counter(99, limit=5)), 2)
    assert limited.max_episode_steps == 3
    _, steps = run_steps(limited, [1] * 4)
    assert [step.truncated for step in steps] == [False, False, True, False]


def test_time_aware():
    env = envs.TimeAware(envs.vectorize(Counter(3, limit=4)))
    first, steps = run_steps(env, [0] * 4)
    assert first == [0, 0, 0] and env.observation_space.high_array.tolist() == [100, 100, 1]
    assert [step.final_observation[2] for step in steps] == [0.25, 0.5, 0.75, 0.25]
    assert [step.observation[2] for step in steps] == [0.25, 0.5, 0, 0.25]


def test_hide_observations():
    env = envs.HideObservations(envs.vectorize(Counter()), (0,))
    first, steps = run_steps(env, [0, 0])
    assert first == [0.0] and [step.observation for step in steps] == [[2], [4]]


@dataclasses.dataclass(frozen=True)
class Halved(envs.Wrapper):
    """Halves the reward, with `self.env.step` or with `super().step`."""

    inside: bool = True

    def step(self, keys, state, action):
        step = self.env.step if self.inside else super().step
        state, step = step(keys, state, action)
        return state, step._replace(reward=step.reward / 2)


@dataclasses.dataclass(frozen=True)
class SkipsMemory(envs.Wrapper):
    """Has a memory, but steps the environment inside with the state that includes it."""

    def after(self, kept, observation):
        return (), observation

    def step(self, keys, state, action):
        state, step = self.env.step(keys, state, action)  # the mistake
        return state, step


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: envs.FrameStack(env, 2)])
def test_reward_wrappers(inside, wrap):
    """Rewards are halved; episode returns are those of the environment inside."""
    env = Halved(wrap(envs.vectorize(Counter(3))), inside)
    _, steps = run_steps(env, [0] * 4)
    assert [step.reward for step in steps] == [0.5, 1.0, 1.5, 0.5]
    assert [step.episode_return for step in steps] == [0, 0, 6, 0]
    stays = algos.Actor(
        lambda num_envs: (),
        lambda memory, observation, start, keys, greedy: (jnp.zeros(len(start), jnp.int32), memory),
    )
    assert evaluate(env, stays, jax.random.key(0), 2)["returns"].tolist() == [6.0, 6.0]
    assert "is right" in envs.check(wrap(env), steps=4)


class BatchCentred(envs.Wrapper):
    """Subtracts the batch mean from the rewards."""

    def step(self, keys, state, action):
        state, step = super().step(keys, state, action)
        return state, step._replace(reward=step.reward - jnp.mean(step.reward))


def test_batch_statistics_are_refused():
    with pytest.raises(FdgError, match="depends on more than its own key, state and action"):
        envs.check(BatchCentred(envs.make("Pendulum-v1")), steps=3)


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: envs.FrameStack(env, 2)])
def test_wrapper_with_memory_must_use_super_step(wrap):
    env = SkipsMemory(wrap(envs.vectorize(Counter())))
    for check in (envs.check, lambda env: fdg.trace(dataclasses.replace(small(), env=env))):
        with pytest.raises(FdgError, match=r"line \d+ of test_wrappers.py.*the mistake.*super\(\).step"):
            check(env)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda env: envs.FrameStack(env, 0), r"FrameStack: frames=0 must be an integer of at least 1"),
        (lambda env: envs.ActionRepeat(env, 1.5), r"ActionRepeat: times=1.5"),
        (lambda env: envs.HideObservations(env, ("speed",)), "there is no part 'speed', but 0, 1, 2 and 3"),
        (lambda env: envs.HideObservations(env, (0, 1, 2, 3)), "all parts are hidden: leave one"),
        (lambda env: envs.HideObservations(envs.make("probe:masked"), True), "no part"),
        (
            lambda env: envs.TimeAware(envs.vectorize(Counter())),
            "has no time limit for TimeAware: give it max_episode_steps",
        ),
        (lambda env: envs.FrameStack("CartPole-v1"), r"is a name: write env=envs.make\('CartPole-v1'\)"),
        (lambda env: envs.FrameStack(env.single), "is one instance"),
        (
            lambda env: envs.ActionRepeat(envs.make("gymnasium:CartPole-v1"), 2),
            "runs on the host, where ActionRepeat cannot stop",
        ),
        (lambda env: envs.make("text:sorting", frame_stack=2), "a text task, which takes no frame_stack"),
        (lambda env: envs.make("CartPole-v1", info=3), "info=3: give names"),
    ],
)
def test_errors_are_one_line(wrap, message):
    with refuses(match=message):
        wrap(envs.make("CartPole-v1"))


class Ticks(gymnasium.Env):
    """Observes the step as a float and as a category that starts at 1."""

    observation_space = spaces.Dict(
        {"n": spaces.Box(-9, 99, (1,), np.float64), "k": spaces.Discrete(9, start=1)}
    )
    action_space = spaces.Discrete(3, start=4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n = 0
        return {"n": np.zeros(1), "k": 1}, {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.n += 1
        return {"n": np.full(1, float(self.n)), "k": 1 + self.n}, 0.0, self.n == 4, False, {}


gymnasium.register("Ticks-v0", entry_point=Ticks, max_episode_steps=8)
