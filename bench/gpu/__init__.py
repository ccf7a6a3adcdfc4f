"""Measurements on a GPU: see docs/gpu.md."""
