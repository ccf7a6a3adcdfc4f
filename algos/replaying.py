"""Learning from replay: collecting steps for a buffer, and the settings of replay, memories and exploration.

The steps of a rollout are added to a buffer (`algos.replay.Replay`), from which minibatches of `Transition`
are sampled, by default uniformly. The networks may have a memory (`algos.sequences`), and an `Explorer` may
choose the actions. In both cases the state has a `Recollection`. If networks have a memory, rows of the
buffer are sequences.

Shapes: `T` steps of a rollout, `B` environments, `N` samples of a minibatch. `self` is the algorithm.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from algos import registry
from algos.rollout import Actor, Recollection, episode_metrics, rollout_with_memory
from algos.values import by_name
from envs import Box, Observation
from fdg.settings.fields import (
    hyperparameter,
    is_traced,
    own_value,
    require,
    require_not_negative,
    require_positive,
)
from fdg.settings.moved import moved
from fdg.settings.parts import Part

__getattr__ = moved(__name__, "algos.interfaces", "Explorer MemorySizes=algos.replaying:NetworkMemory")

# --- replay ---


class Transition(NamedTuple):
    """A window of steps as one transition: its target is `reward + discount * V(next_observation)`."""

    observation: Observation  # [N, *obs]
    action: jax.Array  # [N, *action]
    reward: jax.Array  # [N] float32, discounted sum over the window
    discount: jax.Array  # [N] float32, of the next value; zero where the episode terminated
    next_observation: Observation  # [N, *obs], after the window, before any automatic reset
    weight: Any = None  # [N] float32, of each sample in the losses of SAC, TD3 and CrossQ; None: ones


@dataclasses.dataclass(frozen=True)
class ReplayUpdates(Part):
    """The size of the replay buffer, and gradient steps per environment step."""

    buffer_size: int = hyperparameter(10_000, "capacity of the replay buffer in steps, over all environments")
    batch_size: int = hyperparameter(128, "samples of a gradient step, equally many from each environment")
    learning_starts: int = hyperparameter(10_000, "environment steps before the first gradient step")
    updates_per_step: float = hyperparameter(
        1.0, "gradient steps per environment step", structural="how often a loop runs"
    )

    def check(self, algorithm: Any) -> None:
        """Refuses sizes that are not positive, and a fractional number of gradient steps."""
        require_positive(algorithm, "batch_size")
        require_not_negative(algorithm, "learning_starts")
        whole_updates(algorithm)


def whole_updates(algorithm: Any) -> int:
    """Gradient steps in one iteration: `updates_per_step` times the environment steps of all environments.

    Raises:
      FdgError: the product is not a whole number above zero.
    """
    rate, steps = algorithm.updates_per_step, algorithm.steps_per_iteration
    require(algorithm, not is_traced(rate), "updates_per_step cannot be a traced number")
    require_positive(algorithm, "updates_per_step")
    updates = rate * steps
    require(
        algorithm,
        0.5 < updates < 2**31 and math.isclose(round(updates), updates),
        f"updates_per_step={rate} times num_envs * num_steps={steps} makes {updates:g} updates an iteration:"
        " it must be a whole number above zero",
    )
    return round(updates)


@dataclasses.dataclass(frozen=True)
class ReplayChoice(Part):
    """How minibatches are sampled: uniformly, by priority, or by a user's buffer."""

    priority_exponent: float = hyperparameter(
        0.0, "alpha of prioritised replay; 0: uniform", structural="whether there are priorities"
    )
    importance_exponent: float = hyperparameter(
        0.4, "initial beta of prioritised replay; 1 at the end", only_with="priority_exponent"
    )
    replay: Any = own_value(
        "replay buffer: uniform, prioritized, hindsight, or module:name of a function of an"
        " algos.buffers.BufferSpec (None: as --priority-exponent)",
        "replay",
    )

    def check(self, algorithm: Any) -> None:
        """Refuses an importance exponent outside [0, 1], and two buffers at once."""
        registry.option("checks").check_replay(self, algorithm)

    def beta(self, iteration: jax.Array, num_iterations: int) -> jax.Array:
        """The exponent of importance weights in an iteration: `[]` float32."""
        return linear(self.importance_exponent, 1.0, num_iterations, iteration)

    def of(self, algorithm: Any, **sizes: Any) -> Any:
        """The algorithm's buffer: an `algos.replay.Replay`, or its subclass `kind`, with these `sizes`."""
        sizes = {**getattr(getattr(algorithm, "_memory", None), "replay", {}), **sizes}
        return sizes.pop("kind", registry.option("replay").Replay)(
            num_envs=algorithm.num_envs,
            discount=algorithm.discount,
            priority_exponent=self.priority_exponent,
            make=self.replay,
            env=None if self.replay is None else algorithm.env,
            **sizes,
        )


@dataclasses.dataclass(frozen=True)
class StepReplay(ReplayChoice):
    """`ReplayChoice` and the number of steps of n-step returns."""

    n_step: int = hyperparameter(1, "n of n-step returns")

    def check(self, algorithm: Any) -> None:
        """As in `ReplayChoice`; also refuses `n_step` below 1."""
        super().check(algorithm)
        require_positive(algorithm, "n_step")


