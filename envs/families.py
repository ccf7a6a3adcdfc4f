"""Maps names of environments to families; the environments of a family share presets of hyperparameters.

A family is a list of shell patterns (`fnmatch`). A task has the same family in every library:
`MountainCar-v0`, `gymnasium:MountainCar-v0` and `envpool:MountainCar-v0` are all sparse control. This module
imports no library and makes no environment.
"""

import fnmatch

from envs import composite
from envs.composite import ObservationSpace
from envs.spaces import Box, Space

_HOST_PREFIXES = ("envpool:", "gymnasium:")  # of libraries whose environments run on the host


def _host_names(*tasks: str) -> tuple[str, ...]:
    """The names of tasks in EnvPool and Gymnasium, whose environments run on the host."""
    return tuple(f"{host}{task}" for host in _HOST_PREFIXES for task in tasks)


# MuJoCo's tasks in Gymnasium, of all versions.
_MUJOCO = (
    "Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum",
    "InvertedPendulum", "Pusher", "Reacher", "Swimmer", "Walker2d",
)  # fmt: skip

# Domains of the DeepMind Control Suite; names of tasks begin with them, such as `CheetahRun`.
_CONTROL_SUITE = (
    "Acrobot", "BallInCup", "Cartpole", "Cheetah", "Dog", "Finger", "Fish", "Hopper", "Humanoid",
    "HumanoidCMU", "Lqr", "Manipulator", "Pendulum", "PointMass", "Quadruped", "Reacher", "Stacker",
    "Swimmer", "Walker",
)  # fmt: skip

# EnvPool's names of Procgen's games consist of a game and a mode, such as `CoinrunHard-v0`.
_PROCGEN = (
    "Bigfish", "Bossfight", "Caveflyer", "Chaser", "Climber", "Coinrun", "Dodgeball", "Fruitbot", "Heist",
    "Jumper", "Leaper", "Maze", "Miner", "Ninja", "Plunder", "Starpilot",
)  # fmt: skip
_PROCGEN_MODES = ("Easy", "Hard", "Extreme", "Memory", "Exploration")  # `Maze` without a mode is Jumanji's

# Jumanji's games, of all versions. EnvPool has them too, as `Snake-v1` and as `Jumanji/Snake-v1`.
_JUMANJI = (
    "BinPack", "CVRP", "Cleaner", "Connector", "FlatPack", "Game2048", "GraphColoring", "JobShop", "Knapsack",
    "LevelBasedForaging", "MMST", "Maze", "Minesweeper", "MultiCVRP", "PacMan", "RobotWarehouse",
    "RubiksCube", "RubiksCube-partly-scrambled", "SearchAndRescue", "SlidingTilePuzzle", "Snake", "Sokoban",
    "Sudoku", "Sudoku-very-easy", "TSP", "Tetris",
)  # fmt: skip

# Family -> patterns of names; the first family with a match, in this order.
_FAMILIES: dict[str, tuple[str, ...]] = {
    "probe": ("probe:*",),
    "classic-control": (
        "CartPole-v*",
        "Acrobot-v*",
        *_host_names("CartPole-v*", "phys2d/CartPole-v*", "Acrobot-v*"),
    ),
    "sparse-control": ("MountainCar-v*", *_host_names("MountainCar-v*")),
    "sparse-continuous-control": ("MountainCarContinuous-v*", *_host_names("MountainCarContinuous-v*")),
    "pendulum": ("Pendulum-v*", *_host_names("Pendulum-v*", "phys2d/Pendulum-v*")),
    "minatar": ("*-MinAtar", *_host_names("MinAtar/*")),
    "bsuite": ("*-bsuite",),
    "brax": ("brax:*",),
    "control-suite": (
        "playground:*",
        *(f"envpool:{domain}*-v1" for domain in _CONTROL_SUITE),
        *_host_names("dm_control/*"),
    ),
    "mujoco": _host_names(*(f"{task}-v[0-9]" for task in _MUJOCO)),
    "box2d": _host_names("LunarLander*", "BipedalWalker*"),
    "mpe": ("MPE_*",),
    "smax": ("SMAX*", "HeuristicEnemySMAX*"),
    "overcooked": ("overcooked*",),
    "hanabi": ("hanabi*",),
    "mabrax": ("ant_4x2", "halfcheetah_6x1", "hopper_3x1", "humanoid_9|8", "walker2d_2x3"),
    "switch-riddle": ("switch_riddle*",),
    "social-dilemma": ("storm*", "coin_game*"),
    "jaxnav": ("jaxnav*",),
    "games": ("game:*", "pgx:*"),
    "codesign": ("codesign:*",),
    "codesign-sequence": (),  # no pattern: its environment names this family itself
    "craftax": ("Craftax-*",),
    "octax": ("octax:*",),
    "jumanji": ("jumanji:*", "envpool:Jumanji/*", *(f"envpool:{game}-v[0-9]" for game in _JUMANJI)),
    "minigrid": _host_names("MiniGrid-*", "BabyAI-*"),
    "procgen": tuple(f"envpool:{game}{mode}-v0" for game in _PROCGEN for mode in _PROCGEN_MODES),
    "atari": ("envpool:*-v5", "gymnasium:ALE/*", "gymnasium:*NoFrameskip-v4"),
}

