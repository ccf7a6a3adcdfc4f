"""Finds the equations that compute a program's gradients and can run tile by tile over the batch.

They form a set: no equation outside it reads batched values that it computes, and no equation inside it reads
its sums over the batch, except to transpose them.

For example, `loss = mean(square(x @ w - y))` with x [4096, 8] split along axis 0, and its gradient:

    p = dot_general x w     [4096]
    e = sub p y             [4096]
    g = dot_general e x     [8]     a sum over the batch
    d = mul g 0.000488      [8]

The first three form the set: nothing else reads `p` or `e`, so they can process the batch in tiles
(`lowering.tiles`). Their working set is `x`, `y`, `p` and `e`.
"""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from fdg import jaxprs
from fdg.batch.flow import EquationFlow, Flow, is_independent
from fdg.batch.follow import follow
from fdg.batch.rules.result import Axis
from fdg.fragment import FragmentMark
from fdg.jax_internals import ClosedJaxpr
from fdg.jaxprs.classes import PRODUCTS

# Reductions that can be computed per tile and then combined, by `+` or by max and min.
_SUMS = PRODUCTS | {"reduce_sum"}
_EXTREMES = frozenset(("reduce_max", "reduce_min"))


@dataclasses.dataclass(frozen=True)
class GradientSums:
    """A set of equations that can run in tiles over the batch, with its inputs and outputs."""

    members: frozenset[int]  # positions of the equations in their jaxpr
    equations: tuple[EquationFlow, ...]
    inputs: tuple[Any, ...]  # variables that the equations read but do not compute
    outputs: tuple[Any, ...]  # results that other equations read
    batched: tuple[Any, ...]  # the batched variables that the equations read or compute
    axis_of: dict[Any, Axis]  # the batch axis of each value

    @property
    def bytes(self) -> int:
        """The bytes of all batched values."""
        return sum(jaxprs.bytes_of(v.aval) for v in self.batched)


def gradient_sums(flow: Flow) -> GradientSums | None:
    """The gradient computations at the end of a jaxpr; None if there are none."""
    members = _members(flow)
    if not any(contracts_batch(flow.equations[i]) for i in members):
        return None
    steps = [flow.equations[i] for i in sorted(members)]
    axis_of = {v: axis for v, (axis, _) in zip(flow.jaxpr.invars, flow.inputs, strict=True)}
    for step in flow.equations:
        axis_of.update(zip(step.eqn.outvars, step.results, strict=True))
    computed = {v for step in steps for v in step.eqn.outvars}
    read_by_members = (v for step in steps for v in jaxprs.variables(step.eqn.invars))
    inputs = list(dict.fromkeys(v for v in read_by_members if v not in computed))
    others = [step.eqn.invars for i, step in enumerate(flow.equations) if i not in members]
    read = {v for atoms in (*others, flow.jaxpr.outvars) for v in jaxprs.variables(atoms)}
    outputs = [v for step in steps for v in step.eqn.outvars if v in read]
    batched = [v for v in (*inputs, *computed) if axis_of.get(v) is not None]
    return GradientSums(members, tuple(steps), tuple(inputs), tuple(outputs), tuple(batched), axis_of)


class GradientBytes(NamedTuple):
    """The bytes of batched values that gradients read or compute: of the largest gradient, and of all."""

    largest: int
    total: int


def gradient_bytes(jaxpr: ClosedJaxpr, axes: Sequence[Axis]) -> GradientBytes:
    """The `GradientBytes` of a program whose inputs have the batch axes `axes`; zeros without a gradient."""

    @functools.cache
    def flow_bytes(flow: Flow) -> GradientBytes:
        sums = gradient_sums(inline_calls(flow, 1)) if any(map(contracts_batch, flow.equations)) else None
        largest = total = 0 if sums is None else sums.bytes
        for step in flow.equations:
            if not step.bodies:  # an equation without bodies contains no gradient
                continue
            for body, jaxpr_body in zip(step.bodies, jaxprs.bodies(step.eqn), strict=True):
                inner = flow_bytes(body)
                largest = max(largest, inner.largest)
                total += jaxpr_body.trips * inner.total
        return GradientBytes(largest, total)

    return flow_bytes(follow(jaxpr, axes, 1))


def inline_calls(flow: Flow, devices: int) -> Flow:
    """Inlines all calls of a flow except calls of fragments."""
    axes = [axis for axis, _ in flow.inputs]
    jaxpr: Any = jaxprs.inline(flow.jaxpr, _inlinable_body)
    return follow(jaxprs.without_dead_code(jaxpr), axes, devices, flow.outputs)


def _members(flow: Flow) -> frozenset[int]:
    """The positions of the set's equations: all readers of a member's batched results are members."""
    readers: dict[Any, list[int]] = {}
    for i, step in enumerate(flow.equations):
        for v in jaxprs.variables(step.eqn.invars):
            readers.setdefault(v, []).append(i)
    members: set[int] = set()
    early: set[int] = set()  # equations that have to run before the tiles
    for i in range(len(flow.equations) - 1, -1, -1):
        step = flow.equations[i]
        readers_after = [j for v in step.eqn.outvars for j in readers.get(v, ())]
        is_batched = any(axis is not None for axis in (*step.operands, *step.results)) or step.gathered
        if not is_batched:
            if any(j in members or j in early for j in readers_after) or step.eqn.effects:
                early.add(i)
            continue
        split = [v for v, axis in zip(step.eqn.outvars, step.results, strict=True) if axis is not None]
        unsplit = [v for v in step.eqn.outvars if v not in split]
        is_member = all(j in members for v in split for j in readers.get(v, ()))
        is_member &= not any(j in members or j in early for v in unsplit for j in readers.get(v, ()))
        (members if is_member and _is_tileable(step) else early).add(i)
    return frozenset(members | _transposed_sums(flow, members))


def _transposed_sums(flow: Flow, members: Collection[int]) -> set[int]:
    """The positions of transposes of members' sums; XLA fuses each into the product that it transposes."""
    sums = {v for i in members if flow.equations[i].reduced for v in flow.equations[i].eqn.outvars}
    return {
        i
        for i, step in enumerate(flow.equations)
        if step.eqn.primitive.name == "transpose" and step.eqn.invars[0] in sums
    }


def _is_tileable(step: EquationFlow) -> bool:
    """Whether an equation that reads or computes batched values can be computed tile by tile."""
    if step.gathered or step.agrees_on_predicate or step.eqn.effects:
        return False
    if step.reduced:
        name, dtype = step.eqn.primitive.name, step.eqn.outvars[0].aval.dtype
        # JAX sums booleans over devices as integers.
        return name in (*_SUMS, *_EXTREMES) and jnp.issubdtype(dtype, jnp.number)
    return all(axis is not None for axis in step.results) and all(map(is_independent, step.bodies))


def contracts_batch(step: EquationFlow) -> bool:
    """Whether an equation is a product or a convolution that contracts the batch."""
    return step.reduced and step.eqn.primitive.name in PRODUCTS


def _inlinable_body(eqn: Any) -> Any:
    """The open body of a plain call without constants; None for any other equation."""
    if eqn.primitive.name != "jit" or FragmentMark.of(eqn) is not None or eqn.effects:
        return None
    (body,) = jaxprs.bodies(eqn)
    return None if body.jaxpr.constvars or body.jaxpr.effects else body.jaxpr