def linear(
    start: float | jax.Array, end: float | jax.Array, duration: float | jax.Array, time: jax.Array
) -> jax.Array:
    """Interpolates linearly from `start` to `end` over `duration`, then stays at `end`: `[]` float32.

    >>> [float(linear(1.0, 0.5, 10.0, jnp.int32(time))) for time in (0, 5, 10, 99)]
    [1.0, 0.75, 0.5, 0.5]
    """
    if isinstance(duration, jax.Array):  # possibly traced
        is_positive = duration > 0
        safe_duration = jnp.where(is_positive, duration, 1.0)
        progress = jnp.where(is_positive, jnp.clip(time / safe_duration, 0.0, 1.0), 1.0)
    else:
        progress = jnp.clip(time / duration, 0.0, 1.0) if duration > 0 else jnp.float32(1.0)
    return start + (end - start) * progress


# --- exploration ---


@dataclasses.dataclass(frozen=True)
class ExplorerChoice(Part):
    """The user's exploration, if any."""

    explore: Any = own_value(
        "module:name of an exploration, an algos.Explorer (None: the algorithm's own)", "explorer"
    )


# --- memories ---


@dataclasses.dataclass(frozen=True)
class NetworkMemory(Part):
    """The kind of memory of a network, and its sizes."""

    memory: Literal["gru", "lstm", "mingru", "transformer"] | None = hyperparameter(
        None, "kind of memory: a GRU, an LSTM, ... (None: no memory)"
    )
    memory_size: int = hyperparameter(128, "width of the memory and the layer after it", only_with="memory")
    memory_window: int = hyperparameter(
        32, "context of a transformer in steps, with the current one", only_with="memory=transformer"
    )
    memory_layers: int = hyperparameter(1, "layers of a transformer", only_with="memory=transformer")
    memory_heads: int = hyperparameter(
        4, "heads of a transformer's attention", only_with="memory=transformer"
    )

    def check(self, algorithm: Any) -> None:
        """Refuses sizes that do not fit."""
        registry.option("checks").check_memory(self, algorithm)


@dataclasses.dataclass(frozen=True)
class MemoryChoice(NetworkMemory):
    """The kind of memory, and the lengths of the sequences that the network learns from."""

    sequence_length: int | None = hyperparameter(
        None,
        "length of stored and sampled sequences, for backpropagation through time; None: a whole"
        " rollout (with memory)",
        only_with="memory",
    )
    burn_in: int = hyperparameter(
        0,
        "steps before a sampled sequence that only recompute its memory, a multiple of sequence_length",
        only_with="memory",
    )


def memory_of(self: Any) -> Any:
    """The algorithm's networks with a memory, an `algos.sequences.MemoryNetworks`; None without a memory.

    The user's network may have a memory; the default networks have one with the setting `memory`.
    """
    if not hasattr(self, "memory_settings"):
        return None
    field = getattr(self, "network", None)
    network = None if field is None else registry.option("networks").user_network(self, "network", "actor")
    if self.memory is None if network is None else not hasattr(network, "unroll"):
        return None
    return registry.option("memory").memory_networks_of(self, network)


# --- acting ---


class State(NamedTuple):
    """The state of an algorithm with replay."""

    learned: Any  # everything that an update changes
    observation_statistics: Any  # None if observations are not normalised
    replay: Any  # `algos.replay.ReplayState`
    env_state: Any  # leading axis B
    observation: Observation  # [B, *obs]
    key: jax.Array
    iteration: jax.Array  # int32
    bonus: Any = None  # the state of `Agent.bonus`
    recollection: Any = None  # `algos.rollout.Recollection [B]`, if networks or the explorer have a memory
    returns: Any = (None, None)  # statistics of discounted returns, to scale rewards; running returns [B]


def initial_state(self: Any, learned: Any, env_state: Any, observation: Any, key: jax.Array) -> State:
    """The initial state, with a replay buffer for `observation [B, *obs]`."""
    recollection = initial_recollection(self, self.num_envs)
    stored_memory = () if self._memory is None else (recollection.memory.network,)
    return State(
        learned=learned,
        observation_statistics=self.normalizers.begin(self.env.observation_space),
        replay=self.buffer.init(observation, zero_actions(self, self.num_envs), *stored_memory),
        env_state=env_state,
        observation=observation,
        key=key,
        iteration=jnp.int32(0),
        bonus=self._initial_bonus_state(observation, key),
        recollection=recollection,
        returns=self.normalizers.begin_returns((self.num_envs,)),
    )


class ActorMemory(NamedTuple):
    """The memories of an actor that learns from replay."""

    network: Any  # [B, ...]; None for a feed-forward network
    explorer: Any  # [B, ...]; None without an `algos.Explorer`


def network_memory(memory: Any) -> Any:
    """The network's part of an actor's memory, without an explorer's part."""
    return memory.network if isinstance(memory, ActorMemory) else memory


