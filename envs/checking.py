"""Checks of environments, with one-line errors.

`check_spec` only reads attributes: it is cheap, and runs whenever an algorithm is constructed. The results of
`reset` and `step` are checked once, while JAX traces them. `check_traced` makes both kinds of checks without
running a step; `envs.check` also runs random steps.
"""

import contextlib
import inspect
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from envs import composite, foreign
from envs.spaces import Box, Discrete, MultiDiscrete
from fdg import aliases
from fdg.arguments import check_takes, quoted
from fdg.errors import FdgError, FdgWarning, kind_of, listed, one_line
from fdg.kinds import dataclass_fields
from fdg.tracing.mistakes import explained, line_of

_ATTRIBUTES = {  # required attributes, each with a line of code that defines it
    "name": "name = 'corridor'",
    "observation_space": "observation_space = envs.Box(-1.0, 1.0, (4,))",
    "action_space": "action_space = envs.Discrete(2)",
    "max_episode_steps": "max_episode_steps = None (or a number of steps)",
}
# results of `envs.make` -> their names with parameters; `envs.registry` fills it, messages read it
names_with_parameters: dict[Any, str] = {}
_MAX_CATEGORIES = 2**20  # of a discrete action space
_STEP_RESULTS = "(state, observation, reward, terminated, truncated)"  # of `SingleEnvironment.step`
_STEP_FIELDS = {  # fields of `TimeStep`: dtype, and whether each agent has its own value
    "reward": ("float32", True),
    "terminated": ("bool", False),
    "truncated": ("bool", False),
    "episode_return": ("float32", False),
    "episode_length": ("int32", False),
}


def check_wrapped(wrapper: Any) -> None:
    """Runs `check_spec` on a wrapper's environment; explains arguments in the wrong order.

    Called when a wrapper is constructed.
    """
    names = [field.name for field in dataclass_fields(wrapper) if field.init]
    if not hasattr(wrapper.env, "step") and any(hasattr(getattr(wrapper, name), "step") for name in names):
        kind = type(wrapper).__name__
        raise FdgError(f"{kind}(env={quoted(wrapper.env)}): the order is {kind}({', '.join(names)})")
    check_spec(wrapper.env)


def check_spec(env: Any, single: bool = False) -> None:
    """Checks that a value is an environment, by its attributes alone.

    Args:
      env: an `Environment`, or a `SingleEnvironment` if `single`.
      single: check a single instance. Its properties are not read, because they may import a library.

    Raises:
      FdgError: it is a name, a class, another library's environment or not hashable, or an attribute is
        missing or has the wrong type.
    """
    shown = _as_written(env)
    if refusal := aliases.not_a_policy(env):  # such as "'MlpPolicy' is a network of ...: leave it out"
        raise FdgError(f"env={refusal}, and give the environment, such as envs.make('CartPole-v1')")
    if isinstance(env, str):
        raise FdgError(f"env={env!r} is a name: write env=envs.make({env!r})")
    if isinstance(env, type) and not foreign.is_of_gymnasium(env):
        fix = f"envs.vectorize({env.__name__}())"
        raise FdgError(f"env={shown} is a class, not an environment: write {fix}")
    if inspect.isroutine(env):
        raise FdgError(f"env={env.__name__} is a function, not an environment: pass what it returns")
    if hasattr(env, "demonstration"):
        raise FdgError(
            f"env={_name_or_type(env)} is a text task, which needs an algorithm for language models: use"
            " --algo grpo, sft, dpo or ppo_rlhf"
        )
    if reason := foreign.reason_not_adapted(env):
        raise FdgError(f"env={shown} {reason}")
    if foreign.package_of(env) is not None:
        raise FdgError(f"env={shown} is one instance: write envs.vectorize({shown})")
    missing = [name for name in _ATTRIBUTES if not _has_attribute(env, name)]
    missing += [name for name in ("reset", "step") if not callable(getattr(env, name, None))]
    if missing:
        lines = [_ATTRIBUTES.get(name, f"def {name}(self, key, ...)") for name in missing]
        raise FdgError(
            f"environment {shown} has no {listed(missing, 'and')}: give its class {'; '.join(lines)}"
        )
    if not single:
        _check_attributes(env)
    try:
        hash(env)
    except TypeError as error:
        raise FdgError(
            f"environment {shown} does not hash ({error}): make its class a frozen dataclass"
            f" whose fields hash, tuples in place of lists and arrays"
        ) from None
    if not single and _first_parameter(env.reset) == "key":
        raise FdgError(
            f"environment {shown} is one instance (its reset takes one key): write envs.vectorize({shown})"
        )
    key = "key" if single else "keys"
    check_takes(env.reset, (key,), f"reset of environment {shown}")
    check_takes(env.step, (key, "state", "action"), f"step of environment {shown}")


