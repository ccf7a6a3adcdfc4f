"""Makes the parameters and inputs of both sides of `bench.language_oracle`, with NumPy."""

import numpy as np


def random_parameters(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """A network's parameters, generated in the order of their names; those of norms have mean 1."""
    rng = np.random.default_rng(seed)
    arrays = {name: 0.2 * rng.normal(size=shapes[name]) for name in sorted(shapes)}
    return {name: (x + ("norm" in name)).astype(np.float32) for name, x in arrays.items()}


def inputs(vocabulary: int, seed: int, padded: bool) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask [3, 12]; if `padded`, the rows are left-padded by 0, 3 and 7 tokens."""
    rng = np.random.default_rng(1000 + seed)
    tokens = rng.integers(0, vocabulary, (3, 12))
    padding = np.array([0, 3, 7]) if padded else np.zeros(3, int)
    return tokens, np.arange(12)[None] >= padding[:, None]


def projections(gradient: np.ndarray, name: str) -> np.ndarray:
    """A digest of a gradient: its norm, and its products with three random directions of norm 1."""
    rng = np.random.default_rng(sum(map(ord, name)))
    flat = np.asarray(gradient, np.float64).ravel()
    directions = rng.normal(size=(3, flat.size))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return np.concatenate([[np.linalg.norm(flat)], directions @ flat])
