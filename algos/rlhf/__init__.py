"""Algorithms for language models: from demonstrations, preferences and rewards."""

from fdg.public_names import submodules

__getattr__ = submodules(__name__)
