"""Dataflow templates: how an array of processing elements (PEs) computes a layer.

A template consists of functions of one layer (`Layers` of scalars) and of the array's rows and columns, int32
scalars: compute cycles, words of each tensor between buffer and PEs, and the area of a PE. Tests check that
the words of a tensor times their reuse equal the layer's multiplications.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from envs.codesign import layers as ops
from envs.codesign.layers import Layers, ceil_div, group_channels, product
from envs.codesign.technology import Technology
from fdg.errors import FdgError, structure_of, unknown_name


class BufferWords(NamedTuple):
    """Words that an array reads from, or writes to, its buffer for one layer, by tensor; float32 scalars."""

    weights: jax.Array
    inputs: jax.Array
    outputs: jax.Array  # with each read and each write of partial sums


# Types of the fields of `Template`.
Cycles = Callable[[Layers, jax.Array, jax.Array], jax.Array]
Words = Callable[[Layers, jax.Array, jax.Array], BufferWords]


def square(pes: int) -> tuple[int, int]:
    """The most nearly square array of `pes`, with rows <= columns.

    >>> square(168), square(2112), square(7)
    ((12, 14), (44, 48), (1, 7))
    """
    rows = next(rows for rows in range(int(pes**0.5), 0, -1) if pes % rows == 0)
    return rows, pes // rows


def fill_and_drain(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Cycles to fill the array up to its far corner, and to drain the last result."""
    return rows + columns


class Template(NamedTuple):
    """A dataflow."""

    cycles: Cycles  # (layer, rows, columns) -> int32, without `fill_cycles`
    buffer_words: Words  # (layer, rows, columns) -> `BufferWords`
    pe_mm2: Callable[[Technology], float]  # technology -> area of a PE with its registers
    shape: Callable[[int], tuple[int, int]] = square  # number of PEs -> rows, columns
    # (rows, columns) -> int32, added once per layer
    fill_cycles: Callable[[jax.Array, jax.Array], jax.Array] = fill_and_drain


def _to_floats(*counts: jax.Array) -> list[jax.Array]:
    return [jnp.asarray(count, jnp.float32) for count in counts]


def _at_least_1(count: jax.Array) -> jax.Array:
    return jnp.maximum(count, 1)


# --- Weight-stationary: NVDLA (nvdla.org, "Hardware architectural specification", convolution core) ---

_IMAGE_CHANNELS = 4  # with at most this many channels, kernel rows are packed too ("image mode")


def _dla_shape(pes: int) -> tuple[int, int]:
    """Rows and columns of NVDLA's array: lanes of input channels, at most 64, and kernels.

    >>> _dla_shape(2048), _dla_shape(32)
    ((64, 32), (32, 1))
    """
    lanes = min(64, pes)
    return lanes, pes // lanes


