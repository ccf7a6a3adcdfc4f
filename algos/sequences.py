"""Replay of sequences of steps, with the memory that the actor had before each sequence.

It is for networks with a memory and for n-step targets. A rollout is cut into sequences, which are stored and
sampled whole with the memory at their start (the "stored state" of R2D2; Kapturowski et al. 2019, "Recurrent
Experience Replay in Distributed Reinforcement Learning", ICLR, section 3). All else is as in
`algos/replay.py`: each environment has a ring buffer, here of sequences.

A loss over transitions also learns from sequences: `SequenceReplay.transitions` flattens the steps of all
sequences to rows `[N * L]`, and `over_sequences` converts a network with a memory to a network of such rows.

Shapes: `B` environments, `N` sequences, `K` steps of burn-in, `L` steps after the burn-in, `T` steps of a
rollout (or `K + L`), `C = T / L` sequences of a rollout.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from algos import distributions
from algos.buffers import n_step_sums
from algos.checks import check_recurrent_values
from algos.layers import features, with_widths
from algos.memories import MemoryKind, MemoryTrunk, RecurrentNetwork, merge_axes, of_module, step_types
from algos.networks import Bound, actor_features, critic_outputs, with_precision
from algos.replay import Replay, ReplayState, Step, Transition, rows_at
from algos.replaying import network_memory
from algos.rings import time_first
from algos.rollout import Recollection
from algos.values import Layers, Network
from envs import MaskedObservation, Observation, features_and_mask
from envs.composite import ObservationSpace
from fdg.settings.fields import require, require_positive

# --- networks with a memory, over sequences ---


class ObservedSequences(NamedTuple):
    """Observations of sequences for `over_sequences`: `K` steps of burn-in, then `L` steps to learn from."""

    memory: Any  # [N, *memory], before the first step
    burn_in: Any  # (observation [N, K, *obs], start [N, K])
    observation: Observation  # [N, L, *obs]
    start: jax.Array  # [N, L] bool
    # [N, L, *obs], the observation after each n-step window; if set, outputs are at these observations.
    final: Any = None
    # [N, L] int32, the last step of each window, whose memory is used at `final`; None: one-step windows.
    last: Any = None

    def map_observations(self, function: Callable[[Any], Any]) -> "ObservedSequences":
        """Applies a function to all observations, but not to a burn-in without steps."""
        earlier, earlier_start = self.burn_in
        final = None if self.final is None else function(self.final)
        earlier = function(earlier) if earlier_start.shape[1] else earlier
        return self._replace(
            burn_in=(earlier, earlier_start), observation=function(self.observation), final=final
        )


def over_sequences(network: RecurrentNetwork, part: int | None = None) -> Network:
    """Converts a network with a memory to a feed-forward network of `ObservedSequences [N]`.

    `apply` returns an output for each step after the burn-in, `[N * L, ...]`. So a loss over transitions
    applies to sequences, and gradients flow through the memory from the first step after the burn-in on
    (R2D2, section 3). Further arguments, such as actions `[N * L, ...]`, reach `unroll` as `[T, B, ...]`.
    `part` is the index of this network's memory if several networks have one.
    """
    return Network(Bound(_init_rows, (network,)), Bound(_apply_over_sequences, (network, part)))


def _init_rows(network: RecurrentNetwork, key: jax.Array, *inputs: Any) -> Any:
    return network.init(key, *jax.tree.map(lambda x: x[None], inputs))


def _apply_over_sequences(
    network: RecurrentNetwork,
    part: int | None,
    parameters: Any,
    observed: ObservedSequences,
    *more: jax.Array,
) -> Any:
    if part is not None:
        observed = observed._replace(memory=observed.memory[part])
    count, length = observed.start.shape
    steps = [time_first(x.reshape(count, length, *x.shape[1:])) for x in more]
    output, memories = _unroll_observed(network, parameters, observed, *steps)
    if observed.final is None:
        return jax.tree.map(lambda x: merge_axes(time_first(x)), output)
    memories = jax.tree.map(time_first, memories)
    if observed.last is not None:
        memories = jax.tree.map(functools.partial(rows_at, index=observed.last), memories)
    final, memories = jax.tree.map(merge_axes, (observed.final, memories))
    no_start = jnp.zeros((1, count * length), bool)
    final = jax.tree.map(lambda x: x[None], final)
    *output, _ = network.unroll(parameters, memories, final, no_start, *(x[None] for x in more))
    outputs = jax.tree.map(lambda x: x[0], output)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _without_burn_in(memory: Any, observation: Any, start: jax.Array) -> Observation:
    empty_burn_in = jax.tree.map(lambda x: x[:, :0], (observation, start))
    return _with_row_masks(ObservedSequences(memory, empty_burn_in, observation, start))


def _with_row_masks(observed: ObservedSequences) -> Observation:
    """Separates action masks from features: the masks get one row for each step, `[N * L, ...]`."""
    earlier, earlier_start = observed.burn_in
    features, mask = features_and_mask(observed.observation)
    rows = observed._replace(observation=features, burn_in=(features_and_mask(earlier)[0], earlier_start))
    if observed.final is not None:
        final, mask = features_and_mask(observed.final)
        rows = rows._replace(final=final)
    return rows if mask is None else MaskedObservation(rows, merge_axes(mask))


def _unroll_observed(
    network: RecurrentNetwork, parameters: Any, observed: ObservedSequences, *more: Any
) -> tuple[Any, Any]:
    """Outputs `[L, N, ...]` of the steps after the burn-in, and the memory after each."""
    memory, (earlier, earlier_start) = observed.memory, observed.burn_in
    if earlier_start.shape[1]:
        fixed_parameters = jax.lax.stop_gradient(parameters)
        # Further inputs, such as actions, do not affect the memory; zeros take their place.
        zeros = [jnp.zeros((earlier_start.shape[1], *x.shape[1:]), x.dtype) for x in more]
        earlier = jax.tree.map(time_first, earlier)
        *_, memories = network.unroll(fixed_parameters, memory, earlier, time_first(earlier_start), *zeros)
        memory = jax.lax.stop_gradient(jax.tree.map(lambda x: x[-1], memories))
    observation = jax.tree.map(time_first, observed.observation)
    *output, memories = network.unroll(parameters, memory, observation, time_first(observed.start), *more)
    return output[0] if len(output) == 1 else tuple(output), memories


class ActorRecord(NamedTuple):
    """An actor with a memory records this at each step, for learning."""

    decision: Any  # [T, B], as `Trajectory.decision`
    start: jax.Array  # [T, B] bool: an episode starts at this step
    memory: Any  # [T, B, *memory], after the step


class RolloutSteps(NamedTuple):
    """The observations of a rollout, for `over_sequences`, with the axes `[T, B]` of a rollout."""

    memory: Any  # [1, B, *memory], before the first step
    observation: Observation  # [T, B, *obs]
    start: jax.Array  # [T, B] bool: an episode starts at this step

    def sequences(self) -> Observation:
        """Converts the rollout to `ObservedSequences [B]` without burn-in."""
        observation, start = jax.tree.map(time_first, (self.observation, self.start))
        return _without_burn_in(jax.tree.map(lambda x: x[0], self.memory), observation, start)


class Sequences(NamedTuple):
    """Stored or sampled sequences of `L` steps."""

    memory: Any  # [..., *memory], the actor's before the first step
    start: jax.Array  # [..., L] bool: an episode starts at this step
    steps: Step  # [..., L]; with several agents, rewards are `[..., L, A]`
    weight: Any = None  # as in `Transition`


@dataclasses.dataclass(frozen=True)
class SequenceReplay(Replay):
    """A replay buffer whose samples are `Sequences [N]`: `sample(...).transition`.

    Sizes count steps, as in `Replay`, except `batch_size`, which counts sequences. With burn-in, a sample is
    a stored sequence and the sequences before it, so samples overlap as in R2D2.

    `sequence_length` is L. `burn_in` is K, a multiple of L: the steps before a sequence that only recompute
    its memory.
    """

    sequence_length: int = 1
    burn_in: int = 0

    def __post_init__(self):
        require_positive(self, "sequence_length")
        require(
            self,
            self.burn_in >= 0 and self.burn_in % self.sequence_length == 0,
            f"burn_in={self.burn_in}: it must be a multiple of sequence_length={self.sequence_length}",
        )
        require(
            self,
            self.n_step <= self.sequence_length,
            f"n_step={self.n_step} is longer than sequence_length={self.sequence_length}: use at most that",
        )
        super().__post_init__()

    @property
    def steps_per_row(self) -> int:
        """The steps of a row of the buffer, which is a sequence."""
        return self.sequence_length

    @property
    def window(self) -> int:
        """Stored sequences in a sample: the burn-in, and one to learn from."""
        return 1 + self.burn_in // self.sequence_length

    def init(self, observation: Observation, action: Any, memory: Any = None) -> ReplayState:
        """An empty buffer for `observation [B, *obs]`, `action [B, *action]` and `memory [B, ...]`."""
        return self.init_of(memory, observation, action, jnp.zeros(self.num_envs, jnp.float32))

    def init_of(self, memory: Any, observation: Observation, action: Any, reward: jax.Array) -> ReplayState:
        """An empty buffer for steps `[B, ...]`; only their shapes and dtypes are used."""
        ended = jnp.zeros(self.num_envs, bool)
        steps = Step(observation, action, reward, ended, ended, observation)
        start, steps = jax.tree.map(lambda x: jnp.stack([x] * self.sequence_length, axis=1), (ended, steps))
        return self.init_of_rows(Sequences(memory, start, steps))

    def as_rows(self, memory: Any, start: jax.Array | None, steps: Step) -> Sequences:
        """Cuts a rollout into sequences `[C, B]`, for `add`.

        `memory [C, B, ...]` is the memory before each sequence; `start [T, B]` bool; `steps [T, B]`.
        """

        def sequences(x: jax.Array) -> jax.Array:
            x = x.reshape(-1, self.sequence_length, *x.shape[1:])
            return x.swapaxes(1, 2)

        return Sequences(memory, *jax.tree.map(sequences, (start, steps)))

    def map_observations(self, function: Callable[[Any], Any], minibatch: Sequences) -> Sequences:
        """Applies a function, such as normalisation, to the observations of a minibatch."""
        steps = minibatch.steps
        return minibatch._replace(
            steps=steps._replace(
                observation=function(steps.observation), final_observation=function(steps.final_observation)
            )
        )

    def transitions(
        self, minibatch: Sequences, weight: jax.Array | None
    ) -> tuple[Transition, jax.Array | None]:
        """Flattens sequences `[N]`, without the burn-in, to transitions `[N * L]`; repeats their weights.

        Observations become `ObservedSequences [N]`. An n-step window ends with the episode or sequence.
        """
        starts_and_steps = minibatch.start, minibatch.steps
        earlier_start, earlier = jax.tree.map(lambda x: x[:, : self.burn_in], starts_and_steps)
        start, steps = jax.tree.map(lambda x: x[:, self.burn_in :], starts_and_steps)
        ends = steps.terminated.T, steps.truncated.T
        sums = n_step_sums(steps.reward.T, *ends, self.discount, self.n_step)  # [L, N]
        observed = ObservedSequences(
            minibatch.memory, (earlier.observation, earlier_start), steps.observation, start
        )
        final, last = steps.final_observation, None
        if self.n_step > 1:
            last = sums.last.T
            final = jax.tree.map(functools.partial(rows_at, index=last), final)
        transition = Transition(
            observation=_with_row_masks(observed),
            action=steps.action.reshape(-1, *steps.action.shape[2:]),
            reward=sums.reward.T.reshape(-1),
            discount=sums.weight.T.reshape(-1),
            next_observation=_with_row_masks(observed._replace(final=final, last=last)),
        )
        if weight is not None:
            weight = jnp.repeat(weight, self.sequence_length)
        return transition, weight

    def transitions_and_keys(self, minibatch: Sequences, keys: jax.Array) -> tuple[Transition, jax.Array]:
        """Like `transitions`, with weights; `keys [K, N]` are split into keys for each step, `[K, N * L]`."""
        transition, weight = self.transitions(minibatch, minibatch.weight)
        step_keys = jax.vmap(jax.vmap(lambda key: jax.random.split(key, self.sequence_length)))(keys)
        return transition._replace(weight=weight), step_keys.reshape(len(keys), -1)

    def priority(self, error: jax.Array) -> jax.Array:
        """Priorities of sequences `[N]` from errors `[N * L]`: 0.9 max + 0.1 mean (R2D2, section 2.3)."""
        absolute = jnp.abs(error).reshape(-1, self.sequence_length)
        return 0.9 * jnp.max(absolute, axis=1) + 0.1 * jnp.mean(absolute, axis=1)

    def _minibatch_of_windows(self, windows: Sequences) -> Sequences:
        """Concatenates the sequences of windows `[B, N / B, w]`; keeps the memory before the first one."""

        def concatenate(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:2], -1, *x.shape[4:])

        if self.window == 1:
            return jax.tree.map(lambda x: x[:, :, 0], windows)
        start, steps = jax.tree.map(concatenate, (windows.start, windows.steps))
        return Sequences(jax.tree.map(lambda x: x[:, :, 0], windows.memory), start, steps)

    @property
    def _window_setting(self) -> str:
        return f"sequence_length={self.sequence_length}"


# --- acting and learning with a memory ---


class Head(NamedTuple):
    """The head of a default network with a memory."""

    outputs: int
    scale: float = 1.0  # of initial weights
    dueling: tuple[int, ...] | None = None  # numbers of actions of each choice
    takes_actions: bool = False  # a pair of critics, which also take actions


@dataclasses.dataclass(frozen=True)
class MemoryNetworks:
    """Networks with a memory: a single one, or an actor and critics.

    With several networks, memories are tuples, one entry for each network. Acting advances the critics'
    memories too, since replay stores them.
    """

    networks: tuple[RecurrentNetwork, ...]
    action: tuple[int, ...]  # shape of an action
    sequence_length: int
    burn_in: int

    @property
    def replay(self) -> dict[str, Any]:
        """Arguments of `ReplayChoice.of`, for sequences."""
        return {"kind": SequenceReplay, "sequence_length": self.sequence_length, "burn_in": self.burn_in}

    def begin(self, num_envs: int) -> Any:
        """The initial memory, `[B, ...]`."""
        memories = tuple(network.memory(num_envs) for network in self.networks)
        return memories if self._has_critics else memories[0]

    def network(self, part: int) -> Network:
        """The network at index `part`, over rows of sequences."""
        return over_sequences(self.networks[part], part if self._has_critics else None)

    def actor_parameters(self, parameters: Any) -> Any:
        """The actor's parameters, or those of the only network."""
        return parameters[0] if self._has_critics else parameters

    def as_sequences(self, observation: Any, recollection: Recollection) -> Observation:
        """Observations `[B, *obs]` as sequences of one step, each with its memory."""
        first, start = jax.tree.map(lambda x: x[:, None], (observation, recollection.start))
        return _without_burn_in(network_memory(recollection.memory), first, start)

    def next_memory(self, parameters: Any, sequences: Observation) -> Any:
        """The memory `[B, ...]` after observations, as from `as_sequences`."""
        features, _ = features_and_mask(sequences)
        if not self._has_critics:
            return _last_step(_unroll_observed(self.networks[0], parameters, features)[1])
        # Actions do not affect a critic's memory.
        zero_actions = jnp.zeros((1, len(features.start), *self.action), jnp.float32)
        parts = zip(self.networks, parameters, features.memory, ((), (zero_actions,)), strict=True)
        return tuple(
            _last_step(
                _unroll_observed(network, network_parameters, features._replace(memory=memory), *more)[1]
            )
            for network, network_parameters, memory, more in parts
        )

    def prepare_rollout(self, trajectory: Any, memory: Any) -> Any:
        """Converts a rollout `[T, B]` with an `ActorRecord` as decision, for learning.

        The observations become `RolloutSteps` that begin with the `memory [B]`. Each final observation
        becomes a sequence of one step, with the memory after the step.
        """
        decision, start, after = trajectory.decision
        steps = RolloutSteps(jax.tree.map(lambda x: x[None], memory), trajectory.observation, start)
        final = trajectory.time_step.final_observation
        final = jax.vmap(self.as_sequences)(final, Recollection(after, jnp.zeros_like(start)))
        time_step = trajectory.time_step._replace(final_observation=final)
        return trajectory._replace(observation=steps, decision=decision, time_step=time_step)

    def check(self, parameters: Any, state: Any, outputs: int) -> None:
        """Raises an `FdgError` if `unroll` does not return `outputs` numbers per step, and a memory."""
        types = step_types(self.networks[0], parameters, state, state.recollection.memory.network)
        check_recurrent_values(types, outputs, (1, len(state.recollection.start)))

    @property
    def _has_critics(self) -> bool:
        return len(self.networks) > 1


