"""SimbaV2's layers: unit-length features, a block by hand, projection of weights, and settings.

Lee et al. 2025 (arXiv 2502.15280), section 4.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
from algos import layers, networks
from algos.layers import Trunk, UnitHead, project_kernels, to_unit_length
from algos.values import Layers


class Block(nn.Module):
    depth: int

    @nn.compact
    def __call__(self, x):
        return layers.residual_block(x, self.depth)


class Embedding(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return layers.embed_inputs(x, self.width)


def norm(x, axis=-1):
    return np.linalg.norm(np.asarray(x), axis=axis)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_embedding_by_hand():
    """The constant 3 is appended to inputs: 4 and 3 become 0.8 and 0.6, so the norm is not lost."""
    scale = jnp.array([2.0, 1.0])
    parameters = {
        "UnitDense_0": {"unit_kernel": jnp.eye(2)},
        "Scaler_0": {"scale": scale},
    }
    found = Embedding(2).apply({"params": parameters}, jnp.array([[4.0], [-4.0]]))
    np.testing.assert_allclose(found, unit(np.array([[1.6, 0.6], [-1.6, 0.6]])), rtol=1e-5)


def test_block_by_hand():
    """Width 2, inner width 8: compared with NumPy, for initial parameters."""
    x = to_unit_length(jax.random.normal(jax.random.key(1), (5, 2)))
    parameters = jax.jit(Block(depth=2).init)(jax.random.key(0), x)["params"]
    up, down = (np.asarray(parameters[f"UnitDense_{i}"]["unit_kernel"]) for i in range(2))
    assert up.shape == (2, 8) and down.shape == (8, 2)
    # Scales: sqrt(2 / 8) inside; 1 / (2 blocks + 1) for the residual, by a parameter of 1 / sqrt(2).
    np.testing.assert_allclose(parameters["Scaler_0"]["scale"], 0.5, rtol=1e-6)
    np.testing.assert_allclose(parameters["Scaler_1"]["scale"], math.sqrt(0.5), rtol=1e-6)
    inner = np.maximum(0.5 * (np.asarray(x) @ up), 0.0)
    expected = unit(np.asarray(x) + (unit(inner @ down) - np.asarray(x)) / 3.0)
    np.testing.assert_allclose(Block(depth=2).apply({"params": parameters}, x), expected, rtol=1e-4)


def test_gradient_of_zero_features():
    """The gradient of a zero vector is finite."""
    gradient = jax.grad(lambda x: jnp.sum(to_unit_length(x)))(jnp.zeros((2, 3)))
    assert jnp.all(jnp.isfinite(gradient))


def test_projected_kernels_have_unit_columns():
    trunk = Trunk(Layers(hidden=(6, 6), activation="relu", torso="simba"), 3, 0.01)
    x = 100.0 * jax.random.normal(jax.random.key(1), (4, 5))
    parameters = jax.jit(trunk.init)(jax.random.key(0), x)["params"]
    kernels = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(parameters)
        if path[-1].key == "unit_kernel"
    ]
    assert len(kernels) == 1 + 2 * 2 + 2  # embedding, two blocks, head
    for kernel in kernels:
        np.testing.assert_allclose(norm(kernel, axis=0), 1.0, rtol=1e-5)
    moved = jax.tree.map(lambda p: p + 0.3, parameters)
    after = project_kernels(moved)
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(moved), jax.tree.leaves(after), strict=True
    ):
        if path[-1].key == "unit_kernel":
            np.testing.assert_allclose(new, old / norm(old, axis=0)[None], rtol=1e-5)
        else:
            assert new is old
    assert float(jnp.max(jnp.abs(trunk.apply({"params": parameters}, x)))) <= math.sqrt(6.0) + 1e-5


def test_head_has_bias():
    head, x = UnitHead(2), jnp.ones((1, 3))
    parameters = jax.jit(head.init)(jax.random.key(0), x)["params"]
    moved = {**parameters, "bias": jnp.array([1.0, 2.0])}
    difference = head.apply({"params": moved}, x) - head.apply({"params": parameters}, x)
    np.testing.assert_allclose(difference, [[1.0, 2.0]], rtol=1e-5)


SMALL = {"num_envs": 4, "batch_size": 8, "buffer_size": 64, "learning_starts": 0, "updates_per_step": 0.25}


def test_network_value_sets_fields():
    env = envs.make("Pendulum-v1")
    plain = algos.SAC(env=env, hidden=(32, 32), torso="simba")
    assert algos.SAC(env=env, actor_network=networks.simba(32, 2)) == plain
    tqc = algos.TQC(env=env, actor_network=networks.simba(16, 1, critic=(32, 2)))
    assert (tqc.hidden, tqc.critic_hidden, tqc.torso) == ((16,), (32, 32), "simba")
    ppo = algos.PPO(env=env, network=networks.simba(8, 1))
    parameters = jax.eval_shape(ppo.init, jax.random.key(0)).parameters
    assert set(parameters["actor"]) == {"UnitDense_0", "Scaler_0", "UnitDense_1", "Scaler_1", "UnitDense_2",
                                        "Scaler_2", "head"}  # fmt: skip


def test_critics_with_memory_have_unit_heads():
    sac = algos.SAC(env=envs.make("Pendulum-v1"), torso="simba", memory="gru", memory_size=4)
    critics = jax.eval_shape(sac.init, jax.random.key(0)).learned.parameters.critics
    assert set(critics["critic_1"]["head"]) == {"UnitDense_0", "Scaler_0", "UnitDense_1", "bias"}


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (
            algos.SAC,
            {"hidden": (8, 4)},
            r"torso='simba' has blocks of one width: hidden=\(8, 4\) names several",
        ),
        (algos.CrossQ, {}, "torso='simba': CrossQ normalises dense layers only: set torso='dense'"),
    ],
)
def test_invalid_settings(kind, fields, words):
    with pytest.raises(fdg.FdgError, match=words):
        fdg.trace(kind(env=envs.make("probe:continuous"), torso="simba", **SMALL, **fields))
    with pytest.raises(fdg.FdgError, match=r"critic_hidden=.*: use"):
        algos.SAC(env=envs.make("probe:continuous"), actor_network=networks.simba(8, 1, critic=(8, 1)))
