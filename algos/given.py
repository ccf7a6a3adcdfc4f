"""Networks as pairs of functions: those that a user gives, found and adapted, and checks of what they give.

An algorithm takes a `Network` and knows nothing else about it: any pair `(init, apply)` of pure functions
will do. Its field `network` takes such a pair, or one of these: a Linen module; an NNX or Equinox module,
whose parameters are the initial ones; a module class or a `functools.partial` of one, which is called with
random keys of the run; or the name of any of these, `"my.module:name"`.

A network of another width than the action space would train all the same: three logits play `Discrete(2)`,
the third action included. `check_when_traced` of each algorithm looks at shapes alone, once.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from algos import distributions
from envs import composite, own
from envs.composite import ObservationSpace
from envs.spaces import Space
from fdg.arguments import check_takes
from fdg.errors import FdgError
from fdg.settings.foreign import functions, library_of

Sees = Literal["both", "actor", "critic"]

# Metadata of fields that hold a user's own network: the command line takes its name.
NETWORK: dict[str, Any] = {
    "help": "module:name of a network, or of a function of the spaces that returns one "
    "(None: built from --hidden and its like)",
    "flag": str | None,
    "holds": "network",
}


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

    @staticmethod
    def described() -> str:
        """What messages call it."""
        return "an algos.Network(init, apply), a module of Flax or Equinox, 'module:name' of one"


def by_name(flag: str, value: Any) -> Any:
    """What a value `module:name` names; any other value as it is.

    Raises:
      FdgError: a name that names nothing.
    """
    return own.found(flag, value) if isinstance(value, str) else value


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A default network by its settings, such as `algos.networks.mlp(64, 64)`: it stands for these fields."""

    settings: tuple[tuple[str, Any], ...]


def resolved(
    network: Any,
    observation_space: ObservationSpace,
    action_space: Space,
    field: str = "network",
    sees: Sees = "both",
) -> Any:
    """What a field of an algorithm holds, as a `Network`; a network with a memory, and None, as they are.

    Where parts of observations are privileged, an actor gets zeros in their place: of an actor-critic
    ("both") the policy is worked out without them, the value with them. A network with a memory has to see to
    that itself.

    Args:
      network: see above.
      observation_space, action_space: what a function that a name names is called with.
      field: for messages.
      sees: what it is.

    Raises:
      FdgError: a name that names nothing, or no network.
    """
    if isinstance(network, str):
        network = _named(network, observation_space, action_space, field)
    seen = ("observation", "action") if sees == "critic" else ("observation",)
    if hasattr(network, "unroll"):
        check_takes(network.init, ("key", *seen), f"init of {field}")
        check_takes(network.unroll, ("parameters", "memory", "observation", "start"), f"unroll of {field}")
        return network
    if network is None:
        return network
    if library_of(network) is None:
        check_takes(network.init, ("key", *seen), f"init of {field}")
        check_takes(network.apply, ("parameters", *seen), f"apply of {field}")
        made = Network(network.init, network.apply)
    else:
        made = Network(*functions(network, field))
    if sees == "critic" or composite.public(observation_space) == observation_space:
        return made
    return Network(made.init, _Blindfolded(made.apply, observation_space, sees == "both"))


@functools.lru_cache(maxsize=64)
def _named(name: str, observation_space: ObservationSpace, action_space: Space, field: str) -> Any:
    """What `module:name` names; what a function of the two spaces returns."""
    value = own.found(f"--{field.replace('_', '-')}", name)
    if inspect.isfunction(value):
        try:
            value = value(observation_space, action_space)
        except FdgError:
            raise
        except Exception as error:  # whatever the code of somebody's own raises
            raise FdgError(
                f"{field} '{name}' fails for {observation_space!r:.100} and {action_space!r:.60}:"
                f" {type(error).__name__}: {error}"
            ) from error
    pair = all(callable(getattr(value, part, None)) for part in ("init", "apply"))
    if not pair and not hasattr(value, "unroll") and library_of(value) is None:
        raise FdgError(
            f"{field} '{name}' is a {type(value).__name__}: name a module of Linen, NNX or Equinox, an"
            " algos.Network, or a function of (observation_space, action_space) that returns one"
        )
    return value


@dataclasses.dataclass(frozen=True)
class _Blindfolded:
    """`apply` of a network whose actor does not see what is privileged."""

    apply: Any
    space: ObservationSpace
    has_critic: bool  # whose value does

    def __call__(self, parameters: Any, observation: Any, *more: Any) -> Any:
        leading = jax.tree.leaves(observation)[0].shape[:1]
        public = composite.public_part(self.space, observation)
        output = self.apply(parameters, composite.with_zeros(self.space, public, leading), *more)
        if not self.has_critic:
            return output
        policy, _ = pair(output, leading)
        return policy, pair(self.apply(parameters, observation, *more), leading)[1]


