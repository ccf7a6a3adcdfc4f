"""Networks as pairs of pure functions: those of the user, and the default ones.

An algorithm's field `network` takes a `Network`; a Linen module; an NNX or Equinox module with initial
parameters; a module class or `functools.partial` of one, called with random keys of the run; or the name of
any of these, `"my.module:name"`.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

import fdg
from algos import distributions
from algos.checks import check_policy_and_value
from algos.layers import Trunk, features, with_widths
from algos.layers import convolutional as convolutional
from algos.layers import gru as gru
from algos.layers import lstm as lstm
from algos.layers import mlp as mlp
from algos.layers import simba as simba
from algos.layers import transformer as transformer
from algos.losses import Distribution
from algos.on_policy import PolicyLayers
from algos.values import NETWORK as NETWORK
from algos.values import Activation, Layers, Network, Torso
from algos.values import RecurrentNetwork as RecurrentNetwork
from algos.values import by_name as by_name
from envs import composite, user_code
from envs.composite import ObservationSpace
from envs.environment import Observation, features_and_mask
from envs.spaces import Box, Discrete, MultiDiscrete, Space
from fdg.arguments import check_takes
from fdg.errors import FdgError, raised
from fdg.settings.fields import float_or_array
from fdg.settings.foreign import functions, library_of

# --- the user's networks ---

Sees = Literal["both", "actor", "critic"]  # the role whose observations a network gets


def resolve_network(
    network: Any,
    observation_space: ObservationSpace,
    action_space: Space,
    field: str = "network",
    sees: Sees = "both",
) -> Any:
    """Converts a field's value to a `Network`; returns a recurrent network and None unchanged.

    An actor gets zeros in place of privileged parts of observations; an actor-critic ("both") computes the
    policy without these parts and the value with them. A recurrent network has to do this itself.

    Args:
      network: see the module's docstring.
      observation_space, action_space: passed to the function, if `network` is the name of one.
      field: the field's name, for messages.
      sees: the role whose observations the network gets: "actor", "critic" or "both".

    Raises:
      FdgError: the name does not exist, or the value is no network.
    """
    if isinstance(network, str):
        network = _network_by_name(network, observation_space, action_space, field)
    inputs = ("observation", "action") if sees == "critic" else ("observation",)
    if hasattr(network, "unroll"):
        check_takes(network.init, ("key", *inputs), f"init of {field}")
        check_takes(network.unroll, ("parameters", "memory", "observation", "start"), f"unroll of {field}")
        return network
    if network is None:
        return network
    if library_of(network) is None:
        check_takes(network.init, ("key", *inputs), f"init of {field}")
        check_takes(network.apply, ("parameters", *inputs), f"apply of {field}")
        network = Network(network.init, network.apply)
    else:
        network = Network(*functions(network, field))
    if sees == "critic" or composite.public(observation_space) == observation_space:
        return network
    apply = Bound(_without_privileged, (network.apply, observation_space, sees == "both"))
    return Network(network.init, apply)


@functools.lru_cache(maxsize=64)
def _network_by_name(name: str, observation_space: ObservationSpace, action_space: Space, field: str) -> Any:
    """Resolves `module:name`; calls the value with the two spaces if it is a function."""
    value = user_code.import_attribute(f"--{field.replace('_', '-')}", name)
    if inspect.isfunction(value):
        check_takes(value, ("observation_space", "action_space"), f"{field} '{name}'")
        try:
            value = value(observation_space, action_space)
        except FdgError:
            raise
        except Exception as error:  # user code may raise anything
            raise FdgError(
                f"{field} '{name}' fails for {observation_space!r:.100} and {action_space!r:.60}:"
                f" {raised(error)}"
            ) from error
    is_network = all(callable(getattr(value, method, None)) for method in ("init", "apply"))
    if not is_network and not hasattr(value, "unroll") and library_of(value) is None:
        raise FdgError(
            f"{field} '{name}' is of type {type(value).__name__}: give a module of Linen, NNX or Equinox, an"
            " algos.Network, or a function of (observation_space, action_space) that returns one"
        )
    return value


@dataclass(frozen=True)
class Bound:
    """A function with its first arguments bound. Unlike closures, such functions can be compared."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self, *more: Any, **options: Any) -> Any:  # noqa: D102
        return self.function(*self.arguments, *more, **options)


