"""Adds sharding constraints for a mesh to a traced program.

`batch.follow` determines what each operation does with the batch axis. This module turns that into sharding
constraints: borders split their batch, operands that an operation needs replicated are gathered before it,
and results of batch reductions are replicated. XLA's partitioner then inserts the collectives. A constraint
only says where an array is stored, so it cannot change the results.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdg import jaxprs
from fdg.batch.equation import apply_rule, must_be_whole
from fdg.batch.flow import EquationFlow, Flow
from fdg.batch.follow import follow
from fdg.batch.rules import RULES
from fdg.batch.rules.result import Axis, same, shape_of
from fdg.fragment import boundary_p
from fdg.identity_cache import IdentityCache
from fdg.jax_internals import ClosedJaxpr
from fdg.lowering import weights
from fdg.lowering.extremes import extreme_over_devices, keep_nan, may_lose_nan
from fdg.lowering.local import OnePart
from fdg.lowering.mesh import batch_sharding
from fdg.lowering.tiles import tiled_function, tiles_of
from fdg.placing.layout import BATCH, MODEL, Spec
from fdg.rowwise import rowwise_p

Dimensions = Mapping[int, Collection[int]]
"""Maps positions of operands or results to some of their dimensions."""


_ANY_DIMENSION = frozenset(
    """argmax argmin broadcast_in_dim dot_general fragment_boundary iota optimization_barrier reshape
    shard_map squeeze transpose""".split()
)
"""Operations, other than elementwise ones, that XLA partitions correctly along any dimension."""


def whole_dimensions(eqn: Any, devices: int) -> tuple[Dimensions, Dimensions]:
    """The dimensions of an operation's operands and results that must be replicated, except for the batch.

    XLA's partitioner (jaxlib 0.10.2) gets many operations wrong if some of their dimensions are split, or are
    split unevenly: it multiplies convolutions by the number of devices, adds updates of a scatter at index 0,
    or crashes the process. So a dimension stays split only if the operation is elementwise or in
    `_ANY_DIMENSION`, or if its batch rule keeps or sums this dimension and `devices` divides it.
    """
    name = eqn.primitive.name
    if (RULES.get(name) is same or name in _ANY_DIMENSION) and not must_be_whole(eqn):
        return {}, {}
    trials = [
        (i, d, apply_rule(eqn, [d if j == i else None for j in range(len(eqn.invars))], devices))
        for i, v in enumerate(eqn.invars)
        for d, size in enumerate(shape_of(v))
        if size % devices == 0
    ]
    free_operands: set[Any] = {(i, d) for i, d, rule in trials if not rule.gathered}
    free_results: set[Any] = {(k, d) for _, _, rule in trials for k, d in enumerate(rule.axes)}
    if name.startswith("scatter"):  # each device applies the updates of its part
        free_results = {(0, d) for d in range(eqn.invars[0].aval.ndim)}
        free_operands |= free_results

    def whole(variables: Sequence[Any], free: set[Any]) -> Dimensions:
        arrays = ((i, range(v.aval.ndim)) for i, v in enumerate(variables) if _is_array_variable(v))
        whole_by_array = ((i, [d for d in dimensions if (i, d) not in free]) for i, dimensions in arrays)
        return {i: dimensions for i, dimensions in whole_by_array if dimensions}

    return whole(eqn.invars, free_operands), whole(eqn.outvars, free_results)


def constrain(
    jaxpr: ClosedJaxpr,
    mesh: Mesh,
    axes: Sequence[Axis] = (),
    output_axes: Sequence[Axis] | None = None,
    specs: Sequence[Spec | None] | None = None,
) -> ClosedJaxpr:
    """Replaces fragment borders by shardings on the mesh, and makes every collective explicit.

    The result has the collectives that `exchanges.predict_exchanges(jaxpr, axes, devices, output_axes)`
    predicts, where `devices` is the mesh's size along `BATCH`. `devices` must divide the batch of every
    border. `axes` are the batch axes of the first inputs. Outputs are resharded to the batch axes
    `output_axes`, or left as they are if it is None.

    If parameters are sharded, `specs` are the specs of the first inputs. Then only batch axes and
    `whole_dimensions` are constrained, and parameters are gathered over the batch axis before operations
    that combine them with a batch. XLA chooses the other shardings, and adds collectives for them.
    """
    if specs is not None:
        jaxpr = keep_nan(jaxpr)
    flow = follow(jaxpr, axes, mesh.shape[BATCH], output_axes)
    inputs = (*(specs or ()), *[None] * (len(flow.inputs) - len(specs or ())))
    program = _ProgramRewriter(mesh, specs is not None, _common_parts(mesh, specs or ()))
    lowered = program.rewrite(flow, inputs).jaxpr
    core.check_jaxpr(lowered)
    return jaxprs.with_jaxpr(jaxpr, lowered)


def _common_parts(mesh: Mesh, specs: Sequence[Spec | None]) -> int:
    """The least common multiple of the numbers of parts of all dimensions; without specs, the mesh's size."""
    given = [axes for spec in specs if spec is not None for axes in spec]
    return math.lcm(*(math.prod(mesh.shape[a] for a in axes) for axes in given)) if given else mesh.size


