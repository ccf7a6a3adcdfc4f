"""A gated recurrent unit (GRU; Cho et al. 2014, arXiv 1406.1078) over a sequence, and its gradient.

With inputs `x`, memory `h`, and `*` by element, as in `flax.linen.GRUCell`, whose parameters these are:

`r = sigmoid(x W_ir + b_ir + h W_hr)`, `z = sigmoid(x W_iz + b_iz + h W_hz)`,
`n = tanh(x W_in + b_in + r * (h W_hn + b_hn))`, `h' = (1 - z) * n + z * h`.

Only what depends on the step before goes step by step: three products in it forwards and three backwards. All
else is a product over the whole sequence: of the inputs, before; and, after the way back, of the gradients by
the kernels, which JAX's own derivative of a loop would add up at every step, a whole matrix each time.

Letters in shapes: `T` steps, `N` memories, `H` units, `F` features of an input.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class _Gates(NamedTuple):
    """One array for each of the three equations: of reset, of update, of what is new."""

    r: jax.Array
    z: jax.Array
    n: jax.Array


class _Steps(NamedTuple):
    """What the way back needs of each step, `[T, N, H]`."""

    memory: jax.Array  # after it
    gates: _Gates
    remembered: jax.Array  # h W_hn + b_hn


def unroll(
    parameters: Mapping[str, Any], memory: jax.Array, inputs: jax.Array, start: jax.Array
) -> jax.Array:
    """The memory after each step, `[T, N, H]`; where an episode starts, nothing is remembered before it.

    Args:
      parameters: of a `flax.linen.GRUCell`.
      memory: `[N, H]` float32, before the first step.
      inputs: `[T, N, F]` float32.
      start: `[T, N]` bool.
    """
    flat = inputs.reshape(-1, inputs.shape[-1])
    # Three products and not one that is three times as wide: XLA on a CPU takes half the time over them.
    seen = (flat @ parameters[name]["kernel"] + parameters[name]["bias"][None] for name in ("ir", "iz", "in"))
    gates = _Gates(*(x.reshape(*start.shape, -1) for x in seen))
    kernels = _Gates(*(parameters[name]["kernel"] for name in ("hr", "hz", "hn")))
    return _recurrence(gates, start, memory, kernels, parameters["hn"]["bias"])


@jax.custom_vjp
def _recurrence(seen: _Gates, start: jax.Array, memory: jax.Array, kernels: _Gates, bias: jax.Array):
    """Memories `[T, N, H]`, from what the gates are given by the inputs, `seen [T, N, H]`."""
    return _forwards(seen, start, memory, kernels, bias).memory


def _forwards(seen, start, memory, kernels, bias) -> _Steps:
    def step(memory, row):
        seen, start = row
        memory = jnp.where(start[:, None], 0.0, memory)
        r = jax.nn.sigmoid(seen.r + memory @ kernels.r)
        z = jax.nn.sigmoid(seen.z + memory @ kernels.z)
        remembered = memory @ kernels.n + bias[None]
        n = jnp.tanh(seen.n + r * remembered)
        memory = (1.0 - z) * n + z * memory
        return memory, _Steps(memory, _Gates(r, z, n), remembered)

    return jax.lax.scan(step, memory, (seen, start))[1]


def _with_steps(seen, start, memory, kernels, bias):
    steps = _forwards(seen, start, memory, kernels, bias)
    return steps.memory, (start, memory, kernels, steps)


def _backwards(saved, gradient):
    """From the gradient by each memory, `[T, N, H]`, those by the arguments of `_recurrence`."""
    start, first, kernels, (memories, (r, z, n), remembered) = saved
    before = jnp.where(start[..., None], 0.0, jnp.concatenate([first[None], memories[:-1]]))
    # What a change of the new memory does to the sums in the gates: how much to n's and to z's; and what a
    # change of n's does to r's.
    by_memory_n, by_memory_z = (1.0 - z) * (1.0 - n * n), (before - n) * z * (1.0 - z)
    by_n = remembered * r * (1.0 - r)
    transposed = _Gates(*(kernel.T for kernel in kernels))

    def step(later, row):
        gradient, by_memory_n, by_memory_z, by_n, r, z, start = row
        gradient += later
        of_n, of_z = gradient * by_memory_n, gradient * by_memory_z
        of = _Gates(of_n * by_n, of_z, of_n)
        earlier = gradient * z + of.r @ transposed.r + of.z @ transposed.z + (of.n * r) @ transposed.n
        return jnp.where(start[:, None], 0.0, earlier), of

    rows = (gradient, by_memory_n, by_memory_z, by_n, r, z, start)
    by_first, of = jax.lax.scan(step, jnp.zeros_like(first), rows, reverse=True)
    of_remembered = of.n * r

    def flat(x):
        return x.reshape(-1, x.shape[-1])

    by_kernels = _Gates(*(flat(before).T @ flat(x) for x in (of.r, of.z, of_remembered)))
    return of, None, by_first, by_kernels, jnp.sum(flat(of_remembered), axis=0)


_recurrence.defvjp(_with_steps, _backwards)
