"""The default networks: an actor-critic, a Gaussian actor, twin critics, values of actions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from algos import distributions
from algos.distributions import Distribution
from algos.given import Architecture, Network, pair
from algos.layers import Activation, Layers, PolicyLayers, Torso, Trunk, checked_widths, features
from envs import composite
from envs.composite import ObservationSpace
from envs.environment import Observation, features_and_mask
from envs.spaces import Box, Discrete, MultiDiscrete, Space
from fdg.errors import FdgError
from fdg.settings.fields import float_or_array


def actor_critic(
    observation_space: ObservationSpace,
    action_space: Space,
    hidden: Sequence[int] | None = None,
    activation: Activation = "tanh",
    initial_log_std: float | jax.Array = 0.0,
    convolve: bool = True,
    layer_norm: bool = False,
    torso: Torso = "dense",
) -> Network:
    """An actor and a critic that share nothing.

    As in CleanRL (Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization", core
    details 2 and 13): orthogonal kernels of scale sqrt(2), 0.01 for the actor's head and 1 for the critic's,
    and zero biases.

    `apply(parameters, observation [N, *obs])` returns `(distribution_parameters [N, P], value [N])`, both
    float32; `distributions.for_space(action_space)` makes a distribution of the former and says what `P` is.
    For a `Box` the logs of the standard deviations are parameters of their own that do not depend on the
    observation.

    A critic alone needs no function of its own: `apply(parameters, observation)[1]` inside a `jit` costs the
    critic only, because no operation of the actor feeds the value and XLA drops what is not used (the tests
    measure it).

    Args:
        observation_space: `Box`: all become float32. Integers that are codes (`Box.codes`: of at most 64
            kinds) are one-hot, others between bounds are scaled to 0 and 1 (uint8: divided by 255);
            three axes `[height, width, channels]` are an image, with stacked frames along its channels, two
            axes of codes are a map, and both get convolutions first: one of 3 x 3, or from 36 x 36 on the
            three of DQN; all other shapes are flattened. `Discrete` and `MultiDiscrete`: one-hot. `Dict` and
            `Tuple`: every part so, and what comes of it side by side. The actor does not see what is
            `privileged`.
        action_space: any that `distributions.for_space` knows.
        hidden: widths of the dense layers, the same for actor and critic. Default: `(64, 64)`; after the
            convolutions of a small image `(128,)`, of a large one `(512,)`.
        activation: "tanh", "relu", "silu", "gelu" or "elu"; after every layer but the heads.
        initial_log_std: for a `Box` action space.
        convolve: images are convolved; else they are flattened as all other shapes are, which is quicker, and
            enough where they are small.
        layer_norm: normalise each layer but the heads before its activation.
        torso: "dense", or "simba": SimbaV2's blocks of unit length (`algos/layers.py`), one for each
            of `hidden`, whose widths are equal.

    >>> network = actor_critic(Box(-1.0, 1.0, (4,)), Discrete(2))
    >>> observation = jnp.zeros((8, 4))
    >>> parameters = jax.eval_shape(network.init, jax.random.key(0), observation)
    >>> logits, value = jax.eval_shape(network.apply, parameters, observation)
    >>> logits.shape, value.shape
    ((8, 2), (8,))
    """
    widths = checked_widths(observation_space, hidden, activation, convolve)
    distributions.for_space(action_space)  # refuses a space without distribution here, before any tracing
    layers = PolicyLayers(widths, activation, convolve, layer_norm, torso, float_or_array(initial_log_std))
    module = ActorCritic(observation_space, action_space, layers)
    return Network(_Init(module), _Apply(module))


def gaussian_actor(
    observation_space: ObservationSpace,
    action_space: Space,
    hidden: Sequence[int] | None = None,
    activation: Activation = "relu",
    convolve: bool = True,
    layer_norm: bool = False,
    torso: Torso = "dense",
) -> Network:
    """An actor whose standard deviations depend on the observation, as its means do.

    `apply(parameters, observation [N, *obs])` returns `[N, 2 * D]` float32 for actions of `D` components:
    means, then logs of standard deviations. Arguments as for `actor_critic`.

    >>> network = gaussian_actor(Box(-1.0, 1.0, (4,)), Box(-1.0, 1.0, (3,)))
    >>> observation = jnp.zeros((8, 4))
    >>> network.apply(network.init(jax.random.key(0), observation), observation).shape
    (8, 6)
    """
    widths = checked_widths(observation_space, hidden, activation, convolve)
    outputs = 2 * math.prod(action_space.shape)
    module = GaussianActor(
        observation_space, outputs, Layers(widths, activation, convolve, layer_norm, torso)
    )
    return Network(_Init(module), _Apply(module))


def deterministic_actor(
    observation_space: ObservationSpace,
    action_space: Space,
    hidden: Sequence[int] | None = None,
    activation: Activation = "relu",
    convolve: bool = True,
    layer_norm: bool = False,
    torso: Torso = "dense",
) -> Network:
    """An actor that gives actions themselves, before what bounds them: `[N, D]` float32 for `D` components.

    Arguments as for `actor_critic`.
    """
    widths = checked_widths(observation_space, hidden, activation, convolve)
    outputs = math.prod(action_space.shape)
    module = GaussianActor(
        observation_space, outputs, Layers(widths, activation, convolve, layer_norm, torso)
    )
    return Network(_Init(module), _Apply(module))


def twin_critics(
    observation_space: ObservationSpace,
    hidden: Sequence[int] | None = None,
    activation: Activation = "relu",
    convolve: bool = True,
    layer_norm: bool = False,
    torso: Torso = "dense",
    outputs: int = 1,
) -> Network:
    """Two independent critics of an observation and an action together.

    `init(key, observation, action)`; `apply(parameters, observation [N, *obs], action [N, *action])` returns
    two values, each `[N]` float32; or where more than one of `outputs` is asked for, twice `[N, outputs]`.
    Actions join the observation's features before the dense layers. Arguments as for `actor_critic`.

    >>> network = twin_critics(Box(-1.0, 1.0, (4,)))
    >>> inputs = jnp.zeros((8, 4)), jnp.ones((8, 3))
    >>> first, second = network.apply(network.init(jax.random.key(0), *inputs), *inputs)
    >>> first.shape, bool(jnp.any(first == second))
    ((8,), False)
    """
    widths = checked_widths(observation_space, hidden, activation, convolve)
    module = TwinCritics(observation_space, Layers(widths, activation, convolve, layer_norm, torso), outputs)
    return Network(_Init(module), _Apply(module))


def state_value(
    observation_space: ObservationSpace,
    hidden: Sequence[int] | None = None,
    activation: Activation = "relu",
    convolve: bool = True,
    layer_norm: bool = False,
    torso: Torso = "dense",
) -> Network:
    """A critic of observations alone: `apply(parameters, observation [N, *obs])` returns `[N]` float32.

    Arguments as for `actor_critic`; it sees what is `privileged` too.

    >>> network, observation = state_value(Box(-1.0, 1.0, (4,))), jnp.zeros((8, 4))
    >>> network.apply(network.init(jax.random.key(0), observation), observation).shape
    (8,)
    """
    widths = checked_widths(observation_space, hidden, activation, convolve)
    return of_module(StateValue(observation_space, Layers(widths, activation, convolve, layer_norm, torso)))


def q_network(
    observation_space: ObservationSpace,
    action_space: Space,
    hidden: Sequence[int] | None = None,
    activation: Activation = "relu",
    dueling: bool = False,
    layer_norm: bool = False,
    convolve: bool = True,
    torso: Torso = "dense",
) -> Network:
    """The value of every action: `apply(parameters, observation [N, *obs])` returns `[N, n]` float32.

    Where an action is several choices, the values of all of them one after the other, `n = sum(nvec)`.

    Initialised as the critic of `actor_critic`, and with the same layers.

    Args:
        observation_space: any that `actor_critic` knows. What is `privileged` is not seen, for who acts by
            these values has not got it.
        action_space: `Discrete(n)` or `MultiDiscrete(nvec)`.
        hidden: widths of the dense layers. Default: as in `actor_critic`.
        activation: as in `actor_critic`.
        dueling: the head gives V and advantages A, and `Q = V + A - mean(A)` (Wang et al. 2016, arXiv
            1511.06581, equation 9). V and A share all layers but the head. Several choices have one V, and
            each its A (Tavakoli et al. 2018, arXiv 1711.08946, equation 1).
        layer_norm: normalise each layer before its activation.
        convolve, torso: as in `actor_critic`.

    >>> network = q_network(Box(-1.0, 1.0, (4,)), Discrete(2), dueling=True)
    >>> observation = jnp.zeros((8, 4))
    >>> network.apply(network.init(jax.random.key(0), observation), observation).shape
    (8, 2)
    """
    widths = checked_widths(observation_space, hidden, activation, convolve)
    if not isinstance(action_space, Discrete | MultiDiscrete):
        raise FdgError(
            "a Q network has a value for each action of Discrete(n) or MultiDiscrete(nvec), not of"
            f" {action_space}"
        )
    choices = distributions.sizes(action_space)
    layers = Layers(widths, activation, convolve, layer_norm, torso)
    module = QNetwork(observation_space, choices, layers, dueling)
    return Network(_Init(module), _Apply(module))


def of_module(module: nn.Module) -> Network:
    """A module of Linen with parameters alone; equal modules make equal networks."""
    return Network(_Init(module), _Apply(module))


def policy_and_value(
    network: Network, parameters: Any, observation: Observation, action_space: Space
) -> tuple[Distribution, jax.Array]:
    """Distribution over the actions that are allowed, and value `[N]`, of an actor-critic.

    Args:
        network: as of `actor_critic`.
        parameters: of the network.
        observation: `[N, *obs]`, with a mask or without.
        action_space: what the network was made for.
    """
    features, action_mask = features_and_mask(observation)
    count = jax.tree.leaves(features)[0].shape[:1]
    output, value = pair(network.apply(parameters, features), count)
    policy = distributions.for_space(action_space).distribution(output)
    return distributions.masked(policy, action_mask), value


def of_action(values: jax.Array, action: jax.Array) -> jax.Array:
    """Of values `[N, n]` those of the actions `[N]`: `[N]`.

    >>> of_action(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1, 0])).tolist()
    [2.0, 3.0]
    """
    # Choosing by a mask and not by an index keeps the gradient free of a scatter.
    category = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    return jnp.sum(jnp.where(category == action[..., None], values, 0.0), axis=-1)


# --- the same by one value, for the field `network` of any algorithm ---


def mlp(*hidden: int, activation: Activation | None = None, layer_norm: bool = False) -> Architecture:
    """Dense layers of these widths; images are flattened. Without an activation, the algorithm's.

    `PPO(env=env, network=mlp(64, 64))` is `PPO(env=env, hidden=(64, 64), convolve=False)`.
    """
    return _architecture(hidden=hidden or None, activation=activation, layer_norm=layer_norm, convolve=False)


def convolutional(
    *hidden: int, activation: Activation | None = None, layer_norm: bool = False
) -> Architecture:
    """Convolutions of each image, then dense layers of these widths; without widths, the default ones."""
    return _architecture(hidden=hidden or None, activation=activation, layer_norm=layer_norm, convolve=True)


def simba(width: int = 128, blocks: int = 1, critic: tuple[int, int] | None = None) -> Architecture:
    """SimbaV2's blocks (Lee et al. 2025, arXiv 2502.15280), whose features and weights have length one.

    `SAC(env=env, actor_network=simba(128, 2))` is `SAC(env=env, hidden=(128, 128), torso="simba")`: in
    `actor_network` it stands for the layers of all networks. The paper has one block of 128 for the actor and
    two of 512 for the critics: `simba(128, 1, critic=(512, 2))`, where an algorithm has `critic_hidden`.
    """
    wide = None if critic is None else (critic[0],) * critic[1]
    return _architecture(hidden=(width,) * blocks, critic_hidden=wide, torso="simba")


def gru(size: int = 128, *hidden: int, activation: Activation | None = None) -> Architecture:
    """A memory of this size after dense layers of these widths; see `algos.memories` for others.

    `RecurrentPPO(env=env, network=gru(128))` is `RecurrentPPO(env=env, memory="gru", memory_size=128)`.
    """
    return _architecture(memory="gru", memory_size=size, hidden=hidden or None, activation=activation)


def lstm(size: int = 128, *hidden: int, activation: Activation | None = None) -> Architecture:
    """As `gru`, with a long short-term memory."""
    return _architecture(memory="lstm", memory_size=size, hidden=hidden or None, activation=activation)


def transformer(size: int = 128, window: int = 32, layers: int = 1, heads: int = 4) -> Architecture:
    """A causal transformer that looks back over so many steps."""
    return _architecture(
        memory="transformer",
        memory_size=size,
        memory_window=window,
        memory_layers=layers,
        memory_heads=heads,
    )


def _architecture(**settings: Any) -> Architecture:
    return Architecture(tuple((name, value) for name, value in settings.items() if value is not None))


class ActorCritic(nn.Module):
    """Two separate trunks on one input: `[N, *obs]` to `([N, P], [N])` float32 (see `actor_critic`)."""

    observation_space: ObservationSpace
    action_space: Space
    layers: PolicyLayers

    @nn.compact
    def __call__(self, observation: Any) -> tuple[jax.Array, jax.Array]:  # noqa: D102
        seen, all_of_it = actor_and_critic_features(observation, self.observation_space, self.layers.convolve)
        outputs = distributions.for_space(self.action_space).size
        if isinstance(self.action_space, Box):
            outputs //= 2  # the means; the logs of the standard deviations follow below
        actor = Trunk(self.layers, outputs, 0.01, name="actor")(seen)
        critic = Trunk(self.layers, 1, 1.0, name="critic")(all_of_it)
        if isinstance(self.action_space, Box):
            log_std = self.param("log_std", nn.initializers.constant(self.layers.initial_log_std), (outputs,))
            actor = jnp.concatenate([actor, jnp.broadcast_to(log_std, actor.shape)], axis=-1)
        return actor, critic[:, 0]


class GaussianActor(nn.Module):
    """One trunk: `[N, *obs]` to `[N, outputs]` float32 (see `gaussian_actor`)."""

    observation_space: ObservationSpace
    outputs: int
    layers: Layers

    @nn.compact
    def __call__(self, observation: Any) -> jax.Array:  # noqa: D102
        seen = actor_features(observation, self.observation_space, self.layers.convolve)
        return Trunk(self.layers, self.outputs, 0.01, name="actor")(seen)


class TwinCritics(nn.Module):
    """Two trunks on the same inputs: `[N, *obs]`, `[N, *action]` to `[N]`, `[N]` (see `twin_critics`)."""

    observation_space: ObservationSpace
    layers: Layers
    outputs: int = 1

    @nn.compact
    def __call__(self, observation: Any, action: jax.Array) -> tuple[jax.Array, jax.Array]:  # noqa: D102
        inputs = features(observation, self.observation_space, self.layers.convolve)
        action = action.reshape(action.shape[0], -1)
        names = ("critic_1", "critic_2")
        critics = [Trunk(self.layers, self.outputs, 1.0, name=name) for name in names]
        first, second = (critic(inputs, action) for critic in critics)
        return (first[:, 0], second[:, 0]) if self.outputs == 1 else (first, second)


class StateValue(nn.Module):
    """One trunk: `[N, *obs]` to `[N]` (see `state_value`)."""

    observation_space: ObservationSpace
    layers: Layers

    @nn.compact
    def __call__(self, observation: Any) -> jax.Array:  # noqa: D102
        inputs = features(observation, self.observation_space, self.layers.convolve)
        return Trunk(self.layers, 1, 1.0, name="value")(inputs)[:, 0]


class QNetwork(nn.Module):
    """One trunk whose head has a value for every action: `[N, *obs]` to `[N, actions]` (see `q_network`)."""

    observation_space: ObservationSpace
    choices: tuple[int, ...]
    layers: Layers
    dueling: bool

    @nn.compact
    def __call__(self, observation: Any) -> jax.Array:  # noqa: D102
        seen = actor_features(observation, self.observation_space, self.layers.convolve)
        outputs = sum(self.choices) + self.dueling
        head = Trunk(self.layers, outputs, 1.0, name="q")(seen)
        return distributions.dueling(head, self.choices) if self.dueling else head


def actor_features(observation: Any, space: ObservationSpace, convolve: bool) -> Any:
    """Observations `[N, *obs]` as an actor sees them: `features` without what is privileged.

    Observations that lack it already will do as well.
    """
    return features(composite.public_part(space, observation), composite.public(space), convolve)


def actor_and_critic_features(observation: Any, space: ObservationSpace, convolve: bool) -> tuple[Any, Any]:
    """Observations `[N, *obs]` as an actor sees them, and as a critic does."""
    all_of_it = features(observation, space, convolve)
    hidden = composite.public(space) != space
    return actor_features(observation, space, convolve) if hidden else all_of_it, all_of_it


# Two values and not two closures, so that equal modules make equal networks.
@dataclass(frozen=True)
class _Init:
    module: nn.Module

    def __call__(self, key: jax.Array, *inputs: jax.Array) -> Any:
        return self.module.init(key, *inputs)["params"]


@dataclass(frozen=True)
class _Apply:
    module: nn.Module

    def __call__(self, parameters: Any, *inputs: jax.Array) -> Any:
        return self.module.apply({"params": parameters}, *inputs)
