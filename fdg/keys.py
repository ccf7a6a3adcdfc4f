"""Typed random keys, whose implementation only tracers and arrays tell."""

import functools
from typing import Any

import jax

_HASH_EACH_KEY = {
    "threefry2x32": {"random_bits", "random_gamma", "random_split", "random_fold_in", "random_seed"},
    "rbg": {"random_split", "random_fold_in", "random_seed"},
    "unsafe_rbg": {"random_seed"},
}
"""Of JAX's implementations: what they compute for each key of a batch on its own.

The bits of a batch of keys that XLA's generator makes (`rbg`) are all drawn from the first of them.
"""

_DRAWS = frozenset({"random_bits", "random_gamma", "random_split", "random_fold_in", "random_seed"})
_GENERATORS = frozenset({"rng_bit_generator", "rng_uniform"})  # XLA's own, whatever they are called for


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
    """Whether an equation's numbers for one key of a batch depend on which other keys are in the batch.

    Such a draw from a part of the keys gives other numbers than one from all of them.
    """
    name = eqn.primitive.name
    if name in _GENERATORS:
        return True
    if name not in _DRAWS:
        return False
    dtypes = [getattr(v.aval, "dtype", None) for v in (*eqn.invars, *eqn.outvars)]
    return any(name not in _HASH_EACH_KEY.get(_name(d), ()) for d in dtypes if d is not None and is_key(d))
