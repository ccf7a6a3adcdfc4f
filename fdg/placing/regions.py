"""An iteration as regions: straight-line code and loops, opened just as far as several groups are at work.

A jaxpr keeps a loop or a fragment in one equation. Where the parts of such an equation live on different
devices it must be opened: calls are inlined, and a scan becomes a `Loop` whose slicing and stacking are
ordinary operations, so that whatever places operations places those as well. All else stays whole.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend import core

from fdg import jaxprs, keys
from fdg.errors import PlanError
from fdg.fragment import FragmentMark, boundary_p


@dataclasses.dataclass(eq=False)
class Operation:
    """One equation over the variables of its region.

    Attributes:
      group: the group that its fragments live on; None for code between fragments.
      fragments: names of the fragments in it.
      row: for the operation that writes a trip's row into a loop's stacked result, the row's variable.
    """

    eqn: core.JaxprEqn
    group: str | None = None
    fragments: tuple[str, ...] = ()
    row: Any = None

    @property
    def inputs(self) -> list[Any]:
        """Variables that it reads, each once."""
        return list(dict.fromkeys(v for v in self.eqn.invars if not jaxprs.is_literal(v)))

    @property
    def outputs(self) -> list[core.Var]:
        """Variables that it makes, those that nothing reads left out."""
        return [v for v in self.eqn.outvars if not isinstance(v, core.DropVar)]


@dataclasses.dataclass(eq=False)
class Loop:
    """A loop of known length with fragments of several groups.

    Attributes:
      constants: variables around the loop that each trip reads: the body's first inputs.
      starts: values carried into the first trip: the body's further inputs.
      results: what is carried out of the last trip, one for each start.
    """

    trips: int
    constants: list[core.Var]
    starts: list[Any]
    results: list[core.Var]
    body: "Region"


Item: TypeAlias = Operation | Loop


@dataclasses.dataclass(eq=False)
class Region:
    """Items in an order that their data allow.

    Attributes:
      outputs: for the body of a loop, the next values of what it carries.
    """

    inputs: list[core.Var]
    items: list[Item]
    outputs: list[Any]


@dataclasses.dataclass(eq=False)
class Opened:
    """An opened iteration.

    Attributes:
      region: inputs are the state's leaves and then the constants, outputs the leaves and the metrics.
      constants: values of the inputs after the state's leaves.
      declared: batch axes that the borders of opened fragments declare.
    """

    region: Region
    constants: list[Any]
    declared: dict[core.Var, int]


def open_iteration(jaxpr: Any, assignment: Mapping[str, str], policy: Any) -> Opened:
    """Opens the jaxpr of an iteration as far as the groups of its fragments ask for.

    Args:
      jaxpr: closed, as in `FDG.jaxpr`.
      assignment: the group of each fragment, in the graph's order.
      policy: for errors.

    Raises:
      PlanError: fragments of several groups inside a while loop or a branch.
    """
    return _Opener(assignment, policy).open(jaxpr)


def inline(jaxpr: Any) -> Opened:
    """Opens only calls that hold fragments without being one, so that fragments and loops are in sight."""
    return _Inliner({}, None).open(jaxpr)


class _Opener:
    def __init__(self, assignment: Mapping[str, str], policy: Any):
        self.assignment, self.policy = assignment, policy
        self.used: collections.Counter[str] = collections.Counter()
        self.constants: list[tuple[core.Var, Any]] = []
        self.declared: dict[core.Var, int] = {}

    def open(self, closed: Any) -> Opened:
        jaxpr = jaxprs.open_jaxpr(closed)
        num_leaves = len(jaxpr.invars)
        names: dict[Any, Any] = {v: core.Var(v.aval) for v in jaxpr.invars}
        self._name_constants(closed, names)
        inputs = [names[v] for v in jaxpr.invars]
        items: list[Item] = []
        self._walk(jaxpr, names, items, None)
        outputs = [_as_variable(items, _look_up(names, v)) for v in jaxpr.outvars]
        outputs = _distinct(items, outputs, inputs, num_leaves)
        variables, values = [v for v, _ in self.constants], [value for _, value in self.constants]
        return Opened(Region([*inputs, *variables], items, outputs), values, self.declared)

    def _name_constants(self, closed: Any, names: dict) -> None:
        jaxpr = jaxprs.open_jaxpr(closed)
        for variable, value in zip(jaxpr.constvars, jaxprs.constants_of(closed), strict=True):
            names[variable] = core.Var(variable.aval)
            self.constants.append((names[variable], value))

    def _walk(self, jaxpr: core.Jaxpr, names: dict, items: list[Item], inside: str | None) -> None:
        """Appends a jaxpr's equations; `inside` is the group of the opened fragment around them."""
        for eqn in jaxpr.eqns:
            before = self.used.copy()
            fragments = self._fragments_in(eqn)
            if not self._opens(eqn, fragments):
                group = self.assignment.get(fragments[0]) if fragments else inside
                if (
                    eqn.primitive is boundary_p
                ):  # of an opened fragment: its arrays are wherever they are used
                    (outside,), (within,), axis = eqn.invars, eqn.outvars, eqn.params["axis"]
                    names[within] = _look_up(names, outside)
                    if axis is not None and not jaxprs.is_literal(names[within]):
                        self.declared.setdefault(names[within], axis)
                    continue
                items.append(Operation(_renamed(eqn, names), group, fragments))
                for k, i in _passed_through(eqn):
                    names[eqn.outvars[k]] = _look_up(names, eqn.invars[i])
                continue
            if eqn.primitive.name == "scan" and eqn.params["length"] == 0:
                self._skip_scan(eqn, names, items)
                continue
            self.used = before
            mark = FragmentMark.of(eqn)
            if mark is not None:
                self.used[mark.name] += 1
            here = self.assignment.get(fragments[0]) if mark is not None else inside
            (body, *others) = jaxprs.bodies(eqn)
            if eqn.primitive.name == "scan":
                self._open_scan(eqn, body, names, items, here)
            elif others or not body.exact:
                raise self._refusal(eqn, fragments)
            else:
                params = [p for p in eqn.params.values() if jaxprs.is_jaxpr(p)]
                closed = next(p for p in params if jaxprs.open_jaxpr(p) is body.jaxpr)
                inner = dict(zip(body.jaxpr.invars, (_look_up(names, v) for v in eqn.invars), strict=True))
                self._name_constants(closed, inner)
                self._walk(body.jaxpr, inner, items, here)
                for outer, result in zip(eqn.outvars, body.jaxpr.outvars, strict=True):
                    names[outer] = _look_up(inner, result)

    def _opens(self, eqn: core.JaxprEqn, fragments: Sequence[str]) -> bool:
        return len({self.assignment[name] for name in fragments}) > 1

    def _fragments_in(self, eqn: core.JaxprEqn) -> tuple[str, ...]:
        """Names of the fragments that an equation calls, in the order in which `trace` found them."""
        found = []
        mark = FragmentMark.of(eqn)
        if mark is not None:
            self.used[mark.name] += 1
            count = self.used[mark.name]
            found.append(mark.name if count == 1 else f"{mark.name}.{count}")
        for body in jaxprs.bodies(eqn):
            for inner in body.jaxpr.eqns:
                found += self._fragments_in(inner)
        return tuple(found)

    def _refusal(self, eqn: core.JaxprEqn, fragments: Sequence[str]) -> PlanError:
        where = ", ".join(f"'{name}' on {self.assignment[name]}" for name in fragments)
        kind = {"while": "while loop", "cond": "branch (cond)"}.get(eqn.primitive.name, eqn.primitive.name)
        return PlanError(
            f"{self.policy} places fragments of one {kind} on several groups ({where}): only code that"
            f" always runs, and scans, can be split; place them together, or use jax.lax.scan"
        )

    # --- scans ---

    def _skip_scan(self, eqn: core.JaxprEqn, names: dict, items: list[Item]) -> None:
        """A scan without a trip: what it starts from comes out, and stacks of no row."""
        (body,) = jaxprs.bodies(eqn)
        starts = {k: _look_up(names, eqn.invars[i]) for i, k in body.carry}
        for k, v in enumerate(eqn.outvars):
            names[v] = starts[k] if k in starts else _emit_zeros(items, v.aval)

    def _open_scan(self, eqn, body: jaxprs.Body, names: dict, items: list[Item], inside: str | None) -> None:
        """A scan as a loop: inputs are sliced and outputs stacked by operations of the body."""
        trips, reverse = body.trips, eqn.params["reverse"]
        outer = [_look_up(names, v) for v in eqn.invars]
        carried = dict(body.carry)
        counter = core.Var(jax.core.ShapedArray((), jax.numpy.int32.dtype))
        inner: dict[Any, Any] = {}
        body_items: list[Item] = []
        constants: dict[Any, core.Var] = {}  # variable around the loop -> in it
        starts: list[Any] = []
        body_carries: list[core.Var] = []

        def constant(atom):
            if jaxprs.is_literal(atom):
                return atom
            return constants.setdefault(atom, core.Var(atom.aval))

        self._name_constants(eqn.params["jaxpr"], inner)  # inputs of the whole, to be read from inside
        inner = {variable: constant(value) for variable, value in inner.items()}
        position = counter
        if reverse and (body.sliced or body.stacked):
            position = _emit(body_items, lambda t: trips - 1 - t, counter)
        for i, variable in enumerate(body.jaxpr.invars):
            if i in body.sliced:
                inner[variable] = _emit(body_items, _row, constant(outer[i]), position)
            elif i in carried:
                inner[variable] = core.Var(variable.aval)
                body_carries.append(inner[variable])
                starts.append(_as_variable(items, outer[i]))
            else:
                inner[variable] = constant(outer[i])
        self._walk(body.jaxpr, inner, body_items, inside)
        results, nexts = [], []
        for k, outvar in enumerate(eqn.outvars):
            value = _as_variable(body_items, _look_up(inner, body.jaxpr.outvars[body.results[k]]))
            result = core.Var(outvar.aval)
            names[outvar] = result
            if k not in body.stacked:
                nexts.append(value)
            elif isinstance(outvar, core.DropVar):
                continue
            else:
                start = _emit_zeros(items, outvar.aval)
                stack = core.Var(outvar.aval)
                body_carries.append(stack)
                starts.append(start)
                nexts.append(_emit(body_items, _put_row, stack, value, position))
                body_items[-1].row = value  # type: ignore[union-attr]
            results.append(result)
        if any(counter in item.inputs for item in body_items if isinstance(item, Operation)):
            nexts.append(_emit(body_items, lambda t: t + 1, counter))
            body_carries.append(counter)
            starts.append(_emit(items, lambda: jax.lax.full((), 0, jax.numpy.int32)))
            results.append(core.Var(counter.aval))
        nexts = _distinct(body_items, nexts, body_carries, len(nexts))
        region = Region([*constants.values(), *body_carries], body_items, nexts)
        items.append(Loop(trips, list(constants), starts, results, region))