def _without_privileged(
    apply: Any, space: ObservationSpace, has_critic: bool, parameters: Any, observation: Any, *more: Any
) -> Any:
    """Calls `apply` with zeros for privileged parts; if `has_critic`, computes the value with these parts."""
    leading = jax.tree.leaves(observation)[0].shape[:1]
    public = composite.public_part(space, observation)
    output = apply(parameters, composite.with_privileged_zeros(space, public, leading), *more)
    if not has_critic:
        return output
    policy, _ = check_policy_and_value(output, leading)
    return policy, check_policy_and_value(apply(parameters, observation, *more), leading)[1]


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
    """An actor and a critic without shared layers.

    As in CleanRL (Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization", core
    details 2 and 13): orthogonal kernels of scale sqrt(2), 0.01 for the actor's head and 1 for the critic's,
    and zero biases.

    `apply(parameters, observation [N, *obs])` returns `(distribution_parameters [N, P], value [N])`, both
    float32; `distributions.for_space(action_space)` makes a distribution of the former, and defines `P`. For
    a `Box`, the log standard deviations are parameters that do not depend on the observation. A critic alone
    needs no separate function: XLA drops the actor from a `jit` that uses only the value.

    Args:
      observation_space: `Box`: converted to float32. Integer codes (`Box.codes`: at most 64 kinds) become
        one-hot; other bounded integers are scaled to [0, 1] (uint8: divided by 255); three axes `[height,
        width, channels]` are an image, with stacked frames along its channels; two axes of codes are a map.
        Images and maps are convolved: by one layer of 3 x 3, or from 36 x 36 pixels on by the three layers of
        DQN. Other shapes are flattened. `Discrete` and `MultiDiscrete`: one-hot. `Dict` and `Tuple`: each
        part likewise, then concatenated. The actor does not see `privileged` parts.
      action_space: any that `distributions.for_space` supports.
      hidden: widths of the dense layers of actor and critic. Default: `(64, 64)`; after the convolutions of
        a small image `(128,)`, of a large one `(512,)`.
      activation: "tanh", "relu", "silu", "gelu" or "elu"; after every layer but the heads.
      initial_log_std: for a `Box` action space.
      convolve: convolve images; else flatten them, which is faster, and suffices for small ones.
      layer_norm: normalise each layer but the heads before its activation.
      torso: "dense", or "simba": SimbaV2's blocks, whose features have unit norm (`algos/layers.py`), one per
        entry of `hidden`; all entries are equal.

    >>> network = actor_critic(Box(-1.0, 1.0, (4,)), Discrete(2))
    >>> observation = jnp.zeros((8, 4))
    >>> parameters = jax.eval_shape(network.init, jax.random.key(0), observation)
    >>> logits, value = jax.eval_shape(network.apply, parameters, observation)
    >>> logits.shape, value.shape
    ((8, 2), (8,))
    """
    widths = None if hidden is None else tuple(hidden)
    layers = PolicyLayers(widths, activation, convolve, layer_norm, torso, float_or_array(initial_log_std))
    distributions.for_space(action_space)  # refuses an unsupported space here, before tracing
    return of_module(ActorCritic(observation_space, action_space, with_widths(layers, observation_space)))


def gaussian_actor(
    observation_space: ObservationSpace,
    action_space: Space,
    hidden: Sequence[int] | None = None,
    activation: Activation = "relu",
    **more: Any,
) -> Network:
    """An actor whose standard deviations depend on the observation.

    `apply(parameters, observation [N, *obs])` returns `[N, 2 * D]` float32 for actions of `D` components:
    means, then log standard deviations. Arguments as in `actor_critic`.
    """
    size = math.prod(action_space.shape)
    return of_module(
        GaussianActor(observation_space, 2 * size, _layers(observation_space, hidden, activation, **more))
    )


