"""Profiling: the time of an iteration by fragment, compared with the machine's limits."""
