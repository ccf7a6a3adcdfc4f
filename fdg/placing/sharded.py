"""Sharded parameters: rules on the paths of leaves, and the layouts of a schedule's values.

    rules   (("kernel", (None, "model")), ("", "batch"))        of a group with the mesh batch 2, model 4
    leaves  .params['in']['kernel'] [32, 64]   the first rule   spec ((), ("model",))   parts (1, 4)
            .params['in']['bias'] [64]         the second       spec (("batch",),)      parts (2,)
            .step []                           none             replicated

Parameters and optimiser state have paths with the same ends, so one rule matches both. Values that become
such a leaf (in the next iteration, or in a loop) have its layout.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from fdg import keys
from fdg.errors import PlanError
from fdg.placing.layout import BATCH, MODEL, Layout, Spec
from fdg.placing.policy import DECLARED, Group, Policy
from fdg.placing.regions.region import connected
from fdg.placing.scheduling.liveness import donatable
from fdg.placing.scheduling.schedule import Call, Move, Repeat, Schedule, Value, all_steps
from fdg.tracing.graph import FDG


@dataclasses.dataclass(frozen=True)
class ShardedLeaf:
    """A leaf of the state that a group's rule matches."""

    position: int  # its position among the state's leaves
    path: str  # its path in the algorithm's state, as by `jax.tree_util.keystr`
    group: str  # the group's name
    rule: str  # the matching regular expression
    layout: Layout  # its layout on the group's devices; replicated if no dimension divides

    def of_agents(self, count: int | None) -> "ShardedLeaf":
        """The leaf with a leading, unsplit axis of agents; itself for None."""
        if count is None:
            return self
        one = self.layout
        layout = Layout((count, *one.shape), ((), *one.spec) if one.spec else (), one.mesh)
        return dataclasses.replace(self, layout=layout)


def with_rules(group: Group, graph: FDG, policy: Policy) -> Group:
    """The group with the rules declared by the algorithm, if it asks for them."""
    if group.parameters != DECLARED:
        return group
    if not graph.parameter_rules:
        raise PlanError(
            f"{policy}: {graph.name} declares no rules for sharded parameters: give it (or its network) an"
            f" attribute parameter_rules, or give the policy parameters=<rules>, such as 'fsdp'"
        )
    return dataclasses.replace(group, parameters=graph.parameter_rules)


def sharded_leaves(graph: FDG, group: Group, policy: Policy, state: Any = None) -> list[ShardedLeaf]:
    """The leaves of the state that a group's rules match, without batches, keys and scalars.

    `state` is the algorithm's own part of the graph's state: its first leaves.
    """
    if not group.shards:
        return []
    assert not isinstance(group.parameters, str)
    found = []
    paths = jax.tree_util.tree_leaves_with_path(graph.state if state is None else state)
    for i, ((path, leaf), axis) in enumerate(zip(paths, graph.state_axes, strict=False)):
        if axis is not None or not leaf.shape or keys.is_key(leaf.dtype):
            continue
        name = jax.tree_util.keystr(path)
        for pattern, spec in group.parameters:
            if re.search(pattern, name):
                layout = _layout(pattern, spec, name, tuple(leaf.shape), group, policy)
                found.append(ShardedLeaf(i, name, group.name, pattern, layout))
                break
    return found


def unused_rules(group: Group, leaves: Iterable[ShardedLeaf]) -> list[str]:
    """The regular expressions of a group's rules that match no leaf."""
    if not group.shards:
        return []
    assert not isinstance(group.parameters, str)
    taken = {leaf.rule for leaf in leaves if leaf.group == group.name}
    return [pattern for pattern, _ in group.parameters if pattern not in taken]


