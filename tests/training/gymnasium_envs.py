"""Gymnasium environments for tests, in a module that workers import without JAX."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Succeeds(gymnasium.Env):
    """Episodes of three steps; `is_success` is True in the first, third, fifth, ..."""

    observation_space = spaces.Box(0, 9, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.episode, self.time = 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time = self.episode + 1, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        info = {"time": self.time, "is_success": self.episode % 2 == 1} if self.time == 3 else {"time": 0}
        return np.full(1, self.time, np.float32), 1.0, False, self.time == 3, info


gymnasium.register("Succeeds-v0", entry_point=Succeeds)


class MixedSpaces(gymnasium.Env):
    """Dict observations with an image, a tuple and an action mask; Dict actions that start at 10."""

    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (3, 6, 5), np.uint8),
            "tuple": spaces.Tuple((spaces.Discrete(3, start=5), spaces.Box(-1, 1, (2,), np.float64))),
            "start": spaces.MultiBinary(2),
            "action_mask": spaces.MultiBinary(5),
        }
    )
    action_space = spaces.Dict({"go": spaces.Discrete(3, start=10), "stop": spaces.MultiBinary(1)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.observation_space.sample(), 1.0, False, True, {}


gymnasium.register("MixedSpaces-v0", entry_point=MixedSpaces)


class Float64Bounds(MixedSpaces):
    """Action bounds that float32 cannot represent."""

    observation_space = spaces.Box(-1, 1, (2,), np.float64)
    action_space = spaces.Box(np.array([-0.1, -3.1]), np.array([0.1, np.inf]), dtype=np.float64)


gymnasium.register("Float64Bounds-v0", entry_point=Float64Bounds)


class NonZeroStart(MixedSpaces):
    """Categorical actions that do not start at 0."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.MultiDiscrete([2, 3], start=[1, -1])


gymnasium.register("NonZeroStart-v0", entry_point=NonZeroStart)
