"""Loss terms by hand."""

import jax
import jax.numpy as jnp
import pytest

from algos import losses


def test_clipped_surrogate():
    """Schulman et al. 2017, equation 7, epsilon 0.2; all four cases of their figure 1.

    ratio 2, advantage 1:    min(2, 1.2) = 1.2    (clipped)
    ratio 2, advantage -1:   min(-2, -1.2) = -2   (not clipped)
    ratio 0.5, advantage 1:  min(0.5, 0.8) = 0.5  (not clipped)
    ratio 0.5, advantage -1: min(-0.5, -0.8) = -0.8
    Mean: (1.2 - 2 + 0.5 - 0.8) / 4 = -0.275.
    """
    log_ratio = jnp.log(jnp.array([2.0, 2.0, 0.5, 0.5]))
    advantage = jnp.array([1.0, -1.0, 1.0, -1.0])
    assert float(losses.clipped_surrogate(log_ratio, advantage, 0.2)) == pytest.approx(0.275, rel=1e-6)
    gradient = jax.grad(losses.clipped_surrogate)(log_ratio, advantage, 0.2)
    # d(-mean(ratio * advantage)) / d log ratio = -ratio * advantage / 4 where not clipped, else 0.
    assert gradient.tolist() == pytest.approx([0.0, 0.5, -0.125, 0.0], abs=1e-6)


def test_value_error():
    """Targets 2 and 1, values 0: (4 + 1) / 4. Old values 1 and 0, clip 0.2: values 0.8 and 0, lower errors.

    Value 1.9, old value 1, target 2: the clipped value has the larger error, (1.2 - 2)^2 = 0.64 > (0.1)^2.
    """
    value, target, old = jnp.zeros(2), jnp.array([2.0, 1.0]), jnp.array([1.0, 0.0])
    assert float(losses.value_error(value, target)) == 1.25
    assert float(losses.clipped_value_error(value, old, target, clip=0.2)) == pytest.approx(1.25)
    moved = losses.clipped_value_error(jnp.array([1.9]), old[:1], target[:1], clip=0.2)
    assert float(moved) == pytest.approx(0.32, rel=1e-6)


def test_standardize():
    """1 and 3 have mean 2 and standard deviation 1."""
    assert losses.standardize(jnp.array([1.0, 3.0])).tolist() == pytest.approx([-1.0, 1.0])
    assert losses.standardize(jnp.ones(3)).tolist() == [0.0, 0.0, 0.0]  # not NaN


def test_kl_clip_fraction_and_explained_variance():
    """KL estimator k3, ratios 2 and 1: (2 - 1 - log 2) / 2 = 0.15343; half of them are outside [0.8, 1.2]."""
    log_ratio = jnp.log(jnp.array([2.0, 1.0]))
    assert float(losses.approximate_kl(log_ratio)) == pytest.approx(0.1534264, rel=1e-5)
    assert float(losses.clip_fraction(log_ratio, 0.2)) == 0.5
    assert float(losses.clip_fraction(jnp.zeros(2), 0.0)) == 0.0  # the bound itself is not clipped
    # Targets 1 and 3, values 1 and 2: error variance 0.25, target variance 1.
    explained = losses.explained_variance(jnp.array([1.0, 3.0]), jnp.array([1.0, 2.0]))
    assert float(explained) == pytest.approx(0.75)
