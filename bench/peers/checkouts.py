"""The pairs with peers whose scripts are in a checkout: PureJaxRL, purejaxql, JaxMARL's baselines."""

from typing import Any

from bench.peers.pairs import Pair
from bench.peers.settings import PPO, PQN, PQN_CARTPOLE, PQN_MINATAR, settings


def _pair(
    peer: str,
    script: str,
    task: str,
    flags: str,
    config: dict[str, Any],
    steps: int,
    target_ratio: float,
    equal: str,
) -> Pair:
    """A pair with a peer's script; most arguments are fields of `Pair`.

    `config` has the script's settings, with the number of environments; `_pair` adds the number of steps.
    """
    config["TOTAL_TIMESTEPS"] = steps
    size, config = config["NUM_ENVS"], {"script": script, "config": config}
    return Pair(peer, task, size, flags, config, steps, target_ratio, equal)


def purejaxrl(env: str, size: int, steps: int, target_ratio: float) -> Pair:
    """PureJaxRL's PPO in one of gymnax's environments; `size` is the number of environments."""
    minatar = env.endswith("MinAtar")
    changes = "LR=5e-3 NUM_MINIBATCHES=8 ACTIVATION=relu" if minatar else ""
    return _pair(
        "purejaxrl",
        "ppo",
        f"PPO {env}",
        f"--env {env}{' --hidden 64 64' * minatar}",
        settings(PPO, changes, DEBUG=False, ENV_NAME=env, NUM_ENVS=size),
        steps,
        target_ratio,
        f"128 steps, 4 epochs, {8 if minatar else 4} minibatches, two towers of 64x64, Adam, "
        f"{'flat observations, ReLU' if minatar else 'tanh'}; all other settings fdg's defaults",
    )


def _continuous(
    env: str, name: str, size: int, num_steps: int, epochs: int, minibatches: int, steps: int
) -> Pair:
    """PureJaxRL's PPO for continuous actions; the peer calls the environment `name`.

    `size` is the number of environments, `num_steps` the steps of a rollout, `steps` the steps of a round.
    """
    return _pair(
        "purejaxrl",
        "ppo_continuous_action",
        f"PPO {env}",
        f"--env {env} --hidden 256 256 --activation tanh --num-steps {num_steps} --num-epochs {epochs}"
        f" --num-minibatches {minibatches} --normalize-observation true --normalize-reward true",
        settings(
            PPO,
            f"LR=3e-4 ENT_COEF=0.0 ANNEAL_LR=False DEBUG=False NORMALIZE_ENV=True ENV_NAME={name}",
            f"NUM_ENVS={size} NUM_STEPS={num_steps} UPDATE_EPOCHS={epochs} NUM_MINIBATCHES={minibatches}",
        ),
        steps,
        1.5,
        f"{num_steps} steps, {epochs} epochs, {minibatches} minibatches, two towers of 256x256 tanh, "
        "observations and rewards normalised",
    )


def _pqn(env: str, script: str, flags: str, changes: str, steps: int, equal: str) -> Pair:
    """purejaxql's PQN; `changes` has settings that are not in `PQN` or differ."""
    config = settings(PQN, changes, NORM_INPUT=False, ENV_NAME=env, TOTAL_TIMESTEPS_DECAY=steps)
    flags = f"--algo pqn --env {env} {flags}"
    return _pair(
        "purejaxql", script, f"PQN {env}", flags, config, steps, 1.5, f"{equal}: the peer's settings"
    )


def _jaxmarl(
    algo: str, script: str, flags: str, changes: str, steps: int, target_ratio: float, equal: str
) -> Pair:
    """A baseline of JaxMARL with 16 environments; `changes` has settings that are not in `PPO` or differ."""
    env = "MPE_simple_spread_v3"
    config = settings(PPO, changes, SCALE_CLIP_EPS=False, NUM_ENVS=16, ENV_NAME=env, ENV_KWARGS={}, SEED=0)
    flags, task = f"--algo {algo.lower()} --env {env}{flags}", f"{algo} {env}"
    equal = f"128 steps, 4 epochs, 4 minibatches, {equal}, one seed; the rest is each one's own"
    return _pair("jaxmarl", script, task, flags, config, steps, target_ratio, equal)


PAIRS = (
    purejaxrl("CartPole-v1", 4, 500_000, 1.3),
    purejaxrl("CartPole-v1", 64, 507_904, 2.0),
    purejaxrl("CartPole-v1", 256, 524_288, 3.0),
    purejaxrl("CartPole-v1", 1024, 524_288, 3.0),
    purejaxrl("CartPole-v1", 4096, 1_048_576, 3.0),
    purejaxrl("Breakout-MinAtar", 64, 327_680, 1.6),
    purejaxrl("Breakout-MinAtar", 1024, 393_216, 2.5),
    _continuous("Pendulum-v1", "Pendulum-v1", 16, 64, 10, 8, 32_768),
    _continuous("Pendulum-v1", "Pendulum-v1", 2048, 10, 4, 32, 122_880),
    _continuous("brax:inverted_pendulum:positional", "inverted_pendulum", 64, 64, 4, 8, 65_536),
    _continuous("brax:inverted_pendulum:positional", "inverted_pendulum", 2048, 10, 4, 32, 122_880),
    _pqn(
        "CartPole-v1",
        "pqn_gymnax",
        "--hidden 256 256",
        PQN_CARTPOLE,
        327_680,
        "64 steps, 4 epochs, 16 minibatches, 256x256 ReLU, layer normalisation, RAdam",
    ),
    _pqn(
        "Breakout-MinAtar",
        "pqn_minatar",
        "--num-steps 32 --num-epochs 2 --num-minibatches 32 --learning-rate 5e-4 --q-lambda 0.65"
        " --reward-scale 1 --epsilon-end 0.05 --exploration-fraction 0.1 --convolve true --hidden 128",
        PQN_MINATAR,
        40_960,
        "32 steps, 2 epochs, 32 minibatches, 16 3x3 filters and 128 units, layer normalisation, RAdam",
    ),
    _jaxmarl("IPPO", "IPPO/ippo_ff_mpe", " --activation tanh", "", 163_840, 2.0, "two towers of 64x64 tanh"),
    _jaxmarl(
        "MAPPO",
        "MAPPO/mappo_rnn_mpe",
        "",
        "LR=2e-3 FC_DIM_SIZE=128 GRU_HIDDEN_DIM=128",
        10_240,
        3.0,
        "128 units before, in and after a GRU",
    ),
)
