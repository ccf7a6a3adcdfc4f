"""PureJaxRL's `ppo.py` and `ppo_continuous_action.py`, from a checkout (github.com/luchris429/purejaxrl).

Configuration: `{"checkout": PATH, "script": "ppo", "config": {...}}`, the latter as in the script.
"""

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.peers.drivers import old_gymnax  # before gymnax
from bench.peers.serve import Stopwatch, serve

import gymnax  # isort: skip
from gymnax.environments import spaces  # isort: skip


class _Continuous:
    """A gymnax environment where the script takes one of brax's: actions in [-1, 1], stretched to its own."""

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
    """Compiles the script's whole training, as it does itself."""
    sys.path.insert(0, str(Path(config["checkout"]) / "purejaxrl"))
    gymnax.make = old_gymnax.make
    if importlib.util.find_spec("navix") is None:  # of which another script makes its environments
        sys.modules["navix"] = types.ModuleType("navix")
    script = importlib.import_module(config["script"])
    settings = dict(config["config"])
    if settings["ENV_NAME"] in gymnax.registered_envs and hasattr(script, "BraxGymnaxWrapper"):
        setattr(script, "BraxGymnaxWrapper", _Continuous)  # noqa: B010
    with Stopwatch() as watch:
        train = jax.jit(script.make_train(settings)).lower(jax.random.PRNGKey(0)).compile()
    steps = settings["NUM_UPDATES"] * settings["NUM_STEPS"] * settings["NUM_ENVS"]

    def one_round(seed: int) -> dict[str, Any]:
        with Stopwatch() as watch:
            result = jax.block_until_ready(train(jax.random.PRNGKey(seed)))
        info = result["metrics"]
        last = -max(1, settings["NUM_UPDATES"] // 20)
        ended = np.asarray(info["returned_episode"][last:])
        returns = np.asarray(info["returned_episode_returns"][last:])[ended]
        return {
            "steps": steps,
            "seconds": watch.seconds,
            "return": float(returns.mean()) if len(returns) else None,
        }

    return one_round, {"compile_seconds": watch.seconds}


if __name__ == "__main__":
    serve(prepare)
