"""Orders collectives: a collective that follows a loop in the program waits until the loop is done.

XLA's CPU backend starts an operation as soon as its operands are ready, also while a loop runs. So the
all-reduce of a metric may run concurrently with collectives of the training loop:

    parameters = loop over minibatches: ... sum of gradients ...
    error = sum over the batch (x)            # does not depend on the loop

A device that waits in two collectives blocks two threads. Each device would then need two threads, and more
threads than cores slow all devices down (docs/decisions/069-a-thread-a-host-device.md). This pass adds a data
dependency of the later collective on the earlier loop:

    error = sum over the batch (x, after `parameters`)

The numbers are the same, bit for bit.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from fdg import jaxprs
from fdg.batch.flow import EquationFlow, Flow
from fdg.batch.follow import follow
from fdg.batch.rules.result import Axis
from fdg.identity_cache import IdentityCache
from fdg.jax_internals import ClosedJaxpr
from fdg.lowering.hoisting import HoistRule, hoist
from fdg.rowwise import rowwise

_LOOPS = ("scan", "while", "cond")
MOST_BYTES = 8 << 20  # of values computed ahead for all trips of a loop; they should fit into a cache
_ZERO_BITS = 7  # a popcount is at most 64, so shifting it right by 7 gives 0


def in_order(
    jaxpr: ClosedJaxpr, axes: Sequence[Axis], devices: int, output_axes: Sequence[Axis] | None = None
) -> ClosedJaxpr:
    """Makes each collective depend on the loops before it that contain collectives."""
    flow = follow(jaxpr, axes, devices, output_axes)
    return (
        jaxprs.with_jaxpr(jaxpr, jaxprs.Rewriter(_order_collectives)(flow))
        if _has_inner_collectives(flow)
        else jaxpr
    )


def hoist_batch_reductions(
    jaxpr: ClosedJaxpr, axes: Sequence[Axis], devices: int, output_axes: Sequence[Axis] | None = None
) -> ClosedJaxpr:
    """Hoists batch reductions that are loop-invariant out of loops: one collective for all trips.

    For instance, the mean and deviation of each minibatch's advantages need one collective, not one in each
    trip. Takes the arguments of `in_order`.
    """
    flow = follow(jaxpr, axes, devices, output_axes)  # one flow serves many numbers of devices
    return _HOISTED(flow, None, lambda: _hoist_reductions(jaxpr, flow))


_HOISTED: IdentityCache[ClosedJaxpr] = IdentityCache(max_entries=256)


def _hoist_reductions(jaxpr: ClosedJaxpr, flow: Flow) -> ClosedJaxpr:
    steps = list(_steps(flow))
    sums = {id(step.eqn) for step in steps if step.reduced and step.eqn.primitive.name.startswith("reduce_")}
    # Hoisting other collectives, such as those that shuffle samples, would run them twice.
    others = {id(s.eqn) for s in steps if s.gathered or s.agreed or (s.reduced and id(s.eqn) not in sums)}
    taker = HoistRule(
        "sums", lambda eqn: id(eqn) in sums, MOST_BYTES, again=True, stays=lambda eqn: id(eqn) in others
    )
    return hoist(jaxpr, taker) if sums else jaxpr


def _steps(flow: Flow) -> Iterator[EquationFlow]:
    for step in flow.equations:
        yield step
        for body in step.bodies:
            yield from _steps(body)


def _has_collectives(step: EquationFlow) -> bool:
    return bool(step.gathered or step.reduced or step.agreed) or any(map(_has_inner_collectives, step.bodies))


def _has_inner_collectives(flow: Flow) -> bool:
    return bool(flow.gathered) or any(map(_has_collectives, flow.equations))


def _overlaps_later(step: EquationFlow) -> bool:
    """Whether it has a loop or branch with collectives, during which XLA runs later operations."""
    return any(map(_has_inner_collectives, step.bodies)) and (
        step.eqn.primitive.name in _LOOPS
        or any(_overlaps_later(inner) for body in step.bodies for inner in body.equations)
    )


class _CollectiveStep:
    """An equation with a collective, and the variables that depend on it."""

    def __init__(self, step: EquationFlow, read: set[Any]):
        # whether XLA runs later operations while this equation runs
        self.overlaps_later = _overlaps_later(step)
        # results that later equations may wait for, each with its batch axis
        self.results = _awaitable_results(step, read)
        self.behind: set[Any] = set(step.eqn.outvars)  # all variables that depend on one of its results

    def reaches(self, atoms: Iterable[Any]) -> bool:
        return any(not jaxprs.is_literal(v) and v in self.behind for v in atoms)


def _awaitable_results(step: EquationFlow, read: set[Any]) -> list[tuple[Any, Axis]]:
    """Results of a step that others can wait for; for a loop a single one, which changes in each trip.

    Prefers floats, so as not to take the loop's counter. Skips unread results: XLA would compute them only
    for this.
    """
    found = zip(step.eqn.outvars, step.results, strict=True)
    possible = [(v, axis) for v, axis in found if v in read and _can_wait(v)]
    if step.eqn.primitive.name not in _LOOPS:
        return possible
    replaced = _changed_results(step).values()

    def rank(result: tuple[Any, Axis]) -> tuple[bool, bool, int]:
        v, axis = result
        return axis is not None, not jax.numpy.issubdtype(v.aval.dtype, jnp.floating), jaxprs.bytes_of(v.aval)

    return sorted((result for result in possible if result[0] in replaced), key=rank)[:1]


def _changed_results(step: EquationFlow) -> dict[int, Any]:
    """A loop's results that change, by the position of their initial operand; of a branch, all results."""
    body = jaxprs.bodies(step.eqn)[-1]
    if step.eqn.primitive.name == "cond":
        return {len(step.operands) + j: v for j, v in enumerate(step.eqn.outvars)}
    inner, results = body.jaxpr.invars, body.jaxpr.outvars
    return {body.operands[i]: step.eqn.outvars[j] for i, j in body.carry if results[j] is not inner[i]}


