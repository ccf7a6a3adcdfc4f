"""Sweeps JAX's operations: each has to give the same numbers on a split batch, with the predicted exchanges.

Operations are functions of one row (`operations.py`, `draws.py`); contexts put them into programs.
`python -m tests.batch.sweep` runs all of them in all contexts (minutes); `test_holes.py` runs a sample.
"""

import functools
import os
import sys
import traceback

if __name__ == "__main__":
    import tests.conftest  # noqa: F401  (host devices, quick compiling)

import jax
import jax.numpy as jnp
from jax import lax

from tests.batch.draws import BATCH_DRAWS, DRAWS
from tests.batch.operations import OPERATIONS
from tests.batch.rows import B, F, integers

IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def _floats(tree):
    leaves = [jnp.abs(x) if jnp.iscomplexobj(x) else x for x in jax.tree.leaves(tree)]
    return sum((jnp.sum(jnp.asarray(x, jnp.float32)) for x in leaves), jnp.float32(0))


def _data(tree):
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree
    )


def _loop(function):
    """A loop with different numbers of trips per row; each trip applies `function` to the carry."""

    def one(keys, row):
        def body(carry):
            trip, keys, row = carry
            changed = 0.01 * jnp.tanh(_floats(function(keys, row)))
            if keys is not None:
                keys = jax.random.split(keys)[0]
            return trip + 1, keys, row + changed

        return lax.while_loop(lambda c: c[0] < 1 + integers(row)[0] % 3, body, (0, keys, row))

    return lambda keys, x: _data(jax.vmap(one)(keys, x))


CONTEXTS = {
    "mapped": lambda f: lambda keys, x: _data(jax.vmap(f)(keys, x)),
    "loop": _loop,
    "gradient": lambda f: lambda keys, x: jax.grad(lambda x: _floats(jax.vmap(f)(keys, x)))(x),
    "branch": lambda f: lambda keys, x: lax.cond(
        x.sum() > 0, lambda x: _data(jax.vmap(f)(keys, x)), lambda x: _data(jax.vmap(f)(keys, 2 * x)), x
    ),
    "scan": lambda f: lambda keys, x: lax.scan(
        lambda x, _: (x + 0.1 * jnp.tanh(jax.vmap(lambda k, r: _floats(f(k, r)))(keys, x))[:, None], x[:, 0]),
        x, None, length=2),
    "rematerialised": lambda f: lambda keys, x: jax.grad(
        jax.checkpoint(lambda x: _floats(jax.vmap(f)(keys, x))))(x),
    "columns": lambda f: lambda keys, x: f(keys if keys is None else keys[0], x[:, 0]),  # over the batch
}  # fmt: skip


def program(name):
    """A function of keys (or one key, or None) and x [B, F], and the implementation of the keys, or None."""
    operation, context, *implementation = name.split(" / ")
    if context == "batch":
        return BATCH_DRAWS[operation], implementation[0]
    if implementation:
        return CONTEXTS[context](DRAWS[operation]), implementation[0]
    return CONTEXTS[context](lambda _, row: OPERATIONS[operation](row)), None


def names():
    """Names of all programs."""
    found = [f"{name} / {context}" for name in OPERATIONS for context in CONTEXTS]
    for implementation in IMPLEMENTATIONS:
        found += [f"{name} / {context} / {implementation}" for name in DRAWS for context in CONTEXTS]
        found += [f"{name} / batch / {implementation}" for name in BATCH_DRAWS]
    return found


def main(arguments):
    from tests.batch.compared import assert_as_predicted, numbers

    count, chosen = int(arguments[0]), arguments[1:]
    devices = jax.devices("cpu")[:count]
    x = numbers(B, F)
    failures = 0
    for name in names():
        function, implementation = program(name)
        if chosen and not any(word in name for word in chosen):
            continue
        keys = None
        if implementation:
            keys = jax.random.key(3, impl=implementation)
            keys = keys if "/ batch" in name else jax.random.split(keys, B)
        try:
            jax.jit(function)(keys, x)
        except Exception as error:
            print("  skipped:", name, type(error).__name__, str(error)[:90].replace("\n", " "), flush=True)
            continue
        try:
            if keys is None:
                measured = assert_as_predicted(functools.partial(function, None), [0], devices, x)
            else:
                measured = assert_as_predicted(function, [0 if keys.ndim else None, 0], devices, keys, x)
            if measured and ("mapped" in name or "loop" in name or "batch" in name):
                print("EXCHANGES", name, [(c.kind, c.bytes, c.calls) for c in measured], flush=True)
            elif os.environ.get("SHOW") and measured:
                print("ok", name, [(c.kind, c.bytes, c.calls) for c in measured], flush=True)
        except Exception as error:
            failures += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(
                "FAIL",
                name,
                type(error).__name__,
                str(error)[:300].replace("\n", " "),
                f"{where.filename.split('/')[-1]}:{where.lineno}",
                flush=True,
            )
    print(failures, "failures")
    return failures


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:] or ["4"])))
