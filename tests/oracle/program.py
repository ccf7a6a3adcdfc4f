"""Programs as data: typed values, lines with inputs and outputs, blocks of lines; printed like Python."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

BATCH = 12  # no other axis has this length, so the shape determines the batch axis


@dataclasses.dataclass(frozen=True)
class Value:
    """A name for an array. `kind`: f(loat), i(nt), b(ool) or k(ey)."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def axis(self) -> int | None:
        """The batch axis, if any."""
        return self.shape.index(BATCH) if BATCH in self.shape else None

    @property
    def type(self) -> tuple[str, tuple[int, ...]]:
        """Kind and shape: values of one type are interchangeable."""
        return self.kind, self.shape

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Block:
    """Lines that read `params` and, unless `CLOSED`, values of the enclosing scope."""

    params: tuple[Value, ...]
    lines: tuple["Line", ...]
    results: tuple[Value, ...]


@dataclasses.dataclass(frozen=True)
class Line:
    """One step.

    Attributes:
      kind: "op" (of `operations`), "fragment" or a structure of `interpret`.
      name: the operation, or the name of the fragment.
      number: the operation's variant, or the loop's number of trips.
      blocks: the body, or the branches.
      options: depend on the kind, see `interpret`.
    """

    kind: str
    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    number: int = 0
    blocks: tuple[Block, ...] = ()
    role: str = ""
    options: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A state leaf. Leaves with the same `start` share their initial array. `is_number`: a Python number."""

    value: Value
    start: int
    is_number: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """An algorithm: state leaves, lines of an iteration, the next value of each leaf (`ends`), and metrics.

    `keys` is the PRNG implementation.
    """

    leaves: tuple[Leaf, ...]
    lines: tuple[Line, ...]
    ends: tuple[Value, ...]
    metrics: tuple[Value, ...]
    keys: str = "threefry2x32"

    @property
    def block(self) -> Block:
        """The iteration as a block."""
        return Block(tuple(leaf.value for leaf in self.leaves), self.lines, (*self.ends, *self.metrics))


def walk(lines: tuple[Line, ...]) -> Iterator[Line]:
    """All lines, with nested ones."""
    for line in lines:
        yield line
        for block in line.blocks:
            yield from walk(block.lines)


def fragments(program: Program) -> dict[str, str]:
    """The role of each fragment, by name."""
    return {line.name: line.role for line in walk(program.lines) if line.kind == "fragment"}


def parents(lines: tuple[Line, ...], parent: str | None = None) -> dict[str, str | None]:
    """The enclosing fragment of each fragment, by name."""
    found: dict[str, str | None] = {}
    for line in lines:
        if line.kind == "fragment":
            found[line.name] = parent
        for block in line.blocks:
            found |= parents(block.lines, line.name if line.kind == "fragment" else parent)
    return found


def features(program: Program) -> set[str]:
    """What a program uses: operations, kinds of lines, their nesting, and properties of its state."""
    found = {f"keys:{program.keys}"}

    def collect(lines: tuple[Line, ...], scope: tuple[str, ...]) -> None:
        for line in lines:
            name = line.name if line.kind in ("op", "effect") else line.kind
            found.add(name)
            if line.kind != "op":
                found.update(f"{outer}>{name}" for outer in scope)
                found.update(f"{name}:{option}" for option in line.options if isinstance(option, str))
            for block in line.blocks:
                if line.kind == "fragment" and set(block.params) & set(block.results):
                    found.update(["pass-through", *(f"{outer}>pass-through" for outer in scope)])
                collect(block.lines, (*scope, line.kind))

    collect(program.lines, ())
    ends = {leaf.value: end for leaf, end in zip(program.leaves, program.ends, strict=True)}
    found.update("untouched" for leaf, end in ends.items() if leaf == end)
    found.update("swapped" for leaf, end in ends.items() if leaf != end and end in ends)
    if len({(leaf.start, leaf.value.type) for leaf in program.leaves}) < len(program.leaves):
        found.add("aliased")
    found.update("number" for leaf in program.leaves if leaf.is_number)
    return found | {f"batch on axis {leaf.value.axis}" for leaf in program.leaves}


def is_well_formed(program: Program) -> bool:
    """True if every line and result reads only values that are defined before it and in scope."""

    def check(block: Block, scope: frozenset[str]) -> bool:
        defined = set(scope) | {value.name for value in block.params}
        for line in block.lines:
            if not all(value.name in defined for value in line.inputs):
                return False
            inner = frozenset() if line.kind in CLOSED else frozenset(defined)
            if not all(check(body, inner) for body in line.blocks):
                return False
            defined |= {value.name for value in line.outputs}
        return all(value.name in defined for value in block.results)

    return check(program.block, frozenset())


CLOSED = ("fragment", "custom_jvp", "custom_vjp")  # their blocks read only their params


def contains(block: Block, kind: str) -> bool:
    """True if a block or one nested in it has a line of this kind."""
    return any(line.kind == kind or any(contains(b, kind) for b in line.blocks) for line in block.lines)


def depends(lines: Sequence[Line], source: Value, result: Value) -> bool:
    """True if `result` may depend on `source`."""
    reached = {source}
    for line in lines:
        if reached & set(line.inputs):
            inside = line.blocks[0] if line.kind == "fragment" else None
            if inside is None:
                reached |= set(line.outputs)
                continue
            pairs = dict(zip(inside.params, line.inputs, strict=True))
            for output, end in zip(line.outputs, inside.results, strict=True):
                if any(depends(inside.lines, p, end) for p, read in pairs.items() if read in reached):
                    reached.add(output)
    return result in reached


# --- rewriting, for the shrinker ---


def map_blocks(program: Program, change: Callable[[Block], Block]) -> Program:
    """Applies `change` to each block, innermost first."""

    def rebuild(block: Block) -> Block:
        lines = [dataclasses.replace(x, blocks=tuple(map(rebuild, x.blocks))) for x in block.lines]
        return change(dataclasses.replace(block, lines=tuple(lines)))

    block = rebuild(program.block)
    count = len(program.ends)
    return dataclasses.replace(
        program, lines=block.lines, ends=block.results[:count], metrics=block.results[count:]
    )


# --- text ---


def text(program: Program) -> str:
    """The program as readable text."""
    lines = []
    for leaf in program.leaves:
        value = leaf.value
        dtype = {"f": "float", "i": "int", "b": "bool", "k": f"{program.keys} key"}[value.kind]
        what = "Python's number" if leaf.is_number else "array"
        lines.append(f"{value}: {dtype}{list(value.shape)} starts as {what} {leaf.start}")
    lines.append(f"def iterate({_joined([leaf.value for leaf in program.leaves])}):")
    lines += _block_text(program.lines, "    ")
    ends = [f"{leaf.value}={end}" for leaf, end in zip(program.leaves, program.ends, strict=True)]
    lines.append(f"    return {', '.join(ends)}; metrics: {_joined(program.metrics) or 'none'}")
    return "\n".join(lines)


def _joined(values: Any) -> str:
    return ", ".join(map(str, values))


def _block_text(lines: tuple[Line, ...], indent: str) -> Iterator[str]:
    for line in lines:
        outputs = f"{_joined(line.outputs)} = " if line.outputs else ""
        if line.kind in ("op", "effect"):
            yield f"{indent}{outputs}{line.name}.{line.number}({_joined(line.inputs)})"
            continue
        name = f"{line.role} fragment {line.name}" if line.kind == "fragment" else line.kind
        extra = "".join(f", {option}" for option in line.options if option not in ((), ""))
        number = f" x{line.number}" if line.number else ""
        yield f"{indent}{outputs}{name}{number}({_joined(line.inputs)}{extra}):"
        for k, block in enumerate(line.blocks):
            if len(line.blocks) > 1:
                yield f"{indent}  branch {k}:"
            if block.params:
                yield f"{indent}    takes {_joined(block.params)}"
            yield from _block_text(block.lines, indent + "    ")
            yield f"{indent}    gives {_joined(block.results)}"
