"""Programs as data: typed values, lines that read and make them, blocks of lines; printed like Python."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

BATCH = 12  # no other axis is as long, so a shape tells where its batch is


@dataclasses.dataclass(frozen=True)
class Value:
    """A name for an array. `kind`: f(loat), i(nt), b(ool) or k(ey)."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def axis(self) -> int | None:
        """Where its batch is."""
        return self.shape.index(BATCH) if BATCH in self.shape else None

    @property
    def type(self) -> tuple[str, tuple[int, ...]]:
        """What another value needs to stand in for it."""
        return self.kind, self.shape

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Block:
    """Lines over `params` and over what stands around them; a fragment's sees its params alone."""

    params: tuple[Value, ...]
    lines: tuple["Line", ...]
    results: tuple[Value, ...]


@dataclasses.dataclass(frozen=True)
class Line:
    """One step.

    Attributes:
      kind: "op" (of `operations`), "fragment" or a structure of `interpret`.
      name: of the operation; of a fragment, with its `role`.
      number: the operation's variant, or a loop's trips.
      blocks: a body, or branches.
      options: of its kind, see `interpret`.
    """

    kind: str
    name: str
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    number: int = 0
    blocks: tuple[Block, ...] = ()
    role: str = ""
    options: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of the state. Leaves of one `start` are one array at first; a number is one of Python's."""

    value: Value
    start: int
    is_number: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """An algorithm: leaves of the state, lines, what comes next in each leaf, and what the metrics tell.

    `keys` is the implementation of its random keys.
    """

    leaves: tuple[Leaf, ...]
    lines: tuple[Line, ...]
    ends: tuple[Value, ...]
    metrics: tuple[Value, ...]
    keys: str = "threefry2x32"

    @property
    def block(self) -> Block:
        """The iteration."""
        return Block(tuple(leaf.value for leaf in self.leaves), self.lines, (*self.ends, *self.metrics))


def walk(lines: tuple[Line, ...]) -> Iterator[Line]:
    """Every line at every depth."""
    for line in lines:
        yield line
        for block in line.blocks:
            yield from walk(block.lines)


def fragments(program: Program) -> dict[str, str]:
    """The role of each fragment."""
    return {line.name: line.role for line in walk(program.lines) if line.kind == "fragment"}


def parents(lines: tuple[Line, ...], around: str | None = None) -> dict[str, str | None]:
    """The fragment around each fragment."""
    found: dict[str, str | None] = {}
    for line in lines:
        if line.kind == "fragment":
            found[line.name] = around
        for block in line.blocks:
            found |= parents(block.lines, line.name if line.kind == "fragment" else around)
    return found


def features(program: Program) -> set[str]:
    """What it is made of: names of operations, kinds of lines and how they are nested, and more."""
    found = {f"keys:{program.keys}"}

    def look(lines: tuple[Line, ...], around: tuple[str, ...]) -> None:
        for line in lines:
            what = line.name if line.kind in ("op", "effect") else line.kind
            found.add(what)
            if line.kind != "op":
                found.update(f"{outer}>{what}" for outer in around)
                found.update(f"{what}:{option}" for option in line.options if isinstance(option, str))
            for block in line.blocks:
                if line.kind == "fragment" and set(block.params) & set(block.results):
                    found.update(["hands on", *(f"{outer}>hands on" for outer in around)])
                look(block.lines, (*around, line.kind))

    look(program.lines, ())
    ends = {leaf.value: end for leaf, end in zip(program.leaves, program.ends, strict=True)}
    found.update("untouched" for leaf, end in ends.items() if leaf == end)
    found.update("swapped" for leaf, end in ends.items() if leaf != end and end in ends)
    if len({(leaf.start, leaf.value.type) for leaf in program.leaves}) < len(program.leaves):
        found.add("aliased")
    found.update("number" for leaf in program.leaves if leaf.is_number)
    return found | {f"batch on axis {leaf.value.axis}" for leaf in program.leaves}


def is_well_formed(program: Program) -> bool:
    """Whether every line reads what was made before it, and each role that matters is left."""

    def check(block: Block, around: frozenset[str]) -> bool:
        seen = set(around) | {value.name for value in block.params}
        for line in block.lines:
            if not all(value.name in seen for value in line.reads):
                return False
            inner = frozenset() if line.kind in CLOSED else frozenset(seen)
            if not all(check(body, inner) for body in line.blocks):
                return False
            seen |= {value.name for value in line.makes}
        return all(value.name in seen for value in block.results)

    return check(program.block, frozenset())


CLOSED = ("fragment", "custom_jvp", "custom_vjp")  # their blocks see nothing around them


def contains(block: Block, kind: str) -> bool:
    """Whether a line of this kind stands in a block, or in one within."""
    return any(line.kind == kind or any(contains(b, kind) for b in line.blocks) for line in block.lines)


def depends(lines: Sequence[Line], source: Value, result: Value) -> bool:
    """Whether a result comes from a value, as far as lines tell."""
    reached = {source}
    for line in lines:
        if reached & set(line.reads):
            inside = line.blocks[0] if line.kind == "fragment" else None
            if inside is None:
                reached |= set(line.makes)
                continue
            pairs = dict(zip(inside.params, line.reads, strict=True))
            for made, end in zip(line.makes, inside.results, strict=True):
                if any(depends(inside.lines, p, end) for p, read in pairs.items() if read in reached):
                    reached.add(made)
    return result in reached


# --- rewriting, for the shrinker ---


def map_blocks(program: Program, change: Callable[[Block], Block]) -> Program:
    """The program with `change(block)` for each block, innermost first."""

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
    """The program, to be read."""
    lines = []
    for leaf in program.leaves:
        value = leaf.value
        dtype = {"f": "float", "i": "int", "b": "bool", "k": f"{program.keys} key"}[value.kind]
        what = "Python's number" if leaf.is_number else "array"
        lines.append(f"{value}: {dtype}{list(value.shape)} starts as {what} {leaf.start}")
    lines.append(f"def iterate({_listed([leaf.value for leaf in program.leaves])}):")
    lines += _block_text(program.lines, "    ")
    ends = [f"{leaf.value}={end}" for leaf, end in zip(program.leaves, program.ends, strict=True)]
    lines.append(f"    return {', '.join(ends)}; metrics: {_listed(program.metrics) or 'none'}")
    return "\n".join(lines)


def _listed(values: Any) -> str:
    return ", ".join(map(str, values))


def _block_text(lines: tuple[Line, ...], indent: str) -> Iterator[str]:
    for line in lines:
        made = f"{_listed(line.makes)} = " if line.makes else ""
        if line.kind in ("op", "effect"):
            # Operations have variants, named by a number.
            yield f"{indent}{made}{line.name}.{line.number}({_listed(line.reads)})"
            continue
        what = f"{line.role} fragment {line.name}" if line.kind == "fragment" else line.kind
        extra = "".join(f", {option}" for option in line.options if option not in ((), ""))
        number = f" x{line.number}" if line.number else ""
        yield f"{indent}{made}{what}{number}({_listed(line.reads)}{extra}):"
        for k, block in enumerate(line.blocks):
            if len(line.blocks) > 1:
                yield f"{indent}  branch {k}:"
            if block.params:
                yield f"{indent}    takes {_listed(block.params)}"
            yield from _block_text(block.lines, indent + "    ")
            yield f"{indent}    gives {_listed(block.results)}"
