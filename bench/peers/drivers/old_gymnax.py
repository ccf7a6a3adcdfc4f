"""gymnax 1.0 for scripts that were written for an older one, whose steps gave five values."""

import contextlib
import importlib.util
from typing import Any

drawn: Any = contextlib.nullcontext
_DRAWING = ("matplotlib", "seaborn")  # gymnax imports them, and only draws with them
if any(importlib.util.find_spec(name) is None for name in _DRAWING):
    from envs.lazy_plotting import without_plotting as drawn

with drawn():
    import gymnax
    from gymnax.wrappers import LegacyStepAPIWrapper

_make = gymnax.make


class OldStep(LegacyStepAPIWrapper):
    """`LegacyStepAPIWrapper` with the old `info`: scripts keep all of it, and that costs."""

    def __getattr__(self, name: str):
        if name.startswith("__"):  # asked for by `copy`, before there is an environment
            raise AttributeError(name)
        return super().__getattr__(name)

    def step(self, key, state, action, params=None):
        """Observation, state, reward, whether the episode ended, and the rest."""
        *results, info = super().step(key, state, action, params)
        return *results, {name: value for name, value in info.items() if name != "final_observation"}


def make(name: str, **keywords):
    """As `gymnax.make` was."""
    env, parameters = _make(name, **keywords)
    return OldStep(env), parameters
