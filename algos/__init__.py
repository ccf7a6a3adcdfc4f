"""Algorithms: one file each, written once as pure functions that know nothing of devices."""

from typing import Any

from algos.dqn import DQN
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
    "DQN",
    "IPPO",
    "MAPPO",
    "PPO",
    "PQN",
    "SAC",
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
    "dqn": DQN,
    "pqn": PQN,
    "sac": SAC,
}


def names() -> tuple[str, ...]:
    """Names of all algorithms.

    >>> names()
    ('ppo', 'recurrent_ppo', 'ippo', 'mappo', 'dqn', 'pqn', 'sac')
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
    return algorithm(env=env, **{**algorithm.preset(env.name), **hyperparameters})
