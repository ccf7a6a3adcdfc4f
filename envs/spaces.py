"""Spaces of observations and actions.

Spaces are frozen dataclasses of Python values, so that environments and algorithms compare, hash and print.
Only `sample` and `contains` make arrays.
"""

import dataclasses
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from envs.gymnasium_codec import codes
from fdg.arguments import checked_names, order_of, quoted
from fdg.errors import FdgError
from fdg.keys import takes_typed_key
from fdg.kinds import make_fields_python

Bound: TypeAlias = "float | tuple[Any, ...]"  # of a `Box`: one number, or nested tuples

_MIN_IMAGE_SIZE = 3  # pixels per side, for the 3 x 3 convolution


@dataclasses.dataclass(frozen=True)
class Discrete:
    """One of `n` choices: an int32 scalar from 0 to n - 1.

    >>> Discrete(4)
    Discrete(n=4)
    >>> bool(Discrete(4).contains(3)), bool(Discrete(4).contains(4))
    (True, False)
    """

    n: int

    def __post_init__(self) -> None:
        make_fields_python(self)
        if not _is_int(self.n) or self.n < 1:
            raise FdgError(f"Discrete(n={self.n!r}): n must be an integer of at least 1")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one element: `()`."""
        return ()

    @property
    def dtype(self) -> str:
        """Dtype of an element."""
        return "int32"

    @takes_typed_key
    @checked_names
    def sample(self, key: jax.Array) -> jax.Array:
        """Samples an element uniformly: `[] int32`."""
        return jax.random.randint(key, (), 0, self.n, dtype=jnp.int32)

    def contains(self, x: Any) -> jax.Array:
        """Whether `x` is one element of the space. Returns `[] bool`; works on traced values."""
        x = jnp.asarray(x)
        if x.shape != () or not jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(False)
        return (x >= 0) & (x < self.n)


@dataclasses.dataclass(frozen=True)
class MultiDiscrete:
    """Several choices: `[len(nvec)] int32`, component `i` from 0 to `nvec[i] - 1`.

    >>> bool(MultiDiscrete((2, 3)).contains([1, 2])), bool(MultiDiscrete((2, 3)).contains([2, 1]))
    (True, False)
    """

    nvec: tuple[int, ...]

    def __post_init__(self) -> None:
        make_fields_python(self)
        object.__setattr__(self, "nvec", nested_tuple(self.nvec))
        if (
            not isinstance(self.nvec, tuple)
            or not self.nvec
            or not all(_is_int(n) and n >= 1 for n in self.nvec)
        ):
            raise FdgError(
                f"MultiDiscrete(nvec={self.nvec!r}): nvec must be a tuple of integers of at least 1"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one element: `(len(nvec),)`."""
        return (len(self.nvec),)

    @property
    def dtype(self) -> str:
        """Dtype of an element."""
        return "int32"

    @takes_typed_key
    @checked_names
    def sample(self, key: jax.Array) -> jax.Array:
        """Samples an element uniformly: `[len(nvec)] int32`."""
        return jax.random.randint(key, self.shape, 0, jnp.asarray(self.nvec, jnp.int32), dtype=jnp.int32)

    def contains(self, x: Any) -> jax.Array:
        """Whether `x` is one element of the space. Returns `[] bool`; works on traced values."""
        x = jnp.asarray(x)
        if x.shape != self.shape or not jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(False)
        return jnp.all((x >= 0) & (x < jnp.asarray(self.nvec, x.dtype)))


