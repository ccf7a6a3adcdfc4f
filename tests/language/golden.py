"""Compares the decoder with stored results of transformers 4.57.6, `golden.npz`.

At commit ccff2ff9, `python -m bench.language_oracle logits` computed them, from the parameters and inputs
that are made here.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from algos.language import Decoder, DecoderConfig, weights

GOLDEN = Path(__file__).with_suffix(".npz")


def _config(**options):
    sizes = {"vocab_size": 29, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4}
    return DecoderConfig(
        **{**sizes, "num_kv_heads": 2, "max_positions": 128, "tie_embeddings": False, **options}
    )


def _scaled_rope(kind, **values):
    return _config(rope_scaling=tuple(sorted({"rope_type": kind, **values}.items())), max_positions=64)


CONFIGS = {
    "llama kv=2 seed=0": _config(),
    "qwen2 kv=2 seed=0": _config(qkv_bias=True),
    "qwen3 kv=2 tied seed=0": _config(qk_norm=True, head_dim=16, tie_embeddings=True),
    "qwen2 window=4 seed=0": _config(qkv_bias=True, sliding_window=4, first_sliding_layer=1),
    "llama biases seed=0": _config(qkv_bias=True, output_bias=True, mlp_bias=True),
}
SCALED_ROPES = {
    "llama rope=linear seed=0": _scaled_rope("linear", factor=2.0),
    "llama rope=llama3 seed=0": _scaled_rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "llama rope=yarn seed=0": _scaled_rope("yarn", factor=4.0, original_max_position_embeddings=16),
}


@dataclasses.dataclass(frozen=True)
class _InMemory:
    """A tensor in memory, in place of a tensor in a file."""

    path: str
    array: np.ndarray

    @property
    def shape(self):
        return self.array.shape

    def read(self):
        return self.array


def parameters_of(config):
    """Random parameters, float32; those of normalisation layers have mean 1, all others mean 0."""
    rng, tensors = np.random.default_rng(0), {}
    for name, (_, shape, _) in sorted(weights.tensor_table(config).items()):
        array = 0.2 * rng.normal(size=shape) + ("norm" in name)
        tensors[name] = _InMemory("memory", array.astype(np.float32))
    return weights.assemble(config, tensors, "memory")


def inputs(config, padded):
    """Tokens and segments [3, 12]; if `padded`, the rows are left-padded by 0, 3 and 7 tokens."""
    tokens = np.random.default_rng(1000).integers(0, config.vocab_size, (3, 12))
    padding = np.array([0, 3, 7]) if padded else np.zeros(3, int)
    return jnp.asarray(tokens), jnp.asarray(np.arange(12)[None] >= padding[:, None], jnp.int32)


def difference_of_logits(name, config, padded):
    """The largest difference of logits, without those of padding."""
    tokens, segments = inputs(config, padded)
    logits = jax.jit(Decoder(config).apply)(parameters_of(config), tokens, segments)
    with np.load(GOLDEN) as golden:
        expected = golden[f"{name} padded" if padded else name]
    return float(np.abs(np.where(segments[..., None] > 0, logits, 0) - expected).max())


def difference_of_gradients(name, config):
    """The largest difference of gradients of the mean negative log-probability, relative to their norms.

    Four numbers stand for the gradient of each tensor: its norm, and its products with three unit vectors.
    """
    decoder, (tokens, segments) = Decoder(config), inputs(config, padded=True)

    def loss(parameters):
        continues = (segments[:, 1:] > 0) & (segments[:, :-1] > 0)
        return -jnp.sum(decoder.log_probs(parameters, tokens, segments)) / jnp.sum(continues)

    gradient, largest = jax.jit(jax.grad(loss))(parameters_of(config)), 0.0
    with np.load(GOLDEN) as golden:
        for tensor, (path, _, transposed) in weights.tensor_table(config).items():
            leaf = np.asarray(functools.reduce(lambda tree, step: tree[step], path, gradient))
            ours = _projections(leaf.T if transposed else leaf, tensor)
            theirs = golden[f"{name} padded gradient {tensor}"]
            largest = np.maximum(largest, np.abs(ours - theirs).max() / theirs[0])  # NaN if one is
    return float(largest)


def _projections(gradient, name):
    """A gradient's norm, and products with unit vectors, [4]; the parameter's `name` is the vectors' seed."""
    rng = np.random.default_rng(sum(map(ord, name)))
    flat = np.asarray(gradient, np.float64).ravel()
    directions = rng.normal(size=(3, flat.size))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return np.concatenate([[np.linalg.norm(flat)], directions @ flat])
