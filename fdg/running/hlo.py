"""Reads a compiled program's collectives from its optimised HLO text: kinds, bytes, counts and fragments."""

import math
import re
from collections.abc import Iterator

from fdg.batch.collective import Collective

KINDS = (  # the names of collectives in HLO
    "all-reduce",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "collective-broadcast",
)


def read_collectives(text: str) -> tuple[Collective, ...]:
    """The collectives of a program's optimised HLO (`Program.hlo()`), in program order."""
    program = dict(computations(text))
    entry = next((name for name, lines in program.items() if lines and lines[0].startswith("ENTRY")), None)
    return tuple(_collectives_of(program, entry, 1)) if entry else ()


def computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each computation's name and its lines, the heading first."""
    name, lines = None, []
    for line in text.splitlines():
        if name is None:
            heading = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{\s*$", line)
            if heading and not line.startswith("HloModule"):
                name, lines = heading[1], [line]
        elif line.startswith("}"):
            yield name, lines
            name = None
        else:
            lines.append(line)


def _collectives_of(program: dict[str, list[str]], name: str, calls: int) -> Iterator[Collective]:
    """Yields the collectives of a computation of `program` that runs `calls` times, and of its callees."""
    for line in program.get(name, [""])[1:]:
        instruction = re.match(r"\s*(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(", line)
        if not instruction:
            continue
        shape, operation = instruction[1], instruction[2]
        kind = operation.removesuffix("-start")
        if kind in KINDS:
            path, fragments = fragment_path(line)
            size = _shape_bytes(_result_of(operation, shape))
            yield Collective(kind, size, calls, tuple(dict.fromkeys(fragments)), path)
        trip_count = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        trips = int(trip_count[1]) if trip_count else 1
        for inner in called_computations(line):
            yield from _collectives_of(program, inner, calls * trips)


def fragment_path(line: str) -> tuple[str, list[str]]:
    """An instruction's `op_name`, and the names of the fragments in it, from the outside in."""
    op_name = re.search(r'op_name="([^"]*)"', line)
    path = op_name[1] if op_name else ""
    return path, re.findall(r"fdg:[^:()]+:([^()]+)\)", path)


def _result_of(operation: str, shape: str) -> str:
    """A collective's result: `all-gather-start` and `collective-permute-start` return their operands too.

    >>> _result_of("all-gather-start", "(f32[2]{0}, f32[8]{0})")
    'f32[8]{0}'
    >>> _result_of("all-gather-start", "((f32[2], s32[2]), (f32[8], s32[8]))")
    '(f32[8], s32[8])'
    """
    if operation not in ("all-gather-start", "collective-permute-start") or not shape.startswith("("):
        return shape
    parts = re.findall(r"\([^()]*\)|[^\s,()]+\[[\d,]*\](?:\{[^}]*\})?", shape[1:-1])
    return parts[1]


def called_computations(line: str) -> list[str]:
    """The names of the computations that an instruction runs."""
    names = re.findall(
        r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", line
    )
    for group in re.findall(r"(?:branch_computations|called_computations)=\{([^}]*)\}", line):
        names += [name.strip().lstrip("%") for name in group.split(",")]
    return names


def _shape_bytes(shape: str) -> int:
    """The bytes of an HLO shape such as `(f32[8,4], s32[])`."""
    total = 0
    for dtype, dimensions in re.findall(r"([a-z]+\d*\w*)\[([\d,]*)\]", shape):
        width = re.match(r"[a-z]+(\d+)", dtype)  # bf16, s4, f8e4m3, c128
        bits = int(width[1]) if width else 8 * (dtype == "pred")
        total += -(-math.prod(int(n) for n in dimensions.split(",") if n) * bits // 8)
    return total
