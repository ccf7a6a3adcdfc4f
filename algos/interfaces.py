"""What users write: bonuses on rewards, normalisers of observations, transforms of rows, explorations.

Each is a value of pure functions that carry their own state. Any algorithm takes it, as a setting.

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
        """What a value of this type is, for messages."""
        return "an algos.Bonus(init, apply), 'module:name' of one"


@checked_names
class Normalizer(NamedTuple):
    """Normalisation of observations, as three pure functions.

    `init(observation_space) -> statistics`, a pytree.
    `apply(statistics, observation [..., *obs]) -> observation [..., *obs]`, with the same shapes.
    `update(statistics, observation [T, B, *obs]) -> statistics`, once after each rollout; with several
    agents, and in A3C with its workers, there is another leading axis: count axes from the last.
    """

    init: Callable[[ObservationSpace], Any]
    apply: Callable[[Any, Any], Any]
    update: Callable[[Any, Any], Any]

    @staticmethod
    def described() -> str:
        """What a value of this type is, for messages."""
        return "an algos.Normalizer(init, apply, update), 'module:name' of one"


class Transform:
    """A pure function `(rows, parameters, key) -> rows`; any function with these arguments.

    - `rows`: on-policy, a `Trajectory [T, B]` (`algos.on_policy`); with replay, the sampled minibatches
      `[U, N]` of `Transition` (`algos.replay`), or of `Sequences` (`algos.sequences`). The result has the
      same shapes.
    - `parameters`: on-policy, the network's before the update; with replay, everything that an update
      changes. With `staleness` they are newer than those that acted.
    - `key`: one key; split it over the second axis, so that results do not depend on the placement.
    """

    _fields: ClassVar[tuple[str, ...]] = ("__call__",)

    @staticmethod
    def described() -> str:
        """What a value of this type is, for messages."""
        return "a function of (rows, parameters, key), 'module:name' of one"


@checked_names
class Explorer(NamedTuple):
    """Exploration in training, as two pure functions over environments.

    `init(action [B, *action]) -> state [B, ...]`: only shape and dtype of the action are used.
    `apply(state [B, ...], policy, start [B], keys [B], progress) -> (state [B, ...], action [B, *action])`:
    `policy` has `mode()` and `sample(keys)`, and for value-based algorithms `logits [B, n]`, the values
    (`-inf`: not allowed). `start` is True where an episode starts; `progress`, `[]` float32, goes from 0 to 1
    over the run. Actions of SAC, TD3 and CrossQ are in [-1, 1].
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[[Any, Any, jax.Array, jax.Array, jax.Array], tuple[Any, jax.Array]]

    @staticmethod
    def described() -> str:
        """Its name in messages."""
        return "an algos.Explorer(init, apply), 'module:name' of one"
