"""Batch-axis propagation: what each operation does with the batch axis, and which collectives follow."""
