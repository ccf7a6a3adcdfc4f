"""PureJaxRL's `ppo.py` and `ppo_continuous_action.py`, from a checkout (github.com/luchris429/purejaxrl).

Configuration: `{"checkout": PATH, "script": "ppo", "config": {...}}`; `config` has settings of the script.
"""

import importlib
import importlib.util
import sys
import types
from typing import Any

import numpy as np

from bench.peers.drivers import old_gymnax  # before gymnax
from bench.peers.drivers.scripts import compiled, last_twentieth, look_in

import gymnax  # isort: skip
from gymnax.environments import spaces  # isort: skip


class _Continuous:
    """A gymnax environment in place of one of brax: its actions are scaled from [-1, 1]."""

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
    """Compiles the script's whole training."""
    look_in(config, "purejaxrl")
    gymnax.make = old_gymnax.make
    if importlib.util.find_spec("navix") is None:  # the script imports it for other environments
        sys.modules["navix"] = types.ModuleType("navix")
    script = importlib.import_module(config["script"])
    settings = dict(config["config"])
    if settings["ENV_NAME"] in gymnax.registered_envs and hasattr(script, "BraxGymnaxWrapper"):
        setattr(script, "BraxGymnaxWrapper", _Continuous)  # noqa: B010

    def returned(result: Any) -> Any:
        last, info = last_twentieth(settings), result["metrics"]
        return np.asarray(info["returned_episode_returns"][last])[np.asarray(info["returned_episode"][last])]

    return compiled(script, settings, returned)
