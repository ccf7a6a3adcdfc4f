"""Networks as pairs of functions, and the defaults: an actor-critic, a Gaussian actor, twin critics.

An algorithm takes a `Network` and knows nothing else about it: any pair `(init, apply)` of pure functions
will do.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from algos import distributions, outputs
from algos.distributions import Distribution
from algos.hyperparameters import number
from envs.environment import Observation, features_and_mask
from envs.spaces import Box, Discrete, MultiDiscrete, Space
from fdg.errors import FdgError, unknown_name

_ACTIVATIONS = {"tanh": nn.tanh, "relu": nn.relu, "silu": nn.silu, "gelu": nn.gelu, "elu": nn.elu}

_VECTOR_HIDDEN = (64, 64)

# Convolutions: filters, their size, their stride.
# For small images, the torso of MinAtar's own agents (Young and Tian 2019, arXiv 1903.03176).
_SMALL_IMAGE = ((16, 3, 1),)
_SMALL_IMAGE_HIDDEN = (128,)
# For large ones, that of DQN (Mnih et al. 2015, "Human-level control through deep reinforcement learning",
# Nature 518, Methods, "Model architecture"), which takes 84 x 84 and leaves one position of 36 x 36.
_LARGE_IMAGE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
_LARGE_IMAGE_HIDDEN = (512,)
_LARGE_FROM = 36


class Network(NamedTuple):
    """A network as two pure functions.

    `init(key, observation [N, *obs]) -> parameters`, a pytree; of the observation only shape and dtype count.
    `apply(parameters, observation [N, *obs]) -> output`, whose leading axis is `N`.
    Critics of actions (`twin_critics`) have an action beside the observation, in both.

    Networks made by `actor_critic` are equal, and hash alike, if their arguments were; others compare by the
    identity of their functions.
    """

    init: Callable[..., Any]
    apply: Callable[..., Any]


def actor_critic(
    observation_space: Space,
    action_space: Space,
    hidden: Sequence[int] | None = None,
    activation: str = "tanh",
    initial_log_std: float | jax.Array = 0.0,
    convolve: bool = True,
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
        observation_space: `Box`: boolean and uint8 become float32 (uint8 divided by 255);
            three axes `[height, width, channels]` are an image, with stacked frames along its channels, and
            get convolutions first: one of 3 x 3, or from 36 x 36 on the three of DQN; all other shapes are
            flattened. `Discrete` and `MultiDiscrete`: one-hot.
        action_space: any that `distributions.for_space` knows.
        hidden: widths of the dense layers, the same for actor and critic. Default: `(64, 64)`; after the
            convolutions of a small image `(128,)`, of a large one `(512,)`.
        activation: "tanh", "relu", "silu", "gelu" or "elu"; after every layer but the heads.
        initial_log_std: for a `Box` action space.
        convolve: images are convolved; else they are flattened as all other shapes are, which is quicker, and
            enough where they are small.

    >>> network = actor_critic(Box(-1.0, 1.0, (4,)), Discrete(2))
    >>> observation = jnp.zeros((8, 4))
    >>> parameters = network.init(jax.random.key(0), observation)
    >>> logits, value = network.apply(parameters, observation)
    >>> logits.shape, value.shape
    ((8, 2), (8,))
    """
    widths = checked_widths(observation_space, hidden, activation, convolve)
    distributions.for_space(action_space)  # refuses a space without distribution here, before any tracing
    module = ActorCritic(
        observation_space, action_space, widths, activation, number(initial_log_std), convolve
    )
    return Network(_Init(module), _Apply(module))


