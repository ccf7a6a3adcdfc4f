"""Measures fdg on a GPU; docs/gpu.md has the commands and results."""