class _Rewritten(NamedTuple):
    """A rewritten jaxpr."""

    jaxpr: Any
    constrained_inputs: set[Any]  # the inputs that it constrains
    output_specs: list[Spec | None]


class _ProgramRewriter:
    """Rewrites jaxprs with their flows; a jaxpr that is called from several places is rewritten once.

    `common_parts` is a common multiple of the numbers of parts into which dimensions of parameters are split.
    """

    def __init__(self, mesh: Mesh, has_sharded_parameters: bool, common_parts: int):
        self.mesh, self.has_sharded_parameters, self.common_parts = mesh, has_sharded_parameters, common_parts
        self._cache: IdentityCache[_Rewritten] = IdentityCache()

    def rewrite(self, flow: Flow, specs: tuple[Spec | None, ...], sliced: tuple[int, ...] = ()) -> _Rewritten:
        """Rewrites a jaxpr; `specs` are of its inputs. Readers may slice the replicated outputs `sliced`."""
        return self._cache(flow, (specs, sliced), lambda: _JaxprRewriter(self, flow, specs, sliced).rewrite())

    def constraint(self, atom: Any, axis: Axis, replicated: Collection[int] = ()) -> Any:
        """An equation that splits `atom` along a batch axis and replicates the dimensions `replicated`."""
        aval = atom.aval
        if axis is not None and aval.shape[axis] % self.mesh.shape[BATCH]:
            axis = None  # not divisible; a plan chooses devices that divide every fragment's batch
        sharding = batch_sharding(self.mesh, axis)
        if self.has_sharded_parameters:
            entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * len(aval.shape)
            for dimension in replicated:
                entries[dimension] = None
            if axis is not None:
                entries[axis] = BATCH
            sharding = NamedSharding(self.mesh, PartitionSpec(*entries))
        return _constraint_to(sharding, atom)

    def constrained(self, eqn: Any, step: EquationFlow, devices: int) -> list[Any]:
        """An equation with constraints of its `whole_dimensions`, and of results that reduce the batch."""
        operands, results = (
            whole_dimensions(eqn, devices) if self.has_sharded_parameters and not step.bodies else ({}, {})
        )
        if step.reduced:
            arrays = [k for k, v in enumerate(eqn.outvars) if _is_array_variable(v)]
            results = {k: results.get(k, ()) for k in arrays}
        invars, outvars, before, after = list(eqn.invars), list(eqn.outvars), [], []
        for i, dimensions in operands.items():
            before.append(self.constraint(invars[i], step.operands[i], dimensions))
            invars[i] = before[-1].outvars[0]
        for k, dimensions in results.items():
            outvars[k] = core.Var(outvars[k].aval)
            constraint = self.constraint(outvars[k], step.results[k], dimensions)
            after.append(constraint.replace(outvars=[eqn.outvars[k]]))
        return [*before, eqn.replace(invars=invars, outvars=outvars), *after]


