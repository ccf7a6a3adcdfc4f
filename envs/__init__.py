"""Environments: one interface, our own environments, and adapters to those of other packages.

`make("CartPole-v1")` returns a batched `Environment`; `vectorize` makes an `Environment` from your own
`SingleEnvironment`; `register` gives an environment a name for `make`.
"""

from typing import Any

from envs.checking import check_spec
from envs.composite import Dict, ObservationSpace, Tuple
from envs.contract import check
from envs.environment import (
    Environment,
    EnvironmentSpec,
    EpisodeState,
    SingleEnvironment,
    TimeStep,
    Vectorized,
    num_agents,
    vectorize,
)
from envs.host import HostEnvironment
from envs.observations import MaskedObservation, Observation, features_and_mask, map_features
from envs.registry import absolute, files_of, make, name_with_parameters, names, parse, register, trust_reason
from envs.spaces import Box, Discrete, MultiDiscrete, Space
from envs.unlike import Alike
from envs.wrappers import ActionRepeat, FrameStack, HideObservations, TimeAware, Wrapper
from fdg.arguments import explain_frozen
from fdg.public_names import no_attribute

# An assignment to a field raises an error that shows `env = dataclasses.replace(env, ...)`.
for _cls in (Vectorized, HostEnvironment, Wrapper, FrameStack, ActionRepeat, HideObservations, TimeAware):
    explain_frozen(_cls, "env")

__all__ = [
    "ActionRepeat",
    "Alike",
    "Box",
    "Dict",
    "Discrete",
    "Environment",
    "EnvironmentSpec",
    "EpisodeState",
    "FrameStack",
    "HideObservations",
    "MaskedObservation",
    "MultiDiscrete",
    "Observation",
    "ObservationSpace",
    "SingleEnvironment",
    "Space",
    "TimeAware",
    "TimeStep",
    "Tuple",
    "Wrapper",
    "absolute",
    "check",
    "check_spec",
    "features_and_mask",
    "files_of",
    "make",
    "map_features",
    "name_with_parameters",
    "names",
    "num_agents",
    "parse",
    "register",
    "trust_reason",
    "vectorize",
]


def __getattr__(name: str) -> Any:
    raise no_attribute(__name__, name, __all__)