def deterministic_actor(
    observation_space: ObservationSpace,
    action_space: Space,
    hidden: Sequence[int] | None = None,
    activation: Activation = "relu",
    **more: Any,
) -> Network:
    """An actor that returns actions before tanh: `[N, D]` float32. Arguments as in `actor_critic`."""
    size = math.prod(action_space.shape)
    return of_module(
        GaussianActor(observation_space, size, _layers(observation_space, hidden, activation, **more))
    )


def twin_critics(
    observation_space: ObservationSpace,
    hidden: Sequence[int] | None = None,
    activation: Activation = "relu",
    outputs: int = 1,
    **more: Any,
) -> Network:
    """Two independent critics of an observation and an action.

    `init(key, observation, action)`; `apply(parameters, observation [N, *obs], action [N, *action])` returns
    two values, each `[N]` float32, or `[N, outputs]` with several `outputs`. Actions join the observation's
    features before the dense layers. Arguments as in `actor_critic`.
    """
    layers = _layers(observation_space, hidden, activation, **more)
    return of_module(TwinCritics(observation_space, layers, outputs))


def state_value(
    observation_space: ObservationSpace,
    hidden: Sequence[int] | None = None,
    activation: Activation = "relu",
    **more: Any,
) -> Network:
    """A critic of observations alone: `apply(parameters, observation [N, *obs])` returns `[N]` float32.

    Arguments as in `actor_critic`; it also sees `privileged` parts.
    """
    return of_module(StateValue(observation_space, _layers(observation_space, hidden, activation, **more)))


def q_network(
    observation_space: ObservationSpace,
    action_space: Space,
    hidden: Sequence[int] | None = None,
    activation: Activation = "relu",
    dueling: bool = False,
    **more: Any,
) -> Network:
    """The value of every action: `apply(parameters, observation [N, *obs])` returns `[N, n]` float32.

    For several choices, values are concatenated: `n = sum(nvec)`. The network does not see `privileged`
    parts.

    Args:
      observation_space: as in `actor_critic`; likewise `hidden`, `activation` and `**more`.
      action_space: `Discrete(n)` or `MultiDiscrete(nvec)`.
      dueling: the head outputs V and advantages A, and `Q = V + A - mean(A)` (Wang et al. 2016, arXiv
        1511.06581, equation 9). V and A share all layers but the head. Several choices share V; each has
        its own A (Tavakoli et al. 2018, arXiv 1711.08946, equation 1).

    >>> network = q_network(Box(-1.0, 1.0, (4,)), Discrete(2), dueling=True)
    >>> observation = jnp.zeros((8, 4))
    >>> network.apply(network.init(jax.random.key(0), observation), observation).shape
    (8, 2)
    """
    if not isinstance(action_space, Discrete | MultiDiscrete):
        raise FdgError(
            "a Q network has a value for each action of Discrete(n) or MultiDiscrete(nvec), not of"
            f" {action_space}"
        )
    layers = _layers(observation_space, hidden, activation, **more)
    return of_module(QNetwork(observation_space, distributions.sizes(action_space), layers, dueling))


def _layers(
    space: ObservationSpace, hidden: Sequence[int] | None, activation: Activation, **more: Any
) -> Layers:
    return with_widths(Layers(None if hidden is None else tuple(hidden), activation, **more), space)


def of_module(module: nn.Module) -> Network:
    """Wraps a Linen module whose only variables are parameters; equal modules make equal networks."""
    return Network(Bound(_init, (module,)), Bound(_apply, (module,)))


def _init(module: nn.Module, key: jax.Array, *inputs: Any) -> Any:
    return module.init(key, *inputs)["params"]


