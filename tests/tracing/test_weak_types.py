"""States with Python numbers have the dtypes and values of plain calls of `iterate`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from fdg.training.checkpoint import Checkpoints


@dataclasses.dataclass(frozen=True)
class Separate:
    """The actor on one device, the learner on two others."""

    def place(self, devices):
        return {"actor": fdg.Group("actors", (0,)), "learner": fdg.Group("learners", (1, 2))}


class Algorithm:
    """`init` returns `start()`; an iteration applies `after` to the state."""

    def __init__(self, start, after):
        self.start, self.after = start, after

    def init(self, key):
        return self.start()

    def iterate(self, state):
        new = self.after(state)
        learned = fdg.fragment("learner", out_axes=None, name="learned")(size)(state["x"])
        acted = fdg.fragment("actor", out_axes=None, name="acted")(size)(new["x"])
        return new, {"learned": learned, "acted": acted, "n": size(new["n"])}


def size(x):
    return jnp.abs(jnp.sum(x)).astype(jnp.float32)


@fdg.fragment("learner", in_axes=(0, None))
def scaled(x, n):
    return x * n


@fdg.fragment("actor", in_axes=(0, None))
def shifted(x, n):
    return x + n


def batch(dtype=jnp.uint8):
    return jnp.arange(100, 108, dtype=dtype)


STATES = {
    "counter": (lambda: {"x": batch(), "n": 3}, lambda s: {"x": scaled(s["x"], s["n"]), "n": s["n"] + 1}),
    "float": (
        lambda: {"x": jnp.full(8, 1.003, jnp.bfloat16), "n": 1.001},
        lambda s: {"x": scaled(shifted(s["x"], s["n"]), s["n"]), "n": s["n"] * 0.99},
    ),
    "complex": (
        lambda: {"x": jnp.ones(8, jnp.complex64), "n": 1j},
        lambda s: {"x": scaled(s["x"], s["n"]), "n": s["n"]},
    ),
    "in a loop": (
        lambda: {"x": batch(), "n": 3},
        lambda s: {"x": jax.lax.fori_loop(0, 2, lambda _, x: shifted(x, s["n"]), s["x"]), "n": s["n"]},
    ),
    # Weakly typed at first and strongly typed afterwards (or the reverse), with the same numbers.
    "to strong": (
        lambda: {"x": batch(jnp.float32), "n": 0.5},
        lambda s: {"x": s["x"], "n": s["n"] + s["x"][0]},
    ),
    "to weak": (
        lambda: {"x": batch(jnp.float32), "n": jnp.zeros(())},
        lambda s: {"x": s["x"] + s["n"], "n": 1.5},
    ),
    "exchanged": (
        lambda: {"x": batch(jnp.float32), "n": 0.5, "m": jnp.ones(())},
        lambda s: {"x": s["x"] * s["m"] + s["n"], "n": s["m"], "m": s["n"]},
    ),
}


def plain(algorithm, iterations):
    state, iterate = algorithm.init(None), jax.jit(algorithm.iterate)
    for _ in range(iterations):
        state, metrics = iterate(state)
    return state, metrics


@pytest.mark.parametrize(
    ("policy", "count"), [(policies.GPUOnly(), 1), (policies.GPUOnly(), 2), (Separate(), 3)]
)
@pytest.mark.parametrize("name", STATES)
def test_weak_types_match_plain_jax(name, policy, count, devices):
    algorithm = Algorithm(*STATES[name])
    engine = fdg.compile(algorithm, policy, devices[:count])
    state, metrics = engine.run(engine.run(engine.init(0), 2)[0], 1)
    expected, last = plain(algorithm, 3)
    for key, value in last.items():
        np.testing.assert_allclose(metrics[key][-1], value, rtol=1e-6)
    for made, want in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert made.dtype == want.dtype
        np.testing.assert_allclose(made.astype(complex), want.astype(complex), rtol=1e-6)
    if name not in ("to strong", "to weak", "exchanged"):
        again = engine.init(0)
        for made in (state, again):
            assert [x.weak_type for x in jax.tree.leaves(made)] == [
                x.weak_type for x in jax.tree.leaves(expected)
            ]


def test_weak_types_with_several_agents(devices):
    algorithm = Algorithm(*STATES["counter"])
    engine = fdg.compile(algorithm, policies.GPUOnly(), devices[:2], num_seeds=4)
    state, _ = engine.run(engine.init(0), 3)
    expected, _ = plain(algorithm, 3)
    assert state["x"].tolist() == [expected["x"].tolist()] * 4 and state["n"].weak_type


def test_checkpoint_keeps_weak_types(tmp_path, devices):
    engine = fdg.compile(Algorithm(*STATES["counter"]), policies.GPUOnly(), devices[:2])
    state, _ = engine.run(engine.init(0), 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, state)
    checkpoints.close()
    restored = Checkpoints(tmp_path).restore(2, engine.state_shape)
    assert (restored["n"].weak_type, restored["n"].tolist(), restored["x"].weak_type) == (True, 5, False)


@pytest.mark.parametrize(
    ("start", "after", "words"),
    [
        (
            lambda: {"x": batch(), "n": 3},
            lambda s: {"x": scaled(s["x"], s["n"]).astype(jnp.uint8), "n": s["n"] + jnp.int32(1)},
            r"takes state\['n'\] as a Python number and returns int32, .*: make it jnp.int32",
        ),
        (
            lambda: {"x": batch(), "n": jnp.int32(3)},
            lambda s: {"x": scaled(s["x"], s["n"]).astype(jnp.uint8), "n": 3},
            r"takes state\['n'\] as int32 and returns a Python number, .*: return it with jnp.asarray",
        ),
        (
            lambda: {"x": batch(), "n": 3},
            lambda s: {"x": scaled(s["x"], s["n"]), "n": s["n"] + jnp.int32(1)},
            r"changes state\['x'\] from uint8\[8\] to int32\[8\]",
        ),
        (
            lambda: {"x": batch(), "n": 3},
            lambda s: {"x": s["x"], "n": s["n"] * 0.5},
            r"changes state\['n'\] from int32\[\] to float32\[\]",
        ),
    ],
)
def test_changing_dtype_is_refused(start, after, words):
    with pytest.raises(fdg.GraphError, match=words):
        fdg.trace(Algorithm(start, after))
