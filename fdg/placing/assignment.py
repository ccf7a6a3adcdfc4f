"""Assigns fragments to groups of devices, by the policy and by the data that they exchange.

    policy: environment, actor -> actors (0, 1, 2); learner -> learners (3,)

    step, act    actors, by their roles
    judge        actors: its role is not in the policy, so it goes to the producer of its largest input
    gradient     learners: nested in `learn`

A group uses the largest number of its devices that divides the batches of its fragments.
"""

import dataclasses
import difflib
import math
import warnings
from collections.abc import Collection, Mapping, Sequence

from fdg.arguments import quoted
from fdg.errors import FdgWarning, PlanError, listed
from fdg.fragment import ROLES
from fdg.placing.policy import Group, Policy
from fdg.settings.fields import largest_divisor
from fdg.tracing.graph import FDG, Fragment
from fdg.tracing.trace import WHOLE_ITERATION

_MIN_LIKENESS = 0.86  # of a misspelt role to the intended one, from 0 to 1


def check_placement(graph: FDG, policy: Policy, placement: Mapping[str, Group], count: int) -> None:
    """Checks that a policy's placement fits the graph and `count` devices; raises `PlanError` otherwise."""
    if not isinstance(placement, Mapping) or not all(isinstance(g, Group) for g in placement.values()):
        raise PlanError(
            f"{policy}: place(devices) returned {quoted(placement)}: return a dict from roles to"
            " fdg.Group(name, devices)"
        )
    if not placement:
        raise PlanError(f"{policy}: place() returned no role: return at least one")
    roles = {f.role for f in graph.fragments} - {WHOLE_ITERATION}
    groups: dict[Group, list[str]] = {}
    for role, group in placement.items():
        groups.setdefault(group, []).append(role)
        outside = [device for device in group.devices if not 0 <= device < count]
        if outside or not group.devices:
            problem = f"device {outside[0]}" if outside else "no device"
            raise PlanError(
                f"{policy} places '{role}' on {problem} (group {group.name}), but there are {count} devices,"
                f" 0 to {count - 1}: let place() return indices into the list of devices"
            )
        repeated = [device for device in group.devices if group.devices.count(device) > 1]
        if repeated:
            raise PlanError(
                f"{policy} places '{role}' on device {repeated[0]} twice (group {group.name}): list each"
                " device once"
            )
        if not group.name or not group.name.isprintable() or not {*"+&"}.isdisjoint(group.name):
            raise PlanError(
                f"{policy} calls the group of '{role}' {group.name!r}: give a printable name without"
                " '+' and '&'"
            )
        others = [g for g in groups if g.name == group.name and g != group]
        for namesake in others:
            if namesake.devices == group.devices and not (namesake.apart or group.apart):
                continue
            raise PlanError(
                f"{policy} has two groups '{group.name}', of '{groups[namesake][0]}' on devices"
                f" {namesake.devices} and of '{role}' on {group.devices}: give each its own name"
            )
    for group, its_roles in groups.items():
        if roles and len(groups) > 1 and roles.isdisjoint(its_roles) and not group.optional:
            note = "; with acts=True, environments step in the actor" if "environment" in its_roles else ""
            raise PlanError(
                f"{policy} runs {listed(map(repr, its_roles))} on its {group.name}, and {graph.name} has no"
                f" fragment of {'that role' if len(its_roles) == 1 else 'those roles'} (its roles are"
                f" {listed(map(repr, sorted(roles)), 'and')}{note}): mark one with"
                f" fdg.fragment('{its_roles[0]}'), or use another policy, such as policies.GPUOnly()"
            )


def warn_of_near_roles(graph: FDG, placement: Mapping[str, Group]) -> None:
    """Warns (`FdgWarning`) about an unknown role that is spelt almost like a known one.

    Unknown roles are allowed: their fragments are placed with the producer of their largest input.
    """
    roles_placed = {*ROLES, WHOLE_ITERATION, *placement}
    for fragment in graph.fragments:
        suggestion = None if fragment.role in roles_placed else _nearest_role(fragment.role, roles_placed)
        if suggestion is not None:
            warnings.warn(
                f"fragment '{fragment.name}' has the role '{fragment.role}', which no policy knows: did you"
                f" mean '{suggestion}'? It is placed with the producer of its largest input",
                FdgWarning,
                stacklevel=3,
            )
    roles = {fragment.role for fragment in graph.fragments}
    for role in placement:
        suggestion = None if role in {*ROLES, *roles} else _nearest_role(role, {*ROLES, *roles})
        if suggestion is not None:
            warnings.warn(
                f"the policy places the role '{role}', which no fragment has: did you mean '{suggestion}'?",
                FdgWarning,
                stacklevel=3,
            )


