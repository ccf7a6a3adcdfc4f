"""Presets for larger worlds: Craftax, Octax (CHIP-8 arcade games), Jumanji's puzzles."""

from algos.presets.entry import Entry

_CRAFTAX = Entry(
    "Craftax_Baselines' ppo.py",
    {
        "total_steps": 1_000_000_000,
        "num_envs": 1024,
        "num_steps": 64,
        "num_minibatches": 8,
        "learning_rate": 2e-4,
        "gae_lambda": 0.8,
        "max_grad_norm": 1.0,
        "hidden": (512, 512, 512),
    },
    on_cpu={"num_envs": 64, "total_steps": 5_000_000},
)
_CRAFTAX_PQN = Entry(
    "purejaxql's config/alg/pqn_craftax.yaml, whose observations are normalised by the batch",
    {
        "total_steps": 1_000_000_000,
        "num_envs": 1024,
        "num_steps": 1,
        "num_epochs": 1,
        "num_minibatches": 1,
        "learning_rate": 1e-4,
        "max_grad_norm": 1.0,
        "q_lambda": 0.0,
        "reward_scale": 1.0,
        "epsilon_start": 0.1,
        "epsilon_end": 0.005,
        "hidden": (1024, 1024, 1024, 1024),
    },
    on_cpu={"num_envs": 256, "total_steps": 5_000_000, "hidden": (512, 512)},
)
_OCTAX = Entry(
    "Octax's conf/config.yaml (Radji et al. 2025, arXiv 2510.01764), with an annealed learning rate and"
    " scaled rewards",
    {
        "total_steps": 5_000_000,
        "num_envs": 512,
        "num_steps": 32,
        "num_minibatches": 32,
        "learning_rate": 5e-4,
        "normalize_reward": True,
        "activation": "relu",
    },
    on_cpu={"num_envs": 32, "num_steps": 128, "num_minibatches": 8, "convolve": False},
)
_JUMANJI = Entry(
    "PPO with normalised observations and rewards, in place of Jumanji's own actor-critics",
    {
        "total_steps": 5_000_000,
        "num_envs": 64,
        "num_steps": 64,
        "num_minibatches": 8,
        "normalize_observation": True,
        "normalize_reward": True,
        "hidden": (256, 256),
        "activation": "relu",
        "convolve": False,
    },
)

# By class name of the algorithm, then by key: a family, an environment, or a pattern (`algos.presets`).
PRESETS: dict[str, dict[str, Entry]] = {
    "PPO": {"craftax": _CRAFTAX, "octax": _OCTAX, "jumanji": _JUMANJI},
    "PQN": {"craftax": _CRAFTAX_PQN},
}