class _Inliner(_Opener):
    def _opens(self, eqn: core.JaxprEqn, fragments: Sequence[str]) -> bool:
        bodies = jaxprs.bodies(eqn)
        is_call = len(bodies) == 1 and bodies[0].exact and eqn.primitive.name != "scan"
        return is_call and bool(fragments) and FragmentMark.of(eqn) is None


def _passed_through(eqn: core.JaxprEqn) -> list[tuple[int, int]]:
    """(output, input) of a fragment that returns an input as it is: nobody need wait for it, or move it."""
    if FragmentMark.of(eqn) is None:
        return []
    (body,) = jaxprs.bodies(eqn)
    source: dict[Any, int] = {v: i for i, v in enumerate(body.jaxpr.invars)}
    for inner in body.jaxpr.eqns:
        if inner.primitive is boundary_p and inner.invars[0] in source:
            source[inner.outvars[0]] = source[inner.invars[0]]
    ends = [None if jaxprs.is_literal(v) else source.get(v) for v in body.jaxpr.outvars]
    return [
        (k, i) for k, i in enumerate(ends) if i is not None and not isinstance(eqn.outvars[k], core.DropVar)
    ]


def _zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    found = keys.implementation(shape, dtype)
    if found is None:
        return jax.lax.full(shape, 0, dtype)
    kind, words = found
    return jax.random.wrap_key_data(jax.lax.full(words.shape, 0, words.dtype), impl=kind)


