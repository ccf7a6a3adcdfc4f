"""A Gymnasium environment, in a module with few imports, because worker processes import it."""

import functools

import gymnasium
import numpy as np
from gymnasium import spaces


class Thermostat(gymnasium.Env):
    """An environment that is not registered."""

    observation_space = spaces.Box(-99.0, 99.0, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, goal=3.0, render_mode=None):
        self.goal = goal

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0.0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.place += action
        end = self.place >= self.goal
        return np.full(1, self.place, np.float32), self.place, end, False, {"is_success": end}


def make_thermostat(goal=2.0):
    return Thermostat(goal)


def _maker(goal):
    return lambda: Thermostat(goal)


thermostat = Thermostat()
make_partial = functools.partial(Thermostat, 1.0)
make_lambda = _maker(1.0)
