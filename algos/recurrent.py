"""Networks with a memory, and the default ones: of actor-critics, of one agent or of several, and of learners
from replay (`algos.memories` has the memories).

The memory is given and returned, never hidden: whoever acts carries it from step to step, and whoever learns
unrolls it over a sequence. Where an episode starts, the network forgets by itself.

Letters in shapes: `T` steps, `B` environments, `A` agents, `N` memories, `n` outputs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from algos import distributions
from algos.layers import (
    Activation,
    Layers,
    PolicyLayers,
    Torso,
    checked_widths,
    features,
    head,
    hidden_layers,
)
from algos.memories import MemoryKind
from algos.networks import Network, actor_and_critic_features, actor_features
from envs import features_and_mask
from envs.composite import ObservationSpace
from envs.spaces import Box, Space
from fdg.settings.fields import float_or_array


class Output(NamedTuple):
    """What a network makes of a sequence."""

    policy: jax.Array  # [T, B, P] float32, the parameters of a distribution over actions
    value: jax.Array  # [T, B] float32
    memory: Any  # [T, B, ...], after each step


class AgentValues(NamedTuple):
    """What a network that values actions makes of a sequence."""

    values: jax.Array  # [T, B, A, n] float32, of every action of each agent, allowed or not
    memory: Any  # [T, B, ...], after each step


class RecurrentNetwork(NamedTuple):
    """A network with a memory, as three pure functions.

    - `init(key, observation [T, B, *obs]) -> parameters`; of the observation only shape and dtype count.
    - `memory(B) -> memory`: what it remembers before anything was seen; a pytree with leading axis `B`.
    - `unroll(parameters, memory, observation [T, B, *obs], start [T, B]) -> Output`: one step after another.
      Where `start` is true an episode begins, and what the memory held before counts for nothing.

    Networks made by `recurrent_actor_critic` are equal, and hash alike, if their arguments were.
    """

    init: Callable[[jax.Array, Any], Any]
    memory: Callable[[int], Any]
    unroll: Callable[[Any, Any, Any, jax.Array], Any]

    @staticmethod
    def described() -> str:
        """What messages call it."""
        return "an algos.RecurrentNetwork(init, memory, unroll)"


def recurrent_actor_critic(
    observation_space: ObservationSpace,
    action_space: Space,
    hidden: Sequence[int] | None = None,
    memory_size: int | None = 128,
    activation: Activation = "tanh",
    initial_log_std: float | jax.Array = 0.0,
    num_agents: int | None = None,
    central: bool = False,
    convolve: bool = True,
    layer_norm: bool = False,
    torso: Torso = "dense",
    memory: MemoryKind | None = None,
) -> RecurrentNetwork:
    """An actor and a critic that share nothing, each with a memory of its own.

    Dense layers (after a convolution, of an image), a memory, one more dense layer, and a head: with a gated
    recurrent unit (GRU; Cho et al. 2014, arXiv 1406.1078) the architecture of JaxMARL's and PureJaxRL's
    recurrent agents. Scales of the kernels as in `networks.actor_critic`.

    Args:
        observation_space, action_space: of one agent, as for `networks.actor_critic`.
        hidden: widths of the dense layers before the memory. Default: `(memory_size,)`.
        memory_size: width of the memory, and of the layer after it. None: no memory and no layer after it, so
            that the rest is `networks.actor_critic`, with the same default for `hidden`.
        activation: "tanh", "relu", "silu", "gelu" or "elu"; after every layer but the heads.
        initial_log_std: for a `Box` action space.
        num_agents: `A`. Observations are then `[T, B, A, *obs]` and results `[T, B, A, ...]`; all agents have
            the same parameters, and each a memory of its own. Default: one agent, and no axis `A`.
        central: one critic sees the observations of all agents side by side, and gives a value for each.
        convolve, layer_norm, torso: as for `networks.actor_critic`.
        memory: another kind than a GRU, whose `size` is then `memory_size`.

    >>> network = recurrent_actor_critic(Box(-1.0, 1.0, (4,)), distributions.Discrete(2), memory_size=16)
    >>> observation = jnp.zeros((5, 8, 4))
    >>> parameters = jax.eval_shape(network.init, jax.random.key(0), observation)
    >>> start = jnp.zeros((5, 8), bool)
    >>> output = jax.eval_shape(network.unroll, parameters, network.memory(8), observation, start)
    >>> output.policy.shape, output.value.shape, output.memory.actor.shape
    ((5, 8, 2), (5, 8), (5, 8, 16))
    """
    distributions.for_space(action_space)  # refuses a space without distribution here, before any tracing
    if memory_size is None:
        memory = None
    else:
        memory = dataclasses.replace(memory or MemoryKind(), size=memory_size)
        hidden = (memory_size,) if hidden is None else hidden
    widths = checked_widths(observation_space, hidden, activation, convolve)
    module = RecurrentActorCritic(
        observation_space,
        action_space,
        PolicyLayers(widths, activation, convolve, layer_norm, torso, float_or_array(initial_log_std)),
        memory,
        num_agents,
        central,
    )
    return of_module(module)


def of_module(module: Any) -> RecurrentNetwork:
    """A module of Linen of `(memory, observation, start)`, with a method `nothing_yet(B) -> memory`."""
    return RecurrentNetwork(_Init(module), _NothingYet(module), _Unroll(module))


def without_memory(network: Network, leading_axes: int = 2, actor_critic: bool = True) -> RecurrentNetwork:
    """A feed-forward network as one with a memory, which is empty: every step is worked out on its own.

    `network.apply` sees all steps at once, `[B * T, *obs]`. Of equal networks the results are equal.

    Args:
        network: whose `apply` gives `(policy [N, P], value [N])`, as that of `networks.actor_critic` does.
        leading_axes: of observations `[T, B, *obs]`; 3 for those of several agents, `[T, B, A, *obs]`.
      actor_critic: False: `apply` gives values of actions, `[N, n]`, and `unroll` gives `AgentValues`.

    >>> import algos.networks, envs
    >>> feed_forward = algos.networks.actor_critic(Box(-1.0, 1.0, (4,)), envs.Discrete(2))
    >>> network = without_memory(feed_forward)
    >>> observation = jnp.zeros((5, 8, 4))
    >>> parameters = jax.eval_shape(network.init, jax.random.key(0), observation)
    >>> start = jnp.zeros((5, 8), bool)
    >>> output = jax.eval_shape(network.unroll, parameters, network.memory(8), observation, start)
    >>> output.policy.shape, output.value.shape, output.memory
    ((5, 8, 2), (5, 8), ())
    """
    unroll = _UnrollSteps(network, leading_axes, actor_critic)
    return RecurrentNetwork(_InitOfSteps(network, leading_axes), _no_memory, unroll)


def with_memory(network: RecurrentNetwork | Network | None, leading_axes: int = 2) -> RecurrentNetwork | None:
    """A network of either kind as one with a memory; None stays None. Arguments as for `without_memory`."""
    return without_memory(network, leading_axes) if isinstance(network, Network) else network


def step_types(network: RecurrentNetwork, parameters: Any, state: Any, memory: Any = None) -> Any:
    """Shapes and dtypes of what `unroll` returns for the next step of a state's environments.

    `memory`: the network's; None for that of `state.recollection`.
    """
    steps = features_and_mask(state.observation)[0], state.recollection.start
    steps = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), steps)
    memory = state.recollection.memory if memory is None else memory
    return jax.eval_shape(network.unroll, parameters, memory, *steps)


class Memory(NamedTuple):
    """What actor and critic remember; of a network without memory, two empty tuples."""

    actor: Any  # [B, ...] or [B, A, ...], of a GRU `[..., H]` float32
    critic: Any  # the same; a central critic has one memory for all agents, [B, ...]


class RecurrentActorCritic(nn.Module):
    """Two separate trunks, each with a memory (see `recurrent_actor_critic`)."""

    observation_space: ObservationSpace
    action_space: Space
    layers: PolicyLayers
    remembers: MemoryKind | None
    num_agents: int | None
    central: bool

    @nn.compact
    def __call__(self, memory: Memory, observation: Any, start: jax.Array) -> Output:  # noqa: D102
        steps, num_envs = start.shape
        agents = self.num_agents or 1
        each = (steps, num_envs) if self.num_agents is None else (steps, num_envs, agents)
        # All samples in one row, as the network's first layers take them; environment-major, as everywhere.
        flat = jax.tree.map(lambda x: x.reshape(math.prod(each), *x.shape[len(each) :]), observation)
        seen, all_of_it = actor_and_critic_features(flat, self.observation_space, self.layers.convolve)

        def by_agent(inputs: Any) -> Any:
            return jax.tree.map(lambda x: x.reshape(steps, num_envs * agents, *x.shape[1:]), inputs)

        start_of_agents = jnp.repeat(start, agents, axis=1)

        outputs = distributions.for_space(self.action_space).size
        if isinstance(self.action_space, Box):
            outputs //= 2  # the means; the logs of the standard deviations follow below
        trunk = functools.partial(MemoryTrunk, self.layers, self.remembers)
        actor, actor_memory = trunk(outputs=outputs, head_scale=0.01, name="actor")(
            _merge(memory.actor, each[1:]), by_agent(seen), start_of_agents
        )
        if isinstance(self.action_space, Box):
            log_std = self.param("log_std", nn.initializers.constant(self.layers.initial_log_std), (outputs,))
            actor = jnp.concatenate([actor, jnp.broadcast_to(log_std, actor.shape)], axis=-1)
        if self.central:
            team = jax.tree.map(
                lambda x: _side_by_side(x.reshape(steps, num_envs, agents, *x.shape[1:])), all_of_it
            )
            value, critic_memory = trunk(outputs=agents, head_scale=1.0, name="critic")(
                memory.critic, team, start
            )
        else:
            value, critic_memory = trunk(outputs=1, head_scale=1.0, name="critic")(
                _merge(memory.critic, each[1:]), by_agent(all_of_it), start_of_agents
            )
            critic_memory = _split(critic_memory, each)
        return Output(
            policy=actor.reshape(*each, -1),
            value=value.reshape(each),
            memory=Memory(_split(actor_memory, each), critic_memory),
        )

    def nothing_yet(self, num_envs: int) -> Memory:
        """The memory before anything was seen."""
        if self.remembers is None:
            return Memory((), ())
        of_all = (num_envs,)
        of_each = of_all if self.num_agents is None else (num_envs, self.num_agents)
        return Memory(
            self.remembers.empty(of_each), self.remembers.empty(of_all if self.central else of_each)
        )


class MemoryTrunk(nn.Module):
    """Dense layers, a memory, a dense layer and a head, over a sequence.

    `memory [N, ...]`, `inputs [T, N, F]` (or images, `[T, N, H, W, C]`, or several) and `start [T, N]` to
    results `[T, N, outputs]` and the memory after each step, `[T, N, ...]`.
    """

    layers: Layers
    remembers: MemoryKind | None
    outputs: int
    head_scale: float

    @nn.compact
    def __call__(self, memory: Any, inputs: Any, start: jax.Array) -> tuple[jax.Array, Any]:  # noqa: D102
        sequence = start.shape
        # Only the memory may go step by step; all layers before and after it take the whole sequence at once.
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), inputs)
        x = hidden_layers(rows, self.layers, self.layers.hidden or ())
        if self.remembers is not None:
            size = self.remembers.size
            out, memory = self.remembers.module()(memory, x.reshape(*sequence, -1), start)
            x = hidden_layers(out.reshape(-1, size), self.layers, (size,))
        x = head(x, self.outputs, self.head_scale, self.layers.torso)
        return x.reshape(*sequence, self.outputs), memory


def _side_by_side(inputs: jax.Array) -> jax.Array:
    """`[T, B, A, ..., F]` to `[T, B, ..., A * F]`: along the channels of images."""
    return jnp.concatenate([inputs[:, :, a] for a in range(inputs.shape[2])], axis=-1)


def _merge(memory: Any, leading: tuple[int, ...]) -> Any:
    """`[B, A, ...]` to `[B * A, ...]`; `[B, ...]` as it is."""
    return jax.tree.map(lambda x: x.reshape(math.prod(leading), *x.shape[len(leading) :]), memory)


def _split(memories: Any, each: tuple[int, ...]) -> Any:
    """`[T, B * A, ...]` to `[T, B, A, ...]`."""
    return jax.tree.map(lambda x: x.reshape(*each, *x.shape[2:]), memories)


# Values and not closures, so that equal modules make equal networks.
@dataclass(frozen=True)
class _Init:
    module: Any

    def __call__(self, key: jax.Array, observation: Any, *more: jax.Array) -> Any:
        steps, num_envs = jax.tree.leaves(observation)[0].shape[:2]
        start, memory = jnp.zeros((steps, num_envs), bool), self.module.nothing_yet(num_envs)
        return self.module.init(key, memory, observation, start, *more)["params"]


@dataclass(frozen=True)
class _NothingYet:
    module: Any

    def __call__(self, num_envs: int) -> Any:
        return self.module.nothing_yet(num_envs)


@dataclass(frozen=True)
class _Unroll:
    module: Any

    def __call__(self, parameters: Any, memory: Any, observation: Any, start: jax.Array, *more: Any) -> Any:
        return self.module.apply({"params": parameters}, memory, observation, start, *more)


@dataclass(frozen=True)
class _InitOfSteps:
    network: Network
    leading_axes: int

    def __call__(self, key: jax.Array, observation: Any) -> Any:
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[self.leading_axes :]), observation)
        return self.network.init(key, rows)


def _no_memory(num_envs: int) -> Any:
    return ()


@dataclass(frozen=True)
class _UnrollSteps:
    network: Network
    leading_axes: int
    actor_critic: bool

    def __call__(self, parameters: Any, memory: Any, observation: Any, start: jax.Array) -> Any:
        # Environment-major, as everywhere: a split of the environments stays a split of the rows.
        by_env = jax.tree.map(lambda x: x.swapaxes(0, 1), observation)
        leading = jax.tree.leaves(by_env)[0].shape[: self.leading_axes]
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[self.leading_axes :]), by_env)
        of_rows = self.network.apply(parameters, rows)
        if self.actor_critic:
            of_rows = distributions.pair(of_rows, (math.prod(leading),))
        found = jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]).swapaxes(0, 1), of_rows)
        if not self.actor_critic:
            return AgentValues(found, memory=())
        policy, value = found
        return Output(policy, value, memory=())


# --- networks of learners from replay with a memory: DQN, SAC and TD3 ---


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
    return of_module(_Remembering(observation_space, outputs, widths, memory, scale, dueling))


def remembering_critics(
    observation_space: ObservationSpace, outputs: int, layers: Layers, memory: MemoryKind
) -> RecurrentNetwork:
    """Two critics, each with a memory of the observations; actions join after it.

    `unroll(parameters, memory, observation [T, B, *obs], start [T, B], action [T, B, *action])` gives two
    values, each `[T, B]` (or of several `outputs` `[T, B, n]`), and memories. So a critic values any action
    at a step by one memory.
    """
    widths = _sized(observation_space, layers, memory)
    return of_module(_RememberingCritics(observation_space, outputs, widths, memory))


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

    def nothing_yet(self, num_envs: int) -> Any:
        """The memory before anything was seen."""
        return self.remembers.empty((num_envs,))


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

    def nothing_yet(self, num_envs: int) -> Any:
        """The memories of both before anything was seen."""
        return (self.remembers.empty((num_envs,)),) * 2


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
