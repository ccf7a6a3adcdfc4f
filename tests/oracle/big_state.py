"""Programs with hundreds of state leaves: an actor reads them all, a learner updates each."""

import random
from collections.abc import Callable

from tests.oracle.interpret import output_types
from tests.oracle.program import BATCH, Block, Leaf, Line, Value

SHAPES = ((3,), (), (3, 3), (BATCH,), (2, BATCH))


def big_state(
    new: Callable[[Value], Value], count: int, acting: str, learning: str, draw: random.Random
) -> tuple[list[Leaf], list[Line], dict[Value, Value]]:
    """Leaves, lines, and the next value of each leaf.

    Args:
      new: gives a value a new name.
      count: number of leaves.
      acting: role of the fragment that reads them.
      learning: role of the fragment that updates them, inside a loop or not.
    """

    def op(name: str, *inputs: Value) -> Line:
        line = Line("op", name, inputs, ())
        return Line("op", name, inputs, tuple(map(new, output_types(line))))

    def fragment(role: str, inputs: tuple[Value, ...], block: Block) -> Line:
        axes = tuple(v.axis for v in inputs), tuple(v.axis for v in block.results), ""
        outputs = tuple(map(new, block.results))
        return Line("fragment", f"many{role}", inputs, outputs, 0, (block,), role, axes)

    leaves = [Leaf(new(Value("", "f", SHAPES[k % len(SHAPES)])), draw.randint(0, 99)) for k in range(count)]
    every = tuple(leaf.value for leaf in leaves)

    params, lines = tuple(map(new, every)), []
    actions = next(p for p in params if p.shape == (BATCH,))
    for param in params:
        lines += (mean := op("scalar", param), changed := op("nudge", actions, *mean.outputs))
        (actions,) = changed.outputs
    act = fragment(acting, every, Block(params, tuple(lines), (actions,)))

    def learn(inputs: tuple[Value, ...]) -> Line:
        *params, result = map(new, (*inputs, *act.outputs))
        mean = op("scalar", result)
        updates = [op("nudge", param, *mean.outputs) for param in params]
        ends = tuple(line.outputs[0] for line in updates)
        return fragment(learning, (*inputs, *act.outputs), Block((*params, result), (mean, *updates), ends))

    learn_line = learn(every)
    if draw.random() < 0.5:
        carry = tuple(map(new, every))
        step = learn(carry)
        block, options = Block(carry, (step,), step.outputs), (count, "", ())
        learn_line = Line("scan", "scan", every, tuple(map(new, every)), 2, (block,), "", options)
    return leaves, [act, learn_line], dict(zip(every, learn_line.outputs, strict=True))
