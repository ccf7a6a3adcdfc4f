"""A Gymnasium environment with composite observations: `tests.envs.parted:Parted-v0`."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Parted(gymnasium.Env):
    """Random observations; reward 1 if the action equals `goal[1][0]`; terminates when all bits are set."""

    action_space = spaces.Discrete(2)

    def __init__(self):
        # One space per instance: a space has a random generator.
        self.observation_space = spaces.Dict(
            {
                "picture": spaces.Box(0, 255, (2, 6, 5), np.uint8),
                "goal": spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 3]))),
                "position": spaces.Box(-1.0, 2.0, (2,), np.float64),
                "bits": spaces.MultiBinary(2),
            }
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._observation = self.observation_space.sample()
        return self._observation, {}

    def step(self, action):
        reward = float(action == self._observation["goal"][1][0])
        self._observation = self.observation_space.sample()
        return self._observation, reward, bool(self._observation["bits"].all()), False, {}


gymnasium.register("Parted-v0", entry_point=Parted, max_episode_steps=5)
