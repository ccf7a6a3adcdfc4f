"""Batch-axis propagation: what each operation does with the batch axis, and the collectives that it needs."""
