"""Algorithms with one mistake each; `Counter` is valid."""

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fdg


class Counter:
    """A valid algorithm without fragments or base class."""

    steps_per_iteration = 1

    def init(self, key):
        return {"count": jnp.int32(0), "xs": jnp.zeros(4)}

    def iterate(self, state):
        count = state["count"] + 1
        return {**state, "count": count}, {"loss": count.astype(jnp.float32)}


def counter(**methods):
    """`Counter` with replaced methods."""
    return type("Counter", (Counter,), methods)


def with_state(**more):
    """`Counter` with more values in its initial state."""
    return counter(init=lambda self, key: {**Counter().init(key), **more})


def with_iterate(iterate):
    """`Counter` with another `iterate(state)`."""
    return counter(iterate=lambda self, state: iterate(state))


class ForChoices(Counter):
    """Reads `action_space.n` of any environment."""

    def __init__(self, env):
        self.env = env

    def init(self, key):
        return {**super().init(key), "weights": jnp.zeros(self.env.action_space.n)}


class ReadsMissingField(Counter):
    def iterate(self, state):
        return super().iterate({"count": state["step"]})


class AddsUnlikeShapes(Counter):
    def iterate(self, state):
        return {**state, "xs": state["xs"] + jnp.zeros(3)}, {}


class BranchesOnTracer(Counter):
    def iterate(self, state):
        if state["count"] > 3:
            state = {**state, "count": jnp.int32(0)}
        return state, {}


class LoopsWhile(Counter):
    def iterate(self, state):
        while state["count"] < 3:
            state = {**state, "count": state["count"] + 1}
        return state, {}


class TakesAFloat(Counter):
    def iterate(self, state):
        return state, {"loss": float(state["xs"].mean())}


class CallsNumPy(Counter):
    def iterate(self, state):
        return state, {"loss": np.sort(state["xs"])[0]}


class IndexesAList(Counter):
    def iterate(self, state):
        return state, {"loss": [0.1, 0.2][state["count"]]}


class MasksAnArray(Counter):
    def iterate(self, state):
        return state, {"loss": state["xs"][state["xs"] > 0].mean()}


class RangesOverATracer(Counter):
    def iterate(self, state):
        return state, {"loss": sum(range(state["count"]))}


class CountsInSelf(Counter):
    def __init__(self):
        self.n = 0

    def iterate(self, state):
        self.n += 1
        return super().iterate(state)


class StoresATracer(Counter):
    def iterate(self, state):
        self.last = state["count"]
        return super().iterate(state)


LOG: list[Any] = []


class LogsATracer(Counter):
    def iterate(self, state):
        LOG.append(state["count"])
        return super().iterate(state)


class Draws(Counter):
    """Draws from a key of its state, which it returns unchanged."""

    def init(self, key):
        return {**super().init(key), "key": key}

    def iterate(self, state):
        return {**state, "xs": self.draw(state["key"])}, {}

    def draw(self, key):
        return jax.random.normal(key, (4,))


class DrawsInAFragment(Draws):
    draw = fdg.fragment("actor", in_axes=None, out_axes=None, name="draw")(Draws.draw)


class DrawsInALoop(Draws):
    def draw(self, key):
        return jax.lax.fori_loop(0, 3, lambda i, x: x + jax.random.uniform(key, (4,)), jnp.zeros(4))


class DrawsFromAPart(Draws):
    def draw(self, key):
        return super().draw(jax.random.split(key)[1])


class DrawsFromAConstant(Draws):
    def draw(self, key):
        return jax.random.gamma(jax.random.fold_in(jax.random.key(1), 2), 1.0, (4,))


class DrawsByCount(Draws):
    """Valid: the key is folded with a number that changes."""

    def iterate(self, state):
        key = jax.random.fold_in(state["key"], state["count"])
        return {**state, "count": state["count"] + 1, "xs": self.draw(key)}, {}


class DrawsWithItsOwnNumPy(Counter):
    generator = np.random.default_rng(0)

    def iterate(self, state):
        return state, {"loss": jnp.float32(self.generator.normal())}


TRACES = {"count": 0}


class CountsInAGlobal(Counter):
    def iterate(self, state):
        TRACES["count"] += 1
        return super().iterate(state)


class DrawsWithNumPy(Counter):
    def iterate(self, state):
        return state, {"loss": jnp.float32(np.random.normal())}  # noqa: NPY002


class DrawsWithPython(Counter):
    def init(self, key):
        return {**super().init(key), "start": jnp.float32(random.random())}


@dataclasses.dataclass(frozen=True)
class WithFragment:
    """Its fragment is a method, so the object must be hashable."""

    widths: Any = (1, 2)
    role: str = "actor"

    def init(self, key):
        return jnp.zeros(8)

    def iterate(self, state):
        return self.act(state), {}

    @fdg.fragment("actor")
    def act(self, xs):
        return xs + len(self.widths)


class Unhashable(WithFragment):
    def __eq__(self, other):
        return self is other


class OfRole:
    """One fragment with a given role."""

    def __init__(self, role):
        self.role = role

    def init(self, key):
        return jnp.zeros(8)

    def iterate(self, state):
        return fdg.fragment(self.role, name="work")(jnp.cos)(state), {}


class AxisTooFar(OfRole):
    def iterate(self, state):
        return fdg.fragment("actor", in_axes=1, name="work")(jnp.cos)(state), {}


class AxesThatDiffer(OfRole):
    def iterate(self, state):
        both = fdg.fragment("actor", in_axes=(0, 0), name="work")(lambda x, y: x)
        return both(state, jnp.zeros(4)), {}


class OneAxisTooMany(OfRole):
    def iterate(self, state):
        return fdg.fragment("actor", in_axes=(0, 0), name="work")(jnp.cos)(state), {}
