"""What staleness means, in plain Python: one iteration with two versions of what some groups wait for.

Groups are those of the policy. A group waits if it has a fragment of role `actor`. Where its code reads,
through code between fragments or unchanged, a leaf of the state whose next value another group (partly)
makes by other fragments than environments, it reads that leaf as it was `staleness` iterations ago.
Everything else reads the newest: other groups, metrics, the state. What a fragment makes has one version;
what it hands on is what it was. A fragment within another reads what that one reads, but its group the newest
of what it makes itself. Loops are unrolled, and taking the row of a trip is code as any other.

Here every value between lines is `Versions`: the newest, and what other code sees instead. A value that is
handed on is the same object.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fdg.jax_internals import internal
from tests.oracle.interpret import Host, Interpreter, counter, metrics_of, rows_of
from tests.oracle.program import Block, Line, Program, walk

Label = tuple[str, Any]  # ("leaf", position), ("made", group), or of an environment ("stepped", group)
Labels = frozenset[Label]
Chain = tuple[str, ...]  # groups of the fragments around some code, from the outermost; () between fragments


class UnclearError(Exception):
    """A program of which the rules above do not say what its numbers are."""


# --- which leaves are delayed for whom ---


@dataclasses.dataclass
class _Reads:
    """Follows where values come from; `read` collects the leaves that code reads."""

    assignment: Mapping[str, str]
    inside: list[str] = dataclasses.field(default_factory=list)  # the roles of the fragments around
    read: dict[Chain, set[int]] = dataclasses.field(default_factory=dict)
    choices: set[Label] = dataclasses.field(default_factory=set)

    def block(
        self, block: Block, arguments: Sequence[Labels], around: Mapping[str, Labels], chain: Chain
    ) -> list[Labels]:
        found = {**around, **{v.name: x for v, x in zip(block.params, arguments, strict=True)}}
        for line in block.lines:
            results = self.line(line, [found[v.name] for v in line.reads], found, chain)
            found |= {v.name: x for v, x in zip(line.makes, results, strict=True)}
        return [found[v.name] for v in block.results]

    def line(
        self, line: Line, reads: list[Labels], around: Mapping[str, Labels], chain: Chain
    ) -> list[Labels]:
        if line.kind == "fragment":
            self.inside.append(line.role)
            results = self.block(line.blocks[0], reads, {}, (*chain, self.assignment[line.name]))
            self.inside.pop()
            return results
        if line.kind in ("op", "effect"):
            return [self.made(reads, chain)] * len(line.makes)
        if line.kind == "grad":
            self.inside += [one.role for one in _differentiated(line)]
            made = self.made(reads, (*chain, *(self.assignment[one.name] for one in _differentiated(line))))
            del self.inside[len(chain) :]
            return [self.product(chain) if chain else made]  # whose code scales it
        if line.kind == "scan":
            return self.loop(line.blocks[0], [], reads, line.options[0], line.number, around, chain)
        if line.kind == "fori":
            return self.loop(line.blocks[0], [frozenset()], reads, len(reads), line.number, around, chain)
        if line.kind == "while":
            self.choices |= reads[0]
            ends = self.loop(line.blocks[0], [], reads[1:], len(reads) - 1, None, around, chain)
            return [a | b for a, b in zip(reads[1:], ends, strict=True)]
        if line.kind == "cond":
            self.choices |= reads[0]
            branches = [self.block(block, [], around, chain) for block in line.blocks]
            return [frozenset().union(*ends) for ends in zip(*branches, strict=True)]
        inner_scope = {} if line.kind == "vmap" else around
        return self.block(line.blocks[0], reads, inner_scope, chain)

    def loop(
        self,
        block: Block,
        first: list[Labels],
        reads: list[Labels],
        carried: int,
        trips: int | None,
        around: Mapping[str, Labels],
        chain: Chain,
    ) -> list[Labels]:
        """Labels of its results; of so many trips, or of any number."""
        carry, rows = list(reads[:carried]), [self.made([x], chain) for x in reads[carried:]]
        if trips is not None:
            of_trips = []
            for _ in range(trips):
                of_trips.append(self.block(block, [*first, *carry, *rows], around, chain))
                carry = of_trips[-1][:carried]
            return [*carry, *(self.made(x, chain) for x in list(zip(*of_trips, strict=True))[carried:])]
        while True:
            ends = self.block(block, [*first, *carry, *rows], around, chain)
            grown = [a | b for a, b in zip(carry, ends, strict=False)]
            if grown == carry:
                return ends
            carry = grown

    def made(self, reads: Sequence[Labels], chain: Chain) -> Labels:
        labels: Labels = frozenset().union(*reads)
        if not chain:
            return labels
        self.read.setdefault(chain, set()).update(where for what, where in labels if what == "leaf")
        return self.product(chain)

    def product(self, chain: Chain) -> Labels:
        """What the innermost fragment makes."""
        return frozenset([("stepped" if self.inside[-1] == "environment" else "made", chain[-1])])


def _differentiated(line: Line) -> list[Line]:
    """The only fragment that a gradient differentiates, if any: it reads what the gradient reads."""
    inner = [x for x in walk(line.blocks[0].lines) if x.kind == "fragment"]
    if inner and (len(inner) > 1 or len(line.blocks[0].lines) > 1):
        raise UnclearError("a gradient of several fragments, or of code between them")
    return inner


def delayed_leaves(program: Program, assignment: Mapping[str, str]) -> dict[str, set[int]]:
    """For each waiting group, the positions of the leaves that it reads late.

    Args:
      assignment: the group of each fragment, by name.
    """
    late = old_leaves(program, assignment)
    roles = {line.name: line.role for line in walk(program.lines) if line.kind == "fragment"}
    waiting = {assignment[name] for name, role in roles.items() if role == "actor"}
    return {group: late.get((group,), set()) for group in waiting}


def old_leaves(program: Program, assignment: Mapping[str, str]) -> dict[Chain, set[int]]:
    """The positions of the leaves that code reads late, by the fragments around it."""
    roles = {line.name: line.role for line in walk(program.lines) if line.kind == "fragment"}
    waiting = {assignment[name] for name, role in roles.items() if role == "actor"}
    found = _Reads(assignment)
    starts: list[Labels] = [frozenset([("leaf", i)]) for i in range(len(program.leaves))]
    ends = found.block(program.block, starts, {}, ())[: len(starts)]
    makers = [{where for what, where in end if what != "leaf"} for end in ends]
    awaited = [{where for what, where in end if what == "made"} for end in ends]

    def waits(group: str, i: int) -> bool:
        return group in waiting and bool(awaited[i] - {group})

    def is_late(chain: Chain, i: int) -> bool:
        outermost, *others = chain
        return waits(outermost, i) and not any(g in makers[i] and not waits(g, i) for g in others)

    delayed = {chain: {i for i in leaves if is_late(chain, i)} for chain, leaves in found.read.items()}
    late = {("leaf", i) for leaves in delayed.values() for i in leaves}
    if any(what != "leaf" or (what, where) in late for what, where in found.choices):
        raise UnclearError("a choice that hangs on what a fragment makes, or on what is late")
    return delayed


# --- one iteration ---


class Versions:
    """A value as it is, and as code sees it that reads an older one."""

    def __init__(self, plain: Any, old: Mapping[Chain, Any]):
        self.plain, self.old = plain, dict(old)

    def seen_by(self, chain: Chain) -> Any:
        return self.old.get(chain, self.plain)


class _Iteration:
    """Runs lines on versions; `chain` is whose code it is."""

    def __init__(self, assignment: Mapping[str, str], host: Host):
        self.assignment, self.arrays = assignment, Interpreter(host)

    def block(
        self, block: Block, arguments: Sequence[Versions], around: Mapping[str, Versions], chain: Chain
    ) -> list[Versions]:
        found = {**around, **{v.name: x for v, x in zip(block.params, arguments, strict=True)}}
        for line in block.lines:
            results = self.line(line, [found[v.name] for v in line.reads], found, chain)
            found |= {v.name: x for v, x in zip(line.makes, results, strict=True)}
        return [found[v.name] for v in block.results]

    def line(
        self, line: Line, reads: list[Versions], around: Mapping[str, Versions], chain: Chain
    ) -> Sequence[Versions]:
        if line.kind == "fragment":
            return self.block(line.blocks[0], reads, {}, (*chain, self.assignment[line.name]))
        if line.kind == "grad":
            inner = (*chain, *(self.assignment[one.name] for one in _differentiated(line)))
            return self.on_arrays(lambda x: self.arrays.line(line, x, {}), reads, inner)
        if line.kind in ("op", "effect"):
            if line.kind == "effect" and not chain:
                raise UnclearError("an effect between fragments")
            return self.on_arrays(lambda x: self.arrays.line(line, x, {}), reads, chain)
        if line.kind == "scan":
            return self.scan(line, reads, around, chain)
        if line.kind == "fori":
            weak = [_is_weak(x.plain) for x in reads]
            for t in range(line.number):
                trip = Versions(counter(jnp.asarray(t)), {})
                reads = self.block(line.blocks[0], [trip, *_typed(reads, weak)], around, chain)
            return reads
        if line.kind == "while":
            return self.while_(line, reads, around, chain)
        if line.kind == "cond":
            return self.cond(line, reads, around, chain)
        if line.kind == "vmap":
            return self.vmap(line, reads, chain)
        return self.block(line.blocks[0], reads, around, chain)

    def on_arrays(
        self, function: Callable[[list[Any]], Sequence[Any]], reads: Sequence[Versions], chain: Chain
    ) -> list[Versions]:
        """Code between fragments is evaluated for each version; a group's own on what that group sees."""
        plain = function([x.seen_by(chain) for x in reads])
        chains = set() if chain else {c for x in reads for c in x.old}
        old = {c: function([x.seen_by(c) for x in reads]) for c in chains}
        return [Versions(x, {c: old[c][k] for c in chains}) for k, x in enumerate(plain)]

    def one(self, function: Callable, *reads: Versions, chain: Chain) -> Versions:
        return self.on_arrays(lambda x: [function(*x)], reads, chain)[0]

    def rows(self, x: Versions, count: int, stacked: bool, chain: Chain) -> list[Versions]:
        every = self.one(lambda x: rows_of(x, count), x, chain=chain) if stacked else x
        return [self.one(lambda x, t=t: x[t], every, chain=chain) for t in range(count)]

    def scan(
        self, line: Line, reads: list[Versions], around: Mapping[str, Versions], chain: Chain
    ) -> list[Versions]:
        (block,), (carried, direction, stacked) = line.blocks, line.options
        carry, operands = reads[:carried], reads[carried:]
        weak = [_is_weak(x.plain) for x in carry]
        rows = [self.rows(x, line.number, s, chain) for x, s in zip(operands, stacked, strict=True)]
        trips = range(line.number)
        made: dict[int, list[Versions]] = {}
        for t in reversed(trips) if direction == "reverse" else trips:
            results = self.block(block, [*_typed(carry, weak), *[row[t] for row in rows]], around, chain)
            carry, made[t] = results[:carried], results[carried:]
        stacks = [
            self.one(lambda *x: jnp.stack(x), *[made[t][k] for t in trips], chain=chain)
            for k in range(len(line.makes) - carried)
        ]
        return [*carry, *stacks]

    def while_(
        self, line: Line, reads: list[Versions], around: Mapping[str, Versions], chain: Chain
    ) -> list[Versions]:
        """Without fragments inside, it is one operation."""
        block = line.blocks[0]
        if any(inner.kind == "fragment" for inner in walk(block.lines)):
            raise UnclearError("fragments in a while loop")
        names = list(around)
        made = self.on_arrays(
            lambda x: self.arrays.line(line, x[: len(reads)], dict(zip(names, x[len(reads) :], strict=True))),
            [*reads, *around.values()],
            chain,
        )
        if not chain:
            return made
        outside = {*block.params, *(v for v in block.results if v.name in around)}
        for k, (param, result) in enumerate(zip(block.params, block.results, strict=True)):
            if param == result:
                made[k] = reads[1 + k]
            elif result in outside:
                raise UnclearError("a loop of a fragment hands on something else")
        return made

    def cond(
        self, line: Line, reads: list[Versions], around: Mapping[str, Versions], chain: Chain
    ) -> list[Versions]:
        if any(inner.kind == "effect" for block in line.blocks for inner in walk(block.lines)):
            raise UnclearError("an effect in a branch, for all branches are run here")
        outside = {id(x) for x in around.values()}
        branches = [self.block(block, [], around, chain) for block in line.blocks]
        results = []
        for ends in zip(*branches, strict=True):
            if all(x is ends[0] for x in ends):
                results.append(ends[0])
                continue
            passed = [id(x) in outside for x in ends]
            if chain and any(passed):
                raise UnclearError("one branch of a fragment hands on, another does not")
            # Between fragments both versions of each branch are there; the choice is the same for both.
            results.append(self.one(_choose, reads[0], *ends, chain=chain))
        return results

    def vmap(self, line: Line, reads: list[Versions], chain: Chain) -> list[Versions]:
        mapped, out_axis, _ = line.options
        agents = [self.rows(x, 2, True, chain) if m else [x, x] for x, m in zip(reads, mapped, strict=True)]
        params = set(line.blocks[0].params)
        if chain and params & set(line.blocks[0].results):
            raise UnclearError("a mapped part of a fragment hands on")
        made = [self.block(line.blocks[0], [pair[k] for pair in agents], {}, chain) for k in range(2)]
        return [
            self.one(lambda a, b: jnp.stack([a, b], out_axis), *pair, chain=chain)
            for pair in zip(*made, strict=True)
        ]


