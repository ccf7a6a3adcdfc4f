"""Runs a program as an algorithm in plain JAX, with `fdg.fragment` around its fragments.

Kinds of lines beside "op" and "fragment", with their options:

  scan         (number of carried inputs, "reverse" or "", whether each other input is stacked here)
  fori, while  carry all inputs; the body of `fori` takes the trip number first, `while` makes as many trips
               as its first input modulo 3 and carries the others
  cond         chooses a block by its input; `jit`, `remat`, `custom_jvp`, `custom_vjp` call their block
  vmap         (whether each input is stacked here, for two agents; the results' axis; the inputs' axis)
  grad         of the mean of the block's first result, with respect to the first input
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
    """Records host calls of a program in order, and its prints (notes), which are unordered."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, np.ndarray]] = []
        self.notes: list[tuple[str, np.ndarray]] = []

    def send(self, name: str, x: Any) -> None:
        self.calls.append((name, np.array(x)))

    def receive(self, name: str, x: Any) -> np.ndarray:
        """Returns a value that depends on the number of earlier calls."""
        self.calls.append((name, np.array(x)))
        return np.sin(np.full(BATCH, len(self.calls))).astype(np.asarray(x).dtype)

    def note(self, name: str, x: Any) -> None:
        self.notes.append((name, np.array(x)))


class Algorithm:
    """A program's `init` and `iterate`; `ordered` says whether its host calls are ordered."""

    def __init__(self, program: Program, ordered: bool = True):
        self.program, self.host, self.ordered = program, Host(), ordered

    def init(self, key: Any) -> list[Any]:
        """Leaves with the same `start` and type share one array."""
        seed = jax.random.bits(key, (), jnp.uint32)
        arrays: dict[tuple, Any] = {}
        for leaf in self.program.leaves:
            same = (leaf.start, leaf.value.type)
            if same not in arrays and not leaf.is_number:
                arrays[same] = initial_value(leaf, self.program.keys, seed)
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
    """The mean of each array."""
    return {f"m{k}": jnp.mean(x.astype(float) if x.dtype == bool else x) for k, x in enumerate(values)}


def _number(leaf: Leaf) -> float | int:
    """The initial value of a leaf that is a Python number."""
    return leaf.start % 7 + 2 if leaf.value.kind == "i" else leaf.start / 100