class _JaxprRewriter:
    """Rewrites one jaxpr with its flow, from its first equation to its last."""

    def __init__(
        self, program: _ProgramRewriter, flow: Flow, specs: Sequence[Spec | None], sliced: Sequence[int]
    ):
        self.program, self.mesh = program, program.mesh
        self.flow = dataclasses.replace(flow, equations=tuple(map(_mark_local, flow.equations)))
        self.equations: list[Any] = []
        self.axes = {v: axis for v, (axis, _) in zip(flow.jaxpr.invars, flow.inputs, strict=True)}
        self.specs: dict[Any, Spec | None] = dict(zip(flow.jaxpr.invars, specs, strict=True))
        # (variable, axis) -> the variable, resharded to this axis
        self.resharded: dict[tuple[Any, Axis], Any] = {}
        self.pinned: dict[Any, Any] = {}  # variable -> the variable, constrained to its producer's sharding
        self.gathered: dict[Any, Any] = {}  # parameter -> the parameter, gathered over the batch axis
        self.pins, self.sliceable = self._find_pins(sliced)

    def rewrite(self) -> _Rewritten:
        """Rewrites all equations and outputs."""
        jaxpr = self.flow.jaxpr
        self._pin_all(jaxpr.invars)
        for step in self.flow.equations:
            self.axes.update(zip(step.eqn.outvars, step.results, strict=True))
            self._rewrite_equation(step)
            self._pin_all(step.eqn.outvars)
        outputs = self._read(jaxpr.outvars, self.flow)
        return _Rewritten(
            jaxpr.replace(eqns=self.equations, outvars=outputs),
            {v for v in jaxpr.invars if v in self.pinned},
            [None if jaxprs.is_literal(v) else self.specs.get(v) for v in jaxpr.outvars],
        )

    def _rewrite_equation(self, step: EquationFlow) -> None:
        invars = self._read(step.eqn.invars, step)
        if self.program.has_sharded_parameters:
            for i in weights.gathered_operands(step):
                invars[i] = self._gather_parameter(step.eqn.invars[i], invars[i])
        eqn = step.eqn.replace(invars=invars)
        bodies = self._rewrite_bodies(step)
        if self.program.has_sharded_parameters:
            new_specs = weights.result_specs(step, self.specs, [body.output_specs for body in bodies])
            self.specs.update(zip(step.eqn.outvars, new_specs, strict=True))
        if eqn.primitive is boundary_p:
            constraint = self.program.constraint(eqn.invars[0], eqn.params["axis"])
            self.equations.append(constraint.replace(outvars=eqn.outvars))
        elif step.local:
            self.equations.append(self._shard_map(eqn, step))
        else:
            if step.bodies:
                eqn = jaxprs.with_new_bodies(eqn, [body.jaxpr for body in bodies])
            # If the batch is split, other dimensions can be split only over the other mesh axes.
            is_split = any(axis is not None for axis in (*step.operands, *step.results))
            devices = self.mesh.size // self.mesh.shape[BATCH] if is_split else self.program.common_parts
            self.equations.extend(self.program.constrained(eqn, step, devices))

    def _rewrite_bodies(self, step: EquationFlow) -> list[_Rewritten]:
        """The rewritten bodies of an equation; none if it runs on each device's part as it is."""
        if not step.bodies or (step.local and not self.program.has_sharded_parameters):
            return []
        return [
            self.program.rewrite(
                body_flow,
                weights.body_input_specs(body, step.eqn, self.specs),
                tuple(k for v, k in zip(step.eqn.outvars, body.results, strict=False) if v in self.sliceable),
            )
            for body, body_flow in zip(jaxprs.bodies(step.eqn), step.bodies, strict=False)
        ]

    def _read(self, atoms: Sequence[Any], step: EquationFlow | Flow) -> list[Any]:
        """The operands of an equation, or the outputs of a flow, resharded to the axes that it needs."""
        operands = [atom if jaxprs.is_literal(atom) else self.pinned.get(atom, atom) for atom in atoms]
        for i in step.gathered:
            operands[i] = self._reshard(atoms[i], None)
        for i, axis in step.sliced:
            operands[i] = self._reshard(atoms[i], axis)
        return operands

    def _reshard(self, atom: Any, axis: Axis) -> Any:
        """Reshards `atom` so that it is split along `axis`, or replicated if None."""
        if jaxprs.is_literal(atom) or not atom.aval.shape:
            return atom
        if (atom, axis) not in self.resharded:
            # First constrain the value to its producer's sharding, so that this reader does not change
            # the sharding for others. To change from one axis to another, the value is gathered, and then
            # sliced without a collective.
            source_axis = self.axes.get(atom)
            via_axis = source_axis if None in (source_axis, axis) else None
            replicated = () if source_axis is None else (source_axis,)
            self.resharded[atom, axis] = (
                self._pin(atom)
                if source_axis == axis
                else self._add_constraint(self._reshard(atom, via_axis), axis, replicated)
            )
        return self.resharded[atom, axis]

    def _pin(self, atom: Any) -> Any:
        """Constrains `atom` to its producer's sharding; else XLA might choose one reader's sharding."""
        if atom not in self.pinned:
            self.pinned[atom] = self._add_constraint(atom, self.axes.get(atom))
        return self.pinned[atom]

    def _pin_all(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            if variable in self.pins:
                self._pin(variable)

    def _gather_parameter(self, atom: Any, value: Any) -> Any:
        """Gathers a parameter over the mesh axis `BATCH`; returns `value` if it is not split over it."""
        spec = None if jaxprs.is_literal(atom) else self.specs.get(atom)
        if spec is None or all(BATCH not in mesh_axes for mesh_axes in spec):
            return value
        if atom not in self.gathered:
            sharding = NamedSharding(self.mesh, weights.without_batch(spec))
            self.equations.append(_constraint_to(sharding, value))
            self.gathered[atom] = self.equations[-1].outvars[0]
        return self.gathered[atom]

    def _add_constraint(self, atom: Any, axis: Axis, replicated: Collection[int] = ()) -> Any:
        self.equations.append(self.program.constraint(atom, axis, replicated))
        return self.equations[-1].outvars[0]

    def _find_pins(self, sliced: Sequence[int]) -> tuple[set[Any], set[Any]]:
        """The variables that must be constrained to their producer's sharding.

        Also returns the replicated variables that a reader may slice; `sliced` are the outputs among them.
        """
        flow, pins = self.flow, set[Any]()
        sliceable: set[Any] = set(jaxprs.variables(flow.jaxpr.outvars[i] for i in sliced))
        for atoms, step in [(s.eqn.invars, s) for s in flow.equations] + [(flow.jaxpr.outvars, flow)]:
            positions = {*step.gathered, *dict(step.sliced)}
            if isinstance(step, EquationFlow) and not step.local:
                positions |= set(self._operands_constrained_inside(step))
                if step.eqn.primitive.name == "erf" and step.operands[0] is not None:
                    positions.add(0)  # in erf(erf(x)), XLA would gather the inner erf
                if step.reduced:  # otherwise XLA may gather a small operand instead of reducing the result
                    positions |= {i for i, axis in enumerate(step.operands) if axis is not None}
            # positions of the operands that the equation reads as replicated arrays, and may slice
            replicated = set(dict(step.sliced))
            if isinstance(step, EquationFlow):
                replicated_operands = {i for i, axis in enumerate(step.operands) if axis is None}
                replicated |= replicated_operands.difference(step.gathered)
            pins.update(jaxprs.variables(atoms[i] for i in positions))
            sliceable.update(jaxprs.variables(atoms[i] for i in positions & replicated))
        # XLA removes calls that return an operand, and slices that undo a concatenation. Then a value that we
        # gather and slice is the same value in XLA as an earlier one, and the sharding of the slice would
        # spread to other readers of the earlier value. Therefore earlier values are constrained too.
        for step in reversed(flow.equations):
            if sliceable.intersection(step.eqn.outvars):
                operands = zip(step.eqn.invars, step.operands, strict=True)
                results = zip(step.eqn.outvars, step.results, strict=True)
                unsplit = {v for v, axis in (*operands, *results) if axis is None and _is_array_variable(v)}
                pins |= unsplit
                sliceable |= unsplit
        return {v for v in pins if not jaxprs.is_mutable(v)}, sliceable

    def _operands_constrained_inside(self, step: EquationFlow) -> list[int]:
        """The positions of a call's operands that its body constrains."""
        positions = []
        if step.trips is None and step.eqn.primitive.name != "cond":
            for body, inner in zip(jaxprs.bodies(step.eqn) if step.bodies else (), step.bodies, strict=True):
                constrained = self.program.rewrite(inner, (None,) * len(inner.inputs)).constrained_inputs
                inputs = zip(body.operands, inner.jaxpr.invars, strict=True)
                positions += [i for i, v in inputs if v in constrained and i not in dict(step.sliced)]
        return positions

    def _shard_map(self, eqn: Any, step: EquationFlow) -> Any:
        """An equation that runs `eqn` on each device's part by `shard_map`, in tiles if `eqn` has tiles."""
        count = self.mesh.shape[BATCH]

        def run_untiled(*parts: Any) -> list[Any]:
            outs = OnePart(count, lambda: jax.lax.axis_index(BATCH)).run_equation(step, list(parts))
            return [extreme_over_devices(step.eqn.primitive.name, x) for x in outs] if step.reduced else outs

        tiles = tiles_of(step.eqn)
        function = run_untiled if tiles is None else tiled_function(step.bodies[0], count, tiles)
        # Parameters that a `rowwise` function reads stay sharded: XLA handles all axes but the batch's.
        stays_split = self.program.has_sharded_parameters and step.eqn.primitive is rowwise_p
        if stays_split:
            function = functools.partial(_call_with_whole_dimensions, function)
        run = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(batch_sharding(self.mesh, axis).spec for axis in step.operands),
            out_specs=[batch_sharding(self.mesh, axis).spec for axis in step.results],
            axis_names={BATCH} if stays_split else set(self.mesh.axis_names),
            check_vma=False,
        )
        return jaxprs.traced_equation(jax.jit(run), eqn.invars, eqn.outvars)


