"""Deprecated name of `algos.q_learning`, which works until the next release."""

import warnings
from typing import Any

from algos import q_learning


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(q_learning, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    text = f"algos.exploration is deprecated: write from algos.q_learning import {name}"
    warnings.warn(text, DeprecationWarning, 2)
    return getattr(q_learning, name)
