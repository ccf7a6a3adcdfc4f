"""A program's equations as XLA carries them out: which of their values become arrays, and in which order.

    h = tanh(x @ w)          the product and the tanh: two arrays
    y = 2 * h + 1            2 * h is computed where 2 * h + 1 is: one array
    s = sum(relu(x @ v))     on a CPU, one loop of a library from the product to the sum: one number

What stands here holds for XLA of 2026: joined operations are computed by each of their readers; on a CPU a
reduction over much takes what leads to it alone, products too, into its own loop, and operations start in
the order in which they become ready.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend import core

from fdg import jaxprs
from fdg.batch.flow import EquationFlow, Flow
from fdg.lowering.tiles import tiles_of
from fdg.profiling.work import VIEWS, class_of, product_of

_JOINS = frozenset(
    {"elementwise", "transcendental", "special"}
)  # classes of operations that their readers compute
_MOVED = frozenset("transpose slice rev pad concatenate stack unstack tile dynamic_slice".split())  # likewise
_WHOLE = frozenset(
    {"product", "convolution", "sort", "linear algebra", "exchange", "host"}
)  # classes that read arrays
TILES = "tiles"  # the name of a step in which each device runs through its part in tiles
IN_PLACE = frozenset({"dynamic_update_slice", "scatter", "scatter-add"})
_READ_WHOLE = IN_PLACE | {"gather", "concatenate"}  # the latter only where it does not join
_MOST_JOINED = 8  # arrays that are put together where they are read; of more, XLA makes an array first
_CONTROL = frozenset({"scan", "while", "cond", "custom_linear_solve"})  # not written out, as calls are

# What XLA's library for CPUs (YNNPACK) takes into the loop of a reduction, and how many elements it takes.
_LIBRARY = frozenset(
    """abs ceil convert_element_type erf exp expm1 floor log log1p logistic neg round rsqrt sign sqrt tanh add
    div max min mul pow sub add_any square integer_pow transpose pad dot_general reduce_sum reduce_max
    reduce_min copy""".split()
)
_LEAST_OF_LIBRARY = 4096
_OF_NUMBERS = ("broadcast_in_dim", "convert_element_type")  # what numbers that are written down go through


@dataclasses.dataclass(frozen=True, eq=False)
class Array:
    """What an equation makes, told apart by identity; another one each time that a call is written out."""

    aval: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation as XLA sees it, outside of calls, which it writes out.

    Attributes:
      eqn: the equation.
      name: of what it does, as primitives are named.
      reads: its operands, literals left out.
      makes: its results, each with its batch axis.
      bodies: if it is a loop or has branches.
      flows: of the bodies.
      joins: whether it is computed element by element, with its readers.
      view: whether it gives another name to what it reads.
      library: whether it is a library's loop, which reads arrays.
      carried: of a loop, its results that go from trip to trip, each with what it begins as.
    """

    eqn: core.JaxprEqn
    name: str
    reads: tuple[Any, ...]
    makes: tuple[tuple[Any, int | None], ...]
    bodies: tuple[jaxprs.Body, ...] = ()
    flows: Sequence[Flow | None] = ()
    joins: bool = False
    view: bool = False
    library: bool = False
    carried: tuple[tuple[Any, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """What is carried out.

    Attributes:
      steps: in order; those that are left to their readers are not among them, and each reads arrays alone.
      outputs: what the program gives; literals are among them.
      arrays: all that becomes an array.
    """

    steps: Sequence[Step]
    outputs: Sequence[Any]
    arrays: frozenset[Any]


def program_of(jaxpr: core.Jaxpr, flow: Flow | None, on_cpu: bool, devices: int = 1) -> Program:
    """Of an open jaxpr; `flow` says where the batch is in it, which so many devices share."""
    steps, outputs = _inlined(jaxpr, flow)
    names = {v: step.reads[0] for step in steps if step.view for v, _ in step.makes}

    def array_of(v: Any) -> Any:
        while v in names:
            v = names[v]
        return v

    ends = [v if jaxprs.is_literal(v) else array_of(v) for v in outputs]
    given = set(jaxprs.variables(ends))
    steps = _clamped(_needed(steps, set(jaxprs.variables(outputs))))
    if on_cpu:
        axes = {v: axis for step in steps for v, axis in step.makes}
        if flow is not None:
            axes.update((v, axis) for v, (axis, _) in zip(jaxpr.invars, flow.inputs, strict=True))

        def elements(v: Any) -> int:
            return _elements(v) // (1 if axes.get(v) is None else devices)

        steps = _in_the_library(steps, given, elements)
    arrays = _arrays(steps, given, array_of)
    steps = [
        dataclasses.replace(one, carried=tuple((v, array_of(start)) for v, start in one.carried))
        for one in _alone(steps, arrays, array_of)
    ]
    return Program(_as_ready(steps) if on_cpu else _without_views(steps, array_of), ends, frozenset(arrays))


def _inlined(jaxpr: core.Jaxpr, flow: Flow | None) -> tuple[list[Step], list[Any]]:
    """The equations with calls written out, and what the outputs are then."""
    steps: list[Step] = []
    repeated: dict[tuple[Any, tuple[int, ...]], Array] = {}

    def repeat(v: Any, eqn: core.JaxprEqn, axis: int | None) -> Any:
        """An operand of an elementwise operation, repeated to the shape of the result."""
        aval: Any = eqn.outvars[0].aval
        number = jaxprs.is_literal(v)
        if v.aval.shape == aval.shape or (not number and _elements(v) == 1):
            return v
        key = (str(v) if number else v), aval.shape
        if key not in repeated:
            repeated[key] = Array(aval.update(dtype=v.aval.dtype))
            makes = ((repeated[key], axis),)
            steps.append(Step(eqn, "broadcast_in_dim", () if number else (v,), makes, joins=True))
        return repeated[key]

    def visit(inner: core.Jaxpr, its_flow: Flow | None, names: dict[Any, Any]) -> list[Any]:
        """Adds the steps of a jaxpr whose variables have other names outside; its outputs by those names."""

        def name_of(v: Any) -> Any:
            return v if jaxprs.is_literal(v) else names.get(v, v)

        flows: Sequence[EquationFlow | None] = [None] * len(inner.eqns)
        if its_flow is not None:
            flows = its_flow.equations
        for eqn, each in zip(inner.eqns, flows, strict=True):
            reads = [name_of(v) for v in eqn.invars]
            bodies = jaxprs.bodies(eqn)
            in_tiles = each is not None and tiles_of(eqn) is not None
            if (
                bodies
                and not in_tiles
                and eqn.primitive.name not in _CONTROL
                and (each is None or each.bodies)
            ):
                body = bodies[0]
                given = {v: reads[k] for v, k in zip(body.jaxpr.invars, body.operands, strict=True)}
                ends = visit(body.jaxpr, None if each is None else each.bodies[0], given)
                names.update((v, ends[j]) for v, j in zip(eqn.outvars, body.results, strict=False))
                continue
            axes = [None] * len(eqn.outvars) if each is None else each.results
            makes = []
            for v, axis in zip(eqn.outvars, axes, strict=True):
                names[v] = Array(v.aval)
                if not isinstance(v, core.DropVar):
                    makes.append((names[v], axis))
            if not bodies and class_of(eqn.primitive.name) in _JOINS and eqn.primitive.name not in VIEWS:
                reads = [repeat(v, eqn, axes[0]) for v in reads]
            known = tuple(jaxprs.variables(reads))
            steps.append(
                Step(
                    eqn,
                    TILES if in_tiles else eqn.primitive.name,
                    known,
                    tuple(makes),
                    bodies,
                    () if each is None else each.bodies,
                    joins=not bodies and _joins(eqn),
                    carried=_carried(eqn, bodies, names, reads),
                    view=bool(known and makes) and _is_view(eqn),
                )
            )
        return [name_of(v) for v in inner.outvars]

    return steps, visit(jaxpr, flow, {})


def _carried(
    eqn: core.JaxprEqn, bodies: Sequence[jaxprs.Body], names: Mapping[Any, Any], reads: Sequence[Any]
) -> tuple[tuple[Any, Any], ...]:
    if eqn.primitive.name != "scan":
        return ()
    (body,) = bodies
    made = {j: names[v] for v, j in zip(eqn.outvars, body.results, strict=True)}
    pairs = [(made[j], reads[body.operands[i]]) for i, j in body.carry]
    return tuple((result, start) for result, start in pairs if not jaxprs.is_literal(start))


def _joins(eqn: core.JaxprEqn) -> bool:
    name = eqn.primitive.name
    if class_of(name) in _JOINS or name in VIEWS:
        return True
    if name in _MOVED:
        return len(eqn.invars) <= _MOST_JOINED
    product = product_of(eqn) if name == "dot_general" else None
    return product is not None and product.k == 1  # a product of numbers, each with each


def _is_view(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name not in VIEWS or len(eqn.invars) != 1 or not hasattr(eqn.invars[0].aval, "dtype"):
        return False
    return jaxprs.bytes_of(eqn.outvars[0].aval) == jaxprs.bytes_of(eqn.invars[0].aval)


def _needed(steps: Sequence[Step], outputs: set[Any]) -> list[Step]:
    """The steps that something reads, or that have effects."""
    read, kept = set(outputs), []
    for step in reversed(steps):
        if step.eqn.effects or any(v in read for v, _ in step.makes):
            read.update(step.reads)
            kept.append(step)
    return kept[::-1]


def _clamped(steps: Sequence[Step]) -> list[Step]:
    """With XLA's one operation for what is held between two numbers: its library for CPUs has none."""
    maker = {v: step for step in steps for v, _ in step.makes}

    def is_number(v: Any) -> bool:
        made = maker.get(v)
        return made is not None and made.name in _OF_NUMBERS and all(map(is_number, made.reads))

    def is_bound(step: Step | None, name: str) -> bool:
        return step is not None and step.name == name and any(map(is_number, step.reads))

    return [
        dataclasses.replace(step, name="clamp")
        if is_bound(step, "min") and any(is_bound(maker.get(v), "max") for v in step.reads)
        else step
        for step in steps
    ]


def _readers(steps: Sequence[Step]) -> dict[Any, list[Step]]:
    found: dict[Any, list[Step]] = collections.defaultdict(list)
    for step in steps:
        for v in dict.fromkeys(step.reads):
            found[v].append(step)
    return found


def _elements(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))


def _in_the_library(steps: Sequence[Step], given: set[Any], elements: Callable[[Any], int]) -> list[Step]:
    """With one step for each reduction over much and all that leads to it alone.

    Args:
      steps: all of them.
      given: what the program gives.
      elements: of a value, on one device.
    """
    maker = {v: step for step in steps for v, _ in step.makes}
    readers = _readers(steps)
    taken: dict[Step, Step] = {}  # steps, and the reduction that they go into
    for root in reversed(steps):
        if root in taken or root.name not in ("reduce_sum", "reduce_max", "reduce_min"):
            continue
        if not any(elements(v) >= _LEAST_OF_LIBRARY for v in root.reads):
            continue
        inside, queue = {root}, collections.deque([root])
        while queue:
            for v in queue.popleft().reads:
                step = maker.get(v)
                if step is None or step in inside or step in taken or v in given:
                    continue
                if not _fits_library(step, elements):
                    continue
                if all(reader in inside for reader in readers[v]):
                    inside.add(step)
                    queue.append(step)
        taken.update(dict.fromkeys(inside, root))
    outside: dict[Step, dict[Any, None]] = collections.defaultdict(dict)
    for step, root in taken.items():
        outside[root].update((v, None) for v in step.reads if taken.get(maker.get(v)) is not root)  # type: ignore[arg-type]
    found = []
    for step in steps:
        if step in outside:
            found.append(dataclasses.replace(step, reads=tuple(outside[step]), library=True))
        elif step not in taken:
            found.append(step)
    return found


def _fits_library(step: Step, elements: Callable[[Any], int]) -> bool:
    if step.view:
        return True
    if step.name not in _LIBRARY or len(step.makes) != 1:
        return step.name == "broadcast_in_dim"
    (made, _), *_ = step.makes
    if not str(made.aval.dtype).startswith(("float", "bfloat")):
        return False
    if step.name == "dot_general":
        product = product_of(step.eqn)
        return product is not None and 1 not in (product.m, product.n) and max(product[1:4]) >= 8
    return max(map(elements, (made, *step.reads))) >= _LEAST_OF_LIBRARY


def _arrays(steps: Sequence[Step], given: set[Any], array_of: Any) -> set[Any]:
    """What becomes an array: not what its readers compute for themselves."""
    needed = set(given)
    for step in steps:
        if not step.joins and not step.view:
            whole = step.bodies or step.library or class_of(step.name) in _WHOLE or step.name in _READ_WHOLE
            needed.update(map(array_of, step.reads) if whole else ())
    return {v for step in steps if not step.view for v, _ in step.makes if not step.joins or v in needed}


def _alone(steps: Sequence[Step], arrays: set[Any], array_of: Any) -> list[Step]:
    """The steps that make arrays (or are loops), each reading all arrays that what it computes is made of.

    Views that are read as arrays stay among them.
    """
    sources: dict[Any, tuple[Any, ...]] = {}
    found = []

    def arrays_of(atoms: Sequence[Any], views: bool) -> tuple[Any, ...]:
        seen: dict[Any, None] = {}
        for v in atoms:
            seen.update(dict.fromkeys(sources[v] if v in sources and not (views and v in kept) else (v,)))
        return tuple(seen)

    kept = {
        v
        for step in steps
        if not step.joins and not step.view
        for v in step.reads
        if array_of(v) is not v and array_of(v) in arrays
    }
    for step in steps:
        if step.view:
            reads = arrays_of(step.reads, views=False)
            for v, _ in step.makes:
                sources[v] = reads
            if any(v in kept for v, _ in step.makes):
                found.append(dataclasses.replace(step, reads=reads))
        elif step.joins and not any(v in arrays for v, _ in step.makes):
            reads = arrays_of(step.reads, views=False)
            sources.update((v, reads) for v, _ in step.makes)
        else:
            found.append(dataclasses.replace(step, reads=arrays_of(step.reads, views=not step.joins)))
    return found


def _without_views(steps: Sequence[Step], array_of: Any) -> list[Step]:
    return [
        dataclasses.replace(step, reads=tuple(dict.fromkeys(map(array_of, step.reads))))
        for step in steps
        if not step.view
    ]


def _as_ready(steps: Sequence[Step]) -> list[Step]:
    """In the order of XLA's scheduler for CPUs: what became ready first comes first, so that cores have work.

    (`concurrency optimised`, its default.) A view takes a turn; then its readers read what it is of.
    """
    maker = {v: i for i, step in enumerate(steps) for v, _ in step.makes}
    waiting = [{maker[v] for v in step.reads if v in maker} for step in steps]
    readers: list[list[int]] = [[] for _ in steps]
    for i, before in enumerate(waiting):
        for other in before:
            readers[other].append(i)
    of: Mapping[Any, Any] = {v: step.reads[0] for step in steps if step.view for v, _ in step.makes}
    order: list[Step] = []
    queue = collections.deque(i for i, before in enumerate(waiting) if not before)
    while queue:
        i = queue.popleft()
        if not steps[i].view:
            reads = tuple(dict.fromkeys(of.get(v, v) for v in steps[i].reads))
            order.append(dataclasses.replace(steps[i], reads=reads))
        for reader in sorted(readers[i], key=lambda one: steps[one].view):  # XLA makes its views last
            waiting[reader].discard(i)
            if not waiting[reader]:
                queue.append(reader)
    return order
