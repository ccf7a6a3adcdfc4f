"""Spaces: samples, `contains`, equality and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import Box, Dict, Discrete, MultiDiscrete
from fdg.errors import FdgError

FEW = settings(max_examples=25, deadline=None)  # each new shape compiles
INF = float("inf")
MAX = float(np.finfo(np.float32).max)

seeds = st.integers(0, 2**31 - 1)
# A lower bound may be -inf and an upper bound inf, also after sorting.
low_bound = st.floats(width=32, allow_nan=False, max_value=MAX)
high_bound = st.floats(width=32, allow_nan=False, min_value=-MAX)
# Few shapes, so that few programs compile.
shapes = st.sampled_from([(), (2,), (2, 3)])


@st.composite
def boxes(draw):
    shape = draw(shapes)
    pairs = [sorted((draw(low_bound), draw(high_bound))) for _ in range(int(np.prod(shape)))]
    low, high = (np.asarray(side, float).reshape(shape) for side in zip(*pairs, strict=True))
    return Box(nested_tuple(low.tolist()), nested_tuple(high.tolist()), shape)


def nested_tuple(values):
    return tuple(map(nested_tuple, values)) if isinstance(values, list) else values


spaces = st.one_of(
    st.integers(1, 1000).map(Discrete),
    st.lists(st.integers(1, 50), min_size=2, max_size=2).map(lambda nvec: MultiDiscrete(tuple(nvec))),
    boxes(),
    st.builds(
        lambda low, size: Box(low, min(low + size, 255), (3,), "uint8"),
        st.integers(0, 255),
        st.integers(0, 255),
    ),
)


@FEW
@given(spaces, seeds)
def test_samples_are_contained(space, seed):
    sample = space.sample(jax.random.key(seed))
    assert sample.shape == space.shape
    assert sample.dtype == space.dtype
    assert np.isfinite(np.asarray(sample, float)).all()  # also with infinite bounds
    assert bool(space.contains(sample))


@FEW
@given(spaces)
def test_spaces_are_values(space):
    copy = eval(repr(space), {"Box": Box, "Discrete": Discrete, "MultiDiscrete": MultiDiscrete, "inf": INF})
    assert copy == space and hash(copy) == hash(space)


@FEW
@given(spaces)
def test_contains_rejects_other_values(space):
    outside = jnp.zeros((*space.shape, 1), space.dtype)
    assert not bool(space.contains(outside))
    if isinstance(space, Box):
        high = space.high_array.astype(float)
        if np.isfinite(high).all():
            above = high + np.maximum(1, 0.01 * np.abs(high))
            if (above < MAX).all():
                assert not bool(space.contains(above.astype("float32")))
    else:
        assert not bool(space.contains(jnp.full(space.shape, -1)))
        assert not bool(space.contains(jnp.full(space.shape, 10_000)))
        assert not bool(space.contains(jnp.zeros(space.shape, jnp.float32)))


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [(3e9, 4e9, "int64"), (3e9, 4e9, "uint32"), (-(2**31), 2**31 - 1, "int32"), (-5, 2**31 - 1, "int32")],
)
def test_samples_of_wide_integers_lie_between_the_bounds(low, high, dtype):
    with jax.enable_x64(True):
        samples = np.asarray(Box(low, high, (99,), dtype).sample(jax.random.key(0)))
    assert samples.dtype == dtype and ((samples >= low) & (samples <= high)).all()
    assert np.ptp(samples.astype(float)) > 0.8 * (high - low)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(-INF, INF, (-INF, INF)), (2.0, INF, (2.0, INF)), (-INF, -2.0, (-INF, -2.0)), (-MAX, MAX, (-MAX, MAX))],
)
def test_unbounded_samples_are_finite(low, high, expected):
    samples = np.asarray(Box(low, high, (1000,)).sample(jax.random.key(0)))
    assert np.isfinite(samples).all() and (samples >= expected[0]).all() and (samples <= expected[1]).all()
    assert np.ptp(samples / 2) > 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_samples_of_floats_lie_between_the_bounds(dtype):
    samples = np.asarray(Box(-1.0, 1.0, (1000,), dtype).sample(jax.random.key(0)), float)
    assert np.abs(np.mean(samples)) < 0.1 and np.unique(samples).size > 50


def test_integer_box_includes_both_bounds():
    samples = np.asarray(Box(254, 255, (200,), "uint8").sample(jax.random.key(0)))
    assert set(samples.tolist()) == {254, 255}


def test_multi_discrete_ranges():
    space = MultiDiscrete((2, 5))
    samples = np.asarray(jax.vmap(space.sample)(jax.random.split(jax.random.key(0), 200)))
    assert samples.max(axis=0).tolist() == [1, 4] and samples.min() == 0


def test_spaces_work_under_jit():
    space = Box((0.0, -1.0), (1.0, 1.0), (2,))
    contained = jax.jit(lambda key: space.contains(space.sample(key)))(jax.random.key(0))
    assert bool(contained)


def test_dtype_spellings_are_equal():
    assert Box(0.0, 1.0, (2,), jnp.float32) == Box(0, 1, (2,), "float32")
    assert hash(Box(0.0, 1.0, (2,), np.dtype("float32"))) == hash(Box(0, 1, (2,)))


def test_numpy_numbers_and_arrays_become_python_values():
    largest, low = np.finfo(np.float32).max, np.array([[-1, 0.5]], np.float32)
    assert Box(-largest, largest, (2,)) == Box(-float(largest), float(largest), (2,))
    assert Box(low, jnp.ones((1, 2)), (np.int64(1), 2)) == Box(((-1.0, 0.5),), [[1.0, 1.0]], (1, 2))
    assert (
        repr(Box(low, np.int64(1), low.shape))
        == "Box(low=((-1.0, 0.5),), high=1, shape=(1, 2), dtype='float32')"
    )
    assert repr(Discrete(np.int64(3))) == "Discrete(n=3)"
    assert repr(MultiDiscrete(tuple(np.array([3, 2])))) == "MultiDiscrete(nvec=(3, 2))"


def test_spaces_take_the_arguments_of_gymnasium():
    low, high = np.array([-1.0, 0.5], np.float32), np.array([1.0, 2.0])
    assert Box(low, high) == Box(low, high, (2,)) and Box(low=0, high=high) == Box(0, high, (2,))
    assert hash(Box(-1, 1, [2])) == hash(Box(-1, 1, np.array([2]))) == hash(Box(-1, 1, (2,)))
    assert hash(MultiDiscrete([3, 2])) == hash(MultiDiscrete(np.array([3, 2]))) == hash(MultiDiscrete((3, 2)))


@pytest.mark.parametrize(
    "space", [Discrete(3), MultiDiscrete((2, 3)), Box(0.0, 1.0, (2,)), Dict({"a": Discrete(3)})], ids=str
)
def test_samples_take_every_kind_of_key(space):
    drawn, legacy = space.sample(jax.random.key(4)), space.sample(jax.random.PRNGKey(4))
    jax.tree.map(np.testing.assert_array_equal, drawn, legacy)
    with pytest.raises(FdgError, match=r"sample: 0 is not a random key: give jax.random.key\(0\)"):
        space.sample(0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Discrete(0), "n must be an integer of at least 1"),
        (lambda: Discrete(2.0), "n must be an integer"),
        (lambda: MultiDiscrete([[2, 3]]), "nvec must be a tuple"),
        (lambda: MultiDiscrete((2, 0)), "at least 1"),
        (lambda: Box(np.array("a"), 1.0, ()), "a bound must be a number, or an array"),
        (lambda: Box(0.0, float("nan"), (2,)), "a bound must be a number"),
        (lambda: Box((0.0, 0.0, 0.0), 1.0, (2,)), r"has shape \(3,\), but the space has \(2,\)"),
        (lambda: Box(1.0, 0.0, (2,)), "low must not exceed high"),
        (lambda: Box(INF, INF, ()), "no number is between"),
        (lambda: Box((0.0, -INF), (1.0, -INF), (2,)), "no number is between"),
        (lambda: Box(0.0, 1.0, [2.0]), "shape must be a tuple of integers"),
        (lambda: Box(0.0, 1.0, (2,), "flaot32"), "Box\\(dtype='flaot32'\\): give a dtype"),
        (lambda: Box(0.0, 1.0), "shape is missing"),
        (lambda: Box([[0.0, 0.0], [0.0]], 1.0, (2, 2)), "a bound must be a number, or an array"),
    ],
)
def test_invalid_spaces_are_refused(build, message):
    with pytest.raises(FdgError, match=message):
        build()
