"""Generates a program from a seed. Each program uses a random subset of the operations and structures."""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.oracle.big_state import big_state
from tests.oracle.interpret import Algorithm, output_types
from tests.oracle.operations import NOT_DIFFERENTIABLE, OPERATIONS, WANTS, Operation
from tests.oracle.placements import SPLIT, Placement, placements_of
from tests.oracle.program import BATCH, Block, Leaf, Line, Program, Value, contains, depends, fragments

ROLES = ("environment", "actor", "learner", "update", "gradient", "dreamer")
STRUCTURES = tuple("scan scan fori while cond jit remat custom_jvp custom_vjp vmap grad linearize".split())
NAMES = ("act", "act.2", "learn", "act.2.2")  # shared by fragments; some look like numbered names
LEAVES = (
    ("f", (BATCH,)), ("f", (BATCH, 3)), ("f", (2, BATCH)), ("f", (2, BATCH, 3)), ("f", (3, BATCH)),
    ("f", (3,)), ("f", (3, 3)), ("f", ()), ("i", (BATCH,)), ("i", ()), ("b", (BATCH,)), ("b", ()),
    ("k", ()), ("k", (BATCH,)),
)  # fmt: skip


def generate(seed: int) -> tuple[Algorithm, tuple[Placement, ...]]:
    """An algorithm and its placements."""
    program, stale = generate_program(seed)
    return Algorithm(program), placements_of(program, seed, stale)


def generate_program(seed: int) -> tuple[Program, bool]:
    """A program, and whether it runs with staleness."""
    return _Generator(seed).program()


@dataclasses.dataclass(frozen=True)
class _Context:
    """The context of a line: depth, role of the enclosing fragment, and what may be generated there."""

    depth: int = 0
    role: str = ""
    effects: bool = True
    fragments: bool = True
    differentiated: bool = False


