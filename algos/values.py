"""Values that an algorithm is composed of: interfaces of its networks, optimisers, ..., and their settings.

An algorithm has to import only these interfaces: `registry.option` imports the module that implements a
component on first use. Networks (`algos.networks`) return the parameters of distributions
(`algos.distributions`). Optimisers are optax's (`algos.optimizers`). Normalisers (`algos.normalize`) and
bonuses (additional rewards: `algos.interfaces.Bonus`) are pure functions that take and return a state. A
transform is a pure function.

Shapes: `T` steps of a rollout, `B` environments, `N` rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import jax

from algos import registry
from envs import TimeStep, user_code
from envs.composite import ObservationSpace
from fdg.arguments import checked_names
from fdg.settings.fields import hyperparameter, own_value, require_positive
from fdg.settings.moved import moved
from fdg.settings.parts import Part

__getattr__ = moved(__name__, "algos.interfaces", "Bonus Normalizer Transform")


def by_name(flag: str, value: Any) -> Any:
    """Resolves `module:name`, or raises an `FdgError`; returns any other value unchanged."""
    return user_code.import_attribute(flag, value) if isinstance(value, str) else value


# --- distributions over actions ---


class Policy(Protocol):
    """A distribution over actions; these methods are enough for acting."""

    def sample(self, keys: jax.Array) -> jax.Array:
        """Random actions `[..., *action]`; `keys` is one key, or one per element of the leading axes."""

    def mode(self) -> jax.Array:
        """The most probable action: `[..., *action]`."""


# --- networks ---

# Metadata of fields that hold a user's network: the command line takes its name.
NETWORK: dict[str, Any] = {
    "help": "module:name of a network, or of a function of the spaces that returns one "
    "(None: built from settings such as --hidden)",
    "flag": str | None,
    "holds": "network",
}


@checked_names
class Network(NamedTuple):
    """A network as two pure functions.

    `init(key, observation [N, *obs]) -> parameters`, a pytree; only shape and dtype of the observation are
    used.
    `apply(parameters, observation [N, *obs]) -> output`, whose leading axis is `N`.
    Both functions of a critic of actions (`twin_critics`) take an action after the observation.

    Default networks with equal arguments are equal and hash alike; others compare by their functions.
    """

    init: Callable[..., Any]
    apply: Callable[..., Any]

    @staticmethod
    def described() -> str:
        """How messages describe a value of this type."""
        return "an algos.Network(init, apply), a module of Flax or Equinox, 'module:name' of one"


@checked_names
class RecurrentNetwork(NamedTuple):
    """A network with a memory, as three pure functions.

    - `init(key, observation [T, B, *obs]) -> parameters`; only shape and dtype of the observation are used.
    - `memory(B) -> memory`: the initial memory; a pytree with leading axis `B`.
    - `unroll(parameters, memory, observation [T, B, *obs], start [T, B]) -> Output`: runs `T` steps. Where
      `start` is True an episode begins, and the memory is reset.

    Networks made by `recurrent_actor_critic` with equal arguments are equal, and hash alike.
    """

    init: Callable[[jax.Array, Any], Any]
    memory: Callable[[int], Any]
    unroll: Callable[[Any, Any, Any, jax.Array], Any]

    @staticmethod
    def described() -> str:
        """How messages describe a value of this type."""
        return "an algos.RecurrentNetwork(init, memory, unroll)"


AnyNetwork: TypeAlias = RecurrentNetwork | Network

Activation = Literal["tanh", "relu", "silu", "gelu", "elu"]
Torso = Literal["dense", "simba"]


@dataclasses.dataclass(frozen=True)
class Layers(Part):
    """The layers of an algorithm's default networks."""

    hidden: tuple[int, ...] | None = hyperparameter(
        None, "widths of the layers (None: chosen by observation)"
    )
    activation: Activation = hyperparameter("tanh", "activation function of the layers")
    convolve: bool = hyperparameter(True, "use a CNN for images; otherwise flatten them")
    layer_norm: bool = hyperparameter(False, "normalise each layer before its activation")
    torso: Torso = hyperparameter(
        "dense",
        "hidden layers: dense, or simba (SimbaV2's residual blocks, one per entry of hidden, all of"
        " one width)",
    )


# --- optimisers ---


