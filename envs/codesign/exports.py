"""Exports a design for other cost models: ZigZag (YAML) and MAESTRO (its data-flow language).

Only layers with multiplications are exported, because each tool models pooling and additions in its own way.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from envs.codesign.layers import Layer
from envs.codesign.technology import Technology
from fdg.errors import FdgError


class Chip(NamedTuple):
    """One sub-accelerator as plain numbers."""

    template: str
    rows: int
    columns: int
    buffer_bytes: int
    noc_bytes_per_cycle: float
    dram_bytes_per_cycle: float


_Loops = dict[str, int]  # sizes by the names of ZigZag's loops, which `_workload_layer` defines
EXPORTED = ("dla", "shi", "rs")  # templates that other tools' languages can express
# Sizes of registers in words: the accumulators of a column of `dla`; the filters, input rows and sums of a PE
# of `rs` (JSSC 2017); a pair of words, one in use and the next one.
_ACCUMULATORS, _FILTERS, _WINDOW, _SUMS, _PAIR = 4096, 224, 12, 24, 2
_MEMORY_BITS = 10**13  # more than any network needs


def zigzag(layers: Sequence[Layer], chip: Chip, technology: Technology) -> dict[str, str]:
    """The three input files of ZigZag 3.9: `accelerator`, `mapping` and `workload`, as YAML (in JSON).

    The spatial mapping is the template's, layer by layer; ZigZag searches the loops around it. Energies are
    picojoules: accesses cost what `technology` defines for registers, for the buffer including the NoC, and
    for memory. Only layers with multiplications are written; the chip's template must be in `EXPORTED`.
    """
    _check_template(chip)
    weighted = [layer for layer in layers if layer.has_weights]
    unroll, (down, across) = _UNROLL[chip.template]
    mapping = [
        _mapping("default", {down: chip.rows}, {across: chip.columns}),
        *(_mapping(f"layer{index}", *unroll(layer, chip)) for index, layer in enumerate(weighted)),
    ]
    return {
        "accelerator": json.dumps(_accelerator(chip, technology), indent=1),
        "mapping": json.dumps(mapping, indent=1),
        "workload": json.dumps(
            [_workload_layer(index, layer, technology) for index, layer in enumerate(weighted)], indent=1
        ),
    }


def _check_template(chip: Chip) -> None:
    if chip.template not in EXPORTED:
        raise FdgError(
            f"template '{chip.template}' has no description for other tools; those that have one: "
            f"{', '.join(EXPORTED)}"
        )


def _workload_layer(index: int, layer: Layer, technology: Technology) -> dict[str, Any]:
    """A convolution of ZigZag's workload, with the loops of all its groups."""
    bits = 8 * technology.word_bytes
    sizes = {
        "G": layer.groups,
        "K": layer.out_channels // layer.groups,
        "C": layer.in_channels // layer.groups,
        "OY": layer.out_rows,
        "OX": layer.out_columns,
        "FY": layer.kernel_rows,
        "FX": layer.kernel_columns,
    }
    axes = [
        (layer.out_rows, layer.kernel_rows, layer.in_rows),
        (layer.out_columns, layer.kernel_columns, layer.in_columns),
    ]
    covered = [(outputs - 1) * layer.stride + kernel for outputs, kernel, _ in axes]
    present = [min(size, rows or size) for size, (_, _, rows) in zip(covered, axes, strict=True)]
    padding = [size - present_size for size, present_size in zip(covered, present, strict=True)]
    return {
        "id": index,
        "name": f"layer{index}",
        "operator_type": "Conv",
        "equation": "O[g][k][oy][ox]+=W[g][k][c][fy][fx]*I[g][c][iy][ix]",
        "dimension_relations": [f"iy={layer.stride}*oy+1*fy", f"ix={layer.stride}*ox+1*fx"],
        "loop_dims": list(sizes),
        "loop_sizes": list(sizes.values()),
        "operand_precision": dict.fromkeys(("W", "I", "O", "O_final"), bits),
        "operand_source": {"I": index, "W": index},
        "pr_loop_dims": ["IY", "IX"],
        "pr_loop_sizes": present,
        "padding": [[size // 2, size - size // 2] for size in padding],
    }


def _mapping(name: str, down: _Loops, across: _Loops) -> dict[str, Any]:
    """An entry of ZigZag's mapping: the loops that each axis of the array unrolls."""
    spatial = {}
    for axis, loops in (("D1", down), ("D2", across)):
        # Leaves out loops of size 1, but keeps at least one loop: ZigZag unrolls any loop over an empty axis.
        kept = {loop: size for loop, size in loops.items() if size > 1} or dict([next(iter(loops.items()))])
        spatial[axis] = [f"{loop}, {size}" for loop, size in kept.items()]
    links = {"O": "O", "W": "I2", "I": "I1"}
    return {"name": name, "spatial_mapping": spatial, "memory_operand_links": links}


def _unroll_dla(layer: Layer, chip: Chip) -> tuple[_Loops, _Loops]:
    """Unrolls input channels down and output channels across; free PEs take kernel rows or groups."""
    in_group, out_group = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    rows = {"C": min(in_group, chip.rows)}
    if layer.groups == 1 and in_group <= 4:
        rows["FY"] = min(layer.kernel_rows, chip.rows // in_group)
    columns = {"K": min(out_group, chip.columns)}
    groups_at_once = min(chip.rows // in_group, chip.columns // out_group, layer.groups)
    if groups_at_once > 1:
        columns["G"] = groups_at_once
    return rows, columns


def _unroll_shi(layer: Layer, chip: Chip) -> tuple[_Loops, _Loops]:
    """Unrolls output rows down and output columns across."""
    return {"OY": min(layer.out_rows, chip.rows)}, {"OX": min(layer.out_columns, chip.columns)}


def _unroll_rs(layer: Layer, chip: Chip) -> tuple[_Loops, _Loops]:
    """Unrolls kernel rows down and output rows across; free PEs take kernels, groups or channels."""
    strip, kernel_rows = min(layer.out_rows, chip.columns), min(layer.kernel_rows, chip.rows)
    remaining = {
        "K": layer.out_channels // layer.groups, "G": layer.groups, "C": layer.in_channels // layer.groups
    }  # fmt: skip
    axes = {"FY": kernel_rows}, {"OY": strip}
    for axis, room in zip(axes, (chip.rows // kernel_rows, chip.columns // strip), strict=True):
        name = next((name for name, size in remaining.items() if size > 1), "K")
        axis[name] = min(room, remaining[name])
        remaining[name] //= max(axis[name], 1)
    return axes


# By template: a function that returns a layer's loops unrolled down and across the array; and the two loops
# of ZigZag's default entry, one unrolled down and one across the whole array.
_UNROLL: dict[str, tuple[Callable[[Layer, Chip], tuple[_Loops, _Loops]], tuple[str, str]]] = {
    "dla": (_unroll_dla, ("C", "K")),
    "shi": (_unroll_shi, ("OY", "OX")),
    "rs": (_unroll_rs, ("FY", "OY")),
}


# By template and operand (I1: inputs, I2: weights, O: outputs): the size of its registers in words, and the
# array axes that share them (D1: down, D2: across). In `shi`, PEs pass inputs on to their neighbours. ZigZag
# has no such links, so here a PE has registers for a whole window.
_REGISTERS: dict[str, dict[str, tuple[int, list[str]]]] = {
    "dla": {"I1": (_PAIR, ["D2"]), "I2": (_PAIR, []), "O": (_ACCUMULATORS, ["D1"])},
    "shi": {"I1": (_WINDOW, []), "I2": (_PAIR, ["D1", "D2"]), "O": (_PAIR, [])},
    "rs": {"I1": (_WINDOW, []), "I2": (_FILTERS, []), "O": (_SUMS, [])},
}


def _accelerator(chip: Chip, technology: Technology) -> dict[str, Any]:
    """ZigZag's accelerator: registers, buffer and memory around the array of PEs."""
    word_bits = 8 * technology.word_bytes
    energies = {
        "register": technology.mac_pj * technology.register_ratio,
        "buffer": technology.mac_pj * (technology.noc_ratio + technology.buffer_ratio),
        "memory": technology.mac_pj * technology.dram_ratio,
    }
    memories = {
        f"registers_{operand.lower()}": _memory(
            8 * size * technology.word_bytes,
            energies["register"],
            [operand],
            shared,
            {
                "r_port_1": ("read", word_bits, word_bits, _port_directions(operand, "tl", "th")),
                "w_port_1": ("write", word_bits, word_bits, _port_directions(operand, "fh", "fl")),
            },
        )
        for operand, (size, shared) in _REGISTERS[chip.template].items()
    }
    noc, dram = (8 * round(rate) for rate in (chip.noc_bytes_per_cycle, chip.dram_bytes_per_cycle))
    operands, both_axes = ["I1", "I2", "O"], ["D1", "D2"]
    # All tensors share a port to the PEs, and a port to memory; memory's own port is narrower.
    memories["buffer"] = _memory(
        8 * chip.buffer_bytes,
        energies["buffer"] * noc / word_bits,
        operands,
        both_axes,
        {
            "rw_port_1": ("read_write", word_bits, noc, ["I1, tl", "I2, tl", "O, tl", "O, fl"]),
            "rw_port_2": ("read_write", word_bits, noc, ["I1, fh", "I2, fh", "O, fh", "O, th"]),
        },
    )
    directions = [f"{operand}, {way}" for operand in operands for way in ("fh", "tl")]
    memories["memory"] = _memory(
        _MEMORY_BITS,
        energies["memory"] * dram / word_bits,
        operands,
        both_axes,
        {"rw_port_1": ("read_write", word_bits, dram, [*directions, "O, fl", "O, th"])},
    )
    array = {
        "unit_energy": technology.mac_pj,
        "unit_area": technology.pe_mm2,
        "dimensions": both_axes,
        "sizes": [chip.rows, chip.columns],
    }
    return {"name": chip.template, "operational_array": array, "memories": memories}


def _port_directions(operand: str, of_input: str, of_sum: str) -> list[str]:
    """The directions of a register's port: for sums also from and to the level above.

    In ZigZag's directions, f is from, t is to, h is the higher level, l is the lower level.
    """
    return [f"{operand}, {of_input}", *([f"O, {of_sum}"] if operand == "O" else [])]


def _memory(
    bits: int, pj: float, operands: list[str], served: list[str], ports: dict[str, tuple]
) -> dict[str, Any]:
    """A memory level. An access moves as many bits as the port is wide, and costs `pj`."""
    keys = ("type", "bandwidth_min", "bandwidth_max", "allocation")
    return {
        "size": bits,
        "r_cost": pj,
        "w_cost": pj,
        "area": 0.0,
        "latency": 1,
        "operands": operands,
        "ports": [{"name": name, **dict(zip(keys, port, strict=True))} for name, port in ports.items()],
        "served_dimensions": served,
    }


def maestro(layers: Sequence[tuple[str, Layer, Chip]]) -> str:
    """A network in MAESTRO's language, each layer with its sub-accelerator's data flow.

    Of a grouped layer only one group is written, with the number of groups in a comment; a depthwise layer is
    written whole. `layers` are names, layers and sub-accelerators.
    """
    lines = ["Network codesign {"]
    for index, (name, layer, chip) in enumerate(layers):
        if not layer.has_weights:
            continue
        _check_template(chip)
        is_depthwise = layer.groups == layer.in_channels == layer.out_channels > 1
        kernels, channels = layer.out_channels // layer.groups, layer.in_channels // layer.groups
        sizes = {
            "K": kernels,
            "C": layer.in_channels if is_depthwise else channels,
            "R": layer.kernel_rows,
            "S": layer.kernel_columns,
            "Y": (layer.out_rows - 1) * layer.stride + layer.kernel_rows,
            "X": (layer.out_columns - 1) * layer.stride + layer.kernel_columns,
        }
        groups = f", {layer.groups} groups" if layer.groups > 1 and not is_depthwise else ""
        lines += [
            f"  // {' '.join(name.split())}: {chip.template} of {chip.rows} x {chip.columns} PEs, buffer of "
            f"{chip.buffer_bytes} bytes, {chip.noc_bytes_per_cycle:g} bytes a cycle{groups}",
            f"  Layer L{index} {{",
            f"    Type: {'DSCONV' if is_depthwise else 'CONV'}",
            f"    Stride {{ X: {layer.stride}, Y: {layer.stride} }}",
            f"    Dimensions {{ {', '.join(f'{key}: {size}' for key, size in sizes.items())} }}",
            "    Dataflow {",
            *(f"      {directive};" for directive in _FLOWS[chip.template](chip, is_depthwise)),
            "    }",
            "  }",
        ]
    return "\n".join([*lines, "}"]) + "\n"


# MAESTRO's directives: Map(size, offset) of a dimension, the outermost loop first. Dimensions: rows and
# columns of the kernel (R, S), input (Y, X) and output (Y', X'); channels of the output (K) and input (C).
_KERNEL_MAPS = ["TemporalMap(Sz(R),Sz(R)) R", "TemporalMap(Sz(S),Sz(S)) S"]
_WINDOW_MAPS = ["TemporalMap(Sz(R),1) Y", "TemporalMap(Sz(S),1) X"]


# Each `_flow_*` function returns the directives of a template.
def _flow_dla(chip: Chip, is_depthwise: bool) -> list[str]:
    inner = ["SpatialMap(1,1) C", *_WINDOW_MAPS, *_KERNEL_MAPS]
    if is_depthwise:
        return inner
    outer = ["SpatialMap(1,1) K", f"TemporalMap({chip.rows},{chip.rows}) C", *_KERNEL_MAPS, *_WINDOW_MAPS]
    return [*outer, f"Cluster({chip.rows}, P)", *inner]


def _flow_shi(chip: Chip, is_depthwise: bool) -> list[str]:
    channels = ["TemporalMap(1,1) C"] if is_depthwise else ["TemporalMap(1,1) K", "TemporalMap(1,1) C"]
    across = ["SpatialMap(Sz(R),1) Y", f"TemporalMap({chip.columns},{chip.columns}) X"]
    return [*channels, *across, f"Cluster({chip.columns}, P)", "SpatialMap(Sz(S),1) X", *_KERNEL_MAPS]


def _flow_rs(_: Chip, is_depthwise: bool) -> list[str]:
    kernels = [] if is_depthwise else [f"TemporalMap({_FILTERS_AT_ONCE},{_FILTERS_AT_ONCE}) K"]
    outer = ["SpatialMap(1,1) Y'", "TemporalMap(1,1) X'", "TemporalMap(1,1) C", *kernels, *_KERNEL_MAPS]
    return [*outer, "Cluster(Sz(R), P)", "SpatialMap(1,1) Y", "SpatialMap(1,1) R", _KERNEL_MAPS[1]]


_FLOWS = {"dla": _flow_dla, "shi": _flow_shi, "rs": _flow_rs}
_FILTERS_AT_ONCE = 16  # kernels whose filter rows a PE of `rs` holds
