"""DroQ: dropout, and ensembles of critics compared with single critics.

Hiraoka et al. 2022 (arXiv 2110.02034), section 3.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from algos.layers import Trunk, apply_dropout
from algos.redq import Ensemble
from algos.values import Layers


def test_ensemble_matches_single_critics():
    """Critic i uses row i of the parameters; rows differ."""
    space, layers = envs.Box(-1.0, 1.0, (3,)), Layers(hidden=(8, 4), activation="relu")
    network = Ensemble(num_critics=4, critic_layer_norm=True).network(space, layers)
    x, action = jax.random.normal(jax.random.key(1), (5, 3)), jnp.ones((5, 2))
    parameters = jax.jit(network.init)(jax.random.key(0), x, action)
    found = jax.jit(network.apply)(parameters, x, action)
    single = jax.jit(Trunk(Layers((8, 4), "relu", layer_norm=True), 1, 1.0).apply)
    for i in range(4):
        row = jax.tree.map(lambda p, i=i: p[i], parameters["critics"])
        expected = single({"params": row}, x, action)[:, 0]
        np.testing.assert_allclose(found[i], expected, rtol=1e-5)
    assert len(np.unique(np.asarray(found).round(5))) == 20


def test_dropout():
    keys = jax.random.split(jax.random.key(0), 500)
    x = apply_dropout(jnp.ones((500, 20)), 0.25, keys)
    np.testing.assert_allclose(np.unique(x), [0.0, 1 / 0.75], rtol=1e-6)
    assert float(jnp.mean(x)) == pytest.approx(1.0, abs=0.03)
    assert not jnp.array_equal(x, apply_dropout(jnp.ones((500, 20)), 0.25, keys, 1))
    np.testing.assert_array_equal(
        apply_dropout(jnp.ones((2, 20)), 0.25, keys[7:9]), x[7:9]
    )  # independent of the other rows
    space = envs.Box(-1.0, 1.0, (1,))
    network = Ensemble(num_critics=2, dropout=0.5).network(space, Layers(hidden=(64,), activation="relu"))
    ones = jnp.ones((500, 1))
    parameters, apply = jax.jit(network.init)(jax.random.key(0), ones, ones), jax.jit(network.apply)
    copies = jax.tree.map(lambda p: jnp.stack([p[0], p[0]]), parameters)  # one critic, two dropout masks
    first, second = apply(copies, ones, ones, keys)
    plain = apply(copies, ones, ones)[0]
    assert float(jnp.mean(first == second)) < 0.05
    np.testing.assert_allclose(jnp.mean(first), plain[0], atol=4 * float(jnp.std(first)) / 500**0.5)


def test_order_of_layers():
    """Dense, dropout, layer norm, ReLU: dropped units are not zero after the layer norm."""
    x, keys = jnp.ones((1, 1)), jax.random.split(jax.random.key(3), 1)
    trunk = Trunk(Layers((16,), "relu", layer_norm=True), 16, 1.0, dropout=0.5)
    kernel = jnp.arange(1.0, 17.0)[None]
    parameters = {
        "Dense_0": {"kernel": kernel, "bias": jnp.zeros(16)},
        "LayerNorm_0": {"scale": jnp.ones(16), "bias": jnp.zeros(16)},
        "head": {"kernel": jnp.eye(16), "bias": jnp.zeros(16)},
    }
    found = jax.jit(trunk.apply)({"params": parameters}, x, None, keys)
    kept = np.asarray(apply_dropout(kernel, 0.5, keys))
    normal = (kept - kept.mean()) / np.sqrt(kept.var() + 1e-6)
    assert 0 < np.count_nonzero(kept) < 16
    np.testing.assert_allclose(found, np.maximum(normal, 0.0), rtol=1e-4, atol=1e-5)
