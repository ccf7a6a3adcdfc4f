"""What every environment must keep, checked on random steps.

`test_environment.py` shows that it fails broken environments.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs import TimeStep, features_and_mask, num_agents

STEPS = 24
NUM_ENVS = 3


class Rollout(NamedTuple):
    """Random steps of a batch, NumPy arrays."""

    first_observation: np.ndarray  # [B, ...]
    action: np.ndarray  # [T, B, ...]
    step: TimeStep  # [T, B, ...]
    beside: Any  # [T, B, ...] what the environment beside it gave for the same keys and actions


# The programs run for milliseconds and compile for seconds: spend less on optimizing them.
COMPILE_FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def random_actions(env: Any, keys: jax.Array, observation: Any) -> jax.Array:
    """An action for every environment (and agent), of those that are allowed: `[B, (A,) *action]`."""
    if num_agents(env) is not None:
        keys = jax.vmap(lambda key: jax.random.split(key, env.num_agents))(keys)
    draw = env.action_space.sample
    for _ in range(keys.ndim):
        draw = jax.vmap(draw)
    action = draw(keys)
    _, mask = features_and_mask(observation)
    if mask is None:
        return action
    allowed = jnp.take_along_axis(mask, action[..., None], -1)[..., 0]
    return jnp.where(allowed, action, jnp.argmax(mask, -1)).astype(action.dtype)


def random_rollouts(env: Any, beside: Any = None) -> tuple[Rollout, Rollout]:
    """A rollout, and one with the same keys handed to the environments in another order (`[::-1]`).

    `beside` is another environment for the same keys and actions; only its `step` may give what it likes. In
    one program with `env`, because compiling is what takes the time, and what the two share compiles once.
    """
    types = {}

    def program(reset_keys, step_keys, action_keys):
        state, observation = env.reset(reset_keys)
        types["reset"] = jax.tree.map(jax.typeof, state)
        beside_state = beside.reset(reset_keys)[0] if beside else None

        def body(states, keys):
            state, beside_state, observation = states
            action = random_actions(env, keys[1], observation)
            state, step = env.step(keys[0], state, action)
            types["step"] = jax.tree.map(jax.typeof, state)
            beside_state, beside_step = beside.step(keys[0], beside_state, action) if beside else (None, None)
            return (state, beside_state, step.observation), (action, step, beside_step)

        _, steps = jax.lax.scan(body, (state, beside_state, observation), (step_keys, action_keys))
        return observation, *steps

    program = jax.jit(program, compiler_options=COMPILE_FAST)
    reset_keys = jax.random.split(jax.random.key(1), NUM_ENVS)
    step_keys = jax.random.split(jax.random.key(2), (STEPS, NUM_ENVS))
    action_keys = jax.random.split(jax.random.key(3), (STEPS, NUM_ENVS))
    forward = program(reset_keys, step_keys, action_keys)
    backward = program(reset_keys[::-1], step_keys[:, ::-1], action_keys[:, ::-1])
    assert types["reset"] == types["step"], "step changes a shape, dtype or weak type of the state"
    return Rollout(*jax.tree.map(np.asarray, forward)), Rollout(*jax.tree.map(np.asarray, backward))


def assert_tracing_allocates_nothing(make: Callable[[], Any]) -> None:
    """Assert that neither making an environment nor tracing its steps leaves an array behind."""

    def first_step(key):
        env = make()
        keys = jax.random.split(key, NUM_ENVS)
        state, observation = env.reset(keys)
        return env.step(keys, state, random_actions(env, keys, observation))

    before = {id(array) for array in jax.live_arrays()}
    jax.eval_shape(first_step, jax.eval_shape(lambda: jax.random.key(0)))
    # JAX keeps a few scalars of its own; every array of an environment has an axis.
    left = [array for array in jax.live_arrays() if array.ndim and id(array) not in before]
    assert not left, left


def assert_conforms(env: Any, beside: Any = None) -> Rollout:
    """Assert the contract of `envs.Environment` on random steps, and return them."""
    rollout, reversed_rollout = random_rollouts(env, beside)
    step, space = rollout.step, env.observation_space
    agents = () if num_agents(env) is None else (env.num_agents,)

    # Shapes and dtypes.
    first_observation, first_mask = features_and_mask(rollout.first_observation)
    observation, mask = features_and_mask(step.observation)
    final_observation, final_mask = features_and_mask(step.final_observation)
    for features in (observation, final_observation):
        assert features.shape == (STEPS, NUM_ENVS, *agents, *space.shape)
        assert features.dtype == space.dtype
    assert first_observation.shape == (NUM_ENVS, *agents, *space.shape)
    assert (first_mask is None) == (mask is None) == (final_mask is None), "a mask at some steps only"
    if mask is not None:
        assert mask.shape == final_mask.shape == (STEPS, *first_mask.shape)
        assert mask.dtype == final_mask.dtype == first_mask.dtype == "bool"
        assert first_mask.any(-1).all() and mask.any(-1).all(), "no action is allowed"
    assert rollout.action.shape == (STEPS, NUM_ENVS, *agents, *env.action_space.shape)
    dtypes = {"reward": "float32", "terminated": "bool", "truncated": "bool"}
    dtypes |= {"episode_return": "float32", "episode_length": "int32"}
    for field, dtype in dtypes.items():
        shape = (STEPS, NUM_ENVS, *agents) if field == "reward" else (STEPS, NUM_ENVS)
        assert getattr(step, field).shape == shape and getattr(step, field).dtype == dtype, field

    # Values.
    for features in (first_observation, observation, final_observation):
        inside = (features >= space.low_array) & (features <= space.high_array)
        assert inside.all(), "an observation is outside its space"
    assert np.isfinite(step.reward).all()
    assert not (step.terminated & step.truncated).any(), "truncated where terminated"

    # Episodes, summed here once more.
    done = step.terminated | step.truncated
    for b in range(NUM_ENVS):
        total, length = np.float32(0), 0
        for t in range(STEPS):
            total, length = total + step.reward[t, b].mean(), length + 1
            if done[t, b]:
                assert np.isclose(step.episode_return[t, b], total, rtol=1e-5, atol=1e-5), (
                    "return is not the sum of rewards"
                )
                assert step.episode_length[t, b] == length, "length is not the number of steps"
                total, length = np.float32(0), 0
            else:
                assert step.episode_return[t, b] == step.episode_length[t, b] == 0, (
                    "statistics before the end"
                )
                assert (observation[t, b] == final_observation[t, b]).all(), (
                    "the observation changed where the episode goes on"
                )
                limit = env.max_episode_steps
                assert limit is None or length < limit, "the episode goes on after its limit"

    first = jax.tree.leaves(rollout.first_observation)
    for forward, backward in zip(jax.tree.leaves(rollout), jax.tree.leaves(reversed_rollout), strict=True):
        backward = np.flip(backward, 0 if any(forward is leaf for leaf in first) else 1)
        same = np.allclose(forward, backward, rtol=1e-6, atol=1e-6)
        assert same, "an environment depends on more than its own key, state and action"
    return rollout
