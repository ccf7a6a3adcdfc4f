"""RLlib's PPO (github.com/ray-project/ray), its environments and learner in one process each.

Configuration: `{"env", "num_envs", "num_steps", "iterations", "hidden", "config"}`, the latter for
`PPOConfig.training`.
"""

from typing import Any

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from bench.peers.serve import Stopwatch


def prepare(config: dict[str, Any]):
    """Builds the algorithm."""
    with Stopwatch() as watch:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        batch = config["num_envs"] * config["num_steps"]
        algo = (
            PPOConfig()
            .environment(config["env"])
            .env_runners(num_env_runners=0, num_envs_per_env_runner=config["num_envs"])
            .rl_module(
                model_config=DefaultModelConfig(
                    fcnet_hiddens=config["hidden"], fcnet_activation="tanh", vf_share_layers=False
                )
            )
            .training(train_batch_size_per_learner=batch, **config["config"])
            .build_algo()
        )

    def one_round(seed: int) -> dict[str, Any]:
        with Stopwatch() as watch:
            for _ in range(config["iterations"]):
                result = algo.train()
        return {
            "steps": config["iterations"] * batch,
            "seconds": watch.seconds,
            "return": float(result["env_runners"]["episode_return_mean"]),
        }

    return one_round, {"compile_seconds": watch.seconds}