def initial_value(leaf: Leaf, implementation: str, seed: Any) -> Any:
    """The initial array of a state leaf."""
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

    def block(self, block: Block, arguments: Sequence[Any], scope: Mapping[str, Any]) -> list[Any]:
        """Runs a block; returns its results."""
        found = {**scope, **{v.name: x for v, x in zip(block.params, arguments, strict=True)}}
        for line in block.lines:
            results = self.line(line, [found[v.name] for v in line.inputs], found)
            found |= {v.name: x for v, x in zip(line.outputs, results, strict=True)}
        return [found[v.name] for v in block.results]

    def line(self, line: Line, inputs: list[Any], scope: Mapping[str, Any]) -> Sequence[Any]:
        """Runs a line; returns its outputs."""
        return getattr(self, f"_{line.kind}")(line, inputs, scope)

    def _op(self, line: Line, inputs: list[Any], scope: Mapping[str, Any]) -> Sequence[Any]:
        return [OPERATIONS[line.name].run(line.number, *inputs)]

    def _fragment(self, line: Line, inputs: list[Any], scope: Mapping[str, Any]) -> Sequence[Any]:
        (block,) = line.blocks
        in_axes, out_axes, packing, *called = line.options
        name = called[0] if called else line.name
        if packing == "tree":
            parts = [f"a{k}" for k in range(len(inputs))]
            function = fdg.fragment(
                line.role, (dict(zip(parts, in_axes, strict=True)),), {"made": list(out_axes)}, name=name
            )(lambda packed: {"made": self.block(block, [packed[part] for part in parts], {})})
            return function(dict(zip(parts, inputs, strict=True)))["made"]
        # The batch axis of keyword arguments is 0.
        by_keyword = [k for k, axis in enumerate(in_axes) if packing == "words" and axis == 0]
        axes = tuple(axis for k, axis in enumerate(in_axes) if k not in by_keyword)

        def run(*arrays: Any, **keywords: Any) -> tuple[Any, ...]:
            others = iter(arrays)
            given = [keywords[f"a{k}"] if k in by_keyword else next(others) for k in range(len(inputs))]
            return tuple(self.block(block, given, {}))

        function = fdg.fragment(line.role, axes, out_axes, name=name)(run)
        return function(
            *(x for k, x in enumerate(inputs) if k not in by_keyword),
            **{f"a{k}": inputs[k] for k in by_keyword},
        )

    def _scan(self, line: Line, inputs: list[Any], scope: Mapping[str, Any]) -> Sequence[Any]:
        (block,), (carried, direction, stacked) = line.blocks, line.options
        rows = [
            stack_copies(x, line.number) if s else x for x, s in zip(inputs[carried:], stacked, strict=True)
        ]

        def one(carry: Any, row: Any) -> Any:
            results = self.block(block, [*carry, *row], scope)
            return results[:carried], results[carried:]

        last, stacks = lax.scan(
            one, inputs[:carried], rows, length=line.number, reverse=direction == "reverse"
        )
        return [*last, *stacks]

    def _fori(self, line: Line, inputs: list[Any], scope: Mapping[str, Any]) -> Sequence[Any]:
        (block,) = line.blocks

        return lax.fori_loop(
            0, line.number, lambda t, carry: self.block(block, [counter(t), *carry], scope), inputs
        )

    def _while(self, line: Line, inputs: list[Any], scope: Mapping[str, Any]) -> Sequence[Any]:
        (block,), (number, *carry) = line.blocks, inputs
        return lax.while_loop(
            lambda s: s[0] < number % 3,
            lambda s: (s[0] + 1, self.block(block, s[1], scope)),
            (jnp.zeros_like(number), carry),
        )[1]

    def _cond(self, line: Line, inputs: list[Any], scope: Mapping[str, Any]) -> Sequence[Any]:
        if len(line.blocks) == 2:
            first, second = line.blocks
            return lax.cond(
                inputs[0] % 2 == 0,
                lambda: self.block(first, [], scope),
                lambda: self.block(second, [], scope),
            )
        branches = [lambda block=block: self.block(block, [], scope) for block in line.blocks]
        return lax.switch(inputs[0] % len(branches), branches)

    def _jit(self, line: Line, inputs: list[Any], scope: Mapping[str, Any]) -> Sequence[Any]:
        return jax.jit(lambda *x: self.block(line.blocks[0], x, scope))(*inputs)

    def _remat(self, line: Line, inputs: list[Any], scope: Mapping[str, Any]) -> Sequence[Any]:
        return jax.checkpoint(lambda *x: self.block(line.blocks[0], x, scope))(*inputs)

    def _custom_jvp(self, line: Line, inputs: list[Any], scope: Mapping[str, Any]) -> Sequence[Any]:
        raw = lambda *x: self.block(line.blocks[0], x, {})  # noqa: E731
        function = jax.custom_jvp(raw)
        function.defjvp(lambda primals, tangents: jax.jvp(raw, primals, tangents))
        return function(*inputs)

    def _custom_vjp(self, line: Line, inputs: list[Any], scope: Mapping[str, Any]) -> Sequence[Any]:
        raw = lambda *x: self.block(line.blocks[0], x, {})  # noqa: E731
        function = jax.custom_vjp(raw)
        function.defvjp(lambda *x: jax.vjp(raw, *x), lambda pull, ct: pull(ct))
        return function(*inputs)

    def _vmap(self, line: Line, inputs: list[Any], scope: Mapping[str, Any]) -> Sequence[Any]:
        mapped, out_axis, in_axis = line.options
        axes = tuple(min(in_axis, x.ndim) if m else None for x, m in zip(inputs, mapped, strict=True))
        operands = [
            x if axis is None else jnp.moveaxis(stack_copies(x, 2), 0, axis)
            for x, axis in zip(inputs, axes, strict=True)
        ]
        return jax.vmap(lambda *x: self.block(line.blocks[0], x, {}), axes, out_axis)(*operands)

    def _linearize(self, line: Line, inputs: list[Any], scope: Mapping[str, Any]) -> Sequence[Any]:
        def function(first: Any) -> Any:
            return self.block(line.blocks[0], [first, *inputs[1:]], {})[0]

        output, push = jax.linearize(function, inputs[0])
        return [jnp.tanh(output + push(0.5 * jnp.cos(inputs[0])))]

    def _grad(self, line: Line, inputs: list[Any], scope: Mapping[str, Any]) -> Sequence[Any]:
        def loss(first: Any) -> Any:
            return jnp.mean(self.block(line.blocks[0], [first, *inputs[1:]], {})[0])

        return [jnp.tanh(3 * jax.grad(loss)(inputs[0]))]

    def _effect(self, line: Line, inputs: list[Any], scope: Mapping[str, Any]) -> Sequence[Any]:
        (x,) = inputs
        name = "_".join(v.name for v in (*line.inputs, *line.outputs))
        if line.name == "send":
            io_callback(lambda x: self.host.send(name, x), None, x, ordered=self.ordered)
            return []
        if line.name == "receive":
            shape = jax.ShapeDtypeStruct((BATCH,), x.dtype)
            return [io_callback(lambda x: self.host.receive(name, x), shape, x, ordered=self.ordered)]
        jax.debug.callback(lambda x: self.host.note(name, x), x)
        return []


def counter(trip: Any) -> Any:
    """A loop counter as int32: JAX's weakly typed one as it is, an int64 one converted."""
    return trip if trip.dtype == jnp.int32 else trip.astype(jnp.int32)


def stack_copies(x: Any, count: int) -> Any:
    """Stacks one array per trip or agent: floats are scaled by 1 - 0.1 t, others repeated."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.stack([x] * count)
    return jnp.stack([x * (1 - 0.1 * t) for t in range(count)])


def output_types(line: Line) -> list[Value]:
    """The types of a line's outputs, as values without names.

    Raises:
      Whatever JAX raises if the types of the inputs do not fit.
    """
    if line.kind == "op":
        return [
            _output_type(line.name, line.number, tuple(dataclasses.replace(v, name="") for v in line.inputs))
        ]
    if line.kind == "effect":
        return [Value("", "f", (BATCH,))] if line.name == "receive" else []
    if line.kind == "linearize":
        return list(line.blocks[0].results[:1])
    if line.kind == "grad":
        return [line.inputs[0]]
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
def _output_type(name: str, variant: int, inputs: tuple[Value, ...]) -> Value:
    specs = [jax.eval_shape(lambda v=v: initial_value(Leaf(v, 0), "threefry2x32", 0)) for v in inputs]
    shape = jax.eval_shape(lambda *x: OPERATIONS[name].run(variant, *x), *specs)
    return Value("", kind_of(shape.dtype), shape.shape)


def kind_of(dtype: Any) -> str:
    """The kind of a dtype: "f", "i", "b" or "k"."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return "k"
    return "b" if jnp.issubdtype(dtype, jnp.bool_) else "f" if jnp.issubdtype(dtype, jnp.floating) else "i"
