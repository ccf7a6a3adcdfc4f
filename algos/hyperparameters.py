"""Deprecated name of `fdg.settings.fields`, which works until the next release."""

import warnings
from typing import Any

from fdg.settings import fields


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(fields, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    text = f"algos.hyperparameters is deprecated: write from fdg.settings.fields import {name}"
    warnings.warn(text, DeprecationWarning, 2)
    return getattr(fields, name)
