"""The schema of settings: fields with help and rules, checks, parts that share fields, and presets.

Algorithms, a user's too, and the groups of `fdg.training.settings` declare their fields by it; flags, files,
sweeps and searches read it.
"""