def gaussian_actor(
    observation_space: Space,
    action_space: Space,
    hidden: Sequence[int] | None = None,
    activation: str = "relu",
    convolve: bool = True,
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
    module = GaussianActor(observation_space, 2 * math.prod(action_space.shape), widths, activation, convolve)
    return Network(_Init(module), _Apply(module))


def twin_critics(
    observation_space: Space,
    hidden: Sequence[int] | None = None,
    activation: str = "relu",
    convolve: bool = True,
) -> Network:
    """Two independent critics of an observation and an action together.

    `init(key, observation, action)`; `apply(parameters, observation [N, *obs], action [N, *action])` returns
    two values, each `[N]` float32. Actions join the observation's features before the dense layers.
    Arguments as for `actor_critic`.

    >>> network = twin_critics(Box(-1.0, 1.0, (4,)))
    >>> inputs = jnp.zeros((8, 4)), jnp.ones((8, 3))
    >>> first, second = network.apply(network.init(jax.random.key(0), *inputs), *inputs)
    >>> first.shape, bool(jnp.any(first == second))
    ((8,), False)
    """
    widths = checked_widths(observation_space, hidden, activation, convolve)
    module = TwinCritics(observation_space, widths, activation, convolve)
    return Network(_Init(module), _Apply(module))


def q_network(
    observation_space: Space,
    action_space: Space,
    hidden: Sequence[int] | None = None,
    activation: str = "relu",
    dueling: bool = False,
    layer_norm: bool = False,
    convolve: bool = True,
) -> Network:
    """The value of every action: `apply(parameters, observation [N, *obs])` returns `[N, n]` float32.

    Initialised as the critic of `actor_critic`, and with the same layers.

    Args:
        observation_space: any that `actor_critic` knows.
        action_space: `Discrete(n)`.
        hidden: widths of the dense layers. Default: as in `actor_critic`.
        activation: as in `actor_critic`.
        dueling: the head gives V and advantages A, and `Q = V + A - mean(A)` (Wang et al. 2016, arXiv
            1511.06581, equation 9). V and A share all layers but the head.
        layer_norm: normalise each layer before its activation.
        convolve: as in `actor_critic`.

    >>> network = q_network(Box(-1.0, 1.0, (4,)), Discrete(2), dueling=True)
    >>> observation = jnp.zeros((8, 4))
    >>> network.apply(network.init(jax.random.key(0), observation), observation).shape
    (8, 2)
    """
    widths = checked_widths(observation_space, hidden, activation, convolve)
    if not isinstance(action_space, Discrete):
        raise FdgError(f"a Q network has a value for each action of Discrete(n), not of {action_space}")
    module = QNetwork(observation_space, action_space.n, widths, activation, dueling, layer_norm, convolve)
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
    output, value = outputs.pair(network.apply(parameters, features), features.shape[:1])
    policy = distributions.for_space(action_space).distribution(output)
    return distributions.masked(policy, action_mask), value


def action_values(network: Network, parameters: Any, observation: Observation) -> jax.Array:
    """Q of every action, `[N, n]` float32, for observations `[N, *obs]`; `-inf` where it is not allowed."""
    features, action_mask = features_and_mask(observation)
    return distributions.allowed_only(network.apply(parameters, features), action_mask)


def of_action(values: jax.Array, action: jax.Array) -> jax.Array:
    """Of values `[N, n]` those of the actions `[N]`: `[N]`.

    >>> of_action(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1, 0])).tolist()
    [2.0, 3.0]
    """
    # Choosing by a mask and not by an index keeps the gradient free of a scatter.
    category = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    return jnp.sum(jnp.where(category == action[..., None], values, 0.0), axis=-1)


class ActorCritic(nn.Module):
    """Two separate trunks on one input: `[N, *obs]` to `([N, P], [N])` float32 (see `actor_critic`)."""

    observation_space: Space
    action_space: Space
    hidden: tuple[int, ...]
    activation: str
    initial_log_std: float
    convolve: bool

    @nn.compact
    def __call__(self, observation: jax.Array) -> tuple[jax.Array, jax.Array]:  # noqa: D102
        inputs = features(observation, self.observation_space, self.convolve)
        outputs = distributions.for_space(self.action_space).size
        if isinstance(self.action_space, Box):
            outputs //= 2  # the means; the logs of the standard deviations follow below
        actor = Trunk(self.hidden, outputs, 0.01, self.activation, name="actor")(inputs)
        critic = Trunk(self.hidden, 1, 1.0, self.activation, name="critic")(inputs)
        if isinstance(self.action_space, Box):
            log_std = self.param("log_std", nn.initializers.constant(self.initial_log_std), (outputs,))
            actor = jnp.concatenate([actor, jnp.broadcast_to(log_std, actor.shape)], axis=-1)
        return actor, critic[:, 0]


class GaussianActor(nn.Module):
    """One trunk: `[N, *obs]` to `[N, outputs]` float32 (see `gaussian_actor`)."""

    observation_space: Space
    outputs: int
    hidden: tuple[int, ...]
    activation: str
    convolve: bool

    @nn.compact
    def __call__(self, observation: jax.Array) -> jax.Array:  # noqa: D102
        inputs = features(observation, self.observation_space, self.convolve)
        return Trunk(self.hidden, self.outputs, 0.01, self.activation, name="actor")(inputs)


class TwinCritics(nn.Module):
    """Two trunks on the same inputs: `[N, *obs]`, `[N, *action]` to `[N]`, `[N]` (see `twin_critics`)."""

    observation_space: Space
    hidden: tuple[int, ...]
    activation: str
    convolve: bool

    @nn.compact
    def __call__(self, observation: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:  # noqa: D102
        inputs = features(observation, self.observation_space, self.convolve)
        action = action.reshape(action.shape[0], -1)
        names = ("critic_1", "critic_2")
        critics = [Trunk(self.hidden, 1, 1.0, self.activation, name=name) for name in names]
        first, second = (critic(inputs, action)[:, 0] for critic in critics)
        return first, second


class QNetwork(nn.Module):
    """One trunk whose head has a value for every action: `[N, *obs]` to `[N, actions]` (see `q_network`)."""

    observation_space: Space
    actions: int
    hidden: tuple[int, ...]
    activation: str
    dueling: bool
    layer_norm: bool
    convolve: bool

    @nn.compact
    def __call__(self, observation: jax.Array) -> jax.Array:  # noqa: D102
        inputs = features(observation, self.observation_space, self.convolve)
        outputs = self.actions + 1 if self.dueling else self.actions
        head = Trunk(self.hidden, outputs, 1.0, self.activation, self.layer_norm, name="q")(inputs)
        if not self.dueling:
            return head
        value, advantage = head[:, :1], head[:, 1:]
        return value + advantage - jnp.mean(advantage, axis=-1, keepdims=True)


class Trunk(nn.Module):
    """Dense layers and a head: `[N, F]` to `[N, outputs]`; an image `[N, H, W, C]` is convolved first.

    With `layer_norm` each layer but the head is normalised before its activation (Ba et al. 2016, arXiv
    1607.06450). `more [N, G]`, if given, joins the features that the dense layers see.
    """

    hidden: tuple[int, ...]
    outputs: int
    head_scale: float
    activation: str
    layer_norm: bool = False

    @nn.compact
    def __call__(self, inputs: jax.Array, more: jax.Array | None = None) -> jax.Array:  # noqa: D102
        x = hidden_layers(inputs, self.hidden, self.activation, self.layer_norm, more)
        return head(x, self.outputs, self.head_scale)


class Convolution(nn.Module):
    """`flax.linen.Conv` of images `[N, H, W, C]` without padding, as one product of matrices.

    In a compiled loop XLA on a CPU takes 31 times as long over the gradient of a convolution of MinAtar's
    images, 18 times over Atari's (`make bench ARGS="-k convolution -s"`). `size` is a multiple of `stride`.
    """

    filters: int
    size: int
    stride: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:  # noqa: D102
        count, stride, channels = images.shape[0], self.stride, images.shape[-1]
        per_side = self.size // stride
        # Blocks of `stride` x `stride` pixels become channels; a filter sees `per_side` x `per_side` blocks.
        rows, columns = ((length - self.size) // stride + per_side for length in images.shape[1:3])
        blocks = images[:, : rows * stride, : columns * stride].reshape(
            count, rows, stride, columns, stride, channels
        )
        blocks = blocks.swapaxes(2, 3).reshape(count, rows, columns, -1)
        rows, columns = rows - per_side + 1, columns - per_side + 1  # positions of a filter
        patches = jnp.concatenate(
            [blocks[:, i : i + rows, j : j + columns] for i in range(per_side) for j in range(per_side)], -1
        )
        shape = (self.size, self.size, channels, self.filters)
        kernel = self.param("kernel", nn.initializers.orthogonal(math.sqrt(2.0)), shape)
        kernel = kernel.reshape(per_side, stride, per_side, stride, channels, self.filters).swapaxes(1, 2)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.filters,))
        outputs = patches.reshape(-1, patches.shape[-1]) @ kernel.reshape(-1, self.filters) + bias[None]
        return outputs.reshape(count, rows, columns, self.filters)


# The two below are called inside a module's `__call__`; their layers belong to that module.
def hidden_layers(
    inputs: jax.Array,
    hidden: Sequence[int],
    activation: str,
    layer_norm: bool = False,
    more: jax.Array | None = None,
) -> jax.Array:
    """All layers of a `Trunk` but the head: `[N, F]`, or images `[N, H, W, C]`, to `[N, hidden[-1]]`."""
    kernel_init = nn.initializers.orthogonal(math.sqrt(2.0))

    def activate(x):
        return _ACTIVATIONS[activation](nn.LayerNorm()(x) if layer_norm else x)

    x = inputs
    if x.ndim == 4:
        for layer in _LARGE_IMAGE if _is_large(x.shape[1:]) else _SMALL_IMAGE:
            x = activate(Convolution(*layer)(x))
        x = x.reshape(x.shape[0], -1)
    if more is not None:
        x = jnp.concatenate([x, more], axis=-1)
    # From here on [N, features]: products of two matrices are what XLA on a CPU is quick at.
    for width in hidden:
        x = activate(nn.Dense(width, kernel_init=kernel_init)(x))
    return x


def head(x: jax.Array, outputs: int, scale: float) -> jax.Array:
    """The last layer, `[N, F]` to `[N, outputs]`."""
    return nn.Dense(outputs, kernel_init=nn.initializers.orthogonal(scale), name="head")(x)


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


def checked_widths(
    space: Space, hidden: Sequence[int] | None, activation: str, convolve: bool = True
) -> tuple[int, ...]:
    """Widths of the dense layers, chosen by the observations where none are given."""
    if activation not in _ACTIVATIONS:
        raise unknown_name("activation", activation, _ACTIVATIONS)
    if hidden is not None:
        return tuple(hidden)
    if not (convolve and _is_image(space)):
        return _VECTOR_HIDDEN
    return _LARGE_IMAGE_HIDDEN if _is_large(space.shape) else _SMALL_IMAGE_HIDDEN


def _is_image(space: Space) -> bool:
    """Three axes, large enough for the 3 x 3 convolution."""
    return isinstance(space, Box) and len(space.shape) == 3 and min(space.shape[:2]) >= 3


def _is_large(image_shape: tuple[int, ...]) -> bool:
    """Whether an image `[H, W, C]` is large enough for the convolutions of DQN."""
    return min(image_shape[:2]) >= _LARGE_FROM


def features(observation: jax.Array, space: Space, convolve: bool = True) -> jax.Array:
    """Observations `[N, *obs]` as float32: `[N, H, W, C]` for an image to convolve, `[N, F]` for all else."""
    if observation.shape[1:] != space.shape:
        raise FdgError(
            f"the network was made for observations [N, {', '.join(map(str, space.shape))}] of {space},"
            f" but was given {list(observation.shape)}: flatten all leading axes into one"
        )
    count = observation.shape[0]
    match space:
        case Discrete(n):
            return jax.nn.one_hot(observation, n, dtype=jnp.float32)
        case MultiDiscrete(nvec):
            columns = [jax.nn.one_hot(observation[:, i], n, dtype=jnp.float32) for i, n in enumerate(nvec)]
            return jnp.concatenate(columns, axis=-1)
    scale = 1.0 / 255.0 if observation.dtype == jnp.uint8 else 1.0
    inputs = observation.astype(jnp.float32) * scale
    return inputs if convolve and _is_image(space) else inputs.reshape(count, math.prod(space.shape))
