"""Networks as pairs of functions, and the default actor-critic.

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

from algos import distributions
from envs.spaces import Box, Discrete, MultiDiscrete, Space
from fdg.errors import FdgError, unknown_name

_ACTIVATIONS = {"tanh": nn.tanh, "relu": nn.relu, "silu": nn.silu, "gelu": nn.gelu, "elu": nn.elu}

# For images, the torso of MinAtar's own agents (Young and Tian 2019, arXiv 1903.03176): 16 filters of 3 x 3,
# and a dense layer of 128.
_IMAGE_FILTERS = 16
_IMAGE_HIDDEN = (128,)
_VECTOR_HIDDEN = (64, 64)


class Network(NamedTuple):
    """A network as two pure functions.

    `init(key, observation [N, *obs]) -> parameters`, a pytree; of the observation only shape and dtype count.
    `apply(parameters, observation [N, *obs]) -> output`, whose leading axis is `N`.

    Networks made by `actor_critic` are equal, and hash alike, if their arguments were; others compare by the
    identity of their functions.
    """

    init: Callable[[jax.Array, Any], Any]
    apply: Callable[[Any, Any], Any]


def actor_critic(
    observation_space: Space,
    action_space: Space,
    hidden: Sequence[int] | None = None,
    activation: str = "tanh",
    initial_log_std: float = 0.0,
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
            three axes `[height, width, channels]` get a 3 x 3 convolution first; all other shapes are
            flattened. `Discrete` and `MultiDiscrete`: one-hot.
        action_space: any that `distributions.for_space` knows.
        hidden: widths of the dense layers, the same for actor and critic. Default: `(64, 64)`, and `(128,)`
            after the convolution of an image.
        activation: "tanh", "relu", "silu", "gelu" or "elu"; after every layer but the heads.
        initial_log_std: for a `Box` action space.

    >>> network = actor_critic(Box(-1.0, 1.0, (4,)), Discrete(2))
    >>> observation = jnp.zeros((8, 4))
    >>> parameters = network.init(jax.random.key(0), observation)
    >>> logits, value = network.apply(parameters, observation)
    >>> logits.shape, value.shape
    ((8, 2), (8,))
    """
    check(action_space, activation)
    hidden = widths(observation_space, hidden)
    module = ActorCritic(observation_space, action_space, hidden, activation, float(initial_log_std))
    return Network(_Init(module), _Apply(module))


class ActorCritic(nn.Module):
    """Two separate trunks on one input: `[N, *obs]` to `([N, P], [N])` float32 (see `actor_critic`)."""

    observation_space: Space
    action_space: Space
    hidden: tuple[int, ...]
    activation: str
    initial_log_std: float

    @nn.compact
    def __call__(self, observation: jax.Array) -> tuple[jax.Array, jax.Array]:  # noqa: D102
        inputs = features(observation, self.observation_space)
        outputs = distributions.for_space(self.action_space).size
        if isinstance(self.action_space, Box):
            outputs //= 2  # the means; the logs of the standard deviations follow below
        actor = Trunk(self.hidden, outputs, 0.01, self.activation, name="actor")(inputs)
        critic = Trunk(self.hidden, 1, 1.0, self.activation, name="critic")(inputs)
        if isinstance(self.action_space, Box):
            log_std = self.param("log_std", nn.initializers.constant(self.initial_log_std), (outputs,))
            actor = jnp.concatenate([actor, jnp.broadcast_to(log_std, actor.shape)], axis=-1)
        return actor, critic[:, 0]


class Trunk(nn.Module):
    """Dense layers and a head: `[N, F]` to `[N, outputs]`; an image `[N, H, W, C]` is convolved first."""

    hidden: tuple[int, ...]
    outputs: int
    head_scale: float
    activation: str

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:  # noqa: D102
        x = hidden_layers(inputs, self.hidden, self.activation)
        return head(x, self.outputs, self.head_scale)


# The two below are called inside a module's `__call__`; their layers belong to that module.
def hidden_layers(inputs: jax.Array, hidden: Sequence[int], activation: str) -> jax.Array:
    """Dense layers, `[N, F]` to `[N, hidden[-1]]`; an image `[N, H, W, C]` is convolved first."""
    activate = _ACTIVATIONS[activation]
    kernel_init = nn.initializers.orthogonal(math.sqrt(2.0))
    x = inputs
    if x.ndim == 4:
        x = activate(nn.Conv(_IMAGE_FILTERS, (3, 3), padding="VALID", kernel_init=kernel_init)(x))
        x = x.reshape(x.shape[0], -1)
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

    def __call__(self, key: jax.Array, observation: jax.Array) -> Any:
        return self.module.init(key, observation)["params"]


@dataclass(frozen=True)
class _Apply:
    module: nn.Module

    def __call__(self, parameters: Any, observation: jax.Array) -> Any:
        return self.module.apply({"params": parameters}, observation)


def _is_image(space: Space) -> bool:
    """Three axes, large enough for the 3 x 3 convolution."""
    return isinstance(space, Box) and len(space.shape) == 3 and min(space.shape[:2]) >= 3


def widths(space: Space, hidden: Sequence[int] | None) -> tuple[int, ...]:
    """Those given, or the default for an observation space."""
    if hidden is not None:
        return tuple(hidden)
    return _IMAGE_HIDDEN if _is_image(space) else _VECTOR_HIDDEN


def check(action_space: Space, activation: str) -> None:
    """Refuses a space without distribution, or an unknown activation, before any tracing."""
    if activation not in _ACTIVATIONS:
        raise unknown_name("activation", activation, _ACTIVATIONS)
    distributions.for_space(action_space)


def features(observation: jax.Array, space: Space) -> jax.Array:
    """Observations `[N, *obs]` as float32: `[N, H, W, C]` for an image, `[N, F]` for all else."""
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
    return inputs if _is_image(space) else inputs.reshape(count, math.prod(space.shape))
