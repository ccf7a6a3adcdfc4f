"""Compares the speed of `algos.layers.Convolution`, a matrix product, with `flax.linen.Conv`.

Both layers have the same parameters. They take turns; a call computes gradients of minibatches in a loop.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algos.layers import Convolution
from bench.harness import Spread, timed_in_turns

PAIRS = 15  # calls of each layer
UPDATES = 4  # gradients in one call
# Shape of a minibatch [N, H, W, C], filters, their size, stride.
IMAGES = {"MinAtar": ((1024, 10, 10, 4), 16, 3, 1), "Atari": ((64, 84, 84, 4), 32, 8, 4)}


@pytest.mark.parametrize("images", IMAGES)
def test_product_of_matrices_against_flax(images, benchmark):
    shape, filters, size, stride = IMAGES[images]
    x = jax.random.normal(jax.random.key(0), shape)
    ours = Convolution(filters, size, stride)
    theirs = nn.Conv(filters, (size, size), stride, padding="VALID")
    parameters = ours.init(jax.random.key(1), x)

    def compiled_gradients(layer: Any):
        def loss(parameters: Any, scale: jax.Array) -> jax.Array:
            return jnp.mean(layer.apply(parameters, x * scale) ** 2)

        def gradients(parameters: Any) -> Any:
            gradient = jax.value_and_grad(loss)
            return jax.lax.map(lambda scale: gradient(parameters, scale), jnp.linspace(0.5, 1.5, UPDATES))

        compiled = jax.jit(gradients)
        return lambda: compiled(parameters)

    product, flax = compiled_gradients(ours), compiled_gradients(theirs)
    for a, b in zip(jax.tree.leaves(product()), jax.tree.leaves(flax()), strict=True):  # compiles, too
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    seconds = timed_in_turns({"product": product, "flax": flax}, PAIRS)
    ratio = Spread.ratio(seconds["flax"], seconds["product"])
    benchmark.extra_info.update(ratio.figures)
    benchmark.pedantic(lambda: jax.block_until_ready(product()), rounds=3)
    times = ", ".join(f"{name} {1e3 * Spread.of(times).median:.1f} ms" for name, times in seconds.items())
    print(f"\n{images} {list(shape)}: {times}; {ratio:.1f} times as fast")
