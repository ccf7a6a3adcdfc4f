"""Checks in a program's optimised HLO that each device waits in one collective at a time.

XLA's CPU backend runs independent operations concurrently, except collectives, which run in program order. A
collective that waits for other devices holds its thread. Operations after a loop may run during it. If every
operation with collectives depends on the loop with collectives before it, a device waits in one place, and as
many threads as devices are enough: a device that does not wait has a thread left. Otherwise a device may hold
the threads on which another one would arrive (docs/decisions/069-a-thread-a-host-device.md).

Instructions depend on those that wrote the elements that they read. Elements of a loop's state that the loop
never writes exist before it ends:

    sum = all-reduce(x)
    state = while((sum, y))             # replaces element 1, with collectives
    a = all-reduce(element 1 of state)  # after the loop
    b = all-reduce(element 0 of state)  # this is `sum`: may run during the loop
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fdg.running.hlo import KINDS, called_computations, computations

_ALIASES = ("tuple", "get-tuple-element", "bitcast", "opt-barrier", "parameter", "constant")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(")


class _Written(NamedTuple):
    """An element of an instruction's result, or of a parameter."""

    name: str
    element: int


@dataclasses.dataclass(frozen=True)
class _Instruction:
    """One line of a computation.

    Attributes:
      operands: names.
      called: computations that it runs; of a loop, its condition and its body.
      body: the computation of a loop's next state.
      number: of a parameter, or of an element of a tuple.
      size: number of elements of its result.
    """

    name: str
    operation: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    body: str
    number: int
    size: int
    is_root: bool


def is_in_order(engine: Any) -> bool:
    """True if devices wait in one collective at a time in each compiled program that promises it."""
    return all(has_ordered_collectives(p.hlo()) for p in engine.programs if engine.is_in_order())


def has_ordered_collectives(text: str) -> bool:
    """True if each device is known to wait for others in one place at a time.

    Args:
      text: its optimised HLO (`Program.hlo()`), instructions in the order of their schedule.

    Returns:
      False also where this cannot be determined, such as for collectives with separate start and done.
    """
    return _Reader({name: tuple(_instructions(lines)) for name, lines in computations(text)}).is_ordered()


def _instructions(lines: Sequence[str]) -> Iterator[_Instruction]:
    for line in lines[1:]:
        line = re.sub(r"/\*.*?\*/", "", line)
        if found := _INSTRUCTION.match(line):
            root, name, shape, operation = found.groups()
            within = _until_closed(line[found.end() :])
            number = re.search(r"index=(\d+)", line) if operation == "get-tuple-element" else None
            given = number[1] if number else within if operation == "parameter" else "0"
            body = re.search(r"body=%?([\w.\-]+)", line)
            yield _Instruction(
                name,
                operation,
                tuple(re.findall(r"%([\w.\-]+)", within)),
                tuple(called_computations(line)),
                body[1] if body else "",
                int(given),
                len(re.sub(r"\[[^]]*\]|\{[^}]*\}", "", shape).split(",")),
                root is not None,
            )


def _until_closed(rest: str) -> str:
    """Returns the text before the unmatched closing parenthesis.
    >>> _until_closed("%a, (%b)), index=1")
    '%a, (%b)'
    """
    depth = 1
    for i, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if not depth:
            return rest[:i]
    return rest


class _Reader:
    """Follows the dependencies of instructions in each computation of a program."""

    def __init__(self, program: dict[str, tuple[_Instruction, ...]]):
        self.program = program
        self.named = {name: {i.name: i for i in body} for name, body in program.items()}
        self.roots = {name: i.name for name, body in program.items() for i in body if i.is_root}
        # Called repeatedly, for thousands of lines.
        self.has_collectives = functools.cache(self._has_collectives)
        self.writer = functools.cache(self._writer)
        self.read_inside = functools.cache(self._read_inside)

    def is_ordered(self) -> bool:
        """True if everything with collectives depends on the loop or branch with collectives before it."""
        for name, body in self.program.items():
            collectives = [i for i in body if self.has_collectives(i)]
            if any(i.operation.endswith(("-start", "-done")) for i in collectives):
                return False
            for first, second in itertools.pairwise(collectives):
                if first.operation not in KINDS and not self._needs(name, second, first.name):
                    return False
        return True

    def _has_collectives(self, instruction: _Instruction) -> bool:
        """True if it is a collective, or runs one."""
        if re.sub("-(start|done)$", "", instruction.operation) in KINDS:
            return True
        return any(self.has_collectives(i) for name in instruction.called for i in self.program.get(name, ()))

    def _needs(self, computation: str, second: _Instruction, first: str) -> bool:
        seen: set[str] = set()
        todo = [second]
        while todo:
            for name, _ in self._reads(computation, todo.pop()):
                if name == first:
                    return True
                if name not in seen:
                    seen.add(name)
                    todo.append(self.named[computation][name])
        return False

    def _reads(self, computation: str, instruction: _Instruction) -> set[_Written]:
        """Elements that an instruction reads or overwrites; none for those that only rename elements."""
        operands, called = instruction.operands, instruction.called
        if instruction.operation in _ALIASES:
            return set()
        if instruction.operation == "while":
            replaced = {e for e in range(instruction.size) if not self._passes_through(instruction.body, e)}
            wanted = replaced.union(*(self.read_inside(name, 0) for name in called))
            pairs = [(operands[0], e) for e in wanted]
        elif instruction.operation == "conditional":
            given = zip(operands[1:], called, strict=True)
            pairs = [(operand, e) for operand, name in given for e in self.read_inside(name, 0)]
            pairs.append((operands[0], 0))
        elif instruction.operation == "call":
            pairs = [(o, e) for p, o in enumerate(operands) for e in self.read_inside(called[0], p)]
        else:
            pairs = [(operand, 0) for operand in operands]
        found = {self.writer(computation, operand, e) for operand, e in pairs}
        return {written for written in found if written is not None}

    def _read_inside(self, computation: str, parameter: int) -> frozenset[int]:
        """The elements of a parameter that a computation does more with than pass them through."""
        body, named = self.program.get(computation, ()), self.named.get(computation, {})
        found = {written for instruction in body for written in self._reads(computation, instruction)}
        return frozenset(
            element
            for name, element in found
            if named[name].operation == "parameter" and named[name].number == parameter
        )

    def _passes_through(self, body: str, element: int) -> bool:
        """True if a loop's body leaves an element of the state unchanged."""
        written = self.writer(body, self.roots[body], element)
        if written is None:
            return True  # the writer is unknown, so it may not be this loop
        return self.named[body][written.name].operation == "parameter" and written.element == element

    def _writer(self, computation: str, name: str, element: int) -> _Written | None:
        """The instruction that wrote an element; None where a branch only passes it through."""
        instruction = self.named[computation][name]
        operation, operands = instruction.operation, instruction.operands
        if operation == "tuple":
            return self.writer(computation, operands[element], 0) if element < len(operands) else None
        if operation == "get-tuple-element":
            return self.writer(computation, operands[0], instruction.number)
        if operation in ("bitcast", "opt-barrier"):
            return self.writer(computation, operands[0], element)
        if operation == "while" and self._passes_through(instruction.body, element):
            return self.writer(computation, operands[0], element)
        if operation in ("call", "conditional"):
            # One branch that writes is enough: all branches write to one buffer, as one operation.
            within = [
                (called, self.writer(called, self.roots[called], element)) for called in instruction.called
            ]
            if not any(w and self.named[called][w.name].operation != "parameter" for called, w in within):
                return None
        return _Written(name, element)
