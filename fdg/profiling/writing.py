"""Writes profiles and timelines into a run directory: tables, pictures, and traces for Perfetto."""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

from fdg import files
from fdg.engine import Engine
from fdg.errors import FdgWarning
from fdg.processes import distributed
from fdg.profiling.measuring import profile as measure
from fdg.profiling.report import Profile
from fdg.profiling.tracing import trace_iteration
from fdg.profiling.work import Work
from fdg.showing.bars import timeline_svg, timeline_trace

DIRECTORY = "profile"  # a folder in the run directory
TIMELINE, TRACE = "timeline.svg", "timeline.json"  # files in the run directory
_ITERATIONS = 6  # of a timeline: a few that start from idle devices, and some in steady state


def as_json(profile: Profile) -> dict[str, Any]:
    """A profile as JSON types."""

    def as_plain(value: Any) -> Any:
        if isinstance(value, Work):
            products = [{**product._asdict(), "calls": n} for product, n in value.products.items()]
            return {
                "flops": dict(value.flops),
                "bytes": dict(value.bytes),
                "products": products,
                "exact": value.exact,
            }
        if dataclasses.is_dataclass(value):
            return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        if hasattr(value, "_asdict"):
            return value._asdict()
        return [as_plain(item) for item in value] if isinstance(value, tuple) else value

    return as_plain(profile)


def _without_warnings() -> warnings.catch_warnings:
    """A context that ignores every `FdgWarning`, such as the one about iterations past the end of the run."""
    return warnings.catch_warnings(action="ignore", category=FdgWarning)


def write_profile(engine: Engine, state: Any, run: Path) -> list[str]:
    """Profiles an engine, traces an iteration, and writes both; returns lines to print.

    All processes must call it, and process 0 writes. Copies the state, and replaces earlier profiles in the
    run directory.
    """
    with _without_warnings():
        profile = measure(engine, state)
        directory = files.make_folder(run / DIRECTORY) if distributed.is_first() else None
        perfetto = trace_iteration(engine, state, directory)
    if directory is None:
        return []
    files.write(directory / "profile.txt", f"{profile}\n".encode())
    files.write(directory / "profile.json", (json.dumps(as_json(profile), indent=1) + "\n").encode())
    return [
        f"\n{profile}\n",
        f"profile: {directory / 'profile.txt'} (as JSON: profile.json in the same folder)",
        f"trace of one iteration: {perfetto} (open it in https://ui.perfetto.dev, or run tensorboard --logdir"
        f" {directory})",
    ]


def write_timeline(engine: Engine, state: Any, run: Path) -> list[str]:
    """Trains for some further iterations, and writes a timeline of the programs; returns lines to print."""
    with _without_warnings():
        bars = engine.timeline(state, _ITERATIONS)
    if not distributed.is_first():
        return []
    if not bars:
        return ["no timeline: all fragments are one program on the same devices; --profile shows its parts"]
    svg_path, trace_path = run / TIMELINE, run / TRACE
    files.write(svg_path, timeline_svg(bars).encode())
    files.write(trace_path, (json.dumps(timeline_trace(bars)) + "\n").encode())
    return [
        f"timeline of {_ITERATIONS} iterations: {svg_path} (for https://ui.perfetto.dev: {trace_path}), with"
        f" one row per group: {', '.join(dict.fromkeys(bar.group for bar in bars))}"
    ]