# --- what they give, checked against the action space while it is traced ---


def actor_and_critic(output: Any, action_space: Space, leading: tuple[int, ...]) -> None:
    """Refuses an actor-critic that does not give `(policy [..., P], value [...])`, `...` being `leading`.

    Raises:
      FdgError: no pair, another number of results than the actions need, or a value with an axis too many.
    """
    policy, value = pair(output, leading)
    size = distributions.for_space(action_space).size
    _check("the network gives the policy as", policy, (*leading, size), f"{size} numbers for {action_space}")
    fix = ": take its last axis away, value[..., 0]" if np.shape(value) == (*leading, 1) else ""
    _check("the network gives values as", value, leading, f"one for each observation{fix}")


def pair(output: Any, leading: tuple[int, ...]) -> tuple[Any, Any]:
    """What an actor-critic gave, as the two that it is.

    Raises:
      FdgError: it gave one, or three.
    """
    if not isinstance(output, tuple | list) or len(output) != 2:
        raise FdgError(
            f"the network gives {_shapes(output)}: an actor-critic gives a pair, (policy"
            f" {_text((*leading, 'P'))}, value {_text(leading)})"
        )
    return output[0], output[1]


def action_values(values: Any, actions: int, count: int) -> None:
    """Refuses what is not `[N, n]`, a value for each action.

    Raises:
      FdgError: values of another shape.
    """
    what = "the network gives values of actions as"
    _check(what, values, (count, actions), f"one for each of {actions} actions")


def agent_values(output: Any, actions: int, leading: tuple[int, ...]) -> None:
    """Refuses what is not a pair of values `[T, B, A, n]`, one for each action of each agent, and a memory.

    Raises:
      FdgError: no pair, or values of another shape.
    """
    if not isinstance(output, tuple | list) or len(output) != 2:
        expected = f"(values {_text((*leading, actions))}, memory)"
        raise FdgError(f"the network gives {_shapes(output)}: it gives a pair, {expected}")
    what = "the network gives values of actions as"
    _check(what, output[0], (*leading, actions), f"one for each of {actions} actions of each agent")


def gaussian(output: Any, action_space: Space, count: int) -> None:
    """Refuses what is not means, then logs of standard deviations, `[N, 2 * D]`.

    Raises:
      FdgError: of another shape.
    """
    size = 2 * math.prod(action_space.shape)
    _check("actor_network gives", output, (count, size), f"means and logs of deviations for {action_space}")


def actions(output: Any, action_space: Space, count: int) -> None:
    """Refuses what is not a number for each component of an action, `[N, D]`.

    Raises:
      FdgError: of another shape.
    """
    size = math.prod(action_space.shape)
    _check("actor_network gives", output, (count, size), f"a number for each component of {action_space}")


def twins(output: Any, count: int, numbers: int = 1) -> None:
    """Refuses what is not two values, each `[N]`; or so many numbers, each `[N, numbers]`.

    Raises:
      FdgError: something else.
    """
    if not isinstance(output, tuple | list) or len(output) != 2:
        raise FdgError(f"critic_network gives {_shapes(output)}: it gives two values, each {_text((count,))}")
    if numbers > 1:
        for value in output:
            shape, why = (count, numbers), f"{numbers} numbers (atoms) for each sample"
            _check("critic_network gives a distribution as", value, shape, why)
        return
    for value in output:
        fix = ": take its last axis away, value[..., 0]" if np.shape(value) == (count, 1) else ""
        _check("critic_network gives a value as", value, (count,), f"one for each sample{fix}")


def ensemble(output: Any, critics: int, count: int, numbers: int = 1) -> None:
    """Refuses what is not a value of each critic, `[E, N]`; or `numbers` numbers of each, `[E, N, numbers]`.

    Raises:
      FdgError: of another shape.
    """
    more, what = ((), "value") if numbers == 1 else ((numbers,), f"{numbers} numbers")
    why = f"{what} of each of num_critics={critics} critics for each sample"
    _check("critic_network gives", output, (critics, count, *more), why)


def _check(what: str, value: Any, shape: tuple[Any, ...], why: str) -> None:
    if not hasattr(value, "shape") or value.shape != shape:
        raise FdgError(f"{what} {_shapes(value)}: it must be {_text(shape)}, {why}")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise FdgError(f"{what} {_shapes(value)}: it must be of a floating dtype")


def _shapes(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{len(value)} results ({', '.join(map(_shapes, value))})"
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else f"a {type(value).__name__}"


def _text(shape: tuple[Any, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
