"""Memories for learners from replay: their settings, and the networks of DQN, SAC and TD3 with a memory.

R2D2 (Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement Learning", ICLR):
the memory before each stored sequence is kept with it, and a burn-in brings it up to date before a gradient
flows.

Letters in shapes: `T` steps, `B` environments, `n` outputs, `D` components of an action.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from algos import distributions
from algos.layers import Layers, checked_widths, features, head, hidden_layers
from algos.memories import MemoryKind, MemorySizes
from algos.networks import actor_features
from algos.recurrent import MemoryTrunk, RecurrentNetwork
from algos.sequences import SequenceReplay
from envs.composite import ObservationSpace
from fdg.settings.fields import hyperparameter, require, require_positive


@dataclasses.dataclass(frozen=True)
class SequenceMemory(MemorySizes):
    """A memory, and the sequences that it learns from."""

    memory: Literal["gru", "lstm", "mingru", "transformer"] | None = hyperparameter(
        None, "what the network remembers by: a GRU, an LSTM, ... (None: nothing)"
    )
    sequence_length: int | None = hyperparameter(
        None,
        "steps that are stored and drawn together, and a gradient flows through; None: a whole rollout"
        " (with memory)",
        only_with="memory",
    )
    burn_in: int = hyperparameter(
        0,
        "steps before a drawn sequence that only bring its memory up to date, a multiple of sequence_length",
        only_with="memory",
    )

    @property
    def kind(self) -> MemoryKind | None:
        """The memory; None without one."""
        return None if self.memory is None else self.of(self.memory)

    def check(self, algorithm: Any) -> None:
        """Refuses sizes that do not fit."""
        require_positive(algorithm, "memory_size")
        _ = self.kind
        length, steps = self.sequence_length, algorithm.num_steps
        require(
            algorithm,
            length is None or (length > 0 and steps % length == 0),
            f"sequence_length={length} does not divide num_steps={steps}: choose a divisor",
        )
        require(algorithm, self.burn_in >= 0, f"burn_in={self.burn_in}: it is below zero")

    def sizes(self, algorithm: Any, remembers: bool) -> dict[str, Any]:
        """Arguments of `ReplayChoice.of` for a network that remembers, or does not."""
        if not remembers:
            return {}
        length = self.sequence_length or algorithm.num_steps
        return {"kind": SequenceReplay, "sequence_length": length, "burn_in": self.burn_in}


def remembering_trunk(
    observation_space: ObservationSpace,
    outputs: int,
    layers: Layers,
    memory: MemoryKind,
    scale: float = 1.0,
    dueling: tuple[int, ...] | None = None,
) -> RecurrentNetwork:
    """Dense layers, a memory, a dense layer and a head: `unroll` gives `(output [T, B, n], memories)`.

    Args:
      observation_space: what is `privileged` is not seen.
      outputs: n.
      layers: without widths, one layer as wide as the memory.
      memory: its kind and size.
      scale: of the head's first weights.
      dueling: numbers of actions of each choice; the head gives a value and advantages of these.

    >>> from envs.spaces import Box
    >>> network = remembering_trunk(Box(-1.0, 1.0, (4,)), 2, Layers(activation="relu"), MemoryKind(size=16))
    >>> observation, start = jnp.zeros((5, 8, 4)), jnp.zeros((5, 8), bool)
    >>> parameters = jax.eval_shape(network.init, jax.random.key(0), observation)
    >>> output, memories = jax.eval_shape(network.unroll, parameters, network.memory(8), observation, start)
    >>> output.shape, memories.shape
    ((5, 8, 2), (5, 8, 16))
    """
    widths = _sized(observation_space, layers, memory)
    module = _Remembering(observation_space, outputs, widths, memory, scale, dueling)
    return _network(module, _Empty(memory))


def remembering_critics(
    observation_space: ObservationSpace, outputs: int, layers: Layers, memory: MemoryKind
) -> RecurrentNetwork:
    """Two critics, each with a memory of the observations; actions join after it.

    `unroll(parameters, memory, observation [T, B, *obs], start [T, B], action [T, B, *action])` gives two
    values, each `[T, B]` (or of several `outputs` `[T, B, n]`), and memories. So a critic values any action
    at a step by one memory.
    """

    widths = _sized(observation_space, layers, memory)
    module = _RememberingCritics(observation_space, outputs, widths, memory)
    return _network(module, _Empty(memory, twice=True))


def _sized(space: ObservationSpace, layers: Layers, memory: MemoryKind) -> Layers:
    hidden = (memory.size,) if layers.hidden is None else layers.hidden
    widths = checked_widths(space, hidden, layers.activation, layers.convolve)
    return dataclasses.replace(layers, hidden=widths)


def _inputs(observation: Any, start: jax.Array, seen: Callable[[Any], Any]) -> Any:
    """Features of observations `[T, B, *obs]`, which layers take as rows."""
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), observation)
    return jax.tree.map(lambda x: x.reshape(*start.shape, *x.shape[1:]), seen(flat))


class _Remembering(nn.Module):
    observation_space: ObservationSpace
    outputs: int
    layers: Layers
    remembers: MemoryKind
    scale: float
    dueling: tuple[int, ...] | None

    @nn.compact
    def __call__(self, memory: Any, observation: Any, start: jax.Array) -> tuple[jax.Array, Any]:
        space, convolve = self.observation_space, self.layers.convolve
        inputs = _inputs(observation, start, lambda flat: actor_features(flat, space, convolve))
        outputs = self.outputs + (self.dueling is not None)
        trunk = MemoryTrunk(self.layers, self.remembers, outputs, self.scale, name="trunk")
        output, memories = trunk(memory, inputs, start)
        return distributions.dueling(output, self.dueling) if self.dueling else output, memories


class _RememberingCritics(nn.Module):
    observation_space: ObservationSpace
    outputs: int
    layers: Layers
    remembers: MemoryKind

    @nn.compact
    def __call__(self, memory: Any, observation: Any, start: jax.Array, action: jax.Array) -> Any:
        space, convolve = self.observation_space, self.layers.convolve
        inputs = _inputs(observation, start, lambda flat: features(flat, space, convolve))
        action = action.reshape(start.size, -1)
        critics = [
            _RememberingCritic(self.layers, self.remembers, self.outputs, name=name)
            for name in ("critic_1", "critic_2")
        ]
        found = [critic(one, inputs, start, action) for critic, one in zip(critics, memory, strict=True)]
        (first, after_first), (second, after_second) = found
        return first, second, (after_first, after_second)


class _RememberingCritic(nn.Module):
    layers: Layers
    remembers: MemoryKind
    outputs: int

    @nn.compact
    def __call__(self, memory: Any, inputs: Any, start: jax.Array, action: jax.Array) -> Any:
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), inputs)
        x = hidden_layers(rows, self.layers, self.layers.hidden or ())
        out, memory = self.remembers.module()(memory, x.reshape(*start.shape, -1), start)
        size = self.remembers.size
        x = jnp.concatenate([out.reshape(-1, size), action], axis=-1)
        value = head(hidden_layers(x, self.layers, (size,)), self.outputs, 1.0)
        shape = start.shape if self.outputs == 1 else (*start.shape, self.outputs)
        return value.reshape(shape), memory


# Values and not closures, so that equal modules make equal networks.
@dataclasses.dataclass(frozen=True)
class _Empty:
    memory: MemoryKind
    twice: bool = False

    def __call__(self, num_envs: int) -> Any:
        empty = self.memory.empty((num_envs,))
        return (empty, empty) if self.twice else empty


@dataclasses.dataclass(frozen=True)
class _Init:
    module: nn.Module
    empty: _Empty

    def __call__(self, key: jax.Array, observation: Any, *more: jax.Array) -> Any:
        steps, count = jax.tree.leaves(observation)[0].shape[:2]
        start = jnp.zeros((steps, count), bool)
        return self.module.init(key, self.empty(count), observation, start, *more)["params"]


@dataclasses.dataclass(frozen=True)
class _Unroll:
    module: nn.Module

    def __call__(self, parameters: Any, memory: Any, observation: Any, start: jax.Array, *more: Any) -> Any:
        return self.module.apply({"params": parameters}, memory, observation, start, *more)


def _network(module: nn.Module, empty: _Empty) -> RecurrentNetwork:
    return RecurrentNetwork(_Init(module, empty), empty, _Unroll(module))
