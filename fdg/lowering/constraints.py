"""Writes sharding constraints for a mesh into a traced program.

`batch.follow` determines what each operation does with the batch axis. Here this becomes sharding
constraints: borders split their batch, operands that an operation needs whole are gathered before it, and
batch reductions are replicated. XLA's partitioner then only follows them, in the global view, so no
constraint can change the results.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdg import jaxprs
from fdg.batch.flow import EquationFlow, Flow
from fdg.batch.follow import follow
from fdg.batch.rules.reduce import window_covers
from fdg.batch.rules.result import Axis, shape_of
from fdg.fragment import boundary_p
from fdg.identity_cache import IdentityCache
from fdg.jax_internals import ClosedJaxpr
from fdg.lowering import weights
from fdg.lowering.extremes import extreme_over, keep_nan, may_lose_nan
from fdg.lowering.host_calls import GIVES_BACK
from fdg.lowering.local import Local
from fdg.lowering.mesh import SEED, batch_sharding, make_mesh
from fdg.lowering.tiles import run_tiles, tiles_of
from fdg.placing.layout import BATCH, Spec
from fdg.rowwise import rowwise_p

Dimensions = Mapping[int, tuple[int, ...]]
"""By the position of an operand or a result."""


def unsplit(step: EquationFlow) -> tuple[Dimensions, Dimensions]:
    """The dimensions of operands and results that must be replicated, apart from the batch.

    With parameters split over `model`, XLA's partitioner handles some dimensions wrongly (jaxlib 0.10.2). A
    convolution whose windows move over a dimension that is split over `model` alone is summed over all
    devices, which multiplies it by the rows of the batch. For a reduction with a user-defined function it
    makes an all-reduce that it cannot compile. Such dimensions are gathered first.
    """
    eqn = step.eqn
    if step.bodies or step.local:
        return {}, {}
    arrays = [i for i, v in enumerate(eqn.invars) if shape_of(v) and not jaxprs.is_literal(v)]
    match eqn.primitive.name:
        case "conv_general_dilated":
            grouped = max(eqn.params["feature_group_count"], eqn.params["batch_group_count"]) > 1
            specs = eqn.params["dimension_numbers"]
            lhs, rhs, out = (tuple(spec if grouped else spec[2:]) for spec in specs)
            return {0: lhs, 1: rhs}, {0: out}
        case "reduce":
            return dict.fromkeys(arrays, tuple(eqn.params["dimensions"])), {}
        case name if name.startswith(("reduce_window", "select_and_")):
            moved = tuple(d for d in range(len(eqn.params["padding"])) if window_covers(eqn, d))
            return dict.fromkeys(arrays, moved), dict.fromkeys(range(len(eqn.outvars)), moved)
    return {}, {}


__all__ = ["BATCH", "SEED", "batch_sharding", "constrain", "make_mesh"]


def constrain(
    jaxpr: ClosedJaxpr,
    mesh: Mesh,
    axes: Sequence[Axis] = (),
    output_axes: Sequence[Axis] | None = None,
    specs: Sequence[Spec | None] | None = None,
) -> ClosedJaxpr:
    """Replaces fragment borders by shardings on the mesh, and makes every collective explicit.

    The result's collectives are those of `exchanges.predict_exchanges(jaxpr, axes, rows, output_axes)`, with
    the mesh's number of rows; with `specs` also those that XLA adds for sharded parameters. `axes` are the
    batch axes of its first inputs, and `output_axes` those to reshard its outputs to; None leaves them. The
    mesh's axis `BATCH` divides the batch of every border. If parameters are sharded, `specs` are those of the
    first inputs. Then only batch axes are constrained, and parameters are gathered over the batch's mesh axis
    where they meet; XLA decides the rest.
    """
    if specs is not None:
        jaxpr = keep_nan(jaxpr)
    flow = follow(jaxpr, axes, mesh.shape[BATCH], output_axes)
    inputs = (*(specs or ()), *[None] * (len(flow.inputs) - len(specs or ())))
    lowered = _Rewriter(mesh, specs is not None).rewrite(flow, inputs)
    core.check_jaxpr(lowered)
    return jaxprs.with_jaxpr(jaxpr, lowered)


class _Rewriter:
    """Rewrites jaxprs with their flows; one that is called from several places is rewritten once."""

    def __init__(self, mesh: Mesh, sharded: bool = False):
        self.mesh, self.sharded = mesh, sharded
        self._known: IdentityCache[tuple[Any, set[Any], list[Spec | None]]] = IdentityCache()

    def rewrite(self, flow: Flow, specs: tuple[Spec | None, ...]) -> Any:
        """The jaxpr of a flow with its constraints."""
        return self._rewritten(flow, specs)[0]

    def _rewritten(
        self, flow: Flow, specs: tuple[Spec | None, ...]
    ) -> tuple[Any, set[Any], list[Spec | None]]:
        """The rewritten jaxpr, the inputs that it constrains, and the specs of its outputs."""
        return self._known(flow, specs, lambda: self._rewrite(flow, specs))

    def _rewrite(self, flow: Flow, specs: tuple[Spec | None, ...]) -> tuple[Any, set[Any], list[Spec | None]]:
        equations: list[Any] = []
        axes = {v: axis for v, (axis, _) in zip(flow.jaxpr.invars, flow.inputs, strict=True)}
        placed: dict[tuple[Any, Axis], Any] = {}  # values that were already gathered or sliced
        current: dict[Any, Any] = {}
        known: dict[Any, Spec | None] = dict(zip(flow.jaxpr.invars, specs, strict=True))
        whole_along_batch: dict[Any, Any] = {}  # parameters, gathered over the batch's mesh axis

        def gather_parameter(atom: Any, value: Any) -> Any:
            spec = known.get(atom)
            if spec is None or all(BATCH not in axes for axes in spec):
                return value
            if atom not in whole_along_batch:
                sharding = NamedSharding(self.mesh, weights.without_batch(spec, len(atom.aval.shape)))
                equations.append(_constraint_to(sharding, value))
                whole_along_batch[atom] = equations[-1].outvars[0]
            return whole_along_batch[atom]

        def constrained(atom: Any, axis: Axis, whole: Sequence[int] = ()) -> Any:
            equations.append(self._constraint(atom, axis, whole))
            return equations[-1].outvars[0]

        def place(atom: Any, axis: Axis) -> Any:
            """`atom` split along `axis`."""
            if hasattr(atom, "val") or not atom.aval.shape:
                return atom
            if (atom, axis) not in placed:
                # Constrain the producer's own sharding first, so that the reader's side does not change it.
                # Resharding from one axis to another goes through a gather, the only exchange.
                made = axes.get(atom)
                before = made if None in (made, axis) else None
                whole = () if made is None else (made,)
                placed[atom, axis] = (
                    pinned(atom) if made == axis else constrained(place(atom, before), axis, whole)
                )
            return placed[atom, axis]

        def pinned(atom: Any) -> Any:
            """Its sharding as computed, for all readers: the partitioner would use one reader's for all."""
            if atom not in current:
                current[atom] = constrained(atom, axes.get(atom))
            return current[atom]

        def take(atoms: Sequence[Any], step: EquationFlow | Flow) -> list[Any]:
            operands = [atom if hasattr(atom, "val") else current.get(atom, atom) for atom in atoms]
            for i in step.gathered:
                operands[i] = place(atoms[i], None)
            for i, axis in step.sliced:
                operands[i] = place(atoms[i], axis)
            return operands

        flow = dataclasses.replace(flow, equations=tuple(map(_alone, flow.equations)))
        pins = self._pins(flow)
        for atom in flow.jaxpr.invars:
            if atom in pins:
                pinned(atom)
        for step in flow.equations:
            axes.update(zip(step.eqn.outvars, step.results, strict=True))
            invars = take(step.eqn.invars, step)
            for i in weights.gathered_operands(step) if self.sharded else ():
                invars[i] = gather_parameter(step.eqn.invars[i], invars[i])
            takes, gives = unsplit(step) if self.sharded else ({}, {})
            for i, whole in takes.items():
                invars[i] = constrained(invars[i], step.operands[i], whole)
            eqn = step.eqn.replace(invars=invars)
            opened = jaxprs.bodies(step.eqn) if step.bodies and (self.sharded or not step.local) else ()
            inner = [
                self._rewritten(body_flow, weights.inputs(body, step.eqn, known))
                for body, body_flow in zip(opened, step.bodies, strict=False)
            ]
            if self.sharded:
                made = weights.result_specs(step, known, [outputs for *_, outputs in inner])
                known.update(zip(step.eqn.outvars, made, strict=True))
            if eqn.primitive is boundary_p:
                model = self._constraint(eqn.invars[0], eqn.params["axis"])
                equations.append(model.replace(outvars=eqn.outvars))
            elif step.local:
                equations.append(self._localised(eqn, step))
            else:
                if step.bodies:
                    eqn = jaxprs.with_new_bodies(eqn, [jaxpr for jaxpr, *_ in inner])
                which = [
                    k for k, v in enumerate(eqn.outvars) if _has_shape(v) and (step.reduced or k in gives)
                ]
                results = {eqn.outvars[k]: core.Var(eqn.outvars[k].aval) for k in which}
                equations.append(eqn.replace(outvars=[results.get(v, v) for v in eqn.outvars]))
                for k, (old, new) in zip(which, results.items(), strict=True):
                    end = self._constraint(new, step.results[k], gives.get(k, ()))
                    equations.append(end.replace(outvars=[old]))
            for atom in step.eqn.outvars:
                if atom in pins:
                    pinned(atom)
        outputs = take(flow.jaxpr.outvars, flow)
        constrains = {v for v in flow.jaxpr.invars if v in current}
        ends = [None if jaxprs.is_literal(v) else known.get(v) for v in flow.jaxpr.outvars]
        return flow.jaxpr.replace(eqns=equations, outvars=outputs), constrains, ends

    def _pins(self, flow: Flow) -> set[Any]:
        """The variables that some reader needs with another sharding than their definition's."""
        found: set[Any] = set()
        cut: set[Any] = set()
        for atoms, step in [(s.eqn.invars, s) for s in flow.equations] + [(flow.jaxpr.outvars, flow)]:
            positions = {*step.gathered, *dict(step.sliced)}
            if isinstance(step, EquationFlow) and not step.local:
                positions |= set(self._constrained_inside(step))
                if step.eqn.primitive.name == "erf" and step.operands[0] is not None:
                    positions.add(0)  # for an erf of an erf, XLA gathers the inner one
                if step.reduced:  # otherwise XLA may exchange a small operand instead
                    positions |= {i for i, axis in enumerate(step.operands) if axis is not None}
            found |= {atoms[i] for i in positions if not hasattr(atoms[i], "val")}
            cut |= {atoms[i] for i in positions if not hasattr(atoms[i], "val") and i in self._whole(step)}
        # A gathered value that is then sliced may alias its source through any number of operations: XLA
        # drops a slice of a concatenation that takes a whole part, and calls that return an operand, and
        # would give the source's other readers the sliced value.
        for step in reversed(flow.equations):
            if cut.intersection(step.eqn.outvars):
                operands = zip(step.eqn.invars, step.operands, strict=True)
                results = zip(step.eqn.outvars, step.results, strict=True)
                whole = {v for v, axis in (*operands, *results) if axis is None and _has_shape(v)}
                found |= whole
                cut |= whole
        return found

    def _whole(self, step: EquationFlow | Flow) -> set[int]:
        """The positions of operands that a step reads replicated before something takes a part of them."""
        sliced = set(dict(step.sliced))
        if isinstance(step, Flow):
            return sliced
        return sliced | {i for i, axis in enumerate(step.operands) if axis is None and i not in step.gathered}

    def _constrained_inside(self, step: EquationFlow) -> list[int]:
        """The operands of a call that its body constrains."""
        found = []
        if step.trips is None and step.eqn.primitive.name != "cond":
            for body, inner in zip(jaxprs.bodies(step.eqn) if step.bodies else (), step.bodies, strict=True):
                constrained = self._rewritten(inner, (None,) * len(inner.inputs))[1]
                inputs = zip(body.operands, inner.jaxpr.invars, strict=True)
                found += [i for i, v in inputs if v in constrained and i not in dict(step.sliced)]
        return found

    def _constraint(self, atom: Any, axis: Axis, whole: Sequence[int] = ()) -> Any:
        """An equation that splits `atom` along a batch axis and replicates dimensions `whole`."""
        aval = atom.aval
        if axis is not None and aval.shape[axis] % self.mesh.shape[BATCH]:
            axis = None  # no equal parts; the plan ensures that this is no fragment's own batch
        sharding = batch_sharding(self.mesh, axis)
        if self.sharded:
            entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * len(aval.shape)
            for dimension in whole:
                entries[dimension] = None
            if axis is not None:
                entries[axis] = BATCH
            sharding = NamedSharding(self.mesh, PartitionSpec(*entries))
        return _constraint_to(sharding, atom)

    def _localised(self, eqn: Any, step: EquationFlow) -> Any:
        """An equation that runs `step` on each device's part by `shard_map`, in tiles if it is marked."""
        count = self.mesh.shape[BATCH]

        def whole(*parts: Any) -> list[Any]:
            made = Local(count, lambda: jax.lax.axis_index(BATCH)).step(step, list(parts))
            return [extreme_over(BATCH, step.eqn.primitive.name, x) for x in made] if step.reduced else made

        tiles = tiles_of(step.eqn)
        function = whole if tiles is None else run_tiles(step.bodies[0], count, tiles)
        # Parameters that a whole function of rows reads stay sharded: XLA handles all axes but the rows.
        stays_split = self.sharded and step.eqn.primitive is rowwise_p
        if stays_split:
            function = functools.partial(_keeping_nan, function)
        run = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(batch_sharding(self.mesh, axis).spec for axis in step.operands),
            out_specs=[batch_sharding(self.mesh, axis).spec for axis in step.results],
            axis_names={BATCH} if stays_split else set(self.mesh.axis_names),
            check_vma=False,
        )
        return jaxprs.as_one(jax.jit(run), eqn.invars, eqn.outvars)


