"""How many host devices a job is given that names no number: as many as are predicted to be fastest.

A device that shares a batch saves work, and costs exchanges with the others. Both are computed from the plan,
and with constants, not with a clock: the same job on as many cores gets the same number, and so the same
results bit for bit.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from fdg import jaxprs
from fdg.cores import usable_cores
from fdg.errors import PlanError
from fdg.fragment import FragmentMark
from fdg.lowering.host_calls import calls_host
from fdg.placing.place import place
from fdg.placing.plan import Plan
from fdg.running.host_devices import threads_for
from fdg.tracing.graph import FDG, Fragment

# Of one core and of a pair of host devices, fitted to PPO on CartPole-v1 with 4 to 1,024 environments; the
# rate of what is no product to physics of brax. Both are round, and some work takes less than they say: it is
# the choices that were looked at (`python -m bench.device_choice`), not the seconds.
FLOPS_PER_S = 100e9
ELEMENTS_PER_S = 10e9
EXCHANGE_S = 120e-6  # a collective among two devices; more of them are taken to need more rounds
STEP_S = 150e-6  # a program or a transfer that the host starts by itself
BYTES_PER_S = 2e9
MARGIN = 2.0  # beside other processes, exchanges take longer than by themselves
ONE_THREAD_FLOPS = 12_000_000  # of the largest operation: from there on a second core is worth its thread
GAIN = 1.45  # what more devices have to promise: small operations take as long with half of the rows
WIDE = 128  # a matrix from which on products are quick on all cores at once, which one device has too


@dataclasses.dataclass(frozen=True)
class Choice:
    """How many host devices a job is given.

    Attributes:
      devices: how many.
      reason: why, for one line of output.
    """

    devices: int
    reason: str


def choose(graph: FDG, policy: Any, cores: int, num_seeds: int | None = None) -> Choice:
    """The number of host devices, of one to `cores`, with which an iteration is predicted to be fastest.

    Raises:
      PlanError: there is none that the policy can be carried out on; what it says of one device.
    """
    of = f"of {cores} core{'s' if cores > 1 else ''}"
    if calls_host(equations := jaxprs.open_jaxpr(graph.jaxpr).eqns):
        place(graph, policy, 1, num_seeds)
        marked = ((eqn, FragmentMark.of(eqn)) for eqn in jaxprs.walk(equations))
        within = [
            m.name for eqn, m in marked if m and any(calls_host(x.eqns) for x in jaxprs.inner_jaxprs(eqn))
        ]
        steps = any(
            fragment.name in within and fragment.role == "environment" for fragment in graph.fragments
        )
        what = "its environments step on the host, in threads of their own"
        names = f"'{within[0]}'" if within else "it"
        return Choice(1, f"1 {of}: {what if steps else f'{names} calls a Python function, in one place'}")
    seconds = predicted_seconds(graph, policy, cores, num_seeds)
    best = fewest = min(seconds)
    quickest = min(seconds, key=seconds.__getitem__)
    if seconds[fewest] >= GAIN * seconds[quickest]:
        best = quickest
    if len(seconds) == 1:
        return Choice(best, f"{best} {of}: its work does not divide by more" if cores > 1 else f"1 {of}")
    other = fewest if best != fewest else min(set(seconds) - {best}, key=seconds.__getitem__)
    return Choice(
        best,
        f"{best} {of}: an iteration is predicted to take {milliseconds(seconds[best])} ms,"
        f" and {milliseconds(seconds[other])} ms on {other}",
    )


def predicted_seconds(graph: FDG, policy: Any, cores: int, num_seeds: int | None = None) -> dict[int, float]:
    """Seconds of an iteration by the number of host devices, of those numbers that have no device idle.

    Raises:
      PlanError: there is none that the policy can be carried out on; what it says of one device.
    """
    seconds: dict[int, float] = {}
    refused: PlanError | None = None
    for count in _candidates(cores):
        try:
            plan = place(graph, policy, count, num_seeds)
        except PlanError as error:
            refused = refused or error
            continue
        if not plan.idle and not (plan.unpredicted and count > 1):
            seconds[count] = iteration_seconds(plan)
            if count == 1:
                seconds[count] -= (num_seeds or 1) * _wide_seconds(graph) * (1 - 1 / cores)
    if not seconds:
        assert refused is not None
        raise refused
    return seconds


def threads_of(graph: FDG, devices: int, num_seeds: int | None = None, in_order: bool = False) -> int | None:
    """Threads of XLA's pool for a job on so many host devices; None for as many as there are.

    One for a single device whose operations are all small: those that XLA could run at the same time are
    handed from thread to thread, which takes longer than they do. PPO on CartPole-v1 with 4 environments
    takes 1.9 ms an iteration with one thread and 2.4 with four, with 32 10.5 and 12.2, with 64 22 and 20.

    Args:
      graph: of the job's algorithm.
      devices: how many host devices it runs on.
      num_seeds: how many agents it trains, None for one.
      in_order: whether all that devices exchange is in one order (`running.order`).
    """
    jaxpr = jaxprs.open_jaxpr(graph.jaxpr)
    if calls_host(jaxpr.eqns):
        return None
    if devices > 1:
        return threads_for(devices, in_order)
    return 1 if (num_seeds or 1) * jaxprs.largest_operation(jaxpr) < ONE_THREAD_FLOPS else usable_cores()


def iteration_seconds(plan: Plan) -> float:
    """Seconds of an iteration: the work of each group's devices, what they exchange, and what moves between.

    Groups work at the same time where staleness lets them, else one after the other.
    """
    groups = {group.name: group for group in plan.groups}
    assignment = dict(plan.assignment)
    seconds = dict.fromkeys(groups, 0.0)
    for name, work, is_split in _own_work(plan.graph):
        group = groups[assignment[name]]
        agents = (plan.num_seeds or 1) / (len(group) if plan.num_seeds else 1)
        share = group.rows if is_split and plan.num_seeds is None else 1
        seconds[group.name] += agents * work / share
    for program in plan.programs:
        rounds = math.log2(max(2, groups[program.group].rows))
        exchanges = sum(c.calls * (EXCHANGE_S * rounds + c.bytes / BYTES_PER_S) for c in program.collectives)
        starts = 0.0 if plan.schedule is None else STEP_S
        seconds[program.group] += MARGIN * program.calls_per_iteration * (exchanges + starts)
    moves = sum(
        m.crossings_per_iteration * (STEP_S + m.bytes_per_crossing / BYTES_PER_S)
        for m in plan.movements
        if m.how == "transfer"
    )
    overlapped = max if plan.delayed is not None else sum
    return overlapped(seconds.values()) + MARGIN * moves


def _wide_seconds(graph: FDG) -> float:
    """Of an iteration's work, what XLA spreads over all cores where there is one device."""
    wide = jaxprs.wide_product_flops(jaxprs.open_jaxpr(graph.jaxpr), WIDE, ONE_THREAD_FLOPS)
    return wide / FLOPS_PER_S


def _own_work(graph: FDG) -> list[tuple[str, float, bool]]:
    """Of each fragment without those nested in it: seconds of a core, and whether it has a batch."""

    def seconds(fragment: Fragment) -> float:
        elements = fragment.elements_per_call
        products = fragment.flops_per_call - elements
        return fragment.calls_per_iteration * (products / FLOPS_PER_S + elements / ELEMENTS_PER_S)

    own = {f.name: seconds(f) for f in graph.fragments}
    for fragment in graph.fragments:
        if fragment.parent is not None:
            own[fragment.parent] -= seconds(fragment)
    return [(f.name, max(0.0, own[f.name]), f.batch_size is not None) for f in graph.fragments]


def _candidates(cores: int) -> Sequence[int]:
    """Numbers of devices to look at: all of few, and of many those that batches divide by."""
    if cores <= 8:
        return range(1, cores + 1)
    powers = {2**i * k for i in range(cores.bit_length()) for k in (1, 3)}
    return sorted({n for n in powers if n <= cores} | {cores})


def milliseconds(seconds: float) -> str:
    """Milliseconds in three digits or whole ones.

    >>> milliseconds(0.0098765), milliseconds(1.7)
    ('9.88', '1,700')
    """
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"
