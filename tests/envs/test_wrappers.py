"""Wrappers: values worked by hand, errors, names, run directories and policies."""

import dataclasses
import itertools
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
import policies
from algos.evaluation import evaluate
from envs import Box, Discrete, host
from fdg.errors import FdgError
from fdg.training import description
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


def test_names_and_run_directories(tmp_path):
    env = envs.make(*envs.parse("CartPole-v1?gravity=9.0")[:1], gravity=9.0, frame_stack=2, time_aware=True)
    assert env == envs.FrameStack(envs.TimeAware(envs.make("CartPole-v1", gravity=9.0)), 2)
    name, given = envs.parse("CartPole-v1?hide_observations=(1,3)&frame_stack=2")
    wrapped = envs.FrameStack(envs.HideObservations(envs.make(name), given["hide_observations"]), 2)
    assert envs.make(name, **given) == wrapped
    wrapped = envs.ActionRepeat(wrapped, 3)  # not in the order of the parameters: no name
    algorithm = algos.A2C(env=wrapped.env, num_envs=4, num_steps=8, hidden=(8,), total_steps=32)
    described = description.describe(algorithm, policies.GPUOnly())
    assert described["env"] == f"{name}?hide_observations=(1, 3)&frame_stack=2"
    other = dataclasses.replace(algorithm, env=wrapped)
    assert description.describe(other, policies.GPUOnly())["rebuilds"] is False
    fdg.fit(algorithm, eval_episodes=0, progress=False, out=tmp_path / "run", devices=1)
    loaded = fdg.load(tmp_path / "run")
    assert loaded.algorithm == algorithm and loaded.policy(np.zeros(4)).shape == ()
    assert envs.trust_reason("gymnasium:CartPole-v1", {"info": "is_success"}) is None


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


def test_policy_applies_wrappers_in_a_gymnasium_loop(tmp_path):
    """A policy and its exported file get raw observations, and apply frame stacking and time themselves."""
    name = "gymnasium:tests.envs.test_wrappers:Ticks-v0"
    env = envs.make(name, workers=1, hide_observations="k", time_aware=True, frame_stack=2)
    algorithm = dataclasses.replace(small(num_envs=2, num_steps=4), env=env)
    run = fdg.Run(algorithm, jax.jit(algorithm.init)(jax.random.key(0)), 0)
    host.close()
    policy, exported = run.policy, fdg.load_exported(run.export(tmp_path / "policy.jax"))
    theirs = gymnasium.make("Ticks-v0")
    for _ in range(2):
        seen, _ = theirs.reset()
        done, start = False, True
        for n in itertools.count():
            action = policy(seen, start=start)
            assert action == exported(seen, start=start) and theirs.action_space.contains(action)
            shown = {key: np.asarray(x)[0].tolist() for key, x in policy.memory[0][1].items()}
            before = max(n - 1, 0)
            assert shown == {"n": [before, n], "time": [before / 8, n / 8]}
            if done:
                break
            seen, _, done, _, _ = theirs.step(action)
            start = False
