"""Gymnasium's CartPole with steps that sleep, `bench.peers.sleeping:Sleeping-v0`, always or at random."""

import random
import time

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv


class Sleeping(CartPoleEnv):
    """CartPole-v1 in which every step takes `milliseconds` more."""

    def __init__(self, milliseconds=1.0, **options):
        super().__init__(**options)
        self._seconds = milliseconds / 1e3

    def step(self, action):
        time.sleep(self._seconds)
        return super().step(action)


class Dozing(CartPoleEnv):
    """CartPole-v1 in which every step takes up to `milliseconds` more, at random (not by the seed)."""

    def __init__(self, milliseconds=1.0, **options):
        super().__init__(**options)
        self._seconds, self._random = milliseconds / 1e3, random.SystemRandom()

    def step(self, action):
        time.sleep(self._random.uniform(0.0, self._seconds))
        return super().step(action)


gymnasium.register("Sleeping-v0", Sleeping, max_episode_steps=500)
gymnasium.register("Dozing-v0", Dozing, max_episode_steps=500)
