"""Orders collectives: a collective after a loop with collectives starts only when the loop has ended.

XLA's CPU backend starts an operation as soon as its operands are ready, also while a loop runs. So the
all-reduce of a metric may run concurrently with collectives of the training loop:

    parameters = loop over minibatches: ... sum of gradients ...
    error = sum over the batch (x)            # does not depend on the loop

A device that waits in two collectives blocks two threads. So each device would need two threads, and more
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

from fdg import jaxprs, keys
from fdg.batch.flow import EquationFlow, Flow
from fdg.batch.follow import follow
from fdg.batch.rules.result import Axis
from fdg.jax_internals import ClosedJaxpr
from fdg.lowering.hoisting import HoistRule, hoist
from fdg.rowwise import rowwise

MAX_BYTES = 8 << 20  # the maximum bytes hoisted out of a loop for all trips, which should fit into a cache
_ZERO_BITS = 7  # a popcount is at most 64, so shifting it right by 7 gives 0


def order_collectives(
    jaxpr: ClosedJaxpr, axes: Sequence[Axis], devices: int, output_axes: Sequence[Axis] | None = None
) -> ClosedJaxpr:
    """Makes each collective depend on the loops before it that contain collectives.

    `axes`, `devices` and `output_axes` are as in `batch.follow.follow`.
    """
    # Dead code goes first: XLA could not remove code on which a collective depends.
    live = jaxprs.without_dead_code(jaxpr)
    flow = follow(live, axes, devices, output_axes)
    if not _has_inner_collectives(flow):
        return jaxpr
    return jaxprs.with_jaxpr(live, jaxprs.Rewriter(_order_block)(flow))


def hoist_batch_reductions(
    jaxpr: ClosedJaxpr, axes: Sequence[Axis], devices: int, output_axes: Sequence[Axis] | None = None
) -> ClosedJaxpr:
    """Hoists batch reductions out of loops if they depend on no carried value: one collective for all trips.

    For instance, the mean and deviation of each minibatch's advantages need one collective, not one per trip.
    Takes the arguments of `order_collectives`.
    """
    return _hoist_reductions(jaxpr, follow(jaxpr, axes, devices, output_axes))


@functools.lru_cache(maxsize=256)  # `follow` is cached too: equal flows are one object
def _hoist_reductions(jaxpr: ClosedJaxpr, flow: Flow) -> ClosedJaxpr:
    """Hoists the flow's reductions over the batch, but no other collective, out of its loops."""
    steps = list(_steps(flow))
    sums = {id(step.eqn) for step in steps if step.reduced and step.eqn.primitive.name.startswith("reduce_")}
    # Operands of a hoisted sum are computed twice, before the loop and in it. Other collectives, such as
    # those that shuffle samples, stay in the loop with the sums that depend on them, to run only once.
    collectives = {
        id(step.eqn)
        for step in steps
        if step.gathered or step.agrees_on_predicate or (step.reduced and id(step.eqn) not in sums)
    }
    rule = HoistRule(
        "sums",
        lambda eqn: id(eqn) in sums,
        MAX_BYTES,
        recompute=True,
        is_fixed=lambda eqn: id(eqn) in collectives,
    )
    return hoist(jaxpr, rule) if sums else jaxpr


def _steps(flow: Flow) -> Iterator[EquationFlow]:
    """Yields the equations of a flow, at any depth."""
    for step in flow.equations:
        yield step
        for body in step.bodies:
            yield from _steps(body)


def _has_collectives(step: EquationFlow) -> bool:
    """Whether an equation needs a collective, itself or in its bodies."""
    return bool(step.gathered or step.reduced or step.agrees_on_predicate) or any(
        map(_has_inner_collectives, step.bodies)
    )


def _has_inner_collectives(flow: Flow) -> bool:
    """Whether a jaxpr needs a collective, at any depth."""
    return bool(flow.gathered) or any(map(_has_collectives, flow.equations))


def _is_one_operation(eqn: Any) -> bool:
    """Whether XLA runs an equation with bodies as one operation: a branch, or a loop that is not unrolled."""
    if eqn.primitive.name == "scan":
        return eqn.params["length"] // eqn.params["unroll"] > 1
    return eqn.primitive.name in ("while", "cond")


def _overlaps_later(step: EquationFlow) -> bool:
    """Whether an equation contains a loop or branch with collectives; later operations may run meanwhile."""
    return any(map(_has_inner_collectives, step.bodies)) and (
        _is_one_operation(step.eqn)
        or any(_overlaps_later(inner) for body in step.bodies for inner in body.equations)
    )


