"""Checks of algorithms' settings and of networks' outputs.

The module also calls the user's bonuses, explorers and transforms, and checks their results. Each check
raises an `FdgError` that says what was given, and how to correct it. `self` is the algorithm.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fdg
from algos import registry
from algos.distributions import for_space, sizes
from algos.interfaces import Bonus
from algos.layers import Architecture
from algos.values import Network, by_name
from envs import Observation, TimeStep, check_spec, composite, features_and_mask, num_agents
from envs.spaces import Box, Space
from fdg.arguments import check_takes, quoted
from fdg.errors import FdgError, kind_of, listed
from fdg.settings import foreign
from fdg.settings.fields import (
    require,
    require_divides,
    require_not_negative,
    require_positive,
    require_type,
    require_types,
    require_within,
)
from fdg.settings.parts import check_parts
from fdg.settings.user_results import check_same

# --- settings ---

# Values of a field's metadata `holds`: the field takes a user's functions, or their `module:name`.
_KINDS_OF_FUNCTIONS = ("network", "bonus", "normalizer", "explorer", "transform")


def check_settings(self: Any) -> None:
    """Raises an `FdgError` if a field has the wrong type or a part is out of range."""
    check_types(self)
    check_parts(self)
    if getattr(self.env, "acts", False):
        why = "workers that act (acts=True) do not take turns: use rings=1"
        require(self, self.rings == 1, f"rings={self.rings}: {why}")
    require_within(self, 0, 1, "discount")
    for name in ("hidden", "critic_hidden"):
        widths = getattr(self, name, None)
        require(self, all(width > 0 for width in widths or ()), f"{name}={widths}: widths must be above zero")
    agents, space = num_agents(self.env), self.env.action_space
    if (agents is not None) != self.several_agents:
        count = "one agent" if agents is None else f"{agents} agents"
        message = f"'{self.env.name}' is an environment of {count}: use {_suitable_algorithms(self)}"
        require(self, False, message)
    if not isinstance(space, self.action_spaces):
        message = f"cannot act in the action space {space}: use {_suitable_algorithms(self)}"
        require(self, False, message)


def check_types(self: Any) -> None:
    """Raises an `FdgError` if a field has the wrong type; expands an `Architecture` in a network's field."""
    check_spec(self.env)
    holds = {field.name: field.metadata.get("holds") for field in dataclasses.fields(self)}
    kind_of_field = {name: kind for name, kind in holds.items() if kind in _KINDS_OF_FUNCTIONS}
    for name in ("network", "actor_network"):
        _expand_architecture(self, name)
    for name in kind_of_field:
        value = getattr(self, name)
        if foreign.make_hashable(value) is not value:
            object.__setattr__(self, name, foreign.make_hashable(value))
    require_types(self, {name for name in kind_of_field if foreign.is_network(getattr(self, name))})
    for name, kind in kind_of_field.items():  # refuses unknown names
        if kind == "network" and isinstance(getattr(self, name), str):
            registry.option("networks").user_network(self, name)
        elif kind != "network":
            value, interface = by_name(f"--{name}", getattr(self, name)), registry.public(kind.capitalize())
            require_type(self, name, value, interface | None)


def _expand_architecture(self: Any, field: str) -> None:
    """Copies settings of an `Architecture` in a network's field to the algorithm; the field becomes None."""
    network = getattr(self, field, None)
    if not isinstance(network, Architecture):
        return
    settings = dict(network.settings)
    if not all(hasattr(self, name) for name in settings):
        suitable = _algorithms_with(lambda algorithm: all(hasattr(algorithm, name) for name in settings))
        settings_text = ", ".join(f"{name}={value}" for name, value in settings.items())
        require(self, False, f"{field} has {settings_text}: use {listed(suitable or ['another'])}")
    defaults = {own_field.name: own_field.default for own_field in dataclasses.fields(self)}
    for name, value in settings.items():
        own_value = getattr(self, name)
        message = f"{name}={own_value} and {field}, which has {name}={value}: give one of them"
        require(self, own_value in (value, defaults[name]), message)
    for name, value in {**settings, field: None}.items():
        object.__setattr__(self, name, value)


