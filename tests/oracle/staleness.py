"""What staleness means, in plain Python: one iteration with two versions of what some groups wait for.

Groups are those of the policy. A group waits if it has a fragment of role `actor`. Where its code reads,
through code between fragments or unchanged, a leaf of the state whose next value another group (partly)
makes, it reads that leaf as it was `staleness` iterations ago. Everything else reads the newest: other
groups, metrics, the state. What a fragment makes has one version; what it hands on is what it was. Loops are
unrolled.

Here every value between lines is `Versions`: the newest, and what waiting groups see instead. A value that is
handed on is the same object.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tests.oracle.interpret import Host, Interpreter, metrics_of, rows_of
from tests.oracle.program import Block, Line, Program, walk

Label = tuple[str, Any]  # ("leaf", position) or ("made", group)
Labels = frozenset[Label]


class UnclearError(Exception):
    """A program of which the rules above do not say what its numbers are."""


# --- which leaves are delayed for whom ---


@dataclasses.dataclass
class _Reads:
    """Follows where values come from; `read` collects the leaves that each group's code reads."""

    assignment: Mapping[str, str]
    read: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    choices: set[Label] = dataclasses.field(default_factory=set)

    def block(
        self, block: Block, arguments: Sequence[Labels], around: Mapping[str, Labels], group: str | None
    ) -> list[Labels]:
        found = {**around, **{v.name: x for v, x in zip(block.params, arguments, strict=True)}}
        for line in block.lines:
            results = self.line(line, [found[v.name] for v in line.reads], found, group)
            found |= {v.name: x for v, x in zip(line.makes, results, strict=True)}
        return [found[v.name] for v in block.results]

    def line(
        self, line: Line, reads: list[Labels], around: Mapping[str, Labels], group: str | None
    ) -> list[Labels]:
        if line.kind == "fragment":
            return self.block(line.blocks[0], reads, {}, self.assignment[line.name])
        if line.kind in ("op", "effect"):
            return [self.made(reads, group)] * len(line.makes)
        if line.kind == "grad":
            made = self.made(reads, _group_of_gradient(line, self.assignment, group))
            return [made if group is None else frozenset([("made", group)])]  # whose code scales it
        if line.kind == "scan":
            return self.loop(line.blocks[0], [], reads, line.options[0], line.number, around, group)
        if line.kind == "fori":
            return self.loop(line.blocks[0], [frozenset()], reads, len(reads), line.number, around, group)
        if line.kind == "while":
            self.choices |= reads[0]
            ends = self.loop(line.blocks[0], [], reads[1:], len(reads) - 1, None, around, group)
            return [a | b for a, b in zip(reads[1:], ends, strict=True)]
        if line.kind == "cond":
            self.choices |= reads[0]
            branches = [self.block(block, [], around, group) for block in line.blocks]
            return [frozenset().union(*ends) for ends in zip(*branches, strict=True)]
        inner_scope = {} if line.kind == "vmap" else around
        return self.block(line.blocks[0], reads, inner_scope, group)

    def loop(
        self,
        block: Block,
        first: list[Labels],
        reads: list[Labels],
        carried: int,
        trips: int | None,
        around: Mapping[str, Labels],
        group: str | None,
    ) -> list[Labels]:
        """Labels of its results; of so many trips, or of any number."""
        carry, rows = list(reads[:carried]), list(reads[carried:])
        if trips is not None:
            of_trips = []
            for _ in range(trips):
                of_trips.append(self.block(block, [*first, *carry, *rows], around, group))
                carry = of_trips[-1][:carried]
            return [*carry, *(frozenset().union(*x) for x in list(zip(*of_trips, strict=True))[carried:])]
        while True:
            ends = self.block(block, [*first, *carry, *rows], around, group)
            grown = [a | b for a, b in zip(carry, ends, strict=False)]
            if grown == carry:
                return ends
            carry = grown

    def made(self, reads: Sequence[Labels], group: str | None) -> Labels:
        labels: Labels = frozenset().union(*reads)
        if group is None:
            return labels
        self.read.setdefault(group, set()).update(where for what, where in labels if what == "leaf")
        return frozenset([("made", group)])


def _group_of_gradient(line: Line, assignment: Mapping[str, str], group: str | None) -> str | None:
    """Of the only fragment that is differentiated."""
    inner = [x for x in walk(line.blocks[0].lines) if x.kind == "fragment"]
    if not inner:
        return group
    if len(inner) > 1 or len(line.blocks[0].lines) > 1:
        raise UnclearError("a gradient of several fragments, or of code between them")
    return assignment[inner[0].name]


