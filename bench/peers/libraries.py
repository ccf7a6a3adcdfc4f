"""Compares fdg with libraries: brax, rejax, sbx, Stable-Baselines3, RLlib, Sample Factory; a `Pair` each."""

from typing import Any

from bench.peers.pairs import Pair
from bench.peers.settings import settings


def brax(size: int, num_steps: int, steps: int, env: str = "inverted_pendulum") -> Pair:
    """brax's PPO trainer in one of its environments; `size` is the number of environments."""
    train = settings(
        "episode_length=1000 num_minibatches=8 num_updates_per_batch=4 normalize_observations=True"
        " learning_rate=1e-3 entropy_cost=0.0 discounting=0.99 max_grad_norm=0.5",
        num_envs=size,
        unroll_length=num_steps,
        batch_size=size // 8,
    )
    return Pair(
        peer="brax",
        task=f"PPO brax:{env}",
        size=size,
        flags=f"--env brax:{env} --hidden 64 64 --num-steps {num_steps} --num-epochs 4 --num-minibatches 8"
        " --activation silu",
        config={"env": env, "hidden": [64, 64], "steps": steps, "train": train},
        steps=steps,
        target_ratio=1.5,
        equal=f"{num_steps} steps, 4 epochs, 8 minibatches, two towers of 64x64 SiLU, observations scaled",
        keeps_state=True,
    )


def _rejax(
    algo: str, env: str, size: int, flags: str, config: str, steps: int, equal: str, **further: Any
) -> Pair:
    """A pair with rejax; `further` has settings that are not numbers."""
    further |= {"env": env, "num_envs": size, "total_timesteps": steps}
    driver_config = {"algo": algo, "config": settings("learning_rate=2.5e-4", config, **further)}
    flags = f"--algo {algo.lower()} --env {env} {flags}"
    return Pair("rejax", f"{algo} {env}", size, flags, driver_config, steps, target_ratio=2.0, equal=equal)


def _baselines(
    peer: str, algo: str, env: str, size: int, flags: str, config: str, width: int, steps: tuple[int, int],
    target_ratio: float, equal: str,
) -> Pair:  # fmt: skip
    """A pair with Stable-Baselines3 or sbx; `steps`: per round of fdg, and per round of the slower peer."""
    driver_config = {
        "library": peer.replace("-", "_"),
        "algo": algo,
        "env": env,
        "num_envs": size,
        "steps": steps[1],
        "hidden": [width, width],
        "config": settings(config),
    }
    flags = f"--algo {algo.lower()} --env {env} {flags}"
    return Pair(
        peer=peer,
        task=f"{algo} {env}",
        size=size,
        flags=flags,
        config=driver_config,
        steps=steps[0],
        target_ratio=target_ratio,
        equal=equal,
        driver="stable_baselines3",  # runs sbx, too
        keeps_state=True,
    )


_PPO_REJAX = "num_steps=128 num_epochs=4 num_minibatches=4"
_PPO = "n_steps=128 batch_size=2048 n_epochs=4 learning_rate=2.5e-4 ent_coef=0.01"
_PPO_EQUAL = "128 steps, 4 epochs, 4 minibatches, two towers of 64x64 tanh"
_SAC = (
    "--num-steps 1 --batch-size 256 --updates-per-step 1 --hidden 256 256 --learning-starts 512"
    " --buffer-size 100000"
)
_SAC_EQUAL = "a gradient step for each environment step, batches of 256, 256x256 ReLU, 4 environments"
# Some flags undo settings of presets that change the work: n-step returns, normalised layers.
_DQN = (
    "--batch-size 128 --updates-per-step 0.125 --learning-starts 1024 --learning-rate 2.5e-4 --n-step 1"
    " --layer-norm false --hidden 64 64 --buffer-size 10000"
)
_DQN_EQUAL = "a gradient step for 8 environment steps, batches of 128, 64x64"
_RLLIB = {
    "algo": "PPO",
    "env": "CartPole-v1",
    "options": {},
    "num_envs": 64,
    "num_steps": 128,
    "workers": 0,
    "steps": 8_192,
    "hidden": [64, 64],
    "config": settings(
        "num_epochs=4 minibatch_size=2048 lr=2.5e-4 entropy_coeff=0.01 vf_loss_coeff=0.5 clip_param=0.2"
        " lambda_=0.95 gamma=0.99"
    ),
}
_TANH = {"activation": "tanh"}