@dataclasses.dataclass(frozen=True)
class OptimizerSettings(Part):
    """An optimiser and its step size."""

    learning_rate: float = hyperparameter(2.5e-4, "step size of the optimiser")
    anneal_learning_rate: bool = hyperparameter(False, "anneal the step size linearly to zero")
    optimizer: Any = own_value(
        "an optimiser of optax by its name (lion, adamw, muon, ...), or module:name of a function of the"
        " step size that returns one; in Python also a gradient transformation (None: the algorithm's)",
        "optimizer",
    )

    def check(self, algorithm: Any) -> None:
        """Refuses a step size that is not positive, and an invalid optimiser."""
        require_positive(algorithm, "learning_rate")
        registry.option("optimizers").user_optimizer(self.optimizer, 1e-3)


@dataclasses.dataclass(frozen=True)
class ClippedOptimizer(OptimizerSettings):
    """An optimiser whose gradients are clipped by their global norm."""

    max_grad_norm: float = hyperparameter(0.5, "global norm to which gradients are clipped")

    def check(self, algorithm: Any) -> None:
        """Refuses a step size or a norm that is not positive."""
        super().check(algorithm)
        require_positive(algorithm, "max_grad_norm")


# --- rewards ---


@dataclasses.dataclass(frozen=True)
class Discount(Part):
    """The discount of rewards."""

    discount: float = hyperparameter(
        0.99, "gamma, the discount per step (in a game per move, in a text per token)"
    )


# --- normalisation of observations and rewards ---


@dataclasses.dataclass(frozen=True)
class ObservationNormalizer(Part):
    """Settings of the normalisation of observations."""

    normalize_observation: bool = hyperparameter(False, "normalise observations by running mean and variance")
    normalize: Any = own_value(
        "module:name of a normaliser of observations, an algos.Normalizer (None: as --normalize-observation)",
        "normalizer",
    )

    begin_returns = staticmethod(lambda shape: (None, None))  # rewards are not normalised

    @property
    def used(self) -> bool:
        """Whether observations are normalised."""
        return self.normalize_observation or self.normalize is not None

    def begin(self, space: ObservationSpace, keep_statistics: bool = False) -> Any:
        """Initial statistics; None if observations are not normalised, unless `keep_statistics` is True."""
        return (
            registry.option("running").begin(self.normalize, space) if self.used or keep_statistics else None
        )

    def seen(self, statistics: Any, observation: Any) -> Any:
        """Observations `[..., *obs]` as the networks see them: normalised. Changes no statistics."""
        if not self.used:
            return observation
        return registry.option("running").normalize_inputs(self.normalize, statistics, observation)

    def update(self, statistics: Any, observation: Any) -> Any:
        """Updates the statistics with observations `[T, B, *obs]`."""
        if not self.used:
            return statistics
        return registry.option("running").update_with_rollout(self.normalize, statistics, observation)

    def check(self, algorithm: Any) -> None:
        """Refuses two normalisers, and observations without a mean or variance."""
        registry.option("running").check(self, algorithm)


@dataclasses.dataclass(frozen=True)
class Normalizers(ObservationNormalizer):
    """Settings of the normalisation of observations and rewards."""

    normalize_reward: bool = hyperparameter(
        False, "divide rewards by the running standard deviation of the discounted return"
    )

    def begin_returns(self, shape: tuple[int, ...], keep_statistics: bool = False) -> tuple[Any, Any]:
        """Initial statistics of returns, and initial running returns, for environments of this `shape`.

        Both are None if rewards are not normalised, unless `keep_statistics` is True.
        """
        if not (self.normalize_reward or keep_statistics):
            return None, None
        return registry.option("running").begin_returns(shape)

    def reward(
        self, time_step: TimeStep, running_return: Any, statistics: Any, discount: float | jax.Array
    ) -> tuple[jax.Array, Any, Any]:
        """Normalised rewards `[T, B]`, the running returns `[B]`, and the statistics of returns."""
        if not self.normalize_reward:
            return time_step.reward, running_return, statistics
        reward, done = time_step.reward, time_step.done
        return registry.option("running").scale_rewards(reward, done, running_return, statistics, discount)


# --- transforms of rows between collecting and learning ---


@dataclasses.dataclass(frozen=True)
class Transforming(Part):
    """The setting of a user's transform of rows, `algos.Transform`."""

    transform: Any = own_value(
        "module:name of a function applied to rollouts before learning, an algos.Transform", "transform"
    )

    def rows(self, rows: Any, parameters: Any, key: jax.Array) -> Any:
        """The rows after the transform; unchanged if there is none."""
        if self.transform is None:
            return rows
        return registry.option("checks").apply_transform(self.transform, rows, parameters, key)
