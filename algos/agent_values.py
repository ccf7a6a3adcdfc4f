"""Networks of cooperative value learning: the value of each agent's actions, and mixers of agents' values.

Agents have the same parameters, and each a memory of its own, or none.

Letters in shapes: `T` steps, `B` environments, `A` agents, `n` actions (of several choices: the actions of
all, one choice after the other), `N` rows of any origin, `S` numbers
of a state, `H` units of a mixer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from algos import distributions
from algos.given import Network
from algos.layers import Activation, Layers, Torso, checked_widths
from algos.memories import MemoryKind
from algos.networks import actor_features, of_module
from algos.recurrent import MemoryTrunk, RecurrentNetwork
from envs.composite import ObservationSpace
from envs.spaces import Discrete, MultiDiscrete
from fdg.settings.fields import float_or_array


class AgentValues(NamedTuple):
    """What a network makes of a sequence."""

    values: jax.Array  # [T, B, A, n] float32, of every action, allowed or not
    memory: Any  # [T, B, ...], after each step


def agent_q_network(
    observation_space: ObservationSpace,
    action_space: Discrete | MultiDiscrete,
    num_agents: int,
    hidden: Sequence[int] | None = None,
    activation: Activation = "relu",
    dueling: bool = False,
    layer_norm: bool = False,
    convolve: bool = True,
    torso: Torso = "dense",
    memory: MemoryKind | None = None,
    identity: bool = True,
) -> RecurrentNetwork:
    """The value of each action of each agent, whose `unroll` gives `AgentValues`.

    Dense layers (after a convolution, of an image), a memory and one more dense layer where there is one, and
    a head: the agent of QMIX (Rashid et al. 2018, figure 2c).

    Args:
        observation_space, action_space: of one agent. What is `privileged` is not seen.
        num_agents: `A`.
        hidden: widths of the dense layers. Default: that of the memory; without, as `networks.actor_critic`.
        activation, layer_norm, convolve, torso: as for `networks.actor_critic`.
        dueling: as for `networks.q_network`.
        memory: what remembers; None: nothing does.
        identity: each agent also sees its number, one-hot.

    >>> from envs.spaces import Box
    >>> network = agent_q_network(Box(-1.0, 1.0, (4,)), Discrete(2), num_agents=3, memory=MemoryKind(size=16))
    >>> observation, start = jnp.zeros((5, 8, 3, 4)), jnp.zeros((5, 8), bool)
    >>> parameters = jax.eval_shape(network.init, jax.random.key(0), observation)
    >>> output = jax.eval_shape(network.unroll, parameters, network.memory(8), observation, start)
    >>> output.values.shape, output.memory.shape
    ((5, 8, 3, 2), (5, 8, 3, 16))
    """
    if memory is not None and hidden is None:
        hidden = (memory.size,)
    widths = checked_widths(observation_space, hidden, activation, convolve)
    module = AgentQNetwork(
        observation_space, distributions.sizes(action_space), num_agents,
        Layers(widths, activation, convolve, layer_norm, torso), memory, dueling, identity,
    )  # fmt: skip
    return RecurrentNetwork(_Init(module), _NothingYet(module), _Unroll(module))


def of_each_agent(network: Network) -> RecurrentNetwork:
    """A feed-forward network of one agent's observations, `[N, *obs]` to `[N, n]`, as one without memory."""
    return RecurrentNetwork(_InitOfAgents(network), _no_memory, _UnrollAgents(network))


def monotonic_mixer(
    units: int = 32, hypernetwork: Sequence[int] = (64,), scale: float | jax.Array = 1.0
) -> Network:
    """The mixing network of QMIX (Rashid et al. 2018, arXiv 1803.11485, section 4.1 and figure 2a).

    `apply(parameters, values [N, A], state [N, S])` returns `[N]`, the value of what all agents do together.
    It rises, or stays, with the value of every agent, for the weights that those meet are absolute values of
    what hypernetworks make of the state; the biases are free.

    Args:
        units: `H`, of the one hidden layer, whose activation is an ELU.
        hypernetwork: widths of the layers, with ReLU, between the state and the weights; the paper has none.
        scale: of the hypernetworks' first weights; 1: uniform within 1 / sqrt(inputs) of zero, as the authors
            had them. With larger ones a mixture of 32 units magnifies what agents' values differ by many
            times, the best of them are thought far too much of, and targets made of these run away.

    >>> mixer = monotonic_mixer(8)
    >>> values, state = jnp.ones((5, 3)), jnp.ones((5, 4))
    >>> parameters = jax.eval_shape(mixer.init, jax.random.key(0), values, state)
    >>> jax.eval_shape(mixer.apply, parameters, values, state).shape
    (5,)
    """
    module = MonotonicMixer(units, tuple(hypernetwork), float_or_array(scale))
    return of_module(module)


