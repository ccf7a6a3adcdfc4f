"""Wrappers: numbers worked by hand, random spaces, any source, several devices, and by name."""

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
    """Shows the step and twice that; the reward is the step; it ends at `length`, and says how it went."""

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


def steps_of(env, actions):
    """Time steps of a batch of two: `[T]` NumPy trees."""
    keys = jax.random.split(jax.random.key(0), 2)
    state, first = env.reset(keys)
    found = []
    for action in actions:
        state, step = env.step(keys, state, jnp.full(2, action))
        found.append(jax.tree.map(lambda x: np.asarray(x)[0].tolist(), step))
    return jax.tree.map(lambda x: np.asarray(x)[0].tolist(), first), found


def test_frames_side_by_side_and_an_episodes_first_one_repeated():
    env = envs.FrameStack(envs.vectorize(Counter(3)), 3)
    first, steps = steps_of(env, [0] * 4)
    assert env.observation_space == Box(0.0, 100.0, (6,)) and first == [0.0] * 6
    assert [step.final_observation for step in steps] == [
        [0, 0, 0, 0, 1, 2],
        [0, 0, 1, 2, 2, 4],
        [1, 2, 2, 4, 3, 6],  # the end
        [0, 0, 0, 0, 1, 2],
    ]
    assert steps[2].observation == [0.0] * 6 and steps[3].observation == [0, 0, 0, 0, 1, 2]


def test_an_action_repeated_stops_where_the_episode_does():
    env = envs.ActionRepeat(envs.vectorize(Counter(5), info=("is_success", "steps")), 2)
    _, steps = steps_of(env, [1, 1, 1, 0])
    assert [step.reward for step in steps] == [1 + 2, 3 + 4, 5, 1 + 2]
    assert [step.terminated for step in steps] == [False, False, True, False]
    assert [step.final_observation[0] for step in steps] == [2, 4, 5, 2]
    assert [step.observation[0] for step in steps] == [2, 4, 0, 2]
    assert (steps[2].episode_return, steps[2].episode_length) == (15, 3)
    assert steps[2].episode_info == {"is_success": 1.0, "steps": 5.0}
    assert steps[1].episode_info == {"is_success": 0.0, "steps": 0.0}
    limited = envs.ActionRepeat(envs.vectorize(Counter(99, limit=5)), 2)
    assert limited.max_episode_steps == 3
    _, steps = steps_of(limited, [1] * 4)
    assert [step.truncated for step in steps] == [False, False, True, False]


def test_the_time_is_the_share_of_the_limit():
    env = envs.TimeAware(envs.vectorize(Counter(3, limit=4)))
    first, steps = steps_of(env, [0] * 4)
    assert first == [0, 0, 0] and env.observation_space.high_array.tolist() == [100, 100, 1]
    assert [step.final_observation[2] for step in steps] == [0.25, 0.5, 0.75, 0.25]
    assert [step.observation[2] for step in steps] == [0.25, 0.5, 0, 0.25]


def test_hidden_components_are_gone():
    env = envs.HideObservations(envs.vectorize(Counter()), (0,))
    first, steps = steps_of(env, [0, 0])
    assert first == [0.0] and [step.observation for step in steps] == [[2], [4]]


@dataclasses.dataclass(frozen=True)
class Halved(envs.Wrapper):
    """Half the reward, in either of the ways that it can be written."""

    inside: bool = True

    def step(self, keys, state, action):
        step = self.env.step if self.inside else super().step
        state, step = step(keys, state, action)
        return state, step._replace(reward=step.reward / 2)


