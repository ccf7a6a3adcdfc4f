"""Plans an algorithm: from a graph and a distribution policy to programs and transfers.

A policy is a small value with one method, `place(devices)`, which returns the group of devices of each role.
Everything else is derived from the graph, so planning needs no devices:

    policy.place(4 devices)      environment, actor -> actors (0, 1, 2); learner -> learners (3,)
    assign, fit_to_batches       act, step -> actors; learn -> learners; device 2 idle: 3 does not divide 64
    delay                        the graph, rewritten for the policy's staleness
    open_iteration, partition    a schedule: actors run act+step, a transfer, learners run learn, a transfer
    predict_exchanges            the collectives of each program
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from fdg import jaxprs
from fdg.agents import of_seeds
from fdg.arguments import checked_names
from fdg.batch.collective import Collective
from fdg.batch.exchanges import predict_exchanges
from fdg.batch.lengths import lengths_of, smallest_equivalent
from fdg.cores import min_cores_per_process
from fdg.errors import PlanError
from fdg.identity_cache import IdentityCache
from fdg.jax_internals import ClosedJaxpr
from fdg.kinds import as_python
from fdg.placing.agents_per_device import (
    agents_per_vmap,
    population_collectives,
    sharded_agents_notes,
    vmap_notes,
)
from fdg.placing.assignment import (
    assign,
    check_placement,
    fit_to_batches,
    merge_same_devices,
    warn_of_near_roles,
)
from fdg.placing.plans import Plan, PlannedProgram, SteppedPlan
from fdg.placing.policy import Group, Policy, check_policy, checked_devices, with_host
from fdg.placing.regions.effects import check_one_agent, check_one_device, check_one_process
from fdg.placing.regions.opening import open_iteration
from fdg.placing.regions.region import Opened
from fdg.placing.scheduling.partition import partition
from fdg.placing.scheduling.schedule import Schedule
from fdg.placing.scheduling.unsharding import reshard, resharding_notes
from fdg.placing.sharded import lay_out, sharded_leaves, unused_rules, with_rules
from fdg.placing.staleness import Ages, Delay, DelayedState, algorithm_state, delay, with_lag
from fdg.settings.fields import largest_divisor
from fdg.tracing.graph import FDG
from fdg.tracing.trace import side_by_side, trace, vmapped_agents, with_declarations

MAX_DEVICES = 2**20  # the largest number that `place` accepts as `devices`
MAX_STALENESS = 200  # in iterations; each stores one more copy of the parameters
# Caches for plans of the same graph, whose policies differ.
_OPENED_CACHE: IdentityCache[Opened] = IdentityCache(max_entries=16)
_DELAYED_CACHE: IdentityCache[tuple[FDG, Delay]] = IdentityCache(max_entries=16)
_predict_exchanges = functools.lru_cache(maxsize=256)(predict_exchanges)


@checked_names
def place(
    algorithm: Any, policy: Policy, devices: int | Sequence[Any] | None = None, num_seeds: int | None = None
) -> Plan:
    """Plans an algorithm (or its graph) under a policy. Runs and compiles nothing.

    Args:
      algorithm: an algorithm, or its `FDG` from `trace`. If it has no fragments, the plan is one program on
        the policy's first group.
      policy: a distribution policy (`policies`).
      devices: the devices, or their number, which may exceed the number of devices here; None for all devices
        of JAX (see `with_host`).
      num_seeds: the number of agents (`fdg.agents`); None for the algorithm without a batch of agents.

    Raises:
      PlanError: the policy does not fit the graph or the devices; the message has the fix.
      GraphError: `trace` cannot trace the algorithm.
    """
    check_policy(policy)
    devices, num_seeds = as_python(devices), as_python(num_seeds)
    if devices is None:
        devices = with_host(policy, jax.devices())
    if isinstance(devices, bool) or (isinstance(devices, int) and devices > MAX_DEVICES):
        raise PlanError(f"devices={devices}: give an integer, at most {MAX_DEVICES:,}")
    platforms = (
        ["cpu"] * devices if isinstance(devices, int) else [d.platform for d in checked_devices(devices)]
    )
    count = len(platforms)
    if count < 1:
        raise PlanError(
            f"{policy}: {devices if isinstance(devices, int) else count} devices: at least one is needed"
        )
    algorithm_of_seeds = of_seeds(algorithm, num_seeds)
    graph = side_by_side(algorithm, num_seeds) if isinstance(algorithm, FDG) else trace(algorithm_of_seeds)
    if isinstance(graph.state, DelayedState):
        raise PlanError(
            f"this graph of {graph.name} comes from a plan and already has its staleness: give the"
            " algorithm, or the graph that fdg.trace returns"
        )
    placement = policy.place(platforms)
    check_placement(graph, policy, placement, count)
    warn_of_near_roles(graph, placement)
    graph, ages = _checked_ages(graph, policy)
    policy_assignment, undelayed = assign(graph, placement), graph
    graph, delayed = _with_delay(graph, ages, policy, policy_assignment)
    if graph.agents is not None:
        check_one_agent(jaxprs.open_jaxpr(graph.jaxpr).eqns, graph.agents)
        if not any(group.shards or group.model > 1 for group in placement.values()):
            return _plan_agents(graph, graph.agents, platforms, policy, delayed)
        graph = vmapped_agents(graph, algorithm_state(graph.state))
    assignment = merge_same_devices(policy_assignment, policy)
    requested = tuple(dict.fromkeys(assignment.values())) or (next(iter(placement.values())),)
    groups = tuple(
        fit_to_batches(
            with_rules(group, graph, policy),
            [f for f in graph.fragments if assignment[f.name] == group],
            policy,
        )
        for group in requested
    )
    used = {device for group in groups for device in group.devices}
    plan = Plan(
        graph,
        policy,
        count,
        groups,
        idle=tuple(device for device in range(count) if device not in used),
        assignment=tuple((fragment, group.name) for fragment, group in assignment.items()),
        delayed=delayed,
        unfit=tuple((old.name, old.devices[len(new) :]) for old, new in zip(requested, groups, strict=True)),
        notes=sharded_agents_notes(undelayed),
    )
    plan = _with_sharded_leaves(plan, undelayed)
    if len(groups) == 1:
        return _plan_one_program(plan)
    opened = _OPENED_CACHE(
        graph.jaxpr, plan.assignment, lambda: open_iteration(graph.jaxpr, dict(plan.assignment), policy)
    )
    sizes = {group.name: group.num_batch_parts for group in groups}
    platform_of = {group.name: platforms[group.devices[0]] for group in groups}
    newer = frozenset() if ages is None else ages.newer
    schedule = lay_out(partition(opened, graph.state_axes, sizes, platform_of, newer), groups, plan.sharded)
    schedule = reshard(schedule, groups, unshards=delayed is None)
    _check_effects(schedule, plan, [] if isinstance(devices, int) else devices)
    return _plan_many_programs(SteppedPlan(**vars(plan), schedule=schedule, constants=opened.constants))


def _checked_ages(graph: FDG, policy: Policy) -> tuple[FDG, Ages | None]:
    """Checks the policy's staleness and lag; returns the graph and the age of each fragment's parameters.

    A lag cuts the graph's scan over micro-batches in two. The ages are None without staleness and lag.
    """
    staleness, lag = (as_python(getattr(policy, name, 0)) for name in ("staleness", "lag"))
    for name, value, unit in (("staleness", staleness, "iterations"), ("lag", lag, "micro-batches")):
        if not isinstance(value, int) or value < 0:
            raise PlanError(f"{policy}: {name}={value!r}: give a whole number of {unit}, 0 or more")
    if staleness and lag:
        raise PlanError(
            f"{policy}: staleness={staleness} counts iterations and lag={lag} counts micro-batches: give"
            " only one of them"
        )
    if not (staleness or lag):
        return graph, None
    ages = Ages({fragment.name: staleness for fragment in graph.fragments})
    if lag:
        graph, ages = with_lag(graph, lag, str(policy))
    if ages.oldest > MAX_STALENESS:
        limit = MAX_STALENESS * max(ages.micro_batches, 1)
        unit_note = f", which are {MAX_STALENESS} iterations" if lag else ""
        raise PlanError(f"{policy}: {ages}: give at most {limit} {ages.unit}{unit_note}")
    return graph, ages


def _with_delay(
    graph: FDG, ages: Ages | None, policy: Policy, assignment: Mapping[str, Group]
) -> tuple[FDG, Delay | None]:
    """Rewrites the graph so that fragments read parameters that are `ages` old."""
    if ages is None:
        return graph, None
    names = {name: group.name for name, group in assignment.items()}
    key = (*names.items(), ages.lag, ages.oldest)
    rewritten, delayed = _DELAYED_CACHE(graph.jaxpr, key, lambda: delay(graph, names, ages, policy))
    return with_declarations(rewritten, graph), delayed


def _with_sharded_leaves(plan: Plan, undelayed: FDG) -> Plan:
    """Adds the sharded leaves to the plan. Older versions of a leaf are sharded like the leaf.

    `undelayed` is the graph before staleness. With several agents, sharding rules see one agent's shapes.
    """
    leaves = [
        leaf.of_agents(undelayed.agents)
        for group in plan.groups
        for leaf in sharded_leaves(undelayed, group, plan.policy)
    ]
    if plan.delayed is not None:
        num_leaves = len(undelayed.state_axes)
        leaves += [
            dataclasses.replace(leaf, position=position)
            for leaf in leaves
            for position in plan.delayed.history_positions(leaf.position, num_leaves)
        ]
    rules = [(group.name, rule) for group in plan.groups for rule in unused_rules(group, leaves)]
    unpredicted = tuple(group.name for group in plan.groups if group.shards)
    return dataclasses.replace(
        plan, sharded=tuple(leaves), unused_rules=tuple(rules), unpredicted=unpredicted
    )


def _check_effects(schedule: Schedule, plan: Plan, devices: Sequence[Any]) -> None:
    """Raises `PlanError` if a schedule cannot run its effects.

    A host call needs one device, all side effects need one process, and a mutable array needs one program.
    """
    calls = [call for call, _ in schedule.calls()]
    if any(jaxprs.is_mutable(v.variable) for call in calls for v in (*call.inputs, *call.outputs)):
        raise PlanError(
            f"{plan.policy} passes a mutable array (jax.new_ref) between programs: create and use it inside"
            " one fragment, and return its value"
        )
    groups = {group.name: group for group in plan.groups}
    processes = [getattr(device, "process_index", 0) for device in devices] or [0] * plan.num_devices
    programs = [(groups[call.group], call.equations) for call in calls]
    for group, equations in programs:
        check_one_device(equations, group, plan.policy, plan.num_devices)
    check_one_process(programs, processes.__getitem__, plan.policy)


def _plan_agents(
    graph: FDG, agents: int, platforms: Sequence[str], policy: Policy, delayed: Delay | None
) -> Plan:
    """A plan that distributes whole agents over the devices."""
    count = len(platforms)
    num_used = largest_divisor(agents, count)
    group = Group("agents", tuple(range(num_used)))
    collectives, notes = population_collectives(graph, num_used, algorithm_state(graph.state))
    per_device = agents // num_used
    per_vmap = agents_per_vmap(
        graph, per_device, "cpu" in platforms, max(1.0, min_cores_per_process() / num_used)
    )
    names = tuple(f.name for f in graph.fragments)
    program = PlannedProgram("train", group.name, names, 1, collectives, agents_per_vmap=per_vmap)
    return Plan(
        graph,
        policy,
        count,
        (group,),
        idle=tuple(range(num_used, count)),
        assignment=tuple((f.name, group.name) for f in graph.fragments),
        programs=(program,),
        delayed=delayed,
        notes=notes if graph.between_agents is not None else vmap_notes(per_device, per_vmap),
    )


def _plan_one_program(plan: Plan) -> Plan:
    """Completes a plan with one group, whose iteration is one program."""
    (group,), graph = plan.groups, plan.graph
    check_one_device(jaxprs.open_jaxpr(graph.jaxpr).eqns, group, plan.policy, plan.num_devices)
    collectives, notes = _collectives(graph.jaxpr, graph.state_axes, graph.output_axes, group)
    program = PlannedProgram("train", group.name, tuple(f.name for f in graph.fragments), 1, collectives)
    return dataclasses.replace(plan, programs=(program,), notes=(*plan.notes, *notes))


def _plan_many_programs(plan: SteppedPlan) -> Plan:
    """Completes a plan with several programs and transfers."""
    groups = {group.name: group for group in plan.groups}
    programs: list[PlannedProgram] = []
    notes = [*plan.notes, *resharding_notes(plan.schedule)]
    for call, times in plan.calls():
        collectives: tuple[Collective, ...] = ()
        if _is_predicted(groups[call.group]):
            axes = [v.axis for v in call.inputs], [v.axis for v in call.outputs]
            collectives, new_notes = _collectives(call.jaxpr, *axes, groups[call.group])
            notes += new_notes
        programs.append(PlannedProgram(call.name, call.group, call.fragments, times, collectives))
    return dataclasses.replace(plan, programs=tuple(programs), notes=tuple(dict.fromkeys(notes)))


def _collectives(
    jaxpr: ClosedJaxpr, inputs: Sequence[int | None], outputs: Sequence[int | None], group: Group
) -> tuple[tuple[Collective, ...], tuple[str, ...]]:
    """The collectives in one run of a group's program, and notes on operations without a rule."""
    if not _is_predicted(group):
        return (), ()
    num_devices = smallest_equivalent(group.num_batch_parts, lengths_of(jaxprs.open_jaxpr(jaxpr)))
    collectives, without_rule = _predict_exchanges(jaxpr, tuple(inputs), num_devices, tuple(outputs))
    return collectives, tuple(map(str, without_rule))


def _is_predicted(group: Group) -> bool:
    """Whether a group's collectives can be predicted; with sharded parameters, XLA chooses them."""
    return group.num_batch_parts > 1 and not group.shards
