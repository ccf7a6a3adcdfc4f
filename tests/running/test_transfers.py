"""Transfers between groups of any sizes: values, bytes, and dispatch without waiting."""

import math
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

from fdg.lowering.mesh import layout_sharding, make_mesh
from fdg.placing.layout import Layout, find_route, moved_bytes
from fdg.running.exchange import Exchange, broadcast_rounds
from fdg.running.program import Program
from fdg.running.transfers import Mover

DTYPES = ("float32", "bfloat16", "int32", "uint8", "bool", "key")


def values(shape, dtype, start=0):
    """Different numbers in all elements, as far as the dtype allows."""
    numbers = np.arange(start, start + math.prod(shape)).reshape(shape)
    if dtype == "key":
        data = np.stack([numbers, numbers + 7], axis=-1).astype(np.uint32)
        return jax.random.wrap_key_data(jnp.asarray(data))
    return jnp.asarray(numbers % 3 == 0) if dtype == "bool" else jnp.asarray(numbers % 251).astype(dtype)


def words(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def make_mover(source, target, arrays, axes):
    """A compiled mover, and the arrays on its source."""
    source, target = make_mesh(source), make_mesh(target)
    layouts = [
        (Layout.of_batch(x.shape, axis, source.size), Layout.of_batch(x.shape, axis, target.size))
        for x, axis in zip(arrays, axes, strict=True)
    ]
    mover = Mover(source, target, layouts)
    return compiled(mover, arrays)[::2]


def compiled(mover, arrays):
    """A transfer with its programs compiled, the arrays, and the arrays on its source."""
    placed = [
        jax.device_put(x, layout_sharding(mover.source, a))
        for x, (a, _) in zip(arrays, mover.layouts, strict=True)
    ]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in placed]
    for name, mesh, function, argument in mover.functions(shapes):
        mover.programs[name] = Program(name, (), tuple(mesh.devices.flat), 1, function, (argument,))
        mover.programs[name].compile()
    return mover, arrays, placed


def check(mover, arrays, placed):
    moved = mover(placed)
    size = 0
    for x, y, (_, b) in zip(arrays, moved, mover.layouts, strict=True):
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert y.sharding.is_equivalent_to(layout_sharding(mover.target, b), y.ndim)
        np.testing.assert_array_equal(words(y), words(x))
        itemsize = x.dtype.itemsize
        held = sum(shard.data.size * itemsize for shard in y.addressable_shards)
        assert held == moved_bytes(x.size * itemsize, b)
        size += held
    assert mover.bytes == size
    return moved


@pytest.mark.parametrize("m", range(1, 9))
def test_any_numbers_of_devices(m, devices):
    """Up to eight, separate devices if there are enough, else shared ones; all numbers divide 840."""
    array = values((2, 840), "int32")
    for n in range(1, 9):
        mover, placed = make_mover(devices[:m], devices[8 - n :], [array], [1])
        check(mover, [array], placed)
        # As few programs as possible: none if each part of one side consists of complete parts of the other.
        # One device may also fetch uncommitted arrays from another one.
        assert set(mover.programs) == {
            *(["fetch"] if m == n == 1 else []),
            *(["cut"] if math.lcm(m, n) > m else []),
            *(["join"] if math.lcm(m, n) > n else []),
        }


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_device_fetches_uncommitted_arrays(dtype, devices):
    """Values, bytes and placement are those of a copy, and the originals stay alive."""
    arrays = [values((6, 2), dtype), values((), dtype, 5)]
    meshes = [make_mesh(devices[i : i + 1]) for i in (0, 3)]
    layouts = [Layout.of_batch(x.shape, None, 1) for x in arrays]
    mover = Mover(*meshes, [(layout, layout) for layout in layouts])
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    ((name, _, function, argument),) = mover.functions(shapes)
    program = Program(name, (), tuple(devices[3:4]), 1, function, (argument,), roams=True)
    program.compile()
    mover.programs[name] = program
    with jax.default_device(devices[0]):
        uncommitted = jax.jit(lambda: [values(x.shape, dtype, 5 * i) for i, x in enumerate(arrays)])()
    assert not any(x.committed for x in uncommitted)
    for _ in range(2):
        moved = check(mover, arrays, uncommitted)
        assert not any(x.committed for x in moved) and not any(x.is_deleted() for x in uncommitted)


