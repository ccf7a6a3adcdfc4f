"""Algorithms that learn from data sets: imitation, offline reinforcement learning, and fine-tuning online."""

from fdg.public_names import submodules

__getattr__ = submodules(__name__)
