"""Observations: arrays, parts, and masks of valid actions."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax


class MaskedObservation(NamedTuple):
    """An observation with a mask of valid actions.

    `observation_space` is the space of `observation`; `features_and_mask` separates the two.
    """

    observation: Any  # [..., *observation_space.shape]; a pytree of parts for an `envs.Dict` or `envs.Tuple`
    # [..., n] bool, True = allowed. `Discrete(n)`: one entry per action; `MultiDiscrete(nvec)`: the entries
    # of its choices, concatenated: n = sum(nvec).
    action_mask: jax.Array


# An array, or a dictionary or tuple of arrays nested like the observation space; each possibly with a mask.
Observation: TypeAlias = "jax.Array | dict[str, Any] | tuple[Any, ...] | MaskedObservation"


def features_and_mask(observation: Observation) -> tuple[Any, jax.Array | None]:
    """The input of the network and the mask of valid actions (None if all are always valid).

    >>> features_and_mask(MaskedObservation("features", "mask"))
    ('features', 'mask')
    >>> features_and_mask("features")
    ('features', None)
    """
    if isinstance(observation, MaskedObservation):
        return observation.observation, observation.action_mask
    return observation, None


def map_features(function: Callable[[Any], Any], observation: Observation) -> Observation:
    """Applies a function to the features of an observation; a mask is unchanged.

    >>> map_features(str.upper, MaskedObservation("features", "mask"))
    MaskedObservation(observation='FEATURES', action_mask='mask')
    """
    features, mask = features_and_mask(observation)
    new_features = function(features)
    return new_features if mask is None else MaskedObservation(new_features, mask)
