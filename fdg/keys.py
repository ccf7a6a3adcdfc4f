"""Typed random keys: conversion to and from JAX's key data (uint32), and which draws depend on the batch."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from fdg.arguments import quoted
from fdg.errors import FdgError

_INDEPENDENT_DRAWS = {
    "threefry2x32": {"random_bits", "random_gamma", "random_split", "random_fold_in", "random_seed"},
    "rbg": {"random_split", "random_fold_in", "random_seed"},
    "unsafe_rbg": {"random_seed"},
}
"""By implementation of keys, the primitives whose results for a key do not depend on the rest of the batch.

`rbg` draws the bits of a whole batch from its first key.
"""

# Primitives that take or make typed keys, and whose results may depend on the batch.
_DRAWS = frozenset({"random_bits", "random_gamma", "random_split", "random_fold_in", "random_seed"})
_GENERATORS = frozenset({"rng_bit_generator", "rng_uniform"})  # XLA's own generators


def is_key(dtype: Any) -> bool:
    """Whether arrays of this dtype are random keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def typed(key: Any, what: str) -> Any:
    """Typed keys unchanged, and a key of `jax.random.PRNGKey` as a typed one.

    Raises:
      FdgError: for other values; the message calls the function that takes the key `what`.

    >>> typed(0, "PPO.init")
    Traceback (most recent call last):
    fdg.errors.FdgError: PPO.init: 0 is not a random key: give jax.random.key(0)
    """
    dtype = getattr(key, "dtype", None)
    if dtype is not None and is_key(dtype):
        return key
    if dtype == "uint32" and key.shape == jax.random.key_data(jax.random.key(0)).shape:
        return jax.random.wrap_key_data(key)
    raise FdgError(f"{what}: {quoted(key)} is not a random key: give jax.random.key(0)")


def takes_typed_key(method: Callable) -> Callable:
    """Wraps a method `(self, key, ...)` so that its key is `typed`."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        what = f"{type(self).__name__}.{method.__name__}"
        args = (*(typed(key, what) for key in args[:1]), *args[1:])
        kwargs = {name: typed(x, what) if name == "key" else x for name, x in kwargs.items()}
        return method(self, *args, **kwargs)

    return call


def implementation(shape: tuple[int, ...], dtype: Any) -> tuple[Any, jax.ShapeDtypeStruct] | None:
    """The implementation of keys `[*shape]` and the shape of their key data; None for other dtypes."""
    if not is_key(dtype):
        return None
    implementations: list[Any] = []

    def record(keys: jax.Array) -> jax.Array:
        implementations.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    data = jax.eval_shape(record, jax.ShapeDtypeStruct(shape, dtype))
    return implementations[0], data


def to_data(x: jax.Array) -> jax.Array:
    """`jax.random.key_data` of keys (numbers along a new last axis); any other array unchanged."""
    return jax.random.key_data(x) if is_key(x.dtype) else x


def from_data(x: Any, like: Any) -> jax.Array:
    """The inverse of `to_data`, for an array with the shape and dtype of `like`."""
    impl_and_data = implementation(like.shape, like.dtype)
    return x if impl_and_data is None else jax.random.wrap_key_data(x, impl=impl_and_data[0])


def data_shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `to_data` of an array."""
    impl_and_data = implementation(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype) if impl_and_data is None else impl_and_data[1]


def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`jax.numpy.zeros`, also for random keys."""
    data = data_shape(shape, dtype)
    return from_data(jax.numpy.zeros(data.shape, data.dtype), jax.ShapeDtypeStruct(shape, dtype))


@functools.cache
def _implementation_name(dtype: Any) -> str:
    impl_and_data = implementation((), dtype)
    return "" if impl_and_data is None else str(impl_and_data[0])


def draws_depend_on_batch(eqn: Any) -> bool:
    """Whether the numbers drawn for one key of a batch depend on the other keys in the batch.

    If so, drawing for a part of the batch gives other numbers than drawing for the whole batch.
    """
    name = eqn.primitive.name
    if name in _GENERATORS:
        return True
    if name not in _DRAWS:
        return False
    dtypes = [getattr(v.aval, "dtype", None) for v in (*eqn.invars, *eqn.outvars)]
    return any(
        name not in _INDEPENDENT_DRAWS.get(_implementation_name(dtype), ())
        for dtype in dtypes
        if dtype is not None and is_key(dtype)
    )
