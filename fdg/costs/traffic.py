"""Seconds of communication: collectives within a group, and transfers between groups.

The model of a collective is a ring, first among the devices of each host, then among the hosts, each with one
network card. Small messages use a tree, so latency grows with the logarithm of the number of devices (Thakur,
Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH"). A transfer is
limited by the side with fewer devices (within a host), or by the hosts with the slower links. Between hosts,
what several devices need is sent along a tree, in rounds (`running.exchange`).
"""

import collections
import dataclasses
import math
from collections.abc import Sequence

from fdg.batch.collective import Collective
from fdg.costs.hardware import Cluster, Link
from fdg.placing.layout import Layout, moved_bytes
from fdg.placing.scheduling.schedule import Move

# The bytes that each device of a long ring sends, relative to the bytes of the whole array. An all-reduce is
# a reduce-scatter followed by an all-gather.
_PASSES = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}


@dataclasses.dataclass(frozen=True)
class CommunicationCost:
    """The cost of a collective or a transfer."""

    seconds: float
    inside: float  # bytes on links within hosts, in total
    between: float  # bytes on links between hosts, in total
    largest_part: str = ""  # of a collective's seconds: the link's name, and "latency" or "bandwidth"


def count_hosts(devices: Sequence[int], cluster: Cluster) -> int:
    """The number of hosts that these devices belong to."""
    return len({cluster.host_of(device) for device in devices})


def collective(operation: Collective, devices: Sequence[int], cluster: Cluster) -> CommunicationCost:
    """The cost of one collective of a group."""
    count, hosts = len(devices), count_hosts(devices, cluster)
    cluster = cluster.part_of(devices)
    if count < 2:
        return CommunicationCost(0.0, 0.0, 0.0, "nothing")
    per_host = math.ceil(count / hosts)
    passes = _PASSES.get(operation.kind, 1.0)
    num_phases = 2 if operation.kind == "all-reduce" else 1
    link = cluster.inside if per_host > 1 else cluster.between
    parts = {f"{link.name} latency": link.call.value}
    inside = between = 0.0
    if per_host > 1:
        inside = passes * operation.bytes * (per_host - 1) / per_host
        _add_link_seconds(parts, cluster.inside, num_phases * math.ceil(math.log2(per_host)), inside)
    if hosts > 1:
        # After the exchange within hosts, each device has a part of the array; the devices of a host send
        # their parts over the host's network card.
        between = passes * operation.bytes * (hosts - 1) / hosts
        _add_link_seconds(parts, cluster.between, num_phases * math.ceil(math.log2(hosts)), between)
    if cluster.cores is not None:  # all devices of a machine take turns on its cores
        devices_per_machine = per_host * min(hosts, cluster.hosts_per_machine)
        parts[f"{link.name} latency"] *= max(1.0, devices_per_machine / cluster.cores)
    largest_part = max(parts, key=lambda name: parts[name])
    return CommunicationCost(sum(parts.values()), inside * count, between * hosts, largest_part)


def _add_link_seconds(parts: dict[str, float], link: Link, messages: int, size: float) -> None:
    """Adds to `parts` the seconds for `messages` messages, one after the other, and for `size` bytes."""
    latency, bandwidth = f"{link.name} latency", f"{link.name} bandwidth"
    parts[latency] = parts.get(latency, 0.0) + messages * link.latency.value
    parts[bandwidth] = parts.get(bandwidth, 0.0) + size / link.bandwidth.value


def transfer_cost(
    move: Move, source: Sequence[int], target: Sequence[int], cluster: Cluster
) -> CommunicationCost:
    """The cost of one transfer between groups."""
    total = sum(moved_bytes(target_value.bytes, target_value.laid_out) for _, target_value in move.pairs)
    if count_hosts((*source, *target), cluster) == 1:
        link, num_links = cluster.part_of(source).inside, min(len(source), len(target))
        seconds = link.latency.value + total / num_links / link.bandwidth.value
        return CommunicationCost(seconds, float(total), 0.0)
    sent = received = 0.0  # the bytes of each side's hosts, if all are as busy as the busiest one
    max_rounds, target_hosts = 1, count_hosts(target, cluster)
    for source_value, target_value in move.pairs:
        size = moved_bytes(target_value.bytes, target_value.laid_out)
        readers = math.ceil(_copies(target_value.laid_out) / _copies(source_value.laid_out))
        rounds = math.ceil(math.log2(readers + 1))
        sent += size * rounds / readers
        for i in range(rounds):
            copies = min(2**i, readers + 1 - 2**i)  # of each part, which may all arrive at one host
            received += size * min(1.0, copies * target_hosts / readers)
        max_rounds = max(max_rounds, rounds)
    sides = [
        (cluster.part_of(source).between, sent / count_hosts(source, cluster)),
        (cluster.part_of(target).between, received / target_hosts),
    ]
    latency = max(link.latency.value + link.call.value for link, _ in sides)  # a round is a collective
    bandwidth = max(size / link.bandwidth.value for link, size in sides)
    return CommunicationCost(max_rounds * latency + bandwidth, 0.0, float(total))


def _copies(layout: Layout) -> float:
    """The number of devices that hold the same part of an array."""
    return layout.num_devices / layout.num_parts


def host_work(move: Move, source: Sequence[int], target: Sequence[int], cluster: Cluster) -> tuple[int, int]:
    """The numbers of programs that the host starts, and of arrays that it handles, for a transfer.

    A transfer between two single devices is one program. Otherwise, a program cuts arrays into chunks, the
    chunks are copied, and a program joins the chunks. Between hosts, the copy is a program too, and each host
    handles the arrays of its devices.
    """
    if len(source) == len(target) == 1 and source != target:
        return 1, len(move.pairs)
    devices_by_host = collections.Counter(cluster.host_of(device) for device in {*source, *target})
    if len(devices_by_host) > 1:
        return 3, len(move.pairs) * max(devices_by_host.values())
    has_cuts = has_joins = False
    arrays = 0
    for source_value, target_value in move.pairs:
        before, after = source_value.laid_out, target_value.laid_out
        num_chunks = math.prod(map(math.lcm, before.parts, after.parts))  # as `layout.find_route` cuts
        has_cuts = has_cuts or num_chunks > before.num_parts
        has_joins = has_joins or num_chunks > after.num_parts
        arrays += num_chunks // after.num_parts * len(target)
    return has_cuts + has_joins, arrays
