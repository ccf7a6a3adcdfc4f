"""What `python -m bench.presets` tries: candidates for each family, and environments to try them on.

Families that were looked at closely have a study of their own. The others have members, and the values that
their algorithm is swept over: any algorithm on any family is a study.
"""

import dataclasses

_HOSTS = ("envpool:", "gymnasium:")


@dataclasses.dataclass(frozen=True)
class Study:
    """What is tried for a family.

    Attributes:
      choose_on, confirm_on: environments; the latter have no part in choosing.
      total_steps: of each agent.
      shapes: flags of candidates that make other programs.
      sweep: values of floats, all combinations of which are tried for each shape.
      together: seeds in one program; not for environments on the host.
    """

    choose_on: tuple[str, ...]
    confirm_on: tuple[str, ...]
    total_steps: int
    shapes: tuple[str, ...]
    sweep: tuple[str, ...]
    together: bool = True


STUDIES: dict[tuple[str, str], Study] = {
    ("classic-control", "ppo"): Study(
        choose_on=("Acrobot-v1",),
        confirm_on=("CartPole-v1",),
        total_steps=500_000,
        shapes=(
            "--num-envs 16 --num-steps 128 --num-epochs 10 --num-minibatches 32 --normalize-observation"
            " --normalize-reward",
            "--num-envs 16 --num-steps 256 --num-epochs 4 --num-minibatches 64 --normalize-observation",
        ),
        sweep=("learning_rate=3e-4,1e-3,3e-3", "entropy_coefficient=0,0.01", "gae_lambda=0.95,0.98"),
    ),
    ("sparse-control", "ppo"): Study(
        choose_on=("MountainCar-v0",),
        confirm_on=(),
        total_steps=250_000,
        shapes=(
            "--num-envs 16 --num-steps 16 --normalize-observation --no-clip-value --no-anneal-learning-rate",
            "--num-envs 16 --num-steps 128 --normalize-observation --no-clip-value",
        ),
        sweep=("learning_rate=1e-4,3e-4,1e-3", "entropy_coefficient=0,0.01", "gae_lambda=0.95,0.98"),
    ),
    ("sparse-continuous-control", "ppo"): Study(
        choose_on=("MountainCarContinuous-v0",),
        confirm_on=(),
        total_steps=300_000,
        shapes=("--num-envs 16 --num-steps 128 --num-epochs 10 --num-minibatches 32",),
        sweep=("learning_rate=1e-4,3e-4", "initial_log_std=0,0.5,1", "discount=0.99,0.999"),
    ),
    ("minatar", "ppo"): Study(
        choose_on=("Breakout-MinAtar", "Asterix-MinAtar"),
        confirm_on=("Freeway-MinAtar", "SpaceInvaders-MinAtar"),
        total_steps=10_000_000,
        shapes=("", "--hidden 256 256", "--num-envs 128"),
        sweep=("learning_rate=1e-3,2.5e-3,5e-3", "entropy_coefficient=0.01,0.03"),
    ),
    ("minatar", "pqn"): Study(
        choose_on=("Breakout-MinAtar", "Asterix-MinAtar"),
        confirm_on=("Freeway-MinAtar", "SpaceInvaders-MinAtar"),
        total_steps=10_000_000,
        shapes=("", "--hidden 128 128", "--hidden 512 512"),
        sweep=("learning_rate=2.5e-4,5e-4,1e-3", "q_lambda=0.65,0.9"),
    ),
    ("mujoco", "ppo"): Study(
        choose_on=("envpool:HalfCheetah-v4", "envpool:Hopper-v4"),
        confirm_on=("envpool:Walker2d-v4",),
        total_steps=1_000_000,
        shapes=(
            "",
            "--initial-log-std 0",
            "--initial-log-std -2",
            "--activation relu --hidden 256 256 --initial-log-std -2",
        ),
        sweep=(),
        together=False,
    ),
    ("mpe", "ippo"): Study(
        choose_on=("MPE_simple_spread_v3",),
        confirm_on=("MPE_simple_reference_v3", "MPE_simple_tag_v3"),
        total_steps=2_000_000,
        shapes=("", "--num-envs 32"),
        sweep=("learning_rate=5e-4,1e-3,2e-3", "entropy_coefficient=0.003,0.01"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Members:
    """Of a family: those that settings are chosen on, those that confirm them, and steps of each agent."""

    choose_on: tuple[str, ...]
    confirm_on: tuple[str, ...]
    total_steps: int


MEMBERS: dict[str, Members] = {
    "classic-control": Members(("Acrobot-v1",), ("CartPole-v1",), 500_000),
    "sparse-control": Members(("MountainCar-v0",), ("gymnasium:MountainCar-v0",), 250_000),
    "sparse-continuous-control": Members(
        ("MountainCarContinuous-v0",), ("gymnasium:MountainCarContinuous-v0",), 300_000
    ),
    "pendulum": Members(("Pendulum-v1",), ("gymnasium:Pendulum-v1",), 1_000_000),
    "minatar": Members(
        ("Breakout-MinAtar", "Asterix-MinAtar"), ("Freeway-MinAtar", "SpaceInvaders-MinAtar"), 10_000_000
    ),
    "bsuite": Members(("Catch-bsuite", "DiscountingChain-bsuite"), ("UmbrellaChain-bsuite",), 1_000_000),
    "brax": Members(
        ("brax:inverted_double_pendulum", "brax:hopper"), ("brax:walker2d", "brax:halfcheetah"), 10_000_000
    ),
    "control-suite": Members(
        ("playground:CartpoleBalance", "playground:BallInCup"), ("playground:CheetahRun",), 5_000_000
    ),
    "mujoco": Members(("envpool:HalfCheetah-v4", "envpool:Hopper-v4"), ("envpool:Walker2d-v4",), 1_000_000),
    "box2d": Members(("gymnasium:LunarLander-v3",), ("gymnasium:BipedalWalker-v3",), 1_000_000),
    "mpe": Members(("MPE_simple_spread_v3",), ("MPE_simple_reference_v3", "MPE_simple_tag_v3"), 2_000_000),
    "smax": Members(("HeuristicEnemySMAX?map=3m",), ("HeuristicEnemySMAX?map=2s3z",), 2_000_000),
    "overcooked": Members(("overcooked?layout=cramped_room",), ("overcooked?layout=coord_ring",), 1_000_000),
    "hanabi": Members(("hanabi",), (), 10_000_000),
    "mabrax": Members(("hopper_3x1",), ("walker2d_2x3",), 5_000_000),
    "codesign": Members(("codesign:w1?specs=tight",), ("codesign:w2?specs=tight",), 100_000),
    "switch-riddle": Members(("switch_riddle",), (), 1_000_000),
    "social-dilemma": Members(("coin_game",), ("storm_2p",), 1_000_000),
    "jaxnav": Members(("jaxnav",), (), 5_000_000),
    "craftax": Members(("Craftax-Classic-Symbolic-v1",), ("Craftax-Symbolic-v1",), 5_000_000),
    "octax": Members(("octax:brix", "octax:pong"), ("octax:tank",), 5_000_000),
    "jumanji": Members(("jumanji:Snake-v1", "jumanji:Game2048-v1"), ("jumanji:Maze-v0",), 5_000_000),
    "minigrid": Members(("envpool:MiniGrid-DoorKey-5x5-v0",), ("envpool:MiniGrid-FourRooms-v0",), 1_000_000),
    "procgen": Members(("envpool:CoinrunEasy-v0",), ("envpool:StarpilotEasy-v0",), 5_000_000),
    "atari": Members(("envpool:Pong-v5", "envpool:Breakout-v5"), ("envpool:SpaceInvaders-v5",), 5_000_000),
    "continuous-control": Members(("Reacher-misc", "Swimmer-misc"), ("PointRobot-misc",), 1_000_000),
    "visual-control": Members(("envpool:D1Basic-v1",), ("gymnasium:CarRacing-v3",), 1_000_000),
    "grid": Members(("envpool:TwoWay-v0",), (), 1_000_000),
    "pictures": Members(("envpool:gfootball/academy_empty_goal_close-v1",), (), 1_000_000),
}

_ACTOR_CRITICS = ("entropy_coefficient=0,0.01", "learning_rate=3e-4,1e-3,3e-3")
_OFF_POLICY = ("learning_rate=3e-4,1e-3",)
_VALUES = ("learning_rate=1e-4,2.5e-4,1e-3",)
SWEPT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("ppo", "recurrent_ppo", "ippo", "mappo", "a2c", "a3c", "impala"), _ACTOR_CRITICS),
    **dict.fromkeys(("sac", "td3", "crossq"), _OFF_POLICY),
    **dict.fromkeys(("dqn", "qr_dqn", "c51", "vdn", "qmix"), _VALUES),
    "pqn": ("learning_rate=2.5e-4,5e-4,1e-3", "q_lambda=0.65,0.9"),
}


_TEAMS = ("mpe", "smax", "overcooked", "hanabi", "mabrax", "switch-riddle", "social-dilemma", "jaxnav")


def default_algorithm(family: str) -> str:
    """The one that is tried on a family where none is named: that of its own study, else PPO, or IPPO."""
    own = [algo for known, algo in STUDIES if known == family]
    return own[0] if own else "ippo" if family in _TEAMS else "ppo"


def study_of(family: str, algo: str) -> Study:
    """What is tried of an algorithm on a family: its own study, or the members and the usual values."""
    if (family, algo) in STUDIES:
        return STUDIES[family, algo]
    members = MEMBERS[family]
    on_the_host = any(name.startswith(_HOSTS) for name in (*members.choose_on, *members.confirm_on))
    return Study(
        members.choose_on,
        members.confirm_on,
        members.total_steps,
        shapes=("",),
        sweep=SWEPT[algo],
        together=not on_the_host,
    )