def _suitable_algorithms(self: Any) -> str:
    """The algorithms that support this environment, for a message."""
    suitable = _algorithms_with(lambda algorithm: algorithm.can_act_in(self.env))
    return listed(suitable or ["one of your own"])


def _algorithms_with(condition: Callable[[Any], bool]) -> list[str]:
    """The names of the algorithm classes that meet a condition."""
    return sorted(registry.IN_ENVIRONMENTS[name] for name in registry.algorithms_where(condition))


def check_divides(
    self: Any, per_env: int, of_env: str = "num_steps", of_all: str = "num_envs * num_steps"
) -> None:
    """Refuses `num_minibatches` unless it divides the number of samples, `per_env` of each environment.

    In messages, `of_env` and `of_all` name the numbers of samples of one and of all environments.
    """
    count, name_of_count = per_env, of_env
    if self.epochs.shuffle != "time":
        count, name_of_count = self.num_envs * per_env, of_all
    require_divides(self, "num_minibatches", count, f"{name_of_count}={count}")


def check_replay(choice: Any, algorithm: Any) -> None:
    """Refuses settings of a `ReplayChoice` that are out of range or cannot be combined."""
    require_within(algorithm, 0, 1, "importance_exponent")
    exponent, replay = choice.priority_exponent, choice.replay
    require(
        algorithm,
        replay is None or not exponent,
        f"priority_exponent={exponent} and replay={quoted(replay)}: give one of them;"
        " functools.partial(algos.buffers.prioritized, exponent=0.6) is a replay with priorities",
    )
    make_buffer = getattr(replay, "func", replay)  # unwraps a `functools.partial`
    is_hindsight = make_buffer is registry.option("buffers").hindsight or (
        isinstance(make_buffer, str) and make_buffer == "hindsight"
    )
    require(
        algorithm,
        not (is_hindsight and getattr(algorithm, "memory", None) is not None),
        "replay=hindsight needs single steps, but with a memory rows are sequences: leave memory=None",
    )
    require(
        algorithm,
        not (is_hindsight and getattr(algorithm, "_adds_bonus", False)),
        "replay=hindsight and a bonus (or rnd=True): rewards of other goals are computed without it: leave"
        " one of them out",
    )


def check_memory(choice: Any, algorithm: Any) -> None:
    """Refuses sizes of a `NetworkMemory` that do not fit, and a memory together with the user's network."""
    require_positive(algorithm, "memory_size")
    if choice.memory is not None:
        why = "a network of your own has its own memory, or none: leave one of them out"
        require(algorithm, getattr(algorithm, "network", None) is None, f"memory={choice.memory}: {why}")
        registry.option("kinds of memory").MemoryKind.of(choice, choice.memory)
    if hasattr(choice, "sequence_length"):
        check_sequences(algorithm)
    if hasattr(choice, "burn_in"):
        require_not_negative(algorithm, "burn_in")


def check_sequences(algorithm: Any) -> None:
    """Refuses a length of sequences that does not divide a rollout; None stands for a whole rollout."""
    if algorithm.sequence_length is not None:
        require_divides(algorithm, "sequence_length", algorithm.num_steps, f"num_steps={algorithm.num_steps}")


def check_bounded_floats(self: Any) -> None:
    """Refuses actions that are not floats within finite bounds."""
    space = self.env.action_space
    require(
        self,
        isinstance(space, Box) and space.is_bounded and np.issubdtype(np.dtype(space.dtype), np.floating),
        f"cannot act in the action space {space}: give it finite bounds and a floating dtype",
    )


