"""Every operation of every preset has a rule for a batch, and a class of work."""

import pytest

import algos
import envs
import fdg
from fdg import jaxprs
from fdg.batch.rules import RULES
from fdg.errors import FdgError
from fdg.jaxprs.classes import CLASSES, VIEWS

# Each algorithm with an environment of each family for which it has a preset, or in which its defaults run.
JOBS = {
    "ppo": """CartPole-v1 Acrobot-v1 Pendulum-v1 MountainCar-v0 MountainCarContinuous-v0 Breakout-MinAtar
        SpaceInvaders-MinAtar Catch-bsuite brax:reacher Craftax-Symbolic-v1 octax:brix jumanji:Snake-v1""",
    "recurrent_ppo": "CartPole-v1",
    "ippo": "MPE_simple_spread_v3 switch_riddle",
    "mappo": "MPE_simple_spread_v3 switch_riddle",
    "a2c": "CartPole-v1 Pendulum-v1 Breakout-MinAtar",
    "a3c": "CartPole-v1 Pendulum-v1 Breakout-MinAtar",
    "impala": "CartPole-v1 Pendulum-v1 Breakout-MinAtar",
    "dqn": "CartPole-v1 MountainCar-v0 Breakout-MinAtar",
    "pqn": "CartPole-v1 Acrobot-v1 Breakout-MinAtar SpaceInvaders-MinAtar",
    "sac": "Pendulum-v1 brax:reacher",
    "td3": "Pendulum-v1 brax:reacher",
    "qr_dqn": "CartPole-v1 MountainCar-v0 Breakout-MinAtar",
    "c51": "CartPole-v1 MountainCar-v0 Breakout-MinAtar",
    "crossq": "Pendulum-v1 brax:reacher",
    "fast_td3": "Pendulum-v1 brax:reacher",
    "redq": "Pendulum-v1 brax:reacher",
    "droq": "Pendulum-v1 brax:reacher",
    "tqc": "Pendulum-v1 brax:reacher",
    "vdn": "MPE_simple_spread_v3",
    "qmix": "MPE_simple_spread_v3",
    "sft": "text:sorting",
    "dpo": "text:sorting",
    "ppo_rlhf": "text:sorting text:addition",
    "grpo": "text:sorting text:addition text:countdown",
    "reward_model": "text:sorting",
}
CLASSIFIED = VIEWS.union(*CLASSES.values())
ALL = [(algorithm, environment) for algorithm in JOBS for environment in JOBS[algorithm].split()]


def operations(jaxpr, found=None, seen=None):
    """Equations without bodies, by primitive name."""
    found, seen = ({}, set()) if found is None else (found, seen)
    if id(jaxpr) not in seen:
        seen.add(id(jaxpr))
        for eqn in jaxpr.eqns:
            inner = jaxprs.bodies(eqn)
            if not inner:
                found.setdefault(eqn.primitive.name, eqn)
            for body in inner:
                operations(body.jaxpr, found, seen)
    return found


@pytest.mark.parametrize(("algorithm", "environment"), ALL)
def test_every_operation_of_a_preset_is_known(algorithm, environment):
    try:
        cls, env = algos.get(algorithm), envs.make(environment)
        graph = fdg.trace(cls(env=env, **cls.settings(env.name, env, {})))
    except FdgError as error:
        if "not installed" not in str(error):
            raise
        pytest.skip(str(error))
    found = operations(jaxprs.open_jaxpr(graph.jaxpr))
    without_inputs = {name for name, eqn in found.items() if not eqn.invars}  # `iota`: no batch to follow
    assert found.keys() - RULES.keys() - without_inputs - {"fragment_boundary"} == set()
    assert found.keys() - CLASSIFIED == set()