@dataclasses.dataclass(frozen=True)
class Box:
    """Arrays of one shape and dtype, `low <= x <= high` in every component.

    `low` and `high` are numbers, or arrays, lists or nested tuples of `shape`, which are stored as tuples
    (tuples hash, arrays do not); an infinite number means no bound. Without `shape`, the shape is that of
    the bounds, one of which must then be an array.

    >>> Box(-1.0, 1.0, (3,))
    Box(low=-1.0, high=1.0, shape=(3,), dtype='float32')
    >>> Box((0.0, -1.0), (1.0, 1.0), (2,)).low_array
    array([ 0., -1.], dtype=float32)
    """

    low: Bound
    high: Bound
    shape: tuple[int, ...] = None  # type: ignore[assignment]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        make_fields_python(self)
        if self.shape is None:
            shapes = {_bound_shape(field, nested_tuple(getattr(self, field))) for field in ("low", "high")}
            object.__setattr__(self, "shape", max(shapes, key=len))
            if not self.shape:
                raise FdgError("Box: shape is missing: give a tuple of integers, () for one number")
        object.__setattr__(self, "shape", nested_tuple(self.shape))
        if not isinstance(self.shape, tuple) or not all(_is_int(size) and size >= 0 for size in self.shape):
            order = order_of(Box, "shape", vars(self))
            raise FdgError(f"Box(shape={self.shape!r}): shape must be a tuple of integers{order}")
        # jnp.float32, np.dtype("float32") and "float32" are the same dtype and must make equal spaces.
        try:
            object.__setattr__(self, "dtype", np.dtype(self.dtype).name)
        except TypeError:
            raise FdgError(f"Box(dtype={quoted(self.dtype)}): give a dtype, such as 'float32'") from None
        for field in ("low", "high"):
            bound = nested_tuple(getattr(self, field))
            object.__setattr__(self, field, bound)
            if (shape := _bound_shape(field, bound)) not in ((), self.shape):
                raise FdgError(
                    f"Box({field}={bound!r:.60}) has shape {shape}, but the space has {self.shape}:"
                    f" give a number, or nested tuples of shape {self.shape}"
                )
            if np.dtype(self.dtype).kind in "iu":
                limits = np.iinfo(self.dtype)
                out_of_range = [
                    x for x in np.ravel(np.asarray(bound, float)) if not limits.min <= x <= limits.max
                ]
                if out_of_range:
                    raise FdgError(
                        f"Box({field}=...): {out_of_range[0]:g} is not {self.dtype}: give a number from"
                        f" {limits.min} to {limits.max}, or dtype='float32'"
                    )
        if not np.all(np.asarray(self.low) <= np.asarray(self.high)):
            raise FdgError(f"Box(low={self.low}, high={self.high}): low must not exceed high")
        if np.any(np.isposinf(self.low)) or np.any(np.isneginf(self.high)):
            raise FdgError(
                f"Box(low={self.low}, high={self.high}): no number is between them: low"
                " must be below inf, and high above -inf"
            )

    @property
    def low_array(self) -> np.ndarray:
        """Lower bound of every component, `[*shape]` of `dtype`, a NumPy array."""
        return np.broadcast_to(np.asarray(self.low, self.dtype), self.shape)

    @property
    def high_array(self) -> np.ndarray:
        """Upper bound of every component, `[*shape]` of `dtype`, a NumPy array."""
        return np.broadcast_to(np.asarray(self.high, self.dtype), self.shape)

    @property
    def is_bounded(self) -> bool:
        """True if every component has finite bounds."""
        return bool(np.isfinite(np.asarray(self.low)).all() and np.isfinite(np.asarray(self.high)).all())

    @property
    def codes(self) -> tuple[tuple[int, int], ...] | None:
        """Lowest code and number of codes, where integers stand for categories; None for quantities.

        Integers are codes if they have at most 64 values. A map with three axes has a pair for each channel
        (the last axis); any other shape has one pair for all components.

        >>> Box(0.0, 4.0, (10, 10, 2), "uint8").codes, Box(-1.0, 8.0, (10, 10), "int32").codes
        (((0, 5), (0, 5)), ((-1, 10),))
        >>> Box(0.0, 255.0, (10, 10, 2), "uint8").codes, Box(0.0, 4.0, (10, 10, 2)).codes
        (None, None)
        """
        if np.dtype(self.dtype).kind not in "iu" or not self.is_bounded:
            return None
        return codes(self.low_array, self.high_array)

    @property
    def is_image(self) -> bool:
        """True for an image `[H, W, C]`, or a map of codes `[H, W]`, large enough to be convolved."""
        axes = len(self.shape)
        if axes != 3 and not (axes == 2 and self.codes):
            return False
        return min(self.shape[:2]) >= _MIN_IMAGE_SIZE

    @takes_typed_key
    @checked_names
    def sample(self, key: jax.Array) -> jax.Array:
        """Samples an element, `[*shape]` of `dtype`.

        Components with two bounds are uniform (integers include both ends). Others are standard normal; with
        one bound, the sample's absolute value is the distance from the bound.
        """
        low, high = self.low_array, self.high_array
        if not jnp.issubdtype(low.dtype, jnp.floating):
            span = high.astype(object) - low.astype(object) + 1  # Python integers do not overflow
            int32 = np.iinfo(np.int32)
            if np.any(span > int32.max) or np.any(high >= int32.max) or np.any(low < int32.min):
                return self._wide_sample(key, low, np.asarray(span))
            # The draw is wider than the dtype, so that `high + 1` does not overflow (uint8: 255 + 1).
            limits = low.astype(np.int32), high.astype(np.int32) + 1
            return jax.random.randint(key, self.shape, *map(jnp.asarray, limits)).astype(self.dtype)
        # Both samples are computed, and selected, only if bounds are mixed.
        bounded = np.isfinite(low) & np.isfinite(high)
        finite_low, finite_high = np.where(bounded, low, 0), np.where(bounded, high, 1)
        fraction = jax.random.uniform(key, self.shape, self.dtype)
        # A weighted mean of the bounds: `high - low` may overflow.
        uniform = finite_low * (1 - fraction) + finite_high * fraction
        uniform = jnp.clip(uniform, finite_low, finite_high)
        if bounded.all():
            return uniform
        normal = jax.random.normal(key, self.shape, self.dtype)
        shifted = jnp.where(
            np.isfinite(low),
            np.where(np.isfinite(low), low, 0) + jnp.abs(normal),
            jnp.where(np.isfinite(high), np.where(np.isfinite(high), high, 0) - jnp.abs(normal), normal),
        )
        return jnp.where(bounded, uniform, shifted)

    def _wide_sample(self, key: jax.Array, low: np.ndarray, span: np.ndarray) -> jax.Array:
        """Samples uniformly from `span` (up to 2**32) integers, of which `low` is the first."""
        bits = jax.random.bits(key, self.shape, jnp.uint32)
        is_full_range = np.asarray(span >= 2**32, bool)
        offset = jnp.where(is_full_range, bits, bits % np.where(is_full_range, 1, span).astype(np.uint32))
        return jnp.asarray(low) + offset.astype(self.dtype)  # a sum that wraps around is still right

    def contains(self, x: Any) -> jax.Array:
        """Whether `x` is one element of the space. Returns `[] bool`; works on traced values."""
        x = jnp.asarray(x)
        if x.shape != self.shape:
            return jnp.asarray(False)
        return jnp.all((x >= self.low_array) & (x <= self.high_array))


