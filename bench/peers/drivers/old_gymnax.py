"""Adapts gymnax 1.0 to scripts for older versions, whose `step` returned five values (now six).

Drivers replace the `gymnax.make` that a script calls by `make` of this module.
"""

import contextlib
import importlib.util
from typing import Any

import_context: Any = contextlib.nullcontext
# gymnax uses matplotlib and seaborn only to plot, so it can be imported without them.
if any(importlib.util.find_spec(name) is None for name in ("matplotlib", "seaborn")):
    from envs.lazy_plotting import without_plotting as import_context

with import_context():
    import gymnax
    from gymnax.wrappers import LegacyStepAPIWrapper

_make = gymnax.make  # the original, which drivers replace


class OldStep(LegacyStepAPIWrapper):
    """`LegacyStepAPIWrapper` with the small `info` of old versions, which scripts store for each step."""

    def __getattr__(self, name: str):
        if name.startswith("__"):  # `copy` looks these up before the wrapper has an environment
            raise AttributeError(name)
        return super().__getattr__(name)

    def step(self, key, state, action, params=None):
        *results, info = super().step(key, state, action, params)
        return *results, {name: value for name, value in info.items() if name != "final_observation"}


def make(name: str, **keywords):
    """`gymnax.make` as in old versions: the environment and its parameters."""
    env, parameters = _make(name, **keywords)
    return OldStep(env), parameters
