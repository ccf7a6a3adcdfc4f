"""Hyperparameters found good, by algorithm and environment; what is not listed keeps its default."""

from typing import Any

PPO: dict[str, dict[str, Any]] = {
    "Pendulum-v1": {
        "total_steps": 1_000_000,
        "num_envs": 16,
        "num_steps": 64,
        "num_epochs": 10,
        "num_minibatches": 8,
        "learning_rate": 5e-4,
        "discount": 0.95,
        "entropy_coefficient": 0.0,
        "activation": "relu",
        "normalize_observation": True,
        "normalize_reward": True,
    },
}
