"""Lowers a plan to functions that XLA compiles."""