def _nearest_role(role: str, roles: Collection[str]) -> str | None:
    """The role in `roles` that `role` misspells or abbreviates; None if there is none.

    >>> [_nearest_role(role, ROLES) for role in ("leaner", "lraener", "Actors", "env", "dreamer", "rewarder")]
    ['learner', 'learner', 'actor', 'environment', None, None]
    """
    word = role.lower().strip("_ ")

    def likeness(candidate: str) -> float:
        ratio = difflib.SequenceMatcher(None, word, candidate).ratio()
        is_variant = sorted(word) == sorted(candidate) or (len(word) > 2 and candidate.startswith(word))
        return 1.0 if is_variant else ratio

    best = max(sorted(roles), key=likeness)
    return best if likeness(best) > _MIN_LIKENESS else None


def assign(graph: FDG, placement: Mapping[str, Group]) -> dict[str, Group]:
    """The group of each fragment: the group of its role, if `placement` has the role.

    Otherwise the group of its parent, else of the producer of its largest input, else the first group.
    """
    default = next(iter(placement.values()))
    assigned: dict[str, Group] = {f.name: placement[f.role] for f in graph.fragments if f.role in placement}
    pending = [f for f in graph.fragments if f.name not in assigned]
    while pending:
        unassigned = []
        for fragment in pending:
            edges = [e for e in graph.edges if e.target == fragment.name and e.source != fragment.name]
            largest = max(edges, key=lambda edge: edge.bytes_per_crossing, default=None)
            # the fragment whose group this fragment joins
            guide = fragment.parent or (None if largest is None else largest.source)
            if guide is None or guide == fragment.name:
                assigned[fragment.name] = default
            elif guide in assigned:
                assigned[fragment.name] = assigned[guide]
            else:
                unassigned.append(fragment)
        if len(unassigned) == len(pending):  # the fragments depend only on each other
            assigned[unassigned.pop(0).name] = default
        pending = unassigned
    return {f.name: assigned[f.name] for f in graph.fragments}


def merge_same_devices(assignment: Mapping[str, Group], policy: Policy) -> dict[str, Group]:
    """Merges groups that have the same devices; the merged group shards parameters if one of them does.

    Groups that overlap only partly, and groups with `apart`, stay as they are.
    """
    by_devices: dict[tuple[int, ...], dict[str, Group]] = {}
    for group in assignment.values():
        if not group.apart:
            by_devices.setdefault(group.devices, {})[group.name] = group
    merged: dict[tuple[int, ...], Group] = {}
    for devices, groups in by_devices.items():
        members = groups.values()
        sharding = {(g.model, g.parameters, g.whole_along_batch): g for g in members if g.parameters}
        if len(sharding) > 1:
            names = listed([repr(group.name) for group in sharding.values()], "and")
            raise PlanError(
                f"{policy}: groups {names} are on the same devices but shard parameters differently: give"
                " them the same rules"
            )
        rules = next(iter(sharding.values()), Group("", devices))
        merged[devices] = Group(
            "+".join(groups),
            devices,
            exact=any(group.exact for group in members),
            model=max(group.model for group in members),
            parameters=rules.parameters,
            whole_along_batch=rules.whole_along_batch,
        )
    return {
        fragment: group if group.apart else merged[group.devices] for fragment, group in assignment.items()
    }


def fit_to_batches(group: Group, fragments: Sequence[Fragment], policy: Policy) -> Group:
    """Drops devices from a group until its `num_batch_parts` divides the batch of every fragment.

    Raises `PlanError` if the user set the number of devices (`exact`) and devices would be dropped.
    """
    if len(group) % group.model and (group.exact or len(group) < group.model):
        raise PlanError(
            f"{policy}: group '{group.name}' has {len(group)} devices, but its model is split over"
            f" {group.model}: use a multiple of {group.model}"
        )
    sizes = [f.batch_size for f in fragments if f.batch_size]
    rows = group.num_batch_parts
    num_rows = largest_divisor(math.gcd(*sizes), rows) if sizes else rows
    if group.exact and num_rows < rows:
        misfit = next(f for f in fragments if f.batch_size and f.batch_size % rows)
        size = misfit.batch_size or 0
        raise PlanError(
            f"{policy}: fragment '{misfit.name}' ({misfit.role}) has a batch of {size}, which is not"
            f" divisible by the {rows} {'devices' if group.model == 1 else 'rows'} of its {group.name}: use"
            f" {num_rows}, or a batch of"
            f" {' or '.join(str(n) for n in (size // rows * rows, -(-size // rows) * rows) if n)}"
        )
    return dataclasses.replace(group, devices=group.devices[: num_rows * group.model])
