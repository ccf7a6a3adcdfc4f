import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.codesign import layers, templates
from envs.codesign.layers import LARGEST_COUNT
from envs.codesign.templates import BufferWords
from fdg.errors import FdgError
from tests.codesign.draw import KNOWN, random_layers
from tests.refusing import refuses


def ceil_div(a, b):
    return -(-a // b)


def plain_cycles(name, layer, rows, columns):
    """The formulas with Python integers."""
    if not layer.has_weights:
        return 0
    groups = layer.groups
    out_group, in_group = layer.out_channels // groups, layer.in_channels // groups
    out_rows, out_columns = layer.out_rows, layer.out_columns
    kernel_rows, kernel_columns = layer.kernel_rows, layer.kernel_columns
    if name == "dla":
        groups_at_once = max(1, min(rows // in_group, columns // out_group))
        packed = min(max(rows // in_group, 1), kernel_rows) if groups == 1 and in_group <= 4 else 1
        passes = ceil_div(groups, groups_at_once) * ceil_div(in_group, rows) * ceil_div(out_group, columns)
        return out_rows * out_columns * ceil_div(kernel_rows, packed) * kernel_columns * passes
    if name == "shi":
        tiles = ceil_div(out_rows, rows) * ceil_div(out_columns, columns)
        return tiles * layer.out_channels * in_group * kernel_rows * kernel_columns
    if name == "rs":
        strip = max(1, min(out_rows, columns))
        sets = max(1, rows // kernel_rows) * max(1, columns // strip)
        passes = ceil_div(out_rows, strip) * ceil_div(layer.out_channels * in_group, sets)
        cycles = passes * out_columns * kernel_columns * ceil_div(kernel_rows, rows)
        return cycles + ceil_div(cycles * 3, 25)  # filling takes 12% more
    window, pixels = kernel_rows * kernel_columns, out_rows * out_columns
    dimensions = {
        "systolic-os": (pixels, out_group, in_group * window, 1),
        "systolic-ws": (in_group * window, out_group, pixels, 2),
        "systolic-is": (in_group * window, pixels, out_group, 2),
    }
    down, across, time, fills = dimensions[name]
    return groups * ceil_div(down, rows) * ceil_div(across, columns) * (fills * rows + columns + time - 2) - 1


@functools.cache
def compiled(name, quantity):
    """The cycles or words of a template, for many layers and sizes."""
    return jax.jit(jax.vmap(getattr(templates.get(name), quantity)))


def random_case(seed):
    """64 layers, and the rows and columns of 64 arrays of PEs."""
    random = np.random.default_rng(seed)
    return random_layers(random, 64), random.integers(1, 65, (2, 64)).astype(np.int32)


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 2**31 - 1))
@pytest.mark.parametrize("name", KNOWN)
def test_cycles_match_plain_python(name, seed):
    found, sizes = random_case(seed)
    large = layers.Layer(2000, 1000, 32, 32)  # 2.0e9 multiplications: too many cycles on few PEs
    found, sizes[:, :2] = [large, large, *found[2:]], [[1, 1], [1, 2]]
    cycles = np.asarray(compiled(name, "cycles")(layers.stack(found), *sizes))
    plain = [plain_cycles(name, *case) for case in zip(found, *sizes.tolist(), strict=True)]
    assert cycles.dtype == np.int32
    assert cycles.tolist() == [min(x, LARGEST_COUNT - ("sys" in name and x >= LARGEST_COUNT)) for x in plain]
    # Utilisation is at most 1; SCALE-Sim counts cycles from 0, so it reports one less.
    macs = np.asarray([layer.macs for layer in found])
    assert np.all(macs <= (cycles.astype(float) + ("sys" in name)) * sizes[0] * sizes[1])
    empty = layers.Layers(*(x[0] for x in layers.stack([None])))
    words = templates.get(name).buffer_words(empty, *map(jnp.int32, (8, 8)))
    assert templates.get(name).cycles(empty, jnp.int32(8), jnp.int32(8)) == 0 and sum(words) == 0


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 2**31 - 1))
@pytest.mark.parametrize("name", KNOWN)
def test_bounds_of_buffer_traffic(name, seed):
    found, sizes = random_case(seed)
    words = BufferWords(*map(np.asarray, compiled(name, "buffer_words")(layers.stack(found), *sizes)))
    macs = np.asarray([layer.macs for layer in found])
    for traffic, tensor in zip(words, ("weight_words", "input_words", "output_words"), strict=True):
        minimum = np.asarray([getattr(layer, tensor) for layer in found])
        assert np.all((traffic >= minimum * (1 - 1e-6)) | (macs == 0))
    assert np.all((words.weights <= macs * (1 + 1e-6)) | (macs == 0))


def scalars(layer):
    return layers.Layers(*(x[0] for x in layers.stack([layer])))


def test_buffer_words_by_hand():
    # 32 kernels of 16 channels and 3 x 3 on 8 x 8 outputs: divisible by the sizes of the arrays.
    layer = layers.convolution(16, 32, 8, kernel=3)
    words = {
        name: [
            x.item()
            for x in templates.get(name).buffer_words(scalars(layer), jnp.int32(rows), jnp.int32(columns))
        ]
        for name, rows, columns in (
            ("dla", 16, 8),
            ("shi", 4, 4),
            ("systolic-os", 8, 8),
            ("systolic-ws", 16, 8),
        )
    }
    macs = layer.macs
    assert words["dla"] == [
        macs / 64,
        macs / 8,
        32 * 64,
    ]  # a weight is used for 64 outputs, an input for 8 kernels
    # A weight is broadcast to 16 PEs; a tile of 4 x 4 reads 6 x 6 for each kernel and channel.
    assert words["shi"] == [macs / 16, 32 * 16 * 4 * 36, 32 * 64]
    assert words["systolic-os"] == [macs / 8, macs / 8, 32 * 64]
    assert words["systolic-ws"] == [macs / 64, macs / 8, 32 * 64 * (2 * 9 - 1)]  # sums of 9 folds of 16 rows


def test_grouped_convolutions_by_hand():
    def cycles(layer):
        return templates.get("dla").cycles(scalars(layer), jnp.int32(64), jnp.int32(32)).item()

    assert cycles(layers.depthwise(64, 8)) == 2 * 9 * 64  # 32 channels at once
    assert cycles(layers.convolution(64, 64, 8, groups=2)) == 2 * 9 * 64  # each group fills the 32 kernels
    assert cycles(layers.convolution(64, 32, 8, groups=2)) == 9 * 64  # both at once, 32 channels, 16 kernels
    assert cycles(layers.convolution(3, 64, 8, kernel=7)) == 2 * 7 * 64  # 21 lanes: all rows of a kernel


def cycles_of_case(case):
    """The cycles of a case of `scalesim.json`."""
    in_rows, in_columns, kernel_rows, kernel_columns, channels, kernels, stride = case["layer"]
    # SCALE-Sim rounds the number of outputs up.
    out_rows = ceil_div(in_rows - kernel_rows + stride, stride)
    out_columns = ceil_div(in_columns - kernel_columns + stride, stride)
    layer = layers.Layer(kernels, channels, out_rows, out_columns, kernel_rows, kernel_columns, stride)
    template = templates.get(f"systolic-{case['dataflow']}")
    return int(template.cycles(scalars(layer), jnp.int32(case["rows"]), jnp.int32(case["columns"])))


def test_systolic_cycles_match_scale_sim():
    cases = json.loads((pathlib.Path(__file__).parent / "scalesim.json").read_text())
    assert len(cases) >= 60
    assert {case["dataflow"] for case in cases} == {"os", "ws", "is"}
    assert len({(case["rows"], case["columns"]) for case in cases}) >= 5
    assert {case["layer"][-1] for case in cases} == {1, 2}
    assert [cycles_of_case(case) for case in cases] == [case["cycles"] for case in cases]


def test_register_template(monkeypatch):
    monkeypatch.setattr(templates, "_registered", {})

    def cycles(layer, rows, columns):
        return layers.ceil_div(layers.macs(layer), rows * columns)

    def words(layer, rows, columns):
        tensors = layers.weight_words, layers.input_words, layers.output_words
        return BufferWords(*(tensor(layer).astype(jnp.float32) for tensor in tensors))

    templates.register("ideal", cycles, words, lambda technology: 2 * technology.pe_mm2)
    layer = layers.convolution(16, 32, 8)
    assert templates.get("ideal").cycles(scalars(layer), jnp.int32(8), jnp.int32(4)) == math.ceil(
        layer.macs / 32
    )
    assert "ideal" in templates.names()
    templates.register("ideal", cycles, words, lambda technology: 0.1)  # a name may be registered again


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"name": "dla"}, "template 'dla' is built in and cannot be replaced; register another name"),
        ({"cycles": lambda layer, rows, columns: 1.5 * rows}, "return one int32 number of cycles"),
        (
            {"cycles": lambda layer, rows, columns: jnp.stack([rows, columns])},
            "return one int32 number of cycles",
        ),
        ({"buffer_words": lambda layer, rows, columns: rows}, "return BufferWords of float32 numbers"),
        ({"pe_mm2": lambda technology: -1.0}, "pe_mm2 returns -1.0; return the area of a PE in mm2"),
    ],
)
def test_invalid_templates_are_refused(monkeypatch, changes, message):
    monkeypatch.setattr(templates, "_registered", {})
    shi = templates.get("shi")
    valid = {"name": "mine", "cycles": shi.cycles, "buffer_words": shi.buffer_words, "pe_mm2": shi.pe_mm2}
    with refuses(message, match="template"):
        templates.register(**{**valid, **changes})


def test_unknown_template():
    with pytest.raises(FdgError, match="unknown template 'systolic-wo': did you mean 'systolic-"):
        templates.get("systolic-wo")
