"""From a graph and a distribution policy to a plan: which device runs what, and what moves between them.

A policy is a small value. It is asked one thing, `place(devices)`: which group of devices each role
lives on. All that follows (who goes along with whom, how far a batch divides, which devices stay idle,
which programs, transfers and collectives that makes) is worked out here, from the graph alone: no device is
needed to plan.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from fdg import jaxprs
from fdg.batch import follow as batch_flow
from fdg.errors import PlanError
from fdg.fragment import FragmentMark
from fdg.placing.layout import moved_bytes
from fdg.placing.memory import peak_by_group, peak_bytes
from fdg.placing.partition import partition
from fdg.placing.plan import BETWEEN, Movement, Plan, PlannedProgram
from fdg.placing.policy import Group, Policy, with_host
from fdg.placing.regions import open_iteration
from fdg.placing.schedule import Call
from fdg.placing.sharded import by_position, lay_out, sharded_leaves, unused_rules, with_rules
from fdg.placing.staleness import Delay, delay
from fdg.tracing.graph import FDG, Fragment
from fdg.tracing.trace import trace


def place(
    algorithm: Any, policy: Policy, devices: int | Sequence[Any] | None = None, num_seeds: int | None = None
) -> Plan:
    """Plans an algorithm (or its graph) under a policy, without running or compiling anything.

    Args:
      algorithm: an algorithm, or the `FDG` that `trace` made of it.
      policy: see `policies`.
      devices: how many, or which; None for all of JAX's (`with_host`). They need not exist.
      num_seeds: independent agents in one program, spread over the devices.

    Raises:
      PlanError: a request that cannot be met, naming policy, fragment, numbers and fix.
      GraphError: from `trace`.
    """
    if devices is None:
        devices = with_host(policy, jax.devices())
    platforms = ["cpu"] * devices if isinstance(devices, int) else [d.platform for d in devices]
    count = devices if isinstance(devices, int) else len(devices)
    if count < 1:
        raise PlanError(f"{policy}: {count} devices: at least one is needed")
    if not hasattr(policy, "place"):
        raise PlanError(
            f"{policy!r} is no policy: use a value such as policies.GPUOnly(), which has place(devices)"
        )
    graph = algorithm if isinstance(algorithm, FDG) else trace(algorithm)
    placement = policy.place(platforms)
    _check_placement(graph, policy, placement, count)
    by_policy = _assign(graph, policy, placement)
    graph, delayed = _with_staleness(graph, policy, by_policy)
    if num_seeds is not None:
        return dataclasses.replace(_plan_seeds(graph, policy, count, num_seeds), delayed=delayed)
    assignment = _merge_shared(by_policy, policy)
    asked = tuple(dict.fromkeys(assignment.values()))
    groups = tuple(
        _fitted(
            with_rules(group, graph, policy),
            [f for f in graph.fragments if assignment[f.name] == group],
            policy,
        )
        for group in asked
    )
    unfit = tuple((group.name, group.devices[len(fit) :]) for group, fit in zip(asked, groups, strict=True))
    used = {device for group in groups for device in group.devices}
    idle = tuple(d for d in range(count) if d not in used)
    named = {fragment: group.name for fragment, group in assignment.items()}
    sizes = {group.name: group.rows for group in groups}
    plan = Plan(graph, policy, count, None, groups, idle, tuple(named.items()), (), (), (), delayed, unfit)
    plan = _with_sharded(plan)
    if len(groups) == 1:
        return _plan_whole(plan)
    opened = open_iteration(graph.jaxpr, named, policy)
    schedule = lay_out(partition(opened, graph.state_axes, sizes), groups, plan.sharded)
    return _plan_steps(dataclasses.replace(plan, schedule=schedule, constants=opened.constants), sizes)


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`.

    >>> largest_divisor(66, 4)
    3
    """
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def _with_sharded(plan: Plan) -> Plan:
    """The plan with the leaves that rules take, under staleness those of the algorithm's own state."""
    state = plan.graph.state if plan.delayed is None else plan.graph.state.state
    leaves = [leaf for group in plan.groups for leaf in sharded_leaves(plan.graph, group, plan.policy, state)]
    unused = [(group.name, rule) for group in plan.groups for rule in unused_rules(group, leaves)]
    unpredicted = tuple(group.name for group in plan.groups if group.shards)
    return dataclasses.replace(
        plan, sharded=tuple(leaves), unused_rules=tuple(unused), unpredicted=unpredicted
    )