def memory_networks_of(algorithm: Any, network: RecurrentNetwork | None) -> MemoryNetworks:
    """The user's `network` with a memory, or default networks for the algorithm's `_heads`."""
    require(
        algorithm,
        all(getattr(algorithm, name, None) is None for name in ("actor_network", "critic_network")),
        f"memory={algorithm.memory}: networks of your own have none; leave it None",
    )
    if hasattr(algorithm, "_heads"):
        heads = algorithm._heads
    else:  # an actor and critics
        size = algorithm._outputs_per_component * math.prod(algorithm.env.action_space.shape)
        heads = Head(size, scale=0.01), Head(critic_outputs(algorithm), takes_actions=True)
    networks = [network] if network else [_default_network(algorithm, head) for head in heads]
    return MemoryNetworks(
        tuple(with_precision(algorithm, network) for network in networks),
        algorithm.env.action_space.shape,
        algorithm.sequence_length or algorithm.num_steps,
        algorithm.burn_in,
    )


def _default_network(algorithm: Any, head: Head) -> RecurrentNetwork:
    kind = MemoryKind.of(algorithm.memory_settings, algorithm.memory)
    layers, space = algorithm.layers, algorithm.env.observation_space
    hidden = (kind.size,) if layers.hidden is None else layers.hidden
    layers = with_widths(dataclasses.replace(layers, hidden=hidden), space)
    if head.takes_actions:
        return of_module(_MemoryCritics(space, head.outputs, layers, kind))
    return of_module(_MemoryNetwork(space, head.outputs, layers, kind, head.scale, head.dueling))


