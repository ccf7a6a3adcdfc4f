"""Making a failing program small: drop a line, a leaf, a metric, a wrapper, as long as it still fails."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

from tests.oracle.program import CLOSED, Block, Line, Program, Value, is_well_formed, map_blocks, walk


def shrunk(program: Program, fails: Callable[[Program], bool], seconds: float = 600) -> Program:
    """The smallest program found of which `fails` is true, as of the first.

    Greedy: takes the first candidate that fails, and goes on from there until none does or time is over.
    """
    end = time.monotonic() + seconds
    while True:
        for candidate in _smaller(program):
            if time.monotonic() > end:
                return program
            if is_well_formed(candidate) and fails(candidate):
                program = candidate
                break
        else:
            return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with a piece less, the largest pieces first."""
    lines = sorted(walk(program.lines), key=lambda line: -len(list(walk((line,)))))
    for line in lines:
        yield from _without(program, line)
    for line in lines:
        yield from _opened(program, line)
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
            is_it = (old.makes, old.kind, old.reads) == (line.makes, line.kind, line.reads)
            lines += by if is_it else [old]
        return dataclasses.replace(block, lines=tuple(lines))

    return map_blocks(program, change)


def _substituted(program: Program, names: dict[Value, Value]) -> Program:
    """Other values in the place of some."""

    def swap(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(names.get(v, v) for v in values)

    def change(block: Block) -> Block:
        lines = [dataclasses.replace(line, reads=swap(line.reads)) for line in block.lines]
        return dataclasses.replace(block, lines=tuple(lines), results=swap(block.results))

    return map_blocks(program, change)


def _scopes(program: Program, line: Line) -> list[Value]:
    """What could be read where a line stands, the line's own operands first."""

    def look(block: Block, around: list[Value]) -> list[Value] | None:
        seen = [*block.params, *around]
        for one in block.lines:
            if one == line:
                return seen
            for body in one.blocks:
                found = look(
                    body, [] if one.kind in CLOSED or one.kind in ("vmap", "grad", "linearize") else seen
                )
                if found is not None:
                    return found
            seen = [*one.makes, *seen]
        return None

    return [*line.reads, *(look(program.block, []) or [])]


def _without(program: Program, line: Line) -> Iterator[Program]:
    """Its results replaced by something of the same type that is there already."""
    scope = _scopes(program, line)
    names = {}
    for made in line.makes:
        same = [v for v in scope if v.type == made.type]
        if same:
            names[made] = same[0]
    yield _substituted(_replaced(program, line, ()), names)


def _opened(program: Program, line: Line) -> Iterator[Program]:
    """Its body in its place, where operands and results fit."""
    if line.kind not in ("fragment", "jit", "remat", "custom_jvp", "custom_vjp", "fori", "scan", "cond"):
        return
    block = line.blocks[0]
    operands = list(line.reads)
    if line.kind == "fori":
        return
    if line.kind == "cond":
        operands = []
    names = dict(zip(block.params, operands, strict=True))
    if any(a.type != b.type for a, b in names.items()):
        return
    results = {}
    for made, end in zip(line.makes, block.results, strict=True):
        if made.type == end.type:
            results[made] = names.get(end, end)
    inner = _substituted(Program((), block.lines, (), ()), names).lines
    yield _substituted(_replaced(program, line, inner), results)


def _fewer_results(program: Program, line: Line) -> Iterator[Program]:
    """Without a result that nobody reads, or an operand that the body does not."""
    if line.kind in ("op", "effect", "grad", "linearize"):
        return
    read = {v for x in walk(program.lines) for v in x.reads} | set(program.ends) | set(program.metrics)
    read |= {v for x in walk(program.lines) for block in x.blocks for v in block.results}
    first = (
        line.options[0] if line.kind == "scan" else len(line.makes) if line.kind in ("fori", "while") else 0
    )
    for k in range(first, len(line.makes)):
        if line.makes[k] in read or len(line.makes) == 1:
            continue
        blocks = tuple(
            dataclasses.replace(b, results=b.results[:k] + b.results[k + 1 :]) for b in line.blocks
        )
        options = line.options
        if line.kind == "fragment":
            options = (options[0], options[1][:k] + options[1][k + 1 :], *options[2:])
        makes = line.makes[:k] + line.makes[k + 1 :]
        yield _replaced(
            program, line, (dataclasses.replace(line, makes=makes, blocks=blocks, options=options),)
        )
    if line.kind not in ("fragment", "jit", "remat", "custom_jvp", "custom_vjp"):
        return
    for k in range(len(line.reads)):
        block = line.blocks[0]
        blocks = (dataclasses.replace(block, params=block.params[:k] + block.params[k + 1 :]),)
        options = line.options
        if line.kind == "fragment":
            options = (options[0][:k] + options[0][k + 1 :], *options[1:])
        reads = line.reads[:k] + line.reads[k + 1 :]
        if reads:
            yield _replaced(
                program, line, (dataclasses.replace(line, reads=reads, blocks=blocks, options=options),)
            )
