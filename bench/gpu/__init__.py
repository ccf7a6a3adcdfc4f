"""What to measure on a GPU in its first hour: see docs/gpu.md."""
