"""Finds the gradient computations of a program: equations that can run tile by tile over the batch.

Only they read the batched values that they compute, and no batched equation reads their sums over the batch.

`loss = mean(square(x @ w - y))` with x [4096, 8] split along axis 0, and its gradient:

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
from fdg.identity_cache import IdentityCache
from fdg.jax_internals import ClosedJaxpr

# Reductions that can be computed for each tile and combined, by `+` or by max and min.
_SUMS = frozenset(("reduce_sum", "dot_general", "conv_general_dilated"))
_EXTREMES = frozenset(("reduce_max", "reduce_min"))


@dataclasses.dataclass(frozen=True)
class GradientSums:
    """Equations that can run in tiles over the batch, and the values that enter and leave them."""

    members: frozenset[int]  # positions of the equations
    equations: tuple[EquationFlow, ...]
    inputs: tuple[Any, ...]  # the outer values that they read
    outputs: tuple[Any, ...]  # their results that are read outside
    batched: tuple[Any, ...]  # the batched values that they read and make
    axis_of: dict[Any, Axis]  # the batch axis of each value

    @property
    def bytes(self) -> int:
        """Bytes of all batched values."""
        return sum(jaxprs.bytes_of(v.aval) for v in self.batched)


def gradient_sums(flow: Flow) -> GradientSums | None:
    """The gradient computations at the end of a jaxpr; None if there are none."""
    members = _members(flow)
    if not any(contracts_batch(flow.equations[i]) for i in members):
        return None
    chosen = [flow.equations[i] for i in sorted(members)]
    axis_of = {v: axis for v, (axis, _) in zip(flow.jaxpr.invars, flow.inputs, strict=True)}
    for each in flow.equations:
        axis_of.update(zip(each.eqn.outvars, each.results, strict=True))
    inside = {v for each in chosen for v in each.eqn.outvars}
    inputs = list(
        dict.fromkeys(v for each in chosen for v in jaxprs.variables(each.eqn.invars) if v not in inside)
    )
    read = {
        v for i, e in enumerate(flow.equations) if i not in members for v in jaxprs.variables(e.eqn.invars)
    }
    read |= set(jaxprs.variables(flow.jaxpr.outvars))
    outputs = [v for each in chosen for v in each.eqn.outvars if v in read]
    batched = [v for v in (*inputs, *inside) if axis_of.get(v) is not None]
    return GradientSums(members, tuple(chosen), tuple(inputs), tuple(outputs), tuple(batched), axis_of)


class GradientBytes(NamedTuple):
    """Bytes of the batched values of a program's gradients: of the largest one, and of all."""

    largest: int
    together: int


def gradient_bytes(jaxpr: ClosedJaxpr, axes: Sequence[Axis]) -> GradientBytes:
    """The `GradientBytes` of a program; zeros if it has no gradient over the batch."""

    def of(flow: Flow) -> GradientBytes:
        found = gradient_sums(calls_inlined(flow, 1)) if any(map(contracts_batch, flow.equations)) else None
        here = 0 if found is None else found.bytes
        largest, together = here, here
        for each in flow.equations:
            if not each.bodies:  # nothing in it is on the batch
                continue
            for body, of_eqn in zip(each.bodies, jaxprs.bodies(each.eqn), strict=True):
                inside = known(body, None, functools.partial(of, body))
                largest = max(largest, inside.largest)
                together += of_eqn.trips * inside.together
        return GradientBytes(largest, together)

    known: IdentityCache[GradientBytes] = IdentityCache()
    return of(follow(jaxpr, axes, 1))


def calls_inlined(flow: Flow, devices: int) -> Flow:
    """A flow with calls inlined, except fragments."""
    axes = [axis for axis, _ in flow.inputs]
    jaxpr: Any = jaxprs.inlined(flow.jaxpr, _callee)
    return follow(jaxprs.without_dead_code(jaxpr), axes, devices, flow.outputs)


def _members(flow: Flow) -> frozenset[int]:
    """Goes backwards: an equation is a member if all equations that read its batched results are."""
    readers: dict[Any, list[int]] = {}
    for i, each in enumerate(flow.equations):
        for v in jaxprs.variables(each.eqn.invars):
            readers.setdefault(v, []).append(i)
    members: set[int] = set()
    early: set[int] = set()  # equations that have to run before the tiles do
    for i in range(len(flow.equations) - 1, -1, -1):
        each = flow.equations[i]
        after = [j for v in each.eqn.outvars for j in readers.get(v, ())]
        on_batch = any(axis is not None for axis in (*each.operands, *each.results)) or each.gathered
        if not on_batch:
            if any(j in members or j in early for j in after) or each.eqn.effects:
                early.add(i)
            continue
        split = [v for v, axis in zip(each.eqn.outvars, each.results, strict=True) if axis is not None]
        shared = [v for v in each.eqn.outvars if v not in split]
        fine = all(j in members for v in split for j in readers.get(v, ()))
        fine &= not any(j in members or j in early for v in shared for j in readers.get(v, ()))
        (members if fine and _can_be_tiled(each) else early).add(i)
    return frozenset(members | _transposed_sums(flow, members))


def _transposed_sums(flow: Flow, members: Collection[int]) -> set[int]:
    """The transposes of members' sums: XLA fuses each into its product."""
    sums = {v for i in members if flow.equations[i].reduced for v in flow.equations[i].eqn.outvars}
    return {
        i
        for i, each in enumerate(flow.equations)
        if each.eqn.primitive.name == "transpose" and each.eqn.invars[0] in sums
    }


def _can_be_tiled(each: EquationFlow) -> bool:
    if each.gathered or each.agreed or each.eqn.effects:
        return False
    if each.reduced:
        name, dtype = each.eqn.primitive.name, each.eqn.outvars[0].aval.dtype
        return name in _SUMS or (name in _EXTREMES and jnp.issubdtype(dtype, jnp.number))
    return all(axis is not None for axis in each.results) and all(map(is_independent, each.bodies))


def contracts_batch(each: EquationFlow) -> bool:
    """Whether an equation is a product or a convolution that contracts the batch."""
    return each.reduced and each.eqn.primitive.name in ("dot_general", "conv_general_dilated")


def _callee(eqn: Any) -> Any:
    """The open body of a plain call without constants; None for any other equation."""
    if eqn.primitive.name not in ("jit", "pjit") or FragmentMark.of(eqn) is not None or eqn.effects:
        return None
    (body,) = jaxprs.bodies(eqn)
    return None if body.jaxpr.constvars or body.jaxpr.effects else body.jaxpr