def test_original_may_be_donated_on_a_shared_device(devices):
    """For a batch that is split, and for one that is not divisible."""
    for target in (devices[:2], devices[1:3], [devices[1], devices[0]], devices[:1]):
        arrays = [jnp.arange(24.0), jnp.arange(7.0)]  # the second may be one of the placed arrays
        mover, placed = make_mover(devices[:2], target, arrays, [0, 0])
        moved = check(mover, arrays, placed)
        used = jax.jit(lambda x: jax.tree.map(lambda x: x * 0 - 1, x), donate_argnums=0)(placed)
        jax.block_until_ready(used)
        for before, after in zip(placed, moved, strict=True):
            assert before.is_deleted()
            np.testing.assert_array_equal(after, np.arange(float(len(after))))


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 2), (2, 1), (2, 3)])
def test_transfer_does_not_wait_for_its_input(m, n, devices):
    """Dispatch takes a small part of the time until the input is ready."""
    mover, (x,) = make_mover(devices[:m], devices[4 : 4 + n], [jnp.eye(96) * 0.1], [0])
    work = jax.jit(
        lambda x, rounds: jax.lax.fori_loop(0, rounds, lambda _, x: jnp.sin(x @ x), x),
        out_shardings=x.sharding,
    )
    jax.block_until_ready(mover([work(x, 1)]))
    rounds, taken = 500, 0.0
    while taken < 0.2:  # long enough to measure on any machine
        rounds *= 2
        start = time.perf_counter()
        result = work(x, rounds)
        started = time.perf_counter()
        moved = mover([result])
        dispatched = time.perf_counter()
        jax.block_until_ready(moved)
        taken = time.perf_counter() - start
    assert dispatched - started < 0.3 * taken


def test_layouts():
    assert Layout.of_batch((6, 4), 0, 3).parts == (3, 1)
    assert Layout.of_batch((6, 4), 1, 3).parts == (1, 1)  # not divisible: replicated
    assert Layout.of_batch((6, 4), None, 3).parts == (1, 1)
    assert moved_bytes(96, Layout.of_batch((6, 4), 0, 3)) == 96
    assert moved_bytes(96, Layout.of_batch((6, 4), None, 3)) == 288


# --- layouts of several axes, by both kinds of transfers ---

MESHES = [((n, m) if m > 1 else (n,)) for n in (1, 2, 3, 4) for m in (1, 2, 4) if n * m <= 6]


def make_layout_mesh(devices, sizes):
    names = ("batch", "model")[: len(sizes)]
    return Mesh(
        np.array(devices, dtype=object).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(sizes)
    )


@st.composite
def layouts(draw, mesh_sizes, rank):
    """The mesh axes that split each dimension; each axis at most once, possibly none (replicated)."""
    names = ("batch", "model")[: len(mesh_sizes)]
    spec = [[] for _ in range(rank)]
    for name in draw(st.permutations(names)):
        where = draw(st.integers(-1, rank - 1))
        if where >= 0:
            spec[where].append(name)
    return tuple(map(tuple, spec)), tuple(zip(names, mesh_sizes, strict=True))


@st.composite
def crossings(draw):
    source, target = draw(st.sampled_from(MESHES)), draw(st.sampled_from(MESHES))
    first = draw(st.integers(0, 8 - math.prod(target)))
    arrays = []
    for _ in range(draw(st.integers(1, 2))):
        rank = draw(st.integers(0, 3))
        ends = [draw(layouts(sizes, rank)) for sizes in (source, target)]
        shape = [draw(st.integers(1, 2)) for _ in range(rank)]
        for dimension in range(rank):  # a size that is divisible on both meshes
            for spec, mesh in ends:
                parts = Layout((1,) * rank, spec, mesh).parts[dimension]
                shape[dimension] = math.lcm(shape[dimension], parts)
        arrays.append((tuple(shape), *ends, draw(st.sampled_from(DTYPES))))
    return source, target, first, arrays


