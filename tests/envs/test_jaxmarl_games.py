"""JaxMARL's other environments: names, shapes and spaces; equality with JaxMARL for one; errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs import from_jaxmarl, jaxmarl_brax
from envs.contract import random_actions
from envs.quiet import relaxed_checks
from fdg.errors import FdgError
from tests.envs.conformance import assert_conforms
from tests.lazy_module import LazyModule

jaxmarl = LazyModule("jaxmarl")


def test_names_match_jaxmarl():
    ours = {*from_jaxmarl.KINDS, *jaxmarl_brax.BODIES}
    theirs = {name for name in jaxmarl.registered_envs if not name.startswith("JaxRobotarium")}
    assert theirs - ours == {"LearnedPolicyEnemySMAX"}, "it needs a policy, so only Python code can make it"
    assert not ours - theirs


@pytest.mark.parametrize(
    ("name", "overrides", "agents", "shape", "actions", "limit"),
    [
        ("HeuristicEnemySMAX", {"map": "3m"}, 3, (50 + 3,), 8, 100),
        ("overcooked", {"layout": "coord_ring"}, 2, (5, 5, 26), 6, 400),
        ("switch_riddle", {"num_agents": 4, "agent_identity": True}, 4, (2 + 4,), 3, None),
        ("coin_game", {"num_inner_steps": 3, "num_outer_steps": 4}, 2, (36,), 5, 12),
        ("hanabi", {}, 2, (658,), 21, None),
    ],
)
def test_shapes_match_spaces(name, overrides, agents, shape, actions, limit):
    env = envs.make(name, **overrides)
    assert env.num_agents == agents and env.max_episode_steps == limit
    assert env.observation_space.shape[1:] == shape[1:] and env.action_space == envs.Discrete(actions)
    assert name == "HeuristicEnemySMAX" or env.observation_space.shape == shape

    def first_step(key):
        keys = jax.random.split(key, 2)
        state, observation = env.reset(keys)
        return env.step(keys, state, random_actions(env, keys, observation))

    _, time_step = jax.eval_shape(first_step, jax.eval_shape(lambda: jax.random.key(0)))
    assert time_step.reward.shape == (2, agents) and time_step.terminated.shape == (2,)
    seen, mask = envs.features_and_mask(time_step.observation)
    assert seen.shape == (2, agents, *env.observation_space.shape)
    assert (mask is not None) == (name in ("HeuristicEnemySMAX", "hanabi"))


def test_switch_riddle_matches_jaxmarl():
    env = envs.make("switch_riddle", agent_identity=True)
    rollout = assert_conforms(env)
    step, theirs = rollout.step, jaxmarl.make("switch_riddle")
    assert step.terminated.any() and not step.truncated.any()
    np.testing.assert_array_equal(
        step.observation[..., 2:], np.broadcast_to(np.eye(3), (*step.reward.shape, 3))
    )

    keys = jax.random.split(jax.random.key(1), 3)
    with relaxed_checks():
        observation, state = theirs.reset(keys[0])
        step_key, _ = jax.random.split(jax.random.split(jax.random.key(2), (24, 3))[0, 0])
        actions = {agent: jnp.int32(rollout.action[0, 0, i]) for i, agent in enumerate(theirs.agents)}
        after, _, reward, _, _ = theirs.step_env(step_key, state, actions)
    for i, agent in enumerate(theirs.agents):
        np.testing.assert_array_equal(rollout.first_observation[0, i, :2], observation[agent])
        np.testing.assert_array_equal(step.final_observation[0, 0, i, :2], after[agent])
        assert step.reward[0, 0, i] == reward[agent]


def test_mabrax_agents_have_separate_joints():
    """Joints are divided among agents; each agent observes its own components."""
    env = envs.make("hopper_3x1", episode_length=5)
    assert (env.num_agents, env.max_episode_steps) == (3, 5)
    seen, moved = jaxmarl_brax._mappings("hopper_3x1")
    assert sorted(joint for mine in moved for joint in mine) == [0, 1, 2]
    numbers = jnp.arange(11.0) * 10
    rows = env.single._observe(numbers)
    for i, mine in enumerate(seen):
        assert rows[i, :3].tolist() == np.eye(3)[i].tolist()
        assert rows[i, 3 : 3 + len(mine)].tolist() == [10.0 * number for number in mine]


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("HeuristicEnemySMAX", {"map": "3n"}, "unknown map of HeuristicEnemySMAX '3n': did you mean '3m'"),
        ("overcooked", {"layout": "ring"}, "unknown layout of overcooked 'ring'"),
    ],
)
def test_unknown_map_or_layout_is_refused(name, overrides, message):
    with pytest.raises(FdgError, match=message):
        envs.make(name, **overrides)
