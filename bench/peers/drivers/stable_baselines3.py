"""Drives Stable-Baselines3 and sbx, which share an interface; a round is a call of `learn`, which continues.

Configuration: `{"library": "sbx", "algo": "PPO", "env": NAME, "num_envs": 64, "steps", "hidden": [widths],
"config": {...}}`; `config` has arguments of the library. Environments run one after the other in one process,
the default of both libraries.
"""

import importlib
from typing import Any

import numpy as np
from stable_baselines3.common.env_util import make_vec_env

from bench.peers.serve import Stopwatch


def prepare(config: dict[str, Any]):
    """Makes the agent; returns what `bench.peers.serve` needs. sbx compiles in the first round."""
    with Stopwatch() as watch:
        env = make_vec_env(config["env"], n_envs=config["num_envs"], seed=0)
        library = importlib.import_module(config["library"])
        model = getattr(library, config["algo"])(
            "MlpPolicy",
            env,
            policy_kwargs={"net_arch": config["hidden"]},
            device="cpu",
            seed=0,
            **config["config"],
        )

    def one_round(seed: int) -> dict[str, Any]:
        before = model.num_timesteps
        with Stopwatch() as watch:
            model.learn(config["steps"], reset_num_timesteps=False)
        returns = [episode["r"] for episode in model.ep_info_buffer]
        return {
            "steps": model.num_timesteps - before,
            "seconds": watch.seconds,
            "return": float(np.mean(returns)) if returns else None,
        }

    return one_round, {"compile_seconds": watch.seconds}
