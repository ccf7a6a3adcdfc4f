"""Opens an iteration: turns its jaxpr into a region, with calls and loops of several groups taken apart.

Under a policy that puts `act` on one group and `step` on another,

    scan 3 trips { carry x: a = act(x); y = step(a); return y; stack a }

becomes the loop below, which carries x, rows and t. Stacking becomes an ordinary operation, which is placed
like all others. If both fragments are on one group, the scan stays one equation.

    x, rows, t = x, zeros, 0
    3 trips: a = act(x); y = step(a); rows[t] = a; x, t = y, t + 1
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from fdg import jaxprs, keys
from fdg.errors import PlanError
from fdg.fragment import FragmentMark, boundary_p, fragments_in
from fdg.placing.regions.effects import START, has_effect, thread_token
from fdg.placing.regions.region import Item, Loop, Opened, Operation, Region


def open_iteration(jaxpr: Any, assignment: Mapping[str, str], policy: Any) -> Opened:
    """Opens the calls and scans of an iteration's jaxpr that have fragments of several groups."""
    return _Opener(assignment, policy).open(jaxpr)


class _RegionBuilder:
    """Collects the items of a region, one by one, and the current token of side effects, if any."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.token: core.Var | None = None

    def emit(self, function: Callable, *operands: Any, row: Any = None) -> core.Var:
        """Appends an operation that applies a function; returns its result. `row`: see `Operation.row`."""
        (eqn,), (result,) = jaxprs.traced(jax.jit(function), operands)
        self.items.append(Operation(eqn, row=row))
        return result

    def emit_zeros(self, aval: Any) -> core.Var:
        """Appends an array of zeros, or of keys whose key data are zeros."""
        return self.emit(functools.partial(keys.zeros, aval.shape, aval.dtype))

    def as_variable(self, atom: Any) -> core.Var:
        """Turns a literal into the result of an operation."""
        if not jaxprs.is_literal(atom):
            return atom
        return self.emit(lambda: jax.lax.convert_element_type(atom.val, atom.aval.dtype))

    def unaliased(self, ends: list[core.Var], carried: Sequence[core.Var], count: int) -> list[core.Var]:
        """Copies outputs so that no two share an array, because arrays that are carried may be donated.

        The first `count` of the outputs `ends` are carried. The first use of a variable needs no copy if an
        item of this region computes it, or if it is one of the `carried` inputs and is carried again.
        """
        computed = {v for item in self.items for v in item.outputs}
        used: set[core.Var] = set()
        outputs = []
        for i, v in enumerate(ends):
            may_reuse = v in computed or (v in carried and i < count)
            outputs.append(v if v not in used and may_reuse else self.emit(jax.numpy.copy, v))
            used.add(v)
        return outputs


class _Opener:
    """Inlines calls and scans; `names` maps a jaxpr's variables to those that replace them in a region."""

    def __init__(self, assignment: Mapping[str, str], policy: Any):
        self.assignment, self.policy = assignment, policy
        self.constants: dict[int, tuple[core.Var, Any]] = {}  # by the id of the value
        self.declared_axes: dict[core.Var, int] = {}  # batch axes from the borders of opened fragments

    def open(self, closed: Any) -> Opened:
        """Opens an iteration's jaxpr."""
        jaxpr = jaxprs.open_jaxpr(closed)
        region = _RegionBuilder()
        names: dict[Any, Any] = {v: core.Var(v.aval) for v in jaxpr.invars}
        inputs = [names[v] for v in jaxpr.invars]
        token = [core.Var(jax.typeof(START))] if any(map(has_effect, jaxpr.eqns)) else []
        region.token = token[0] if token else None
        self._name_constants(closed, names)
        self._walk(jaxpr.eqns, names, region, None)
        outputs = [region.as_variable(v) for v in jaxprs.renamed(jaxpr.outvars, names)]
        if region.token is not None:
            outputs.insert(len(inputs), region.token)
        inputs += token
        body = Region(inputs, region.items, region.unaliased(outputs, inputs, len(inputs)))
        values = dict(self.constants.values())
        return Opened(body, [*([START] * len(token)), *(values[v] for v in body.free)], self.declared_axes)

    def _name_constants(self, closed: Any, names: dict) -> None:
        """Gives each constant of a jaxpr a free variable of the iteration, one variable per object."""
        variables = jaxprs.open_jaxpr(closed).constvars
        for variable, value in zip(variables, jaxprs.constants_of(closed), strict=True):
            names[variable], _ = self.constants.setdefault(id(value), (core.Var(variable.aval), value))

    def _walk(
        self, eqns: Sequence[core.JaxprEqn], names: dict, region: _RegionBuilder, inside: str | None
    ) -> None:
        """Appends equations; `inside` is the group of the opened fragment around them."""
        for eqn in eqns:
            fragments = fragments_in([eqn])
            if len({self.assignment[name] for name in fragments}) <= 1:
                self._append(eqn, fragments, names, region, inside)
                continue
            if eqn.primitive.name == "scan" and eqn.params["length"] == 0:
                self._skip_scan(eqn, names, region)
                continue
            group = inside if FragmentMark.of(eqn) is None else self.assignment[fragments[0]]
            (body, *others) = jaxprs.bodies(eqn)
            if eqn.primitive.name == "scan":
                self._open_scan(eqn, body, names, region, group)
            elif jaxprs.may_run_all_branches(eqn):
                # A schedule does not depend on values, so all branches run.
                self._walk(jaxprs.all_branches(eqn), names, region, group)
            elif others or not body.exact:
                raise self._several_groups_error(eqn, fragments)
            else:
                self._open_call(eqn, body, names, region, group)

    def _append(
        self,
        eqn: core.JaxprEqn,
        fragments: tuple[str, ...],
        names: dict,
        region: _RegionBuilder,
        inside: str | None,
    ) -> None:
        """Appends an equation without opening it."""
        if eqn.primitive is boundary_p:  # the border of an opened fragment only renames its array
            (outside,), (inner,), axis = eqn.invars, eqn.outvars, eqn.params["axis"]
            (names[inner],) = jaxprs.renamed([outside], names)
            if axis is not None and not jaxprs.is_literal(names[inner]):
                self.declared_axes.setdefault(names[inner], axis)
            return
        group = self.assignment.get(fragments[0]) if fragments else inside
        (renamed,) = jaxprs.copy_equations([eqn], names)
        operation = Operation(renamed, group, fragments)
        if region.token is not None and has_effect(eqn):
            token = region.token
            changed, region.token = thread_token(operation.eqn, token)
            operation = dataclasses.replace(operation, eqn=changed, token=(token, region.token))
        region.items.append(operation)
        for k, i in _unchanged_outputs(eqn):
            (names[eqn.outvars[k]],) = jaxprs.renamed([eqn.invars[i]], names)

    def _several_groups_error(self, eqn: core.JaxprEqn, fragments: Sequence[str]) -> PlanError:
        where = ", ".join(f"'{name}' on {self.assignment[name]}" for name in fragments)
        kind = {"while": "while loop", "cond": "branch (cond)"}.get(eqn.primitive.name, eqn.primitive.name)
        return PlanError(
            f"{self.policy} places fragments of one {kind} on several groups ({where}): while"
            f" loops, and branches with while loops or side effects, cannot be split; place them together, or"
            f" use jax.lax.scan"
        )

    def _open_call(
        self, eqn: core.JaxprEqn, body: jaxprs.Body, names: dict, region: _RegionBuilder, group: str | None
    ) -> None:
        """Appends the equations of a call's body."""
        (closed,) = jaxprs.closed_bodies(eqn)
        inner = dict(zip(body.jaxpr.invars, jaxprs.renamed(eqn.invars, names), strict=True))
        self._name_constants(closed, inner)
        self._walk(body.jaxpr.eqns, inner, region, group)
        names.update(zip(eqn.outvars, jaxprs.renamed(body.jaxpr.outvars, inner), strict=True))

    # --- scans ---

    def _skip_scan(self, eqn: core.JaxprEqn, names: dict, region: _RegionBuilder) -> None:
        """Replaces a scan of length 0 by its initial carry, and by stacked outputs without rows."""
        (body,) = jaxprs.bodies(eqn)
        operands = jaxprs.renamed(eqn.invars, names)
        starts = {k: operands[i] for i, k in body.carry}
        for k, v in enumerate(eqn.outvars):
            names[v] = starts[k] if k in starts else region.emit_zeros(v.aval)

    def _open_scan(
        self, eqn: core.JaxprEqn, body: jaxprs.Body, names: dict, around: _RegionBuilder, group: str | None
    ) -> None:
        """Appends a scan as a loop, whose body has operations that slice inputs and stack outputs."""
        outer = jaxprs.renamed(eqn.invars, names)
        region = _RegionBuilder()
        inner: dict[Any, Any] = {}
        starts: list[Any] = []
        carried: list[core.Var] = []

        def add_carried(start: core.Var) -> core.Var:
            carried.append(core.Var(start.aval))
            starts.append(start)
            return carried[-1]

        self._name_constants(eqn.params["jaxpr"], inner)
        if around.token is not None and has_effect(eqn):
            region.token = add_carried(around.token)
        counter = core.Var(jax.core.ShapedArray((), jax.numpy.int32.dtype))
        position = counter
        if eqn.params["reverse"] and (body.sliced or body.stacked):
            position = region.emit(lambda t: body.trips - 1 - t, counter)
        carry_outputs = dict(body.carry)
        for i, variable in enumerate(body.jaxpr.invars):
            if i in body.sliced:
                inner[variable] = region.emit(_row, outer[i], position)
            elif i in carry_outputs:
                inner[variable] = add_carried(around.as_variable(outer[i]))
            else:
                inner[variable] = outer[i]
        self._walk(body.jaxpr.eqns, inner, region, group)
        body_outputs = jaxprs.renamed(body.jaxpr.outvars, inner)
        results: list[core.Var] = []
        next_carry: list[core.Var] = []
        if region.token is not None:
            around.token = core.Var(region.token.aval)
            next_carry.append(region.token)
            results.append(around.token)
        for k, outvar in enumerate(eqn.outvars):
            value = region.as_variable(body_outputs[body.results[k]])
            names[outvar] = result = core.Var(outvar.aval)
            if k in body.stacked:
                if isinstance(outvar, core.DropVar):
                    continue
                stack = add_carried(around.emit_zeros(outvar.aval))
                value = region.emit(_put_row, stack, value, position, row=value)
            next_carry.append(value)
            results.append(result)
        if any(counter in item.inputs for item in region.items if isinstance(item, Operation)):
            next_carry.append(region.emit(lambda t: t + 1, counter))
            carried.append(counter)
            starts.append(around.emit(lambda: jax.lax.full((), 0, jax.numpy.int32)))
            results.append(core.Var(counter.aval))
        next_carry = region.unaliased(next_carry, carried, len(next_carry))
        around.items.append(Loop(body.trips, starts, Region(carried, region.items, next_carry), results))


def _unchanged_outputs(eqn: core.JaxprEqn) -> list[tuple[int, int]]:
    """Pairs (output, input) of positions where a fragment returns an input unchanged.

    Readers of such an output can use the input instead.
    """
    if FragmentMark.of(eqn) is None:
        return []
    (body,) = jaxprs.bodies(eqn)
    source: dict[Any, int] = {v: i for i, v in enumerate(body.jaxpr.invars)}
    for inner in body.jaxpr.eqns:
        if inner.primitive is boundary_p and inner.invars[0] in source:
            source[inner.outvars[0]] = source[inner.invars[0]]
    source_of_output = [None if jaxprs.is_literal(v) else source.get(v) for v in body.jaxpr.outvars]
    return [
        (k, i)
        for k, i in enumerate(source_of_output)
        if i is not None and not isinstance(eqn.outvars[k], core.DropVar)
    ]


def _row(stacked, position):
    return jax.lax.dynamic_index_in_dim(stacked, position, 0, keepdims=False)


def _put_row(stack, row, position):
    return jax.lax.dynamic_update_index_in_dim(stack, row, position, 0)
