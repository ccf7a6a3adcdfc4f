"""Reference for staleness, in plain Python: runs an iteration with two versions of each delayed value.

An actor group is a group of the policy that has a fragment of role `actor`. Its code reads a state leaf as it
was `staleness` iterations ago if the next value of that leaf comes (partly) from another group, by fragments
that are not environments; code between fragments passes this on. Everything else reads the newest version:
other groups, metrics, the next state. Outputs of a fragment have one version, but inputs that it returns
unchanged keep theirs. A nested fragment reads what its parent reads, except that its group reads the newest
version of leaves that it produces itself. Loops are unrolled; indexing the row of a trip is ordinary code.

Every value between lines is a `Versions`: the newest version, and the versions that some code reads instead.
A value that is passed through is the same object.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fdg.jax_internals import internal
from tests.oracle.interpret import Host, Interpreter, counter, metrics_of, stack_copies
from tests.oracle.program import Block, Line, Program, walk

Label = tuple[str, Any]  # ("leaf", position), ("made", group), or from an environment ("stepped", group)
Labels = frozenset[Label]
Chain = tuple[str, ...]  # groups of the enclosing fragments, outermost first; () between fragments


class UnclearError(Exception):
    """The rules above do not define the numbers of this program."""


# --- which leaves are delayed, and for which code ---


@dataclasses.dataclass
class _LeafReads:
    """Tracks where values come from; `read` collects the leaves that code reads."""

    assignment: Mapping[str, str]
    roles_around: list[str] = dataclasses.field(default_factory=list)  # roles of the enclosing fragments
    read: dict[Chain, set[int]] = dataclasses.field(default_factory=dict)
    choices: set[Label] = dataclasses.field(default_factory=set)

    def block(
        self, block: Block, arguments: Sequence[Labels], scope: Mapping[str, Labels], chain: Chain
    ) -> list[Labels]:
        found = {**scope, **{v.name: x for v, x in zip(block.params, arguments, strict=True)}}
        for line in block.lines:
            results = self.line(line, [found[v.name] for v in line.inputs], found, chain)
            found |= {v.name: x for v, x in zip(line.outputs, results, strict=True)}
        return [found[v.name] for v in block.results]

    def line(
        self, line: Line, inputs: list[Labels], scope: Mapping[str, Labels], chain: Chain
    ) -> list[Labels]:
        if line.kind == "fragment":
            self.roles_around.append(line.role)
            results = self.block(line.blocks[0], inputs, {}, (*chain, self.assignment[line.name]))
            self.roles_around.pop()
            return results
        if line.kind in ("op", "effect"):
            return [self.join(inputs, chain)] * len(line.outputs)
        if line.kind == "grad":
            self.roles_around += [one.role for one in _differentiated(line)]
            out = self.join(inputs, (*chain, *(self.assignment[one.name] for one in _differentiated(line))))
            del self.roles_around[len(chain) :]
            return [self.product(chain) if chain else out]  # the enclosing code scales it
        if line.kind == "scan":
            return self.loop(line.blocks[0], [], inputs, line.options[0], line.number, scope, chain)
        if line.kind == "fori":
            return self.loop(line.blocks[0], [frozenset()], inputs, len(inputs), line.number, scope, chain)
        if line.kind == "while":
            self.choices |= inputs[0]
            ends = self.loop(line.blocks[0], [], inputs[1:], len(inputs) - 1, None, scope, chain)
            return [a | b for a, b in zip(inputs[1:], ends, strict=True)]
        if line.kind == "cond":
            self.choices |= inputs[0]
            branches = [self.block(block, [], scope, chain) for block in line.blocks]
            return [frozenset().union(*ends) for ends in zip(*branches, strict=True)]
        inner_scope = {} if line.kind == "vmap" else scope
        return self.block(line.blocks[0], inputs, inner_scope, chain)

    def loop(
        self,
        block: Block,
        first: list[Labels],
        inputs: list[Labels],
        carried: int,
        trips: int | None,
        scope: Mapping[str, Labels],
        chain: Chain,
    ) -> list[Labels]:
        """Labels of the results, after `trips` trips or after any number (None)."""
        carry, rows = list(inputs[:carried]), [self.join([x], chain) for x in inputs[carried:]]
        if trips is not None:
            by_trip = []
            for _ in range(trips):
                by_trip.append(self.block(block, [*first, *carry, *rows], scope, chain))
                carry = by_trip[-1][:carried]
            return [*carry, *(self.join(x, chain) for x in list(zip(*by_trip, strict=True))[carried:])]
        while True:
            ends = self.block(block, [*first, *carry, *rows], scope, chain)
            grown = [a | b for a, b in zip(carry, ends, strict=False)]
            if grown == carry:
                return ends
            carry = grown

    def join(self, inputs: Sequence[Labels], chain: Chain) -> Labels:
        labels: Labels = frozenset().union(*inputs)
        if not chain:
            return labels
        self.read.setdefault(chain, set()).update(where for what, where in labels if what == "leaf")
        return self.product(chain)

    def product(self, chain: Chain) -> Labels:
        """Labels of an output of the innermost fragment."""
        return frozenset([("stepped" if self.roles_around[-1] == "environment" else "made", chain[-1])])


def _differentiated(line: Line) -> list[Line]:
    """The only fragment in a gradient, if any: it reads what the gradient reads."""
    inner = [x for x in walk(line.blocks[0].lines) if x.kind == "fragment"]
    if inner and (len(inner) > 1 or len(line.blocks[0].lines) > 1):
        raise UnclearError("a gradient of several fragments, or of code between them")
    return inner


def delayed_leaves(program: Program, assignment: Mapping[str, str]) -> dict[str, set[int]]:
    """The positions of the leaves that each actor group reads delayed.

    Args:
      assignment: the group of each fragment, by name.
    """
    late = delayed_leaves_by_chain(program, assignment)
    roles = {line.name: line.role for line in walk(program.lines) if line.kind == "fragment"}
    actor_groups = {assignment[name] for name, role in roles.items() if role == "actor"}
    return {group: late.get((group,), set()) for group in actor_groups}


def delayed_leaves_by_chain(program: Program, assignment: Mapping[str, str]) -> dict[Chain, set[int]]:
    """The positions of the leaves that code reads delayed, by its enclosing groups."""
    roles = {line.name: line.role for line in walk(program.lines) if line.kind == "fragment"}
    actor_groups = {assignment[name] for name, role in roles.items() if role == "actor"}
    found = _LeafReads(assignment)
    starts: list[Labels] = [frozenset([("leaf", i)]) for i in range(len(program.leaves))]
    ends = found.block(program.block, starts, {}, ())[: len(starts)]
    producers = [{where for what, where in end if what != "leaf"} for end in ends]
    delaying = [{where for what, where in end if what == "made"} for end in ends]

    def waits(group: str, i: int) -> bool:
        return group in actor_groups and bool(delaying[i] - {group})

    def is_late(chain: Chain, i: int) -> bool:
        outermost, *others = chain
        return waits(outermost, i) and not any(g in producers[i] and not waits(g, i) for g in others)

    delayed = {chain: {i for i in leaves if is_late(chain, i)} for chain, leaves in found.read.items()}
    late = {("leaf", i) for leaves in delayed.values() for i in leaves}
    if any(what != "leaf" or (what, where) in late for what, where in found.choices):
        raise UnclearError("a choice that depends on a fragment's output or on a delayed leaf")
    return delayed


# --- one iteration ---


class Versions:
    """The newest version of a value, and the versions that delayed code reads."""

    def __init__(self, newest: Any, old: Mapping[Chain, Any]):
        self.newest, self.old = newest, dict(old)

    def read_by(self, chain: Chain) -> Any:
        return self.old.get(chain, self.newest)


class _Iteration:
    """Runs lines on versions; `chain` has the enclosing groups."""

    def __init__(self, assignment: Mapping[str, str], host: Host):
        self.assignment, self.arrays = assignment, Interpreter(host)

    def block(
        self, block: Block, arguments: Sequence[Versions], scope: Mapping[str, Versions], chain: Chain
    ) -> list[Versions]:
        found = {**scope, **{v.name: x for v, x in zip(block.params, arguments, strict=True)}}
        for line in block.lines:
            results = self.line(line, [found[v.name] for v in line.inputs], found, chain)
            found |= {v.name: x for v, x in zip(line.outputs, results, strict=True)}
        return [found[v.name] for v in block.results]

    def line(
        self, line: Line, inputs: list[Versions], scope: Mapping[str, Versions], chain: Chain
    ) -> Sequence[Versions]:
        if line.kind == "fragment":
            return self.block(line.blocks[0], inputs, {}, (*chain, self.assignment[line.name]))
        if line.kind == "grad":
            inner = (*chain, *(self.assignment[one.name] for one in _differentiated(line)))
            return self.on_arrays(lambda x: self.arrays.line(line, x, {}), inputs, inner)
        if line.kind in ("op", "effect"):
            if line.kind == "effect" and not chain:
                raise UnclearError("an effect between fragments")
            return self.on_arrays(lambda x: self.arrays.line(line, x, {}), inputs, chain)
        if line.kind == "scan":
            return self.scan(line, inputs, scope, chain)
        if line.kind == "fori":
            weak = [_is_weak(x.newest) for x in inputs]
            for t in range(line.number):
                trip = Versions(counter(jnp.asarray(t)), {})
                inputs = self.block(line.blocks[0], [trip, *_cast_weak(inputs, weak)], scope, chain)
            return inputs
        if line.kind == "while":
            return self.while_(line, inputs, scope, chain)
        if line.kind == "cond":
            return self.cond(line, inputs, scope, chain)
        if line.kind == "vmap":
            return self.vmap(line, inputs, chain)
        return self.block(line.blocks[0], inputs, scope, chain)

    def on_arrays(
        self, function: Callable[[list[Any]], Sequence[Any]], inputs: Sequence[Versions], chain: Chain
    ) -> list[Versions]:
        """Evaluates code between fragments once per version, code of a group on the versions it reads."""
        newest = function([x.read_by(chain) for x in inputs])
        read_chains = set() if chain else {c for x in inputs for c in x.old}
        old = {c: function([x.read_by(c) for x in inputs]) for c in read_chains}
        return [Versions(x, {c: old[c][k] for c in read_chains}) for k, x in enumerate(newest)]

    def one(self, function: Callable, *inputs: Versions, chain: Chain) -> Versions:
        return self.on_arrays(lambda x: [function(*x)], inputs, chain)[0]

    def rows(self, x: Versions, count: int, stacked: bool, chain: Chain) -> list[Versions]:
        every = self.one(lambda x: stack_copies(x, count), x, chain=chain) if stacked else x
        return [self.one(lambda x, t=t: x[t], every, chain=chain) for t in range(count)]

    def scan(
        self, line: Line, inputs: list[Versions], scope: Mapping[str, Versions], chain: Chain
    ) -> list[Versions]:
        (block,), (carried, direction, stacked) = line.blocks, line.options
        carry, operands = inputs[:carried], inputs[carried:]
        weak = [_is_weak(x.newest) for x in carry]
        rows = [self.rows(x, line.number, s, chain) for x, s in zip(operands, stacked, strict=True)]
        trips = range(line.number)
        outputs: dict[int, list[Versions]] = {}
        for t in reversed(trips) if direction == "reverse" else trips:
            results = self.block(block, [*_cast_weak(carry, weak), *[row[t] for row in rows]], scope, chain)
            carry, outputs[t] = results[:carried], results[carried:]
        stacks = [
            self.one(lambda *x: jnp.stack(x), *[outputs[t][k] for t in trips], chain=chain)
            for k in range(len(line.outputs) - carried)
        ]
        return [*carry, *stacks]

    def while_(
        self, line: Line, inputs: list[Versions], scope: Mapping[str, Versions], chain: Chain
    ) -> list[Versions]:
        """The first input chooses among the carries after 0, 1 and 2 trips."""
        block, (number, *carry) = line.blocks[0], inputs
        weak = [_is_weak(x.newest) for x in carry]
        carries = [carry]
        for _ in range(2):
            carries.append(_cast_weak(self.block(block, carries[-1], scope, chain), weak))
        outside = {id(x) for x in (*scope.values(), *carry)}
        results = []
        for start, *ends in zip(*carries, strict=True):
            if all(end is start for end in ends):
                results.append(start)
                continue
            if chain and any(id(end) in outside for end in ends):
                raise UnclearError("a while loop in a fragment passes through another value")
            results.append(self.one(_choose, number, start, *ends, chain=chain))
        return results

    def cond(
        self, line: Line, inputs: list[Versions], scope: Mapping[str, Versions], chain: Chain
    ) -> list[Versions]:
        if any(inner.kind == "effect" for block in line.blocks for inner in walk(block.lines)):
            raise UnclearError("an effect in a branch, for all branches are run here")
        outside = {id(x) for x in scope.values()}
        branches = [self.block(block, [], scope, chain) for block in line.blocks]
        results = []
        for ends in zip(*branches, strict=True):
            if all(x is ends[0] for x in ends):
                results.append(ends[0])
                continue
            passed = [id(x) in outside for x in ends]
            if chain and any(passed):
                raise UnclearError("one branch in a fragment passes a value through, another does not")
            # Between fragments each branch has both versions; the branch taken is the same for both.
            results.append(self.one(_choose, inputs[0], *ends, chain=chain))
        return results

    def vmap(self, line: Line, inputs: list[Versions], chain: Chain) -> list[Versions]:
        mapped, out_axis, _ = line.options
        agents = [self.rows(x, 2, True, chain) if m else [x, x] for x, m in zip(inputs, mapped, strict=True)]
        params = set(line.blocks[0].params)
        if chain and params & set(line.blocks[0].results):
            raise UnclearError("a vmapped part of a fragment passes a value through")
        outputs = [self.block(line.blocks[0], [pair[k] for pair in agents], {}, chain) for k in range(2)]
        return [
            self.one(lambda a, b: jnp.stack([a, b], out_axis), *pair, chain=chain)
            for pair in zip(*outputs, strict=True)
        ]


def _is_weak(x: Any) -> bool:
    return getattr(jax.typeof(x), "weak_type", False)


def _cast_weak(carry: Sequence[Versions], weak: Sequence[bool]) -> list[Versions]:
    """The carry with the weak types of the initial one, as in JAX's loops."""

    def one(x: Versions, weak: bool) -> Versions:
        if _is_weak(x.newest) == weak:
            return x
        convert = internal("lax.lax", "_convert_element_type", "give an array a weak type")
        cast = lambda y: convert(y, x.newest.dtype, weak_type=weak)  # noqa: E731
        return Versions(cast(x.newest), {chain: cast(y) for chain, y in x.old.items()})

    return [one(x, w) for x, w in zip(carry, weak, strict=True)]


def _choose(number: Any, *branches: Any) -> Any:
    if len(branches) == 2:
        return jax.lax.select(number % 2 == 0, *branches)
    # `select_n` does not support keys.
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
    """(state, metrics) after `iterations` iterations under staleness.

    Raises:
      UnclearError: the rules do not cover this program.
    """
    delayed = delayed_leaves_by_chain(program, assignment)

    def iterate(new: list[Any], old: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        leaves = [
            Versions(x, {chain: old[i] for chain, late in delayed.items() if i in late})
            for i, x in enumerate(new)
        ]
        results = _Iteration(assignment, host).block(program.block, leaves, {}, ())
        arrays = [x.newest for x in results]
        return arrays[: len(new)], metrics_of(arrays[len(new) :])

    step, states, metrics = jax.jit(iterate), [state], []
    for t in range(iterations):
        after, one = step(states[t], states[max(0, t - staleness)])
        states.append(after)
        metrics.append(one)
    return states[-1], jax.tree.map(lambda *m: jnp.stack(m), *metrics)
