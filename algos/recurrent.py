"""Recurrent actor-critics for one agent or several, and a wrapper that makes feed-forward networks recurrent.

Shapes: `T` steps, `B` environments, `A` agents, `N` rows (`T * B`, or `T * B * A`), `n` outputs.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from algos import distributions
from algos.checks import check_actor_critic_output, check_policy_and_value
from algos.layers import with_widths
from algos.memories import MemoryKind, MemoryTrunk, RecurrentNetwork, of_module, step_types
from algos.networks import (
    Bound,
    actor_and_critic_features,
    actor_outputs,
    user_network,
    with_log_std,
    with_precision,
)
from algos.on_policy import PolicyLayers
from algos.rollout import empty_memory
from algos.values import Activation, Network, Torso
from envs.composite import ObservationSpace
from envs.spaces import Space
from fdg.arguments import check_members
from fdg.settings.fields import float_or_array


class Output(NamedTuple):
    """A recurrent network's output for a sequence."""

    policy: jax.Array  # [T, B, P] float32, the parameters of a distribution over actions
    value: jax.Array  # [T, B] float32
    memory: Any  # [T, B, ...], after each step


class AgentValues(NamedTuple):
    """The output, for a sequence, of a recurrent network that estimates action values."""

    values: jax.Array  # [T, B, A, n] float32, of all actions of each agent, allowed or not
    memory: Any  # [T, B, ...], after each step


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
    """An actor and a critic with separate parameters and separate memories.

    Each consists of dense layers (after a convolution, for images), a memory, a dense layer, and a head. With
    a gated recurrent unit (GRU; Cho et al. 2014, arXiv 1406.1078) this is the architecture of JaxMARL's and
    PureJaxRL's recurrent agents. Kernel scales are as in `networks.actor_critic`.

    Args:
        observation_space, action_space: of one agent.
        hidden: widths of the dense layers before the memory. Default: `(memory_size,)`.
        memory_size: width of the memory and of the layer after it. None: no memory and no such layer, as in
          `networks.actor_critic`.
        num_agents: `A`. Observations are then `[T, B, A, *obs]` and results `[T, B, A, ...]`; agents share
          parameters, and each has a memory. Default: one agent, and no axis `A`.
        central: one critic sees the concatenated observations of all agents, and returns a value for each.
        memory: the kind of memory; None: a GRU. Its size is `memory_size`.
        activation, initial_log_std, convolve, layer_norm, torso: as in `networks.actor_critic`.

    >>> import envs
    >>> network = recurrent_actor_critic(envs.Box(-1.0, 1.0, (4,)), envs.Discrete(2), memory_size=16)
    >>> observation = jnp.zeros((5, 8, 4))
    >>> parameters = jax.eval_shape(network.init, jax.random.key(0), observation)
    >>> start = jnp.zeros((5, 8), bool)
    >>> output = jax.eval_shape(network.unroll, parameters, network.memory(8), observation, start)
    >>> output.policy.shape, output.value.shape, output.memory.actor.shape
    ((5, 8, 2), (5, 8), (5, 8, 16))
    """
    distributions.for_space(action_space)  # refuses an unsupported space here, before tracing
    if memory_size is None:
        memory = None
    else:
        memory = dataclasses.replace(memory or MemoryKind(), size=memory_size)
        hidden = (memory_size,) if hidden is None else hidden
    widths = None if hidden is None else tuple(hidden)
    layers = PolicyLayers(widths, activation, convolve, layer_norm, torso, float_or_array(initial_log_std))
    layers = with_widths(layers, observation_space)
    return of_module(
        RecurrentActorCritic(observation_space, action_space, layers, memory, num_agents, central)
    )


def as_recurrent(
    network: RecurrentNetwork | Network | None, leading_axes: int = 2, actor_critic: bool = True
) -> RecurrentNetwork | None:
    """Wraps a feed-forward network as a `RecurrentNetwork` with an empty memory; steps are independent.

    `network.apply` gets all steps at once, `[B * T, *obs]`. Equal networks give equal wrappers. A
    `RecurrentNetwork` and None are returned unchanged.

    Args:
        network: its `apply` returns `(policy [N, P], value [N])`, as in `networks.actor_critic`.
        leading_axes: number of axes before `*obs`: 2 for `[T, B, *obs]`, 3 for agents, `[T, B, A, *obs]`.
        actor_critic: `apply` returns `(policy, value)`. If False, it returns values of actions, `[N, n]`, and
          `unroll` returns `AgentValues`.
    """
    if not isinstance(network, Network):
        return network
    unroll = Bound(_unroll_steps, (network, leading_axes, actor_critic))
    return RecurrentNetwork(Bound(_init_with_steps, (network, leading_axes)), empty_memory, unroll)


