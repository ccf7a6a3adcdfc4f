"""The public classes of this package, and the names of its algorithms.

`option` imports modules that only some settings need, and `public` imports a class, on first use.
"""

import importlib
from collections.abc import Callable
from typing import Any

# The module of each public class.
MODULES = {
    "A2C": "algos.a2c",
    "A3C": "algos.a2c",
    "Bonus": "algos.interfaces",
    "AlphaZero": "algos.alphazero",
    "ReplayBuffer": "algos.buffers",
    "CrossQ": "algos.crossq",
    "C51": "algos.distributional",
    "QRDQN": "algos.distributional",
    "DQN": "algos.dqn",
    "Explorer": "algos.interfaces",
    "FastTD3": "algos.fast_td3",
    "IMPALA": "algos.impala",
    "IPPO": "algos.mappo",
    "MAPPO": "algos.mappo",
    "MuZero": "algos.muzero",
    "Network": "algos.values",
    "Normalizer": "algos.interfaces",
    "Transform": "algos.interfaces",
    "BC": "algos.offline.bc",
    "CQL": "algos.offline.cql",
    "IQL": "algos.offline.iql",
    "ReBRAC": "algos.offline.td3",
    "TD3BC": "algos.offline.td3",
    "PPO": "algos.ppo",
    "PQN": "algos.pqn",
    "QMIX": "algos.qmix",
    "RecurrentNetwork": "algos.values",
    "RecurrentPPO": "algos.recurrent_ppo",
    "REDQ": "algos.redq",
    "DroQ": "algos.redq",
    "DPO": "algos.rlhf.dpo",
    "GRPO": "algos.rlhf.group_relative",
    "PPORLHF": "algos.rlhf.ppo",
    "RewardModel": "algos.rlhf.reward_model",
    "SFT": "algos.rlhf.sft",
    "Actor": "algos.rollout",
    "SAC": "algos.sac",
    "SelfPlay": "algos.self_play",
    "TD3": "algos.td3",
    "TQC": "algos.redq",
    "VDN": "algos.value_decomposition",
}

# Algorithms that act in environments: the class of each name.
IN_ENVIRONMENTS = {
    "ppo": "PPO",
    "recurrent_ppo": "RecurrentPPO",
    "ippo": "IPPO",
    "mappo": "MAPPO",
    "a2c": "A2C",
    "a3c": "A3C",
    "impala": "IMPALA",
    "dqn": "DQN",
    "pqn": "PQN",
    "sac": "SAC",
    "td3": "TD3",
    "fast_td3": "FastTD3",
    "qr_dqn": "QRDQN",
    "c51": "C51",
    "crossq": "CrossQ",
    "redq": "REDQ",
    "droq": "DroQ",
    "tqc": "TQC",
    "vdn": "VDN",
    "qmix": "QMIX",
    "bc": "BC",
    "iql": "IQL",
    "td3_bc": "TD3BC",
    "rebrac": "ReBRAC",
    "cql": "CQL",
    "alphazero": "AlphaZero",
    "muzero": "MuZero",
}

# Algorithms that train language models on text tasks.
OF_TEXT = {"sft": "SFT", "dpo": "DPO", "ppo_rlhf": "PPORLHF", "grpo": "GRPO", "reward_model": "RewardModel"}

# Modules whose use depends on settings, by a short name; `option` imports them on first use.
OPTIONS = {
    "networks": "algos.networks",
    "layers": "algos.layers",
    "distributions": "algos.distributions",
    "optimizers": "algos.optimizers",
    "checks": "algos.checks",
    "rings": "algos.rings",
    "replay": "algos.replay",
    "buffers": "algos.buffers",
    "evaluation": "algos.evaluation",
    "memory": "algos.sequences",
    "kinds of memory": "algos.memories",
    "running": "algos.normalize",
    "rnd": "algos.rnd",
    "atoms": "algos.distributional",
    "model": "algos.rlhf.checkpoints",
    "packed rows": "algos.language.packing",
    "split parameters": "algos.language.sharding",
    "language network": "algos.rlhf.network",
    "language optimizer": "algos.rlhf.optimizer",
    "losses": "algos.rlhf.losses",
    "requirements": "algos.rlhf.requirements",
    "reward model": "algos.rlhf.reward_models",
    "speaker": "algos.rlhf.speaker",
    "stream": "algos.rlhf.streaming",
    "variants": "algos.rlhf.variants",
}


def option(name: str) -> Any:
    """Imports the module of one of `OPTIONS`."""
    return importlib.import_module(OPTIONS[name])


def public(name: str) -> Any:
    """Imports a public class of this package by its name.

    >>> public("PPO").__module__
    'algos.ppo'
    """
    return getattr(importlib.import_module(MODULES[name]), name)


def algorithms_where(condition: Callable[[Any], bool]) -> list[str]:
    """The names of those algorithms of `IN_ENVIRONMENTS` whose class meets a condition."""
    return [name for name, cls in IN_ENVIRONMENTS.items() if condition(public(cls))]
