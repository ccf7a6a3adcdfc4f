"""Operations of a program: small functions with bounded results, each in four variants.

An operation gives the type of each operand by one word:

  x   floats with a batch                  any     floats
  =   of the first operand's type          v, m    floats [B], [B, 3]
  x2  floats with a batch and other axes   s, w, n floats [3], floats [3, 3], an int
  f   a float                              i, b, q, k, ks  ints [B], bools [B], a bool, a key, keys [B]

Ints [B] are permutations of 0 to B - 1, so that sorting and indexing by them do not depend on rounding.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.oracle.program import BATCH, Value

CAPTURED = np.linspace(-0.5, 0.5, BATCH, dtype=np.float32)
ROWS = np.asarray([3, 3, 0, 7, 11, 1, 1, 1, 9, 5, 2, 10])  # with repeated and missing rows

WANTS: dict[str, Callable[[Value], bool]] = {
    "x": lambda v: v.kind == "f" and v.axis is not None,
    "x2": lambda v: v.kind == "f" and v.axis is not None and len(v.shape) > 1,
    "any": lambda v: v.kind == "f",
    "v": lambda v: v.type == ("f", (BATCH,)),
    "m": lambda v: v.type == ("f", (BATCH, 3)),
    "s": lambda v: v.type == ("f", (3,)),
    "w": lambda v: v.type == ("f", (3, 3)),
    "h": lambda v: v.type == ("f", (3, 8)),
    "o": lambda v: v.type == ("f", (8, 3)),
    "f": lambda v: v.type == ("f", ()),
    "flat": lambda v: v.type == ("f", (3 * BATCH,)),
    "n": lambda v: v.type == ("i", ()),
    "i": lambda v: v.type == ("i", (BATCH,)),
    "b": lambda v: v.type == ("b", (BATCH,)),
    "q": lambda v: v.type == ("b", ()),
    "k": lambda v: v.type == ("k", ()),
    "ks": lambda v: v.type == ("k", (BATCH,)),
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """`run(variant, *arrays)` gives one array."""

    name: str
    family: str
    wants: tuple[str, ...]
    run: Callable[..., Any]


OPERATIONS: dict[str, Operation] = {}


def _define(family: str, wants: str, **functions: Callable) -> None:
    for name, function in functions.items():
        assert name not in OPERATIONS, f"two operations have the name {name}"
        OPERATIONS[name] = Operation(name, family, tuple(wants.split()), function)


def _axis(x: Any) -> int:
    return x.shape.index(BATCH)


def _along(vector: Any, x: Any) -> Any:
    """Reshapes a vector [B] to broadcast along the batch axis of x."""
    return jnp.reshape(vector, [BATCH if a == _axis(x) else 1 for a in range(x.ndim)])


def _batch_first(function: Callable) -> Callable:
    """Moves the batch axis to the front for `function`, and back."""

    def run(c: int, x: Any, *others: Any) -> Any:
        a = _axis(x)
        return jnp.moveaxis(function(c, jnp.moveaxis(x, a, 0), *others), 0, a)

    return run


def _captured(x: Any) -> Any:
    return _along(jnp.asarray(CAPTURED), x).astype(x.dtype)


# --- elementwise ---

_define(
    "elements",
    "any",
    bend=lambda c, x: 0.8 * jnp.sin(x + 0.2 * c),
    shrink=lambda c, x: 0.5 * x,
    erf=lambda c, x: 0.5 * lax.erf(x) + 0.1 * c,
    root=lambda c, x: jnp.sqrt(1 + x * x) - 0.5,
    clip=lambda c, x: jnp.clip(x, -0.5, 0.4) * 0.9,
)
_define("elements", "any =", mix=lambda c, x, y: 0.6 * jnp.sin(x + 0.3 * c) + 0.3 * jnp.tanh(y))
_define("elements", "any f", nudge=lambda c, x, s: 0.9 * x + 0.1 * jnp.tanh(s))
_define("elements", "x f", weigh=lambda c, x, s: jnp.tanh(x * (1 + 0.3 * s) + 0.1 * c))
_define("elements", "any n", count_in=lambda c, x, n: jnp.sin(x + 0.1 * (n % 7)))
_define("elements", "x i", rank_in=lambda c, x, i: jnp.tanh(x + 0.1 * _along(i % 3, x)))
_define("elements", "b x", where=lambda c, b, x: jnp.where(_along(b, x), x, 0.5 * x - 0.1))
_define("elements", "q any", either=lambda c, q, x: jnp.where(q, x, 0.5 * x - 0.1))
_define("elements", "x", capture=lambda c, x: 0.7 * x + _captured(x))
_define("elements", "n", next=lambda c, n: (n + 1 + c) % 1000)
_define("elements", "i", rename=lambda c, i: (i * 5 + c) % BATCH, is_low=lambda c, i: i < 6 - c)
_define("elements", "b", neither=lambda c, b: ~b)
_define("elements", "q n", flip=lambda c, q, n: q ^ (n % 2 == 0))

# --- reductions ---

_define(
    "reductions",
    "x",
    mean=lambda c, x: jnp.mean(x, _axis(x)),
    total=lambda c, x: jnp.sum(jnp.sin(x), _axis(x)) / BATCH,
    highest=lambda c, x: jnp.max(x, _axis(x)),
    lowest=lambda c, x: jnp.min(x, _axis(x), keepdims=True) + 0 * x,
    logsumexp=lambda c, x: jax.nn.logsumexp(x, _axis(x)) - 2.5,
    spread=lambda c, x: jnp.sqrt(jnp.var(x, _axis(x)) + 0.1),
    centre=lambda c, x: x - jnp.mean(x, _axis(x), keepdims=True),
    norm=lambda c, x: x / (1 + jnp.sqrt(jnp.sum(x * x, _axis(x), keepdims=True))),
    softmax=lambda c, x: jax.nn.softmax(x, _axis(x)),
    product=lambda c, x: jnp.prod(1 + 0.1 * jnp.tanh(x), _axis(x)) - 1,
    masked=lambda c, x: jnp.sum(x, _axis(x), where=_captured(x) > 0, initial=0) / BATCH,
    whole=lambda c, x: jnp.mean(x),
)
_define("reductions", "x2", rest=lambda c, x: jnp.mean(x, [a for a in range(x.ndim) if a != _axis(x)]))
_define("reductions", "i", where_most=lambda c, i: jnp.argmax((i + c) % BATCH).astype(i.dtype),
        xor=lambda c, i: lax.reduce_xor(i * (c + 1), (0,)))  # fmt: skip
_define("reductions", "b", some=lambda c, b: jnp.any(b) if c % 2 else jnp.all(b))

# --- cumulative, and shifts along the batch ---

_define(
    "running",
    "x",
    cumsum=lambda c, x: lax.cumsum(x, _axis(x), reverse=c % 2 == 1) / BATCH,
    cummax=lambda c, x: lax.cummax(x, _axis(x), reverse=c % 2 == 1),
    cumprod=lambda c, x: lax.cumprod(1 + 0.1 * jnp.tanh(x), _axis(x)) - 1,
    cumlogsumexp=lambda c, x: lax.cumlogsumexp(x, _axis(x)) - 1.5,
    associative=lambda c, x: lax.associative_scan(jnp.add, jnp.tanh(x), axis=_axis(x)) / BATCH,
    differences=lambda c, x: jnp.diff(x, axis=_axis(x), prepend=0.5) * 0.5,
    roll=lambda c, x: jnp.roll(x, c + 1, _axis(x)),
    reverse=lambda c, x: jnp.flip(x, _axis(x)),
    shift=_batch_first(lambda c, x: jnp.concatenate([0 * x[:1], x[:-1]])),
    swap_halves=_batch_first(lambda c, x: jnp.concatenate([x[6:], x[:6]])),
    sieve=_batch_first(lambda c, x: jnp.concatenate([x[::2], x[1::2]])),
)
_define("running", "x n", window=lambda c, x, n: lax.dynamic_slice_in_dim(
    jnp.concatenate([x, x], _axis(x)), n % BATCH, BATCH, _axis(x)))  # fmt: skip
_define("running", "x =", join=lambda c, x, y: lax.slice_in_dim(
    jnp.concatenate([x, y], _axis(x)), 3 * c, 3 * c + BATCH, axis=_axis(x)))  # fmt: skip
_define("slices", "x", six_rows=lambda c, x: lax.slice_in_dim(x, c, c + 6, axis=_axis(x)))
_define("running", "v", convolve=lambda c, x: jnp.convolve(x, jnp.asarray([0.2, 0.5, 0.3], x.dtype), "same"),
        pool=lambda c, x: lax.reduce_window(x, -4.0, lax.max, (3,), (1,), "SAME"))  # fmt: skip

# --- sorting ---

_define("orders", "x", sort=lambda c, x: jnp.sort(x, _axis(x), descending=c % 2 == 1))
_define("orders", "x", top=lambda c, x: jnp.moveaxis(
    lax.top_k(jnp.moveaxis(x, _axis(x), -1), 3)[0], -1, _axis(x)))  # fmt: skip
_define("orders", "i", argsort=lambda c, i: jnp.argsort(i).astype(i.dtype),
        top_index=lambda c, i: lax.top_k(i, BATCH)[1].astype(i.dtype),
        inverse=lambda c, i: jnp.zeros_like(i).at[i].set(jnp.arange(BATCH, dtype=i.dtype)))  # fmt: skip
_define("orders", "i v", sort_by=lambda c, i, v: lax.sort((i, v), num_keys=1)[1])
_define("orders", "m", sort_others=lambda c, m: jnp.sort(m, 1))

# --- gathers and scatters ---

_define("gathers", "x i", permute=lambda c, x, i: jnp.take(x, i, axis=_axis(x)),
        scatter=_batch_first(lambda c, x, i: jnp.zeros_like(x).at[i].set(x)))  # fmt: skip
_define("gathers", "x n", row=lambda c, x, n: jnp.take(x, n % BATCH, axis=_axis(x)),
        set_row=_batch_first(lambda c, x, n: x.at[n % BATCH].set(0.5)),
        # (Not with rows of x: in a scan XLA's CPU backend reads them after overwriting them.)
        update=_batch_first(lambda c, x, n: lax.dynamic_update_slice_in_dim(
            x, jnp.full_like(x[:4], 0.3), n % 8, 0)))  # fmt: skip
_define("gathers", "x", rows=lambda c, x: jnp.take(x, jnp.asarray(ROWS), axis=_axis(x)),
        add_rows=_batch_first(lambda c, x: 0.5 * x.at[ROWS].add(0.2 * x)))  # fmt: skip
_define("gathers", "m i", pick=lambda c, m, i: jnp.take_along_axis(m, i[:, None] % 3, 1)[:, 0],
        bins=lambda c, m, i: jax.ops.segment_sum(m, i % 3, 3) / BATCH)  # fmt: skip
_define("gathers", "v i", bins_of=lambda c, v, i: jax.ops.segment_sum(v, i % 3, 3) / 4)
_define("gathers", "s i", look_up=lambda c, s, i: s[i % 3])
_define("gathers", "i", one_hot=lambda c, i: 0.5 * jax.nn.one_hot((i + c) % 3, 3))

# --- shapes ---

_define(
    "shapes",
    "x",
    fold=_batch_first(lambda c, x: jnp.swapaxes(x.reshape(4, 3, *x.shape[1:]), 0, 1).reshape(x.shape)),
    through_flat=lambda c, x: (0.9 * jnp.sin(x.reshape(-1))).reshape(x.shape),
    roll_flat=lambda c, x: jnp.roll(x.reshape(-1), c + 1).reshape(x.shape),
    new_axis=lambda c, x: jnp.stack([x, 0.5 * x], axis=(0, -1, 0, 1)[c]),
)
_define("shapes", "x =", stack=lambda c, x, y: jnp.stack([x, y], axis=(0, -1, 0, 1)[c]))
_define(
    "shapes",
    "x2",  # always to another axis: an unchanged array would be passed through
    move=lambda c, x: jnp.moveaxis(x, _axis(x), (_axis(x) + 1 + c % (x.ndim - 1)) % x.ndim),
    first=lambda c, x: jnp.take(x, 0, axis=0 if _axis(x) else 1),
)
_define("shapes", "m", flatten=lambda c, m: m.reshape(-1))
_define("shapes", "flat", unflatten=lambda c, x: x.reshape(BATCH, 3))
_define("shapes", "any", scalar=lambda c, x: jnp.mean(x), widen=lambda c, x: 0.1 + jnp.zeros(BATCH, x.dtype)
        + jnp.mean(x))  # fmt: skip

# --- products ---

_define("products", "m w", project=lambda c, m, w: jnp.tanh(m @ w))
_define("products", "m", gram=lambda c, m: jnp.tanh(m.T @ m / BATCH),
        attend=lambda c, m: jax.nn.softmax(m @ m.T) @ m)  # fmt: skip
_define("products", "m m", dots=lambda c, a, b: jnp.einsum("bi,bi->b", a, b) / 3,
        correlate=lambda c, a, b: jnp.einsum("bi,bj->ij", a, b) / BATCH)  # fmt: skip
_define("products", "v v", dot=lambda c, a, b: a @ b / BATCH)
_define("products", "v s", outer=lambda c, v, s: jnp.tanh(jnp.outer(v, s)))
_define("products", "m s", linear=lambda c, m, s: jnp.tanh(m @ s))
_define("products", "s w", apply=lambda c, s, w: jnp.tanh(s @ w))
_define("products", "s f", decay=lambda c, s, f: 0.9 * s + 0.05 * f)


def _loss(s: Any, m: Any, v: Any) -> Any:
    return jnp.mean(jnp.square(m @ s - v))


_define("products", "s m v", fit=lambda c, s, m, v: s - 0.1 * jax.grad(_loss)(s, m, v),
        fit_often=lambda c, s, m, v: lax.scan(
            lambda s, r: (s - 0.1 * r * jax.grad(_loss)(s, m, v), None), s, jnp.asarray([0.5, 1.0], s.dtype)
        )[0],
        hessian=lambda c, s, m, v: jnp.tanh(jax.hessian(_loss)(s, m, v)))  # fmt: skip

_define("wide", "m h o", hidden=lambda c, m, h, o: jnp.tanh(jnp.tanh(m @ h + 0.1 * c) @ o),
        fit_hidden=lambda c, m, h, o: h - 0.1 * jax.grad(
            lambda h: jnp.mean(jnp.square(jnp.tanh(m @ h) @ o - m)))(h))  # fmt: skip
_define("wide", "h o", tied=lambda c, h, o: jnp.tanh(h + 0.2 * o.T), cycle=lambda c, h, o: jnp.tanh(h @ o))
_define("wide", "h", clipped=lambda c, h: h / jnp.maximum(0.7, jnp.sqrt(jnp.sum(h * h))),
        largest=lambda c, h: jnp.max(h, 1)[:, None] * 0.5 + 0.5 * h)  # fmt: skip

# --- linear algebra, with a matrix [3, 3] per row ---


def _matrix(x: Any) -> Any:
    return 2 * jnp.eye(3, dtype=x.dtype) + 0.1 * jnp.outer(x, x)


_define("algebra", "m", solve=lambda c, m: jax.vmap(lambda x: jnp.linalg.solve(_matrix(x), x))(m),
        cholesky=lambda c, m: jax.vmap(lambda x: jnp.linalg.cholesky(_matrix(x))[:, c % 3])(m) / 2,
        invert=lambda c, m: jax.vmap(lambda x: jnp.linalg.inv(_matrix(x))[:, c % 3])(m),
        exponent=lambda c, m: jax.vmap(
            lambda x: jax.scipy.linalg.expm(0.1 * _matrix(x))[0])(m) / 2)  # fmt: skip

# --- randomness ---

_define("random", "k", split=lambda c, k: jax.random.split(k)[0],
        keys=lambda c, k: jax.random.split(k, BATCH),
        noise=lambda c, k: 0.3 * jax.random.normal(k, (BATCH,)),
        noise3=lambda c, k: 0.3 * jax.random.normal(k, (3,)),
        order=lambda c, k: jax.random.permutation(k, BATCH).astype(jnp.int32))  # fmt: skip
_define("random", "ks", split_each=lambda c, ks: jax.vmap(lambda k: jax.random.split(k)[1])(ks),
        normals=lambda c, ks: 0.3 * jax.vmap(jax.random.normal)(ks),
        uniforms=lambda c, ks: jax.vmap(lambda k: jax.random.uniform(k, (3,)))(ks),
        coins=lambda c, ks: jax.vmap(lambda k: jax.random.bernoulli(k, 0.4))(ks),
        gamma=lambda c, ks: jax.vmap(lambda k: jnp.tanh(jax.random.gamma(k, 1.5) / 4))(ks),
        dirichlet=lambda c, ks: jax.vmap(lambda k: jax.random.dirichlet(k, jnp.ones(3)))(ks),
        truncated=lambda c, ks: 0.3 * jax.vmap(lambda k: jax.random.truncated_normal(k, -1.0, 1.0))(ks),
        integers=lambda c, ks: jax.vmap(lambda k: jax.random.randint(k, (), 0, 5))(ks) < 2)  # fmt: skip
_define("random", "k x", shuffle=lambda c, k, x: jax.random.permutation(k, x, axis=_axis(x)),
        dropout=lambda c, k, x: jnp.where(jax.random.bernoulli(k, 0.5, x.shape), x, 0.3 * x))  # fmt: skip
_define("random", "k n", fold_in=lambda c, k, n: jax.random.fold_in(k, n))
_define("random", "ks i", fold_each=lambda c, ks, i: jax.vmap(jax.random.fold_in)(ks, i))
_define("random", "ks m", categorical=lambda c, ks, m: 0.5 * jax.nn.one_hot(
    jax.vmap(jax.random.categorical)(ks, m), 3))  # fmt: skip

# --- row by row ---


def _while(x: Any, trips: Any, change: Callable) -> Any:
    """Applies `change` `trips` times; under vmap each row has its own number of trips."""
    return lax.while_loop(lambda s: s[1] < trips, lambda s: (change(s[0]), s[1] + 1), (x, 0 * trips))[0]


_define("rows", "v i", while_rows=lambda c, v, i: jax.vmap(
    lambda x, n: _while(x, n % 4, lambda x: jnp.sin(x + 0.3)))(v, i))  # fmt: skip
_define("rows", "m i", while_solve=lambda c, m, i: jax.vmap(
    lambda x, n: _while(x, n % 3, lambda x: 0.5 * jnp.linalg.solve(_matrix(x), x) + 0.2))(m, i),
    while_invert=lambda c, m, i: jax.vmap(
    lambda x, n: _while(x, n % 3, lambda x: 0.5 * jnp.linalg.inv(_matrix(x)) @ x + 0.2))(m, i))  # fmt: skip
_define("rows", "ks i", while_draw=lambda c, ks, i: 0.3 * jax.vmap(lambda k, n: jax.random.normal(
    _while(k, n % 3, lambda k: jax.random.split(k)[0])))(ks, i))  # fmt: skip
_define("rows", "v b", cond_rows=lambda c, v, b: jax.vmap(
    lambda x, p: lax.cond(p, lambda x: jnp.sin(x), lambda x: 0.5 * x + 0.1, x))(v, b))  # fmt: skip
_define("rows", "v", fori_rows=lambda c, v: lax.fori_loop(
    0, BATCH, lambda r, v: v.at[r].set(0.5 * v[r] + 0.3 * jnp.sin(v[r - 1])), v))  # fmt: skip
_define("rows", "x", scan_rows=_batch_first(lambda c, x: lax.scan(
    lambda s, row: (0.5 * s + 0.4 * jnp.sin(row),) * 2, x[0] * 0, x, reverse=c % 2 == 1)[1]),
    map_rows=_batch_first(lambda c, x: lax.map(lambda row: jnp.sin(row) * 0.8, x)))  # fmt: skip
_define("rows", "v n", while_all=lambda c, v, n: _while(v, n % 3, lambda v: v - jnp.mean(v) + 0.1))

# --- NaN, infinities, -0.0 and denormals: mapped to finite results that change if one is lost ---

SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 1e-40)


def _special(c: int, x: Any) -> Any:
    """x with special values in two rows."""
    special = np.zeros(BATCH, np.float32)
    special[(3 * c + 1) % BATCH], special[(5 * c + 4) % BATCH] = SPECIAL[0], SPECIAL[c + 1]
    rows = _along(np.isin(np.arange(BATCH), [(3 * c + 1) % BATCH, (5 * c + 4) % BATCH]), x)
    return jnp.where(rows, _along(jnp.asarray(special, x.dtype), x), x)


def _finite(x: Any) -> Any:
    return jnp.where(jnp.isnan(x), 0.3, jnp.where(jnp.isfinite(x), 0.5 * jnp.tanh(x), 0.4 * jnp.sign(x)))


_define(
    "specials",
    "x",
    wild_highest=lambda c, x: _finite(jnp.max(_special(c, x), _axis(x))),
    wild_lowest=lambda c, x: _finite(jnp.min(_special(c, x))),
    wild_sum=lambda c, x: _finite(jnp.sum(_special(c, x), _axis(x))),
    wild_sort=lambda c, x: _finite(jnp.sort(_special(c, x), _axis(x))),
    wild_cummax=lambda c, x: _finite(lax.cummax(_special(c, x), _axis(x))),
    wild_first=lambda c, x: 0.1 * jnp.argmax(_special(c, x), _axis(x)).astype(x.dtype),
    wild_softmax=lambda c, x: _finite(jax.nn.softmax(_special(c, x), _axis(x))),
    wild_branch=lambda c, x: lax.cond(
        jnp.max(_special(c, x)) > -9, lambda: 0.5 * x, lambda: 0.4 * x + 0.1),
    wild_norm=lambda c, x: _finite(x / jnp.maximum(1, jnp.max(jnp.abs(_special(c, x))))),
)  # fmt: skip
_define("specials", "m i", wild_bins=lambda c, m, i: _finite(jax.ops.segment_max(_special(c, m), i % 3, 3)),
        wild_scatter=lambda c, m, i: _finite(
            jnp.zeros((4, 3), m.dtype).at[i % 3].min(_special(c, m))[:3]))  # fmt: skip

# --- other dtypes and shapes as intermediate values ---


def _via(dtype: Any) -> Callable:
    return lambda c, x: jnp.max(jnp.clip(x, -2, 2).astype(dtype) * (c + 1), _axis(x)).astype(x.dtype) / 9


_define(
    "types",
    "x",
    complex=lambda c, x: jnp.abs(jnp.sum((x + 0.5j * c).astype(complex) ** 2, _axis(x))).astype(x.dtype) / 99,
    spectrum=lambda c, x: jnp.tanh(jnp.abs(jnp.fft.fft(x, axis=_axis(x)))).astype(x.dtype),
    half=lambda c, x: _via(jnp.float16)(c, jnp.round(x)),
    brain=lambda c, x: _via(jnp.bfloat16)(c, jnp.round(x)),
    eighth=lambda c, x: _via(jnp.float8_e4m3fn)(c, jnp.round(x)),
    byte=lambda c, x: _via(jnp.int8)(c, jnp.round(x)),
    truth=lambda c, x: jnp.any(x > 0.9 + c, _axis(x)).astype(x.dtype),
    empty=lambda c, x: x + jnp.sum(lax.slice_in_dim(x, 0, 0, axis=_axis(x)))
    + jnp.max(jnp.zeros(0, x.dtype), initial=0.1),
    odd=_batch_first(lambda c, x: jnp.concatenate(
        [x[:7] * 0.9, x[: 5 - c], x[7 + 5 - c :], x[: 0], x[:c]])[:BATCH]),
    pairs=_batch_first(lambda c, x: lax.associative_scan(
        lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (0.5 * jnp.cos(x), jnp.tanh(x)))[1]),
)  # fmt: skip
_define("types", "i n", wrap=lambda c, i, n: (i.astype(jnp.uint8) * 50 * n).astype(i.dtype) % 97)
_define(
    "types",
    "x f",
    narrow=lambda c, x, f: 0.3 * (jnp.round(x).astype(jnp.float16) * 200 * f > 3).astype(x.dtype),
)


# --- host callbacks ---


def _seed(t: Any) -> np.ndarray:
    """A seed that depends on the trip and on how many trips are batched in one call."""
    return np.asarray(t * 3 + np.size(t), np.int32)


def _draw_with_host_seed(c: int, v: Any) -> Any:
    def trip(v: Any, t: Any) -> tuple[Any, None]:
        seed = jax.pure_callback(_seed, jax.ShapeDtypeStruct((), jnp.int32), t, vmap_method="expand_dims")
        key = jax.random.fold_in(jax.random.key(c), seed)
        return 0.8 * v + 0.1 * jax.random.normal(key, (BATCH,)), None

    return lax.scan(trip, v, jnp.arange(3, dtype=jnp.int32))[0]


_define("host", "v", host_seed=_draw_with_host_seed)

NOT_DIFFERENTIABLE = {
    "while_rows",
    "while_solve",
    "while_invert",
    "while_draw",
    "while_all",
    "pool",
    "fori_rows",
    *(name for name, operation in OPERATIONS.items() if operation.family in ("host", "specials", "types")),
}
