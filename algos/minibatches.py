"""Deprecated name of `algos.optimizers`, which works until the next release."""

from fdg.settings.moved import moved

__getattr__ = moved(__name__, "algos.optimizers")