def initial_recollection(self: Any, num_envs: int) -> Any:
    """The initial memories of network and explorer, `[B]`; None if neither has one."""
    explore = self.explorer.explore
    if self._memory is None and explore is None:
        return None
    network = None if self._memory is None else self._memory.begin(num_envs)
    explorer = None if explore is None else by_name("--explore", explore).init(zero_actions(self, num_envs))
    return Recollection(ActorMemory(network, explorer), jnp.ones(num_envs, bool))


def zero_actions(self: Any, num_envs: int) -> jax.Array:
    """Zero actions `[B, *action]`, with the shape and dtype in which fragments pass actions."""
    space = self.env.action_space
    return jnp.zeros((num_envs, *space.shape), jnp.float32 if isinstance(space, Box) else jnp.int32)


def compute_actions(
    self: Any, parameters, statistics, observation, recollection, keys, amount, greedy: bool = False
) -> tuple[jax.Array, Any]:
    """Actions `[B, *action]` for `observation [B, *obs]` and `keys [B]`, and the next memory.

    `parameters` are the actor's. `amount` scales exploration; for an `Explorer` it is the progress.
    """
    inputs = self.normalizers.seen(statistics, observation)
    memory: Any = None if recollection is None else recollection.memory
    if self._memory is None:
        policy = self._policy(parameters, inputs)
    else:
        sequences = self._memory.as_sequences(inputs, recollection)
        policy = self._policy(self._memory.actor_parameters(parameters), sequences)
        memory = memory._replace(network=self._memory.next_memory(parameters, sequences))
    if greedy:
        return policy.mode(), memory
    explore = self.explorer.explore
    if explore is None:
        return self._sample_actions(policy, amount, keys), memory
    explorer, action = registry.option("checks").apply_explorer(
        explore, memory.explorer, policy, recollection.start, keys, amount
    )
    return action, memory._replace(explorer=explorer)


def collect(
    self: Any, state: Any, act: Callable[..., tuple[jax.Array, Any]], key: jax.Array
) -> tuple[Any, Any, dict[str, Any], dict[str, jax.Array]]:
    """Steps all environments `num_steps` times.

    `act`: `(observation [B], recollection [B], keys [B]) -> (action [B], memory [B])`.

    Returns rows `[T, B]` for `Replay.add`, or sequences `[C, B]` (C per environment); the observations
    `[T, B, *obs]` before each action; changed fields of the state; and metrics.
    """
    length = getattr(self.buffer, "sequence_length", None)
    one_sequence = length == self.num_steps  # if so, only the memory before the rollout is stored

    def act_and_record(observation: Any, recollection: Any, keys: jax.Array) -> tuple[Any, Any, Any]:
        action, memory = act(observation, recollection, keys)
        if length is None:
            return action, (None, None), memory
        before = None if one_sequence else network_memory(recollection.memory)
        return action, (before, recollection.start), memory

    env_state, observation, recollection, (observations_and_actions, (before, start), time_steps) = (
        rollout_with_memory(
            act_and_record,
            key=key,
            env_state=state.env_state,
            observation=state.observation,
            recollection=state.recollection,
            **self._rollout_arguments,
        )
    )
    if one_sequence:
        before = jax.tree.map(lambda x: x[None], network_memory(state.recollection.memory))
    elif length is not None:
        before = jax.tree.map(lambda x: x[::length], before)
    bonus, time_steps, bonus_metrics = self._add_bonus(state.bonus, time_steps)
    steps = registry.option("replay").Step.of(*observations_and_actions, time_steps)
    new_fields = {
        "env_state": env_state,
        "observation": observation,
        "recollection": recollection,
        "bonus": bonus,
        "returns": registry.option("running").update_returns(self, state.returns, time_steps),
    }
    rows = self.buffer.as_rows(before, start, steps)
    return rows, observations_and_actions[0], new_fields, {**episode_metrics(time_steps), **bonus_metrics}


def transform_and_scale(self: Any, state: Any, rows: Any, learned: Any, key: jax.Array) -> Any:
    """Applies the user's transform to rows `[U, N]` from replay, and divides rewards by returns' deviation.

    The buffer stores unscaled rewards, so that all rewards of a minibatch are divided by the same deviation.
    """
    rows = self.transforming.rows(rows, learned, key)
    return_statistics, _ = state.returns
    if return_statistics is None:
        return rows
    return registry.option("running").scale_row_rewards(return_statistics, rows, self.buffer)


def make_actor(self: Any, state: State, parameters: Any, amount: jax.Array) -> Actor:
    """An actor with these `parameters`; `amount` as in `compute_actions`."""

    def initial_memory(num_envs):
        recollection = initial_recollection(self, num_envs)
        return () if recollection is None else recollection.memory

    def act(memory, observation, start, keys, greedy):
        recollection = None if memory == () else Recollection(memory, start)
        statistics = state.observation_statistics
        action, next_memory = compute_actions(
            self, parameters, statistics, observation, recollection, keys, amount, greedy
        )
        return self._for_environment(action), memory if recollection is None else next_memory

    return Actor(initial_memory, act)
