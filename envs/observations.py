"""Observations: arrays, parts, and masks of valid actions."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax


class MaskedObservation(NamedTuple):
    """An observation with a mask of valid actions.

    `observation_space` is the space of `observation`; `features_and_mask` separates the two.
    """

    # [..., *observation_space.shape]; nested parts if the space is an `envs.Dict` or `envs.Tuple`
    observation: Any
    # [..., n] bool, True = allowed: one entry for each of the n actions of a Discrete space; for a
    # MultiDiscrete space, the entries of its choices are concatenated, n = sum(nvec)
    action_mask: jax.Array


# An array, or a dictionary or tuple of them, nested as the observation space is; or either with a mask.
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
    changed = function(features)
    return changed if mask is None else MaskedObservation(changed, mask)