def check_off_policy(self: Any) -> None:
    """Like `check_settings`; also refuses unbounded actions, and sizes that do not divide."""
    check_settings(self)
    require_within(self, 0, 1, *(name for name in ("target_rate",) if hasattr(self, name)))
    require_positive(self, *(name for name in ("policy_delay",) if hasattr(self, name)))
    num_envs, batch_size = self.num_envs, self.batch_size
    check_bounded_floats(self)
    require_divides(self, "num_envs", batch_size, f"batch_size={batch_size}")
    try:
        rows = self.buffer.least_rows
    except FdgError as error:
        # The buffer is no larger than the run, so in a short run it is total_steps that is too small.
        is_short_run = self.num_iterations * self.steps_per_iteration < self.buffer_size
        raise FdgError(str(error).replace("buffer_size", "total_steps") if is_short_run else error) from None
    steps = rows * self.buffer.steps_per_row
    has_dataset = getattr(self, "dataset", None) is not None  # if so, the buffer is filled at the start
    require(
        self,
        rows == 1 or has_dataset or self.learning_starts >= steps * num_envs,
        f"learning_starts={self.learning_starts} is before there is a window of {steps} steps of each"
        f" environment: make it at least {steps * num_envs}",
    )


def check_state(self: Any, state: Any) -> None:
    """Refuses a value that is not the state of one agent."""
    if not hasattr(state, "iteration") and hasattr(state, "state"):
        fix = "engine.algorithm_state(state)"
        raise FdgError(f"{type(self).__name__}: this state holds older parameters as well: give {fix}")
    count = getattr(getattr(state, "iteration", None), "shape", None)
    if count is None:
        name = type(self).__name__
        raise FdgError(f"{name}: {kind_of(state)} is not its state: give what init or run returned")
    if count:
        raise FdgError(
            f"{type(self).__name__}: this state is of {count[0]} agents (num_seeds): take one,"
            f" jax.tree.map(lambda x: x[0], state), or all by jax.vmap"
        )


def check_and_wrap_act(memory: Any, act: Any) -> Any:
    """Refuses an `algos.Actor`'s functions with wrong arguments; returns `act`, which checks its results."""
    check_takes(memory, ("num_envs",), "memory of algos.Actor")
    check_takes(act, ("memory", "observation", "start", "keys", "greedy"), "act of algos.Actor")

    @functools.wraps(act)
    def checked(*arguments: Any, **named: Any) -> Any:
        result = act(*arguments, **named)
        if not isinstance(result, tuple) or len(result) != 2:
            raise FdgError(
                f"act of algos.Actor gives {kind_of(result)}: give a pair, (action, memory); a policy"
                " without memory returns its argument `memory`"
            )
        return result

    return checked


# --- outputs of networks, while tracing ---


def check_actor_critic(self: Any, network: Network, parameters: Any) -> None:
    """Refuses an actor-critic whose outputs do not fit the action space."""
    features = composite.types(self.env.observation_space, (self.num_envs,))
    output = jax.eval_shape(network.apply, parameters, features)
    check_actor_critic_output(output, self.env.action_space, (self.num_envs,))


def check_actor_critic_output(output: Any, action_space: Space, leading: tuple[int, ...]) -> None:
    """Refuses an actor-critic's output unless it is `(policy [*leading, P], value [*leading])`."""
    policy, value = check_policy_and_value(output, leading)
    size = for_space(action_space).size
    why = f"{size} numbers for {action_space}"
    check_shape("the network gives the policy as", policy, (*leading, size), why)
    check_value("the network gives values as", value, leading, "one for each observation")


def check_policy_and_value(output: Any, leading: tuple[int, ...]) -> tuple[Any, Any]:
    """Checks that an actor-critic's output is a pair, and returns `(policy, value)`."""
    expected = (
        f"an actor-critic gives a pair, (policy {_shape_text((*leading, 'P'))}, value {_shape_text(leading)})"
    )
    return check_pair("the network", output, expected)


def check_action_values(values: Any, actions: int, leading: tuple[int, ...], agents: bool = False) -> None:
    """Refuses outputs other than a value for each action, `[*leading, actions]`."""
    why = f"one for each of {actions} actions{' of each agent' if agents else ''}"
    check_shape("the network gives values of actions as", values, (*leading, actions), why)


