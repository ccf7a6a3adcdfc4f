"""Algorithms: one file each, written once as pure functions that know nothing of devices."""

from typing import Any

from algos.a2c import A2C
from algos.a3c import A3C
from algos.acting import Actor
from algos.dqn import DQN
from algos.impala import IMPALA
from algos.ippo import IPPO
from algos.mappo import MAPPO
from algos.networks import Network
from algos.ppo import PPO
from algos.pqn import PQN
from algos.recurrent import RecurrentNetwork
from algos.recurrent_ppo import RecurrentPPO
from algos.sac import SAC
from envs import Environment
from fdg.errors import unknown_name

__all__ = [
    "A2C",
    "A3C",
    "DQN",
    "IMPALA",
    "IPPO",
    "MAPPO",
    "PPO",
    "PQN",
    "SAC",
    "Actor",
    "Network",
    "RecurrentNetwork",
    "RecurrentPPO",
    "get",
    "make",
    "names",
]

_ALGORITHMS = {
    "ppo": PPO,
    "recurrent_ppo": RecurrentPPO,
    "ippo": IPPO,
    "mappo": MAPPO,
    "a2c": A2C,
    "a3c": A3C,
    "impala": IMPALA,
    "dqn": DQN,
    "pqn": PQN,
    "sac": SAC,
}


def names() -> tuple[str, ...]:
    """Names of all algorithms.

    >>> names()
    ('ppo', 'recurrent_ppo', 'ippo', 'mappo', 'a2c', 'a3c', 'impala', 'dqn', 'pqn', 'sac')
    """
    return tuple(_ALGORITHMS)


def get(name: str) -> Any:
    """The algorithm class of a name, in any case.

    Raises:
      UnknownNameError: no algorithm has this name; says the nearest.
    """
    found = _ALGORITHMS.get(name.lower())
    if found is None:
        raise unknown_name("algorithm", name, _ALGORITHMS)
    return found


def make(name: str, env: Environment, **hyperparameters: Any) -> Any:
    """An algorithm with its preset for an environment, except for the hyperparameters given.

    >>> import envs
    >>> make("ppo", envs.make("Pendulum-v1"), num_envs=8).total_steps
    1000000
    """
    algorithm = get(name)
    return algorithm(env=env, **{**algorithm.preset(env.name, env), **hyperparameters})
