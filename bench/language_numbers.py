"""Parameters and inputs, from NumPy, of both sides of `bench.language_oracle`."""

import numpy as np


def random_parameters(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """A network's parameters, generated in the order of their names."""
    draw = np.random.default_rng(seed)
    drawn = {name: 0.2 * draw.normal(size=shapes[name]) for name in sorted(shapes)}
    return {name: (x + ("norm" in name)).astype(np.float32) for name, x in drawn.items()}


def inputs(vocabulary: int, seed: int, padded: bool) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask [3, 12]; `padded`: left-padded by 0, 3 and 7."""
    draw = np.random.default_rng(1000 + seed)
    tokens = draw.integers(0, vocabulary, (3, 12))
    padding = np.array([0, 3, 7]) if padded else np.zeros(3, int)
    return tokens, np.arange(12)[None] >= padding[:, None]


def projections(gradient: np.ndarray, name: str) -> np.ndarray:
    """A digest of a gradient: its norm, and its products with three random directions of norm 1."""
    draw = np.random.default_rng(sum(map(ord, name)))
    flat = np.asarray(gradient, np.float64).ravel()
    directions = draw.normal(size=(3, flat.size))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return np.concatenate([[np.linalg.norm(flat)], directions @ flat])