@dataclasses.dataclass(frozen=True)
class HalvedAfter(envs.Wrapper):
    """Keeps something, and forgets that the environment inside does not know of it."""

    def after(self, kept, observation):
        return (), observation

    def step(self, keys, state, action):
        state, step = self.env.step(keys, state, action)  # the mistake
        return state, step


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("around", [lambda env: env, lambda env: envs.FrameStack(env, 2)])
def test_a_wrapper_of_rewards_steps_the_environment_inside(inside, around):
    """Rewards are halved, returns are those within; `envs.check` takes it, under and over frames."""
    env = Halved(around(envs.vectorize(Counter(3))), inside)
    _, steps = steps_of(env, [0] * 4)
    assert [step.reward for step in steps] == [0.5, 1.0, 1.5, 0.5]
    assert [step.episode_return for step in steps] == [0, 0, 6, 0]
    stays = algos.Actor(
        lambda num_envs: (),
        lambda memory, observation, start, keys, greedy: (jnp.zeros(len(start), jnp.int32), memory),
    )
    assert evaluate(env, stays, jax.random.key(0), 2)["returns"].tolist() == [6.0, 6.0]
    assert "is right" in envs.check(around(env), steps=4)


class Centred(envs.Wrapper):
    """Rewards less their mean over the batch."""

    def step(self, keys, state, action):
        state, step = super().step(keys, state, action)
        return state, step._replace(reward=step.reward - jnp.mean(step.reward))


def test_instances_that_depend_on_each_other_by_a_mean():
    with pytest.raises(FdgError, match="depends on more than its own key, state and action"):
        envs.check(Centred(envs.make("Pendulum-v1")), steps=3)


@pytest.mark.parametrize("around", [lambda env: env, lambda env: envs.FrameStack(env, 2)])
def test_a_wrapper_with_a_memory_hears_how_to_step(around):
    env = HalvedAfter(around(envs.vectorize(Counter())))
    for find in (envs.check, lambda env: fdg.trace(dataclasses.replace(small(), env=env))):
        with pytest.raises(FdgError, match=r"line \d+ of test_wrappers.py.*the mistake.*super\(\).step"):
            find(env)


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda env: envs.FrameStack(env, 0), r"FrameStack\(frames=0\): give an integer of at least 1"),
        (lambda env: envs.ActionRepeat(env, 1.5), r"ActionRepeat\(times=1.5\)"),
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
def test_mistakes_are_one_line(wrap, said):
    with refuses(match=said):
        wrap(envs.make("CartPole-v1"))


def test_by_name_and_from_a_file(tmp_path):
    env = envs.make(*envs.parse("CartPole-v1?gravity=9.0")[:1], gravity=9.0, frame_stack=2, time_aware=True)
    assert env == envs.FrameStack(envs.TimeAware(envs.make("CartPole-v1", gravity=9.0)), 2)
    name, given = envs.parse("CartPole-v1?hide_observations=(1,3)&frame_stack=2")
    wrapped = envs.FrameStack(envs.HideObservations(envs.make(name), given["hide_observations"]), 2)
    assert envs.make(name, **given) == wrapped
    wrapped = envs.ActionRepeat(wrapped, 3)  # in another order than parameters have: without a name
    algorithm = algos.A2C(env=wrapped.env, num_envs=4, num_steps=8, hidden=(8,), total_steps=32)
    said = description.describe(algorithm, policies.GPUOnly())
    assert said["env"] == f"{name}?hide_observations=(1, 3)&frame_stack=2"
    other = dataclasses.replace(algorithm, env=wrapped)
    assert description.describe(other, policies.GPUOnly())["rebuilds"] is False
    fdg.fit(algorithm, eval_episodes=0, progress=False, out=tmp_path / "run", devices=1)
    loaded = fdg.load(tmp_path / "run")
    assert loaded.algorithm == algorithm and loaded.policy(np.zeros(4)).shape == ()
    assert envs.beyond_registries("gymnasium:CartPole-v1", {"info": "is_success"}) is None


class Ticks(gymnasium.Env):
    """Counts its steps up, from a number of its own."""

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


def test_a_policy_keeps_frames_and_time_by_itself_in_a_loop_of_gymnasiums(tmp_path):
    """It is given what the library gives, and sees what the wrapped environment would show; files do too."""
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
