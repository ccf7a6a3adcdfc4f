"""Presets for images: MinAtar, Atari, arcades, and other grids."""

from typing import Any

from algos.presets.entry import Entry

# With a smaller entropy bonus, most agents of Breakout never hit the last bricks of a wall, and see no second
# wall; agents of Asterix end at a return of 24, not 39. Value clipping lets values change by at most 0.2 per
# iteration, so they would lag behind returns of a hundred.
_MINATAR = Entry(
    "PureJaxRL's settings for MinAtar with a fifth of its step size, five times its entropy bonus, and values"
    " that are not clipped; docs/settings.md",
    {
        "total_steps": 10_000_000,
        "num_envs": 64,
        "num_steps": 128,
        "num_minibatches": 8,
        "learning_rate": 1e-3,
        "entropy_coefficient": 0.05,
        "clip_value": False,
        "activation": "relu",
        "convolve": False,
    },
)
_MINATAR_PQN = Entry(
    "purejaxql's config/alg/pqn_minatar.yaml, with flattened grids",
    {
        "total_steps": 10_000_000,
        "num_envs": 128,
        "num_steps": 32,
        "num_epochs": 2,
        "num_minibatches": 32,
        "learning_rate": 5e-4,
        "q_lambda": 0.65,
        "reward_scale": 1.0,
        "epsilon_end": 0.05,
        "exploration_fraction": 0.1,
        "convolve": False,
        "hidden": (256, 256),
    },
)
_MINATAR_DQN = Entry(
    "MinAtar's examples/dqn.py (Young and Tian 2019), with Adam and flattened grids",
    {
        "total_steps": 5_000_000,
        "buffer_size": 100_000,
        "batch_size": 32,
        "learning_starts": 5_000,
        "updates_per_step": 1.0,
        "target_period": 1_000,
        "epsilon_end": 0.1,
        "exploration_fraction": 0.02,
        "convolve": False,
    },
)

# CleanRL clips rewards to their sign. Here they are scaled, so that an evaluation shows the game's score.
_ATARI = Entry(
    "CleanRL's ppo_atari_envpool.py, with rewards scaled by their deviation in place of clipped ones",
    {
        "total_steps": 10_000_000,
        "num_envs": 8,
        "num_steps": 128,
        "clip_ratio": 0.1,
        "normalize_reward": True,
        "activation": "relu",
    },
)
_PICTURES = _ATARI.with_changes("for any pictures, with a tenth of its steps", total_steps=1_000_000)
# The Zoo's state-dependent exploration, and its wrappers that change the images, are left out.
_VISUAL = Entry(
    "Stable-Baselines3 Zoo's hyperparams/ppo.yml, CarRacing, with a quarter of its steps; not tuned",
    {
        "total_steps": 1_000_000,
        "num_envs": 8,
        "num_steps": 512,
        "num_epochs": 10,
        "num_minibatches": 32,
        "learning_rate": 1e-4,
        "entropy_coefficient": 0.0,
        "normalize_reward": True,
        "activation": "gelu",
    },
)
_MINIGRID = Entry(
    "rl-starter-files' scripts/train.py for MiniGrid, with one-hot, flattened maps",
    {
        "total_steps": 1_000_000,
        "num_envs": 16,
        "num_steps": 128,
        "num_minibatches": 8,
        "learning_rate": 7e-4,
        "anneal_learning_rate": False,
        "activation": "relu",
        "convolve": False,
    },
)
_ATARI_PQN = Entry(
    "purejaxql's config/alg/pqn_atari.yaml; give the environment ?reward_clip=True&episodic_life=True too",
    {
        "total_steps": 50_000_000,
        "num_envs": 128,
        "num_steps": 32,
        "num_epochs": 2,
        "num_minibatches": 32,
        "learning_rate": 2.5e-4,
        "anneal_learning_rate": False,
        "q_lambda": 0.65,
        "reward_scale": 1.0,
        "epsilon_end": 0.001,
        "exploration_fraction": 0.1,
    },
)
_PROCGEN = Entry(
    "Procgen's own PPO (Cobbe et al. 2020, arXiv 1912.01588, appendix D)",
    {
        "total_steps": 25_000_000,
        "num_envs": 64,
        "num_steps": 256,
        "num_epochs": 3,
        "num_minibatches": 8,
        "learning_rate": 5e-4,
        "anneal_learning_rate": False,
        "discount": 0.999,
        "normalize_reward": True,
        "activation": "relu",
    },
)
_GRID = Entry(
    "flattened grids, which are faster than convolutions if small, and as good; MinAtar in docs/settings.md",
    {"convolve": False, "activation": "relu"},
)

_ATOMS: dict[str, Any] = {"atoms": 51, "value_min": -10.0, "value_max": 10.0}

# By class name of the algorithm, then by key: a family, an environment, or a pattern (`algos.presets`).
PRESETS: dict[str, dict[str, Entry]] = {
    "PPO": {
        "minatar": _MINATAR,
        # With layers of 64, three agents of ten never hit the last bricks of a wall.
        "Breakout-MinAtar": _MINATAR.with_changes(
            "layers twice as wide; docs/settings.md", hidden=(128, 128)
        ),
        # An action's effects come soon, so distant returns only add noise.
        "SpaceInvaders-MinAtar": _MINATAR.with_changes(
            "a shorter horizon, twice the step size, layers twice as wide; docs/settings.md",
            hidden=(128, 128),
            discount=0.98,
            gae_lambda=0.9,
            learning_rate=2e-3,
        ),
        "atari": _ATARI,
        "procgen": _PROCGEN,
        "minigrid": _MINIGRID,
        "grid": _GRID,
        "pictures": _PICTURES,
        "visual-control": _VISUAL,
    },
    "PQN": {
        "minatar": _MINATAR_PQN,
        "SpaceInvaders-MinAtar": _MINATAR_PQN.with_changes(
            "a shorter horizon, longer returns, twice the step size, less exploration; docs/settings.md",
            discount=0.98,
            q_lambda=0.75,
            learning_rate=1e-3,
            epsilon_end=0.001,
            exploration_fraction=0.03,
        ),
        "atari": _ATARI_PQN,
        "grid": Entry(_GRID.source, {"convolve": False}),
    },
    "DQN": {"minatar": _MINATAR_DQN, "grid": Entry(_GRID.source, {"convolve": False})},
    "QRDQN": {"minatar": _MINATAR_DQN, "grid": Entry(_GRID.source, {"convolve": False})},
    "C51": {
        "minatar": _MINATAR_DQN.with_changes(
            "the paper's 51 atoms, up to 50, as no rewards are clipped", **{**_ATOMS, "value_max": 50.0}
        ),
        "atari": Entry("the paper's grid (Bellemare et al. 2017, section 5), for clipped rewards", _ATOMS),
        "grid": Entry(_GRID.source, {"convolve": False}),
    },
    "A2C": {"minatar": _GRID, "grid": _GRID},
    "A3C": {"minatar": _GRID, "grid": _GRID},
    "IMPALA": {"minatar": _GRID, "grid": _GRID},
}
