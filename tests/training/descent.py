"""`Descent`, a tiny algorithm for tests of sweeps, and reference runs of a single agent."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import fdg


@dataclasses.dataclass(frozen=True)
class Descent:
    """Noisy gradient descent on a quadratic: tests sweep `rate` and `pull`. Compiles fast."""

    rate: float = 0.1
    pull: float = 1.0
    offset: float | None = None
    width: int = 3
    total_steps: int = 64
    steps_per_iteration: ClassVar[int] = 8

    def __post_init__(self):
        if self.rate < 0:
            raise ValueError(f"rate={self.rate}: it must not be negative")

    def init(self, key):
        return {"x": jax.random.normal(key, (self.width,)), "key": key}

    def iterate(self, state):
        key, noise = jax.random.split(state["key"])
        gradient = self.slope(state["x"], jax.random.normal(noise, (self.width,)))
        x = state["x"] - self.rate * gradient
        return {"x": x, "key": key}, {"episode_return": -jnp.sum(x**2), "loss": jnp.sum(gradient**2)}

    @fdg.fragment("learner", in_axes=None, out_axes=None)
    def slope(self, x, noise):
        return self.pull * x + 0.1 * noise + (0.0 if self.offset is None else self.offset)


def single_run(algorithm, seed, iterations):
    """Final state and metrics of one agent: `iterate` scanned without the engine."""

    def one(state, _):
        return algorithm.iterate(state)

    state, metrics = jax.jit(lambda key: jax.lax.scan(one, algorithm.init(key), length=iterations))(
        jax.random.key(seed)
    )
    return state, metrics


def assert_close(a, b, rtol=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol)
