"""Families: a task has the same family from every source; the rest are classified by their spaces."""

import pytest

import envs
from envs import families

SAME = [
    ("MountainCar-v0", "gymnasium:MountainCar-v0", "envpool:MountainCar-v0"),
    ("Pendulum-v1", "gymnasium:Pendulum-v1", "envpool:Pendulum-v0"),
    ("CartPole-v1", "envpool:CartPole-v0", "gymnasium:Acrobot-v1"),
    ("envpool:Hopper-v4", "gymnasium:Walker2d-v5", "envpool:Humanoid-v3"),
    ("envpool:WalkerWalk-v1", "playground:WalkerWalk", "gymnasium:dm_control/cheetah-run-v0"),
    ("envpool:Pong-v5", "gymnasium:ALE/Breakout-v5", "gymnasium:PongNoFrameskip-v4"),
    ("MPE_simple_tag_v3", "MPE_simple_spread_v3"),
    ("HeuristicEnemySMAX", "SMAX", "HeuristicEnemySMAX:3m"),
    ("brax:ant", "brax:hopper:mjx"),
    ("jumanji:SearchAndRescue-v0", "envpool:Jumanji/SearchAndRescue-v0", "envpool:Maze-v0", "envpool:TSP-v1"),
    ("gymnasium:minigrid:MiniGrid-Empty-5x5-v0", "envpool:BabyAI-GoToObj-v0"),
    ("envpool:MazeHard-v0", "envpool:HeistMemory-v0"),
]


@pytest.mark.parametrize("names", SAME)
def test_same_tasks_share_a_family(names):
    assert len({families.family(name) for name in names}) == 1
    assert families.family(names[0]) in families.names()


def test_similar_names_have_different_families():
    kinds = {
        families.family(name)
        for name in (
            "envpool:Hopper-v4",
            "envpool:HopperHop-v1",
            "envpool:Pong-v5",
            "MountainCar-v0",
            "MountainCarContinuous-v0",
            "Pong-misc",
            "envpool:MazeHard-v0",
            "envpool:Maze-v0",
        )
    }
    assert kinds == {
        "mujoco",
        "control-suite",
        "atari",
        "sparse-control",
        "sparse-continuous-control",
        "procgen",
        "jumanji",
        None,
    }


def test_built_in_environments_have_a_family():
    without = {name for name in envs.names() if families.family(name) is None}
    assert all(name.endswith("-misc") for name in without), without


ARM = envs.Dict({"joints": envs.Box(-1.0, 1.0, (9,)), "goal": envs.Discrete(3)})


@pytest.mark.parametrize(
    ("observation", "action", "expected"),
    [
        (envs.Box(-1.0, 1.0, (3,)), envs.Box(-1.0, 1.0, (1,)), families.CONTINUOUS),
        (envs.Box(-1.0, 1.0, (3,)), envs.Discrete(2), None),
        (envs.Box(0.0, 1.0, (10, 10, 4)), envs.Discrete(2), families.GRID),
        (envs.Box(0.0, 255.0, (84, 84, 4), "uint8"), envs.Discrete(2), families.PICTURES),
        (envs.Box(0.0, 255.0, (84, 84, 4), "uint8"), envs.Box(-1.0, 1.0, (1,)), families.VISUAL),
        (envs.Box(0.0, 8.0, (9, 9), "int32"), envs.MultiDiscrete((9, 9, 9)), families.GRID),
        (envs.Box(-1.0, 1.0, (2, 12, 12)), envs.Box(-1.0, 1.0, (1,)), families.CONTINUOUS),
        (envs.Box(0.0, 8.0, (9,), "int32"), envs.Box(-1.0, 1.0, (1,)), None),
        (envs.Discrete(5), envs.MultiDiscrete((2, 3)), None),
        (ARM, envs.Box(-1.0, 1.0, (1,)), families.CONTINUOUS),
        (ARM, envs.Discrete(2), None),
        (envs.Tuple((ARM, envs.Box(0.0, 1.0, (7, 7, 3)))), envs.Discrete(2), families.GRID),
        (envs.Tuple((ARM, envs.Box(0.0, 1.0, (7, 7, 3)))), envs.Box(-1.0, 1.0, (1,)), families.VISUAL),
    ],
)
def test_family_by_spaces(observation, action, expected):
    assert families.family_by_spaces(observation, action) == expected
