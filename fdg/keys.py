"""Typed random keys: their implementation, and conversion from and to words."""

import functools
from typing import Any

import jax

_HASH_EACH_KEY = {
    "threefry2x32": {"random_bits", "random_gamma", "random_split", "random_fold_in", "random_seed"},
    "rbg": {"random_split", "random_fold_in", "random_seed"},
    "unsafe_rbg": {"random_seed"},
}
"""The primitives that each implementation computes independently for each key of a batch.

`rbg` draws the bits of a whole batch from its first key.
"""

_DRAWS = frozenset({"random_bits", "random_gamma", "random_split", "random_fold_in", "random_seed"})
_GENERATORS = frozenset({"rng_bit_generator", "rng_uniform"})  # XLA's own generators


def is_key(dtype: Any) -> bool:
    """Whether arrays of this dtype are random keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def implementation(shape: tuple[int, ...], dtype: Any) -> tuple[Any, jax.ShapeDtypeStruct] | None:
    """The implementation of keys and the shape of their words; None for other dtypes."""
    if not is_key(dtype):
        return None
    kinds: list[Any] = []

    def look(keys: jax.Array) -> jax.Array:
        kinds.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    words = jax.eval_shape(look, jax.ShapeDtypeStruct(shape, dtype))
    return kinds[0], words


def words(x: jax.Array) -> jax.Array:
    """`jax.random.key_data` of keys (words along a new last axis); any other array unchanged."""
    return jax.random.key_data(x) if is_key(x.dtype) else x


def from_words(x: Any, like: Any) -> jax.Array:
    """The inverse of `words`, for an array with the shape and dtype of `like`."""
    made_by = implementation(like.shape, like.dtype)
    return x if made_by is None else jax.random.wrap_key_data(x, impl=made_by[0])


def words_shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `words` of an array."""
    kind = implementation(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype) if kind is None else kind[1]


@functools.cache
def _name(dtype: Any) -> str:
    made_by = implementation((), dtype)
    return "" if made_by is None else str(made_by[0])


def draws_from_the_batch(eqn: Any) -> bool:
    """Whether the numbers drawn for one key of a batch depend on the other keys in the batch.

    Drawing from a part of the batch then gives other numbers than drawing from all of it.
    """
    name = eqn.primitive.name
    if name in _GENERATORS:
        return True
    if name not in _DRAWS:
        return False
    dtypes = [getattr(v.aval, "dtype", None) for v in (*eqn.invars, *eqn.outvars)]
    return any(name not in _HASH_EACH_KEY.get(_name(d), ()) for d in dtypes if d is not None and is_key(d))
