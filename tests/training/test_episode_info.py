"""Episode info of environments (`info=`), in metrics and evaluations."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
from envs import host
from fdg.errors import FdgError

NAME = "gymnasium:tests.training.gymnasium_envs:Succeeds-v0"


@dataclasses.dataclass(frozen=True)
class Walk:
    """Episodes of three steps; `is_success` if the action is 1."""

    name: ClassVar[str] = "walk"
    observation_space: ClassVar[envs.Box] = envs.Box(0.0, 1.0, (1,))
    action_space: ClassVar[envs.Discrete] = envs.Discrete(2)
    max_episode_steps: ClassVar[int] = 3

    def reset(self, key):
        return jnp.int32(0), jnp.zeros(1)

    def step(self, key, state, action):
        return state + 1, jnp.zeros(1), action, False, False, {"is_success": action == 1, "at": state}


def test_info_of_the_last_step():
    env = envs.vectorize(Walk(), info=("is_success",))
    assert envs.check(env, steps=8)
    keys = jax.random.split(jax.random.key(0), 2)
    (state, _), step_of = jax.jit(env.reset)(keys), jax.jit(env.step)
    for t, action in enumerate(([1, 1], [1, 0], [0, 1])):
        state, step = step_of(keys, state, jnp.array(action))
        assert step.episode_info["is_success"].tolist() == ([0, 1] if t == 2 else [0, 0])
    algorithm = algos.A2C(env=env, num_envs=2, num_steps=3, hidden=(4,))
    run = fdg.Run(algorithm, jax.jit(algorithm.init)(jax.random.key(0)), 0)
    evaluation = run.evaluate(4)
    assert evaluation.infos["is_success"].shape == (1, 4)
    last = evaluation.reported["is_success"]
    assert last == float(run.policy(np.zeros(1))) and ", is_success " in str(evaluation)
    state, metrics = jax.jit(algorithm.iterate)(run.state)
    assert 0 <= float(metrics["episode_is_success"]) <= 1


def test_missing_info_is_named():
    env = envs.vectorize(Walk(), info=("is_succes",))
    with pytest.raises(FdgError, match=r"info asks for 'is_succes', but .* step has only is_success"):
        envs.check(env)
    keys = jax.random.split(jax.random.key(0), 1)
    env = envs.make(NAME, info="is_succes", workers=1)
    with pytest.raises(Exception, match=r"no 'is_succes' in info at the end of an episode: .* 'time'"):
        state, _ = env.reset(keys)
        for _ in range(3):
            state, step = env.step(keys, state, jnp.zeros(1, jnp.int32))
            jax.block_until_ready(step)
    host.close()
