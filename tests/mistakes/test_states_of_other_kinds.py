"""States that are not pytrees of arrays, from `init`, from `iterate`, and given to `run`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from fdg.errors import FdgError
from tests.refusing import refuses

CYCLE: dict = {}
CYCLE["itself"] = CYCLE


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tagged:
    array: jax.Array
    tag: object = dataclasses.field(metadata={"static": True})


class Fixed:
    """`init` returns `first`; `iterate` returns `later` if given, otherwise the state."""

    def __init__(self, first, *later):
        self.first, self.later = first, later

    def init(self, key):
        return self.first

    def iterate(self, state):
        return (*self.later, state)[0], {}


GOOD = {"w": np.zeros(3, np.float32)}
INVALID_STATES = {
    "keys of two types": ({"w": np.zeros(3, np.float32), 1: 0.0}, "JAX cannot flatten"),
    "a container within itself": (CYCLE, "JAX cannot flatten"),
    "a masked array": ({"w": np.ma.array([1.0, 2.0, 3.0], mask=[1, 0, 0])}, "state['w']"),
    "a dtype that JAX lacks": ({"w": np.zeros(3, np.longdouble)}, "state['w']"),
    "a shape": ({"w": jax.ShapeDtypeStruct((3,), jnp.float32)}, "state['w']"),
    "a text": ({"w": "abc"}, "state['w']"),
    "another library's tensor": ({"w": type("T", (), {"dtype": "f", "shape": (3,)})()}, "state['w']"),
}
CALLS = {
    "init": lambda state: fdg.trace(Fixed(state)),
    "iterate": lambda state: fdg.trace(Fixed(GOOD, state)),
    "run": lambda state: fdg.compile(Fixed(GOOD), policies.GPUOnly(), devices=1).run(state),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", INVALID_STATES)
def test_invalid_state(kind, call):
    state, text = INVALID_STATES[kind]
    with refuses(text):
        CALLS[call](state)


def test_invalid_static_fields():
    with pytest.raises(FdgError, match=r"is Tagged with static fields \(2,\), and was Tagged with .*1"):
        fdg.trace(Fixed({"n": Tagged(jnp.zeros(2), 1)}, {"n": Tagged(jnp.zeros(2), 2)}))
    with pytest.raises(FdgError, match="metadata fields"):  # arrays do not compare
        fdg.trace(Fixed({"n": Tagged(jnp.zeros(2), np.ones(3))}))