class _Pending:
    """A collective, or a loop with collectives, that later collectives wait for."""

    def __init__(self, overlaps_later: bool, results: Sequence[tuple[Any, Axis]], dependents: set[Any]):
        self.overlaps_later = overlaps_later  # True if XLA may run later operations while it runs
        self.results = results  # (variable, batch axis); to wait is to depend on one of them
        self.dependents = dependents  # all variables that depend on it

    def reaches(self, atoms: Iterable[Any]) -> bool:
        """Whether one of these values depends on the collective."""
        return not self.dependents.isdisjoint(jaxprs.variables(atoms))

    def result_for(self, v: Any, axis: Axis) -> list[tuple[Any, Axis]]:
        """A list with one result on which `v` can depend without a collective; empty if there is none."""
        return [result for result in self.results if _can_depend_locally(v, axis, *result)][:1]


def _make_pending(step: EquationFlow, read: set[Any]) -> list[_Pending]:
    """Makes one `_Pending` for an equation, or one for each result if it is a call with collectives.

    Its results are sorted: replicated before split, then floats before integers (such as a loop's counter).
    Skips results that no equation reads (`read` has the others): XLA would compute them only to wait.
    """
    dependents = _dependent_results(step, set(), collectives=True)
    results = [
        (v, axis)
        for v, axis in zip(step.eqn.outvars, step.results, strict=True)
        if v in dependents and v in read and _can_wait(v)
    ]

    def rank(result: tuple[Any, Axis]) -> tuple[bool, bool, int]:
        v, axis = result
        return axis is not None, not jax.numpy.issubdtype(v.aval.dtype, jnp.floating), jaxprs.bytes_of(v.aval)

    overlaps = _overlaps_later(step)
    if _is_call(step):
        return [_Pending(overlaps, [result], {result[0]}) for result in results]
    return [_Pending(overlaps, sorted(results, key=rank), dependents)]


def _is_call(step: EquationFlow) -> bool:
    """Whether XLA inlines an equation's body, so that each result waits only for its own operands."""
    return len(step.bodies) == 1 and not step.reduced and not _is_one_operation(step.eqn)


def _dependent_results(step: EquationFlow, variables: set[Any], collectives: bool = False) -> set[Any]:
    """The results of an equation that depend on `variables`, or, with `collectives`, on its collectives."""
    eqn = step.eqn
    if not (collectives and _has_collectives(step)) and variables.isdisjoint(jaxprs.variables(eqn.invars)):
        return set()
    if not _is_call(step):
        unchanged = {result: eqn.invars[i] for i, result, is_changed in _carry(step) if not is_changed}
        return {v for v in eqn.outvars if v not in unchanged or _is_among(unchanged[v], variables)}
    (flow,), (body,) = step.bodies, jaxprs.bodies(eqn)
    gathered = step.gathered if collectives else ()
    is_dependent = [_is_among(v, variables) or k in gathered for k, v in enumerate(eqn.invars)]
    inner = {v for v, k in zip(flow.jaxpr.invars, body.operands, strict=True) if is_dependent[k]}
    size = -1
    while len(inner) > size:  # repeat, because carried values pass dependencies on to later trips
        size = len(inner)
        for inner_step in flow.equations:
            inner |= _dependent_results(inner_step, inner, collectives)
        inner |= {flow.jaxpr.invars[i] for i, j in body.carry if _is_among(flow.jaxpr.outvars[j], inner)}
    dependent_outputs = {j for j, v in enumerate(flow.jaxpr.outvars) if _is_among(v, inner)}
    dependent_outputs |= set(flow.gathered if collectives else ())
    return {v for v, j in zip(eqn.outvars, body.results, strict=True) if j in dependent_outputs}


def _is_among(atom: Any, variables: set[Any]) -> bool:
    return not jaxprs.is_literal(atom) and atom in variables  # literals cannot be hashed


def _carry(step: EquationFlow) -> list[tuple[int, Any, bool]]:
    """For each value that a loop carries: its operand's position, its result, and whether trips change it."""
    if not step.bodies:
        return []
    body = jaxprs.bodies(step.eqn)[-1]
    inner, results = body.jaxpr.invars, body.jaxpr.outvars
    return [(body.operands[i], step.eqn.outvars[j], results[j] is not inner[i]) for i, j in body.carry]


def _order_block(flow: Flow, context: None, inside: jaxprs.Inside) -> list[Any]:
    """The equations of a flow, with dependencies so that no collective overlaps a loop with collectives."""
    equations: list[Any] = []
    atoms = [*flow.jaxpr.outvars, *(v for eqn in flow.jaxpr.eqns for v in eqn.invars)]
    read = set(jaxprs.variables(atoms))
    earlier: list[_Pending] = []  # the last loop with collectives, and the collectives after it
    for step in flow.equations:
        eqn = inside(step.eqn, blocks=step.bodies) if step.bodies else step.eqn
        pending = _make_pending(step, read) if _has_collectives(step) else []
        waiting_operands: dict[_Pending, set[Any]] = {}
        if _has_collectives(step):
            awaited = [other for other in earlier if other.overlaps_later or _overlaps_later(step)]
            operands, waiting_operands = _make_dependent(step, awaited, equations)
            eqn = eqn.replace(invars=operands)
        for other in earlier:
            other.dependents |= _dependent_results(
                step, other.dependents | waiting_operands.get(other, set())
            )
        equations.append(eqn)
        earlier = pending if pending and pending[0].overlaps_later else [*earlier, *pending]
    return equations


