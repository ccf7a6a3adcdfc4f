"""Many leaves at once, for programs of hundreds: an actor reads them all, a learner changes each."""

import random
from collections.abc import Callable

from tests.oracle.interpret import made_by
from tests.oracle.program import BATCH, Block, Leaf, Line, Value

SHAPES = ((3,), (), (3, 3), (BATCH,), (2, BATCH))


def crowd(
    new: Callable[[Value], Value], count: int, acting: str, learning: str, draw: random.Random
) -> tuple[list[Leaf], list[Line], dict[Value, Value]]:
    """Leaves, lines, and what follows each leaf.

    Args:
      new: names a value.
      count: how many leaves.
      acting: the role of who reads them.
      learning: of who changes them, in a loop or not.
    """

    def op(name: str, *reads: Value) -> Line:
        line = Line("op", name, reads, ())
        return Line("op", name, reads, tuple(map(new, made_by(line))))

    def fragment(role: str, reads: tuple[Value, ...], block: Block) -> Line:
        axes = tuple(v.axis for v in reads), tuple(v.axis for v in block.results), ""
        makes = tuple(map(new, block.results))
        return Line("fragment", f"crowd{role}", reads, makes, 0, (block,), role, axes)

    leaves = [Leaf(new(Value("", "f", SHAPES[k % len(SHAPES)])), draw.randint(0, 99)) for k in range(count)]
    every = tuple(leaf.value for leaf in leaves)

    params, lines = tuple(map(new, every)), []
    seen = next(p for p in params if p.shape == (BATCH,))
    for param in params:
        lines += (mean := op("scalar", param), nudged := op("nudge", seen, *mean.makes))
        (seen,) = nudged.makes
    act = fragment(acting, every, Block(params, tuple(lines), (seen,)))

    def learn(reads: tuple[Value, ...]) -> Line:
        *params, told = map(new, (*reads, *act.makes))
        mean = op("scalar", told)
        changed = [op("nudge", param, *mean.makes) for param in params]
        ends = tuple(line.makes[0] for line in changed)
        return fragment(learning, (*reads, *act.makes), Block((*params, told), (mean, *changed), ends))

    last = learn(every)
    if draw.random() < 0.5:
        carry = tuple(map(new, every))
        step = learn(carry)
        block, options = Block(carry, (step,), step.makes), (count, "", ())
        last = Line("scan", "scan", every, tuple(map(new, every)), 2, (block,), "", options)
    return leaves, [act, last], dict(zip(every, last.makes, strict=True))