class _Generator:
    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        self.count = 0
        self.budget = 0  # lines that may still be generated
        self.stale = rng.random() < 0.4
        # Draws for options added later, so that the rest of each seed's program stays the same.
        self.extra_rng = extra_rng = random.Random(f"later {seed}")
        self.names = NAMES if extra_rng.random() < 0.15 else ()
        self.by_keyword = extra_rng.random() < 0.2
        self.wide = extra_rng.random() < 0.2
        self.many = extra_rng.choice((60, 125, 500)) if extra_rng.random() < 0.006 else 0
        families = sorted({op.family for op in OPERATIONS.values()} - {"host", "slices", "wide"})
        kept = {"elements", *rng.sample(families, rng.randint(2, 4))}
        some = [op for op in OPERATIONS.values() if op.family in kept]
        self.operations = rng.sample(some, min(len(some), rng.randint(8, 18)))
        self.operations += [
            OPERATIONS["mix"],
            OPERATIONS["next"],
            OPERATIONS["split_each"],
            OPERATIONS["rename"],
        ]
        # A separate generator, so that other seeds keep their programs.
        if random.Random(f"slices {seed}").random() < 0.1:
            self.operations.append(OPERATIONS["six_rows"])
        self.structures = rng.sample(STRUCTURES, rng.randint(1, 3))
        self.roles = rng.sample(ROLES[:3], rng.choice([2, 3])) + rng.sample(ROLES[3:], rng.choice([0, 1]))
        if self.stale:
            # The staleness reference does not support it.
            self.structures = [s for s in self.structures if s != "linearize"] or ["scan"]
            self.roles = ["actor", *rng.sample(["learner", "learner", "environment"], 2), *self.roles[3:]]
        if self.chance(0.25):
            self.roles.append("update")
        self.roles = list(dict.fromkeys(self.roles))
        self.learned: list[Value] = []  # state leaves that one role updates and others may read
        self.effects = rng.random() < 0.15
        self.keys = "threefry2x32"
        if not self.stale and rng.random() < 0.15:
            self.keys = rng.choice(["rbg", "unsafe_rbg"])
        self.random_axes = rng.random() < 0.3
        self.pass_through = rng.choice([0.0, 0.2, 0.4])

    # --- values ---

    def new(self, value: Value) -> Value:
        self.count += 1
        return dataclasses.replace(value, name=f"v{self.count}")

    def pick(self, scope: Sequence[Value], fits: Callable[[Value], bool]) -> Value | None:
        """A random value that fits, preferably a recent one."""
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
        if self.extra_rng.random() < 0.3 if self.stale else self.chance(0.25):  # a weakly typed Python number
            leaves += [
                Leaf(self.new(Value("", kind, ())), rng.randint(0, 99), True)
                for kind in rng.choice(["i", "if"])
            ]
            self.operations += [OPERATIONS["wrap"], OPERATIONS["narrow"]]
        scope = [leaf.value for leaf in leaves]
        lines: list[Line] = []
        if self.stale or self.chance(0.3):
            self.learned = rng.sample([v for v in scope if v.kind == "f"], rng.choice([1, 1, 2]))
        leaves += self.shardable_leaves(scope)
        more, many_lines, next_values = self.big_state(scope)
        leaves += more
        for _ in range(rng.randint(3, 5)):
            self.budget = rng.choice([2, 4, 5, 7])  # lines, nested ones included
            lines += self.lines(scope, _Context(), 1)
        self.budget = 3
        block = Block(tuple(scope), tuple(lines), ())
        for role in self.roles:
            if role not in fragments(Program((), block.lines, (), ())).values():
                self.budget = 3
                added = self.fragment(scope, _Context(), role)
                block = dataclasses.replace(block, lines=(*block.lines, *added))
        block = dataclasses.replace(block, lines=(*block.lines, *many_lines))
        acted: list[Value] = [v for line in many_lines[:1] for v in line.outputs]
        if self.stale and self.chance(0.7):  # an actor that reads a delayed leaf
            line = self.nudge_fragment(scope, rng.choice(self.learned), ["actor"])
            block = dataclasses.replace(block, lines=(*block.lines, line))
            acted += line.outputs
        typed: list[Value] = []  # outputs that differ if the number is strongly typed
        for leaf in leaves:
            want, name = ("i", "wrap") if leaf.value.kind == "i" else ("x", "narrow")
            other = self.pick(scope, WANTS[want]) if leaf.is_number else None
            if other is not None:
                line = self.with_outputs(Line("op", name, (other, leaf.value), ()), scope)
                block = dataclasses.replace(block, lines=(*block.lines, *line))
                typed += line[0].outputs if line else ()
        ends = []
        for leaf in leaves:
            if leaf.value in next_values:
                ends.append(next_values[leaf.value])
                continue
            if leaf.is_number:  # stays a number; may be incremented
                counts = leaf.value.kind == "i" and self.chance(0.5)
                line = self.increment(leaf.value) if counts else []
                block = dataclasses.replace(block, lines=(*block.lines, *line))
                ends.append(line[0].outputs[0] if line else leaf.value)
                continue
            if leaf.value in self.learned:
                line = self.learner_fragment(scope, leaf.value)
                block = dataclasses.replace(block, lines=(*block.lines, line))
                ends.append(line.outputs[0])
                continue
            same = [v for v in scope if v.type == leaf.value.type]
            made = same[sum(x.value.type == leaf.value.type for x in leaves) :]
            ends.append(rng.choice(made) if made and self.chance(0.9) else rng.choice(same))
        numbers = [v for v in scope if v.kind != "k"]
        metrics = [*acted, *typed, *rng.sample(numbers, min(len(numbers), rng.randint(0, 3)))]
        return Program(tuple(leaves), block.lines, tuple(ends), tuple(metrics), self.keys), self.stale

    def shardable_leaves(self, scope: list[Value]) -> list[Leaf]:
        """Learned leaves that sharding rules may split over devices, evenly or not."""
        if not self.wide:
            return []
        shapes = [*SPLIT[:2], *self.extra_rng.sample(SPLIT[2:], self.extra_rng.randint(0, 2))]
        leaves = [Leaf(self.new(Value("", "f", shape)), self.extra_rng.randint(0, 99)) for shape in shapes]
        self.operations += [op for op in OPERATIONS.values() if op.family == "wide"]
        scope += (leaf.value for leaf in leaves)
        self.learned += (leaf.value for leaf in leaves)
        return leaves

    def big_state(self, scope: list[Value]) -> tuple[list[Leaf], list[Line], dict[Value, Value]]:
        """Hundreds of leaves and the lines that read and update them, in few programs."""
        if not self.many:
            return [], [], {}
        others = [role for role in self.roles if role != "actor"] or self.roles
        return big_state(self.new, self.many, self.roles[0], self.extra_rng.choice(others), self.extra_rng)

    def lines(self, scope: list[Value], context: _Context, count: int) -> list[Line]:
        """Generates lines over `scope`, and adds their outputs to it."""
        made: list[Line] = []
        for _ in range(count):
            for _attempt in range(4):
                if self.budget <= 0 and made:
                    return made
                self.budget -= 1
                found = self.random_lines(scope, context)
                if found:
                    made += found
                    break
                self.budget += 1
        return made

    def random_lines(self, scope: list[Value], context: _Context) -> list[Line]:
        weights: dict[str, float] = {"op": 3 if context.role or context.depth else 1.5}
        if context.fragments and context.depth < 4:
            weights["fragment"] = (0.6 if context.role == "learner" else 0.15) if context.role else 3
        if context.depth < 3 and self.budget > 1:
            weights["around"] = 0.6 if context.role else 1.5
        if self.effects and context.effects and context.role:
            weights["effect"] = 2.5
        kind = self.rng.choices(list(weights), list(weights.values()))[0]
        match kind:
            case "fragment":
                return self.fragment(scope, context)
            case "around":
                return self.structure(scope, context)
            case "effect":
                return self.effect(scope)
        return self.operation(scope, context)

    def with_outputs(self, line: Line, scope: list[Value]) -> list[Line]:
        """The line with its outputs, or nothing if these are large."""
        shapes = output_types(line)
        if any(len(v.shape) > 3 or v.shape.count(BATCH) > 1 or math.prod(v.shape) > 150 for v in shapes):
            return []
        outputs = tuple(self.new(v) for v in shapes)
        scope += outputs
        return [dataclasses.replace(line, outputs=outputs)]

    # --- kinds of lines ---

    def operation(self, scope: list[Value], context: _Context) -> list[Line]:
        tried = self.rng.sample(self.operations, len(self.operations))
        tried.sort(key=lambda operation: operation.family == "elements" and self.chance(0.8))
        for operation in tried:
            inputs = self.operands(operation, scope)
            differentiates = not context.differentiated or operation.name not in NOT_DIFFERENTIABLE
            if inputs is not None and differentiates:
                break
        else:
            return []
        line = Line("op", operation.name, inputs, (), self.rng.randint(0, 3))
        return self.with_outputs(line, scope)

    def operands(self, operation: Operation, scope: list[Value]) -> tuple[Value, ...] | None:
        inputs: list[Value] = []
        for want in operation.wants:
            like = inputs[0].type if want == "=" else None
            fits = WANTS[want] if like is None else lambda v, like=like: v.type == like
            found = self.pick(scope, fits)
            if found is None:
                return None
            inputs.append(found)
        return tuple(inputs)

    def pick_several(
        self, scope: list[Value], low: int, high: int, fits: Callable = lambda v: True
    ) -> list[Value]:
        """Several random values, preferably recent ones."""
        found: list[Value] = []
        for _ in range(self.rng.randint(low, high)):
            value = self.pick([v for v in scope if v not in found], fits)
            if value is not None:
                found.append(value)
        return found

    def fragment(self, scope: list[Value], context: _Context, role: str = "") -> list[Line]:
        inputs = self.pick_several(scope, 1, 4)
        floats = [v for v in inputs if v.kind == "f"]
        if not floats:
            inputs += self.pick_several(scope, 1, 1, WANTS["any"])
        role = role or self.rng.choice([*self.roles, *self.roles, *_nested(context.role)])
        inner = dataclasses.replace(context, depth=context.depth + 1, role=role)
        params = [self.new(v) for v in inputs]
        body = list(params)
        lines = self.lines(body, inner, self.rng.randint(1, 4))
        made = body[len(params) :]
        if not made:
            return []
        results = self.rng.sample(made, min(len(made), self.rng.randint(1, 2)))
        results += [v for v in params if self.chance(self.pass_through / 2) and not context.differentiated]
        if self.chance(self.pass_through) and not context.differentiated:
            results.insert(0, self.rng.choice(params))
        results = list(dict.fromkeys(results))

        def axis(value: Value) -> int | None:
            return None if self.random_axes and self.chance(0.25) else value.axis

        block = Block(tuple(params), tuple(lines), tuple(results))
        axes = tuple(map(axis, inputs)), tuple(map(axis, results))
        return self.with_outputs(
            self.mark(role, tuple(inputs), block, axes, "tree" if self.chance(0.2) else ""), scope
        )

    def mark(self, role: str, inputs: tuple[Value, ...], block: Block, axes: tuple, packing: str) -> Line:
        """A fragment with a unique name, or with one that other fragments share."""
        self.count += 1
        if self.by_keyword and self.extra_rng.random() < 0.5:
            packing = "words"
        options: tuple[Any, ...] = (*axes, packing)
        if self.names:
            options += (self.extra_rng.choice(self.names),)
        return Line("fragment", f"{role[:3]}{self.count}", inputs, (), 0, (block,), role, options)

    def learner_fragment(self, scope: list[Value], leaf: Value) -> Line:
        """A fragment that updates a leaf by a recent value."""
        return self.nudge_fragment(scope, leaf, [r for r in self.roles if r != "actor"] or self.roles)

    def increment(self, number: Value) -> list[Line]:
        """Increments a number; under staleness in a fragment, so that it can be delayed."""
        if not self.stale:
            return self.with_outputs(Line("op", "next", (number,), ()), [])
        param = self.new(number)
        lines = self.with_outputs(Line("op", "next", (param,), ()), [])
        block = Block((param,), tuple(lines), lines[0].outputs)
        role = self.extra_rng.choice([r for r in self.roles if r != "actor"] or self.roles)
        return self.with_outputs(self.mark(role, (number,), block, ((None,), (None,)), ""), [])

    def nudge_fragment(self, scope: list[Value], leaf: Value, roles: Sequence[str]) -> Line:
        """A fragment of one of the roles that returns a slightly changed leaf."""
        others = [v for v in scope if v.kind == "f" and v not in self.learned]
        inputs = (leaf, self.rng.choice(others[-4:]) if others else leaf)
        first, second = params = tuple(map(self.new, inputs))
        body = [first, second]
        lines = self.with_outputs(Line("op", "scalar", (second,), ()), body)
        if self.chance(0.3):
            lines += self.operation(body, _Context(1, "learner"))
        lines += self.with_outputs(Line("op", "nudge", (first, lines[0].outputs[0]), ()), body)
        role = self.rng.choice(roles)
        axes = tuple(v.axis for v in inputs), (leaf.axis,)
        block = Block(params, tuple(lines), (lines[-1].outputs[0],))
        return self.with_outputs(self.mark(role, inputs, block, axes, ""), scope)[0]

    def effect(self, scope: list[Value]) -> list[Line]:
        kind = self.rng.choice(["send", "send", "receive", "note", "seed"])
        if kind == "seed":
            inputs = self.pick_several(scope, 1, 1, WANTS["v"])
            return self.with_outputs(Line("op", "host_seed", tuple(inputs), (), 1), scope) if inputs else []
        inputs = self.pick_several(scope, 1, 1, WANTS["any"])
        return self.with_outputs(Line("effect", kind, tuple(inputs), ()), scope) if inputs else []

    def structure(self, scope: list[Value], context: _Context) -> list[Line]:
        kind = self.rng.choice(self.structures)
        inner = dataclasses.replace(context, depth=context.depth + 1)
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

    def next_carry(self, body: list[Value], carry: Sequence[Value]) -> list[Value]:
        """The next value of each carried one: a value of its type, preferably recent."""
        ends = []
        for value in carry:
            same = [v for v in body if v.type == value.type]
            ends.append(value if self.chance(self.pass_through) else self.pick(same, lambda v: True) or value)
        return ends

    def loop(self, kind: str, scope: list[Value], context: _Context) -> list[Line]:
        carry = self.pick_several(scope, 1, 3)
        trips = self.rng.randint(1, 3)
        counter = self.pick(scope, WANTS["n"]) if kind == "while" else None
        if (kind == "while" and counter is None) or context.differentiated:
            return []
        operands, stacked = [], []
        if kind == "scan":
            for value in self.pick_several(scope, 0, 2, lambda v: len(v.shape) < 3):
                ready = len(value.shape) > 1 and value.shape[0] == trips
                operands.append(value)
                stacked.append(not ready)
        number = (Value("", "i", ()),) if kind == "fori" else ()
        rows = [
            v if made else Value("", v.kind, v.shape[1:]) for v, made in zip(operands, stacked, strict=True)
        ]
        params = [self.new(v) for v in (*number, *carry, *rows)]
        body = [*scope, *params]
        lines = self.lines(body, context, self.rng.randint(1, 3))
        made = body[len(scope) + len(params) :]
        if not made:
            return []
        inside = body[len(scope) :] if self.chance(0.8) else body
        results = self.next_carry(inside, params[len(number) : len(number) + len(carry)])
        options: tuple[Any, ...] = ()
        if kind == "scan":
            results += self.rng.sample(made, min(len(made), self.rng.randint(0, 2)))
            options = (len(carry), self.rng.choice(["", "reverse"]), tuple(stacked))
        block = Block(tuple(params), tuple(lines), tuple(results))
        inputs = (*([counter] if counter else []), *carry, *operands)
        line = Line(kind, kind, inputs, (), 0 if kind == "while" else trips, (block,), "", options)
        return self.with_outputs(line, scope)

    def cond(self, scope: list[Value], context: _Context) -> list[Line]:
        counter = self.pick(scope, WANTS["n"])
        if counter is None:
            return []
        bodies = []
        for _ in range(self.rng.choice([2, 2, 3])):
            body = list(scope)
            lines = self.lines(body, context, self.rng.randint(1, 2))
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
        return self.with_outputs(Line("cond", "cond", (counter,), (), 0, blocks), scope)

    def call(self, kind: str, scope: list[Value], context: _Context) -> list[Line]:
        closed = kind.startswith("custom")
        inputs = self.pick_several(scope, 1, 3, WANTS["any"] if closed else lambda v: True)
        if not inputs:
            return []
        params = [self.new(v) for v in inputs]
        body = list(params) if closed else [*scope, *params]
        start = len(body)
        lines = self.lines(body, context, self.rng.randint(1, 3))
        made = body[start:]
        if not made:
            return []
        results = self.rng.sample(made, min(len(made), 2))
        results += [v for v in params if self.chance(self.pass_through)]
        block = Block(tuple(params), tuple(lines), tuple(results))
        line = Line(kind, kind, tuple(inputs), (), 0, (block,))
        return self.with_outputs(line, scope)

    def vmap(self, scope: list[Value], context: _Context) -> list[Line]:
        inputs = self.pick_several(scope, 1, 3, lambda v: len(v.shape) < 3)
        mapped = [v.kind == "f" and self.chance(0.6) for v in inputs]
        if not any(mapped):
            return []
        params = [self.new(v) for v in inputs]
        body = list(params)
        lines = self.lines(body, context, self.rng.randint(1, 2))
        results = [v for v in body[len(params) :] if len(v.shape) < 3][-2:]
        if not results:
            return []
        if self.chance(self.pass_through):
            results.append(params[0])
        block = Block(tuple(params), tuple(lines), tuple(results))
        options = (tuple(mapped), self.rng.choice([0, 0, -1]), self.rng.choice([0, 1, 2]))
        return self.with_outputs(Line("vmap", "vmap", tuple(inputs), (), 0, (block,), "", options), scope)

    def grad(self, kind: str, scope: list[Value], context: _Context) -> list[Line]:
        first = self.pick(scope, WANTS["any"])
        if first is None or context.differentiated:
            return []
        inputs = [first, *self.pick_several([v for v in scope if v != first], 0, 2)]
        params = [self.new(v) for v in inputs]
        body = list(params)
        context = dataclasses.replace(context, differentiated=True, effects=False)
        lines: list[Line] = []
        if self.stale:  # only one fragment, as the staleness reference requires
            lines = self.fragment(body, dataclasses.replace(context, fragments=False))
        else:
            lines = self.lines(body, context, self.rng.randint(1, 3))
        results = [v for v in body[len(params) :] if v.kind == "f" and depends(lines, params[0], v)]
        if not results:
            return []
        block = Block(tuple(params), tuple(lines), (self.rng.choice(results),))
        kind = "grad" if contains(block, "custom_vjp") else kind  # custom_vjp has no forward mode in JAX
        return self.with_outputs(Line(kind, kind, tuple(inputs), (), 0, (block,)), scope)


def _nested(role: str) -> tuple[str, ...]:
    return ("gradient", "update", "update") if role == "learner" else ()