def check_recurrent_values(output: Any, actions: int, leading: tuple[int, ...]) -> None:
    """Refuses outputs other than a pair: values `[T, B, (A,) n]` (see `check_action_values`) and a memory."""
    expected = f"it gives a pair, (values {_shape_text((*leading, actions))}, memory)"
    values, _ = check_pair("the network", output, expected)
    check_action_values(values, actions, leading, agents=True)


def check_gaussian(output: Any, action_space: Space, count: int, per_component: int = 2) -> None:
    """Refuses outputs other than `[count, per_component * D]`, for actions of `D` components.

    If `per_component` is 2, the outputs are means and logs of deviations, else actions.
    """
    why = "means and logs of deviations for" if per_component == 2 else "a number for each component of"
    size = per_component * math.prod(action_space.shape)
    check_shape("actor_network gives", output, (count, size), f"{why} {action_space}")


def check_q_network(self: Any, state: Any, parameters: Any) -> None:
    """Refuses a network of DQN or PQN whose number of outputs does not fit the action space."""
    num_outputs = sum(sizes(self._outputs))
    if self._memory is not None:
        self._memory.check(parameters, state, num_outputs)
    output = jax.eval_shape(self._network.apply, parameters, _network_input_types(self, state))
    check_action_values(output, num_outputs, (self.num_envs,))


def check_actor_and_critics(self: Any, state: Any) -> None:
    """Refuses networks of off-policy actor-critics whose outputs do not fit the action space."""
    count, space, inputs = self.num_envs, self.env.action_space, _network_input_types(self, state)
    actor = jax.eval_shape(self._actor_output, self._acting_parameters(state.learned), inputs)
    check_gaussian(actor, space, count, self._outputs_per_component)
    action = jax.ShapeDtypeStruct((count, *space.shape), jnp.float32)
    output = jax.eval_shape(self._critic_output, state.learned, inputs, action)
    if hasattr(self, "_check_critics"):
        return self._check_critics(output)
    atoms = registry.option("networks").critic_outputs(self)
    for value in check_pair("critic_network", output, f"it gives two values, each [{count}]"):
        if atoms > 1:
            why = f"{atoms} numbers (atoms) for each sample"
            check_shape("critic_network gives a distribution as", value, (count, atoms), why)
        else:
            check_value("critic_network gives a value as", value, (count,), "one for each sample")


def _network_input_types(self: Any, state: Any) -> Any:
    """Shapes and dtypes of observations as inputs of networks that learn from replay."""
    observation = composite.types(self.env.observation_space, (self.num_envs,))
    if self._memory is None:
        return observation
    return jax.eval_shape(self._memory.as_sequences, observation, state.recollection)


def check_pair(who: str, output: Any, expected: str) -> tuple[Any, Any]:
    """The two results of a network or function; refuses another number of results."""
    if not isinstance(output, tuple | list) or len(output) != 2:
        raise FdgError(f"{who} gives {_describe_output(output)}: {expected}")
    return output[0], output[1]


def check_value(what: str, value: Any, shape: tuple[Any, ...], why: str) -> None:
    """Like `check_shape`, for values; suggests `value[..., 0]` for a last axis of size 1."""
    fix = ": take its last axis away, value[..., 0]" if getattr(value, "shape", None) == (*shape, 1) else ""
    check_shape(what, value, shape, why + fix)


def check_shape(what: str, value: Any, shape: tuple[Any, ...], why: str) -> None:
    """Refuses results of another shape, or not floating-point."""
    if not hasattr(value, "shape") or value.shape != shape:
        raise FdgError(f"{what} {_describe_output(value)}: it must be {_shape_text(shape)}, {why}")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise FdgError(f"{what} {_describe_output(value)}: it must be of a floating dtype")


