"""A program as an algorithm: plain JAX, with `fdg.fragment` around what is one.

Kinds of lines beside "op" and "fragment", with their options:

  scan         (how many of `reads` are carried, "reverse" or "", whether each other operand is stacked here)
  fori, while  carry all of `reads`; the body of `fori` takes the trip's number first, `while` runs the first
               operand's number modulo 3 times and carries the others
  cond         chooses a block by its operand; `jit`, `remat`, `custom_jvp`, `custom_vjp` call theirs
  vmap         (whether each operand is stacked here, for two agents; the results' axis; the operands')
  grad         of the mean of the block's first result, with respect to the first operand
  effect       send, receive, note: a call to the host (`Host`)
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

import fdg
from tests.oracle.operations import OPERATIONS
from tests.oracle.program import BATCH, Block, Leaf, Line, Program, Value


class Host:
    """What a program tells the host, in the order of its ordered calls; prints (notes) have no order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, np.ndarray]] = []
        self.notes: list[tuple[str, np.ndarray]] = []

    def send(self, name: str, x: Any) -> None:
        self.calls.append((name, np.array(x)))

    def receive(self, name: str, x: Any) -> np.ndarray:
        """Another answer each time, by how much was said before."""
        self.calls.append((name, np.array(x)))
        return np.sin(np.full(BATCH, len(self.calls))).astype(np.asarray(x).dtype)

    def note(self, name: str, x: Any) -> None:
        self.notes.append((name, np.array(x)))