def _check_attributes(env: Any) -> None:
    """Raises an `FdgError` for an attribute of a batched environment with a wrong type or size."""
    name = read_attribute(env, "name")
    if not isinstance(name, str):
        raise FdgError(f"environment {_as_written(env)}: its name is {name!r}: give a string")
    for attribute in ("observation_space", "action_space"):
        space, is_observation = read_attribute(env, attribute), attribute == "observation_space"
        if not isinstance(space, composite.KINDS if is_observation else Box | Discrete | MultiDiscrete):
            kind = space if isinstance(space, type) else type(space)
            hint = ", or an envs.Dict or envs.Tuple of these" if is_observation else ""
            if composite.is_composite(space):
                hint = f"{hint}; envs.vectorize joins the parts of a single environment's actions"
            raise FdgError(
                f"environment '{name}': its {attribute} is {space!r:.60} ({kind.__module__}.{kind.__name__}):"
                f" give an envs.Box, envs.Discrete or envs.MultiDiscrete{hint}"
            )
        for where, part in composite.parts(space):
            if not math.prod(part.shape):
                raise FdgError(
                    f"environment '{name}': its {attribute}{where} is {part!r:.90}, which is empty: leave it"
                    " out, or give it a shape without zeros"
                )
    actions = read_attribute(env, "action_space")
    categories = sum(getattr(actions, "nvec", (getattr(actions, "n", 0),)))  # none for a Box
    if categories > _MAX_CATEGORIES:
        raise FdgError(
            f"environment '{name}': its actions are one of {categories:,} categories, each an output of"
            f" the network (at most {_MAX_CATEGORIES:,}): wrap it so that actions are a Box, and round them"
        )
    for attribute in ("max_episode_steps", "num_agents"):
        value = read_attribute(env, attribute) if _has_attribute(env, attribute) else None
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise FdgError(
                f"environment '{name}': its {attribute} is {value!r}: give an integer of at least 1, or None"
            )


def read_attribute(env: Any, attribute: str) -> Any:
    """Reads an attribute of a user's environment; raises `FdgError` if it is a property that fails."""
    try:
        return getattr(env, attribute)
    except FdgError:
        raise
    except Exception as error:
        name = None
        with contextlib.suppress(TypeError):  # not hashable
            name = names_with_parameters.get(env)
        fix = "correct the property" if name is None else "change its parameters, or correct the property"
        raise FdgError(
            f"environment {_as_written(env) if name is None else repr(name)}: its {attribute} cannot be"
            f" read{line_of(error)}: {one_line(error)}: {fix}"
        ) from error


def unpack_reset(name: str, result: Any) -> tuple[Any, Any]:
    """Checks the result of `reset`; returns `(state, observation)`."""
    if not isinstance(result, tuple) or len(result) != 2 or hasattr(result, "action_mask"):
        raise FdgError(f"environment '{name}': reset gives {_describe(result)}: return (state, observation)")
    if result[1] is None or (isinstance(result[1], dict) and not result[1]):  # Gymnasium's info
        raise FdgError(
            f"environment '{name}': reset gives {_describe(result[1])} as observation: return"
            f" (state, observation), the observation one array, in that order"
        )
    return result


