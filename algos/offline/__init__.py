"""Algorithms that learn from data sets: imitation, offline RL, and online fine-tuning."""

from fdg.public_names import submodules

__getattr__ = submodules(__name__)