def _keeping_nan(function: Callable[..., Any], *parts: Any) -> Any:
    return core.jaxpr_as_fun(keep_nan(jax.make_jaxpr(function)(*parts)))(*parts)


def _has_shape(atom: Any) -> bool:
    """Whether it is a variable with at least one dimension."""
    return not hasattr(atom, "val") and not isinstance(atom, core.DropVar) and bool(atom.aval.shape)


def _alone(step: EquationFlow) -> EquationFlow:
    """Whether each device runs an equation by itself, by `shard_map`.

    Tiles: a device sums its tiles before the all-reduce. Extremes of floats: XLA's all-reduce could drop NaN.
    """
    alone = tiles_of(step.eqn) is not None or (step.reduced and may_lose_nan(step.eqn))
    return dataclasses.replace(step, local=True) if alone else step


def replicate_host_results(jaxpr: ClosedJaxpr, mesh: Mesh) -> ClosedJaxpr:
    """Replicates the results of host calls, which one device gets; otherwise XLA warns if a reader is
    split."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def replicated(block: Any, how: None, inside: jaxprs.Inside) -> Iterator[Any]:
        for eqn in map(inside, block.eqns):
            results = eqn.outvars if eqn.primitive.name in GIVES_BACK else []
            there = {v: core.Var(v.aval) for v in results if not isinstance(v, core.DropVar)}
            yield eqn.replace(outvars=[there.get(v, v) for v in eqn.outvars]) if there else eqn
            for result, alone in there.items():
                yield _constraint_to(everywhere, alone).replace(outvars=[result])

    return jaxprs.rewrite_blocks(jaxpr, replicated)


def _constraint_to(sharding: NamedSharding, atom: Any) -> Any:
    """An equation that gives `atom` a sharding."""
    model = _constraint_of(sharding, atom.aval.shape, atom.aval.dtype)
    return model.replace(invars=[atom], outvars=[core.Var(model.outvars[0].aval)])


@functools.lru_cache(maxsize=4096)
def _constraint_of(sharding: NamedSharding, shape: tuple[int, ...], dtype: Any) -> Any:
    """A cached constraint equation: there are thousands of a few kinds, and tracing takes 1 ms."""
    constrained = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))
    return constrained(jax.ShapeDtypeStruct(shape, dtype)).eqns[0]
