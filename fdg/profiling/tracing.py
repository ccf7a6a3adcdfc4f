"""Records a profiler trace of one iteration, and writes it for TensorBoard and Perfetto.

The file for https://ui.perfetto.dev has two tracks per thread or stream: operations, and the fragments that
they belong to (read from the compiled programs).
"""

import gzip
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fdg import files
from fdg.engine import Engine
from fdg.lowering.host_calls import BETWEEN
from fdg.running.hlo import fragment_path
from fdg.running.leaves import copied
from fdg.showing.bars import track

PERFETTO = "trace.json.gz"  # the name of the file for Perfetto
# The duration of these operations includes their bodies.
_ENCLOSING_OPERATION = re.compile(r"(while|call|conditional)([.\d]|$)")


class TraceSpan(NamedTuple):
    """A traced operation, or consecutive operations of one fragment; times in nanoseconds."""

    name: str
    fragment: str
    start: float
    duration: float


def trace_iteration(engine: Engine, state: Any, directory: Path | None) -> Path | None:
    """Traces one iteration from a copy of a state. All processes must call it.

    Args:
      engine: an engine that has run before; otherwise the trace would contain compilation.
      directory: for TensorBoard; an earlier trace in it is removed. None: this process writes no files.

    Returns:
      The file for Perfetto in `directory`, or None.
    """
    state = copied(state)
    if directory is None:
        jax.block_until_ready(engine.run(state, 1))
        return None
    directory.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(directory / "plugins"):
        files.remove(directory / "plugins")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # recording Python calls would slow the program down
    with jax.profiler.trace(str(directory), profiler_options=options):
        jax.block_until_ready(engine.run(state, 1))
    fragment_by_operation = read_fragments(program.hlo() for program in engine.programs if program.is_here)
    target = directory / PERFETTO
    with files.replacing(target) as compressed, gzip.open(compressed, "wt", compresslevel=5) as file:
        json.dump({"traceEvents": list(_events(_threads(directory, fragment_by_operation)))}, file)
    return target


def read_fragments(hlo: Iterable[str]) -> Mapping[tuple[str, str], str]:
    """The innermost fragment of each operation, by the names of module and operation."""
    fragment_by_operation = {}
    for text in hlo:
        module = ""
        for line in text.splitlines():
            if line.startswith("HloModule "):
                module = re.split(r"[ ,]", line)[1]
            operation = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", line)
            _, fragments = fragment_path(line)
            if operation and fragments:
                fragment_by_operation[module, operation[1]] = fragments[-1]
    return fragment_by_operation


def _threads(
    directory: Path, fragment_by_operation: Mapping[tuple[str, str], str]
) -> Iterator[tuple[str, list[TraceSpan]]]:
    """The operations of each thread or stream, in order."""
    for path in sorted(directory.glob("plugins/profile/*/*.xplane.pb")):
        data = jax.profiler.ProfileData.from_file(str(path))
        for plane in data.planes:
            for line in plane.lines:
                operations = []
                for event in line.events:
                    stats = dict(event.stats)
                    if "hlo_op" not in stats:
                        continue
                    name = str(stats["hlo_op"])
                    fragment = fragment_by_operation.get((str(stats.get("hlo_module", "")), name), BETWEEN)
                    operations.append(TraceSpan(name, fragment, event.start_ns, event.duration_ns))
                if operations:
                    operations.sort(key=lambda operation: operation.start)
                    yield f"{plane.name} {line.name}", operations


def merge_by_fragment(operations: Iterable[TraceSpan]) -> list[TraceSpan]:
    """Merges consecutive operations of a fragment; drops operations that enclose others.

    >>> parts = [("while.1", "learn", 0, 9), ("dot.1", "act", 1, 2), ("add.1", "act", 4, 1)]
    >>> spans = merge_by_fragment(TraceSpan(*part) for part in [*parts, ("sub", "step", 6, 1)])
    >>> [(span.fragment, span.start, span.duration) for span in spans]
    [('act', 1, 4), ('step', 6, 1)]
    """
    spans: list[TraceSpan] = []
    for operation in operations:
        if _ENCLOSING_OPERATION.match(operation.name):
            continue
        last_span = spans[-1] if spans else None
        if last_span is not None and last_span.fragment == operation.fragment:
            end = max(last_span.start + last_span.duration, operation.start + operation.duration)
            spans[-1] = last_span._replace(duration=end - last_span.start)
        else:
            spans.append(operation._replace(name=operation.fragment))
    return spans


def _events(threads: Iterable[tuple[str, list[TraceSpan]]]) -> Iterator[dict[str, Any]]:
    """Events of the trace format that Perfetto reads; times in microseconds from the first event.

    >>> dot, add = TraceSpan("dot.1", "act", 7_000, 2_000), TraceSpan("add.1", "act", 9_500, 500)
    >>> events = [event for event in _events([("cpu", [dot, add])]) if event["ph"] == "X"]
    >>> [(event["tid"], event["name"], event["ts"], event["dur"]) for event in events]
    [(0, 'act', 0.0, 3.0), (1, 'dot.1', 0.0, 2.0), (1, 'add.1', 2.5, 0.5)]
    """
    all_threads = list(threads)
    first_start = min((operations[0].start for _, operations in all_threads), default=0.0)
    for process, (thread, operations) in enumerate(all_threads):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": thread}}
        rows = {"fragments": merge_by_fragment(operations), "operations": operations}
        for i, (title, row) in enumerate(rows.items()):
            spans = (
                (
                    span.name,
                    (span.start - first_start) / 1e3,
                    span.duration / 1e3,
                    {"fragment": span.fragment},
                )
                for span in row
            )
            yield from track(process, i, title, spans)
