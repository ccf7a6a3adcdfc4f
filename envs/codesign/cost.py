"""Latency, energy and area of layers on sub-accelerators: pure functions of arrays, units in every name.

Cycles are exact int32 (`LARGEST_COUNT` means "at least"); words, bytes and energies are float32.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs.codesign import layers as ops
from envs.codesign import templates
from envs.codesign.layers import LARGEST_COUNT, Layers
from envs.codesign.technology import Technology
from envs.codesign.templates import BufferWords, Template
from fdg.errors import FdgError

TEMPLATES = ("dla", "shi", "rs")  # default templates of a chip
PROCESS = Technology()  # default constants
LARGEST_ARRAY_PES = 2**17  # so that adding the cycles to fill an array cannot overflow
BOUNDS = ("compute", "on-chip", "off-chip")  # what determines a layer's latency


class SubAccelerators(NamedTuple):
    """Sub-accelerators of a chip; all fields have the same shape, such as [A]."""

    template: jax.Array  # int32, index of a template
    rows: jax.Array  # int32, of the PE array; 0: no such sub-accelerator
    columns: jax.Array  # int32
    buffer_bytes: jax.Array  # int32, of the global buffer
    noc_bytes_per_cycle: jax.Array  # float32, between buffer and PEs
    dram_bytes_per_cycle: jax.Array  # float32, between buffer and memory


class LayerCosts(NamedTuple):
    """Costs of layers on sub-accelerators; all fields have the same shape, such as [L, A]."""

    macs: jax.Array  # int32
    compute_cycles: jax.Array  # int32
    latency_cycles: jax.Array  # int32: the largest of three terms, plus filling the array
    onchip_bytes: jax.Array  # float32, between buffer and PEs
    offchip_bytes: jax.Array  # float32, between buffer and memory
    energy_pj: jax.Array  # float32
    utilization: jax.Array  # float32, multiplications over PEs x compute cycles; 0 to 1
    bound: jax.Array  # int32, index in BOUNDS of the largest term


def sub_accelerator(
    template: str,
    pes: int | None = None,
    *,
    rows: int | None = None,
    columns: int | None = None,
    buffer_bytes: int,
    noc_bytes_per_cycle: float,
    dram_bytes_per_cycle: float,
    known: Sequence[str] = TEMPLATES,
) -> SubAccelerators:
    """One sub-accelerator, scalars.

    Args:
      template: one of `known`.
      pes: number of PEs, which the template arranges; None if `rows` and `columns` are given.
      rows: of the array.
      columns: of the array.
      buffer_bytes: of the global buffer; half of it is in use while the other half is filled (double
        buffering).
      noc_bytes_per_cycle: between buffer and PEs; at 1 GHz, GB/s.
      dram_bytes_per_cycle: between buffer and memory.
      known: names of templates, as for `layer_costs`.

    Raises:
      FdgError: no such template, or a size that is not above 0.

    >>> sizes = {"buffer_bytes": 2**17, "noc_bytes_per_cycle": 16, "dram_bytes_per_cycle": 4}
    >>> sub_accelerator("shi", 64, **sizes).rows.item()
    8
    """
    entry = templates.get(template)
    if template not in known:
        raise FdgError(
            f"sub-accelerator: template '{template}' is not among {', '.join(known)}: give one of these, or"
            f" known=[..., '{template}']"
        )
    if [pes is None, rows is None, columns is None] not in ([True, False, False], [False, True, True]):
        raise FdgError(
            f"sub-accelerator: pes={pes}, rows={rows}, columns={columns}: give either pes, or rows and"
            " columns"
        )
    limits = {"pes": LARGEST_ARRAY_PES, "rows": LARGEST_ARRAY_PES, "columns": LARGEST_ARRAY_PES}
    sizes = {"pes": pes, "rows": rows, "columns": columns, "buffer_bytes": buffer_bytes}
    for name, value in sizes.items():
        limit = limits.get(name, LARGEST_COUNT)
        is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if value is not None and not (is_integer and 0 < value <= limit):
            raise FdgError(f"sub-accelerator: {name} is {value!r}; give a whole number from 1 to {limit:,}")
    if rows is not None and columns is not None and rows * columns > LARGEST_ARRAY_PES:
        raise FdgError(
            f"sub-accelerator: {rows} x {columns} are {rows * columns:,} PEs; "
            f"give at most {LARGEST_ARRAY_PES:,}"
        )
    for name, rate in (("noc", noc_bytes_per_cycle), ("dram", dram_bytes_per_cycle)):
        if not isinstance(rate, int | float | np.number) or not 0 < rate < float("inf"):
            raise FdgError(f"sub-accelerator: {name}_bytes_per_cycle is {rate!r}; give a number above 0")
    shape = (rows, columns) if pes is None else entry.shape(pes)
    return SubAccelerators(
        template=jnp.int32(known.index(template)),
        rows=jnp.int32(shape[0]),
        columns=jnp.int32(shape[1]),
        buffer_bytes=jnp.int32(buffer_bytes),
        noc_bytes_per_cycle=jnp.float32(noc_bytes_per_cycle),
        dram_bytes_per_cycle=jnp.float32(dram_bytes_per_cycle),
    )


def offchip_bytes(
    weights: jax.Array, inputs: jax.Array, outputs: jax.Array, buffer_bytes: jax.Array
) -> jax.Array:
    """Bytes between buffer and memory for a layer; the minimum over ways to split the buffer.

    One half of the buffer is in use while the other is filled. Some sixteenths of the used half hold a part
    of the weights, the rest a part of the inputs. Either all inputs pass once for each part of the weights,
    or all weights once for each part of the inputs. If one fits, each passes once. All are float32 scalars.
    """
    half = jnp.maximum(jnp.asarray(buffer_bytes, jnp.float32), 2) / 2
    share = jnp.arange(1, 16, dtype=jnp.float32) / 16
    weights_stay = weights + inputs * jnp.ceil(weights / (share * half))
    inputs_stay = inputs + weights * jnp.ceil(inputs / ((1 - share) * half))
    split_bytes = jnp.minimum(weights_stay.min(), inputs_stay.min())
    fits = jnp.minimum(weights, inputs) <= half
    return outputs + jnp.where(fits, weights + inputs, jnp.maximum(split_bytes, weights + inputs))


def _layer_cost(
    layer: Layers,
    sub: SubAccelerators,
    dataflows: tuple[Template, ...],
    technology: Technology,
    overlap: bool,
) -> LayerCosts:
    """The costs of one layer on one sub-accelerator: scalars."""
    pes, exists = ops.product(sub.rows, sub.columns), (sub.rows > 0) & (sub.columns > 0)
    has_weights = layer.has_weights > 0
    costs = [_template_costs(dataflow, layer, sub, technology) for dataflow in dataflows]
    cycles, words, fill, pe_mm2 = jax.tree.map(
        lambda *each: jnp.select([sub.template == i for i in range(len(costs))], each, each[-1]), *costs
    )
    tensors = [
        jnp.asarray(x(layer), jnp.float32) for x in (ops.weight_words, ops.input_words, ops.output_words)
    ]
    words = jax.tree.map(lambda a, b: jnp.where(has_weights, a, b), words, BufferWords(*tensors))
    word_bytes = technology.word_bytes
    onchip = sum(words) * word_bytes
    weights, inputs, outputs = (word_bytes * x for x in tensors)
    offchip = offchip_bytes(weights, inputs, outputs, sub.buffer_bytes)
    terms = jnp.stack(
        [
            cycles,
            whole_cycles(onchip / jnp.maximum(sub.noc_bytes_per_cycle, 1e-9)),
            whole_cycles(offchip / jnp.maximum(sub.dram_bytes_per_cycle, 1e-9)),
        ]
    )
    terms_cycles = terms.max() if overlap else ops.add(ops.add(terms[0], terms[1]), terms[2])
    latency = ops.add(terms_cycles, jnp.where(has_weights, fill, 0))
    latency = jnp.where(exists, latency, LARGEST_COUNT)
    macs = ops.macs(layer)
    buffered = (technology.noc_ratio + technology.buffer_ratio) * sum(words)
    relative_energy = (
        macs * (1 + 4 * technology.register_ratio) + buffered + technology.dram_ratio * offchip / word_bytes
    )
    mm2 = pe_mm2 * pes + technology.buffer_mm2_per_kb * sub.buffer_bytes / 1024
    leakage_pj = technology.leakage_w_per_mm2 * mm2 * latency / technology.clock_hz * 1e12
    return LayerCosts(
        macs=macs,
        compute_cycles=cycles,
        latency_cycles=latency,
        onchip_bytes=onchip,
        offchip_bytes=offchip,
        energy_pj=technology.mac_pj * relative_energy + leakage_pj,
        # For a 1 x 1 array, SCALE-Sim counts one cycle fewer than multiplications.
        utilization=macs / jnp.maximum(jnp.maximum(jnp.asarray(cycles, jnp.float32) * pes, macs), 1),
        bound=jnp.argmax(terms).astype(jnp.int32),
    )


def _template_costs(template: Template, layer: Layers, sub: SubAccelerators, technology: Technology) -> tuple:
    """Compute cycles, `BufferWords`, cycles to fill the array, and mm2 of a PE if `sub` had the template."""
    rows, columns = jnp.maximum(sub.rows, 1), jnp.maximum(sub.columns, 1)
    cycles, words = template.cycles(layer, rows, columns), template.buffer_words(layer, rows, columns)
    pe_mm2 = jnp.float32(template.pe_mm2(technology))
    return cycles, words, jnp.asarray(template.fill_cycles(rows, columns), jnp.int32), pe_mm2


def whole_cycles(cycles: jax.Array) -> jax.Array:
    """Rounds up to int32; `LARGEST_COUNT` for larger values and infinity."""
    return jnp.where(cycles >= LARGEST_COUNT, LARGEST_COUNT, jnp.ceil(cycles).astype(jnp.int32))


def layer_costs(
    layers: Layers,
    subs: SubAccelerators,
    known: Sequence[str] = TEMPLATES,
    technology: Technology = PROCESS,
    overlap: bool = True,
) -> LayerCosts:
    """The costs of every layer on every sub-accelerator.

    A layer's latency is the maximum of computation, words between buffer and PEs, and bytes between buffer
    and memory, plus the time to fill the array (as in NVDLA's primer).

    Args:
      layers: arrays [L].
      subs: arrays [A].
      known: the templates that `subs.template` indexes.
      technology: constants of the process.
      overlap: False adds the three times: the chip loads, computes and stores in sequence.

    Returns:
      Arrays [L, A]. Where `subs.rows` is 0 the latency is `LARGEST_COUNT`. Empty layers cost 0.

    Raises:
      FdgError: an unknown template in `known`.
    """
    return _all_layer_costs(layers, subs, tuple(map(templates.get, known)), technology, overlap)


@functools.partial(jax.jit, static_argnames=("dataflows", "technology", "overlap"))
def _all_layer_costs(
    layers: Layers,
    subs: SubAccelerators,
    dataflows: tuple[Template, ...],
    technology: Technology,
    overlap: bool,
) -> LayerCosts:
    def of_layer(layer: Layers) -> LayerCosts:
        return jax.vmap(lambda sub: _layer_cost(layer, sub, dataflows, technology, overlap))(subs)

    return jax.vmap(of_layer)(layers)


def area_mm2(
    subs: SubAccelerators, known: Sequence[str] = TEMPLATES, technology: Technology = PROCESS
) -> jax.Array:
    """Area of a chip, float32 scalar: PEs and buffers of all sub-accelerators [A], and shared parts."""
    pe_mm2 = jnp.asarray([templates.get(name).pe_mm2(technology) for name in known], jnp.float32)
    pes = subs.rows * subs.columns * pe_mm2[subs.template]
    kilobytes = jnp.where(subs.rows > 0, subs.buffer_bytes, 0) / 1024
    return technology.chip_mm2 + (pes + technology.buffer_mm2_per_kb * kilobytes).sum()
