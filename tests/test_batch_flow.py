"""Following the batch axis: one operation at a time by hand, then whole programs against their HLO."""

import jax
import jax.numpy as jnp
import pytest

import algos
import envs
import fdg
import policies
from fdg.batch_flow import reductions

# ruff: noqa: E501
B, F = 8, 3


def consumed(function, *shapes, axes=(0,)):
    """(operation, bytes, calls) of each place where the batch axis is consumed."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return [(r.primitive, r.bytes, r.calls) for r in reductions(jaxpr, axes)]


@pytest.mark.parametrize(
    ("function", "shape", "expected"),
    [
        (jnp.tanh, (B, F), []),
        (lambda x: x.sum(0), (B, F), [("reduce_sum", 4 * F, 1)]),
        (lambda x: x.sum(1), (B, F), []),
        (lambda x: x.sum(1).max(), (B, F), [("reduce_max", 4, 1)]),
        (lambda x: x.T.sum(1), (B, F), [("reduce_sum", 4 * F, 1)]),
        (lambda x: x.T.sum(0), (B, F), []),
        (lambda x: x[:, None, :].sum(2).sum(0), (B, F), [("reduce_sum", 4, 1)]),
        (lambda x: x @ jnp.ones((F, 5)), (B, F), []),
        (lambda x: x.T @ jnp.ones((B, 5)), (B, F), [("dot_general", 4 * F * 5, 1)]),
        (lambda x: jnp.ones((5, B)) @ x, (B, F), [("dot_general", 4 * F * 5, 1)]),
        (lambda x: (jnp.ones((5, F)) @ x.T).sum(1), (B, F), [("reduce_sum", 4 * 5, 1)]),
        (lambda x: jnp.einsum("bf,bg->bfg", x, x).sum((1, 2)), (B, F), []),
        (lambda x: x.reshape(B * F).sum(), (B, F), [("reduce_sum", 4, 1)]),
        (lambda x: x.reshape(B * F).reshape(B, F).sum(1), (B, F), []),
        (lambda x: x[jnp.arange(4)], (B, F), [("gather", 4 * 4 * F, 1)]),
        (lambda x: x[:, jnp.arange(2)], (B, F), []),
        (lambda x: jnp.concatenate([x, x], 1).sum(0), (B, F), [("reduce_sum", 4 * 2 * F, 1)]),
        (lambda x: jnp.cumsum(x, 1).sum(0), (B, F), [("reduce_sum", 4 * F, 1)]),
        (lambda x: jax.jit(jnp.mean)(x), (B, F), [("reduce_sum", 4, 1)]),
        # In a loop: each trip one sum; a carried axis; a stacked one.
        (lambda x: jax.lax.scan(lambda c, _: (c, x.sum(0)), 0.0, None, length=7), (B, F), [("reduce_sum", 4 * F, 7)]),
        (lambda x: jax.lax.scan(lambda c, _: (c + 1, c), x, None, length=7)[1].sum(1), (B, F),
         [("reduce_sum", 4 * 7 * F, 1)]),
        (lambda x: jax.lax.scan(lambda c, r: (c, r.sum(0)), 0.0, x.T), (B, F), [("reduce_sum", 4, F)]),
        (lambda x: jax.lax.cond(x.shape[0] > 4, lambda: x.sum(0), lambda: x[0]), (B, F), [("reduce_sum", 4 * F, 1)]),
    ],
)  # fmt: skip
def test_one_operation(function, shape, expected):
    assert consumed(function, shape) == expected


def test_the_gradient_of_a_dense_layer_reduces_its_parameters():
    """y = x w + b: the kernel's gradient contracts the batch, the bias's sums over it, the loss is one number."""

    def gradient(x, w, b):
        return jax.value_and_grad(lambda w, b: jnp.mean((x @ w + b[None]) ** 2), argnums=(0, 1))(w, b)

    found = consumed(gradient, (B, F), (F, 5), (5,))
    assert sorted(size for _, size, _ in found) == [4, 4 * 5, 4 * F * 5]


def measured_and_predicted(algorithm, devices):
    engine = fdg.compile(algorithm, policies.GPUOnly(), devices)
    engine.compile(1)
    measured = sum(c.bytes * c.calls for c in engine.programs[0].collectives())
    return measured, sum(m.bytes_per_iteration for m in engine.plan.movements if m.how)


SMALL = {"num_envs": 16, "num_steps": 8, "num_epochs": 2, "num_minibatches": 2}


@pytest.mark.parametrize(
    ("env", "shuffle", "tolerance"),
    [
        # To the byte: gradients, means and variances of advantages, metrics.
        ("CartPole-v1", "time", 0.0),
        # But for the entropy, a mean over copies of one shared number, which XLA takes from the parts.
        ("Pendulum-v1", "time", 1e-3),
        # Minibatches are gathered from all devices, and XLA chooses how their indices get about.
        ("CartPole-v1", "all", 0.05),
    ],
)
def test_predicted_bytes_are_those_of_the_compiled_program(env, shuffle, tolerance, devices):
    algorithm = algos.PPO(
        env=envs.make(env),
        shuffle=shuffle,
        num_envs=16,
        num_steps=8,
        num_epochs=2,
        num_minibatches=2,
        normalize_observation=True,
        normalize_reward=True,
    )
    engine = fdg.compile(algorithm, policies.GPUOnly(), devices)
    engine.compile(1)
    measured = sum(c.bytes * c.calls for c in engine.programs[0].collectives())
    predicted = sum(m.bytes_per_iteration for m in engine.plan.movements if m.how)
    assert measured > 0
    assert abs(measured - predicted) <= tolerance * measured
