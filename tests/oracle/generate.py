"""From a seed to a program. Each program draws some operations and structures, and is made of those alone."""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.oracle.crowd import crowd
from tests.oracle.interpret import Algorithm, made_by
from tests.oracle.operations import NOT_DIFFERENTIABLE, OPERATIONS, WANTS, Operation
from tests.oracle.placements import SPLIT, Placement, placements_of
from tests.oracle.program import BATCH, Block, Leaf, Line, Program, Value, contains, depends, fragments

ROLES = ("environment", "actor", "learner", "update", "gradient", "dreamer")
AROUND = tuple("scan scan fori while cond jit remat custom_jvp custom_vjp vmap grad linearize".split())
NAMES = ("act", "act.2", "learn", "act.2.2")  # of fragments that share them, and look numbered
LEAVES = (
    ("f", (BATCH,)),
    ("f", (BATCH, 3)),
    ("f", (2, BATCH)),
    ("f", (2, BATCH, 3)),
    ("f", (3, BATCH)),
    ("f", (3,)),
    ("f", (3, 3)),
    ("f", ()),
    ("i", (BATCH,)),
    ("i", ()),
    ("b", (BATCH,)),
    ("b", ()),
    ("k", ()),
    ("k", (BATCH,)),
)


def program_of(seed: int) -> tuple[Algorithm, tuple[Placement, ...]]:
    """An algorithm, and the placements that it is tried under."""
    program, stale = written(seed)
    return Algorithm(program), placements_of(program, seed, stale)


def written(seed: int) -> tuple[Program, bool]:
    """A program, and whether it is to be run with staleness."""
    return _Writer(seed).program()


@dataclasses.dataclass(frozen=True)
class _Where:
    """What may stand here: how deep it is, inside which fragment's role, and under which transformations."""

    depth: int = 0
    role: str = ""
    effects: bool = True
    fragments: bool = True
    differentiated: bool = False