def _call_with_whole_dimensions(function: Callable[..., Any], *parts: Any) -> Any:
    """Calls `function` within `shard_map`, with `whole_dimensions` replicated over the axis `MODEL`."""
    mesh = jax.sharding.get_abstract_mesh()
    jaxpr = constrain_whole(jax.make_jaxpr(function)(*parts), mesh, mesh.shape[MODEL])
    return core.jaxpr_as_fun(jaxpr)(*parts)


def _is_array_variable(atom: Any) -> bool:
    """Whether `atom` is a variable with at least one dimension, and not a mutable array."""
    is_variable = not hasattr(atom, "val") and not isinstance(atom, core.DropVar)
    return is_variable and bool(atom.aval.shape) and not jaxprs.is_mutable(atom)


def _mark_local(step: EquationFlow) -> EquationFlow:
    """Marks an equation as local if it must run on each device's part, by `shard_map`.

    Such equations are tiled reductions, because a device sums its tiles before the all-reduce, and max and
    min of floats, because XLA's all-reduce could drop NaN.
    """
    is_local = tiles_of(step.eqn) is not None or (step.reduced and may_lose_nan(step.eqn))
    return dataclasses.replace(step, local=True) if is_local else step


def constrain_whole(jaxpr: ClosedJaxpr, mesh: Any, devices: int) -> ClosedJaxpr:
    """Replicates `whole_dimensions`, and keeps NaN, in a program for which XLA chooses all shardings."""
    program = _ProgramRewriter(mesh, has_sharded_parameters=True, common_parts=devices)

    def constrain_block(block: Any, context: None, inside: jaxprs.Inside) -> Iterator[Any]:
        for eqn in block.eqns:
            if eqn.primitive is rowwise_p or (eqn.primitive.name not in RULES and jaxprs.bodies(eqn)):
                yield inside(eqn)
            else:
                step = EquationFlow(eqn, (None,) * len(eqn.invars), (None,) * len(eqn.outvars))
                yield from program.constrained(eqn, step, devices)

    return jaxprs.rewrite_blocks(keep_nan(jaxpr), constrain_block)


def _constraint_to(sharding: NamedSharding, atom: Any) -> Any:
    """An equation that gives `atom` a sharding."""
    equation = _cached_constraint(sharding, atom.aval.shape, atom.aval.dtype)
    return equation.replace(invars=[atom], outvars=[core.Var(equation.outvars[0].aval)])


@functools.lru_cache(maxsize=4096)
def _cached_constraint(sharding: NamedSharding, shape: tuple[int, ...], dtype: Any) -> Any:
    """A constraint equation, cached because tracing takes 1 ms and programs have thousands of constraints."""
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))
    return jaxpr(jax.ShapeDtypeStruct(shape, dtype)).eqns[0]
