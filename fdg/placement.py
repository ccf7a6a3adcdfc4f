"""From a graph and a distribution policy to a plan: which device runs what, and what moves between them.

A policy is a small value. It is asked one thing, `place(devices)`: which group of devices each role
lives on. All that follows (who goes along with whom, how far a batch divides, which devices stay idle,
which collectives that costs) is worked out here, from the graph alone: no device is needed to plan.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from fdg.errors import PlanError
from fdg.graph import FDG, Fragment
from fdg.tracing import trace


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices that hold the same fragments, the batch split over them.

    Attributes:
      name: what the policy calls it ("workers", "learners").
      devices: positions in the list of devices given to the engine.
    """

    name: str
    devices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.devices)


class Policy(Protocol):
    """A distribution policy: a frozen, hashable dataclass."""

    def place(self, devices: int) -> Mapping[str, Group]:
        """The group of each role that the policy names, on that many devices; others follow their data.

        Raises:
          PlanError: what the policy asks for cannot be had on that many devices.
        """


BETWEEN = "(between fragments)"


@dataclasses.dataclass(frozen=True)
class Movement:
    """Bytes that move between devices, and how.

    Attributes:
      source: fragment that the data comes from.
      target: fragment that needs it; the same as `source` for a reduction over its batch.
      how: "all-reduce", or "" where the data stays on its device.
    """

    source: str
    target: str
    how: str
    bytes_per_crossing: int
    crossings_per_iteration: int
    delay: str = ""

    @property
    def bytes_per_iteration(self) -> int:
        """All crossings of an iteration together."""
        return self.bytes_per_crossing * self.crossings_per_iteration


@dataclasses.dataclass(frozen=True)
class Plan:
    """What runs where.

    Attributes:
      graph: the graph that was placed.
      policy: the policy that placed it.
      num_devices: how many devices there were to use.
      num_seeds: independent agents, None for one without a seed axis.
      groups: the groups in use, idle devices left out.
      idle: devices that nothing runs on, because the batch (or the seeds) does not divide by more.
      assignment: the group of each fragment, by names, in the graph's order.
      movements: every edge, then every reduction.
    """

    graph: FDG
    policy: Any
    num_devices: int
    num_seeds: int | None
    groups: tuple[Group, ...]
    idle: tuple[int, ...]
    assignment: tuple[tuple[str, str], ...]
    movements: tuple[Movement, ...]

    def group_of(self, fragment: str) -> Group:
        """The group that a fragment lives on."""
        name = dict(self.assignment)[fragment]
        return next(group for group in self.groups if group.name == name)

    def __str__(self) -> str:
        from fdg import drawing

        return drawing.plan_text(self)


def place(
    algorithm: Any, policy: Policy, devices: int | Sequence[Any] | None = None, num_seeds: int | None = None
) -> Plan:
    """Plans an algorithm (or its graph) under a policy, without running or compiling anything.

    Args:
      algorithm: an algorithm, or the `FDG` that `trace` made of it.
      policy: see `policies`.
      devices: how many, or which; all of JAX's if None. They need not exist.
      num_seeds: independent agents in one program, spread over the devices.

    Raises:
      PlanError: a request that cannot be met, naming policy, fragment, numbers and fix.
      GraphError: from `trace`.
    """
    if devices is None:
        devices = jax.devices()
    count = devices if isinstance(devices, int) else len(devices)
    if count < 1:
        raise PlanError(f"{policy}: {count} devices: at least one is needed")
    if not hasattr(policy, "place"):
        raise PlanError(
            f"{policy!r} is no policy: use a value such as policies.GPUOnly(), which has place(devices)"
        )
    graph = algorithm if isinstance(algorithm, FDG) else trace(algorithm)
    if num_seeds is not None:
        return _plan_seeds(graph, policy, count, num_seeds)
    assignment = _assign(graph, policy, policy.place(count))
    groups = []
    for group in dict.fromkeys(assignment.values()):
        members = [f for f in graph.fragments if assignment[f.name] == group]
        groups.append(Group(group.name, group.devices[: _width(members, len(group))]))
    used = {device for group in groups for device in group.devices}
    sizes = {group.name: len(group) for group in groups}
    named = tuple((fragment, group.name) for fragment, group in assignment.items())
    movements = (*_edges(graph), *_reductions(graph, {f: sizes[g] for f, g in named}))
    idle = tuple(d for d in range(count) if d not in used)
    return Plan(graph, policy, count, None, tuple(groups), idle, named, movements)


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`.

    >>> largest_divisor(66, 4)
    3
    """
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def _plan_seeds(graph: FDG, policy: Policy, count: int, num_seeds: int) -> Plan:
    """Agents never talk to each other, so whole agents go to devices and no fragment is split."""
    if num_seeds < 1:
        raise PlanError(f"num_seeds={num_seeds}: at least one agent is needed")
    width = largest_divisor(num_seeds, count)
    group = Group("agents", tuple(range(width)))
    assignment = tuple((f.name, group.name) for f in graph.fragments)
    idle = tuple(range(width, count))
    return Plan(graph, policy, count, num_seeds, (group,), idle, assignment, tuple(_edges(graph)))


def _assign(graph: FDG, policy: Policy, placement: Mapping[str, Group]) -> dict[str, Group]:
    """Group of each fragment: its role's, or its parent's, or that of its largest input's producer."""
    if not placement:
        raise PlanError(f"{policy} places no role: name at least one")
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


def _width(fragments: Sequence[Fragment], available: int) -> int:
    """Over how many devices every batch of the fragments divides; without any, all hold copies."""
    sizes = [f.batch_size for f in fragments if f.batch_size]
    return largest_divisor(math.gcd(*sizes), available) if sizes else available


def _edges(graph: FDG) -> list[Movement]:
    return [
        Movement(e.source, e.target, "", e.bytes_per_crossing, e.crossings_per_iteration, e.delay)
        for e in graph.edges
    ]


def _reductions(graph: FDG, width: Mapping[str, int]) -> list[Movement]:
    """Where a split batch has a result that all of it shares, the devices all-reduce that result."""
    found = [
        Movement(f.name, f.name, "all-reduce", f.reduced_bytes_per_call, f.calls_per_iteration)
        for f in graph.fragments
        if f.reduced_bytes_per_call and width[f.name] > 1
    ]
    if graph.reduced_bytes_between and max(width.values(), default=1) > 1:
        found.append(Movement(BETWEEN, BETWEEN, "all-reduce", graph.reduced_bytes_between, 1))
    return found
