"""Gymnasium environments that fail: `gymnasium:tests.envs.faulty:NAME`."""

import os
import signal
import sys
import time

import gymnasium
import numpy as np
from gymnasium.envs.registration import register


class Counting(gymnasium.Env):
    """Observes a random number and the step; the reward is the action; fails once, at step 3 of an episode.

    The file `FAULTY_MARKER` exists once an instance, in any process, has failed.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2, start=5)

    def __init__(self, fault="none"):
        self.fault, self.time = fault, 0
        if fault == "constructor" and not _is_first():  # the first one only provides the spaces
            raise OSError("no such model")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.fault == "die at its start" and _is_first():
            os.kill(os.getpid(), signal.SIGKILL)
        self.number = 1e300 if self.fault == "huge" else self.np_random.integers(1000)
        self.time = 0
        return np.array([self.number, 0.0]), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.time += 1
        if self.time == 3 and self.fault not in ("none", "constructor", "huge") and _is_first():
            if self.fault == "raise":
                raise ValueError("the wheels\nfell off")
            if self.fault.startswith("cut"):  # announces a reply of 100 bytes, and sends three
                os.write(int(sys.argv[1]), (100).to_bytes(4, "big") + b"...")
            if self.fault in ("cut", "die"):
                print("out of memory\n", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault.endswith("hang"):
                time.sleep(1000)
        return np.array([self.number, self.time]), float(action - 5), False, False, {}


class Wide(gymnasium.Env):
    """Observes the number of its process; an action is larger than the buffer of a connection."""

    observation_space = gymnasium.spaces.Box(0, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (200_000,), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.array([os.getpid()]), {}

    def step(self, action):
        return np.array([os.getpid()]), 1.0, False, False, {}


def _is_first():
    """True for the first call among all processes."""
    try:
        os.close(os.open(os.environ["FAULTY_MARKER"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


register("Counting-v0", entry_point=Counting, max_episode_steps=5)
