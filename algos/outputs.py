"""What a network of a user's own gives, checked against the action space while it is traced.

A network of another width than the action space would train all the same: three logits play `Discrete(2)`,
the third action included. `check_when_traced` of each algorithm looks at shapes alone, once.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from algos import distributions
from envs.spaces import Space
from fdg.errors import FdgError


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