def _last_step(memories: Any) -> Any:
    return jax.tree.map(lambda x: x[-1], memories)


# --- default networks with a memory: DQN, SAC and TD3 ---


class _MemoryNetwork(nn.Module):
    """Dense layers, a memory, a dense layer and a head: `(output [T, B, n], memories)`.

    `privileged` observations are not used. `dueling`: the head outputs a value, and each choice's advantages.
    """

    observation_space: ObservationSpace
    outputs: int
    layers: Layers
    memory_kind: MemoryKind
    scale: float
    dueling: tuple[int, ...] | None

    @nn.compact
    def __call__(self, memory: Any, observation: Any, start: jax.Array) -> tuple[jax.Array, Any]:
        flat = jax.tree.map(merge_axes, observation)
        inputs = actor_features(flat, self.observation_space, self.layers.convolve)
        outputs = self.outputs + (self.dueling is not None)
        trunk = MemoryTrunk(self.layers, self.memory_kind, outputs, self.scale, name="trunk")
        output, memories = trunk(memory, inputs, start)
        return distributions.dueling(output, self.dueling) if self.dueling else output, memories

    def initial_memory(self, num_envs: int) -> Any:
        return self.memory_kind.empty((num_envs,))


class _MemoryCritics(nn.Module):
    """Two critics, each with a memory: two values `[T, B]` or `[T, B, n]`, and the memories.

    Actions are inputs of the layers after the memory, so the memory does not depend on them.
    """

    observation_space: ObservationSpace
    outputs: int
    layers: Layers
    memory_kind: MemoryKind

    @nn.compact
    def __call__(self, memory: Any, observation: Any, start: jax.Array, action: jax.Array) -> Any:
        flat = jax.tree.map(merge_axes, observation)
        inputs = features(flat, self.observation_space, self.layers.convolve)
        action = action.reshape(start.size, -1)

        def critic(name: str, memory: Any) -> tuple[jax.Array, Any]:
            trunk = MemoryTrunk(self.layers, self.memory_kind, self.outputs, 1.0, name=name)
            value, memory = trunk(memory, inputs, start, action)
            return value.reshape(start.shape) if self.outputs == 1 else value, memory

        first, first_memory = critic("critic_1", memory[0])
        second, second_memory = critic("critic_2", memory[1])
        return first, second, (first_memory, second_memory)

    def initial_memory(self, num_envs: int) -> Any:
        return (self.memory_kind.empty((num_envs,)),) * 2
