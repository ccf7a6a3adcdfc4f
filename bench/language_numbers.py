"""Makes the parameters and inputs with which `bench.language_oracle` compares fdg and transformers.

It needs only NumPy, because transformers runs in an environment without JAX (`bench.language_reference`).
"""

import numpy as np


def random_parameters(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Random parameters by name, float32, the same for any order of `shapes`.

    Those of normalisation layers have mean 1, all others mean 0.
    """
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
    """A gradient's norm, and its dot products with three random unit vectors: `[4] float64`.

    They stand for the gradient in comparisons. The parameter's `name` is the seed of the vectors.
    """
    rng = np.random.default_rng(sum(map(ord, name)))
    flat = np.asarray(gradient, np.float64).ravel()
    directions = rng.normal(size=(3, flat.size))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return np.concatenate([[np.linalg.norm(flat)], directions @ flat])