def delayed_leaves(program: Program, assignment: Mapping[str, str]) -> dict[str, set[int]]:
    """For each waiting group, the positions of the leaves that it reads late.

    Args:
      assignment: the group of each fragment, by name.
    """
    roles = {line.name: line.role for line in walk(program.lines) if line.kind == "fragment"}
    waiting = {assignment[name] for name, role in roles.items() if role == "actor"}
    found = _Reads(assignment)
    starts: list[Labels] = [frozenset([("leaf", i)]) for i in range(len(program.leaves))]
    ends = found.block(program.block, starts, {}, None)[: len(starts)]
    delayed: dict[str, set[int]] = {}
    for group in waiting:
        others = [i for i, end in enumerate(ends) if any(w == "made" and g != group for w, g in end)]
        delayed[group] = set(others) & found.read.get(group, set())
    late = {("leaf", i) for leaves in delayed.values() for i in leaves}
    if any(what == "made" or (what, where) in late for what, where in found.choices):
        raise UnclearError("a choice that hangs on what a fragment makes, or on what is late")
    return delayed


# --- one iteration ---


class Versions:
    """A value as it is, and as waiting groups see it."""

    def __init__(self, plain: Any, old: Mapping[str, Any]):
        self.plain, self.old = plain, dict(old)

    def seen_by(self, group: str | None) -> Any:
        return self.old.get(group, self.plain) if group is not None else self.plain


