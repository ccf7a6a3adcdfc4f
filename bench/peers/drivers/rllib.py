"""Drives RLlib's PPO, APPO and IMPALA (github.com/ray-project/ray).

Configuration: `{"algo", "env", "options" of gymnasium.make, "num_envs", "num_steps", "workers", "steps",
"hidden", "config"}`; `config` has arguments of the algorithm's `training`. PPO has 0 `workers`: environments
and learner share one process. APPO and IMPALA step in `workers` processes and learn in another. A round ends
after `steps` sampled steps.
"""

import importlib
from typing import Any

import ray
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from bench.peers.serve import Stopwatch


def prepare(config: dict[str, Any]):
    """Builds the algorithm; returns what `bench.peers.serve` needs."""
    module = importlib.import_module(f"ray.rllib.algorithms.{config['algo'].lower()}")
    workers = config["workers"]
    with Stopwatch() as watch:
        ray.init(num_cpus=workers + 2, include_dashboard=False, log_to_driver=False)
        algo = (
            getattr(module, f"{config['algo']}Config")()
            .environment(config["env"], env_config=config["options"])
            .env_runners(
                num_env_runners=workers,
                num_envs_per_env_runner=config["num_envs"] // max(1, workers),
                rollout_fragment_length=config["num_steps"],
            )
            .rl_module(
                model_config=DefaultModelConfig(
                    fcnet_hiddens=config["hidden"], fcnet_activation="tanh", vf_share_layers=False
                )
            )
            .training(
                train_batch_size_per_learner=config["num_envs"] * config["num_steps"], **config["config"]
            )
            .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=config["steps"])
            .build_algo()
        )
    last_sampled = [0]

    def one_round(seed: int) -> dict[str, Any]:
        with Stopwatch() as watch:
            result = algo.train()
        sampled = int(result["num_env_steps_sampled_lifetime"])
        steps, last_sampled[0] = sampled - last_sampled[0], sampled
        mean_return = float(result["env_runners"]["episode_return_mean"])
        return {"steps": steps, "seconds": watch.seconds, "return": mean_return}

    return one_round, {"compile_seconds": watch.seconds}
