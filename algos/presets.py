"""Hyperparameters found good, by algorithm and environment; what is not listed keeps its default."""

from typing import Any

_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # JaxMARL's baselines/IPPO/config/ippo_ff_mpe.yaml.
    "IPPO": {"MPE_simple_spread_v3": {"total_steps": 10_000_000}},
    # JaxMARL's baselines/MAPPO/config/mappo_homogenous_rnn_mpe.yaml, but for the length of the run.
    "MAPPO": {
        "MPE_simple_spread_v3": {"total_steps": 600_000, "learning_rate": 2e-3, "activation": "relu"},
    },
    "PPO": {
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
        # CleanRL's ppo_continuous_action.py, its one environment of 2,048 steps as eight of 256.
        "envpool:HalfCheetah-v4": {
            "total_steps": 1_000_000,
            "num_envs": 8,
            "num_steps": 256,
            "num_epochs": 10,
            "num_minibatches": 32,
            "learning_rate": 3e-4,
            "entropy_coefficient": 0.0,
            "normalize_observation": True,
            "normalize_reward": True,
        },
    },
}


def of(algorithm: str, env_name: str) -> dict[str, Any]:
    """The fields that an environment changes, by the name of the algorithm's class; empty for none.

    >>> of("PPO", "Pendulum-v1")["discount"]
    0.95
    """
    return dict(_PRESETS.get(algorithm, {}).get(env_name, {}))