class _Iteration:
    """Runs lines on versions; `group` is whose code it is, None between fragments."""

    def __init__(self, assignment: Mapping[str, str], host: Host):
        self.assignment, self.arrays = assignment, Interpreter(host)

    def block(
        self, block: Block, arguments: Sequence[Versions], around: Mapping[str, Versions], group: str | None
    ) -> list[Versions]:
        found = {**around, **{v.name: x for v, x in zip(block.params, arguments, strict=True)}}
        for line in block.lines:
            results = self.line(line, [found[v.name] for v in line.reads], found, group)
            found |= {v.name: x for v, x in zip(line.makes, results, strict=True)}
        return [found[v.name] for v in block.results]

    def line(
        self, line: Line, reads: list[Versions], around: Mapping[str, Versions], group: str | None
    ) -> Sequence[Versions]:
        if line.kind == "fragment":
            return self.block(line.blocks[0], reads, {}, self.assignment[line.name])
        if line.kind == "grad":
            inner = _group_of_gradient(line, self.assignment, group)
            return self.on_arrays(lambda x: self.arrays.line(line, x, {}), reads, inner)
        if line.kind in ("op", "effect"):
            if line.kind == "effect" and group is None:
                raise UnclearError("an effect between fragments")
            return self.on_arrays(lambda x: self.arrays.line(line, x, {}), reads, group)
        if line.kind == "scan":
            return self.scan(line, reads, around, group)
        if line.kind == "fori":
            for t in range(line.number):
                reads = self.block(line.blocks[0], [Versions(jnp.int32(t), {}), *reads], around, group)
            return reads
        if line.kind == "while":
            return self.while_(line, reads, around, group)
        if line.kind == "cond":
            return self.cond(line, reads, around, group)
        if line.kind == "vmap":
            return self.vmap(line, reads, group)
        return self.block(line.blocks[0], reads, around, group)

    def on_arrays(
        self, function: Callable[[list[Any]], Sequence[Any]], reads: Sequence[Versions], group: str | None
    ) -> list[Versions]:
        """Code between fragments is evaluated for each version; a group's own on what that group sees."""
        plain = function([x.seen_by(group) for x in reads])
        groups = set() if group is not None else {g for x in reads for g in x.old}
        old = {g: function([x.seen_by(g) for x in reads]) for g in groups}
        return [Versions(x, {g: old[g][k] for g in groups}) for k, x in enumerate(plain)]

    def one(self, function: Callable, *reads: Versions, group: str | None) -> Versions:
        return self.on_arrays(lambda x: [function(*x)], reads, group)[0]

    def rows(self, x: Versions, count: int, stacked: bool, group: str | None) -> list[Versions]:
        every = self.one(lambda x: rows_of(x, count), x, group=group) if stacked else x
        return [self.one(lambda x, t=t: x[t], every, group=group) for t in range(count)]

    def scan(
        self, line: Line, reads: list[Versions], around: Mapping[str, Versions], group: str | None
    ) -> list[Versions]:
        (block,), (carried, direction, stacked) = line.blocks, line.options
        carry, operands = reads[:carried], reads[carried:]
        rows = [self.rows(x, line.number, s, group) for x, s in zip(operands, stacked, strict=True)]
        trips = range(line.number)
        made: dict[int, list[Versions]] = {}
        for t in reversed(trips) if direction == "reverse" else trips:
            results = self.block(block, [*carry, *[row[t] for row in rows]], around, group)
            carry, made[t] = results[:carried], results[carried:]
        stacks = [
            self.one(lambda *x: jnp.stack(x), *[made[t][k] for t in trips], group=group)
            for k in range(len(line.makes) - carried)
        ]
        return [*carry, *stacks]

    def while_(
        self, line: Line, reads: list[Versions], around: Mapping[str, Versions], group: str | None
    ) -> list[Versions]:
        """Without fragments inside, it is one operation."""
        block = line.blocks[0]
        if any(inner.kind == "fragment" for inner in walk(block.lines)):
            raise UnclearError("fragments in a while loop")
        names = list(around)
        made = self.on_arrays(
            lambda x: self.arrays.line(line, x[: len(reads)], dict(zip(names, x[len(reads) :], strict=True))),
            [*reads, *around.values()],
            group,
        )
        if group is None:
            return made
        outside = {*block.params, *(v for v in block.results if v.name in around)}
        for k, (param, result) in enumerate(zip(block.params, block.results, strict=True)):
            if param == result:
                made[k] = reads[1 + k]
            elif result in outside:
                raise UnclearError("a loop of a fragment hands on something else")
        return made

    def cond(
        self, line: Line, reads: list[Versions], around: Mapping[str, Versions], group: str | None
    ) -> list[Versions]:
        if any(inner.kind == "effect" for block in line.blocks for inner in walk(block.lines)):
            raise UnclearError("an effect in a branch, for all branches are run here")
        outside = {id(x) for x in around.values()}
        branches = [self.block(block, [], around, group) for block in line.blocks]
        results = []
        for ends in zip(*branches, strict=True):
            if all(x is ends[0] for x in ends):
                results.append(ends[0])
                continue
            passed = [id(x) in outside for x in ends]
            if group is not None and any(passed):
                raise UnclearError("one branch of a fragment hands on, another does not")
            # Between fragments both versions of each branch are there; the choice is the same for both.
            results.append(self.one(_choose, reads[0], *ends, group=group))
        return results

    def vmap(self, line: Line, reads: list[Versions], group: str | None) -> list[Versions]:
        mapped, out_axis = line.options
        agents = [self.rows(x, 2, True, group) if m else [x, x] for x, m in zip(reads, mapped, strict=True)]
        params = set(line.blocks[0].params)
        if group is not None and params & set(line.blocks[0].results):
            raise UnclearError("a mapped part of a fragment hands on")
        made = [self.block(line.blocks[0], [pair[k] for pair in agents], {}, group) for k in range(2)]
        return [
            self.one(lambda a, b: jnp.stack([a, b], out_axis), *pair, group=group)
            for pair in zip(*made, strict=True)
        ]


def _choose(number: Any, *branches: Any) -> Any:
    if len(branches) == 2:
        return jax.lax.select(number % 2 == 0, *branches)
    # `select_n` knows no keys.
    chosen = branches[-1]
    for k, branch in enumerate(branches[:-1]):
        chosen = jax.lax.select(number % len(branches) == k, branch, chosen)
    return chosen


def stale_run(
    program: Program,
    state: list[Any],
    iterations: int,
    assignment: Mapping[str, str],
    staleness: int,
    host: Host,
) -> tuple[list[Any], dict[str, Any]]:
    """(state, metrics) of so many iterations under staleness.

    Raises:
      UnclearError: the rules do not cover this program.
    """
    delayed = delayed_leaves(program, assignment)

    def iterate(new: list[Any], old: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        leaves = [
            Versions(x, {group: old[i] for group, late in delayed.items() if i in late})
            for i, x in enumerate(new)
        ]
        results = _Iteration(assignment, host).block(program.block, leaves, {}, None)
        arrays = [x.plain for x in results]
        return arrays[: len(new)], metrics_of(arrays[len(new) :])

    step, states, metrics = jax.jit(iterate), [state], []
    for t in range(iterations):
        after, one = step(states[t], states[max(0, t - staleness)])
        states.append(after)
        metrics.append(one)
    return states[-1], jax.tree.map(lambda *m: jnp.stack(m), *metrics)
