"""Environments: one interface, one adapter a source.

`make("CartPole-v1")` gives a batched `Environment`; `vectorize` makes one from a `SingleEnvironment` of
your own, and `register` gives it a name.
"""

from envs.environment import Environment, EpisodeState, SingleEnvironment, TimeStep, vectorize
from envs.registry import make, names, register
from envs.spaces import Box, Discrete, MultiDiscrete, Space

__all__ = [
    "Box",
    "Discrete",
    "Environment",
    "EpisodeState",
    "MultiDiscrete",
    "SingleEnvironment",
    "Space",
    "TimeStep",
    "make",
    "names",
    "register",
    "vectorize",
]