def unpack_step(name: str, result: Any) -> tuple[Any, ...]:
    """Checks the five or six results of a single environment's `step`; returns six (`info` may be empty)."""
    count = len(result) if isinstance(result, tuple) else 0
    if count != 5 and (count != 6 or not isinstance(result[5], dict)):
        hints = {4: "; one flag `done` alone is terminated; truncated is False", 6: "; info is a dictionary"}
        hint = hints.get(count, "")
        raise FdgError(
            f"environment '{name}': step gives {_describe(result)}: return five, {_STEP_RESULTS}{hint}"
        )
    for value, what in zip(result[1:5], ("observation", "reward", "terminated", "truncated"), strict=True):
        if value is None or isinstance(value, str) or (isinstance(value, dict) and what != "observation"):
            raise FdgError(
                f"environment '{name}': step gives {_describe(value)} as {what}: return five, {_STEP_RESULTS}"
            )
    _check_flags(name, *result[2:5])
    return result if count == 6 else (*result, {})


def _check_flags(name: str, reward: Any, *flags: Any) -> None:
    """Raises if a flag is a float and the reward a bool (they are swapped); warns about other float flags.

    Any number but 0 counts as true, so a flag that is a float is probably some other value.
    """
    for flag, what in zip(flags, ("terminated", "truncated"), strict=True):
        kind = getattr(flag, "dtype", type(flag))
        if not jnp.issubdtype(kind, jnp.floating):
            continue
        problem = f"environment '{name}': step gives {getattr(kind, '__name__', kind)} as {what}"
        if jnp.issubdtype(getattr(reward, "dtype", type(reward)), jnp.bool_):
            raise FdgError(f"{problem}, and a bool as reward: return five, {_STEP_RESULTS}, in this order")
        warnings.warn(
            f"{problem}, of which any number but 0 counts as true: give a bool, x != 0",
            FdgWarning,
            stacklevel=2,
        )


def check_batch_reset(env: Any, result: Any, count: int) -> tuple[Any, Any]:
    """Checks the result of a batched `reset` for `count` keys; returns `(state, observation)`."""
    state, observation = unpack_reset(env.name, result)
    check_observation(env, "reset", observation, count)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.shape(leaf)[:1] != (count,):
            raise FdgError(
                f"environment '{env.name}': reset gives state{jax.tree_util.keystr(path)} of shape"
                f" {jnp.shape(leaf)} for {count} keys: give each array of the state a leading axis of {count}"
            )
    return state, observation


def check_batch_step(env: Any, result: Any, count: int) -> tuple[Any, Any]:
    """Checks the result of a batched `step`; returns `(state, TimeStep)`."""
    name = env.name
    if hasattr(result, "final_observation"):
        raise FdgError(f"environment '{name}': step gives an envs.TimeStep alone: return (state, step)")
    if not isinstance(result, tuple) or len(result) != 2 or not hasattr(result[1], "final_observation"):
        raise FdgError(
            f"environment '{name}': step gives {_describe(result)}: a batched environment returns"
            f" (state, envs.TimeStep(...)); envs.vectorize makes a batch from one instance"
        )
    state, step = result
    agents_axis = () if getattr(env, "num_agents", None) is None else (env.num_agents,)
    for field, (dtype, per_agent) in _STEP_FIELDS.items():
        value, shape = getattr(step, field), (count, *(agents_axis if per_agent else ()))
        if value is None or jnp.shape(value) != shape or jnp.result_type(value) != dtype:
            kind = "None" if value is None else f"{jnp.result_type(value)}{list(jnp.shape(value))}"
            raise FdgError(
                f"environment '{name}': step gives {field} as {kind}: it must be {dtype}{list(shape)}"
            )
    for field, value in step.episode_info.items():
        if jnp.shape(value) != (count,) or jnp.result_type(value) != "float32":
            kind = f"{jnp.result_type(value)}{list(jnp.shape(value))}"
            raise FdgError(
                f"environment '{name}': step gives '{field}' as {kind}: it must be float32[{count}]"
            )
    check_observation(env, "step", step.observation, count)
    check_observation(env, "step", step.final_observation, count)
    return state, step