def _as_variable(items: list[Item], atom: Any) -> core.Var:
    """A number written into the jaxpr becomes the result of an operation."""
    if not jaxprs.is_literal(atom):
        return atom
    return _emit(items, lambda: jax.lax.convert_element_type(atom.val, atom.aval.dtype))


def _distinct(
    items: list[Item], ends: list[core.Var], carried: Sequence[core.Var], count: int
) -> list[core.Var]:
    """The first `count` ends are carried on, and the memory of what is carried may be used up: each gets
    memory of its own, and so does an end that is no longer carried, but was.
    """
    seen: set[core.Var] = set()
    before = set(carried)
    made = {v for item in items for v in (item.outputs if isinstance(item, Operation) else item.results)}
    distinct = []
    for i, v in enumerate(ends):
        may_pass = v in made or (v in before and i < count)
        distinct.append(v if v not in seen and may_pass else _emit(items, jax.numpy.copy, v))
        seen.add(v)
    return distinct


def _row(stacked, position):
    return jax.lax.dynamic_index_in_dim(stacked, position, 0, keepdims=False)


def _put_row(stack, row, position):
    return jax.lax.dynamic_update_index_in_dim(stack, row, position, 0)


def _emit(items: list[Item], function: Callable, *operands: Any) -> core.Var:
    """Appends the operations of a function of one result, and returns that."""
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands]
    # One equation, so that what belongs together stays together.
    jaxpr = jaxprs.open_jaxpr(jax.make_jaxpr(jax.jit(function))(*shapes))
    (eqn,) = jaxpr.eqns
    names: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    items.append(Operation(_renamed(eqn, names)))
    return names[jaxpr.outvars[0]]


def _emit_zeros(items: list[Item], aval: Any) -> core.Var:
    return _emit(items, functools.partial(_zeros, aval.shape, aval.dtype))


def _look_up(names: dict, atom: Any) -> Any:
    return atom if jaxprs.is_literal(atom) else names[atom]


def _renamed(eqn: core.JaxprEqn, names: dict) -> core.JaxprEqn:
    """The equation over other variables; its results get new ones, entered in `names`."""
    for v in eqn.outvars:
        if not isinstance(v, core.DropVar):
            names[v] = core.Var(v.aval)
    return eqn.replace(
        invars=[_look_up(names, v) for v in eqn.invars],
        outvars=[names.get(v, v) for v in eqn.outvars],
    )
