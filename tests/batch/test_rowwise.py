"""`fdg.rowwise`, for functions with independent rows: each device runs only its rows, to their end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import fdg
from fdg.batch.follow import follow
from fdg.errors import GraphError
from fdg.lowering.constraints import constrain
from fdg.placing.layout import BATCH


def tally(weight, x):
    """Scales rows [B, 3] down until all their sums are below 1, and counts the steps of each row."""

    def step(carry):
        x, count = carry
        large = jnp.sum(x, axis=1) >= 1
        order = jnp.argsort(~large)  # mixes rows, and restores their order
        halved = jnp.where(large[order][:, None], x[order] * weight, x[order])
        return halved[jnp.argsort(order)], count + large

    return jax.lax.while_loop(
        lambda c: jnp.any(jnp.sum(c[0], axis=1) >= 1), step, (x, jnp.zeros(len(x), int))
    )


X = jnp.asarray(np.random.default_rng(0).uniform(0, 40, (16, 3)), jnp.float32)


def marked(weight, x):
    return fdg.rowwise(tally, in_axes=(None, 0))(weight, x)


def split(function, arguments, axes, devices):
    """Results of `function` on eight devices, and its HLO text."""
    traced = jax.make_jaxpr(function)(*arguments)
    mesh = Mesh(np.array(devices), (BATCH,))
    lowered = jax.jit(jax.extend.core.jaxpr_as_fun(constrain(traced, mesh, axes)))
    return lowered(*arguments), lowered.lower(*arguments).compile().as_text()


def test_devices_do_not_communicate(devices):
    expected = tally(0.5, X)
    found, text = split(marked, (jnp.float32(0.5), X), (None, 0), devices)
    for reference, result in zip(expected, found, strict=True):
        np.testing.assert_array_equal(reference, result)
    assert not any(word in text for word in ("all-gather", "all-reduce", "collective-permute"))


def test_axes_may_count_from_the_end(devices):
    last = fdg.rowwise(lambda x: (jnp.sum(x, 0), x.T), in_axes=-1, out_axes=(-1, -2))
    found, text = split(last, (X.T,), (1,), devices)
    np.testing.assert_array_equal(found[0], jnp.sum(X.T, 0))
    np.testing.assert_array_equal(found[1], X)
    assert "all-gather" not in text


def test_vmap_is_split_by_agents_or_by_rows(devices):
    weights = jnp.array([0.5, 0.25, 0.7, 0.9, 0.5, 0.5, 0.6, 0.1])
    many = jax.vmap(marked, in_axes=(0, None))
    expected = [tally(weight, X) for weight in weights[:3]]
    for axes in ((0, None), (None, 0)):
        found, text = split(many, (weights, X), axes, devices)
        for i, reference in enumerate(expected):
            np.testing.assert_allclose(found[0][i], reference[0])
            np.testing.assert_array_equal(found[1][i], reference[1])
        assert not any(word in text for word in ("all-gather", "all-reduce", "collective-permute"))


def test_literal_is_an_operand_under_vmap():
    jaxpr = jax.make_jaxpr(lambda x: marked(0.5, x))(X)
    assert any(isinstance(x, jax.extend.core.Literal) for eqn in jaxpr.eqns for x in eqn.invars)
    found = jax.vmap(jax.extend.core.jaxpr_as_fun(jaxpr))(X[None])
    np.testing.assert_array_equal(found[1][0], tally(0.5, X)[1])


def test_other_splits_are_gathered():
    jaxpr = jax.make_jaxpr(marked)(jnp.float32(0.5), X[:12])
    (step,) = follow(jaxpr, (None, 1), 3).equations
    assert (step.gathered, step.results, step.local) == ((1,), (None, None), False)


def test_forward_mode_derivatives():
    slope = jax.jvp(lambda w: marked(w, X)[0].sum(), (0.5,), (1.0,))[1]
    other = jax.jvp(lambda w: tally(w, X)[0].sum(), (0.5,), (1.0,))[1]
    np.testing.assert_allclose(slope, other)


def test_errors():
    with pytest.raises(GraphError, match=r"'tally': in_axes=\(None, 0, 0\) is not a pytree prefix"):
        fdg.rowwise(tally, in_axes=(None, 0, 0))(0.5, X)
    with pytest.raises(GraphError, match=r"prefix of its arguments \(float32.*\): give"):
        fdg.rowwise(tally, in_axes=(None, 0, 0))(0.5, X)
    with pytest.raises(GraphError, match=r"prefix of its results \(.*\): give"):
        fdg.rowwise(tally, in_axes=(None, 0), out_axes=(0, 0, 0))(0.5, X)

    for in_axes, out_axes, said in (
        ((None, 2), 0, r"in\[1\] has batch axis 2 but shape \(16, 3\)"),
        ((None, 0), 1, r"out\[1\] has batch axis 1 but shape \(16,\)"),
        ((None, 0), (0, None), r"out_axes=\(0, None\): each result has a row axis"),
        ((None, 0.0), 0, r"in\[1\] has axis 0.0: use an integer"),
    ):
        with pytest.raises(GraphError, match=f"rowwise 'tally': {said}"):
            fdg.rowwise(tally, in_axes=in_axes, out_axes=out_axes)(0.5, X)

    def speaks(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(GraphError, match="'speaks' has an effect"):
        fdg.rowwise(speaks)(X)