def check_observation(env: Any, method: str, observation: Any, count: int) -> None:
    """Raises an `FdgError` unless a batch of observations fits the environment's `observation_space`."""
    wrapper = f"wrapper {type(env).__name__} of " if hasattr(env, "begin") else ""
    subject = f"{wrapper}environment '{env.name}': {method} gives"
    fix = ": define observation_space" if wrapper else ""
    agents_axis = () if getattr(env, "num_agents", None) is None else (env.num_agents,)
    features = getattr(observation, "observation", observation)  # without its mask
    has_parts = composite.is_composite(env.observation_space)
    if has_parts and not composite.has_parts_of(env.observation_space, features):
        raise FdgError(
            f"{subject} {_describe(features)} as observation, whose parts differ from those of"
            f" {env.observation_space!r:.200}{fix}"
        )
    leaves = jax.tree.leaves(features) if has_parts else [features]
    for (path, space), part in zip(composite.parts(env.observation_space), leaves, strict=True):
        expected = (count, *agents_axis, *space.shape)
        if not hasattr(part, "dtype") or jnp.shape(part) != expected:
            raise FdgError(
                f"{subject} {_describe(part)} as observation{path}, of shape {getattr(part, 'shape', None)},"
                f" expected {expected} of {space}{fix}"
            )
        if part.dtype != space.dtype:
            raise FdgError(
                f"{subject} observations{path} of {part.dtype}, expected {space.dtype} of {space}{fix}"
            )


def check_traced(env: Any, num_envs: int = 2) -> None:
    """Checks an environment without running a step or allocating an array.

    `num_envs`: the batch size of the trace.

    >>> import envs
    >>> check_traced(envs.make("CartPole-v1"))
    """
    check_spec(env)

    def reset_and_step(keys: jax.Array) -> Any:
        state, _ = check_batch_reset(env, env.reset(keys), num_envs)
        agents_axis = () if getattr(env, "num_agents", None) is None else (env.num_agents,)
        shape = (num_envs, *agents_axis, *env.action_space.shape)
        step_state, _ = check_batch_step(
            env, env.step(keys, state, jnp.zeros(shape, env.action_space.dtype)), num_envs
        )
        return state, step_state

    try:
        with explained(f"environment '{env.name}'"):
            reset_state, step_state = jax.eval_shape(
                reset_and_step, jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_envs))
            )
    except FdgError:
        raise
    except Exception as error:  # user code may raise anything
        raise FdgError(
            f"environment '{env.name}' cannot be traced{line_of(error)}: {one_line(error)}"
        ) from error
    reset_types = [(x.shape, x.dtype) for x in jax.tree.leaves(reset_state)]
    if jax.tree.structure(reset_state) != jax.tree.structure(step_state) or reset_types != [  # type: ignore[operator]
        (x.shape, x.dtype) for x in jax.tree.leaves(step_state)
    ]:
        raise FdgError(
            f"environment '{env.name}': the states from reset and step differ in structure, shape or dtype:"
            f" return the same from both"
        )


def _as_written(env: Any) -> str:
    """Roughly how the user wrote an environment, for messages."""
    return env.__name__ if isinstance(env, type) else f"{type(env).__name__}()"


def _name_or_type(env: Any) -> str:
    name = getattr(env, "name", None)
    return name if isinstance(name, str) else type(env).__name__


def _has_attribute(env: Any, name: str) -> bool:
    """True if an environment or its class has the attribute; properties of the class are not read."""
    return hasattr(type(env), name) or hasattr(env, name)


def _first_parameter(method: Any) -> str | None:
    try:
        return next(iter(inspect.signature(method).parameters), None)
    except (TypeError, ValueError):
        return None


def _describe(value: Any) -> str:
    """A value for messages: None and strings as they are; else its length or its type."""
    if isinstance(value, tuple):
        return f"{len(value)} values"
    if value is None or isinstance(value, str):
        return repr(value)
    return f"a value of type {kind_of(value)}"
