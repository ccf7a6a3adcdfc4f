"""Sharded parameters: rules on the paths of leaves, and the layouts of a schedule's values.

    rules   (("kernel", (None, "model")), ("bias", "batch"))    for a group with the mesh batch 2, model 4
    leaves  .params['in']['kernel'] [32, 64]   the first rule   spec ((), ("model",))   parts (1, 4)
            .params['in']['bias'] [64]         the second       spec (("batch",),)      parts (2,)
            .step []                           none             replicated

A rule gives the mesh axes of each dimension in a tuple, or in a string (`"batch"`, `"model"` or
`"batch+model"`) the mesh axes that split the largest divisible dimension. The paths of parameters and of
their optimiser state have the same endings, so one rule matches both. Values that become a sharded leaf (in
the next iteration, or in a loop) have its layout.
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
from fdg.placing.regions.region import connected_sets
from fdg.placing.scheduling.liveness import donatable
from fdg.placing.scheduling.schedule import Call, Move, Repeat, Schedule, Value, all_steps
from fdg.tracing.graph import FDG


@dataclasses.dataclass(frozen=True)
class ShardedLeaf:
    """A leaf of the state that a group's rule matches."""

    position: int  # its position among the state's leaves
    path: str  # its path in the algorithm's state, written by `jax.tree_util.keystr`
    group: str  # the group's name
    rule: str  # the matching regular expression
    layout: Layout  # its layout on the group's devices; replicated if no dimension is divisible

    def of_agents(self, count: int | None) -> "ShardedLeaf":
        """The leaf with a leading axis of `count` agents, which is not split; for None, the leaf itself."""
        if count is None:
            return self
        one_agent = self.layout
        spec = ((), *one_agent.spec) if one_agent.spec else ()
        return dataclasses.replace(self, layout=Layout((count, *one_agent.shape), spec, one_agent.mesh))


def with_rules(group: Group, graph: FDG, policy: Policy) -> Group:
    """The group, with the algorithm's rules if its `parameters` are `DECLARED`."""
    if group.parameters != DECLARED:
        return group
    if not graph.parameter_rules:
        raise PlanError(
            f"{policy}: {graph.name} declares no rules for sharded parameters: give the algorithm (or its"
            f" network) an attribute parameter_rules, or the policy parameters=<rules>, such as 'fsdp'"
        )
    return dataclasses.replace(group, parameters=graph.parameter_rules)


def sharded_leaves(graph: FDG, group: Group, policy: Policy) -> list[ShardedLeaf]:
    """The leaves that a group's rules match; leaves with a batch axis, keys and scalars are never sharded."""
    if not group.shards:
        return []
    assert not isinstance(group.parameters, str)
    sharded = []
    paths = jax.tree_util.tree_leaves_with_path(graph.state)
    for i, ((path, leaf), axis) in enumerate(zip(paths, graph.state_axes, strict=True)):
        if axis is not None or not leaf.shape or keys.is_key(leaf.dtype):
            continue
        name = jax.tree_util.keystr(path)
        for pattern, spec in group.parameters:
            if re.search(pattern, name):
                layout = _layout(pattern, spec, name, tuple(leaf.shape), group, policy)
                sharded.append(ShardedLeaf(i, name, group.name, pattern, layout))
                break
    return sharded


def unused_rules(group: Group, leaves: Iterable[ShardedLeaf]) -> list[str]:
    """The regular expressions of a group's rules that match no leaf."""
    if not group.shards:
        return []
    assert not isinstance(group.parameters, str)
    used = {leaf.rule for leaf in leaves if leaf.group == group.name}
    return [pattern for pattern, _ in group.parameters if pattern not in used]


def _layout(
    pattern: str, spec: Any, name: str, shape: tuple[int, ...], group: Group, policy: Policy
) -> Layout:
    """The layout of a leaf under a rule; raises `PlanError` if the rule does not fit its shape."""
    sizes = dict(group.mesh)
    if isinstance(spec, str):
        axes = tuple(spec.split("+"))
        parts = math.prod(sizes[axis] for axis in axes)
        divisible = [i for i, n in enumerate(shape) if n % parts == 0 and n]
        if not divisible:
            return Layout(shape, (), group.mesh)
        widest = max(divisible, key=lambda i: shape[i])
        return Layout(shape, (*[()] * widest, axes), group.mesh)
    rule_text = f"{policy}: rule '{pattern}' splits {name} {list(shape)} as ({', '.join(map(str, spec))})"
    if len(spec) > len(shape):
        raise PlanError(
            f"{rule_text}, which names {len(spec)} dimensions, but the array has {len(shape)}: name at most"
            f" {len(shape)}, or put a rule for this leaf before it"
        )
    entries: Spec = tuple(e if isinstance(e, tuple) else () if e is None else (e,) for e in spec)
    layout = Layout(shape, entries, group.mesh)
    for n, parts, axes in zip(shape, layout.parts, entries, strict=False):
        if n % parts:
            raise PlanError(
                f"{rule_text}, but {n} is not divisible by the {parts} devices of group '{group.name}' along"
                f" {' and '.join(axes)}: use a divisible size, another number of devices, or put a rule"
                f" for this leaf before it"
            )
    return layout


