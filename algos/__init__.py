"""Reinforcement-learning algorithms, one file each, as pure functions that know nothing of devices."""

from typing import TYPE_CHECKING, Any, Literal

from algos.registry import IN_ENVIRONMENTS, MODULES, OF_TEXT, algorithms_where, public
from envs import Environment, check_spec, user_code
from fdg import aliases
from fdg.arguments import checked, checked_names, quoted
from fdg.errors import FdgError, UnknownNameError, unknown_name
from fdg.public_names import explain_calls, no_attribute, submodule
from fdg.settings import moved
from fdg.settings.presets import own_preset

if TYPE_CHECKING:
    from algos.a2c import A2C as A2C
    from algos.a2c import A3C as A3C
    from algos.alphazero import AlphaZero as AlphaZero
    from algos.buffers import ReplayBuffer as ReplayBuffer
    from algos.crossq import CrossQ as CrossQ
    from algos.distributional import C51 as C51
    from algos.distributional import QRDQN as QRDQN
    from algos.dqn import DQN as DQN
    from algos.fast_td3 import FastTD3 as FastTD3
    from algos.impala import IMPALA as IMPALA
    from algos.interfaces import Bonus as Bonus
    from algos.interfaces import Explorer as Explorer
    from algos.interfaces import Normalizer as Normalizer
    from algos.interfaces import Transform as Transform
    from algos.mappo import IPPO as IPPO
    from algos.mappo import MAPPO as MAPPO
    from algos.muzero import MuZero as MuZero
    from algos.offline.bc import BC as BC
    from algos.offline.cql import CQL as CQL
    from algos.offline.iql import IQL as IQL
    from algos.offline.td3 import TD3BC as TD3BC
    from algos.offline.td3 import ReBRAC as ReBRAC
    from algos.ppo import PPO as PPO
    from algos.pqn import PQN as PQN
    from algos.qmix import QMIX as QMIX
    from algos.recurrent_ppo import RecurrentPPO as RecurrentPPO
    from algos.redq import REDQ as REDQ
    from algos.redq import TQC as TQC
    from algos.redq import DroQ as DroQ
    from algos.rlhf.dpo import DPO as DPO
    from algos.rlhf.group_relative import GRPO as GRPO
    from algos.rlhf.ppo import PPORLHF as PPORLHF
    from algos.rlhf.reward_model import RewardModel as RewardModel
    from algos.rlhf.sft import SFT as SFT
    from algos.rollout import Actor as Actor
    from algos.sac import SAC as SAC
    from algos.self_play import SelfPlay as SelfPlay
    from algos.td3 import TD3 as TD3
    from algos.value_decomposition import VDN as VDN
    from algos.values import Network as Network
    from algos.values import RecurrentNetwork as RecurrentNetwork

__all__ = [*sorted(MODULES), "able_in", "get", "make", "names"]

# Old names of modules, and the modules that have their contents now.
moved.keep_names(
    {
        "algos.a3c": "algos.a2c",
        "algos.critic_readings": "algos.distributional",
        "algos.exploration": "algos.dqn",
        "algos.hyperparameters": "fdg.settings.fields",
        "algos.language.sampling": "algos.language.generation",
        "algos.minibatches": "algos.optimizers",
        "algos.offline.rebrac": "algos.offline.td3",
        "algos.offline.td3_bc": "algos.offline.td3",
        "algos.q_learning": "algos.dqn",
        "algos.rlhf.advantages": "algos.rlhf.objective",
        "algos.rlhf.data": "algos.rlhf.speaker",
        "algos.tqc": "algos.redq",
    }
)


@checked
def names(of: Literal["environments", "text"] | None = None) -> tuple[str, ...]:
    """The names of all algorithms, or of one kind: those for environments, or those for language models.

    >>> names("environments")
    ('ppo', 'recurrent_ppo', 'ippo', 'mappo', 'a2c', 'a3c', 'impala', 'dqn', 'pqn', 'sac', 'td3', 'fast_td3',
    'qr_dqn', 'c51', 'crossq', 'redq', 'droq', 'tqc', 'vdn', 'qmix', 'bc', 'iql', 'td3_bc', 'rebrac', 'cql',
    'alphazero', 'muzero')
    >>> names("text")
    ('sft', 'dpo', 'ppo_rlhf', 'grpo', 'reward_model')
    """
    algorithms: dict[str | None, Any] = {
        "environments": IN_ENVIRONMENTS,
        "text": OF_TEXT,
        None: {**IN_ENVIRONMENTS, **OF_TEXT},
    }
    return tuple(algorithms[of])


def able_in(env: Environment) -> list[str]:
    """The names of the algorithms that can act in an environment.

    >>> import envs
    >>> able_in(envs.make("MPE_simple_spread_v3"))
    ['ippo', 'mappo', 'vdn', 'qmix']
    """
    return algorithms_where(lambda cls: cls.can_act_in(env))


def __getattr__(name: str) -> Any:
    """Imports a public class or module on first use."""
    if name in MODULES:
        value = globals()[name] = public(name)
    elif (value := submodule(__name__, name)) is None:
        hint = f"it is algos.{OF_TEXT[name]}" if name in OF_TEXT else aliases.variant(name)
        raise no_attribute(__name__, name, __all__, hint)
    explain_calls(__name__, IN_ENVIRONMENTS)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})


@checked_names
def get(name: str) -> Any:
    """The algorithm class with this name, in upper or lower case.

    Raises:
      UnknownNameError: no algorithm has this name; the message suggests the nearest one.
    """
    class_names = {**IN_ENVIRONMENTS, **OF_TEXT}
    name = name if isinstance(name, str) else quoted(name)
    class_name = class_names.get(name.lower())
    if class_name is None:
        if hint := aliases.variant(name):
            raise UnknownNameError(f"unknown algorithm '{name}': {hint}")
        raise unknown_name("algorithm", name, class_names, "algos.names()")
    return public(class_name)


@checked
def make(name: str | type, env: Environment, **hyperparameters: Any) -> Any:
    """Makes an algorithm with its preset for an environment.

    Args:
      name: one of `algos.names()`, a class, or `module:Class` for your own class.
      env: an environment.
      **hyperparameters: values that take precedence over those of the preset.

    Raises:
      FdgError: no algorithm has this name, `env` is not an environment, or a hyperparameter is unknown or
        wrong.

    >>> import envs
    >>> make("ppo", envs.make("Pendulum-v1"), num_envs=8).total_steps
    1000000
    """
    algorithm: Any = name
    if isinstance(name, str):
        algorithm = user_code.import_attribute("algorithm", name) if ":" in name else get(name)
    if not callable(getattr(algorithm, "iterate", None)):
        raise FdgError(
            f"make(name={quoted(name)}): it has no method iterate: give an algorithm, such as algos.PPO"
        )
    if isinstance(env, str | type) or not hasattr(env, "name"):
        check_spec(env)
    if hasattr(algorithm, "settings"):
        return algorithm(env=env, **algorithm.settings(env.name, env, hyperparameters))
    return algorithm(env=env, **{**own_preset(algorithm, env.name), **hyperparameters})
