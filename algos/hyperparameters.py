"""Deprecated name of `fdg.settings.fields`, which works until the next release."""

from fdg.settings.moved import moved

__getattr__ = moved(__name__, "fdg.settings.fields")
