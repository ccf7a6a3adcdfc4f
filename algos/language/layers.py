"""The layers of a decoder block, as functions of weights: RMSNorm, rotary positions, attention, SwiGLU.

Shapes: `N` sequences of `T` tokens, `D` width, `H` query heads, `K` key-value heads, `h` the width of a head
(`DecoderConfig.width`), `S` attended tokens. A linear layer is `{"kernel": [in, out]}`, with `"bias": [out]`
if it has one, and with `"a": [in, r]` and `"b": [r, out]` if it has an adapter.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from algos.language.config import DecoderConfig

Weights = dict[str, Any]


def at_least_float32(x: jax.Array) -> jax.Array:
    """Casts to at least float32, for norms, softmax and logits."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def linear(weights: Weights, x: jax.Array, scale: float) -> jax.Array:
    """[..., in] to [..., out]; an adapter adds `scale * x a b` (arXiv 2106.09685, eq. 3)."""
    dtype = x.dtype
    y = x @ weights["kernel"].astype(dtype)
    if "a" in weights:
        y = y + (x @ weights["a"].astype(dtype)) @ weights["b"].astype(dtype) * jnp.asarray(scale, dtype)
    if "bias" in weights:
        y = y + _align_last_axis(weights["bias"].astype(dtype), y)
    return y


def rms_norm(scale: jax.Array, x: jax.Array, epsilon: float) -> jax.Array:
    """`scale * x / sqrt(mean(x^2) + epsilon)` over the last axis (arXiv 1910.07467, eq. 4)."""
    y = at_least_float32(x)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    return _align_last_axis(scale.astype(x.dtype), x) * y.astype(x.dtype)


def _align_last_axis(vector: jax.Array, like: jax.Array) -> jax.Array:
    """Reshapes a vector to broadcast along the last axis of another array."""
    return vector.reshape((1,) * (like.ndim - 1) + vector.shape)