def _layout(
    pattern: str, spec: Any, name: str, shape: tuple[int, ...], group: Group, policy: Policy
) -> Layout:
    sizes = dict(group.mesh)
    if isinstance(spec, str):
        axes = tuple(spec.split("+"))
        width = math.prod(sizes[axis] for axis in axes)
        fitting = [i for i, n in enumerate(shape) if n % width == 0 and n]
        if not fitting:
            return Layout(shape, (), group.mesh)
        widest = max(fitting, key=lambda i: shape[i])
        return Layout(shape, (*[()] * widest, axes), group.mesh)
    where = f"{policy}: rule '{pattern}' splits {name} {list(shape)} as ({', '.join(map(str, spec))})"
    if len(spec) > len(shape):
        raise PlanError(
            f"{where}, which names {len(spec)} dimensions of {len(shape)}: name at most {len(shape)}, or"
            f" put a rule for this leaf before it"
        )
    entries: Spec = tuple(e if isinstance(e, tuple) else () if e is None else (e,) for e in spec)
    layout = Layout(shape, entries, group.mesh)
    for n, parts, axes in zip(shape, layout.parts, entries, strict=False):
        if n % parts:
            raise PlanError(
                f"{where}, but {n} does not divide by the {parts} devices of group '{group.name}' along"
                f" {' and '.join(axes)}: use a size that does, another number of devices, or put a rule for"
                f" this leaf before it"
            )
    return layout


# --- schedules ---


def lay_out(schedule: Schedule, groups: Sequence[Group], leaves: Sequence[ShardedLeaf]) -> Schedule:
    """The schedule with the layout of each value.

    Values of a sharded leaf have the leaf's layout, and so do values that become such a leaf. A value that
    becomes two leaves with different layouts is replicated. Of a leaf that several groups keep, the primary
    copy is the one that is split the most.
    """
    meshes = {group.name: group.mesh for group in groups}
    specs = _specs(schedule, leaves) if leaves else {}

    @functools.cache
    def of(value: Value) -> Value:
        found, mesh = specs.get((value.variable, value.group)), meshes[value.group]
        layout = (
            Layout.of_batch(value.shape, value.axis, mesh)
            if found is None
            else Layout(value.shape, found, mesh)
        )
        return dataclasses.replace(value, layout=layout)

    def mapped(node: Any) -> Any:
        """A step, or a part of one, with all values replaced."""
        if isinstance(node, Value):
            return of(node)
        if type(node) is tuple:
            return tuple(map(mapped, node))
        if not isinstance(node, Call | Move | Repeat | Schedule):
            return node
        parts = {field.name: mapped(getattr(node, field.name)) for field in dataclasses.fields(node)}
        if isinstance(node, Call) and specs:
            parts["donated"] = donatable(parts["inputs"], parts["outputs"], node.freed)
        return dataclasses.replace(node, **parts)

    def parts(value: Value) -> int:
        return value.laid_out.number if (value.variable, value.group) in specs else 0

    made = mapped(schedule)
    leaves_of = (sorted(copies, key=parts, reverse=True) for copies in made.leaves)
    return dataclasses.replace(made, leaves=tuple(map(tuple, leaves_of)))


def _specs(schedule: Schedule, leaves: Sequence[ShardedLeaf]) -> dict[tuple[Any, str], Spec]:
    """The axes that split a group's variables, propagated between values that become each other."""
    pairs = list(schedule.carry)
    for step, _ in all_steps(schedule.steps):
        if isinstance(step, Repeat):
            pairs += (*step.enter, *step.carry, *step.leave)
    same = connected((a.variable, b.variable) for a, b in pairs)
    # Of each set of variables, on each group: the specs of the leaves in it, with None for one without.
    found: dict[tuple[int, str], set[Spec | None]] = collections.defaultdict(set)
    variables: dict[int, set[Any]] = {}
    by_place = {(leaf.position, leaf.group): leaf.layout.spec for leaf in leaves}
    for i, copies in enumerate(schedule.leaves):
        for value in copies:
            together = same.setdefault(value.variable, {value.variable})
            variables[id(together)] = together
            found[id(together), value.group].add(by_place.get((i, value.group)))
    specs: dict[tuple[Any, str], Spec] = {}
    for (set_id, group), several in found.items():
        spec = next(iter(several))
        if len(several) == 1 and spec:
            specs.update(((variable, group), spec) for variable in variables[set_id])
    return specs


def by_position(leaves: Sequence[ShardedLeaf], group: str) -> Mapping[int, Layout]:
    """The layouts of a group's sharded leaves by position."""
    return {leaf.position: leaf.layout for leaf in leaves if leaf.group == group}


def axes_text(group: Group) -> str:
    """A group's mesh as text: "batch 2 x model 4"."""
    return f"{BATCH} {group.rows} x {MODEL} {group.model}"