# --- schedules ---


def lay_out(schedule: Schedule, groups: Sequence[Group], leaves: Sequence[ShardedLeaf]) -> Schedule:
    """Sets the layout of each value of a schedule.

    A sharded leaf, and every value that becomes it, has the leaf's layout. A value that becomes two leaves
    with different layouts is replicated. If several groups keep a leaf, the copy that is split into the most
    parts becomes the primary copy.
    """
    meshes = {group.name: group.mesh for group in groups}
    specs = _specs(schedule, leaves) if leaves else {}

    @functools.cache
    def with_layout(value: Value) -> Value:
        spec, mesh = specs.get((value.variable, value.group)), meshes[value.group]
        of_batch = Layout.of_batch(value.shape, value.axis, mesh)
        return dataclasses.replace(
            value, layout=of_batch if spec is None else Layout(value.shape, spec, mesh)
        )

    def add_layouts(node: Any) -> Any:
        """Adds the layout to each value of a schedule, a step, or a field of either."""
        if isinstance(node, Value):
            return with_layout(node)
        if type(node) is tuple:
            return tuple(map(add_layouts, node))
        if not isinstance(node, Call | Move | Repeat | Schedule):
            return node
        fields = {f.name: add_layouts(getattr(node, f.name)) for f in dataclasses.fields(node)}
        if isinstance(node, Call) and specs:
            fields["donated"] = donatable(fields["inputs"], fields["outputs"], node.freed)
        return dataclasses.replace(node, **fields)

    def num_parts(value: Value) -> int:
        return value.laid_out.num_parts if (value.variable, value.group) in specs else 0

    laid_out = add_layouts(schedule)
    leaves_of = (sorted(copies, key=num_parts, reverse=True) for copies in laid_out.leaves)
    return dataclasses.replace(laid_out, leaves=tuple(map(tuple, leaves_of)))


def _specs(schedule: Schedule, leaves: Sequence[ShardedLeaf]) -> dict[tuple[Any, str], Spec]:
    """The spec of each (variable, group); a value has the spec of the value that it becomes."""
    pairs = list(schedule.carry)
    for step, _ in all_steps(schedule.steps):
        if isinstance(step, Repeat):
            pairs += (*step.enter, *step.carry, *step.leave)
    set_of = connected_sets((a.variable, b.variable) for a, b in pairs)
    # [id of a set of variables, group] -> the specs of the leaves in the set; None for a leaf without a spec
    specs_by_set: dict[tuple[int, str], set[Spec | None]] = collections.defaultdict(set)
    set_by_id: dict[int, set[Any]] = {}
    spec_of_leaf = {(leaf.position, leaf.group): leaf.layout.spec for leaf in leaves}
    for i, copies in enumerate(schedule.leaves):
        for value in copies:
            variable_set = set_of.setdefault(value.variable, {value.variable})
            set_by_id[id(variable_set)] = variable_set
            specs_by_set[id(variable_set), value.group].add(spec_of_leaf.get((i, value.group)))
    specs: dict[tuple[Any, str], Spec] = {}
    for (set_id, group), set_specs in specs_by_set.items():
        spec = next(iter(set_specs))
        if len(set_specs) == 1 and spec:
            specs.update(((variable, group), spec) for variable in set_by_id[set_id])
    return specs


def layouts_by_position(leaves: Sequence[ShardedLeaf], group: str) -> Mapping[int, Layout]:
    """The layouts of a group's sharded leaves, by the leaf's position."""
    return {leaf.position: leaf.layout for leaf in leaves if leaf.group == group}


def axes_text(group: Group) -> str:
    """A group's mesh as text: "batch 2 x model 4"."""
    return f"{BATCH} {group.num_batch_parts} x {MODEL} {group.model}"