def _is_weak(x: Any) -> bool:
    return getattr(jax.typeof(x), "weak_type", False)


def _typed(carry: Sequence[Versions], weak: Sequence[bool]) -> list[Versions]:
    """A trip's carry as weakly typed as the first, as in JAX's loops."""

    def one(x: Versions, weak: bool) -> Versions:
        if _is_weak(x.plain) == weak:
            return x
        convert = internal("lax.lax", "_convert_element_type", "give an array a weak type")
        cast = lambda y: convert(y, x.plain.dtype, weak_type=weak)  # noqa: E731
        return Versions(cast(x.plain), {chain: cast(y) for chain, y in x.old.items()})

    return [one(x, w) for x, w in zip(carry, weak, strict=True)]


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
    delayed = old_leaves(program, assignment)

    def iterate(new: list[Any], old: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        leaves = [
            Versions(x, {chain: old[i] for chain, late in delayed.items() if i in late})
            for i, x in enumerate(new)
        ]
        results = _Iteration(assignment, host).block(program.block, leaves, {}, ())
        arrays = [x.plain for x in results]
        return arrays[: len(new)], metrics_of(arrays[len(new) :])

    step, states, metrics = jax.jit(iterate), [state], []
    for t in range(iterations):
        after, one = step(states[t], states[max(0, t - staleness)])
        states.append(after)
        metrics.append(one)
    return states[-1], jax.tree.map(lambda *m: jnp.stack(m), *metrics)
