"""Hyperparameters found good, by algorithm and environment; what is not listed keeps its default.

An environment is named exactly, or by its family: a pattern as of a shell. What is named exactly wins.
"""

import fnmatch
from typing import Any

# As brax trains its ant (github.com/google/brax, notebooks/training.ipynb): as many environments, steps,
# epochs and minibatches, and its discount, step size and clipping. In place of what PPO here has not (a fixed
# scale of rewards, a squashed Gaussian, layers of another width for the critic) stand PureJaxRL's choices:
# rewards scaled by their running deviation, no entropy bonus, 256 units twice. Not tuned.
_BRAX_ANT: dict[str, Any] = {
    "total_steps": 25_000_000,
    "num_envs": 4096,
    "num_steps": 80,
    "num_epochs": 4,
    "num_minibatches": 32,
    "learning_rate": 3e-4,
    "anneal_learning_rate": False,
    "discount": 0.97,
    "clip_ratio": 0.3,
    "clip_value": False,
    "entropy_coefficient": 0.0,
    "max_grad_norm": 1.0,
    "hidden": (256, 256),
    "activation": "silu",
    "normalize_observation": True,
    "normalize_reward": True,
}

# CleanRL's ppo_continuous_action.py, its one environment of 2,048 steps as eight of 256.
_MUJOCO_SETTINGS: dict[str, Any] = {
    "total_steps": 1_000_000,
    "num_envs": 8,
    "num_steps": 256,
    "num_epochs": 10,
    "num_minibatches": 32,
    "learning_rate": 3e-4,
    "entropy_coefficient": 0.0,
    "normalize_observation": True,
    "normalize_reward": True,
}

# MuJoCo's tasks, from the sources that have them.
_MUJOCO = [
    f"{source}:{task}-v[0-9]"
    for source in ("envpool", "gymnasium")
    for task in (
        "Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum",
        "InvertedPendulum", "Pusher", "Reacher", "Swimmer", "Walker2d",
    )
]  # fmt: skip

_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # The layers of CleanRL's dqn.py, each normalised as in PQN. With plain layers, or returns of one step,
    # some seeds still waver when the run ends.
    "DQN": {
        "CartPole-v1": {
            "learning_rate": 1e-3,
            "anneal_learning_rate": True,
            "n_step": 3,
            "layer_norm": True,
            "hidden": (120, 84),
        },
    },
    # JaxMARL's baselines/IPPO/config/ippo_ff_mpe.yaml with four times its step size, ReLU, and values of
    # moderate size: an episode that is cut short is followed by a value here, so they become large, which a
    # clipped loss approaches by 0.2 an iteration. That alone did not help: see docs/results.md.
    "IPPO": {
        "MPE_simple_spread_v3": {
            "total_steps": 10_000_000,
            "learning_rate": 1e-3,
            "clip_value": False,
            "activation": "relu",
            "normalize_reward": True,
        },
    },
    # JaxMARL's baselines/MAPPO/config/mappo_homogenous_rnn_mpe.yaml, but for the length of the run, and for
    # values of moderate size, as above.
    "MAPPO": {
        "MPE_simple_spread_v3": {
            "total_steps": 600_000,
            "learning_rate": 2e-3,
            "clip_value": False,
            "activation": "relu",
            "normalize_reward": True,
        },
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
        # PureJaxRL's settings for MinAtar, with half the step size and three times the entropy bonus: with
        # less, most agents clear a wall up to its last bricks, miss those for ever, and see no other wall.
        "*-MinAtar": {
            "total_steps": 10_000_000,
            "num_envs": 64,
            "num_steps": 128,
            "num_minibatches": 8,
            "learning_rate": 2.5e-3,
            "entropy_coefficient": 0.03,
            "activation": "relu",
            "convolve": False,
        },
        "brax:inverted_pendulum": {
            "total_steps": 2_000_000,
            "num_envs": 64,
            "num_steps": 64,
            "num_minibatches": 8,
            "learning_rate": 1e-3,
            "entropy_coefficient": 0.0,
            "normalize_observation": True,
        },
        "brax:ant": _BRAX_ANT,
        "brax:ant:spring": _BRAX_ANT,
        **dict.fromkeys(_MUJOCO, _MUJOCO_SETTINGS),
    },
    "SAC": {
        "Pendulum-v1": {
            "total_steps": 100_000,
            "num_envs": 4,
            "learning_starts": 1_000,
            "batch_size": 128,
            "updates_per_step": 0.25,
            "learning_rate": 1e-3,
            "anneal_learning_rate": True,
            "hidden": (64, 64),
        },
    },
}


def of(algorithm: str, env_name: str) -> dict[str, Any]:
    """The fields that an environment changes, by the name of the algorithm's class; empty for none.

    >>> of("PPO", "Pendulum-v1")["discount"], of("PPO", "Asterix-MinAtar")["num_envs"]
    (0.95, 64)
    """
    known = _PRESETS.get(algorithm, {})
    found = [env_name] if env_name in known else [name for name in known if fnmatch.fnmatch(env_name, name)]
    return dict(known[found[0]]) if found else {}
