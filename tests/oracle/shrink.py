"""Minimizes a failing program: removes lines, leaves, metrics and wrappers while it still fails."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

from tests.oracle.program import CLOSED, Block, Line, Program, Value, is_well_formed, map_blocks, walk


def shrunk(program: Program, fails: Callable[[Program], bool], seconds: float = 600) -> Program:
    """The smallest program found for which `fails` is true.

    Greedy: continues from the first candidate that fails, until none does or time is up.
    """
    end = time.monotonic() + seconds
    while True:
        for candidate in _candidates(program):
            if time.monotonic() > end:
                return program
            if is_well_formed(candidate) and fails(candidate):
                program = candidate
                break
        else:
            return program


def _candidates(program: Program) -> Iterator[Program]:
    """Programs without one part, the largest parts first."""
    lines = sorted(walk(program.lines), key=lambda line: -len(list(walk((line,)))))
    for line in lines:
        yield from _without_line(program, line)
    for line in lines:
        yield from _inlined(program, line)
    for k in range(len(program.metrics)):
        yield dataclasses.replace(program, metrics=program.metrics[:k] + program.metrics[k + 1 :])
    for k, leaf in enumerate(program.leaves):
        others = [x.value for x in program.leaves if x.value.type == leaf.value.type and x is not leaf]
        fewer = dataclasses.replace(
            program,
            leaves=program.leaves[:k] + program.leaves[k + 1 :],
            ends=program.ends[:k] + program.ends[k + 1 :],
        )
        yield fewer
        if others:
            yield _substituted(fewer, {leaf.value: others[0]})
    for k, (leaf, end) in enumerate(zip(program.leaves, program.ends, strict=True)):
        if end != leaf.value:
            yield dataclasses.replace(program, ends=program.ends[:k] + (leaf.value,) + program.ends[k + 1 :])
    for line in lines:
        if (
            line.kind in ("scan", "fori")
            and line.number > 1
            and not all(line.options[2:] and line.options[2])
        ):
            continue
        if line.kind in ("scan", "fori") and line.number > 1:
            yield _replaced(program, line, (dataclasses.replace(line, number=line.number - 1),))
    for line in lines:
        yield from _fewer_results(program, line)


def _replaced(program: Program, line: Line, by: Sequence[Line]) -> Program:
    def change(block: Block) -> Block:
        lines: list[Line] = []
        for old in block.lines:
            matches = (old.outputs, old.kind, old.inputs) == (line.outputs, line.kind, line.inputs)
            lines += by if matches else [old]
        return dataclasses.replace(block, lines=tuple(lines))

    return map_blocks(program, change)


def _substituted(program: Program, names: dict[Value, Value]) -> Program:
    """Replaces values in all inputs and results."""

    def swap(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(names.get(v, v) for v in values)

    def change(block: Block) -> Block:
        lines = [dataclasses.replace(line, inputs=swap(line.inputs)) for line in block.lines]
        return dataclasses.replace(block, lines=tuple(lines), results=swap(block.results))

    return map_blocks(program, change)


def _values_in_scope(program: Program, line: Line) -> list[Value]:
    """Values that a line can read, its own inputs first."""

    def find(block: Block, scope: list[Value]) -> list[Value] | None:
        visible = [*block.params, *scope]
        for one in block.lines:
            if one == line:
                return visible
            for body in one.blocks:
                found = find(
                    body, [] if one.kind in CLOSED or one.kind in ("vmap", "grad", "linearize") else visible
                )
                if found is not None:
                    return found
            visible = [*one.outputs, *visible]
        return None

    return [*line.inputs, *(find(program.block, []) or [])]


def _without_line(program: Program, line: Line) -> Iterator[Program]:
    """The program without a line; its outputs are replaced by earlier values of the same types."""
    scope = _values_in_scope(program, line)
    names = {}
    for output in line.outputs:
        same = [v for v in scope if v.type == output.type]
        if same:
            names[output] = same[0]
    yield _substituted(_replaced(program, line, ()), names)


def _inlined(program: Program, line: Line) -> Iterator[Program]:
    """The program with a line's body inlined, if inputs and results have the same types."""
    if line.kind not in ("fragment", "jit", "remat", "custom_jvp", "custom_vjp", "fori", "scan", "cond"):
        return
    block = line.blocks[0]
    operands = list(line.inputs)
    if line.kind == "fori":
        return
    if line.kind == "cond":
        operands = []
    names = dict(zip(block.params, operands, strict=True))
    if any(a.type != b.type for a, b in names.items()):
        return
    results = {}
    for output, end in zip(line.outputs, block.results, strict=True):
        if output.type == end.type:
            results[output] = names.get(end, end)
    inner = _substituted(Program((), block.lines, (), ()), names).lines
    yield _substituted(_replaced(program, line, inner), results)


def _fewer_results(program: Program, line: Line) -> Iterator[Program]:
    """The program without an output of a line that nothing reads, or without an input."""
    if line.kind in ("op", "effect", "grad", "linearize"):
        return
    read = {v for x in walk(program.lines) for v in x.inputs} | set(program.ends) | set(program.metrics)
    read |= {v for x in walk(program.lines) for block in x.blocks for v in block.results}
    first = (
        line.options[0] if line.kind == "scan" else len(line.outputs) if line.kind in ("fori", "while") else 0
    )
    for k in range(first, len(line.outputs)):
        if line.outputs[k] in read or len(line.outputs) == 1:
            continue
        blocks = tuple(
            dataclasses.replace(b, results=b.results[:k] + b.results[k + 1 :]) for b in line.blocks
        )
        options = line.options
        if line.kind == "fragment":
            options = (options[0], options[1][:k] + options[1][k + 1 :], *options[2:])
        outputs = line.outputs[:k] + line.outputs[k + 1 :]
        yield _replaced(
            program, line, (dataclasses.replace(line, outputs=outputs, blocks=blocks, options=options),)
        )
    if line.kind not in ("fragment", "jit", "remat", "custom_jvp", "custom_vjp"):
        return
    for k in range(len(line.inputs)):
        block = line.blocks[0]
        blocks = (dataclasses.replace(block, params=block.params[:k] + block.params[k + 1 :]),)
        options = line.options
        if line.kind == "fragment":
            options = (options[0][:k] + options[0][k + 1 :], *options[1:])
        inputs = line.inputs[:k] + line.inputs[k + 1 :]
        if inputs:
            yield _replaced(
                program, line, (dataclasses.replace(line, inputs=inputs, blocks=blocks, options=options),)
            )
