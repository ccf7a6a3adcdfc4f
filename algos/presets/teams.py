"""Presets for several agents: JaxMARL's environments, with its baselines' settings."""

from typing import Any

from algos.presets.entry import Entry

# Truncated episodes bootstrap here, so values in MPE become large, while a clipped value loss changes them by
# at most 0.2 per iteration. These settings keep values moderate (docs/settings.md).
_MODERATE_VALUES: dict[str, Any] = {"clip_value": False, "activation": "relu", "normalize_reward": True}
_MPE_IPPO = Entry(
    "JaxMARL's ippo_ff_mpe.yaml with four times its step size, ReLU, and scaled rewards; docs/settings.md",
    {"total_steps": 10_000_000, "learning_rate": 1e-3, **_MODERATE_VALUES},
)
_MPE_MAPPO = Entry(
    "JaxMARL's mappo_homogenous_rnn_mpe.yaml with scaled rewards; docs/settings.md",
    {"total_steps": 600_000, "learning_rate": 2e-3, **_MODERATE_VALUES},
)

_SMAX: dict[str, Any] = {
    "total_steps": 10_000_000,
    "num_envs": 128,
    "num_steps": 128,
    "max_grad_norm": 0.25,
    "activation": "relu",
    "recurrent": True,
    "memory_size": 128,
    "hidden": (128,),
}
_SMAX_IPPO = Entry("JaxMARL's ippo_rnn_smax.yaml", {**_SMAX, "learning_rate": 4e-3, "clip_ratio": 0.05})
_SMAX_MAPPO = Entry(
    "JaxMARL's mappo_homogenous_rnn_smax.yaml", {**_SMAX, "learning_rate": 2e-3, "entropy_coefficient": 0.0}
)

_OVERCOOKED = Entry(
    "JaxMARL's ippo_ff_overcooked.yaml, with flattened grids",
    {"total_steps": 5_000_000, "num_envs": 16, "num_steps": 128, "convolve": False},
)
_OVERCOOKED_V2 = Entry(
    "JaxMARL's ippo_rnn_overcooked_v2.yaml",
    {
        "total_steps": 30_000_000,
        "num_envs": 256,
        "num_steps": 256,
        "num_minibatches": 64,
        "max_grad_norm": 0.25,
        "activation": "relu",
        "recurrent": True,
        "memory_size": 128,
        "hidden": (128,),
    },
    on_cpu={"num_envs": 64, "num_steps": 128, "num_minibatches": 16, "convolve": False},
)
_HANABI = Entry(
    "JaxMARL's ippo_ff_hanabi.yaml, which trains for 1e10 steps",
    {
        "total_steps": 1_000_000_000,
        "num_envs": 1024,
        "num_steps": 128,
        "learning_rate": 5e-4,
        "anneal_learning_rate": False,
        "activation": "relu",
        "hidden": (512, 512),
    },
    on_cpu={"num_envs": 64, "total_steps": 10_000_000},
)
_MABRAX = Entry(
    "JaxMARL's ippo_ff_mabrax.yaml",
    {
        "total_steps": 10_000_000,
        "num_envs": 64,
        "num_steps": 300,
        "learning_rate": 1e-3,
        "entropy_coefficient": 2e-6,
        "value_coefficient": 4.5,
        "hidden": (128, 64),
    },
)
_SWITCH_RIDDLE = Entry(
    "JaxMARL's ippo_ff_switch_riddle.yaml",
    {"total_steps": 1_000_000, "num_envs": 64, "num_steps": 128, "activation": "relu"},
)

# VDN and QMIX. In MPE, JaxMARL's team gets the sum of the agents' rewards; here it gets their mean.
_QL_MPE = Entry(
    "JaxMARL's vdn_ff_mpe.yaml, with 8 environments of 32 steps in place of 32 of 16 steps",
    {
        "total_steps": 10_000_000,
        "num_steps": 32,
        "num_updates": 1,
        "discount": 0.9,
        "reward_scale": 3.0,
        "hidden": (64, 64),
    },
)
_QL_SMAX = Entry(
    "JaxMARL's ql_rnn_smax.yaml, with its 16 environments of 128 steps and layers of 512 units",
    {
        "total_steps": 10_000_000,
        "num_envs": 16,
        "num_steps": 128,
        "num_updates": 8,
        "buffer_size": 640_000,
        "learning_rate": 5e-5,
        "anneal_learning_rate": False,
        "max_grad_norm": 10.0,
        "target_period": 10,
        "reward_scale": 10.0,
        "memory": "gru",
        "memory_size": 512,
    },
    on_cpu={"memory_size": 64, "buffer_size": 128_000, "learning_rate": 5e-4, "num_steps": 64},
)
_QL_OVERCOOKED = Entry(
    "JaxMARL's ql_cnn_overcooked.yaml, with flattened grids and sequences of eight steps",
    {
        "total_steps": 5_000_000,
        "num_envs": 32,
        "num_steps": 8,
        "num_updates": 4,
        "buffer_size": 65_536,
        "learning_starts": 1_024,
        "learning_rate": 7e-5,
        "max_grad_norm": 1.0,
        "convolve": False,
    },
)
_VDN = {"mpe": _QL_MPE, "smax": _QL_SMAX, "overcooked": _QL_OVERCOOKED}
_QMIX = {
    "mpe": _QL_MPE.with_changes(
        "the mixing network of ql_rnn_mpe.yaml, and a fifth of its step size; docs/algorithms/qmix.md",
        learning_rate=1e-3,
        hypernetwork=(128,),
        mixer_scale=0.01,
    ),
    "smax": _QL_SMAX.with_changes("its mixing network", mixer_size=64, hypernetwork=(256,)),
    "overcooked": _QL_OVERCOOKED,
}

# By class name of the algorithm, then by key: a family, an environment, or a pattern (`algos.presets`).
PRESETS: dict[str, dict[str, Entry]] = {
    "IPPO": {
        "mpe": _MPE_IPPO,
        "smax": _SMAX_IPPO,
        "overcooked": _OVERCOOKED,
        "overcooked_v2*": _OVERCOOKED_V2,
        "hanabi": _HANABI,
        "mabrax": _MABRAX,
        "switch-riddle": _SWITCH_RIDDLE,
    },
    "VDN": _VDN,
    "QMIX": _QMIX,
    "MAPPO": {
        "mpe": _MPE_MAPPO,
        "smax": _SMAX_MAPPO,
        "overcooked": _OVERCOOKED,
        "overcooked_v2*": _OVERCOOKED_V2,
        "hanabi": _HANABI,
        "mabrax": _MABRAX,
        "switch-riddle": _SWITCH_RIDDLE,
    },
}
