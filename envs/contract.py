"""`envs.check`: tests with random steps that an environment keeps the contract of `envs.Environment`.

Shapes: `T` steps, `B` environments, `A` agents (multi-agent environments only).
"""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs import composite
from envs.checking import check_traced
from envs.environment import TimeStep, features_and_mask, num_agents
from envs.spaces import MultiDiscrete
from envs.wrappers import keeps_rewards
from fdg.arguments import checked_names
from fdg.errors import FdgError, FdgWarning, raised
from fdg.keys import is_key

STEPS, NUM_ENVS = 24, 3  # defaults of `check`

# The programs compile for seconds and run for milliseconds, so XLA need not optimize them much.
COMPILE_FAST: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Rollout(NamedTuple):
    """Random steps of a batch, as NumPy arrays."""

    first_observation: Any  # [B, ...]
    action: np.ndarray  # [T, B, ...]
    step: TimeStep  # [T, B, ...]
    other_results: Any  # [T, B, ...], of another environment's `step`, for the same keys and actions


@checked_names
def check(env: Any, num_envs: int = NUM_ENVS, steps: int = STEPS) -> str:
    """Checks an environment as algorithms use it.

    Without running a step, it checks attributes and spaces; shapes and dtypes of `reset` and `step`; that the
    state keeps its structure; that tracing twice gives the same program (no NumPy random numbers, no counters
    in attributes). With random steps, it checks that observations are within their space and rewards finite,
    and that no step is both terminated and truncated; the time limit; auto-reset, returns and lengths of
    episodes; and that each element of the batch depends only on its own key, state and action.

    Args:
      env: an `Environment`, such as your own `vectorize(...)`.
      num_envs: B.
      steps: T; 0 runs nothing, and does not trace twice.

    Returns:
      A line that says what was checked.

    Raises:
      FdgError: the first violation, with its fix.

    >>> import envs
    >>> check(envs.make("probe:discount"), steps=8)
    "environment 'probe:discount' is right: it traces, and 3 instances of it made 8 random steps"
    """
    check_traced(env, min(num_envs, 2))
    _warn_of_unused_mask(env)
    if not steps:
        return f"environment '{env.name}' is right: it traces (no steps were made)"
    _check_deterministic_trace(env)
    try:
        rollouts = random_rollouts(env, None, num_envs, steps)
    except FdgError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise FdgError(f"environment '{env.name}' does not run: {raised(error)}") from error
    for problem in problems(env, *rollouts):
        raise FdgError(f"environment '{env.name}': {problem}")
    steps_made = f"{num_envs} instances of it made {steps} random steps"
    return f"environment '{env.name}' is right: it traces, and {steps_made}"


def _warn_of_unused_mask(env: Any) -> None:
    """Warns about a part of observations that has a mask's name but masks nothing."""
    if not any("action_mask" in path for path, _ in composite.parts(env.observation_space)):
        return
    _, observation = jax.eval_shape(lambda: env.reset(jax.random.split(jax.random.key(0), 1)))
    if features_and_mask(observation)[1] is None:
        warnings.warn(
            f"environment '{env.name}': the part 'action_mask' of its observations forbids no action: return"
            " envs.MaskedObservation(observation, action_mask) for that",
            FdgWarning,
            stacklevel=3,
        )


def _check_deterministic_trace(env: Any) -> None:
    """Raises an `FdgError` if two traces of `reset` or `step` give different jaxprs or constants."""
    keys = jax.random.split(jax.random.key(0), 2)
    state, _ = jax.eval_shape(env.reset, keys)
    agents_axis = () if num_agents(env) is None else (env.num_agents,)
    action = jnp.zeros((2, *agents_axis, *env.action_space.shape), env.action_space.dtype)

    def trace() -> tuple[str, list[Any]]:
        jaxprs = [jax.make_jaxpr(env.reset)(keys), jax.make_jaxpr(env.step)(keys, state, action)]
        consts = [x for closed_jaxpr in jaxprs for x in closed_jaxpr.consts]
        constants = [np.asarray(x) for x in consts if not (hasattr(x, "dtype") and is_key(x.dtype))]
        return "".join(str(closed_jaxpr) for closed_jaxpr in jaxprs), constants

    (text, constants), (text_again, constants_again) = trace(), trace()
    same_text = text == text_again and len(constants) == len(constants_again)
    if not same_text or not all(
        np.array_equal(a, b, equal_nan=_may_be_nan(a))
        for a, b in zip(constants, constants_again, strict=True)
    ):
        raise FdgError(
            f"environment '{env.name}': reset and step give a different jaxpr each time that they are"
            " traced: draw random numbers from `key` (not by NumPy or random), and keep what changes in"
            " `state` (not in self)"
        )


