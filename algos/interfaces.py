"""Interfaces that users implement: reward bonuses, observation normalisers, row transforms, and explorers.

A bonus, a normaliser and an explorer are tuples of pure functions that take and return a state; a transform
is one pure function. Each is the value of a setting.

Shapes: `T` steps of a rollout, `B` environments, `N` rows, `U` gradient steps of an iteration.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax

from envs import TimeStep
from envs.composite import ObservationSpace
from fdg.arguments import checked_names


@checked_names
class Bonus(NamedTuple):
    """An additional reward, such as for exploration, as two pure functions.

    `init(observation [B, *obs]) -> state`: a pytree; only shape and dtype of the observation are used.
    `apply(state, time_step [T, B]) -> (state, reward [T, B])`: called after a rollout, before learning or
    storing. `time_step.final_observation` is the observation after each step.
    """

    init: Callable[[Any], Any]
    apply: Callable[[Any, TimeStep], tuple[Any, jax.Array]]

    @staticmethod
    def described() -> str:
        """How messages describe a value of this type."""
        return "an algos.Bonus(init, apply), 'module:name' of one"


@checked_names
class Normalizer(NamedTuple):
    """Normalisation of observations, as three pure functions.

    `init(observation_space) -> statistics`, a pytree.
    `apply(statistics, observation [..., *obs]) -> observation [..., *obs]`, with the same shapes.
    `update(statistics, observation [T, B, *obs]) -> statistics`, once after each rollout. With
    several agents, and in A3C, observations have one more leading axis, so count axes from the last one.
    """

    init: Callable[[ObservationSpace], Any]
    apply: Callable[[Any, Any], Any]
    update: Callable[[Any, Any], Any]

    @staticmethod
    def described() -> str:
        """How messages describe a value of this type."""
        return "an algos.Normalizer(init, apply, update), 'module:name' of one"


class Transform:
    """The interface of a transform: any pure function `(rows, parameters, key) -> rows`.

    - `rows`: in on-policy algorithms, a `Trajectory [T, B]` (`algos.on_policy`); in algorithms with replay,
      the sampled minibatches `[U, N]` of `Transition` (`algos.replaying`) or `Sequences` (`algos.sequences`).
      The result has the same shapes.
    - `parameters`: in on-policy algorithms, the network's parameters before the update; in algorithms with
      replay, all values that an update changes. With `staleness` they are newer than the actor's parameters.
    - `key`: one key; split it over the second axis, so that results do not depend on the placement.
    """

    _fields: ClassVar[tuple[str, ...]] = ("__call__",)  # functions that a value must have (`settings.fields`)

    @staticmethod
    def described() -> str:
        """How messages describe a value of this type."""
        return "a function of (rows, parameters, key), 'module:name' of one"


@checked_names
class Explorer(NamedTuple):
    """Exploration in training, as two pure functions over environments.

    `init(action [B, *action]) -> state [B, ...]`: only shape and dtype of the action are used.
    `apply(state [B, ...], policy, start [B], keys [B], progress) -> (state [B, ...], action [B, *action])`:
    `policy` has `mode()` and `sample(keys)`, and for value-based algorithms `logits [B, n]`, the values of
    actions (`-inf`: not allowed). `start` is True where an episode starts. `progress`, `[]` float32, goes
    from 0 to 1 over the run. Continuous actions are in [-1, 1].
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[[Any, Any, jax.Array, jax.Array, jax.Array], tuple[Any, jax.Array]]

    @staticmethod
    def described() -> str:
        """How messages describe a value of this type."""
        return "an algos.Explorer(init, apply), 'module:name' of one"
