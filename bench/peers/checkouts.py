"""Pairs with peers that are scripts in a checkout: PureJaxRL, purejaxql, JaxMARL's baselines."""

from bench.peers.pairs import Pair

_PUREJAXRL = {
    "LR": 2.5e-4,
    "NUM_STEPS": 128,
    "UPDATE_EPOCHS": 4,
    "NUM_MINIBATCHES": 4,
    "GAMMA": 0.99,
    "GAE_LAMBDA": 0.95,
    "CLIP_EPS": 0.2,
    "ENT_COEF": 0.01,
    "VF_COEF": 0.5,
    "MAX_GRAD_NORM": 0.5,
    "ACTIVATION": "tanh",
    "ANNEAL_LR": True,
    "DEBUG": False,
}


def purejaxrl(env: str, size: int, steps: int, at_least: float) -> Pair:
    """PureJaxRL's PPO in one of gymnax's environments."""
    minatar = env.endswith("MinAtar")
    changed = {"LR": 5e-3, "NUM_MINIBATCHES": 8, "ACTIVATION": "relu"} if minatar else {}
    return Pair(
        peer="purejaxrl",
        task=f"PPO {env}",
        size=size,
        flags=("--env", env, *(("--hidden", "64", "64") if minatar else ())),
        config={
            "script": "ppo",
            "config": {
                **_PUREJAXRL,
                **changed,
                "ENV_NAME": env,
                "NUM_ENVS": size,
                "TOTAL_TIMESTEPS": steps,
            },
        },
        steps=steps,
        at_least=at_least,
        equal=f"128 steps, 4 epochs, {8 if minatar else 4} minibatches, two towers of 64x64, Adam, "
        f"{'flat observations, ReLU' if minatar else 'tanh'}; all other settings fdg's defaults",
    )


def _purejaxrl_continuous(
    env: str, name: str, size: int, num_steps: int, epochs: int, minibatches: int, steps: int
) -> Pair:
    return Pair(
        peer="purejaxrl",
        task=f"PPO {env}",
        size=size,
        flags=(
            *("--env", env, "--hidden", "256", "256", "--activation", "tanh"),
            *("--num-steps", str(num_steps), "--num-epochs", str(epochs)),
            *("--num-minibatches", str(minibatches)),
            *("--normalize-observation", "true", "--normalize-reward", "true"),
        ),
        config={
            "script": "ppo_continuous_action",
            "config": {
                **_PUREJAXRL,
                "LR": 3e-4,
                "ENT_COEF": 0.0,
                "ANNEAL_LR": False,
                "NORMALIZE_ENV": True,
                "ENV_NAME": name,
                "NUM_ENVS": size,
                "NUM_STEPS": num_steps,
                "UPDATE_EPOCHS": epochs,
                "NUM_MINIBATCHES": minibatches,
                "TOTAL_TIMESTEPS": steps,
            },
        },
        steps=steps,
        at_least=1.5,
        equal=f"{num_steps} steps, {epochs} epochs, {minibatches} minibatches, two towers of 256x256 tanh, "
        "observations and rewards normalised",
    )


def _purejaxql(env: str, script: str, flags: str, changed: dict, steps: int, equal: str) -> Pair:
    return Pair(
        peer="purejaxql",
        task=f"PQN {env}",
        size=changed["NUM_ENVS"],
        flags=("--algo", "pqn", "--env", env, *flags.split()),
        config={
            "script": script,
            "config": {
                "EPS_START": 1.0,
                "EPS_FINISH": 0.05,
                "EPS_DECAY": 0.1,
                "NORM_INPUT": False,
                "NORM_TYPE": "layer_norm",
                "MAX_GRAD_NORM": 10,
                "LR_LINEAR_DECAY": True,
                "GAMMA": 0.99,
                **changed,
                "ENV_NAME": env,
                "TOTAL_TIMESTEPS": steps,
                "TOTAL_TIMESTEPS_DECAY": steps,
            },
        },
        steps=steps,
        at_least=1.5,
        equal=equal,
    )