def _may_be_nan(x: np.ndarray) -> bool:
    return bool(np.issubdtype(x.dtype, np.inexact))


def random_actions(env: Any, keys: jax.Array, observation: Any) -> jax.Array:
    """A valid random action for every environment (and agent): `[B, (A,) *action]`."""
    if num_agents(env) is not None:
        keys = jax.vmap(lambda key: jax.random.split(key, env.num_agents))(keys)
    draw = env.action_space.sample
    for _ in range(keys.ndim):
        draw = jax.vmap(draw)
    action = draw(keys)
    _, mask = features_and_mask(observation)
    if mask is None:
        return action
    space = env.action_space
    if isinstance(space, MultiDiscrete):  # the mask concatenates its choices
        parts = jnp.split(mask, np.cumsum(space.nvec)[:-1].tolist(), axis=-1)
        return jnp.stack([_valid_action(action[..., i], part) for i, part in enumerate(parts)], axis=-1)
    return _valid_action(action, mask)


def _valid_action(action: jax.Array, mask: jax.Array) -> jax.Array:
    """The action if it is valid, else the first valid one."""
    allowed = jnp.take_along_axis(mask, action[..., None], -1)[..., 0]
    return jnp.where(allowed, action, jnp.argmax(mask, -1)).astype(action.dtype)


def random_rollouts(
    env: Any, other: Any = None, num_envs: int = NUM_ENVS, steps: int = STEPS
) -> tuple[Rollout, Rollout]:
    """Two rollouts of random actions; the second has the keys of the first in reverse order.

    The exception is the last environment of the second rollout, which has new keys. `other` is another
    environment, which gets the same keys and actions; its `step` may return any pytree as its second result.
    One program runs `env` and `other`, because compilation takes most of the time, and parts that both share
    compile once.
    """
    types = {}

    def program(reset_keys, step_keys, action_keys):
        state, observation = env.reset(reset_keys)
        types["reset"] = jax.tree.map(jax.typeof, state)
        other_state = other.reset(reset_keys)[0] if other else None

        def body(states, keys):
            state, other_state, observation = states
            action = random_actions(env, keys[1], observation)
            state, step = env.step(keys[0], state, action)
            types["step"] = jax.tree.map(jax.typeof, state)
            other_state, other_step = other.step(keys[0], other_state, action) if other else (None, None)
            return (state, other_state, step.observation), (action, step, other_step)

        _, steps = jax.lax.scan(body, (state, other_state, observation), (step_keys, action_keys))
        return observation, *steps

    program = jax.jit(program, compiler_options=COMPILE_FAST)
    reset_keys = jax.random.split(jax.random.key(1), num_envs + 1)
    step_keys = jax.random.split(jax.random.key(2), (steps, num_envs + 1))
    action_keys = jax.random.split(jax.random.key(3), (steps, num_envs + 1))
    forward = program(reset_keys[:-1], step_keys[:, :-1], action_keys[:, :-1])
    order = jnp.array([*range(num_envs - 1, 0, -1), num_envs])
    backward = program(reset_keys[order], step_keys[:, order], action_keys[:, order])
    at_reset, at_step = jax.tree_util.tree_leaves_with_path(types["reset"]), jax.tree.leaves(types["step"])
    changed = [(path, a, b) for (path, a), b in zip(at_reset, at_step, strict=True) if a != b]
    if changed:
        path, old, new = changed[0]
        raise FdgError(
            f"environment '{env.name}': step changes a shape, dtype or weak type of the state: state"
            f"{jax.tree_util.keystr(path)} is {old!r} after reset, and {new!r} after step: return the same"
        )
    return Rollout(*jax.tree.map(np.asarray, forward)), Rollout(*jax.tree.map(np.asarray, backward))


def problems(env: Any, rollout: Rollout, backward: Rollout) -> Iterator[str]:
    """Yields a message for each violation of the contract; the rollouts are from `random_rollouts`."""
    step = rollout.step
    steps, num_envs = step.terminated.shape
    agents_axis = () if num_agents(env) is None else (env.num_agents,)
    observations = {
        "the first observation": (rollout.first_observation, (num_envs, *agents_axis)),
        "an observation": (step.observation, (steps, num_envs, *agents_axis)),
        "a final observation": (step.final_observation, (steps, num_envs, *agents_axis)),
    }
    yield from _mask_problems(env, [value for value, _ in observations.values()])  # may cause the next ones
    yield from _space_problems(env, observations)
    if rollout.action.shape != (steps, num_envs, *agents_axis, *env.action_space.shape):
        drawn = rollout.action.shape[2 + len(agents_axis) :]
        yield f"its action space draws actions of shape {drawn}, expected its own {env.action_space.shape}"
    dtypes = {"reward": "float32", "terminated": "bool", "truncated": "bool"}
    dtypes |= {"episode_return": "float32", "episode_length": "int32"}
    for field, dtype in dtypes.items():
        shape = (steps, num_envs, *agents_axis) if field == "reward" else (steps, num_envs)
        value = getattr(step, field)
        if value.shape != shape or value.dtype != dtype:
            yield f"{field} is {value.dtype}{list(value.shape)}, expected {dtype}{list(shape)}"
    if not np.isfinite(step.reward).all():
        yield "a reward is infinite or not a number"
    if (step.terminated & step.truncated).any():
        yield "truncated and terminated are both True: set truncated to False where terminated is True"
    yield from _episode_problems(env, step)
    if not _equal_reversed(rollout, backward):
        yield "an environment depends on more than its own key, state and action"


