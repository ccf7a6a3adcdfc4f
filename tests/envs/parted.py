"""An environment of Gymnasium's whose observations are in parts, `tests.envs.parted:Parted-v0`."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Parted(gymnasium.Env):
    """Random parts; reward 1 for the action that the second category names. Ends when the bits say so."""

    action_space = spaces.Discrete(2)

    def __init__(self):
        # Each instance draws from a space of its own.
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
        self._seen = self.observation_space.sample()
        return self._seen, {}

    def step(self, action):
        reward = float(action == self._seen["goal"][1][0])
        self._seen = self.observation_space.sample()
        return self._seen, reward, bool(self._seen["bits"].all()), False, {}


gymnasium.register("Parted-v0", entry_point=Parted, max_episode_steps=5)
