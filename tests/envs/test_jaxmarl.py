"""JaxMARL: the contract and equality with JaxMARL; names, shapes and spaces; errors."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs import from_jaxmarl, jaxmarl_brax
from envs.contract import random_actions
from fdg.errors import FdgError
from tests.envs.conformance import assert_conforms, assert_tracing_allocates_nothing
from tests.lazy_module import LazyModule

jaxmarl, baselines = LazyModule("jaxmarl"), LazyModule("jaxmarl.wrappers.baselines")

LIMIT = 7  # steps per episode: truncates three times within a rollout
SHORT = {"max_steps": LIMIT - 1}

# Kinds of actions and options that no default has.
VARIANTS = (
    ("MPE_simple_spread_v3", {"action_type": "Continuous", "num_agents": 2, "agent_identity": True}),
    ("MPE_simple_speaker_listener_v4", {"action_type": "Continuous"}),
    ("MPE_simple_world_comm_v3", {"action_type": "Discrete"}),
)
# These differ only in the number of agents, and take no arguments.
FACMAC = ("MPE_simple_facmac_3a_v1", "MPE_simple_facmac_6a_v1", "MPE_simple_facmac_9a_v1")


class JaxmarlStep:
    """JaxMARL's own step with auto-reset."""

    def __init__(self, name, **arguments):
        self.env = jaxmarl.make(name, **arguments)

    def reset(self, keys):
        with jax.numpy_rank_promotion("allow"):
            return jax.vmap(self.env.reset)(keys)[::-1]

    def step(self, keys, state, action):
        def step(key, state, action):
            actions = {}
            for i, agent in enumerate(self.env.agents):
                space = self.env.action_space(agent)
                actions[agent] = action[i] if hasattr(space, "n") else action[i][: space.shape[0]]
            return self.env.step(key, state, actions)

        with jax.numpy_rank_promotion("allow"):
            observation, state, reward, done, _ = jax.vmap(step)(keys, state, action)
        return jax.tree.map(strong, state), (observation, reward, done["__all__"])


def strong(x):
    return jax.lax.convert_element_type(x, x.dtype)


# Without world_comm, the slowest to compile: `VARIANTS` has it with discrete actions.
DEFAULTS = [name for name in from_jaxmarl.PARTICLES if name not in (*FACMAC, "MPE_simple_world_comm_v3")]
CASES = [(name, SHORT) for name in DEFAULTS] + [(name, {**SHORT, **variant}) for name, variant in VARIANTS]


@pytest.mark.parametrize(
    ("name", "overrides"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_matches_jaxmarl(name, overrides):
    env = envs.make(name, **overrides)
    arguments = {argument: value for argument, value in overrides.items() if argument != "agent_identity"}
    reference = JaxmarlStep(name, **arguments)
    rollout = assert_conforms(env, beside=reference)
    step = rollout.step
    assert not step.terminated.any() and step.truncated[LIMIT - 1 :: LIMIT].all()
    assert (step.episode_length[step.truncated] == LIMIT).all()

    observation, reward, done = rollout.other_results
    np.testing.assert_array_equal(step.truncated, done)
    seen, mask = envs.features_and_mask(step.observation)
    longest = max(theirs.shape[-1] for theirs in observation.values())
    has_index = seen.shape[-1] == longest + env.num_agents
    for i, agent in enumerate(reference.env.agents):
        theirs = observation[agent]
        np.testing.assert_allclose(seen[:, :, i, : theirs.shape[-1]], theirs, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(step.reward[:, :, i], reward[agent], rtol=1e-5, atol=1e-4)
        extra = seen[:, :, i, theirs.shape[-1] :].sum(-1)
        assert (extra == has_index).all(), "padded with zeros, then one-hot"
        if mask is not None:
            assert (mask[:, :, i].sum(-1) == reference.env.action_space(agent).n).all()
    numbers_of_actions = {getattr(reference.env.action_space(agent), "n", None) for agent in observation}
    assert (mask is not None) == (len(numbers_of_actions) > 1), (
        "a mask only if agents have different numbers of actions"
    )


def test_tracing_allocates_nothing():
    # Unique overrides, so that no other test has cached this environment.
    assert_tracing_allocates_nothing(lambda: envs.make("MPE_simple_push_v3", max_steps=9))


def test_missing_jaxmarl(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxmarl.environments.mpe", None)
    with pytest.raises(FdgError, match=r"need JaxMARL, .* is not installed: pip install 'fdg\[jaxmarl\]'"):
        from_jaxmarl._module.__wrapped__("mpe", "MPE_simple_v3")


# --- games and robots ---


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
