"""Environments with one mistake each; `Corridor` and `Batch` are valid."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import envs


@dataclasses.dataclass(frozen=True)
class Corridor:
    """Walk right three times."""

    name: ClassVar[Any] = "corridor"
    observation_space: ClassVar[Any] = envs.Box(0.0, 3.0, (1,))
    action_space: ClassVar[Any] = envs.Discrete(2)
    max_episode_steps: ClassVar[Any] = 5

    def reset(self, key):
        return jnp.float32(0), jnp.zeros(1)

    def step(self, key, state, action):
        state = state + action
        return state, state[None], 1.0, state >= 3, False


class TakesTheActionAlone(Corridor):
    def step(self, action):
        return 0.0


class StepReturnsFour(Corridor):
    def step(self, key, state, action):
        return super().step(key, state, action)[:4]


class StepReturnsSix(Corridor):
    def step(self, key, state, action):
        return *super().step(key, state, action), 0.5


class StepReturnsDict(Corridor):
    def step(self, key, state, action):
        return dict(enumerate(super().step(key, state, action)))


class NoReward(Corridor):
    def step(self, key, state, action):
        state, observation, _, *flags = super().step(key, state, action)
        return state, observation, None, *flags


class ResetGivesOne(Corridor):
    def reset(self, key):
        return super().reset(key)[1]


class ResetReturnsInfo(Corridor):
    def reset(self, key):
        return super().reset(key)[1], {}


class WithoutName:
    observation_space = Corridor.observation_space
    action_space = Corridor.action_space
    max_episode_steps = None

    def reset(self, key):
        return Corridor().reset(key)

    def step(self, key, state, action):
        return Corridor().step(key, state, action)


class WithoutStep:
    name, max_episode_steps = "motionless", None
    observation_space, action_space = Corridor.observation_space, Corridor.action_space

    def reset(self, key):
        return Corridor().reset(key)


class Counts(Corridor):
    """Counts its steps in an attribute, which `reset` sets to zero."""

    t = 0

    def reset(self, key):
        object.__setattr__(self, "t", 0)
        return super().reset(key)

    def step(self, key, state, action):
        self.count()
        return super().step(key, state, action)

    def count(self):
        object.__setattr__(self, "t", self.t + 1)


@dataclasses.dataclass(frozen=True)
class Holds(Counts):
    """Mutates its field in place."""

    held: Any = dataclasses.field(default_factory=lambda: [0], compare=False)

    def count(self):
        self.held[0] = self.held[0] + 1


@dataclasses.dataclass(frozen=True)
class HoldsAnArray(Holds):
    held: Any = dataclasses.field(default_factory=lambda: np.zeros(1), compare=False)


class CountsForItsClass(Counts):
    def count(self):
        type(self).t += 1


class KeepsTheState(Counts):
    kept: ClassVar[Any] = []

    def step(self, key, state, action):
        self.kept.append(state)
        return Corridor.step(self, key, state, action)


class Noisy(Corridor):
    """Adds the same noise at every step."""

    def step(self, key, state, action):
        noise = jax.random.normal(jax.random.key(0))
        return super().step(key, state + noise, action)


@dataclasses.dataclass(frozen=True)
class Wider(envs.Wrapper):
    """Returns observations wider than its space."""

    def begin(self, observation):
        return (), jnp.concatenate([observation, observation], axis=-1)


@dataclasses.dataclass(frozen=True)
class WiderLater(Wider):
    def begin(self, observation):
        return observation, observation

    def after(self, kept, observation):
        return observation, super().begin(observation)[1]


@dataclasses.dataclass(frozen=True)
class BeginReturnsObservation(envs.Wrapper):
    def begin(self, observation):
        return observation


class ForeignSpace(Corridor):
    @dataclasses.dataclass(frozen=True)
    class Discrete:
        n: int

    action_space = Discrete(2)


class SpaceAsANumber(Corridor):
    action_space = 2


class HalfStepLimit(Corridor):
    max_episode_steps = 2.5


class NumberedName(Corridor):
    name = 7


@dataclasses.dataclass(frozen=True)
class HoldsAList(Corridor):
    """Unhashable."""

    lengths: Any = dataclasses.field(default_factory=lambda: [3])


class BranchesOnState(Corridor):
    def step(self, key, state, action):
        if state > 3:
            return super().reset(key)
        return super().step(key, state, action)


def parameters(slippery: bool = False, size: int = 3, scale: "float" = 1.0, loud=False, layout=3):
    """Takes options of several types; `layout` has no annotation, and its default is not its only type."""
    return Corridor()


@dataclasses.dataclass(frozen=True)
class Batch:
    """A valid batched environment, written without `envs.vectorize`."""

    name: ClassVar[Any] = "batch"
    observation_space: ClassVar[Any] = Corridor.observation_space
    action_space: ClassVar[Any] = Corridor.action_space
    max_episode_steps: ClassVar[Any] = 5

    def reset(self, keys):
        return envs.vectorize(Corridor()).reset(keys)

    def step(self, keys, state, action):
        return envs.vectorize(Corridor()).step(keys, state, action)


class StepReturnsPair(Batch):
    def step(self, keys, state, action):
        state, step = super().step(keys, state, action)
        return state, (step.observation, step.reward, step.done)


class StepReturnsNoState(Batch):
    def step(self, keys, state, action):
        return super().step(keys, state, action)[1]


class IntegerRewards(Batch):
    def step(self, keys, state, action):
        state, step = super().step(keys, state, action)
        return state, step._replace(reward=step.reward.astype("int32"))


class ScalarFlag(Batch):
    def step(self, keys, state, action):
        state, step = super().step(keys, state, action)
        return state, step._replace(terminated=jnp.any(step.terminated))


class ObservationWithoutBatch(Batch):
    def reset(self, keys):
        state, observation = super().reset(keys)
        return state, observation[0]


class StateWithoutBatch(Batch):
    def reset(self, keys):
        state, observation = super().reset(keys)
        return (state, jax.random.key(0)), observation
