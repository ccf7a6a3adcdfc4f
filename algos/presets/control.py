"""Presets for small control problems: classic, sparse, continuous actions, Box2D."""

from typing import Any

from algos.presets.entry import Entry

_CLEANRL = Entry(
    "CleanRL's ppo_continuous_action.py, with eight environments of 256 steps in place of one of 2,048",
    {
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
)

_ZOO = "Stable-Baselines3 Zoo's hyperparams/ppo.yml"

_MOUNTAIN_CAR = Entry(
    f"{_ZOO}, MountainCar-v0; docs/settings.md",
    {
        "total_steps": 250_000,
        "num_envs": 16,
        "num_steps": 16,
        "learning_rate": 3e-4,
        "anneal_learning_rate": False,
        "gae_lambda": 0.98,
        "clip_value": False,
        "entropy_coefficient": 0.0,
        "normalize_observation": True,
    },
)

_MOUNTAIN_CAR_CONTINUOUS = Entry(
    "the first settings tried: normalisation, a wide initial policy, a long horizon; docs/settings.md",
    {
        "total_steps": 300_000,
        "num_envs": 16,
        "num_steps": 128,
        "num_epochs": 10,
        "num_minibatches": 32,
        "learning_rate": 3e-4,
        "discount": 0.999,
        "entropy_coefficient": 0.0,
        "initial_log_std": 0.5,
        "normalize_observation": True,
        "normalize_reward": True,
    },
)

# Without reward scaling, ten epochs per rollout ended at -500 on one seed of ten.
_ACROBOT = Entry(
    "chosen among eight settings on seeds 500 to 505; docs/settings.md",
    {
        "total_steps": 500_000,
        "num_envs": 16,
        "num_steps": 128,
        "num_epochs": 10,
        "num_minibatches": 32,
        "learning_rate": 1e-3,
        "entropy_coefficient": 0.0,
        "normalize_observation": True,
        "normalize_reward": True,
    },
)

_LUNAR_LANDER = Entry(
    f"{_ZOO}, LunarLander, with normalised observations",
    {
        "total_steps": 1_000_000,
        "num_envs": 16,
        "num_steps": 1024,
        "num_minibatches": 256,
        "learning_rate": 3e-4,
        "anneal_learning_rate": False,
        "discount": 0.999,
        "gae_lambda": 0.98,
        "clip_value": False,
        "normalize_observation": True,
    },
)

# With their defaults, A2C, A3C and IMPALA end below -1,150 on Pendulum, and at 373 on HalfCheetah: rollouts
# of 80 or 320 steps give few updates, and an entropy bonus keeps standard deviations large.
_SHORT_ROLLOUTS: dict[str, Any] = {
    "num_envs": 8,
    "num_steps": 8,
    "learning_rate": 1e-3,
    "entropy_coefficient": 0.0,
    "normalize_observation": True,
    "normalize_reward": True,
}
# The field of each algorithm for lambda.
_LAMBDA_FIELDS = {"A2C": "gae_lambda", "A3C": "gae_lambda", "IMPALA": "trace_lambda"}
# Four workers of A3C make four updates, each with a quarter of the samples.
_PENDULUM_STEP_SIZES = {"A2C": 2e-3, "A3C": 5e-4, "IMPALA": 1e-3}

# For all continuous actions, by algorithm.
ACTOR_CRITICS = {
    algorithm: Entry(
        "short rollouts, normalisation, lambda and step size of Stable-Baselines3 Zoo's hyperparams/a2c.yml"
        " for robots; docs/settings.md",
        {**_SHORT_ROLLOUTS, name: 0.9},
    )
    for algorithm, name in _LAMBDA_FIELDS.items()
}

# The layers of CleanRL's dqn.py, with layer normalisation as in PQN. With plain layers, or one-step returns,
# some seeds are still unstable at the end.
_CARTPOLE_DQN = Entry(
    "CleanRL's dqn.py with normalised layers and three-step returns; docs/settings.md",
    {
        "learning_rate": 1e-3,
        "anneal_learning_rate": True,
        "n_step": 3,
        "layer_norm": True,
        "hidden": (120, 84),
    },
)

# Rewards are sparse: five-step returns propagate the goal's value faster. With one-step returns, half of the
# agents end at -200.
_MOUNTAIN_CAR_DQN = Entry(
    "chosen among ten settings on seeds 500 to 503; docs/settings.md",
    {
        "total_steps": 250_000,
        "learning_starts": 1_000,
        "updates_per_step": 0.25,
        "learning_rate": 4e-3,
        "anneal_learning_rate": True,
        "target_period": 200,
        "exploration_fraction": 0.2,
        "n_step": 5,
        "layer_norm": True,
        "normalize_observation": True,
    },
)

# Not for MuJoCo's tasks, which CleanRL and the Zoo of Stable-Baselines3 train without normalisation.
NORMALIZING_OFF_POLICY = Entry(
    "normalised observations, as in brax's train/sac.py and FastTD3; other settings are not tuned",
    {"normalize_observation": True},
)

# By class name of the algorithm, then by key: a family, an environment, or a pattern (`algos.presets`).
PRESETS: dict[str, dict[str, Entry]] = {
    "DQN": {"CartPole-v1": _CARTPOLE_DQN, "sparse-control": _MOUNTAIN_CAR_DQN},
    "C51": {
        "CartPole-v1": _CARTPOLE_DQN.with_changes("used here for C51"),
        "sparse-control": _MOUNTAIN_CAR_DQN.with_changes("used here for C51"),
    },
    "QRDQN": {
        "CartPole-v1": _CARTPOLE_DQN.with_changes("used here for QR-DQN"),
        "sparse-control": _MOUNTAIN_CAR_DQN.with_changes("used here for QR-DQN"),
    },
    "PPO": {
        "Pendulum-v1": Entry(
            "chosen among eight settings; docs/settings.md",
            {
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
        ),
        "Acrobot-v1": _ACROBOT,
        "*:Acrobot-v1": _ACROBOT,
        "sparse-control": _MOUNTAIN_CAR,
        "sparse-continuous-control": _MOUNTAIN_CAR_CONTINUOUS,
        "box2d": _LUNAR_LANDER,
        "continuous-control": _CLEANRL,
    },
    "SAC": {
        "Pendulum-v1": Entry(
            "chosen on seeds 0 to 4; docs/settings.md",
            {
                "total_steps": 100_000,
                "num_envs": 4,
                "learning_starts": 1_000,
                "batch_size": 128,
                "updates_per_step": 0.25,
                "learning_rate": 1e-3,
                "anneal_learning_rate": True,
                "hidden": (64, 64),
            },
        ),
    },
}

for _algorithm in ("PPO", "SAC"):  # the family: Pendulum in other libraries too
    PRESETS[_algorithm]["pendulum"] = PRESETS[_algorithm]["Pendulum-v1"]

PRESETS["MuZero"] = {
    "CartPole-v1": Entry(
        "normalised observations; chosen on seeds 100 and 101, docs/settings.md",
        {"normalize_observation": True},
    ),
}

for _algorithm, _entry in ACTOR_CRITICS.items():
    PRESETS[_algorithm] = {
        "pendulum": _entry.with_changes(
            "a shorter horizon and shorter rollouts; chosen on seeds 500 to 503",
            num_steps=5,
            discount=0.9,
            activation="relu",
            learning_rate=_PENDULUM_STEP_SIZES[_algorithm],
        ),
        "continuous-control": _entry,
    }

PRESETS["A3C"]["sparse-continuous-control"] = ACTOR_CRITICS["A3C"].with_changes(
    "a quarter of A2C's learning rate, for four workers; chosen on seeds 500 to 511", learning_rate=1.75e-4
)

_ACROBOT_PQN = Entry(
    "chosen among eight settings on seeds 500 to 502; docs/settings.md",
    {"learning_rate": 1e-3, "q_lambda": 0.9, "reward_scale": 1.0},
)
PRESETS["PQN"] = {"Acrobot-v1": _ACROBOT_PQN, "*:Acrobot-v1": _ACROBOT_PQN}

PRESETS["CrossQ"] = {
    "pendulum": PRESETS["SAC"]["Pendulum-v1"].with_changes(
        "with half the steps, critics twice as wide, and batch renormalisation from update 2,500 on; the"
        " first settings tried for CrossQ",
        total_steps=50_000,
        critic_hidden=(128, 128),
        renorm_after=2_500,
    ),
    "continuous-control": NORMALIZING_OFF_POLICY,
}
PRESETS["SAC"]["continuous-control"] = NORMALIZING_OFF_POLICY
PRESETS["TD3"] = {
    "pendulum": PRESETS["SAC"]["Pendulum-v1"].with_changes("used here for TD3"),
    "continuous-control": NORMALIZING_OFF_POLICY,
}

# With more gradient steps per environment step, Pendulum needs fewer environment steps.
_PENDULUM_ENSEMBLE = PRESETS["SAC"]["Pendulum-v1"].with_changes(
    "with a tenth of the environment steps, and two gradient steps for each; not tuned",
    total_steps=10_000,
    updates_per_step=2.0,
    policy_delay=2,
)
PRESETS["REDQ"] = {
    "pendulum": _PENDULUM_ENSEMBLE.with_changes("used here for REDQ with five critics", num_critics=5),
    "continuous-control": NORMALIZING_OFF_POLICY,
}
PRESETS["DroQ"] = {
    "pendulum": _PENDULUM_ENSEMBLE.with_changes("used here for DroQ"),
    "continuous-control": NORMALIZING_OFF_POLICY,
}
PRESETS["TQC"] = {
    "pendulum": PRESETS["SAC"]["Pendulum-v1"].with_changes(
        "with critics of the actor's size, used here for TQC; not tuned", critic_hidden=(64, 64)
    ),
    "continuous-control": NORMALIZING_OFF_POLICY,
}

# FastTD3's defaults are for HumanoidBench on a GPU; a CPU is too slow for them.
FAST_ON_CPU: dict[str, Any] = {
    "total_steps": 1_000_000,
    "num_envs": 16,
    "buffer_size": 1_000_000,
    "batch_size": 256,
    "learning_starts": 5_000,
    "updates_per_step": 0.25,
    "hidden": (256, 128),
    "critic_hidden": (256, 128),
}
PRESETS["FastTD3"] = {
    "pendulum": Entry(
        "SAC's on Pendulum with sixteen environments, twice the steps, and the range of Pendulum's returns;"
        " not tuned",
        {
            "total_steps": 200_000,
            "num_envs": 16,
            "buffer_size": 200_000,
            "batch_size": 256,
            "learning_starts": 1_000,
            "updates_per_step": 0.125,
            "learning_rate": 1e-3,
            "anneal_learning_rate": True,
            "target_rate": 0.05,
            "weight_decay": 0.01,
            "value_min": -1_500.0,
            "value_max": 0.0,
            "hidden": (64, 64),
            "critic_hidden": (64, 64),
        },
    ),
    "continuous-control": Entry(
        "FastTD3's defaults for HumanoidBench (fast_td3/hyperparams.py); smaller on a CPU, not tuned",
        {},
        on_cpu=FAST_ON_CPU,
    ),
}

# Only the goal is rewarded, and noise that is independent in each step does not swing the car up to it.
_SWINGING: dict[str, Any] = {
    "total_steps": 100_000,
    "learning_starts": 5_000,
    "anneal_learning_rate": False,
    "normalize_observation": True,
    "explore": "algos.explorers:SWINGING",
}
# Further changes, by algorithm.
_CHANGES: dict[str, dict[str, Any]] = {
    "SAC": {},
    "TD3": {},
    "CrossQ": {"renorm_after": 100_000},
    "REDQ": {"updates_per_step": 0.25, "policy_delay": 1},
    "DroQ": {"updates_per_step": 0.25, "policy_delay": 1},
    "TQC": {},
    "FastTD3": {"value_min": -100.0, "value_max": 100.0},
}
for _algorithm, _changes in _CHANGES.items():
    PRESETS[_algorithm]["sparse-continuous-control"] = PRESETS[_algorithm]["pendulum"].with_changes(
        "with normalised observations and correlated noise, which was chosen with SAC and TD3 on seeds 500 to"
        " 503; docs/settings.md",
        **_SWINGING,
        **_changes,
    )

# Learning from data sets: small layers, short horizons, and temperatures and penalties scaled to the returns.
_FROM_DATA: dict[str, Any] = {
    "total_steps": 20_480,
    "num_envs": 8,
    "num_steps": 16,
    "batch_size": 128,
    "learning_rate": 1e-3,
    "hidden": (64, 64),
}
_SHORT_HORIZON: dict[str, Any] = {**_FROM_DATA, "discount": 0.95, "target_rate": 0.01}
for _algorithm, _values in {
    "BC": _FROM_DATA,
    "IQL": {**_SHORT_HORIZON, "advantage_scale": 0.3, "expectile": 0.8, "normalize_observation": True},
    "ReBRAC": {**_SHORT_HORIZON, "actor_penalty": 0.1, "critic_penalty": 0.0},
}.items():
    _source = "the first settings tried, on data of a quarter good and three quarters random actions"
    PRESETS[_algorithm] = {"pendulum": Entry(f"{_source}; docs/how-to/offline.md", _values)}

# A rollout has several sequences of each environment, so that minibatches are shuffled as PPO's are.
PRESETS["RecurrentPPO"] = {
    name: PRESETS["PPO"][name].with_changes(
        "with sequences of 16 steps, used here for recurrent PPO", sequence_length=16
    )
    for name in ("pendulum", "Acrobot-v1", "*:Acrobot-v1", "sparse-continuous-control")
}
