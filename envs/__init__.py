"""Environments: one interface, one adapter a source.

`make("CartPole-v1")` gives a batched `Environment`; `vectorize` makes one from a `SingleEnvironment` of
your own, and `register` gives it a name.
"""

from envs.checking import check, check_spec
from envs.composite import Dict, ObservationSpace, Tuple
from envs.environment import (
    Environment,
    EnvironmentSpec,
    EpisodeState,
    MaskedObservation,
    Observation,
    SingleEnvironment,
    TimeStep,
    features_and_mask,
    map_features,
    num_agents,
    vectorize,
)
from envs.registry import make, names, parse, register
from envs.spaces import Box, Discrete, MultiDiscrete, Space

__all__ = [
    "Box",
    "Dict",
    "Discrete",
    "Environment",
    "EnvironmentSpec",
    "EpisodeState",
    "MaskedObservation",
    "MultiDiscrete",
    "Observation",
    "ObservationSpace",
    "SingleEnvironment",
    "Space",
    "TimeStep",
    "Tuple",
    "check",
    "check_spec",
    "features_and_mask",
    "make",
    "map_features",
    "names",
    "num_agents",
    "parse",
    "register",
    "vectorize",
]
