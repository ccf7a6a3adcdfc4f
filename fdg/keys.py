"""Typed random keys, whose implementation only tracers and arrays tell."""

from typing import Any

import jax


def is_key(dtype: Any) -> bool:
    """Whether arrays of this dtype are random keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def implementation(shape: tuple[int, ...], dtype: Any) -> tuple[Any, jax.ShapeDtypeStruct] | None:
    """What keys of a shape and dtype are made by, and the words that they hold; None for any other dtype."""
    if not is_key(dtype):
        return None
    kinds: list[Any] = []

    def look(keys: jax.Array) -> jax.Array:
        kinds.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    words = jax.eval_shape(look, jax.ShapeDtypeStruct(shape, dtype))
    return kinds[0], words


def words(x: jax.Array) -> jax.Array:
    """The words that keys hold, in a last axis of their own; any other array as it is."""
    return jax.random.key_data(x) if is_key(x.dtype) else x


def words_shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `words` of an array."""
    kind = implementation(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype) if kind is None else kind[1]
