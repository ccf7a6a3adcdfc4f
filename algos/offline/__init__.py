"""Algorithms that learn from data sets: imitation, offline reinforcement learning, and fine-tuning online."""
