import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algos import normalize
from fdg.errors import FdgError


@given(
    sizes=st.lists(st.sampled_from([1, 2, 7, 40]), min_size=1, max_size=5),
    shape=st.sampled_from([(), (3,), (2, 2)]),
    offset=st.sampled_from([0.0, 1.0, -1000.0]),
    scale=st.sampled_from([1e-2, 1.0, 1e3]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=12, deadline=None)
def test_updates_match_statistics_of_all_samples(sizes, shape, offset, scale, seed):
    rng = np.random.default_rng(seed)
    batches = [(offset + scale * rng.normal(size=(n, *shape))).astype(np.float32) for n in sizes]
    stats = normalize.init(shape)
    for batch in batches:
        stats = normalize.update(stats, jnp.asarray(batch))
    samples = np.concatenate(batches).astype(np.float64)
    # float32 resolution: 1e-6 of the largest value, for the mean and each standard deviation.
    resolution = 1e-6 * np.abs(samples).max()
    np.testing.assert_allclose(stats.mean, samples.mean(axis=0), rtol=1e-5, atol=2 * resolution)
    np.testing.assert_allclose(np.sqrt(stats.var), samples.std(axis=0), rtol=1e-4, atol=2 * resolution)
    assert float(stats.count) == sum(sizes)


def test_axes():
    batch = np.random.default_rng(0).normal(size=(3, 7, 4)).astype(np.float32)
    stats = normalize.update(normalize.init((3, 4)), jnp.asarray(batch), axes=1)
    np.testing.assert_allclose(stats.mean, batch.mean(axis=1), rtol=1e-5, atol=1e-6)
    assert float(stats.count) == 7.0


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.bool_, jnp.int32])
def test_integer_and_bool_batches(dtype):
    batch = jnp.array([[0, 1], [1, 1]]).astype(dtype)
    stats = normalize.update(normalize.init((2,)), batch)
    assert stats.mean.tolist() == [0.5, 1.0] and stats.var.tolist() == [0.25, 0.0]


def test_axes_must_match_statistics():
    with pytest.raises(FdgError, match=r"the statistics have shape .*: give the axes of samples"):
        normalize.update(normalize.init((3,)), jnp.zeros((5, 4)))


def test_large_mean_keeps_precision():
    # Mean of squares minus squared mean would be off by 10**8 * 2**-24 = 6, more than the variance.
    rng = np.random.default_rng(0)
    batches = (10_000.0 + rng.normal(size=(100, 1000))).astype(np.float32)
    update = jax.jit(normalize.update)
    stats = normalize.init(())
    for batch in batches:
        stats = update(stats, jnp.asarray(batch))
    np.testing.assert_allclose(stats.var, batches.astype(np.float64).var(), rtol=1e-3)


def test_many_updates_keep_precision():
    # 10,000 iterations of 2**14 samples: more than float32 counts exactly.
    batch = jnp.asarray(np.random.default_rng(0).normal(size=2**14), jnp.float32)
    stats, _ = jax.lax.scan(
        lambda stats, _: (normalize.update(stats, batch), None), normalize.init(()), None, length=10_000
    )
    np.testing.assert_allclose(stats.mean, np.asarray(batch, np.float64).mean(), atol=1e-5)
    np.testing.assert_allclose(stats.var, np.asarray(batch, np.float64).var(), rtol=1e-4)
    np.testing.assert_allclose(stats.count, 10_000 * 2**14, rtol=1e-3)


def test_no_samples_is_identity():
    x = jnp.array([[-3.0, 0.5], [9.0, 2.0]])
    np.testing.assert_array_equal(normalize.normalize(normalize.init((2,)), x), x)
    np.testing.assert_array_equal(normalize.scale(normalize.init(()), x), x)


@pytest.mark.parametrize("leading", [(), (4,), (6, 4)])
def test_normalized_mean_and_variance(leading):
    x = jnp.asarray(np.random.default_rng(0).normal(3.0, 5.0, size=(*leading, 3)), jnp.float32)
    samples = jnp.asarray(np.random.default_rng(1).normal(3.0, 5.0, size=(500, 3)), jnp.float32)
    stats = normalize.update(normalize.init((3,)), samples)
    expected = (np.asarray(x) - np.asarray(samples).mean(axis=0)) / np.asarray(samples).std(axis=0)
    np.testing.assert_allclose(normalize.normalize(stats, x), expected, rtol=1e-4, atol=1e-5)
    of_samples = normalize.normalize(stats, samples)
    np.testing.assert_allclose(of_samples.mean(axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(of_samples.std(axis=0), 1.0, rtol=1e-4)


def test_constant_component_becomes_zero():
    stats = normalize.update(normalize.init((1,)), jnp.full((8, 1), 7.0))
    assert normalize.normalize(stats, jnp.full((2, 1), 7.0)).tolist() == [[0.0], [0.0]]


def test_clipping():
    x = jnp.array([-100.0, 100.0])
    assert normalize.normalize(normalize.init((2,)), x, clip=5.0).tolist() == [-5.0, 5.0]
    assert normalize.scale(normalize.init(()), x).tolist() == [-10.0, 10.0]


def test_integer_observations_become_float32():
    assert normalize.normalize(normalize.init((2,)), jnp.array([[1, 2]], jnp.uint8)).dtype == jnp.float32


def test_statistics_get_no_gradient():
    def loss(stats):
        return jnp.sum(normalize.normalize(stats, jnp.ones(2))) + jnp.sum(
            normalize.scale(
                normalize.RunningStatistics(stats.mean[0], stats.var[0], stats.count), jnp.ones(3)
            )
        )

    for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(normalize.init((2,)))):
        np.testing.assert_array_equal(leaf, 0.0)


def test_scale_keeps_mean():
    samples = jnp.array([2.0, 4.0, 6.0, 8.0])  # variance (9 + 1 + 1 + 9) / 4 = 5
    stats = normalize.update(normalize.init(()), samples)
    np.testing.assert_allclose(normalize.scale(stats, jnp.array([5.0])), [5.0 / np.sqrt(5.0)], rtol=1e-6)


def test_scale_with_zero_variance():
    stats = normalize.update(normalize.init(()), jnp.full(8, 7.0))
    assert normalize.scale(stats, jnp.array([0.0, 1.0, -1.0])).tolist() == [0.0, 10.0, -10.0]


def test_scale_after_overflow_is_nan():
    stats = normalize.update(normalize.init(()), jnp.array([1.0, 2.0]))
    stats = normalize.update(stats, jnp.array([1.0, 1e25]))
    assert np.isnan(normalize.scale(stats, jnp.array([1.0]))).all()


def test_rollout_returns_by_hand():
    reward = jnp.array([[1.0], [2.0], [3.0], [4.0]])
    done = jnp.array([[False], [True], [False], [False]])
    carry, samples = normalize.accumulate_rollout_returns(jnp.array([8.0]), reward, done, 0.5)
    # 1 + 8/2 = 5;  2 + 5/2 = 4.5, the episode ends;  3 + 0;  4 + 3/2 = 5.5
    assert samples[:, 0].tolist() == [5.0, 4.5, 3.0, 5.5]
    assert carry.tolist() == [5.5]
