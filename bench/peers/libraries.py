"""Pairs with peers that are libraries: brax's trainer, rejax, sbx, Stable-Baselines3, RLlib."""

from bench.peers.pairs import Pair


def brax(size: int, num_steps: int, steps: int, env: str = "inverted_pendulum") -> Pair:
    """brax's trainer, in one of its environments."""
    return Pair(
        peer="brax",
        task=f"PPO brax:{env}",
        size=size,
        flags=(
            *("--env", f"brax:{env}", "--hidden", "64", "64", "--num-steps", str(num_steps)),
            *("--num-epochs", "4", "--num-minibatches", "8", "--activation", "silu"),
        ),
        config={
            "env": env,
            "hidden": [64, 64],
            "steps": steps,
            "train": {
                "episode_length": 1000,
                "num_envs": size,
                "unroll_length": num_steps,
                "batch_size": size // 8,
                "num_minibatches": 8,
                "num_updates_per_batch": 4,
                "normalize_observations": True,
                "learning_rate": 1e-3,
                "entropy_cost": 0.0,
                "discounting": 0.99,
                "max_grad_norm": 0.5,
            },
        },
        steps=steps,
        at_least=1.5,
        equal=f"{num_steps} steps, 4 epochs, 8 minibatches, two towers of 64x64 SiLU, observations scaled",
        continues=True,
    )


def _rejax_on_policy(
    algo: str, env: str, size: int, flags: str, config: dict, steps: int, equal: str
) -> Pair:
    return Pair(
        peer="rejax",
        task=f"{algo} {env}",
        size=size,
        flags=("--algo", algo.lower(), "--env", env, *flags.split()),
        config={
            "algo": algo,
            "config": {
                "env": env,
                "num_envs": size,
                "total_timesteps": steps,
                "learning_rate": 2.5e-4,
                **config,
            },
        },
        steps=steps,
        at_least=2.0,
        equal=equal,
    )


def _stable_baselines3(
    peer: str,
    algo: str,
    env: str,
    size: int,
    flags: str,
    config: dict,
    hidden: list[int],
    steps: tuple[int, int],
    at_least: float,
    equal: str,
) -> Pair:
    """`steps` are those of a round: ours, and the peer's, which is slower."""
    return Pair(
        peer=peer,
        task=f"{algo} {env}",
        size=size,
        flags=("--algo", algo.lower(), "--env", env, *flags.split()),
        config={
            "library": peer.replace("-", "_"),
            "algo": algo,
            "env": env,
            "num_envs": size,
            "steps": steps[1],
            "hidden": hidden,
            "config": config,
        },
        steps=steps[0],
        at_least=at_least,
        equal=equal,
        driver="stable_baselines3",
        continues=True,
    )


_PPO = {"n_steps": 128, "batch_size": 2048, "n_epochs": 4, "learning_rate": 2.5e-4, "ent_coef": 0.01}
_PPO_EQUAL = "128 steps, 4 epochs, 4 minibatches, two towers of 64x64 tanh"
_SAC = "--num-steps 1 --batch-size 256 --updates-per-step 1 --hidden 256 256 --learning-starts 512"
_SAC_EQUAL = "a gradient step for each environment step, batches of 256, 256x256 ReLU"
_DQN = "--batch-size 128 --updates-per-step 0.125 --learning-starts 1024 --learning-rate 2.5e-4"
_DQN_EQUAL = "a gradient step for 8 environment steps, batches of 128, 64x64"
# Off-policy presets that would make the work another: n-step returns, normalised layers.
_DQN_PLAIN = f"{_DQN} --n-step 1 --layer-norm false --hidden 64 64 --buffer-size 10000"

PAIRS = (
    brax(64, 64, 65_536),
    brax(1024, 16, 131_072),
    _rejax_on_policy(
        "PPO",
        "CartPole-v1",
        64,
        "",
        {"num_steps": 128, "num_epochs": 4, "num_minibatches": 4, "agent_kwargs": {"activation": "tanh"}},
        507_904,
        _PPO_EQUAL,
    ),
    _rejax_on_policy(
        "PPO",
        "CartPole-v1",
        1024,
        "",
        {"num_steps": 128, "num_epochs": 4, "num_minibatches": 4, "agent_kwargs": {"activation": "tanh"}},
        524_288,
        _PPO_EQUAL,
    ),
    _rejax_on_policy(
        "PQN",
        "CartPole-v1",
        32,
        "--hidden 64 64",
        {
            "num_steps": 64,
            "num_epochs": 4,
            "num_minibatches": 16,
            "learning_rate": 1e-4,
            "max_grad_norm": 10.0,
        },
        204_800,
        "64 steps, 4 epochs, 16 minibatches, 64x64 ReLU with layer normalisation; Adam there, RAdam here",
    ),
    _rejax_on_policy(
        "DQN",
        "CartPole-v1",
        8,
        f"{_DQN_PLAIN} --double true",
        {"batch_size": 128, "num_epochs": 1, "fill_buffer": 1024, "buffer_size": 10_000},
        163_840,
        f"{_DQN_EQUAL}, double Q-learning, 8 environments",
    ),
    _rejax_on_policy(
        "SAC",
        "Pendulum-v1",
        4,
        f"{_SAC} --buffer-size 100000",
        {
            "batch_size": 256,
            "num_epochs": 4,
            "fill_buffer": 512,
            "buffer_size": 100_000,
            "hidden_layer_sizes": [256, 256],
        },
        2_560,
        f"{_SAC_EQUAL}, 4 environments",
    ),
    _stable_baselines3(
        "stable-baselines3", "PPO", "CartPole-v1", 64, "", _PPO, [64, 64], (507_904, 24_576), 10.0, _PPO_EQUAL
    ),
    _stable_baselines3(
        "sbx", "PPO", "CartPole-v1", 64, "", _PPO, [64, 64], (507_904, 24_576), 10.0, _PPO_EQUAL
    ),
    _stable_baselines3(
        "sbx",
        "SAC",
        "Pendulum-v1",
        4,
        f"{_SAC} --buffer-size 100000",
        {
            "train_freq": 1,
            "gradient_steps": 4,
            "batch_size": 256,
            "learning_starts": 512,
            "buffer_size": 100_000,
        },
        [256, 256],
        (2_048, 2_048),
        3.0,
        f"{_SAC_EQUAL}, 4 environments",
    ),
    _stable_baselines3(
        "sbx",
        "DQN",
        "CartPole-v1",
        8,
        _DQN_PLAIN,
        {
            "train_freq": 8,
            "gradient_steps": 8,
            "batch_size": 128,
            "learning_starts": 1024,
            "buffer_size": 10_000,
            "learning_rate": 2.5e-4,
        },
        [64, 64],
        (163_840, 16_384),
        3.0,
        f"{_DQN_EQUAL}, 8 environments",
    ),
    Pair(
        peer="rllib",
        task="PPO CartPole-v1",
        size=64,
        flags=("--env", "CartPole-v1"),
        config={
            "env": "CartPole-v1",
            "num_envs": 64,
            "num_steps": 128,
            "iterations": 1,
            "hidden": [64, 64],
            "config": {
                "num_epochs": 4,
                "minibatch_size": 2048,
                "lr": 2.5e-4,
                "entropy_coeff": 0.01,
                "vf_loss_coeff": 0.5,
                "clip_param": 0.2,
                "lambda_": 0.95,
                "gamma": 0.99,
            },
        },
        steps=507_904,
        at_least=25.0,
        equal=_PPO_EQUAL,
        continues=True,
    ),
)
