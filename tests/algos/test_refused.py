"""Invalid settings of algorithms: a one-line error with the value and what it must be."""

import dataclasses
import math
from typing import ClassVar

import pytest

import algos
import envs
from tests.algos.test_dqn import dqn
from tests.algos.test_pqn import pqn
from tests.algos.test_sac import Lasting
from tests.algos.test_vdn import vdn
from tests.refusing import refuses


@dataclasses.dataclass(frozen=True)
class Unbounded(Lasting):
    action_space: ClassVar[envs.Space] = envs.Box(-math.inf, 1.0, (1,))


def maker(cls, env, **given):
    """A function that makes the algorithm; `given` are its default fields."""
    return lambda **fields: cls(**{"env": envs.make(env), **given, **fields})


OBSERVE = "probe:policy_of_observation"
MAKE = {
    "a2c": maker(algos.A2C, "CartPole-v1"),
    "a3c": maker(algos.A3C, "CartPole-v1"),
    "c51": maker(algos.C51, OBSERVE, num_envs=1, batch_size=3, value_min=-1.0, value_max=1.0),
    "crossq": maker(algos.CrossQ, "probe:continuous"),
    "dqn": dqn,
    "droq": maker(algos.DroQ, "probe:continuous"),
    "fast_td3": maker(algos.FastTD3, "probe:continuous"),
    "hindsight": maker(algos.SAC, "probe:reach", replay="hindsight"),
    "impala": maker(algos.IMPALA, "CartPole-v1"),
    "ippo": maker(algos.IPPO, "probe:agents"),
    "pqn": pqn,
    "ppo": maker(algos.PPO, "CartPole-v1"),
    "qmix": maker(algos.QMIX, "probe:agents"),
    "qr_dqn": maker(algos.QRDQN, OBSERVE, num_envs=2, batch_size=2, quantiles=2),
    "recurrent_ppo": maker(algos.RecurrentPPO, "CartPole-v1"),
    "redq": maker(algos.REDQ, "probe:continuous"),
    "rnd": maker(algos.PPO, "CartPole-v1", rnd=True),
    "sac": maker(algos.SAC, "probe:continuous"),
    "td3": maker(algos.TD3, "probe:continuous"),
    "tqc": maker(algos.TQC, "probe:continuous"),
    "transformer": maker(algos.A2C, "CartPole-v1", memory="transformer"),
    "vdn": vdn,
}


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("a2c", {"num_steps": 0}, "A2C: num_steps=0: it must be above zero"),
        ("a2c", {"gae_lambda": 1.5}, "gae_lambda=1.5: it must be from 0 to 1"),
        ("a2c", {"max_grad_norm": 0.0}, "max_grad_norm=0.0: it must be above zero"),
        ("a2c", {"learning_rate": -1.0}, "learning_rate=-1.0"),
        ("a3c", {"num_workers": 0}, "A3C: num_workers=0: it must be above zero"),
        ("a3c", {"num_workers": 5}, "num_workers=5 does not divide num_envs=16: use 4 or 8"),
        ("a3c", {"gae_lambda": -1.0}, "gae_lambda=-1.0: it must be from 0 to 1"),
        ("a3c", {"memory": "gru"}, "memory=gru: a worker of A3C has no memory: use A2C"),
        ("c51", {"dueling": True}, "dueling=True"),
        ("c51", {"max_error": 1.0}, "max_error=1.0: distributions of returns have a loss of their own"),
        ("c51", {"atoms": 1}, "atoms=1: a grid has at least two"),
        ("c51", {"value_min": 1.0}, "value_min=1.0, value_max=1.0: the first must be below the second"),
        ("c51", {"env": envs.make("probe:multi_discrete")}, "C51: cannot act in the action space MultiDiscr"),
        ("crossq", {"policy_delay": 0}, "CrossQ: policy_delay=0: it must be above zero"),
        ("crossq", {"norm_decay": 1.5}, "norm_decay=1.5: it must be from 0 to 1"),
        ("crossq", {"first_moment_decay": 1.0}, "first_moment_decay=1: it must be below one"),
        ("crossq", {"renorm_after": -1}, "renorm_after=-1: it must be 0 or more"),
        ("crossq", {"critic_hidden": (8, 0)}, "critic_hidden=(8, 0): widths must be above zero"),
        ("crossq", {"target_rate": 0.1}, "target_rate"),
        ("dqn", {"updates_per_step": 0.1}, "updates_per_step=0.1 times num_envs * num_steps=32 makes 3.2 up"),
        ("dqn", {"batch_size": 6}, "batch_size=6 is no multiple of num_envs=4"),
        ("dqn", {"learning_starts": 20_000}, "learning_starts=20000: it must be from 0 to buffer_size=10000"),
        ("dqn", {"max_error": 0.0}, "max_error=0.0: it must be above zero, or None"),
        ("dqn", {"epsilon_end": 2.0}, "epsilon_end=2.0: it must be from 0 to 1"),
        ("dqn", {"n_step": 0}, "n_step=0: it must be above zero"),
        ("dqn", {"buffer_size": 0}, "buffer_size=0: it must be above zero"),
        ("dqn", {"buffer_size": 7, "n_step": 2},
         "buffer_size=7 holds no window of n_step=2 steps of num_envs=4"),
        ("dqn", {"priority_exponent": 1.5}, "priority_exponent=1.5: it must be from 0 to 1"),
        ("droq", {"dropout": 1.0}, "DroQ: dropout=1.0: it must be from 0 to below 1"),
        ("droq", {"torso": "simba"}, "dropout=0.01: only dense default critics have it: set dropout=0"),
        ("droq", {"critic_hidden": (8, 0)}, "critic_hidden=(8, 0): widths must be above zero"),
        ("droq", {"num_critics": 1}, "subset=2 is more than num_critics=1"),
        ("fast_td3", {"smallest_noise": 0.5}, "FastTD3: smallest_noise=0.5 is above exploration_noise=0.4"),
        ("fast_td3", {"smallest_noise": 0.0}, "smallest_noise=0.0: it must be above zero"),
        ("fast_td3", {"weight_decay": -1.0}, "weight_decay=-1.0: it must be 0 or more"),
        ("fast_td3", {"n_step": 0}, "n_step=0: it must be above zero"),
        ("fast_td3", {"critic_hidden": (0,)}, "critic_hidden=(0,): widths must be above zero"),
        ("impala", {"trace_lambda": 1.1}, "IMPALA: trace_lambda=1.1: it must be from 0 to 1"),
        ("impala", {"rho_clip": 0.0}, "rho_clip=0.0: it must be above zero"),
        ("impala", {"c_clip": 2.0}, "c_clip=2.0 is above rho_clip=1.0"),
        ("impala", {"num_envs": 0}, "num_envs=0"),
        ("ippo", {"env": envs.make("CartPole-v1")}, "is an environment of one agent: use A2C, A3C"),
        ("ippo", {"sequence_length": 16}, "sequence_length=16, burn_in=0: without a memory there are no"),
        ("ippo", {"num_minibatches": 3}, "num_minibatches=3 does not divide"),
        ("pqn", {"num_minibatches": 3}, "num_minibatches=3 does not divide num_envs * num_steps=10: use"),
        ("pqn", {"q_lambda": 1.5}, "q_lambda=1.5: it must be from 0 to 1"),
        ("pqn", {"reward_scale": 0.0}, "reward_scale=0.0: it must be above zero"),
        ("ppo", {"num_envs": 0}, "num_envs=0: it must be above zero"),
        ("ppo", {"num_minibatches": 3}, "num_minibatches=3 does not divide num_envs * num_steps=512"),
        ("ppo", {"num_minibatches": 3, "shuffle": "time"}, "does not divide num_steps=128"),
        ("ppo", {"discount": 1.5}, "discount=1.5: it must be from 0 to 1"),
        ("ppo", {"shuffle": "some"}, "shuffle='some'"),
        ("ppo", {"hidden": (64, 0)}, "hidden=(64, 0)"),
        ("qmix", {"mixer_size": 0}, "mixer_size=0"),
        ("qmix", {"hypernetwork": (0,)}, "hypernetwork="),
        ("qr_dqn", {"dueling": True}, "dueling=True"),
        ("qr_dqn", {"max_error": 1.0}, "max_error=1.0: distributions of returns have a loss of their own"),
        ("qr_dqn", {"huber_threshold": 0.0}, "huber_threshold=0.0: it must be above"),
        ("recurrent_ppo", {"memory_size": 0}, "memory_size=0: it must be above zero"),
        ("recurrent_ppo", {"sequence_length": 48}, "sequence_length=48 does not divide num_steps=128: use"),
        ("recurrent_ppo", {"burn_in": -1}, "burn_in=-1: it must be from 0 to the length of a sequence, 128"),
        ("recurrent_ppo", {"sequence_length": 16, "burn_in": 17}, "burn_in=17"),
        ("recurrent_ppo", {"num_minibatches": 3}, "num_minibatches=3 does not divide the number of sequ"),
        ("recurrent_ppo", {"num_minibatches": 2, "shuffle": "time"}, "divide num_steps / sequence_length=1"),
        ("recurrent_ppo", {"env": envs.make("probe:agents")}, "of 2 agents: use IPPO, MAPPO, QMIX or VDN"),
        ("redq", {"subset": 11}, "REDQ: subset=11 is more than num_critics=10: choose at most as many"),
        ("redq", {"subset": 0}, "subset=0: it must be above zero"),
        ("redq", {"num_critics": 0}, "num_critics=0: it must be above zero"),
        ("redq", {"policy_delay": 0}, "policy_delay=0: it must be above zero"),
        ("redq", {"target_rate": 1.5}, "target_rate=1.5: it must be from 0 to 1"),
        ("rnd", {"rnd_features": 0}, "rnd_features=0: it must be above zero"),
        ("rnd", {"rnd_share": 1.5}, "rnd_share=1.5: it must be from 0 to 1"),
        ("rnd", {"intrinsic_discount": -0.5}, "intrinsic_discount=-0.5: it must be from 0 to 1"),
        ("sac", {"env": envs.make("CartPole-v1")}, "cannot act in the action space Discrete(n=2)"),
        ("sac", {"env": envs.vectorize(Unbounded())}, "shape=(1,), dtype='float32'): give it finite bounds"),
        ("sac", {"updates_per_step": 0.3}, "updates_per_step=0.3 times num_envs * num_steps=4 makes 1.2 upd"),
        ("sac", {"updates_per_step": 0.0}, "updates_per_step=0.0: it must be above zero"),
        ("sac", {"target_rate": 1.5}, "target_rate=1.5: it must be from 0 to 1"),
        ("sac", {"initial_temperature": 0.0}, "initial_temperature=0.0: it must be above zero"),
        ("sac", {"batch_size": 250}, "num_envs=4 does not divide batch_size=250"),
        ("sac", {"batch_size": 0}, "batch_size=0: it must be above zero"),
        ("sac", {"memory": "gru", "num_steps": 4, "burn_in": 8, "learning_starts": 47},
         "=47 is before there is a window of 12 steps of each environment: make it at least 48"),
        ("sac", {"buffer_size": 2}, "buffer_size=2"),
        ("hindsight", {"rnd": True}, "replay=hindsight and a bonus (or rnd=True)"),
        ("td3", {"policy_delay": 0}, "policy_delay=0: it must be above zero"),
        ("td3", {"target_noise": -0.1}, "target_noise=-0.1: it must be 0 or more"),
        ("td3", {"batch_size": 3}, "num_envs=4 does not divide batch_size=3"),
        ("td3", {"atoms": 1}, "atoms=1: a grid has at least two"),
        ("td3", {"atoms": 3, "value_min": 1.0, "value_max": 1.0}, "value_min=1.0, value_max=1.0"),
        ("tqc", {"dropped_quantiles": 25}, "dropped_quantiles=25: it is from 0 to below quantiles=25"),
        ("tqc", {"dropped_quantiles": -1}, "dropped_quantiles=-1: it is from 0 to below quantiles=25"),
        ("tqc", {"huber_threshold": 0.0}, "huber_threshold=0.0: it must be above zero"),
        ("transformer", {"memory_size": 6}, "memory_heads=4 does not divide memory_size=6: use a divisor"),
        ("transformer", {"memory_heads": 3}, "memory_heads=3 does not divide memory_size=128"),
        ("transformer", {"memory_window": 1}, "a transformer has a window of at least two steps"),
        ("vdn", {"sequence_length": 2}, "sequence_length=2 does not divide num_steps=3"),
        ("vdn", {"q_lambda": 2.0}, "q_lambda=2.0: it must be from 0 to 1"),
        ("vdn", {"num_updates": 0}, "num_updates=0: it must be above zero"),
        ("vdn", {"buffer_size": 2}, "buffer_size=2 holds no window of sequence_length=3 steps of num_envs=1"),
        ("vdn", {"memory": "gruu"}, "memory"),
        ("vdn", {"env": envs.make("CartPole-v1")}, "is an environment of one agent: use A2C, "),
        ("vdn", {"env": envs.make("probe:agents", continuous=True)}, "cannot act in the action space Box"),
        ("dqn", {"env": envs.make("Pendulum-v1")}, "DQN: cannot act in the action space Box"),
    ],
)  # fmt: skip
def test_invalid_settings(name, fields, words):
    with refuses(words):
        MAKE[name](**fields)
