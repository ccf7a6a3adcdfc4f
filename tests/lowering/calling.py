"""An algorithm whose environment fragment calls a host function that fails in a chosen way."""

import dataclasses
import os
import sys
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import fdg


def ask(fault, x):
    """The host function: `x + 1`, or a fault."""
    if fault == "raise":
        raise ValueError("the wheels\nfell off")
    if fault == "sys.exit":
        sys.exit(4)
    if fault == "exit":
        os._exit(7)
    return {
        "shape": np.zeros(3, np.float32),
        "dtype": np.zeros(x.shape, np.int32),
        "count": (x, x),
        "double": np.asarray(x, np.float64) + 1,  # which JAX casts to float32
    }.get(fault, np.asarray(x) + 1)


@dataclasses.dataclass(frozen=True)
class Host:
    fault: str
    __name__: ClassVar[Any] = "ask"

    def __call__(self, x):
        return ask(self.fault, x)


@dataclasses.dataclass(frozen=True)
class Calling:
    num_envs: int = 4
    fault: str = "none"
    kind: str = "io"
    where: str = "iterate"
    steps_per_iteration: ClassVar[int] = 4

    def init(self, key):
        state = jnp.zeros(self.num_envs)
        return io_callback(Host(self.fault), state, state) if self.where == "init" else state

    def iterate(self, state):
        fault = self.fault if self.where == "iterate" else "none"

        def one(state, _):
            return self.simulate(fault, state), None

        state = jax.lax.scan(one, state, length=2)[0]
        state = self.learn(state)
        return state, {"episode_return": jnp.mean(state), "episodes": jnp.float32(1)}

    def simulate(self, fault, state):
        def step(state):
            if self.kind == "debug":
                jax.debug.callback(Host(fault), state)
                return state + 1
            if self.kind == "pure":
                return jax.pure_callback(Host(fault), state, state)
            return io_callback(Host(fault), state, state, ordered=self.kind == "ordered")

        return fdg.fragment("environment", name="step")(step)(state)

    @fdg.fragment("learner", name="learn")
    def learn(self, state):
        return state * 2.0
