"""What `python -m tools.presets` tries: candidates for each family, and environments to try them on.

Families that were looked at closely have candidates of their own. For the others there are the values that
an algorithm is swept over: any algorithm on any family is a study.
"""

import dataclasses

_HOSTS = ("envpool:", "gymnasium:")


@dataclasses.dataclass(frozen=True)
class Tried:
    """Candidates: flags of those that make other programs, and values of floats that are swept in each."""

    shapes: tuple[str, ...]
    sweep: tuple[str, ...]


STUDIES: dict[tuple[str, str], Tried] = {
    ("classic-control", "ppo"): Tried(
        (
            "--num-envs 16 --num-steps 128 --num-epochs 10 --num-minibatches 32 --normalize-observation"
            " --normalize-reward",
            "--num-envs 16 --num-steps 256 --num-epochs 4 --num-minibatches 64 --normalize-observation",
        ),
        ("learning_rate=3e-4,1e-3,3e-3", "entropy_coefficient=0,0.01", "gae_lambda=0.95,0.98"),
    ),
    ("sparse-control", "ppo"): Tried(
        (
            "--num-envs 16 --num-steps 16 --normalize-observation --no-clip-value --no-anneal-learning-rate",
            "--num-envs 16 --num-steps 128 --normalize-observation --no-clip-value",
        ),
        ("learning_rate=1e-4,3e-4,1e-3", "entropy_coefficient=0,0.01", "gae_lambda=0.95,0.98"),
    ),
    ("sparse-continuous-control", "ppo"): Tried(
        ("--num-envs 16 --num-steps 128 --num-epochs 10 --num-minibatches 32",),
        ("learning_rate=1e-4,3e-4", "initial_log_std=0,0.5,1", "discount=0.99,0.999"),
    ),
    ("minatar", "ppo"): Tried(
        ("", "--hidden 256 256", "--num-envs 128"),
        ("learning_rate=1e-3,2.5e-3,5e-3", "entropy_coefficient=0.01,0.03"),
    ),
    ("minatar", "pqn"): Tried(
        ("", "--hidden 128 128", "--hidden 512 512"), ("learning_rate=2.5e-4,5e-4,1e-3", "q_lambda=0.65,0.9")
    ),
    ("mujoco", "ppo"): Tried(
        (
            "",
            "--initial-log-std 0",
            "--initial-log-std -2",
            "--activation relu --hidden 256 256 --initial-log-std -2",
        ),
        (),
    ),
    ("mpe", "ippo"): Tried(
        ("", "--num-envs 32"), ("learning_rate=5e-4,1e-3,2e-3", "entropy_coefficient=0.003,0.01")
    ),
}


@dataclasses.dataclass(frozen=True)
class Members:
    """Of a family: those that settings are chosen on, those that confirm them, and steps of each agent."""

    choose_on: tuple[str, ...]
    confirm_on: tuple[str, ...]
    total_steps: int


@dataclasses.dataclass(frozen=True)
class Study(Tried, Members):
    """What is tried for a family, and where."""


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
    "codesign-sequence": Members(
        ("codesign:w1?specs=tight&order=sequence",), ("codesign:w2?specs=tight&order=sequence",), 100_000
    ),
    "games": Members(("game:connect_four?rows=5&columns=4",), ("game:hex",), 1_000_000),
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
    **dict.fromkeys(("sac", "td3", "fast_td3", "crossq", "redq", "droq", "tqc"), _OFF_POLICY),
    **dict.fromkeys(("bc", "iql", "td3_bc", "rebrac", "cql"), _OFF_POLICY),
    **dict.fromkeys(("dqn", "qr_dqn", "c51", "vdn", "qmix"), _VALUES),
    "pqn": ("learning_rate=2.5e-4,5e-4,1e-3", "q_lambda=0.65,0.9"),
    "alphazero": ("learning_rate=1e-3,3e-3", "num_simulations=16,32"),
}


_TEAMS = ("mpe", "smax", "overcooked", "hanabi", "mabrax", "switch-riddle", "social-dilemma", "jaxnav")


def default_algorithm(family: str) -> str:
    """The one that is tried on a family where none is named: that of its own study, else PPO, or IPPO."""
    own = [algo for known, algo in STUDIES if known == family]
    return own[0] if own else "ippo" if family in _TEAMS else "ppo"


def study_of(family: str, algo: str) -> Study:
    """What is tried of an algorithm on a family: candidates of their own, or the usual values."""
    tried = STUDIES.get((family, algo), Tried(("",), SWEPT[algo]))
    return Study(**vars(MEMBERS[family]), **vars(tried))


def is_together(env: str) -> bool:
    """Whether all seeds of an environment are one program: not of those on the host."""
    return not env.startswith(_HOSTS)
