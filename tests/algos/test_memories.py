"""Kinds of memory: sequences match single steps, episodes are independent, and formulas by hand."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algos.memories import Cells, ForgetfulLSTM, Gate, GatedBlock, MemoryKind, MinGRU
from fdg.errors import FdgError

STEPS, COUNT, WIDTH = 7, 3, 4
KINDS = ["gru", "lstm", "mingru", "transformer"]
START = jnp.zeros((STEPS, COUNT), bool).at[3, 1].set(True).at[0, 2].set(True)


@functools.cache
def build(kind):
    config = MemoryKind(kind, size=WIDTH, window=3, layers=1, heads=2)
    module = config.module()
    inputs = jax.random.normal(jax.random.key(1), (STEPS, COUNT, 2))
    parameters = jax.jit(module.init)(jax.random.key(0), config.empty((COUNT,)), inputs, START)
    leaves, structure = jax.tree.flatten(parameters)
    keys = jax.random.split(jax.random.key(2), len(leaves))  # no parameter is zero
    leaves = [x + 0.3 * jax.random.normal(keys[i], x.shape) for i, x in enumerate(leaves)]
    return config, inputs, jax.jit(functools.partial(module.apply, jax.tree.unflatten(structure, leaves)))


@pytest.mark.parametrize("kind", KINDS)
def test_sequence_matches_single_steps(kind):
    config, inputs, unroll = build(kind)
    memory = config.empty((COUNT,))
    output, memories = unroll(memory, inputs, START)
    assert output.shape == (STEPS, COUNT, WIDTH)
    assert [x.shape[2:] for x in jax.tree.leaves(memories)] == [x.shape[1:] for x in jax.tree.leaves(memory)]
    for t in range(STEPS):
        one, after = unroll(memory, inputs[t][None], START[t][None])
        memory = jax.tree.map(lambda x: x[0], after)
        np.testing.assert_allclose(one[0], output[t], atol=1e-5)
        jax.tree.map(lambda x, y, t=t: np.testing.assert_allclose(x[t], y, atol=1e-5), memories, memory)
    for initial, last in zip(jax.tree.leaves(config.empty((COUNT,))), jax.tree.leaves(memory), strict=True):
        assert (initial.shape, initial.dtype) == (last.shape, last.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_episode_start_resets_memory(kind):
    config, inputs, unroll = build(kind)
    ones = jax.tree.map(jnp.ones_like, config.empty((COUNT,)))
    first = unroll(ones, inputs, START)
    second = unroll(config.empty((COUNT,)), inputs.at[:3].add(1.0), START)
    changed = jax.tree.map(lambda x, y: jnp.abs(x.astype(jnp.float32) - y), first, second)
    for x in jax.tree.leaves(changed):
        assert float(x[3:, 1].max()) == 0
    assert float(changed[0][3, 0].max()) > 1e-4


def test_transformer_window():
    config, inputs, unroll = build("transformer")
    start = jnp.zeros((STEPS, COUNT), bool)
    first, _ = unroll(config.empty((COUNT,)), inputs, start)
    other, _ = unroll(config.empty((COUNT,)), inputs.at[2].add(1.0), start)
    moved = jnp.abs(first - other).max((1, 2)) > 1e-6
    assert moved.tolist() == [False, False, True, True, True, False, False]


def test_lstm_by_hand():
    """All weights 1, forget bias 1, x = 1, h = 0.5, c = 2: gates at 1.5, forget at 2.5.

    c = sigmoid(2.5) * 2 + sigmoid(1.5) * tanh(1.5) = 1.848284 + 0.740026 = 2.588310 and
    h = sigmoid(1.5) * tanh(c) = 0.80839; at a start from zero: gates at 1, c = 0.556770, h = 0.36961.
    """
    unit, memory = ForgetfulLSTM(1), Cells(jnp.full((2, 1), 2.0), jnp.full((2, 1), 0.5))
    given = memory, jnp.ones((1, 2, 1)), jnp.array([[False, True]])
    parameters = jax.jit(unit.init)(jax.random.key(0), *given)["params"]
    ones = {**jax.tree.map(jnp.ones_like, parameters), "bias": jnp.zeros(4)}
    output, after = unit.apply({"params": ones}, *given)
    assert after.cell[0, :, 0].tolist() == pytest.approx([2.588310, 0.556770], abs=1e-5)
    assert output[0, :, 0].tolist() == pytest.approx([0.80839, 0.36961], abs=1e-5)


def test_mingru_by_hand():
    """z = sigmoid(0) = 0.5, n = x: each output is the mean of x and the memory; 0.5 x at an episode start."""
    unit = MinGRU(1)
    given = (
        jnp.full((1, 1), 8.0),
        jnp.array([2.0, 3.0, 6.0])[:, None, None],
        jnp.array([[False], [False], [True]]),
    )
    parameters = jax.jit(unit.init)(jax.random.key(0), *given)["params"]
    parameters = jax.tree.map(jnp.zeros_like, parameters)
    parameters["n"]["kernel"] = jnp.ones((1, 1))
    assert unit.apply({"params": parameters}, *given)[0].ravel().tolist() == [5.0, 4.0, 3.0]


def test_attention_matches_numpy():
    """Compares with a NumPy loop over steps and heads."""
    size, heads, window = 4, 2, 3
    block = GatedBlock(size, heads)
    rng = np.random.default_rng(0)
    history = rng.normal(size=(6, 2, size)).astype(np.float32)
    x, visible = history[2:], rng.random((4, 6, 2)) < 0.5
    distance = 2 + np.arange(4)[:, None] - np.arange(6)[None]
    visible &= ((distance >= 0) & (distance < window))[:, :, None]
    visible |= (distance == 0)[:, :, None]
    given = jnp.asarray(x), jnp.asarray(history), jnp.asarray(visible), np.clip(distance, 0, 2), window
    p = jax.jit(block.init, static_argnums=5)(jax.random.key(0), *given)["params"]
    p = jax.tree.map(lambda leaf: np.asarray(leaf + rng.normal(scale=0.5, size=leaf.shape), np.float32), p)

    def norm(v, name):
        v = (v - v.mean(-1, keepdims=True)) / np.sqrt(v.var(-1, keepdims=True) + 1e-6)
        return v * p[name]["scale"] + p[name]["bias"]

    def dense(v, name):
        return v @ p[name]["kernel"] + p[name]["bias"]

    def gate(a, b, name):
        q = p[name]
        sigmoid = lambda v: 1 / (1 + np.exp(-v))  # noqa: E731
        (br, bz, bn), (ar, az) = np.split(b @ q["of_y"]["kernel"], 3), np.split(a @ q["of_x"]["kernel"], 2)
        r, z = sigmoid(br + ar), sigmoid(bz + az - q["bias"])
        n = np.tanh(bn + (r * a) @ q["of_reset"]["kernel"])
        return (1 - z) * a + z * n

    expected = np.zeros_like(x)
    for t in range(4):
        for n in range(2):
            seen = [s for s in range(6) if visible[t, s, n]]
            outputs = []
            for h in range(heads):
                part = slice(h * 2, h * 2 + 2)
                query = dense(norm(x[t, n], "norm_1"), "query")[part]
                scores = [
                    query @ dense(norm(history[s, n], "norm_1"), "key_and_value")[:size][part] / math.sqrt(2)
                    + p["distance"][h, distance[t, s]]
                    for s in seen
                ]
                weights = np.exp(scores) / np.exp(scores).sum()
                values = [dense(norm(history[s, n], "norm_1"), "key_and_value")[size:][part] for s in seen]
                outputs.append(sum(w * v for w, v in zip(weights, values, strict=True)))
            a = gate(x[t, n], np.maximum(dense(np.concatenate(outputs), "attended"), 0), "gate_1")
            y = np.maximum(dense(norm(a, "norm_2"), "dense_1"), 0)
            expected[t, n] = gate(a, np.maximum(dense(y, "dense_2"), 0), "gate_2")
    np.testing.assert_allclose(block.apply({"params": p}, *given), expected, atol=1e-5)


def test_initial_gate_passes_its_input():
    x, y = jnp.full((1, 1, 2), 3.0), jnp.zeros((1, 1, 2))
    parameters = Gate(2).init(jax.random.key(0), x, y)["params"]
    zeros = {**jax.tree.map(jnp.zeros_like, parameters), "bias": parameters["bias"]}
    # z = sigmoid(-2) = 0.119203, n = 0.
    assert Gate(2).apply({"params": zeros}, x, y).ravel().tolist() == pytest.approx(
        [3 * 0.880797] * 2, abs=1e-5
    )


def test_unknown_memory():
    with pytest.raises(FdgError, match="unknown memory 'lstn': did you mean 'lstm'"):
        MemoryKind("lstn")