# config/alg/pqn_cartpole.yaml
_CARTPOLE = {
    "NUM_ENVS": 32,
    "NUM_STEPS": 64,
    "NUM_MINIBATCHES": 16,
    "NUM_EPOCHS": 4,
    "HIDDEN_SIZE": 256,
    "NUM_LAYERS": 2,
    "LR": 1e-4,
    "REW_SCALE": 0.1,
    "LAMBDA": 0.95,
    "EPS_FINISH": 0.2,
    "EPS_DECAY": 0.2,
}
# config/alg/pqn_minatar.yaml
_MINATAR = {
    "NUM_ENVS": 128,
    "NUM_STEPS": 32,
    "NUM_MINIBATCHES": 32,
    "NUM_EPOCHS": 2,
    "LR": 5e-4,
    "LAMBDA": 0.65,
}


def _jaxmarl(
    task: str, script: str, flags: str, changed: dict, steps: int, at_least: float, equal: str
) -> Pair:
    return Pair(
        peer="jaxmarl",
        task=task,
        size=16,
        flags=tuple(flags.split()),
        config={
            "script": script,
            "config": {
                "LR": 2.5e-4,
                "NUM_ENVS": 16,
                "NUM_STEPS": 128,
                "UPDATE_EPOCHS": 4,
                "NUM_MINIBATCHES": 4,
                "GAMMA": 0.99,
                "GAE_LAMBDA": 0.95,
                "CLIP_EPS": 0.2,
                "SCALE_CLIP_EPS": False,
                "ENT_COEF": 0.01,
                "VF_COEF": 0.5,
                "MAX_GRAD_NORM": 0.5,
                "ACTIVATION": "tanh",
                "ENV_NAME": "MPE_simple_spread_v3",
                "ENV_KWARGS": {},
                "ANNEAL_LR": True,
                "SEED": 0,
                **changed,
                "TOTAL_TIMESTEPS": steps,
            },
        },
        steps=steps,
        at_least=at_least,
        equal=equal,
    )


PAIRS = (
    purejaxrl("CartPole-v1", 4, 500_000, 1.3),
    purejaxrl("CartPole-v1", 64, 507_904, 2.0),
    purejaxrl("CartPole-v1", 256, 524_288, 3.0),
    purejaxrl("CartPole-v1", 1024, 524_288, 3.0),
    purejaxrl("CartPole-v1", 4096, 1_048_576, 3.0),
    purejaxrl("Breakout-MinAtar", 64, 327_680, 1.6),
    purejaxrl("Breakout-MinAtar", 1024, 393_216, 2.5),
    _purejaxrl_continuous("Pendulum-v1", "Pendulum-v1", 16, 64, 10, 8, 32_768),
    _purejaxrl_continuous("Pendulum-v1", "Pendulum-v1", 2048, 10, 4, 32, 122_880),
    _purejaxrl_continuous("brax:inverted_pendulum:positional", "inverted_pendulum", 64, 64, 4, 8, 65_536),
    _purejaxrl_continuous("brax:inverted_pendulum:positional", "inverted_pendulum", 2048, 10, 4, 32, 122_880),
    _purejaxql(
        "CartPole-v1",
        "pqn_gymnax",
        "--hidden 256 256",
        _CARTPOLE,
        327_680,
        "64 steps, 4 epochs, 16 minibatches, 256x256 ReLU, layer normalisation, RAdam: the peer's settings",
    ),
    _purejaxql(
        "Breakout-MinAtar",
        "pqn_minatar",
        "--num-steps 32 --num-epochs 2 --num-minibatches 32 --learning-rate 5e-4 --q-lambda 0.65"
        " --reward-scale 1 --epsilon-end 0.05 --exploration-fraction 0.1 --convolve true --hidden 128",
        _MINATAR,
        40_960,
        "32 steps, 2 epochs, 32 minibatches, 16 3x3 filters and 128 units, layer normalisation, RAdam: the "
        "peer's settings",
    ),
    _jaxmarl(
        "IPPO MPE_simple_spread_v3",
        "IPPO/ippo_ff_mpe",
        "--algo ippo --env MPE_simple_spread_v3 --activation tanh",
        {},
        163_840,
        2.0,
        "128 steps, 4 epochs, 4 minibatches, two towers of 64x64 tanh, one seed; the rest is each one's own",
    ),
    _jaxmarl(
        "MAPPO MPE_simple_spread_v3",
        "MAPPO/mappo_rnn_mpe",
        "--algo mappo --env MPE_simple_spread_v3",
        {"LR": 2e-3, "FC_DIM_SIZE": 128, "GRU_HIDDEN_DIM": 128},
        10_240,
        3.0,
        "128 steps, 4 epochs, 4 minibatches, 128 units before, in and after a GRU, one seed; the rest is "
        "each one's own",
    ),
)
