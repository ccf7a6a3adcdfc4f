"""Measurements for the first hour on a GPU: see docs/gpu.md."""