class Algorithm:
    """A program's `init` and `iterate`; its calls to the host are `ordered`, or not."""

    def __init__(self, program: Program, ordered: bool = True):
        self.program, self.host, self.ordered = program, Host(), ordered

    def init(self, key: Any) -> list[Any]:
        """Leaves of one `start` are one array."""
        seed = jax.random.bits(key, (), jnp.uint32)
        arrays: dict[tuple, Any] = {}
        for leaf in self.program.leaves:
            same = (leaf.start, leaf.value.type)
            if same not in arrays and not leaf.is_number:
                arrays[same] = first_value(leaf, self.program.keys, seed)
        return [
            _number(leaf) if leaf.is_number else arrays[leaf.start, leaf.value.type]
            for leaf in self.program.leaves
        ]

    def iterate(self, state: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        block = self.program.block
        results = Interpreter(self.host, self.ordered).block(block, state, {})
        count = len(self.program.ends)
        return results[:count], metrics_of(results[count:])


def metrics_of(values: Sequence[Any]) -> dict[str, Any]:
    """A number for each array."""
    return {f"m{k}": jnp.mean(x.astype(float) if x.dtype == bool else x) for k, x in enumerate(values)}


def _number(leaf: Leaf) -> float | int:
    """The start of a leaf that is a number of Python's."""
    return leaf.start % 7 + 2 if leaf.value.kind == "i" else leaf.start / 100


def first_value(leaf: Leaf, implementation: str, seed: Any) -> Any:
    """The start of a leaf of the state."""
    value, start = leaf.value, leaf.start
    size = int(np.prod(value.shape))
    if value.kind == "f":
        return jnp.sin(1.3 * jnp.arange(size, dtype=float) + start).reshape(value.shape)
    if value.kind == "i":
        return (jnp.arange(size, dtype=jnp.int32).reshape(value.shape) * 7 + start) % BATCH
    if value.kind == "b":
        return (jnp.arange(size).reshape(value.shape) + start) % 3 == 0
    key = jax.random.fold_in(jax.random.key(start, impl=implementation), seed)
    return jax.random.split(key, value.shape) if value.shape else key


class Interpreter:
    """Runs lines on arrays."""

    def __init__(self, host: Host, ordered: bool = True):
        self.host, self.ordered = host, ordered

    def block(self, block: Block, arguments: Sequence[Any], around: Mapping[str, Any]) -> list[Any]:
        """The block's results."""
        found = {**around, **{v.name: x for v, x in zip(block.params, arguments, strict=True)}}
        for line in block.lines:
            results = self.line(line, [found[v.name] for v in line.reads], found)
            found |= {v.name: x for v, x in zip(line.makes, results, strict=True)}
        return [found[v.name] for v in block.results]

    def line(self, line: Line, reads: list[Any], around: Mapping[str, Any]) -> Sequence[Any]:
        """What the line makes."""
        return getattr(self, f"_{line.kind}")(line, reads, around)

    def _op(self, line: Line, reads: list[Any], around: Mapping[str, Any]) -> Sequence[Any]:
        return [OPERATIONS[line.name].run(line.number, *reads)]

    def _fragment(self, line: Line, reads: list[Any], around: Mapping[str, Any]) -> Sequence[Any]:
        (block,) = line.blocks
        in_axes, out_axes, packing, *called = line.options
        name = called[0] if called else line.name
        if packing == "tree":
            parts = [f"a{k}" for k in range(len(reads))]
            function = fdg.fragment(
                line.role, (dict(zip(parts, in_axes, strict=True)),), {"made": list(out_axes)}, name=name
            )(lambda packed: {"made": self.block(block, [packed[part] for part in parts], {})})
            return function(dict(zip(parts, reads, strict=True)))["made"]
        # Of keywords the batch is axis 0.
        words = [k for k, axis in enumerate(in_axes) if packing == "words" and axis == 0]
        axes = tuple(axis for k, axis in enumerate(in_axes) if k not in words)

        def run(*arrays: Any, **named: Any) -> tuple[Any, ...]:
            others = iter(arrays)
            given = [named[f"a{k}"] if k in words else next(others) for k in range(len(reads))]
            return tuple(self.block(block, given, {}))

        function = fdg.fragment(line.role, axes, out_axes, name=name)(run)
        return function(
            *(x for k, x in enumerate(reads) if k not in words), **{f"a{k}": reads[k] for k in words}
        )

    def _scan(self, line: Line, reads: list[Any], around: Mapping[str, Any]) -> Sequence[Any]:
        (block,), (carried, direction, stacked) = line.blocks, line.options
        rows = [
            rows_of(x, line.number) if made else x for x, made in zip(reads[carried:], stacked, strict=True)
        ]

        def one(carry: Any, row: Any) -> Any:
            results = self.block(block, [*carry, *row], around)
            return results[:carried], results[carried:]

        last, stacks = lax.scan(
            one, reads[:carried], rows, length=line.number, reverse=direction == "reverse"
        )
        return [*last, *stacks]

    def _fori(self, line: Line, reads: list[Any], around: Mapping[str, Any]) -> Sequence[Any]:
        (block,) = line.blocks

        return lax.fori_loop(
            0, line.number, lambda t, carry: self.block(block, [counter(t), *carry], around), reads
        )

    def _while(self, line: Line, reads: list[Any], around: Mapping[str, Any]) -> Sequence[Any]:
        (block,), (number, *carry) = line.blocks, reads
        return lax.while_loop(
            lambda s: s[0] < number % 3,
            lambda s: (s[0] + 1, self.block(block, s[1], around)),
            (jnp.zeros_like(number), carry),
        )[1]

    def _cond(self, line: Line, reads: list[Any], around: Mapping[str, Any]) -> Sequence[Any]:
        if len(line.blocks) == 2:
            first, second = line.blocks
            return lax.cond(
                reads[0] % 2 == 0,
                lambda: self.block(first, [], around),
                lambda: self.block(second, [], around),
            )
        branches = [lambda block=block: self.block(block, [], around) for block in line.blocks]
        return lax.switch(reads[0] % len(branches), branches)

    def _jit(self, line: Line, reads: list[Any], around: Mapping[str, Any]) -> Sequence[Any]:
        return jax.jit(lambda *x: self.block(line.blocks[0], x, around))(*reads)

    def _remat(self, line: Line, reads: list[Any], around: Mapping[str, Any]) -> Sequence[Any]:
        return jax.checkpoint(lambda *x: self.block(line.blocks[0], x, around))(*reads)

    def _custom_jvp(self, line: Line, reads: list[Any], around: Mapping[str, Any]) -> Sequence[Any]:
        raw = lambda *x: self.block(line.blocks[0], x, {})  # noqa: E731
        function = jax.custom_jvp(raw)
        function.defjvp(lambda primals, tangents: jax.jvp(raw, primals, tangents))
        return function(*reads)

    def _custom_vjp(self, line: Line, reads: list[Any], around: Mapping[str, Any]) -> Sequence[Any]:
        raw = lambda *x: self.block(line.blocks[0], x, {})  # noqa: E731
        function = jax.custom_vjp(raw)
        function.defvjp(lambda *x: jax.vjp(raw, *x), lambda pull, ct: pull(ct))
        return function(*reads)

    def _vmap(self, line: Line, reads: list[Any], around: Mapping[str, Any]) -> Sequence[Any]:
        mapped, out_axis, in_axis = line.options
        axes = tuple(min(in_axis, x.ndim) if made else None for x, made in zip(reads, mapped, strict=True))
        operands = [
            x if axis is None else jnp.moveaxis(rows_of(x, 2), 0, axis)
            for x, axis in zip(reads, axes, strict=True)
        ]
        return jax.vmap(lambda *x: self.block(line.blocks[0], x, {}), axes, out_axis)(*operands)

    def _linearize(self, line: Line, reads: list[Any], around: Mapping[str, Any]) -> Sequence[Any]:
        def function(first: Any) -> Any:
            return self.block(line.blocks[0], [first, *reads[1:]], {})[0]

        made, push = jax.linearize(function, reads[0])
        return [jnp.tanh(made + push(0.5 * jnp.cos(reads[0])))]

    def _grad(self, line: Line, reads: list[Any], around: Mapping[str, Any]) -> Sequence[Any]:
        def loss(first: Any) -> Any:
            return jnp.mean(self.block(line.blocks[0], [first, *reads[1:]], {})[0])

        return [jnp.tanh(3 * jax.grad(loss)(reads[0]))]

    def _effect(self, line: Line, reads: list[Any], around: Mapping[str, Any]) -> Sequence[Any]:
        (x,) = reads
        name = "_".join(v.name for v in (*line.reads, *line.makes))
        if line.name == "send":
            io_callback(lambda x: self.host.send(name, x), None, x, ordered=self.ordered)
            return []
        if line.name == "receive":
            shape = jax.ShapeDtypeStruct((BATCH,), x.dtype)
            return [io_callback(lambda x: self.host.receive(name, x), shape, x, ordered=self.ordered)]
        jax.debug.callback(lambda x: self.host.note(name, x), x)
        return []


def counter(trip: Any) -> Any:
    """A loop's counter as int32, which programs have: JAX's own, weakly typed, or its int64 converted."""
    return trip if trip.dtype == jnp.int32 else trip.astype(jnp.int32)


def rows_of(x: Any, count: int) -> Any:
    """An array for each trip or agent."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.stack([x] * count)
    return jnp.stack([x * (1 - 0.1 * t) for t in range(count)])


def made_by(line: Line) -> list[Value]:
    """What the line makes: nameless values. Of operations JAX says it, of the others their blocks.

    Raises:
      Whatever JAX raises for operands that do not fit.
    """
    if line.kind == "op":
        return [
            _made_by_operation(
                line.name, line.number, tuple(dataclasses.replace(v, name="") for v in line.reads)
            )
        ]
    if line.kind == "effect":
        return [Value("", "f", (BATCH,))] if line.name == "receive" else []
    if line.kind == "linearize":
        return list(line.blocks[0].results[:1])
    if line.kind == "grad":
        return [line.reads[0]]
    results = line.blocks[0].results
    if line.kind == "vmap":
        at_end = line.options[1] == -1
        return [Value("", v.kind, (*v.shape, 2) if at_end else (2, *v.shape)) for v in results]
    if line.kind == "scan":
        carried = line.options[0]
        stacks = [Value("", v.kind, (line.number, *v.shape)) for v in results[carried:]]
        return [*results[:carried], *stacks]
    return list(results)


@functools.cache
def _made_by_operation(name: str, variant: int, reads: tuple[Value, ...]) -> Value:
    specs = [jax.eval_shape(lambda v=v: first_value(Leaf(v, 0), "threefry2x32", 0)) for v in reads]
    shape = jax.eval_shape(lambda *x: OPERATIONS[name].run(variant, *x), *specs)
    return Value("", kind_of(shape.dtype), shape.shape)


def kind_of(dtype: Any) -> str:
    """f, i, b or k."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return "k"
    return "b" if jnp.issubdtype(dtype, jnp.bool_) else "f" if jnp.issubdtype(dtype, jnp.floating) else "i"