def _apply(module: nn.Module, parameters: Any, *inputs: Any) -> Any:
    return module.apply({"params": parameters}, *inputs)


def policy_and_value(
    network: Network, parameters: Any, observation: Observation, action_space: Space
) -> tuple[Distribution, jax.Array]:
    """An actor-critic's distribution over allowed actions, and value `[N]`, at `observation [N, *obs]`."""
    features, action_mask = features_and_mask(observation)
    leading = jax.tree.leaves(features)[0].shape[:1]
    output, value = check_policy_and_value(network.apply(parameters, features), leading)
    policy = distributions.for_space(action_space).distribution(output)
    return distributions.masked(policy, action_mask), value


def actor_critic_of(algorithm: Any) -> Network:
    """An algorithm's field `network`, or the default actor-critic with its `layers`."""
    spaces = algorithm.env.observation_space, algorithm.env.action_space
    network = user_network(algorithm, "network")
    return with_precision(algorithm, network or actor_critic(*spaces, **vars(algorithm.layers)))


def q_network_of(algorithm: Any) -> Network:
    """DQN's network: recurrent if the algorithm has a memory; else the user's, or `q_network`."""
    space, outputs = algorithm.env.observation_space, algorithm._outputs
    options = {"dueling": algorithm.dueling, **vars(algorithm.layers)}
    return _choose_network(algorithm, 0, "network", "actor", lambda: q_network(space, outputs, **options))


def actor_network_of(algorithm: Any) -> Network:
    """An off-policy actor: recurrent if the algorithm has a memory; else the user's, or the default."""
    make = gaussian_actor if algorithm._outputs_per_component == 2 else deterministic_actor
    spaces = algorithm.env.observation_space, algorithm.env.action_space
    options = vars(algorithm.layers)
    return _choose_network(algorithm, 0, "actor_network", "actor", lambda: make(*spaces, **options))


def critics_of(algorithm: Any, layers: Layers) -> Network:
    """Two critics: recurrent if the algorithm has a memory; else the user's, or default ones."""
    space, options = algorithm.env.observation_space, {"outputs": critic_outputs(algorithm), **vars(layers)}
    return _choose_network(algorithm, 1, "critic_network", "critic", lambda: twin_critics(space, **options))


def _choose_network(
    algorithm: Any, index: int, field: str, sees: Sees, default: Callable[[], Network]
) -> Network:
    """The network of the algorithm's memory (`index` 0: actor, 1: critics), or the user's, or the default."""
    if algorithm._memory is not None:
        return algorithm._memory.network(index)
    return with_precision(algorithm, user_network(algorithm, field, sees) or default())


def critic_outputs(algorithm: Any) -> int:
    """Outputs of a critic per sample: 1, or more for a distribution of returns (`algos.distributional`)."""
    return algorithm.grid.critic_kind.outputs if hasattr(algorithm, "grid") else 1


def user_network(algorithm: Any, field: str, sees: Sees = "both") -> Any:
    """The user's network in a field of an algorithm, as functions; None if the field is None."""
    spaces = algorithm.env.observation_space, algorithm.env.action_space
    return resolve_network(getattr(algorithm, field), *spaces, field, sees)


def with_precision(algorithm: Any, network: Any) -> Any:
    """The network, but with matrix products in the algorithm's `precision`."""
    if algorithm.precision == "float32":
        return network
    field = "unroll" if hasattr(network, "unroll") else "apply"
    return network._replace(**{field: Bound(_in_bfloat16, (getattr(network, field),))})