def _dla_cycles(layer: Layers, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Each cycle multiplies `rows` input channels with `columns` kernels at one position of the window.

    Small groups share a cycle; with few channels (images), kernel rows fill the remaining lanes.
    """
    out_group, in_group = group_channels(layer)
    groups_at_once = _at_least_1(
        jnp.minimum(rows // _at_least_1(in_group), columns // _at_least_1(out_group))
    )
    is_image = (layer.groups == 1) & (in_group <= _IMAGE_CHANNELS)
    kernel_rows_at_once = jnp.where(
        is_image, jnp.clip(rows // _at_least_1(in_group), 1, layer.kernel_rows), 1
    )
    window = (ceil_div(layer.kernel_rows, kernel_rows_at_once), layer.kernel_columns, layer.has_weights)
    passes = (ceil_div(layer.groups, groups_at_once), ceil_div(in_group, rows), ceil_div(out_group, columns))
    return product(layer.out_rows, layer.out_columns, *window, *passes)


def _dla_words(layer: Layers, rows: jax.Array, columns: jax.Array) -> BufferWords:
    """Weights stay while all outputs pass; an input word reaches all kernels; sums stay in accumulators."""
    macs, kernels_at_once = _to_floats(ops.macs(layer), jnp.minimum(group_channels(layer)[0], columns))
    weights, outputs = _to_floats(ops.weight_words(layer), ops.output_words(layer))
    return BufferWords(weights, macs / _at_least_1(kernels_at_once), outputs)


# --- Output-stationary: ShiDianNao (Du et al., ISCA 2015, section 5) ---


def _shi_cycles(layer: Layers, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Each PE holds one output of a rows x columns tile, and gets one weight and one input per cycle."""
    tiles = ceil_div(layer.out_rows, rows), ceil_div(layer.out_columns, columns)
    window = group_channels(layer)[1], layer.kernel_rows, layer.kernel_columns, layer.has_weights
    return product(*tiles, layer.out_channels, *window)


def _shi_words(layer: Layers, rows: jax.Array, columns: jax.Array) -> BufferWords:
    """A weight is broadcast to a tile; a tile's inputs are read once and shift between neighbours."""
    down, across = ceil_div(layer.out_rows, rows), ceil_div(layer.out_columns, columns)
    in_group = group_channels(layer)[1]
    read_rows = ops.with_halo(layer.out_rows, down, layer.stride, layer.kernel_rows)
    read_columns = ops.with_halo(layer.out_columns, across, layer.stride, layer.kernel_columns)
    weights, tiles, kernels, patch_rows, patch_columns = _to_floats(
        ops.weight_words(layer), down * across, product(layer.out_channels, in_group), read_rows, read_columns
    )
    (outputs,) = _to_floats(ops.output_words(layer))
    return BufferWords(weights * tiles, kernels * patch_rows * patch_columns, outputs)


# --- Row-stationary: Eyeriss (Chen et al., JSSC 2017, sections III and V) ---

# The ratio of all cycles, loading of scratch pads included, to compute cycles; fitted to Table V.
FILL = (28, 25)
_FILTERS, _WINDOW_WORDS = 16, 12  # capacity of a PE's scratch pads: filters, words of input rows


def row_stationary_cycles(
    layer: Layers, rows: jax.Array, columns: jax.Array, fill: tuple[int, int] = FILL
) -> jax.Array:
    """Cycles of a layer, int32. A PE convolves a row of the kernel with a row of the input.

    A column of R PEs, one per kernel row, computes a row of outputs; a set of R x P PEs computes P rows. On a
    larger array, further sets compute further kernels and channels; on a smaller one, strips of rows run
    in sequence. `fill` is a ratio (numerator, denominator), applied last and rounded up; with (1, 1) only
    compute cycles count.
    """
    strip = _at_least_1(jnp.minimum(layer.out_rows, columns))
    sets = _row_stationary_sets(layer, rows, columns)
    kernels = product(layer.out_channels, group_channels(layer)[1], layer.has_weights)
    folds = ceil_div(layer.kernel_rows, rows)
    passes = ceil_div(layer.out_rows, strip), ceil_div(kernels, sets)
    cycles = product(*passes, layer.out_columns, layer.kernel_columns, folds)
    extra, unit = fill[0] - fill[1], fill[1]
    return ops.add(cycles, cycles // unit * extra + ceil_div(cycles % unit * extra, unit))


def _row_stationary_sets(layer: Layers, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """The number of sets of R x P PEs that an array holds at once; P rows of outputs at most."""
    strip = _at_least_1(jnp.minimum(layer.out_rows, columns))
    return _at_least_1(rows // _at_least_1(layer.kernel_rows)) * _at_least_1(columns // strip)


def _rs_words(layer: Layers, rows: jax.Array, columns: jax.Array) -> BufferWords:
    """A strip reads all weights, and its inputs once for all kernels in its sets; sums leave the PEs."""
    strips = ceil_div(layer.out_rows, jnp.minimum(layer.out_rows, columns))
    out_group, in_group = group_channels(layer)
    kernels_at_once = jnp.minimum(out_group, _FILTERS * _row_stationary_sets(layer, rows, columns))
    channels_in_pad = _at_least_1(_WINDOW_WORDS // _at_least_1(layer.kernel_columns))
    sums = 2 * ceil_div(in_group, channels_in_pad) - 1
    read_rows = ops.with_halo(layer.out_rows, strips, layer.stride, layer.kernel_rows)
    read_columns = ops.input_window(layer)[1]
    channels = product(layer.in_channels, ceil_div(out_group, kernels_at_once))
    weights, strips_f, inputs, patch_rows, patch_columns = _to_floats(
        ops.weight_words(layer), strips, channels, read_rows, read_columns
    )
    outputs, sums_f = _to_floats(ops.output_words(layer), sums)
    return BufferWords(weights * strips_f, inputs * patch_rows * patch_columns, outputs * sums_f)


# --- Systolic arrays: SCALE-Sim 3.0.0 (Raj et al., ISPASS 2025; arXiv 1811.02883, equations 1 to 4) ---


def _systolic(stationary: str) -> Template:
    """A layer as the matrix product [pixels, window] x [window, kernels], one group after another.

    Pixels are positions of the output; a window has the input words of one output. `stationary` is the matrix
    that stays in the PEs: "os" for outputs, "ws" for weights, "is" for inputs.
    """

    def sizes(layer: Layers) -> tuple[jax.Array, jax.Array, jax.Array]:
        out_group, in_group = group_channels(layer)
        pixels = product(layer.out_rows, layer.out_columns)
        window = product(in_group, layer.kernel_rows, layer.kernel_columns, layer.has_weights)
        down, across, time = {
            "os": (pixels, out_group, window),
            "ws": (window, out_group, pixels),
            "is": (window, pixels, out_group),
        }[stationary]
        return down, across, time

    def cycles(layer: Layers, rows: jax.Array, columns: jax.Array) -> jax.Array:
        down, across, time = sizes(layer)
        fold_cycles = (1 if stationary == "os" else 2) * rows + columns + time - 2
        folds = product(layer.groups, ceil_div(down, rows), ceil_div(across, columns), layer.has_weights)
        return jnp.maximum(product(fold_cycles, folds) - 1, 0)

    def words(layer: Layers, rows: jax.Array, columns: jax.Array) -> BufferWords:
        down, across, time = sizes(layer)
        left, top, result = _to_floats(
            product(layer.groups, down, time),
            product(layer.groups, across, time),
            product(layer.groups, down, across),
        )
        folds_down, folds_across = _to_floats(ceil_div(down, rows), ceil_div(across, columns))
        if stationary == "os":  # inputs from the left for each fold of kernels, weights from the top
            return BufferWords(top * folds_down, left * folds_across, result)
        stream, sums = left * folds_across, top * jnp.maximum(2 * folds_down - 1, 0)
        return BufferWords(result, stream, sums) if stationary == "ws" else BufferWords(stream, result, sums)

    return Template(
        cycles, words, lambda technology: technology.pe_mm2, fill_cycles=lambda rows, columns: 0 * rows
    )


_BUILT_IN = {
    "dla": Template(_dla_cycles, _dla_words, lambda technology: technology.pe_mm2, _dla_shape),
    # Assumptions, not measurements: FIFOs between neighbours add a fifth of a PE's area, half a kilobyte of
    # scratch pads adds half.
    "shi": Template(_shi_cycles, _shi_words, lambda technology: 1.2 * technology.pe_mm2),
    "rs": Template(row_stationary_cycles, _rs_words, lambda technology: 1.5 * technology.pe_mm2),
    **{f"systolic-{stationary}": _systolic(stationary) for stationary in ("os", "ws", "is")},
}
_registered: dict[str, Template] = {}  # by `register`


def register(
    name: str,
    cycles: Cycles,
    buffer_words: Words,
    pe_mm2: Callable[[Technology], float],
    *,
    shape: Callable[[int], tuple[int, int]] = square,
    fill_cycles: Callable[[jax.Array, jax.Array], jax.Array] = fill_and_drain,
) -> None:
    """Registers your own template, for `get(name)` and everything that names templates.

    Registering a name again replaces its template, so that a notebook cell can run twice.

    Args:
      name: must not be a built-in template's.
      cycles, buffer_words, pe_mm2: fields of `Template`.
      shape: field of `Template`; default: nearly square.
      fill_cycles: field of `Template`; default: rows plus columns.

    Raises:
      FdgError: a built-in template has the name, or a function returns the wrong type.

    Example::

        def cycles(layer, rows, columns):
            return ceil_div(macs(layer), rows * columns)

        templates.register("ideal", cycles, buffer_words, lambda technology: technology.pe_mm2)
    """
    if name in _BUILT_IN:
        raise FdgError(f"template '{name}' is built in and cannot be replaced; register another name")
    layer, size = jax.tree.map(lambda x: x[0], ops.stack([ops.convolution(3, 4, 8)])), jnp.int32(4)
    result = jax.eval_shape(cycles, layer, size, size)
    if getattr(result, "shape", None) != () or result.dtype != jnp.int32:
        raise FdgError(
            f"template '{name}': cycles returns {structure_of(result)}; return one int32 number of cycles"
        )
    words = jax.eval_shape(buffer_words, layer, size, size)
    if not isinstance(words, BufferWords) or any(x.shape != () or x.dtype != jnp.float32 for x in words):
        raise FdgError(
            f"template '{name}': buffer_words returns {structure_of(words)}; return BufferWords of float32"
            " numbers"
        )
    area = pe_mm2(Technology())
    if not isinstance(area, int | float) or not area >= 0:
        raise FdgError(f"template '{name}': pe_mm2 returns {area!r}; return the area of a PE in mm2")
    _registered[name] = Template(cycles, buffer_words, pe_mm2, shape, fill_cycles)


def names() -> list[str]:
    """The names of all templates."""
    return sorted({**_BUILT_IN, **_registered})


def get(name: str) -> Template:
    """The template with this name.

    Raises:
      FdgError: unknown name; suggests the nearest.
    """
    template = {**_BUILT_IN, **_registered}.get(name)
    if template is None:
        raise unknown_name("template", name, names())
    return template