def recurrent_actor_critic_of(
    algorithm: Any, memory: MemoryKind | None, agents: int | None = None, central: bool = False
) -> RecurrentNetwork:
    """An algorithm's field `network`, or the default recurrent actor-critic with its `layers`."""
    return with_precision(
        algorithm,
        as_recurrent(user_network(algorithm, "network"), leading_axes=2 if agents is None else 3)
        or recurrent_actor_critic(
            algorithm.env.observation_space,
            algorithm.env.action_space,
            memory_size=None if memory is None else memory.size,
            num_agents=agents,
            central=central,
            memory=memory,
            **vars(algorithm.layers),
        ),
    )


def check_recurrent_actor_critic(algorithm: Any, network: RecurrentNetwork, state: Any) -> None:
    """Refuses a network whose `unroll` gives no `Output`, or an output that does not fit the action space."""
    output = step_types(network, state.parameters, state)
    fix = "give an algos.recurrent.Output(policy, value, memory)"
    check_members("unroll of network: its output", output, Output._fields, fix)
    leading = (1, *algorithm._reward_shape)
    check_actor_critic_output((output.policy, output.value), algorithm.env.action_space, leading)


without_memory = as_recurrent  # deprecated name


class Memory(NamedTuple):
    """The memories of actor and critic; if there is no memory, two empty tuples."""

    actor: Any  # [B, ...] or [B, A, ...]; for a GRU `[..., H]` float32
    critic: Any  # as `actor`; a central critic has one memory for all agents, [B, ...]


class RecurrentActorCritic(nn.Module):
    """Two separate trunks, each with a memory (see `recurrent_actor_critic`)."""

    observation_space: ObservationSpace
    action_space: Space
    layers: PolicyLayers
    memory_kind: MemoryKind | None
    num_agents: int | None
    central: bool

    @nn.compact
    def __call__(self, memory: Memory, observation: Any, start: jax.Array) -> Output:  # noqa: D102
        leading = start.shape if self.num_agents is None else (*start.shape, self.num_agents)
        # The networks' first layers take all samples along one axis.
        flat = jax.tree.map(lambda x: x.reshape(math.prod(leading), *x.shape[len(leading) :]), observation)
        actor_inputs, critic_inputs = actor_and_critic_features(
            flat, self.observation_space, self.layers.convolve
        )
        trunk = functools.partial(MemoryTrunk, self.layers, self.memory_kind)
        outputs = actor_outputs(self.action_space)
        actor, actor_memory = trunk(outputs, 0.01, self.num_agents, name="actor")(
            memory.actor, actor_inputs, start
        )
        if self.central:
            agents = self.num_agents or 1
            team_inputs = jax.tree.map(lambda x: _concatenate_agents(x, agents), critic_inputs)
            critic = trunk(agents, 1.0, name="critic")
            value, critic_memory = critic(memory.critic, team_inputs, start)
        else:
            critic = trunk(1, 1.0, self.num_agents, name="critic")
            value, critic_memory = critic(memory.critic, critic_inputs, start)
        return Output(
            policy=with_log_std(self, actor),
            value=value.reshape(leading),
            memory=Memory(actor_memory, critic_memory),
        )

    def initial_memory(self, num_envs: int) -> Memory:
        """The initial memory."""
        if self.memory_kind is None:
            return Memory((), ())
        one_per_env = (num_envs,)
        one_per_agent = one_per_env if self.num_agents is None else (num_envs, self.num_agents)
        return Memory(
            self.memory_kind.empty(one_per_agent),
            self.memory_kind.empty(one_per_env if self.central else one_per_agent),
        )


def _concatenate_agents(inputs: jax.Array, agents: int) -> jax.Array:
    """Concatenates agents' features, or channels of images: `[N * A, ..., F]` to `[N, ..., A * F]`."""
    by_agent = inputs.reshape(len(inputs) // agents, agents, *inputs.shape[1:])
    return jnp.concatenate([by_agent[:, a] for a in range(agents)], axis=-1)


def _init_with_steps(network: Network, leading_axes: int, key: jax.Array, observation: Any) -> Any:
    """`init` of the networks that `as_recurrent` returns."""
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[leading_axes:]), observation)
    return network.init(key, rows)


def _unroll_steps(
    network: Network,
    leading_axes: int,
    actor_critic: bool,
    parameters: Any,
    memory: Any,
    observation: Any,
    start: jax.Array,
) -> Any:
    """`unroll` of the networks that `as_recurrent` returns."""
    # Environments come first, so that a sharding of environments becomes a sharding of rows.
    by_env = jax.tree.map(lambda x: x.swapaxes(0, 1), observation)
    leading = jax.tree.leaves(by_env)[0].shape[:leading_axes]
    row_output = network.apply(
        parameters, jax.tree.map(lambda x: x.reshape(-1, *x.shape[leading_axes:]), by_env)
    )
    if actor_critic:
        row_output = check_policy_and_value(row_output, (math.prod(leading),))
    output = jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]).swapaxes(0, 1), row_output)
    if not actor_critic:
        return AgentValues(output, memory=())
    policy, value = output
    return Output(policy, value, memory=())