class _Writer:
    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        self.count = 0
        self.left = 0  # lines that may still be written
        self.stale = rng.random() < 0.4
        # Draws of what was written later, so that every seed keeps the rest of its program.
        self.later = later = random.Random(f"later {seed}")
        self.names = NAMES if later.random() < 0.15 else ()
        self.by_word = later.random() < 0.2
        self.wide = later.random() < 0.2
        self.many = later.choice((60, 125, 500)) if later.random() < 0.006 else 0
        families = sorted({op.family for op in OPERATIONS.values()} - {"host", "wide"})
        kept = {"elements", *rng.sample(families, rng.randint(2, 4))}
        some = [op for op in OPERATIONS.values() if op.family in kept]
        self.operations = rng.sample(some, min(len(some), rng.randint(8, 18)))
        self.operations += [
            OPERATIONS["mix"],
            OPERATIONS["next"],
            OPERATIONS["split_each"],
            OPERATIONS["rename"],
        ]
        self.around = rng.sample(AROUND, rng.randint(1, 3))
        self.roles = rng.sample(ROLES[:3], rng.choice([2, 3])) + rng.sample(ROLES[3:], rng.choice([0, 1]))
        if self.stale:
            # The reference of staleness has no rule for them.
            self.around = [kind for kind in self.around if kind not in ("while", "linearize")] or ["scan"]
            self.roles = ["actor", *rng.sample(["learner", "learner", "environment"], 2), *self.roles[3:]]
        if self.chance(0.25):
            self.roles.append("update")
        self.roles = list(dict.fromkeys(self.roles))
        self.learned: list[Value] = []  # leaves of the state that one role changes and others may read
        self.effects = rng.random() < 0.15
        self.keys = "threefry2x32"
        if not self.stale and rng.random() < 0.15:
            self.keys = rng.choice(["rbg", "unsafe_rbg"])
        self.odd_axes = rng.random() < 0.3
        self.hands_on = rng.choice([0.0, 0.2, 0.4])

    # --- values ---

    def new(self, value: Value) -> Value:
        self.count += 1
        return dataclasses.replace(value, name=f"v{self.count}")

    def pick(self, scope: Sequence[Value], fits: Callable[[Value], bool]) -> Value | None:
        """One that fits, the latest rather than the first."""
        found = [v for v in scope if fits(v)]
        learned = [v for v in found if v in self.learned]
        if learned and self.chance(0.3):
            return self.rng.choice(learned)
        if found and self.chance(0.3):
            return self.rng.choice(found)
        return found[-min(len(found), 1 + int(self.rng.expovariate(0.5)))] if found else None

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # --- programs ---

    def program(self) -> tuple[Program, bool]:
        rng = self.rng
        leaves: list[Leaf] = []
        kinds = [("f", (BATCH,)), ("f", (3,)), *rng.choices(LEAVES, k=rng.randint(0, 3))]
        often = (("k", (BATCH,)), 0.5), (("i", (BATCH,)), 0.5), (("i", ()), 0.4), (("f", (BATCH, 3)), 0.4)
        kinds += [kind for kind, share in often if self.chance(share)]
        rng.shuffle(kinds)
        for kind, shape in kinds:
            leaves.append(Leaf(self.new(Value("", kind, shape)), rng.randint(0, 99)))
            if self.chance(0.12):  # another leaf of the same type, sometimes the same array
                start = leaves[-1].start if self.chance(0.5) else rng.randint(0, 99)
                leaves.append(Leaf(self.new(Value("", kind, shape)), start))
        if self.later.random() < 0.3 if self.stale else self.chance(0.25):  # a number, which is weakly typed
            leaves += [
                Leaf(self.new(Value("", kind, ())), rng.randint(0, 99), True)
                for kind in rng.choice(["i", "if"])
            ]
            self.operations += [OPERATIONS["wrap"], OPERATIONS["narrow"]]
        scope = [leaf.value for leaf in leaves]
        lines: list[Line] = []
        if self.stale or self.chance(0.3):
            self.learned = rng.sample([v for v in scope if v.kind == "f"], rng.choice([1, 1, 2]))
        leaves += self.wider(scope)
        more, crowded, following = self.crowd(scope)
        leaves += more
        for _ in range(rng.randint(3, 5)):
            self.left = rng.choice([2, 4, 5, 7])  # lines of this one, with all that is in it
            lines += self.lines(scope, _Where(), 1)
        self.left = 3
        block = Block(tuple(scope), tuple(lines), ())
        for role in self.roles:
            if role not in fragments(Program((), block.lines, (), ())).values():
                self.left = 3
                added = self.fragment(scope, _Where(), role)
                block = dataclasses.replace(block, lines=(*block.lines, *added))
        block = dataclasses.replace(block, lines=(*block.lines, *crowded))
        acted: list[Value] = [v for line in crowded[:1] for v in line.makes]
        if self.stale and self.chance(0.7):  # an actor that surely waits for something
            line = self.nudging(scope, rng.choice(self.learned), ["actor"])
            block = dataclasses.replace(block, lines=(*block.lines, line))
            acted += line.makes
        typed: list[Value] = []  # what is made in the type of something else than a number of Python's
        for leaf in leaves:
            want, name = ("i", "wrap") if leaf.value.kind == "i" else ("x", "narrow")
            other = self.pick(scope, WANTS[want]) if leaf.is_number else None
            if other is not None:
                line = self.finished(Line("op", name, (other, leaf.value), ()), scope)
                block = dataclasses.replace(block, lines=(*block.lines, *line))
                typed += line[0].makes if line else ()
        ends = []
        for leaf in leaves:
            if leaf.value in following:
                ends.append(following[leaf.value])
                continue
            if leaf.is_number:  # stays one, and is counted on or not
                counts = leaf.value.kind == "i" and self.chance(0.5)
                line = self.counting(leaf.value) if counts else []
                block = dataclasses.replace(block, lines=(*block.lines, *line))
                ends.append(line[0].makes[0] if line else leaf.value)
                continue
            if leaf.value in self.learned:
                line = self.learner(scope, leaf.value)
                block = dataclasses.replace(block, lines=(*block.lines, line))
                ends.append(line.makes[0])
                continue
            same = [v for v in scope if v.type == leaf.value.type]
            made = same[sum(x.value.type == leaf.value.type for x in leaves) :]
            ends.append(rng.choice(made) if made and self.chance(0.9) else rng.choice(same))
        numbers = [v for v in scope if v.kind != "k"]
        metrics = [*acted, *typed, *rng.sample(numbers, min(len(numbers), rng.randint(0, 3)))]
        return Program(tuple(leaves), block.lines, tuple(ends), tuple(metrics), self.keys), self.stale

    def wider(self, scope: list[Value]) -> list[Leaf]:
        """Leaves that rules may split over devices, evenly or not, which are learned."""
        if not self.wide:
            return []
        shapes = [*SPLIT[:2], *self.later.sample(SPLIT[2:], self.later.randint(0, 2))]
        leaves = [Leaf(self.new(Value("", "f", shape)), self.later.randint(0, 99)) for shape in shapes]
        self.operations += [op for op in OPERATIONS.values() if op.family == "wide"]
        scope += (leaf.value for leaf in leaves)
        self.learned += (leaf.value for leaf in leaves)
        return leaves

    def crowd(self, scope: list[Value]) -> tuple[list[Leaf], list[Line], dict[Value, Value]]:
        """Many leaves, if this program has them."""
        if not self.many:
            return [], [], {}
        others = [role for role in self.roles if role != "actor"] or self.roles
        return crowd(self.new, self.many, self.roles[0], self.later.choice(others), self.later)

    def lines(self, scope: list[Value], where: _Where, count: int) -> list[Line]:
        """Lines over `scope`, which grows by what they make."""
        made: list[Line] = []
        for _ in range(count):
            for _attempt in range(4):
                if self.left <= 0 and made:
                    return made
                self.left -= 1
                found = self.some(scope, where)
                if found:
                    made += found
                    break
                self.left += 1
        return made

    def some(self, scope: list[Value], where: _Where) -> list[Line]:
        weights: dict[str, float] = {"op": 3 if where.role or where.depth else 1.5}
        if where.fragments and where.depth < 4:
            weights["fragment"] = (0.6 if where.role == "learner" else 0.15) if where.role else 3
        if where.depth < 3 and self.left > 1:
            weights["around"] = 0.6 if where.role else 1.5
        if self.effects and where.effects and where.role:
            weights["effect"] = 2.5
        kind = self.rng.choices(list(weights), list(weights.values()))[0]
        match kind:
            case "fragment":
                return self.fragment(scope, where)
            case "around":
                return self.structure(scope, where)
            case "effect":
                return self.effect(scope)
        return self.operation(scope, where)

    def finished(self, line: Line, scope: list[Value]) -> list[Line]:
        """The line with what it makes, if that is small."""
        shapes = made_by(line)
        if any(len(v.shape) > 3 or v.shape.count(BATCH) > 1 or math.prod(v.shape) > 150 for v in shapes):
            return []
        makes = tuple(self.new(v) for v in shapes)
        scope += makes
        return [dataclasses.replace(line, makes=makes)]

    # --- kinds of lines ---

    def operation(self, scope: list[Value], where: _Where) -> list[Line]:
        tried = self.rng.sample(self.operations, len(self.operations))
        tried.sort(key=lambda operation: operation.family == "elements" and self.chance(0.8))
        for operation in tried:
            reads = self.operands(operation, scope)
            differentiates = not where.differentiated or operation.name not in NOT_DIFFERENTIABLE
            if reads is not None and differentiates:
                break
        else:
            return []
        line = Line("op", operation.name, reads, (), self.rng.randint(0, 3))
        return self.finished(line, scope)

    def operands(self, operation: Operation, scope: list[Value]) -> tuple[Value, ...] | None:
        reads: list[Value] = []
        for want in operation.wants:
            like = reads[0].type if want == "=" else None
            fits = WANTS[want] if like is None else lambda v, like=like: v.type == like
            found = self.pick(scope, fits)
            if found is None:
                return None
            reads.append(found)
        return tuple(reads)

    def some_of(
        self, scope: list[Value], low: int, high: int, fits: Callable = lambda v: True
    ) -> list[Value]:
        """Several values, the latest rather than the first."""
        found: list[Value] = []
        for _ in range(self.rng.randint(low, high)):
            value = self.pick([v for v in scope if v not in found], fits)
            if value is not None:
                found.append(value)
        return found

    def fragment(self, scope: list[Value], where: _Where, role: str = "") -> list[Line]:
        reads = self.some_of(scope, 1, 4)
        floats = [v for v in reads if v.kind == "f"]
        if not floats:
            reads += self.some_of(scope, 1, 1, WANTS["any"])
        role = role or self.rng.choice([*self.roles, *self.roles, *_nested(where.role)])
        inner = dataclasses.replace(where, depth=where.depth + 1, role=role)
        params = [self.new(v) for v in reads]
        body = list(params)
        lines = self.lines(body, inner, self.rng.randint(1, 4))
        made = body[len(params) :]
        if not made:
            return []
        results = self.rng.sample(made, min(len(made), self.rng.randint(1, 2)))
        results += [v for v in params if self.chance(self.hands_on / 2) and not where.differentiated]
        if self.chance(self.hands_on) and not where.differentiated:
            results.insert(0, self.rng.choice(params))
        results = list(dict.fromkeys(results))

        def axis(value: Value) -> int | None:
            return None if self.odd_axes and self.chance(0.25) else value.axis

        block = Block(tuple(params), tuple(lines), tuple(results))
        axes = tuple(map(axis, reads)), tuple(map(axis, results))
        return self.finished(
            self.called(role, tuple(reads), block, axes, "tree" if self.chance(0.2) else ""), scope
        )

    def called(self, role: str, reads: tuple[Value, ...], block: Block, axes: tuple, packing: str) -> Line:
        """A fragment, under a name of its own or one that others have too."""
        self.count += 1
        if self.by_word and self.later.random() < 0.5:
            packing = "words"
        options: tuple[Any, ...] = (*axes, packing)
        if self.names:
            options += (self.later.choice(self.names),)
        return Line("fragment", f"{role[:3]}{self.count}", reads, (), 0, (block,), role, options)

    def learner(self, scope: list[Value], leaf: Value) -> Line:
        """A fragment that changes a leaf, by something that was made of late."""
        return self.nudging(scope, leaf, [r for r in self.roles if r != "actor"] or self.roles)

    def counting(self, number: Value) -> list[Line]:
        """The next number; under staleness by a fragment, for which others may wait."""
        if not self.stale:
            return self.finished(Line("op", "next", (number,), ()), [])
        param = self.new(number)
        lines = self.finished(Line("op", "next", (param,), ()), [])
        block = Block((param,), tuple(lines), lines[0].makes)
        role = self.later.choice([r for r in self.roles if r != "actor"] or self.roles)
        return self.finished(self.called(role, (number,), block, ((None,), (None,)), ""), [])

    def nudging(self, scope: list[Value], leaf: Value, roles: Sequence[str]) -> Line:
        """A fragment of one of the roles that reads a leaf and gives it back a little changed."""
        others = [v for v in scope if v.kind == "f" and v not in self.learned]
        reads = (leaf, self.rng.choice(others[-4:]) if others else leaf)
        first, second = params = tuple(map(self.new, reads))
        body = [first, second]
        lines = self.finished(Line("op", "scalar", (second,), ()), body)
        if self.chance(0.3):
            lines += self.operation(body, _Where(1, "learner"))
        lines += self.finished(Line("op", "nudge", (first, lines[0].makes[0]), ()), body)
        role = self.rng.choice(roles)
        axes = tuple(v.axis for v in reads), (leaf.axis,)
        block = Block(params, tuple(lines), (lines[-1].makes[0],))
        return self.finished(self.called(role, reads, block, axes, ""), scope)[0]

    def effect(self, scope: list[Value]) -> list[Line]:
        kind = self.rng.choice(["send", "send", "receive", "note", "seed"])
        if kind == "seed":
            reads = self.some_of(scope, 1, 1, WANTS["v"])
            return self.finished(Line("op", "host_seed", tuple(reads), (), 1), scope) if reads else []
        reads = self.some_of(scope, 1, 1, WANTS["any"])
        return self.finished(Line("effect", kind, tuple(reads), ()), scope) if reads else []

    def structure(self, scope: list[Value], where: _Where) -> list[Line]:
        kind = self.rng.choice(self.around)
        inner = dataclasses.replace(where, depth=where.depth + 1)
        if kind not in ("scan", "fori", "cond", "jit"):
            inner = dataclasses.replace(inner, effects=False)
        match kind:
            case "scan" | "fori" | "while":
                return self.loop(kind, scope, inner)
            case "cond":
                return self.cond(scope, inner)
            case "vmap":
                return self.vmap(scope, inner)
            case "grad" | "linearize":
                return self.grad(kind, scope, inner)
        return self.call(kind, scope, inner)

    def carried(self, body: list[Value], carry: Sequence[Value]) -> list[Value]:
        """What follows each carried value: something of its type, often what was just made."""
        ends = []
        for value in carry:
            same = [v for v in body if v.type == value.type]
            ends.append(value if self.chance(self.hands_on) else self.pick(same, lambda v: True) or value)
        return ends

    def loop(self, kind: str, scope: list[Value], where: _Where) -> list[Line]:
        carry = self.some_of(scope, 1, 3)
        trips = self.rng.randint(1, 3)
        counter = self.pick(scope, WANTS["n"]) if kind == "while" else None
        if (kind == "while" and counter is None) or where.differentiated:
            return []
        operands, stacked = [], []
        if kind == "scan":
            for value in self.some_of(scope, 0, 2, lambda v: len(v.shape) < 3):
                ready = len(value.shape) > 1 and value.shape[0] == trips
                operands.append(value)
                stacked.append(not ready)
        number = (Value("", "i", ()),) if kind == "fori" else ()
        rows = [
            v if made else Value("", v.kind, v.shape[1:]) for v, made in zip(operands, stacked, strict=True)
        ]
        params = [self.new(v) for v in (*number, *carry, *rows)]
        body = [*scope, *params]
        lines = self.lines(body, where, self.rng.randint(1, 3))
        made = body[len(scope) + len(params) :]
        if not made:
            return []
        inside = body[len(scope) :] if self.chance(0.8) else body
        results = self.carried(inside, params[len(number) : len(number) + len(carry)])
        options: tuple[Any, ...] = ()
        if kind == "scan":
            results += self.rng.sample(made, min(len(made), self.rng.randint(0, 2)))
            options = (len(carry), self.rng.choice(["", "reverse"]), tuple(stacked))
        block = Block(tuple(params), tuple(lines), tuple(results))
        reads = (*([counter] if counter else []), *carry, *operands)
        line = Line(kind, kind, reads, (), 0 if kind == "while" else trips, (block,), "", options)
        return self.finished(line, scope)

    def cond(self, scope: list[Value], where: _Where) -> list[Line]:
        counter = self.pick(scope, WANTS["n"])
        if counter is None:
            return []
        bodies = []
        for _ in range(self.rng.choice([2, 2, 3])):
            body = list(scope)
            lines = self.lines(body, where, self.rng.randint(1, 2))
            bodies.append((body, lines))
        first, _ = bodies[0]
        results = []
        for value in first[len(scope) :]:
            fits = [[v for v in body if v.type == value.type] for body, _ in bodies]
            if all(fits):
                results.append([self.rng.choice(same[-3:]) for same in fits])
        if not results:
            return []
        blocks = tuple(
            Block((), tuple(lines), tuple(row[k] for row in results)) for k, (_, lines) in enumerate(bodies)
        )
        return self.finished(Line("cond", "cond", (counter,), (), 0, blocks), scope)

    def call(self, kind: str, scope: list[Value], where: _Where) -> list[Line]:
        closed = kind.startswith("custom")
        reads = self.some_of(scope, 1, 3, WANTS["any"] if closed else lambda v: True)
        if not reads:
            return []
        params = [self.new(v) for v in reads]
        body = list(params) if closed else [*scope, *params]
        start = len(body)
        lines = self.lines(body, where, self.rng.randint(1, 3))
        made = body[start:]
        if not made:
            return []
        results = self.rng.sample(made, min(len(made), 2))
        results += [v for v in params if self.chance(self.hands_on)]
        block = Block(tuple(params), tuple(lines), tuple(results))
        line = Line(kind, kind, tuple(reads), (), 0, (block,))
        return self.finished(line, scope)

    def vmap(self, scope: list[Value], where: _Where) -> list[Line]:
        reads = self.some_of(scope, 1, 3, lambda v: len(v.shape) < 3)
        mapped = [v.kind == "f" and self.chance(0.6) for v in reads]
        if not any(mapped):
            return []
        params = [self.new(v) for v in reads]
        body = list(params)
        lines = self.lines(body, where, self.rng.randint(1, 2))
        results = [v for v in body[len(params) :] if len(v.shape) < 3][-2:]
        if not results:
            return []
        if self.chance(self.hands_on):
            results.append(params[0])
        block = Block(tuple(params), tuple(lines), tuple(results))
        options = (tuple(mapped), self.rng.choice([0, 0, -1]), self.rng.choice([0, 1, 2]))
        return self.finished(Line("vmap", "vmap", tuple(reads), (), 0, (block,), "", options), scope)

    def grad(self, kind: str, scope: list[Value], where: _Where) -> list[Line]:
        first = self.pick(scope, WANTS["any"])
        if first is None or where.differentiated:
            return []
        reads = [first, *self.some_of([v for v in scope if v != first], 0, 2)]
        params = [self.new(v) for v in reads]
        body = list(params)
        where = dataclasses.replace(where, differentiated=True, effects=False)
        lines: list[Line] = []
        if self.stale:  # one fragment alone, so that it is clear who reads what
            lines = self.fragment(body, dataclasses.replace(where, fragments=False))
        else:
            lines = self.lines(body, where, self.rng.randint(1, 3))
        results = [v for v in body[len(params) :] if v.kind == "f" and depends(lines, params[0], v)]
        if not results:
            return []
        block = Block(tuple(params), tuple(lines), (self.rng.choice(results),))
        kind = "grad" if contains(block, "custom_vjp") else kind  # JAX has no forward mode of a custom_vjp
        return self.finished(Line(kind, kind, tuple(reads), (), 0, (block,)), scope)


def _nested(role: str) -> tuple[str, ...]:
    return ("gradient", "update", "update") if role == "learner" else ()