# Families of environments whose name matches no pattern: `family_by_spaces` chooses one by the spaces.
CONTINUOUS, VISUAL, GRID, PICTURES = "continuous-control", "visual-control", "grid", "pictures"
_LARGE_IMAGE = 36  # pixels per side: from this size on, convolutions pay off, also on a CPU


def names() -> tuple[str, ...]:
    """The names of all families.

    >>> "minatar" in names()
    True
    """
    return (*_FAMILIES, CONTINUOUS, VISUAL, GRID, PICTURES)


def family(name: str) -> str | None:
    """The family of the environment `envs.make(name)`; None if no pattern matches.

    >>> family("envpool:HalfCheetah-v4"), family("envpool:Pong-v5"), family("envpool:CheetahRun-v1")
    ('mujoco', 'atari', 'control-suite')
    >>> family("MountainCar-v0"), family("my.module:factory")
    ('sparse-control', None)
    """
    name = name.removeprefix("ray:")  # it only says where the environment runs
    if name.startswith("gymnasium:"):  # `gymnasium:module:Name` imports the module first
        name = "gymnasium:" + name.rpartition(":")[2]
    patterns = ((kind, pattern) for kind, patterns in _FAMILIES.items() for pattern in patterns)
    return next((kind for kind, pattern in patterns if fnmatch.fnmatchcase(name, pattern)), None)


def known_host_names(name: str) -> list[str]:
    """The names for `envs.make` of a task of Gymnasium and EnvPool; empty if its family is unknown.

    >>> known_host_names("Hopper-v4"), known_host_names("Hoper")
    (['gymnasium:Hopper-v4', 'envpool:Hopper-v4'], [])
    """
    return [f"{host}{name}" for host in reversed(_HOST_PREFIXES) if family(f"{host}{name}")]


def family_by_spaces(observation: ObservationSpace, action: Space) -> str | None:
    """The family of an environment by its spaces alone.

    None if there are no images, and actions are discrete or all observations are categories or bytes (uint8).

    >>> from envs.spaces import Discrete
    >>> family_by_spaces(Box(-1.0, 1.0, (3,)), Box(-1.0, 1.0, (1,)))
    'continuous-control'
    >>> family_by_spaces(Box(0.0, 1.0, (10, 10, 4)), Discrete(3))
    'grid'
    >>> parts = composite.Dict({"arm": Box(-1.0, 1.0, (9,)), "goal": Box(-1.0, 1.0, (3,))})
    >>> family_by_spaces(parts, Box(-1.0, 1.0, (2,)))
    'continuous-control'
    """
    boxes = [part for _, part in composite.parts(observation) if isinstance(part, Box)]
    images = [box.shape for box in boxes if box.is_image]
    if isinstance(action, Box):
        # Quantities are neither categories nor bytes.
        has_quantities = any(box.codes is None and box.dtype != "uint8" for box in boxes)
        return VISUAL if images else CONTINUOUS if has_quantities else None
    if not images:
        return None
    return GRID if all(min(shape[:2]) < _LARGE_IMAGE for shape in images) else PICTURES