def _plan_seeds(graph: FDG, policy: Policy, count: int, num_seeds: int) -> Plan:
    """Agents never talk to each other, so whole agents go to devices and no fragment is split."""
    if num_seeds < 1:
        raise PlanError(f"num_seeds={num_seeds}: at least one agent is needed")
    if any(group.parameters or group.model > 1 for group in policy.place(["cpu"] * count).values()):
        raise PlanError(
            f"num_seeds={num_seeds}: {policy} splits parameters, and agents are whole: leave one out"
        )
    for call in _host_calls(jaxprs.open_jaxpr(graph.jaxpr)):
        raise PlanError(
            f"num_seeds={num_seeds}: {call} runs on the host, and for one agent: start a run for each seed"
        )
    width = largest_divisor(num_seeds, count)
    group = Group("agents", tuple(range(width)))
    assignment = tuple((f.name, group.name) for f in graph.fragments)
    idle = tuple(range(width, count))
    program = PlannedProgram("train", group.name, tuple(f.name for f in graph.fragments), 1)
    memory = (group.name, peak_bytes(graph.jaxpr, (), 1) * (num_seeds // width))
    return Plan(
        graph,
        policy,
        count,
        num_seeds,
        (group,),
        idle,
        assignment,
        (program,),
        tuple(_edges(graph)),
        (memory,),
    )


def _check_placement(graph: FDG, policy: Policy, placement: Mapping[str, Group], count: int) -> None:
    if not placement:
        raise PlanError(f"{policy} places no role: name at least one")
    roles = {f.role for f in graph.fragments}
    groups: dict[Group, list[str]] = {}
    for role, group in placement.items():
        groups.setdefault(group, []).append(role)
        wrong = [d for d in group.devices if not 0 <= d < count]
        if wrong or not group.devices:
            what = f"device {wrong[0]}" if wrong else "no device"
            raise PlanError(
                f"{policy} places '{role}' on {what} (group {group.name}), of {count} devices,"
                f" 0 to {count - 1}: let place() name positions in the list of devices"
            )
        twice = [d for d in group.devices if group.devices.count(d) > 1]
        if twice:
            raise PlanError(
                f"{policy} places '{role}' on device {twice[0]} twice (group {group.name}):"
                f" name each device once"
            )
        namesake = next((g for g in groups if g.name == group.name and g.devices != group.devices), None)
        if namesake is not None:
            raise PlanError(
                f"{policy} has two groups '{group.name}', of '{groups[namesake][0]}' on devices"
                f" {namesake.devices} and of '{role}' on {group.devices}: give each a name of its own"
            )
    for group, named in groups.items():
        if len(groups) > 1 and roles.isdisjoint(named):
            raise PlanError(
                f"{policy} has its {group.name} for {_listed(named, 'or')}, and {graph.name} has no fragment"
                f" of {'that role' if len(named) == 1 else 'those roles'} (it has"
                f" {_listed(sorted(roles), 'and')}): mark one with fdg.fragment('{named[0]}'), or use another"
                f" policy, such as policies.GPUOnly()"
            )


def _listed(words: Sequence[str], last: str) -> str:
    quoted = [f"'{word}'" for word in words] or ["none"]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} {last} {quoted[-1]}"


def _with_staleness(graph: FDG, policy: Policy, assignment: Mapping[str, Group]) -> tuple[FDG, Delay | None]:
    staleness = getattr(policy, "staleness", 0)
    if not isinstance(staleness, int) or staleness < 0:
        raise PlanError(f"{policy}: staleness={staleness!r}: give a whole number of iterations, 0 or more")
    if not staleness:
        return graph, None
    rules = graph.parameter_rules
    graph, delayed = delay(graph, {name: group.name for name, group in assignment.items()}, staleness, policy)
    return dataclasses.replace(graph, parameter_rules=rules), delayed


def _merge_shared(assignment: Mapping[str, Group], policy: Policy) -> dict[str, Group]:
    """Groups on the same devices become one, which shards parameters if one of them does.

    Raises:
      PlanError: two of them shard parameters in different ways.
    """
    by_devices: dict[tuple[int, ...], dict[str, Group]] = {}
    for group in assignment.values():
        by_devices.setdefault(group.devices, {})[group.name] = group
    for groups in by_devices.values():
        ways = {(group.model, group.parameters): group.name for group in groups.values() if group.parameters}
        if len(ways) > 1:
            raise PlanError(
                f"{policy}: groups {_listed(list(ways.values()), 'and')} are on the same devices and shard"
                f" parameters in different ways: give them the same rules"
            )
    merged = {
        devices: Group(
            "+".join(groups),
            devices,
            any(group.exact for group in groups.values()),
            max(group.model for group in groups.values()),
            next((group.parameters for group in groups.values() if group.parameters), ()),
        )
        for devices, groups in by_devices.items()
    }
    return {fragment: merged[group.devices] for fragment, group in assignment.items()}


def _assign(graph: FDG, policy: Policy, placement: Mapping[str, Group]) -> dict[str, Group]:
    """Group of each fragment: its role's, or its parent's, or that of its largest input's producer."""
    default = next(iter(placement.values()))
    assigned: dict[str, Group] = {f.name: placement[f.role] for f in graph.fragments if f.role in placement}
    pending = [f for f in graph.fragments if f.name not in assigned]
    while pending:
        waiting = []
        for fragment in pending:
            leader = fragment.parent or _largest_producer(graph, fragment)
            if leader is None or leader == fragment.name:
                assigned[fragment.name] = default
            elif leader in assigned:
                assigned[fragment.name] = assigned[leader]
            else:
                waiting.append(fragment)
        if len(waiting) == len(pending):  # they only follow each other
            assigned[waiting.pop(0).name] = default
        pending = waiting
    return {f.name: assigned[f.name] for f in graph.fragments}


def _largest_producer(graph: FDG, fragment: Fragment) -> str | None:
    edges = [e for e in graph.edges if e.target == fragment.name and e.source != fragment.name]
    return max(edges, key=lambda e: e.bytes_per_crossing).source if edges else None


def _fitted(group: Group, fragments: Sequence[Fragment], policy: Policy) -> Group:
    """The group with as many of its devices as every batch divides by; without a batch, all hold copies."""
    if len(group) % group.model and (group.exact or len(group) < group.model):
        raise PlanError(
            f"{policy}: the {len(group)} devices of its {group.name} do not divide into rows of {group.model}"
            f" that share a part of the batch: use a multiple of {group.model}"
        )
    sizes = [f.batch_size for f in fragments if f.batch_size]
    width = largest_divisor(math.gcd(*sizes), group.rows) if sizes else group.rows
    if group.exact and width < group.rows:
        worst = next(f for f in fragments if f.batch_size and f.batch_size % group.rows)
        size, number = worst.batch_size or 0, group.rows
        raise PlanError(
            f"{policy}: fragment '{worst.name}' ({worst.role}) has a batch of {size}, which does not divide"
            f" by the {number} {'devices' if group.model == 1 else 'rows'} of its {group.name}: use"
            f" {width}, or a batch of"
            f" {' or '.join(str(n) for n in (size // number * number, -(-size // number) * number) if n)}"
        )
    return dataclasses.replace(group, devices=group.devices[: width * group.model])


def _host_calls(jaxpr: Any, where: str = "code between fragments") -> Iterator[str]:
    """What a program calls on the host, such as an environment that is stepped there, and where it does."""
    for eqn in jaxpr.eqns:
        function, mark = jaxprs.host_call(eqn), FragmentMark.of(eqn)
        if function is not None:
            yield f"{function} in {where}"
        inside = where if mark is None else f"fragment '{mark.name}' ({mark.role})"
        for body in jaxprs.bodies(eqn):
            yield from _host_calls(body.jaxpr, inside)


def _check_host_calls(jaxpr: Any, group: Group, plan: Plan) -> None:
    """A call to the host is for the whole batch, and its program for one device."""
    call = next(_host_calls(jaxprs.open_jaxpr(jaxpr)), None)
    if call is None or len(group) == 1:
        return
    fix = (
        f"use {group.name}=1"
        if hasattr(plan.policy, group.name)
        else "use one device, or a policy with one for environments alone: policies.Environments(workers=1)"
    )
    raise PlanError(
        f"{plan.policy} on {plan.num_devices} devices: {call} runs on the host, and cannot be split over the"
        f" {len(group)} devices of group '{group.name}': {fix}"
    )


def _edges(graph: FDG, assignment: Mapping[str, str] | None = None) -> list[Movement]:
    """Edges that stay on their devices."""
    return [
        Movement(e.source, e.target, "", e.bytes_per_crossing, e.crossings_per_iteration, e.delay)
        for e in graph.edges
        if assignment is None or assignment[e.source] == assignment[e.target]
    ]


def _plan_whole(plan: Plan) -> Plan:
    """All fragments share their devices: one program."""
    (group,) = plan.groups
    graph = plan.graph
    _check_host_calls(graph.jaxpr, group, plan)
    program = PlannedProgram("train", group.name, tuple(f.name for f in graph.fragments), 1)
    found = []
    if group.rows > 1 and not group.shards:
        found = _collectives(graph.jaxpr, (graph.state_axes, graph.output_axes), program, group, 1)
    layouts = by_position(plan.sharded, group.name)
    memory = ((group.name, peak_bytes(graph.jaxpr, graph.state_axes, group.rows, layouts)),)
    movements = (*_edges(graph), *added_up(found))
    return dataclasses.replace(plan, programs=(program,), movements=movements, memory=memory)


def _plan_steps(plan: Plan, sizes: Mapping[str, int]) -> Plan:
    """Several programs, and transfers between them."""
    assert plan.schedule is not None
    groups = {group.name: group for group in plan.groups}
    programs, collectives = [], []
    for call, times in plan.schedule.calls():
        program = PlannedProgram(call.name, call.group, call.fragments, times)
        programs.append(program)
        if len(groups[call.group]) > 1:
            _check_host_calls(_call_jaxpr(call), groups[call.group], plan)
        if sizes[call.group] > 1 and not groups[call.group].shards:
            axes = [v.axis for v in call.inputs], [v.axis for v in call.outputs]
            collectives += _collectives(_call_jaxpr(call), axes, program, groups[call.group], times)
    transfers = []
    for move, times in plan.schedule.moves():
        size = sum(moved_bytes(b.bytes, b.laid_out) for _, b in move.pairs)
        source, target = ", ".join(move.sources) or BETWEEN, ", ".join(move.targets) or BETWEEN
        where = f"{move.source} -> {move.target}"
        transfers.append(Movement(source, target, "transfer", size, times, move.delay, where))
    movements = (*_edges(plan.graph, dict(plan.assignment)), *transfers, *added_up(collectives))
    memory = tuple(peak_by_group(plan.schedule, sizes).items())
    return dataclasses.replace(plan, programs=tuple(programs), movements=movements, memory=memory)


def _call_jaxpr(call: Call) -> Any:
    inputs, outputs = [v.variable for v in call.inputs], [v.variable for v in call.outputs]
    return jaxprs.build(inputs, outputs, call.equations)


def _collectives(
    jaxpr: Any, axes: tuple[Sequence, Sequence], program: PlannedProgram, group: Group, times: int
) -> list[Movement]:
    """What a group's devices exchange when they run a program `times` times; `axes` of its ins and outs."""
    exchanged = batch_flow.communication(jaxpr, axes[0], group.rows, axes[1])
    found = [(c, c.fragment or BETWEEN) for c in exchanged]
    return [
        Movement(where, where, c.kind, c.bytes, c.calls * times, "", group.name, program.name)
        for c, where in found
    ]


def added_up(movements: Sequence[Movement]) -> list[Movement]:
    """Movements that differ in their bytes alone, as one."""
    totals: dict[Movement, int] = {}
    for m in movements:
        key = dataclasses.replace(m, bytes_per_crossing=0)
        totals[key] = totals.get(key, 0) + m.bytes_per_crossing
    return [dataclasses.replace(key, bytes_per_crossing=size) for key, size in totals.items()]
