"""Reads processes from /proc, and records the circumstances of tries."""

import collections
import contextlib
import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path("build", "break_it")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat, beginning with the state (see proc(5)); None if the process has ended."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields


def is_running(pid: int) -> bool:
    return _stat_fields(pid) is not None


def cpu_seconds_of(pid: int) -> float:
    """CPU seconds that a process has used; 0 if it has ended."""
    fields = _stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND if fields else 0.0


def command_lines() -> dict[int, list[str]]:
    """The command line of each running process."""
    commands = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands[int(path.parent.name)] = path.read_text().split("\0")[:-1]
    return commands


def descendants(pid: int) -> dict[int, list[str]]:
    """The command lines of a process's descendants."""
    lines = command_lines()
    parents = {child: int(fields[1]) for child in lines if (fields := _stat_fields(child))}
    family = {pid}
    while new := {child for child, parent in parents.items() if parent in family} - family:
        family |= new
    return {child: lines[child] for child in sorted(family - {pid})}


def record_circumstances(check: str, try_number: int, circumstances: str, **details: Any) -> None:
    """Adds the circumstances of a try to build/break_it/CHECK-met.jsonl.

    Tries are counted by `circumstances`, such as "between checkpoints".
    """
    with (FOLDER / f"{check}-met.jsonl").open("a") as file:
        file.write(json.dumps({"number": try_number, "met": circumstances, **details}) + "\n")


def count_circumstances(check: str) -> str:
    """How many tries met each kind of circumstances, as text."""
    path = FOLDER / f"{check}-met.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    counts = collections.Counter(row["met"] for row in rows)
    return "; ".join(f"{count} {met}" for met, count in sorted(counts.items()))
