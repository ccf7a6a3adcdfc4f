"""Seconds of communication: collectives within a group, and transfers between groups.

A collective is a ring: first among the devices of each host, then among the hosts, each with its own network
card; small messages use a tree, so latency counts with the logarithm (Thakur, Rabenseifner and Gropp 2005,
"Optimization of Collective Communication Operations in MPICH"). A transfer takes as long as the device that
sends or receives most.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence

from fdg.batch.collective import Collective
from fdg.costs.hardware import Cluster, Link
from fdg.placing.layout import moved_bytes
from fdg.placing.scheduling.schedule import Move

# How often the result's bytes pass each device of a long ring: an all-reduce is a reduce-scatter and an
# all-gather. (A reduce-scatter's result is a device's part; its bytes here are the whole, as predicted.)
_PASSES = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}


@dataclasses.dataclass(frozen=True)
class Sent:
    """The cost of a communication."""

    seconds: float
    inside: float  # bytes on links within all hosts, and between hosts
    between: float
    bound: str  # the largest part: "latency" or "bandwidth", and the link


def hosts_of(devices: Sequence[int], cluster: Cluster) -> int:
    """The number of hosts of some devices."""
    return len({device // cluster.devices_per_host for device in devices})


def collective(one: Collective, devices: Sequence[int], cluster: Cluster) -> Sent:
    """The cost of one collective of a group."""
    count, hosts = len(devices), hosts_of(devices, cluster)
    if count < 2:
        return Sent(0.0, 0.0, 0.0, "nothing")
    each = math.ceil(count / hosts)
    passes = _PASSES.get(one.kind, 1.0)
    rounds = 2 if one.kind == "all-reduce" else 1
    link = cluster.inside if each > 1 else cluster.between
    parts = {f"{link.name} latency": link.call.value}
    inside = between = 0.0
    if each > 1:
        inside = passes * one.bytes * (each - 1) / each
        _add(parts, cluster.inside, rounds * math.ceil(math.log2(each)), inside)
    if hosts > 1:
        # After the first step, each device of a host has a part, and they share the host's card.
        between = passes * one.bytes * (hosts - 1) / hosts
        _add(parts, cluster.between, rounds * math.ceil(math.log2(hosts)), between)
    if cluster.cores is not None:  # all of them need a turn on their machine's cores
        there = each * min(hosts, cluster.hosts_per_machine)
        parts[f"{link.name} latency"] *= max(1.0, there / cluster.cores)
    bound = max(parts, key=lambda name: parts[name])
    return Sent(sum(parts.values()), inside * count, between * hosts, bound)


def _add(parts: dict[str, float], link: Link, messages: int, size: float) -> None:
    latency, bandwidth = f"{link.name} latency", f"{link.name} bandwidth"
    parts[latency] = parts.get(latency, 0.0) + messages * link.latency.value
    parts[bandwidth] = parts.get(bandwidth, 0.0) + size / link.bandwidth.value


def transfer_cost(move: Move, source: Sequence[int], target: Sequence[int], cluster: Cluster) -> Sent:
    """The cost of one transfer between groups."""
    total = sum(moved_bytes(b.bytes, b.laid_out) for _, b in move.pairs)
    homes = [device // cluster.devices_per_host for device in (*source, *target)]
    if len(set(homes)) == 1:
        link, ends = cluster.inside, min(len(source), len(target))
        inside, between = float(total), 0.0
    else:
        link, ends = cluster.between, min(hosts_of(source, cluster), hosts_of(target, cluster))
        inside, between = 0.0, float(total)
    latency, bandwidth = link.latency.value, total / ends / link.bandwidth.value
    if between:  # between processes, a transfer is a collective
        latency += link.call.value
    bound = f"{link.name} {'latency' if latency > bandwidth else 'bandwidth'}"
    return Sent(latency + bandwidth, inside, between, bound)


@dataclasses.dataclass(frozen=True)
class Handling:
    """Additional costs of a transfer: programs before and after it, and arrays that the host handles."""

    programs: int
    arrays: int


def handling(move: Move, source: Sequence[int], target: Sequence[int], cluster: Cluster) -> Handling:
    """The host's work for a transfer: one program between single devices, else cut, copy and join.

    Between hosts all of it is programs, and each host handles the arrays of its own devices.
    """
    if len(source) == len(target) == 1 and source != target:
        return Handling(1, len(move.pairs))
    here = collections.Counter(device // cluster.devices_per_host for device in {*source, *target})
    if len(here) > 1:
        return Handling(3, len(move.pairs) * max(here.values()))
    cuts = joins = False
    arrays = 0
    for a, b in move.pairs:
        grid = [math.lcm(x, y) for x, y in zip(a.laid_out.parts, b.laid_out.parts, strict=True)]
        cut = math.prod(g // n for g, n in zip(grid, a.laid_out.parts, strict=True))
        join = math.prod(g // n for g, n in zip(grid, b.laid_out.parts, strict=True))
        cuts, joins = cuts or cut > 1, joins or join > 1
        arrays += join * len(target)
    return Handling(cuts + joins, arrays)