def _in_bfloat16(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return fdg.in_bfloat16(function)(*arguments, **options)


def select_values(values: jax.Array, action: jax.Array) -> jax.Array:
    """Selects the values of actions `[N]` from `[N, n]`: `[N]`.

    >>> select_values(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1, 0])).tolist()
    [2.0, 3.0]
    """
    # A mask, because the gradient of indexing would be a scatter.
    category = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    return jnp.sum(jnp.where(category == action[..., None], values, 0.0), axis=-1)


class ActorCritic(nn.Module):
    """Two separate trunks on one input: `[N, *obs]` to `([N, P], [N])` float32 (see `actor_critic`)."""

    observation_space: ObservationSpace
    action_space: Space
    layers: PolicyLayers

    @nn.compact
    def __call__(self, observation: Any) -> tuple[jax.Array, jax.Array]:  # noqa: D102
        actor_inputs, critic_inputs = actor_and_critic_features(
            observation, self.observation_space, self.layers.convolve
        )
        actor = Trunk(self.layers, actor_outputs(self.action_space), 0.01, name="actor")(actor_inputs)
        critic = Trunk(self.layers, 1, 1.0, name="critic")(critic_inputs)
        return with_log_std(self, actor), critic[:, 0]


def actor_outputs(space: Space) -> int:
    """The number of outputs of an actor's trunk: all parameters of the policy; for a `Box` only the means."""
    size = distributions.for_space(space).size
    return size // 2 if isinstance(space, Box) else size


def with_log_std(module: Any, output: jax.Array) -> jax.Array:
    """The policy's parameters `[..., P]`, from the output of an actor's trunk.

    For a `Box`, appends the log standard deviations. These are parameters of the `module`, an `ActorCritic`
    or another module with its fields.
    """
    if not isinstance(module.action_space, Box):
        return output
    init = nn.initializers.constant(module.layers.initial_log_std)
    log_std = module.param("log_std", init, output.shape[-1:], jnp.float32)
    return jnp.concatenate([output, jnp.broadcast_to(log_std, output.shape)], axis=-1)


class GaussianActor(nn.Module):
    """One trunk: `[N, *obs]` to `[N, outputs]` float32, for `gaussian_actor` and `deterministic_actor`.

    `options` are further arguments of the `trunk`.
    """

    observation_space: ObservationSpace
    outputs: int
    layers: Layers
    trunk: Any = Trunk

    @nn.compact
    def __call__(self, observation: Any, **options: Any) -> jax.Array:  # noqa: D102
        inputs = actor_features(observation, self.observation_space, self.layers.convolve)
        return self.trunk(self.layers, self.outputs, 0.01, name="actor")(inputs, **options)


class TwinCritics(nn.Module):
    """Two trunks on the same inputs: `[N, *obs]`, `[N, *action]` to `[N]`, `[N]` (see `twin_critics`).

    `options` are further arguments of each `trunk`.
    """

    observation_space: ObservationSpace
    layers: Layers
    outputs: int = 1
    trunk: Any = Trunk

    @nn.compact
    def __call__(  # noqa: D102
        self, observation: Any, action: jax.Array, **options: Any
    ) -> tuple[jax.Array, jax.Array]:
        inputs = features(observation, self.observation_space, self.layers.convolve)
        action = action.reshape(action.shape[0], -1)
        names = ("critic_1", "critic_2")
        critics = [self.trunk(self.layers, self.outputs, 1.0, name=name) for name in names]
        first, second = (critic(inputs, action, **options) for critic in critics)
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
        inputs = actor_features(observation, self.observation_space, self.layers.convolve)
        outputs = sum(self.choices) + self.dueling
        head = Trunk(self.layers, outputs, 1.0, name="q")(inputs)
        return distributions.dueling(head, self.choices) if self.dueling else head


def actor_features(observation: Any, space: ObservationSpace, convolve: bool) -> Any:
    """`features` of observations `[N, *obs]` without privileged parts; these may already be missing."""
    return features(composite.public_part(space, observation), composite.public(space), convolve)


def actor_and_critic_features(observation: Any, space: ObservationSpace, convolve: bool) -> tuple[Any, Any]:
    """Features of observations `[N, *obs]` for the actor, and for the critic."""
    all_features = features(observation, space, convolve)
    has_privileged = composite.public(space) != space
    return actor_features(observation, space, convolve) if has_privileged else all_features, all_features
