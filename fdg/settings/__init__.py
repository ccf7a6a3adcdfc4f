"""The schema of settings: fields with help and rules, checks, shared parts, and presets.

Algorithms (a user's too) and the groups of `fdg.training.settings` declare their fields with it; flags,
files, sweeps and searches read it.
"""
