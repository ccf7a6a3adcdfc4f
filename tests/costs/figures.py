"""The figures from which uncalibrated predictions are computed; `figures.json` stores their expected values.

The tables of docs/scale.md were made with them. After an intended change run
`python -m tests.costs.figures`.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fdg.costs import machine, program_time, published
from fdg.costs.hardware import RATES, DeviceKind, Link
from fdg.placing.memory import program_bytes

FILE = Path(__file__).parent / "figures.json"
PRODUCTS = ("product/float32", "product/bfloat16", "product/float64", "product/int8")


def figures() -> dict[str, Any]:
    """All figures, as JSON values."""
    kinds = {**published.KINDS, machine.UNCALIBRATED_CPU.name: machine.UNCALIBRATED_CPU}
    links = {**published.LINKS, "shared memory": machine.SHARED_MEMORY, "sockets": machine.SOCKETS}
    found = {
        "kinds": {name: _kind_figures(kind) for name, kind in kinds.items()},
        "links": {name: _link_figures(link) for name, link in links.items()},
        "joined": {name: dict(shares) for name, shares in program_time.SHARES_AFTER_FUSION.items()},
        "needs": {name: _peak_bytes(*program) for name, program in PROGRAMS.items()},
    }
    return json.loads(json.dumps(found))


def _layers(x, *weights):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def _attention(x, w):
    scores = jax.nn.softmax((x @ w) @ jnp.swapaxes(x, 1, 2), axis=-1)
    return scores @ x


def _nested_jit(x, w):
    inside = jax.jit(lambda x: (jnp.tanh(x) @ w).reshape(-1))
    return inside(inside(x).reshape(x.shape)).reshape(x.shape).T


def _loop(x, w):
    def step(carry, row):
        carry = jnp.tanh(carry @ w + row)
        return carry, carry.sum(axis=1)

    return jax.lax.scan(step, x, jnp.broadcast_to(x, (5, *x.shape)))


def _branches(x, w):
    return jax.lax.cond(x.sum() > 0, lambda x: jnp.sort(x @ w, axis=0), lambda x: x[::-1] * 2, x)


def _indexing(x, w):
    order = jnp.argsort(x[:, 0])
    return x.at[order].add(x @ w)[order], jnp.concatenate([x, x], 1)[:, 3:9]


def _reductions(x):
    """Reductions over matrix products of 8 x 8 and of 7 x 7 elements; XLA fuses only some of them."""
    by_8, by_7 = jnp.ones((8, 8)), jnp.ones((7, 7))
    eights, sevens = x.reshape(-1, 8, 8), x.reshape(-1)[: 600 * 49].reshape(600, 7, 7)
    rows = [(some @ jnp.ones(some.shape)).sum(axis=1) for some in (eights, sevens)]
    return (x @ by_8).sum(axis=0), (x[:, :7] @ by_7).sum(axis=0), (x[:, :1] * x).max(axis=0), rows


# Name: (function, shapes of its arguments, batch axes of the first argument).
PROGRAMS = {
    "gradient": (jax.grad(_layers, (1, 2)), [(512, 8), (8, 16), (16, 16)], (0,)),
    "attention": (_attention, [(16, 12, 8), (8, 8)], (0,)),
    "calls": (_nested_jit, [(64, 64), (64, 64)], (0,)),
    "loop": (_loop, [(32, 16), (16, 16)], (0,)),
    "branches": (_branches, [(64, 64), (64, 64)], ()),
    "places": (_indexing, [(64, 16), (16, 16)], ()),
    "reductions": (_reductions, [(4096, 8)], ()),
    "draws": (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), [(64, 64)], ()),
}


def _peak_bytes(function: Callable, shapes: Sequence[tuple[int, ...]], axes: Sequence[int]) -> dict[str, int]:
    """The peak bytes of a program per device, on one and on two devices."""
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    return {str(devices): program_bytes(jaxpr, axes, devices) for devices in (1, 2)}


def _kind_figures(kind: DeviceKind) -> dict[str, Any]:
    names = [name for name in RATES if not name.startswith("product/")]
    return {name: kind.rate(name) for name in (*names, *PRODUCTS)}


def _link_figures(link: Link) -> dict[str, float]:
    return {name: getattr(link, name).value for name in ("latency", "bandwidth", "call")}


if __name__ == "__main__":
    FILE.write_text(json.dumps(figures(), indent=1) + "\n")
