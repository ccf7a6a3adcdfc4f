"""Lowering: from a plan to functions that XLA compiles."""