def _make_dependent(
    step: EquationFlow, awaited: Sequence[_Pending], equations: list[Any]
) -> tuple[list[Any], dict[_Pending, set[Any]]]:
    """Makes operands of an equation depend on the collectives that it waits for, by additional equations.

    Returns the new operands, and for each awaited collective the original operands that now depend on it.
    """
    operands = list(step.eqn.invars)
    axes = [axis if i not in step.gathered else None for i, axis in enumerate(step.operands)]
    candidates = [i for i, v in enumerate(operands) if not jaxprs.is_literal(v) and _can_wait(v)]
    is_one_operation = _is_one_operation(step.eqn)
    if is_one_operation:
        changed = {i for i, _, is_changed in _carry(step) if is_changed}
        candidates.sort(key=lambda i: (i not in changed, jaxprs.bytes_of(operands[i].aval)))
    else:
        candidates = [i for i in candidates if step.operands[i] is not None or i in step.gathered]
    dependencies: dict[int, list[tuple[Any, Axis]]] = {i: [] for i in candidates}
    waiting_operands: dict[_Pending, set[Any]] = {pending: set() for pending in awaited}
    for pending in awaited:
        if is_one_operation and pending.reaches(operands):
            continue
        for i in candidates:
            result = [] if pending.reaches([operands[i]]) else pending.result_for(operands[i], axes[i])
            if result:
                dependencies[i] += result
                waiting_operands[pending].add(operands[i])
                if is_one_operation:  # one operation starts when all its operands are ready
                    break
    for i, results in dependencies.items():
        if results:
            atoms = (operands[i], *(v for v, _ in results))
            (equation,) = _wait_for_jaxpr(
                tuple(jaxprs.shapes_of(atoms)),
                (axes[i], *(result_axis for _, result_axis in results)),
            ).eqns
            dependent = core.Var(operands[i].aval)
            equations.append(equation.replace(invars=atoms, outvars=[dependent]))
            operands[i] = dependent
    return operands, waiting_operands


def _can_wait(v: Any) -> bool:
    """Whether a dependency can be attached to an array: it is not empty, and a number or a random key."""
    dtype = v.aval.dtype
    if jaxprs.is_mutable(v):
        return False
    return v.aval.size > 0 and (keys.is_key(dtype) or not jax.dtypes.issubdtype(dtype, jax.dtypes.extended))


def _can_depend_locally(v: Any, axis: Axis, result: Any, result_axis: Axis) -> bool:
    """Whether a value can depend on a result without a collective (a replicated or equally split result)."""
    if result_axis is None:
        return True
    return axis is not None and v.aval.shape[axis] == result.aval.shape[result_axis]


@functools.lru_cache(maxsize=256)
def _wait_for_jaxpr(shapes: tuple[Any, ...], axes: tuple[Axis, ...]) -> Any:
    """A jaxpr of one equation that calls `wait_for`; with `rowwise` if a result is split over devices."""
    all_replicated = all(axis is None for axis in axes[1:])
    function = jax.jit(wait_for) if all_replicated else rowwise(wait_for, in_axes=axes, out_axes=axes[0])
    return jaxprs.open_jaxpr(jax.make_jaxpr(function)(*shapes))


def wait_for(x: jax.Array, *dependencies: jax.Array) -> jax.Array:
    """Returns `x`, bit for bit, with a data dependency on `dependencies` that XLA cannot remove.

    `x` and the dependencies may have any shape and dtype, and may be random keys.

    >>> wait_for(jnp.float32(2.5), jnp.ones(3)).item()
    2.5
    """
    if keys.is_key(x.dtype):
        return keys.from_data(wait_for(keys.to_data(x), *dependencies), x)
    zero = functools.reduce(jnp.bitwise_or, map(_zero_from, dependencies))
    # The alternative is not a constant: if `x` is a constant zero (such as a loop counter's start), XLA
    # would remove a select between two zeros.
    return lax.select(zero == 0, x, lax.broadcast(zero.astype(x.dtype), x.shape))


def _zero_from(array: jax.Array) -> jax.Array:
    """Zero, computed from an array: the number of set bits of its first element, shifted right by 7."""
    array = keys.to_data(array)
    element = lax.reshape(lax.slice(array, [0] * array.ndim, [1] * array.ndim), ())
    if jnp.issubdtype(element.dtype, jnp.floating):
        element = lax.bitcast_convert_type(element, f"uint{8 * element.dtype.itemsize}")
    elif jnp.issubdtype(element.dtype, jnp.complexfloating):
        element = lax.bitcast_convert_type(element.real, f"uint{4 * element.dtype.itemsize}")
    bits = lax.population_count(element.astype(jnp.uint32))
    return lax.shift_right_logical(bits, jnp.uint32(_ZERO_BITS))