def _describe_output(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{len(value)} results ({', '.join(map(_describe_output, value))})"
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else f"a {type(value).__name__}"


def _shape_text(shape: tuple[Any, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


# --- the user's bonuses, explorers and transforms: their calls, with checked results ---


def _total_bonus(self: Any, key: jax.Array | None = None) -> Bonus:
    """The user's bonus, the novelty (unless it has its own value function), or the sum of both."""
    bonuses = [] if self.bonus is None else [by_name("--bonus", self.bonus)]
    if self.rnd and not self.values_novelty:
        bonuses.append(registry.option("rnd").bonus(self, key))
    if len(bonuses) == 1:
        return bonuses[0]

    def apply(states: Any, rows: TimeStep) -> tuple[Any, jax.Array]:
        first, second = (
            _apply_bonus(bonus, state, rows) for bonus, state in zip(bonuses, states, strict=True)
        )
        return (first[0], second[0]), first[1] + second[1]

    return Bonus(lambda observation: tuple(bonus.init(observation) for bonus in bonuses), apply)


def _apply_bonus(bonus: Bonus, state: Any, rows: TimeStep) -> tuple[Any, jax.Array]:
    output = bonus.apply(state, rows)
    new_state, reward = check_pair("apply of bonus", output, "give a pair, (state, reward)")
    check_same("apply of bonus gives state", state, new_state)
    check_same("apply of bonus gives reward", rows.reward, reward, dtypes=False)
    return new_state, reward


def initial_bonus_state(self: Any, observation: Observation, key: jax.Array) -> Any:
    """The initial state of an algorithm's bonus for `observation [B, *obs]`."""
    return _total_bonus(self, key).init(features_and_mask(observation)[0])


def add_bonus(self: Any, state: Any, time_step: TimeStep) -> tuple[Any, TimeStep, dict[str, jax.Array]]:
    """The bonus's state after a rollout `[T, B]`, the rollout with the bonus added, and metrics."""
    state, time_step, mean = _pay_bonus.__get__(self)(state, time_step)  # bound to `self`, as a method is
    return state, time_step, {"bonus": mean}


@fdg.fragment("learner", in_axes=(None, 1), out_axes=(None, 1, None), name="pay")
def _pay_bonus(self, state, time_step):
    """The bonus's state after a rollout `[T, B]`, the rollout with the bonus added, and the mean bonus."""
    axes = time_step.terminated.ndim  # 2, or 3 in A3C, whose second axis is that of workers
    rows = jax.tree.map(lambda x: x.reshape(len(x), -1, *x.shape[axes:]), time_step)
    state, reward = _apply_bonus(_total_bonus(self), state, rows)
    reward = reward.reshape(time_step.reward.shape)
    return state, time_step._replace(reward=time_step.reward + reward), jnp.mean(reward)


def apply_explorer(
    explorer: Any, state: Any, policy: Any, start: jax.Array, keys: jax.Array, progress: jax.Array
) -> tuple[Any, Any]:
    """The next state and the actions of the user's `algos.Explorer`."""
    apply = by_name("--explore", explorer).apply
    check_takes(apply, ("state", "policy", "start", "keys", "progress"), "apply of explore")
    result = apply(state, policy, start, keys, progress)
    new_state, action = check_pair("apply of explore", result, "give a pair, (state, action)")
    check_same("apply of explore gives state", state, new_state)
    check_same("apply of explore gives action", jax.eval_shape(policy.mode), action)
    return new_state, action


def apply_transform(transform: Any, rows: Any, parameters: Any, key: jax.Array) -> Any:
    """Applies the user's `algos.Transform` to the rows of a rollout or from replay."""
    function: Any = by_name("--transform", transform)
    check_takes(function, ("rows", "parameters", "key"), "transform")

    @fdg.fragment("buffer", in_axes=(1, None, None), out_axes=1, name="transform")
    def apply(rows: Any, parameters: Any, key: jax.Array) -> Any:
        new_rows = function(rows, parameters, key)
        fix = "rows of the structure that it is given (rows._replace(...))"
        check_same("transform gives rows", rows, new_rows, fix)
        return new_rows

    # A large number ("row" in ASCII): with a small one, this key could equal one that the learner splits off.
    return apply(rows, parameters, jax.random.fold_in(key, 0x726F77))