def _order_collectives(flow: Flow, how: None, inside: jaxprs.Inside) -> list[Any]:
    """The equations of a flow, with dependencies between their collectives."""
    equations: list[Any] = []
    atoms = [*flow.jaxpr.outvars, *(v for eqn in flow.jaxpr.eqns for v in eqn.invars)]
    read = set(jaxprs.variables(atoms))
    before: list[_CollectiveStep] = []  # the last loop with collectives, and later collectives
    for step in flow.equations:
        eqn = inside(step.eqn, blocks=step.bodies) if step.bodies else step.eqn
        collective = _CollectiveStep(step, read) if _has_collectives(step) else None
        if collective is not None:
            awaited = [each for each in before if each.overlaps_later or collective.overlaps_later]
            eqn = eqn.replace(invars=_awaiting(step, eqn.invars, awaited, equations))
        for each in before:
            if each.reaches(step.eqn.invars) or (collective is not None and each in awaited):
                each.behind.update(step.eqn.outvars)
        equations.append(eqn)
        if collective is not None:
            before = [collective] if collective.overlaps_later else [*before, collective]
    return equations


def _awaiting(
    step: EquationFlow, operands: Sequence[Any], awaited: Sequence[_CollectiveStep], equations: list[Any]
) -> list[Any]:
    """A step's operands, made to depend on the awaited steps; appends the equations for that."""
    operands = list(operands)
    split = [i for i, axis in enumerate(step.operands) if axis is not None] + [*step.gathered]
    possible = [i for i, v in enumerate(operands) if not jaxprs.is_literal(v) and _can_wait(v)]
    if step.eqn.primitive.name in _LOOPS:  # a loop starts when its last operand is ready, so one is enough
        replaced = [i for i in possible if i in _changed_results(step)] or possible
        late = [each for each in awaited if not each.reaches(operands)]
        waiting = dict.fromkeys(sorted(replaced, key=lambda i: jaxprs.bytes_of(operands[i].aval))[:1], late)
    else:
        waiting = {i: [m for m in awaited if not m.reaches([operands[i]])] for i in possible if i in split}
    for i, late in waiting.items():
        axis = step.operands[i] if i not in step.gathered else None
        results = [
            result
            for each in late
            for result in each.results
            if _can_depend_locally(operands[i], axis, *result)
        ]
        if results:
            names = (operands[i], *(v for v, _ in results))
            (model,) = _wait_for_jaxpr(
                tuple(jaxprs.shapes_of(names)), (axis, *(of for _, of in results))
            ).eqns
            made = core.Var(operands[i].aval)
            equations.append(model.replace(invars=names, outvars=[made]))
            operands[i] = made
    return operands


def _can_wait(v: Any) -> bool:
    return v.aval.size > 0 and (
        _is_key(v.aval) or not jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended)
    )


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _can_depend_locally(v: Any, axis: Axis, result: Any, result_axis: Axis) -> bool:
    """Whether a value can depend on a result locally: it is replicated, or split into as many rows."""
    if result_axis is None:
        return True
    return axis is not None and v.aval.shape[axis] == result.aval.shape[result_axis]


@functools.lru_cache(maxsize=256)
def _wait_for_jaxpr(shapes: tuple[Any, ...], axes: tuple[Axis, ...]) -> Any:
    """A jaxpr of one equation that calls `wait_for`; with `rowwise` if a result is split over devices."""
    alone = all(axis is None for axis in axes[1:])
    waits = jax.jit(wait_for) if alone else rowwise(wait_for, in_axes=axes, out_axes=axes[0])
    return jaxprs.open_jaxpr(jax.make_jaxpr(waits)(*shapes))


def wait_for(x: jax.Array, *dependencies: jax.Array) -> jax.Array:
    """Returns `x`, bit for bit, with a data dependency on `dependencies` that XLA cannot remove.

    The dependencies may have any shape and dtype; all may be random keys.

    >>> wait_for(jnp.float32(2.5), jnp.ones(3)).item()
    2.5
    """
    if _is_key(x):
        return jax.random.wrap_key_data(
            wait_for(jax.random.key_data(x), *dependencies), impl=jax.random.key_impl(x)
        )
    nothing = functools.reduce(jnp.bitwise_or, map(_zero_from, dependencies))
    # Not zeros: XLA would drop the dependency of an `x` that is zero, such as a loop's counter.
    return lax.select(nothing == 0, x, lax.broadcast(nothing.astype(x.dtype), x.shape))


def _zero_from(array: jax.Array) -> jax.Array:
    """Zero, computed from an array: the number of set bits of its first element, shifted right by 7."""
    array = jax.random.key_data(array) if _is_key(array) else array
    one = lax.reshape(lax.slice(array, [0] * array.ndim, [1] * array.ndim), ())
    if jnp.issubdtype(one.dtype, jnp.floating):
        one = lax.bitcast_convert_type(one, f"uint{8 * one.dtype.itemsize}")
    elif jnp.issubdtype(one.dtype, jnp.complexfloating):
        one = lax.bitcast_convert_type(one.real, f"uint{4 * one.dtype.itemsize}")
    bits = lax.population_count(one.astype(jnp.uint32))
    return lax.shift_right_logical(bits, jnp.uint32(_ZERO_BITS))
