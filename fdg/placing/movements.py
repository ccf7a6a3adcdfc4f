"""Data movements of a plan: edges on the same devices, transfers between groups, and collectives.

source   target   how           where
act      learn    "transfer"    actors -> learners     a `Move` of the schedule
learn    learn    "all-reduce"  learners               a collective of the program "learn"
act      step     ""                                   an edge between fragments of one group
"""

import dataclasses
from collections.abc import Mapping, Sequence

from fdg.batch.collective import Collective
from fdg.placing.layout import moved_bytes
from fdg.placing.scheduling.schedule import Move
from fdg.tracing.graph import Edge

BETWEEN = "(between fragments)"  # in place of a fragment's name


@dataclasses.dataclass(frozen=True)
class Movement:
    """Bytes that move between fragments or devices."""

    source: str  # the producing fragments
    target: str  # the consuming fragments; for a collective the same as `source`
    # "transfer" between groups, the kind of a collective within a group ("all-reduce", "all-gather", ...), or
    # "" if the data stay on their devices
    how: str
    # total bytes that arrive on all target devices; for a collective, the size of its result
    bytes_per_crossing: int
    crossings_per_iteration: int
    delay: str = ""  # "" if used in the same trip; "step" or "iteration" if used in the next
    where: str = ""  # the group of a collective, "actors -> learners" for a transfer, "" for an edge
    program: str = ""  # the program of a collective
    read: bool = False  # True if read from the compiled program, False if predicted

    @property
    def bytes_per_iteration(self) -> int:
        """The bytes of all crossings in an iteration."""
        return self.bytes_per_crossing * self.crossings_per_iteration


@dataclasses.dataclass(frozen=True)
class PlannedProgram:
    """One XLA program of a plan: its fragments, how often it runs, and the collectives in it."""

    name: str
    group: str
    # the names of its fragments in program order; empty for code between fragments
    fragments: tuple[str, ...]
    calls_per_iteration: int
    collectives: tuple[Collective, ...] = ()  # the collectives of one run
    read: bool = False  # True if `collectives` were read from the compiled program, not predicted
    agents_per_vmap: int | None = None  # number of agents that a device vmaps at once; None without agents


def local_movements(edges: Sequence[Edge], assignment: Mapping[str, str]) -> list[Movement]:
    """The edges between fragments of one group, whose values do not move between devices.

    `assignment` maps each fragment to its group.
    """
    return [
        Movement(e.source, e.target, "", e.bytes_per_crossing, e.crossings_per_iteration, e.delay)
        for e in edges
        if assignment[e.source] == assignment[e.target]
    ]


def transfer_movement(move: Move, times: int) -> Movement:
    """The movement of a schedule's transfer that runs `times` times in an iteration."""
    changes = move.changes or [None] * len(move.pairs)
    size = sum(
        moved_bytes(after.bytes, after.laid_out) if change is None else change.arriving(after.bytes)
        for (_, after), change in zip(move.pairs, changes, strict=True)
    )
    source, target = ", ".join(move.sources) or BETWEEN, ", ".join(move.targets) or BETWEEN
    return Movement(source, target, "transfer", size, times, move.delay, f"{move.source} -> {move.target}")


def collective_movements(programs: Sequence[PlannedProgram]) -> list[Movement]:
    """The collectives of each group; sums collectives that differ only in bytes."""
    totals: dict[Movement, int] = {}
    for program in programs:
        for c in program.collectives:
            where, times = c.fragment or BETWEEN, c.calls * program.calls_per_iteration
            key = Movement(where, where, c.kind, 0, times, "", program.group, program.name, program.read)
            totals[key] = totals.get(key, 0) + c.bytes
    return [dataclasses.replace(key, bytes_per_crossing=size) for key, size in totals.items()]