Space: TypeAlias = Discrete | MultiDiscrete | Box


def bound(values: np.ndarray) -> Bound:
    """A `Box`'s bound from an array: one number if all are equal, otherwise nested tuples.

    The largest float32 or more, which libraries use for unbounded values, becomes infinity.

    >>> bound(np.array([1.0, 1.0])), bound(np.array([-np.inf, 3.5e38]))
    (1.0, (-inf, inf))
    """
    values = np.asarray(values).astype(float)
    largest = np.finfo(np.float32).max
    values = np.where(np.abs(values) >= largest, np.copysign(np.inf, values), values)
    if not values.size:
        return 0.0
    if (values == values.flat[0]).all():
        return values.flat[0].item()
    return nested_tuple(values.tolist())


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def nested_tuple(values: Any) -> Any:
    """Lists and arrays as tuples, which hash; any other value is unchanged."""
    values = values.tolist() if hasattr(values, "tolist") else values
    return tuple(map(nested_tuple, values)) if isinstance(values, list | tuple) else values


def _bound_shape(field: str, bound: Any) -> tuple[int, ...]:
    """The shape of a `Box`'s bound, a number or nested tuples; an `FdgError` for other values."""
    try:
        if _is_nested_tuple(bound):
            return np.shape(bound)
    except ValueError:  # rows of several lengths
        pass
    raise FdgError(
        f"Box({field}={bound!r:.60}): a bound must be a number, or an array or nested tuples of them"
    )


def _is_nested_tuple(bound: Any) -> bool:
    """True for a number, except NaN, and for nested tuples of such numbers."""
    if isinstance(bound, tuple):
        return all(_is_nested_tuple(item) for item in bound)
    return isinstance(bound, int | float) and not math.isnan(bound)
