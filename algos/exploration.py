"""Deprecated name of `algos.q_learning`, which works until the next release."""

from fdg.settings.moved import moved

__getattr__ = moved(__name__, "algos.q_learning")