@pytest.mark.parametrize("way", [Mover, Exchange])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(case=crossings())
def test_from_any_layout_to_any_other(way, case):
    """Every device of the target has its part of the array, and got each byte of it once."""
    source_sizes, target_sizes, first, specs = case
    devices = jax.devices("cpu")[:8]
    source = make_layout_mesh(devices[: math.prod(source_sizes)], source_sizes)
    target = make_layout_mesh(devices[first : first + math.prod(target_sizes)], target_sizes)
    arrays = [values(shape, dtype, 13 * i) for i, (shape, _, _, dtype) in enumerate(specs)]
    ends = [tuple(Layout(shape, *end) for end in both) for shape, *both, _ in specs]
    transfer = way(source, target, ends)
    *_, placed = compiled(transfer, arrays)
    size = 0
    for x, y, (_, b) in zip(arrays, transfer(placed), ends, strict=True):
        assert y.sharding.is_equivalent_to(layout_sharding(target, b), y.ndim)
        for device, part in zip(target.devices.flat, b.part_of_device, strict=True):
            (shard,) = [s.data for s in y.addressable_shards if s.device == device]
            lengths = [n // k for n, k in zip(x.shape, b.parts, strict=True)]
            index = tuple(slice(p * n, (p + 1) * n) for p, n in zip(part, lengths, strict=True))
            np.testing.assert_array_equal(words(shard), words(x)[index])
            size += shard.size * x.dtype.itemsize
    assert (
        transfer.bytes
        == size
        == sum(moved_bytes(x.size * x.dtype.itemsize, b) for x, (_, b) in zip(arrays, ends, strict=True))
    )


def test_route_by_hand():
    """[4, 6] from 2 x 3 parts (one a device) to 2 parts of columns (replicated on 2 rows)."""
    mesh = (("batch", 2), ("model", 3))
    source = Layout((4, 6), (("batch",), ("model",)), mesh)
    target = Layout((4, 6), ((), ("model",)), (("batch", 2), ("model", 2)))
    assert source.part_of_device == ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
    assert target.part_of_device == ((0, 0), (0, 1), (0, 0), (0, 1))
    route = find_route(source, target)
    assert (route.cuts, route.joins) == ((1, 2), (2, 3))  # 2 x 6 chunks in all
    left, right = (
        [(0, 0), (0, 1), (1, 0), (3, 0), (3, 1), (4, 0)],
        [(1, 1), (2, 0), (2, 1), (4, 1), (5, 0), (5, 1)],
    )
    assert route.chunks == tuple(zip(left, right, left, right, strict=True))


def test_replicas_at_the_source_take_turns():
    source = Layout((2,), (), (("batch", 3),))
    target = Layout((2,), (("batch",),), (("batch", 2),))
    assert find_route(source, target).chunks == (((0, 0), (1, 1)),)


def permutations(arrays, source, target, axes):
    """The number of collectives in the compiled program of an exchange."""
    source, target = make_mesh(source), make_mesh(target)
    ends = [
        (Layout.of_batch(x.shape, axis, source.size), Layout.of_batch(x.shape, axis, target.size))
        for x, axis in zip(arrays, axes, strict=True)
    ]
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout_sharding(source, a))
        for x, (a, _) in zip(arrays, ends, strict=True)
    ]
    functions = {name: rest for name, *rest in Exchange(source, target, ends).functions(shapes)}
    _, function, argument = functions["exchange"]
    text = function.lower(argument).compile().as_text()
    return len(re.findall(r"= .* collective-permute(?:-start)?\(", text))


def test_arrays_of_one_width_share_a_collective(devices):
    """Twelve arrays of six dtypes from two devices to two others: one collective for each width."""
    arrays = [values((4, 3 + i), dtype) for i, dtype in enumerate(2 * DTYPES)]
    assert permutations(arrays, devices[:2], devices[2:4], [0] * 12) == 3  # of 32, 16 and 8 bits


def test_broadcasts_form_a_tree(devices):
    """Receivers pass copies on: to 1, 3 and 7 devices in 1, 2 and 3 rounds."""
    found = [permutations([values((3,), "int32")], devices[:1], devices[1:n], [None]) for n in (2, 4, 8)]
    assert found == [1, 2, 3]
    mover = Exchange(
        make_mesh(devices[:1]),
        make_mesh(devices[1:]),
        [(Layout((5,), (), (("batch", 1),)), Layout((5,), (), (("batch", 7),)))],
    )
    check(*compiled(mover, [values((5,), "int32")]))


def test_device_that_sends_its_own_chunks_forwards_none():
    """Source 1 also receives. By hand: in the second round 0 and 2 send, 1 does not."""
    assert broadcast_rounds([(0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 0, 4)], frozenset([0, 1])) == [
        (0, 0, ((0, 1),)),
        (1, 0, ((0, 2),)),
        (2, 0, ((0, 3), (2, 4))),
    ]