class AgentQNetwork(nn.Module):
    """One trunk, of every agent alike (see `agent_q_network`)."""

    observation_space: ObservationSpace
    choices: tuple[int, ...]
    num_agents: int
    layers: Layers
    remembers: MemoryKind | None
    dueling: bool
    identity: bool

    @nn.compact
    def __call__(self, memory: Any, observation: Any, start: jax.Array) -> AgentValues:  # noqa: D102
        agents = self.num_agents
        each = (*start.shape, agents)
        if self.remembers is None:
            # Without a memory all steps are alike: rows, environment-major, so that a split of the
            # environments stays a split of the rows.
            steps, rows = 1, start.size * agents
            observation = jax.tree.map(lambda x: x.swapaxes(0, 1), observation)
        else:
            steps, rows = start.shape[0], start.shape[1] * agents
        flat = jax.tree.map(lambda x: x.reshape(steps * rows, *x.shape[3:]), observation)
        seen = [actor_features(flat, self.observation_space, self.layers.convolve)]
        if self.identity:
            seen.append(jnp.tile(jnp.eye(agents), (start.size, 1)))
        actions = sum(self.choices)
        outputs = actions + 1 if self.dueling else actions
        trunk = MemoryTrunk(self.layers, self.remembers, outputs, 1.0, name="q")
        values, memories = trunk(
            jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), memory),
            jax.tree.map(lambda x: x.reshape(steps, rows, *x.shape[1:]), seen),
            jnp.repeat(start, agents, axis=1).reshape(steps, rows),
        )
        if self.dueling:
            values = distributions.dueling(values, self.choices)
        if self.remembers is None:
            values = values.reshape(each[1], each[0], agents, actions).swapaxes(0, 1)
        memories = jax.tree.map(lambda x: x.reshape(*each, *x.shape[2:]), memories)
        return AgentValues(values.reshape(*each, actions), memories)

    def nothing_yet(self, num_envs: int) -> Any:
        """The memory before anything was seen."""
        return () if self.remembers is None else self.remembers.empty((num_envs, self.num_agents))


class MonotonicMixer(nn.Module):
    """One hidden layer, whose weights come from the state (see `monotonic_mixer`)."""

    units: int
    hypernetwork: tuple[int, ...]
    scale: float = 1.0

    @nn.compact
    def __call__(self, values: jax.Array, state: jax.Array) -> jax.Array:  # noqa: D102
        count, agents = values.shape

        kernel_init = nn.initializers.variance_scaling(self.scale**2 / 3.0, "fan_in", "uniform")

        def dense(x: jax.Array, outputs: int, name: str) -> jax.Array:
            return nn.Dense(outputs, kernel_init=kernel_init, name=name)(x)

        def from_state(outputs: int, name: str) -> jax.Array:
            x = state
            for i, width in enumerate(self.hypernetwork):
                x = nn.relu(dense(x, width, f"{name}_{i}"))
            return dense(x, outputs, name)

        first = jnp.abs(from_state(agents * self.units, "weight_1")).reshape(count, agents, self.units)
        hidden = nn.elu(jnp.sum(values[:, :, None] * first, axis=1) + dense(state, self.units, "bias_1"))
        second = jnp.abs(from_state(self.units, "weight_2"))
        # "a 2-layer hypernetwork with a ReLU nonlinearity" makes the last bias.
        last = dense(nn.relu(dense(state, self.units, "bias_2_0")), 1, "bias_2")
        return jnp.sum(hidden * second, axis=1) + last[:, 0]


# Values and not closures, so that equal modules make equal networks.
@dataclass(frozen=True)
class _Init:
    module: AgentQNetwork

    def __call__(self, key: jax.Array, observation: Any) -> Any:
        steps, num_envs = jax.tree.leaves(observation)[0].shape[:2]
        start = jnp.zeros((steps, num_envs), bool)
        return self.module.init(key, self.module.nothing_yet(num_envs), observation, start)["params"]


@dataclass(frozen=True)
class _NothingYet:
    module: AgentQNetwork

    def __call__(self, num_envs: int) -> Any:
        return self.module.nothing_yet(num_envs)


@dataclass(frozen=True)
class _Unroll:
    module: AgentQNetwork

    def __call__(self, parameters: Any, memory: Any, observation: Any, start: jax.Array) -> AgentValues:
        return self.module.apply({"params": parameters}, memory, observation, start)


@dataclass(frozen=True)
class _InitOfAgents:
    network: Network

    def __call__(self, key: jax.Array, observation: Any) -> Any:
        return self.network.init(key, jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), observation))


def _no_memory(num_envs: int) -> Any:
    return ()


@dataclass(frozen=True)
class _UnrollAgents:
    network: Network

    def __call__(self, parameters: Any, memory: Any, observation: Any, start: jax.Array) -> AgentValues:
        # Environment-major: a split of the environments stays a split of the rows.
        by_env = jax.tree.map(lambda x: x.swapaxes(0, 1), observation)
        leading = jax.tree.leaves(by_env)[0].shape[:3]
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), by_env)
        values = self.network.apply(parameters, rows)
        return AgentValues(values.reshape(*leading, *values.shape[1:]).swapaxes(0, 1), memory=())