@functools.cache
def rotary_frequencies(config: DecoderConfig) -> tuple[np.ndarray, float]:
    """Rotary frequencies [h / 2] in radians per position, and the factor of cosines and sines.

    `config.rope_type` changes the frequencies of arXiv 2104.09864, sec. 3.2.2: "linear" divides all of them;
    "llama3" divides those whose wavelength exceeds the trained context, with a smooth transition (Llama 3.1's
    release); "yarn" follows arXiv 2309.00071, eq. 17-23, and "longrope" arXiv 2402.13753, sec. 3.3 (here with
    its factors for short texts; `rotary` applies those for long texts).
    """
    width, rope = config.width, config.rope
    plain = config.rope_theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    kind = config.rope_type
    if kind in ("default", "dynamic"):
        return plain, 1.0
    factor = float(rope["factor"])
    if kind == "linear":
        return plain / factor, 1.0
    trained_length = float(config.trained_positions)
    if kind == "longrope":
        default = math.sqrt(1 + math.log(factor) / math.log(trained_length)) if factor > 1 else 1.0
        attention_factor = float(rope.get("attention_factor") or default)
        return plain / np.asarray(rope["short_factor"], np.float64), attention_factor
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        turns = trained_length * plain / (2 * math.pi)  # full rotations over the trained context
        unchanged = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 0: divided by the factor; 1: unchanged
        return plain * (unchanged + (1 - unchanged) / factor), 1.0
    start, end = (
        width * math.log(trained_length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))
        for turns in (float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1))
    )
    if rope.get("truncate", True):
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, width - 1)
    ramp = (np.arange(width // 2) - start) / max(end - start, 1e-3)
    unchanged = 1 - np.clip(ramp, 0.0, 1.0)
    attention_factor = float(rope.get("attention_factor") or _yarn_attention(factor, rope))
    return plain * (unchanged + (1 - unchanged) / factor), attention_factor


def _yarn_attention(factor: float, rope: dict[str, Any]) -> float:
    """YaRN's default factor of cosines and sines."""

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    return magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)


def rotary(
    config: DecoderConfig, positions: jax.Array, lengths: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [..., h / 2] of positions [...] in texts of `lengths` [...] tokens."""
    frequencies, scale = rotary_frequencies(config)
    wide_dtype = jnp.promote_types(dtype, jnp.float32)
    per_position = _align_last_axis(jnp.asarray(frequencies, wide_dtype), positions[..., None])
    per_position = _frequencies_for_length(config, per_position, lengths.astype(wide_dtype)[..., None])
    angles = positions.astype(wide_dtype)[..., None] * per_position
    return (jnp.cos(angles) * scale).astype(dtype), (jnp.sin(angles) * scale).astype(dtype)


def _frequencies_for_length(config: DecoderConfig, frequencies: jax.Array, lengths: jax.Array) -> jax.Array:
    """Frequencies [..., h / 2] for texts of `lengths` [..., 1] tokens, as in Transformers."""
    rope, width = config.rope, config.width
    if config.rope_type == "dynamic":  # beyond the trained context, a larger base ("NTK")
        factor = float(rope["factor"])
        base_factor = jnp.maximum(factor * lengths / config.max_positions - (factor - 1), 1.0)
        exponents = jnp.asarray(-np.arange(0, width, 2) / (width - 2), lengths.dtype)
        return frequencies * base_factor ** _align_last_axis(exponents, lengths)
    if config.rope_type == "longrope":
        short, long = (np.asarray(rope[name], np.float64) for name in ("short_factor", "long_factor"))
        long_frequencies = frequencies * _align_last_axis(jnp.asarray(short / long, lengths.dtype), lengths)
        return jnp.where(lengths > config.trained_positions, long_frequencies, frequencies)
    return frequencies


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates heads [..., heads, h], in pairs (i, i + h / 2), by cosines and sines [..., h / 2]."""
    cos, sin = (part[..., None, :] for part in rotation)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def project_heads(
    config: DecoderConfig, weights: Weights, x: jax.Array, rotation: tuple[jax.Array, jax.Array], scale: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Projects [..., D] to queries [..., H, h], keys and values [..., K, h], and applies rotary positions."""
    q, k, v = (linear(weights[name], x, scale) for name in ("query", "key", "value"))
    q = q.reshape(*x.shape[:-1], config.num_heads, config.width)
    k, v = (y.reshape(*x.shape[:-1], config.num_kv_heads, config.width) for y in (k, v))
    if config.qk_norm:
        q = rms_norm(weights["query_norm"], q, config.rms_norm_eps)
        k = rms_norm(weights["key_norm"], k, config.rms_norm_eps)
    return rotate(q, rotation), rotate(k, rotation), v


def attend(q: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention, with `H / K` query heads per key-value head.

    `q` [N, T, H, h], `keys` and `values` [N, K, S, h] and `mask` [N, T, S] bool to [N, T, H * h].
    """
    n, t, heads, width = q.shape
    grouped = q.reshape(n, t, keys.shape[1], -1, width)
    scores = at_least_float32(jnp.einsum("ntkgd,nksd->nkgts", grouped, keys)) * width**-0.5
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("nkgts,nksd->ntkgd", weights, values).reshape(n, t, heads * width)


def swiglu(weights: Weights, x: jax.Array, scale: float) -> jax.Array:
    """`down(silu(gate x) * up x)` (arXiv 2002.05202, sec. 2)."""
    gate, up = linear(weights["gate"], x, scale), linear(weights["up"], x, scale)
    return linear(weights["down"], jax.nn.silu(gate) * up, scale)


def merge_adapters(config: DecoderConfig, parameters: Weights) -> Weights:
    """Merges adapters into kernels, `kernel + lora_alpha / lora_rank * a b` (arXiv 2106.09685), in NumPy."""
    if "base" not in parameters:
        return parameters
    scale = config.lora_alpha / config.lora_rank
    merged: Weights = jax.tree.map(lambda x: x, parameters["base"])  # new dicts of the same arrays
    for i, block in parameters["adapters"]["layers"].items():
        for part, adapters in block.items():
            for name, adapter in adapters.items():
                linear = merged["layers"][i][part][name]
                kernel = np.asarray(linear["kernel"])
                change = np.asarray(adapter["a"], np.float64) @ np.asarray(adapter["b"], np.float64)
                linear["kernel"] = (kernel + scale * change).astype(kernel.dtype)
    return merged