def _asynchronous_pairs(
    peer: str, algo: str, our_flags: str, equal: str, config: dict[str, Any], target_ratio: float
) -> tuple[Pair, ...]:
    """Pairs with a peer whose actors and learner overlap: CartPole, and CartPole with steps that sleep.

    fdg has two processes that act, too. If steps do not sleep, acting and learning do not overlap.
    """
    flags = (
        f"{our_flags} --preset none --num-steps 32 --hidden 64 64 --activation tanh --optimizer adam"
        " --learning-rate 1e-3 --anneal-learning-rate false --entropy-coefficient 0.01 --max-grad-norm 40"
    )
    synchronous = " --env-workers 2 --policy gpu_only --devices 1"
    overlapping = " --env-workers 2 --policy single_learner_coarse --staleness 1 --devices 2"
    equal = (
        f"2 processes of 8 environments, 32 steps, one pass over batches of 512, {equal}, 64x64 tanh, Adam"
    )
    return tuple(
        Pair(
            peer=peer,
            task=f"{algo} {env.rpartition(':')[2]}",
            size=16,
            flags=f"--env gymnasium:{env}{query} {flags}{placement}",
            config={"algo": algo, "env": env, "options": options, "num_envs": 16, "steps": steps, **config},
            steps=steps,
            target_ratio=target_ratio,
            equal=equal,
            driver=peer.replace("-", "_"),
            keeps_state=True,
        )
        for env, query, options, steps, placement in (
            ("CartPole-v1", "?acts=True", {}, 20_480, synchronous),
            (
                "bench.peers.sleeping:Sleeping-v0",
                "?milliseconds=1&acts=True",
                {"milliseconds": 1},
                10_240,
                overlapping,
            ),
        )
    )


# PPO's loss, because Sample Factory's V-trace fails ('AttrDict' object has no attribute 'advantages').
_SAMPLE_FACTORY = (
    "--algo=APPO --device=cpu --num_workers=2 --num_envs_per_worker=8 --worker_num_splits=2 --rollout=32"
    " --batch_size=512 --num_batches_per_epoch=1 --num_epochs=1 --with_vtrace=False --ppo_clip_ratio=0.2"
    " --use_rnn=False --encoder_mlp_layers 64 64 --nonlinearity=tanh --actor_critic_share_weights=False"
    " --normalize_input=False --normalize_returns=False --learning_rate=1e-3 --max_grad_norm=40"
    " --exploration_loss_coeff=0.01"
)


def _rllib(algo: str, **further: Any) -> tuple[Pair, ...]:
    config = settings("lr=1e-3 entropy_coeff=0.01 vf_loss_coeff=0.5 grad_clip=40.0 gamma=0.99", **further)
    config = {"num_steps": 32, "workers": 2, "hidden": [64, 64], "config": config}
    return _asynchronous_pairs("rllib", algo, "--algo impala", "V-trace", config, target_ratio=4.0)


_PPO_BASELINES = (
    _baselines(peer, "PPO", "CartPole-v1", 64, "", _PPO, 64, (507_904, 24_576), target_ratio=10.0,
               equal=_PPO_EQUAL) for peer in ("stable-baselines3", "sbx")
)  # fmt: skip
_RLLIB_PPO = Pair("rllib", "PPO CartPole-v1", 64, "--env CartPole-v1", _RLLIB, 507_904, target_ratio=25.0,
                  equal=_PPO_EQUAL, keeps_state=True)  # fmt: skip
PAIRS = (
    brax(64, 64, 65_536),
    brax(1024, 16, 131_072),
    _rejax("PPO", "CartPole-v1", 64, "", _PPO_REJAX, 507_904, _PPO_EQUAL, agent_kwargs=_TANH),
    _rejax("PPO", "CartPole-v1", 1024, "", _PPO_REJAX, 524_288, _PPO_EQUAL, agent_kwargs=_TANH),
    _rejax(
        "PQN",
        "CartPole-v1",
        32,
        "--hidden 64 64",
        "num_steps=64 num_epochs=4 num_minibatches=16 learning_rate=1e-4 max_grad_norm=10.0",
        204_800,
        "64 steps, 4 epochs, 16 minibatches, 64x64 ReLU with layer normalisation; Adam there, RAdam here",
    ),
    _rejax(
        "DQN",
        "CartPole-v1",
        8,
        f"{_DQN} --double true",
        "batch_size=128 num_epochs=1 fill_buffer=1024 buffer_size=10000",
        163_840,
        f"{_DQN_EQUAL}, double Q-learning, 8 environments",
    ),
    _rejax(
        "SAC",
        "Pendulum-v1",
        4,
        _SAC,
        "batch_size=256 num_epochs=4 fill_buffer=512 buffer_size=100000",
        2_560,
        _SAC_EQUAL,
        hidden_layer_sizes=[256, 256],
    ),
    *_PPO_BASELINES,
    _baselines(
        "sbx",
        "SAC",
        "Pendulum-v1",
        4,
        _SAC,
        "train_freq=1 gradient_steps=4 batch_size=256 learning_starts=512 buffer_size=100000",
        256,
        (2_048, 2_048),
        target_ratio=3.0,
        equal=_SAC_EQUAL,
    ),
    _baselines(
        "sbx",
        "DQN",
        "CartPole-v1",
        8,
        _DQN,
        "train_freq=8 gradient_steps=8 batch_size=128 learning_starts=1024 buffer_size=10000"
        " learning_rate=2.5e-4",
        64,
        (163_840, 16_384),
        target_ratio=3.0,
        equal=f"{_DQN_EQUAL}, 8 environments",
    ),
    *_asynchronous_pairs(
        "sample-factory",
        "APPO",
        "--algo ppo --num-epochs 1 --num-minibatches 1",
        "clipped ratios, GAE",
        {"flags": _SAMPLE_FACTORY.split()},
        target_ratio=1.2,
    ),
    *_rllib("APPO", use_circular_buffer=False),
    *_rllib("IMPALA"),
    _RLLIB_PPO,
)
