"""Deprecated name of `algos.losses`, which works until the next release."""

from fdg.settings.moved import moved

__getattr__ = moved(__name__, "algos.losses")