def _space_problems(env: Any, observations: Any) -> Iterator[str]:
    """Observations outside their space; `observations` are (batch, leading axes) by description."""
    for what, (value, leading) in observations.items():
        features = jax.tree.leaves(features_and_mask(value)[0])
        for (path, space), part in zip(composite.parts(env.observation_space), features, strict=True):
            shape = (*leading, *space.shape)
            if part.shape != shape or part.dtype != space.dtype:
                yield f"{what}{path} is {part.dtype}{list(part.shape)}, expected {space.dtype}{list(shape)}"
            elif not _is_inside(space, part):
                bounds = f"from {np.min(part):g} to {np.max(part):g} in {space!r:.200}"
                yield f"{what}{path} is outside its space: {bounds}"


def _is_inside(space: Any, part: np.ndarray) -> bool:
    """True if all values of a batch are within the bounds of a space without parts."""
    if hasattr(space, "low_array"):
        return bool(((part >= space.low_array) & (part <= space.high_array)).all())
    num_choices = space.n if hasattr(space, "n") else np.asarray(space.nvec)
    return bool(((part >= 0) & (part < num_choices)).all())


def _mask_problems(env: Any, observations: list[Any]) -> Iterator[str]:
    """Violations in the masks of the first observation, the observations and the final observations."""
    masks = [features_and_mask(value)[1] for value in observations]
    present = [mask for mask in masks if mask is not None]
    if not present:
        return
    if len(present) < len(masks):
        yield "some observations have a mask and others have none"
    elif len({mask.shape[-1] for mask in present}) > 1 or any(mask.dtype != bool for mask in present):
        yield "masks have different lengths, or a dtype other than bool"
    elif not all(mask.any(-1).all() for mask in present[:2]):  # final observations may allow none
        yield "no action is allowed at some step: a mask must allow at least one"


def _episode_problems(env: Any, step: TimeStep) -> Iterator[str]:
    """Compares returns and lengths of episodes with sums computed here."""
    steps, num_envs = step.terminated.shape
    done = step.terminated | step.truncated
    observation, final = (
        jax.tree.leaves(features_and_mask(value)[0]) for value in (step.observation, step.final_observation)
    )
    for b in range(num_envs):
        total, length = 0.0, 0
        for t in range(steps):
            total, length = total + float(step.reward[t, b].mean()), length + 1
            if done[t, b]:
                same = np.isclose(step.episode_return[t, b], total, rtol=1e-5, atol=1e-5)
                if keeps_rewards(env) and not same:
                    yield f"episode_return is {step.episode_return[t, b]:g}, but rewards add up to {total:g}"
                if step.episode_length[t, b] != length:
                    yield f"episode_length is {step.episode_length[t, b]} after {length} steps"
                total, length = 0.0, 0
                continue
            if step.episode_return[t, b] != 0 or step.episode_length[t, b] != 0:
                yield "episode_return and episode_length must be 0 before the episode ends"
            if not all((new[t, b] == old[t, b]).all() for new, old in zip(observation, final, strict=True)):
                yield "observation and final_observation differ before the episode ends: they must be equal"
            if env.max_episode_steps is not None and length >= env.max_episode_steps:
                yield f"the episode goes on after its limit of {env.max_episode_steps} steps"


def _equal_reversed(rollout: Rollout, backward: Rollout) -> bool:
    """Whether the second rollout is the first in reverse order, except its last environment (new keys)."""
    ids_without_time_axis = {id(leaf) for leaf in jax.tree.leaves(rollout.first_observation)}

    def same(leaf: np.ndarray, backward_leaf: np.ndarray) -> bool:
        axis = 0 if id(leaf) in ids_without_time_axis else 1
        forward, reverse = (np.moveaxis(x, axis, 0) for x in (leaf, np.flip(backward_leaf, axis)))
        return np.allclose(forward[1:], reverse[1:], 1e-6, 1e-6, equal_nan=_may_be_nan(leaf))

    return all(map(same, jax.tree.leaves(rollout), jax.tree.leaves(backward)))
