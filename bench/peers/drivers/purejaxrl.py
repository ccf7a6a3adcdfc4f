"""Drives PureJaxRL's `ppo.py` and `ppo_continuous_action.py`, from a checkout of luchris429/purejaxrl.

Configuration: `{"checkout": PATH, "script": "ppo", "config": {...}}`; `config` has settings of the script.
The return is the mean over the episodes that end in the last twentieth of the training.
"""

import importlib
import importlib.util
import sys
import types
from typing import Any

import numpy as np

from bench.peers.drivers import old_gymnax  # imported before gymnax, which may lack its plotting libraries
from bench.peers.drivers.scripts import add_to_path, compile_script, last_twentieth

import gymnax  # isort: skip
from gymnax.environments import spaces  # isort: skip


class _GymnaxForBrax:
    """A gymnax environment in place of the script's wrapper of brax; actions are scaled from [-1, 1]."""

    def __init__(self, name: str):
        self._env, self._parameters = old_gymnax.make(name)
        self._space = self._env.action_space(self._parameters)

    def reset(self, key, params=None):
        return self._env.reset(key, self._parameters)

    def step(self, key, state, action, params=None):
        return self._env.step(key, state, action * self._space.high, self._parameters)

    def observation_space(self, params):
        return self._env.observation_space(self._parameters)

    def action_space(self, params):
        return spaces.Box(-1.0, 1.0, self._space.shape)


def prepare(config: dict[str, Any]):
    """Compiles the script's whole training; returns what `bench.peers.serve` needs."""
    add_to_path(config, "purejaxrl")
    gymnax.make = old_gymnax.make
    # The script imports navix, but uses it only for other environments.
    if importlib.util.find_spec("navix") is None:
        sys.modules["navix"] = types.ModuleType("navix")
    script = importlib.import_module(config["script"])
    settings = dict(config["config"])
    if settings["ENV_NAME"] in gymnax.registered_envs and hasattr(script, "BraxGymnaxWrapper"):
        setattr(script, "BraxGymnaxWrapper", _GymnaxForBrax)  # noqa: B010

    def final_returns(result: Any) -> Any:
        last, metrics = last_twentieth(settings), result["metrics"]
        has_ended = np.asarray(metrics["returned_episode"][last])
        return np.asarray(metrics["returned_episode_returns"][last])[has_ended]

    return compile_script(script, settings, final_returns)
