"""Writes the tables and pictures of `docs/performance.md` from the figures in `docs/performance.json`.

python -m bench.performance            # rewrites the text between the two marks of the document
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import harness, pictures
from bench.harness import table
from bench.results import RESULTS, read, returns_text

DOCUMENT = RESULTS.with_suffix(".md")
PICTURES = DOCUMENT.parent / "images" / "performance"

Figures = Mapping[str, Any]  # an entry of `docs/performance.json`, or the whole file


def _quoted(flags: str) -> str:
    """Flags for a shell: an environment's parameters contain `?` and `&`."""
    return shlex.join(flags.split())


def main() -> None:
    results = read()
    PICTURES.mkdir(parents=True, exist_ok=True)
    pictures_drawn = pictures.draw(results, PICTURES)
    harness.rewrite(DOCUMENT, "bench.performance", measured_text(results, pictures_drawn))
    print(f"wrote {DOCUMENT} and {len(pictures_drawn)} pictures in {PICTURES}")


def measured_text(results: Figures, pictures_drawn: Sequence[Path]) -> str:
    """The text between the marks of the document: sections with tables and pictures."""
    sections = (
        _peer_section(results.get("peers", {}), pictures_drawn),
        _bench_section(results.get("bench", {}), pictures_drawn),
    )
    return "\n\n".join(text for text in sections if text)


def _peer_section(peers: Mapping[str, Figures], pictures_drawn: Sequence[Path]) -> str:
    if not peers:
        return ""
    by_peer: dict[str, list[Figures]] = {}
    for figures in peers.values():
        by_peer.setdefault(figures["peer"], []).append(figures)
    parts = [
        "## Compared with other trainers",
        _picture("ratios", "ratios to the speed of others", pictures_drawn),
    ]
    parts += [
        _picture(path.stem, f"steps/s, {path.stem}", pictures_drawn)
        for path in pictures_drawn
        if "-by-size" in path.stem
    ]
    for name, of_peer in by_peer.items():
        rows = sorted(of_peer, key=lambda figures: (figures["task"], figures["size"]))
        parts += [f"### {name}", table(_PEER_HEAD, map(_peer_row, rows)), _equal(rows), _measured_on(rows)]
    return "\n\n".join(part for part in parts if part)


_PEER_HEAD = (
    "task", "environments", "fdg, steps/s", "peer, steps/s", "ratio (middle half)", "target", "compile, s",
    "process start to ready, s", "return at the end",
)  # fmt: skip


def _peer_row(figures: Figures) -> Sequence[str]:
    ours, theirs = figures["ours"], figures["theirs"]
    low, high = figures["ratio_middle_half"]
    verdict = "met" if figures["ratio"] >= figures["at_least"] else "not met"
    devices = f" on {ours['devices']} devices" if ours["devices"] > 1 else ""
    return (
        figures["task"],
        f"{figures['size']:,}",
        f"{ours['steps_per_s']:,.0f}{devices}",
        f"{theirs['steps_per_s']:,.0f}",
        f"**{figures['ratio']:.2f}** ({low:.2f} to {high:.2f})",
        f"{figures['at_least']:g}: {verdict}",
        _both_sides(ours["compile_seconds"], theirs["compile_seconds"]),
        _both_sides(ours["start_seconds"], theirs["start_seconds"]),
        returns_text(figures),
    )


def _both_sides(ours: float, theirs: float) -> str:
    return f"{ours:.1f} / {theirs:.1f}"


def _equal(rows: Iterable[Figures]) -> str:
    """A line for each task: the settings that are equal on both sides, and our command line."""
    by_text: dict[tuple[str, str], str] = {}
    for row in rows:
        command = re.sub(r" --num-envs \d+ --total-steps \d+", " --num-envs N", row["flags"])
        by_text.setdefault((row["task"], row["equal"]), command)
    return "\n".join(
        f"- {task}: {equal}. `python -m fdg.train {_quoted(command)}`"
        for (task, equal), command in by_text.items()
    )


def _bench_section(bench: Mapping[str, Figures], pictures_drawn: Sequence[Path]) -> str:
    if not bench:
        return ""
    groups: dict[str, list[Figures]] = {}
    for figures in bench.values():
        if "group" in figures:
            groups.setdefault(figures["group"], []).append(figures)
    parts = ["## fdg alone"]
    for group, rows in groups.items():
        rows = sorted(rows, key=lambda figures: (isinstance(figures["value"], str), figures["value"]))
        head = (group, "steps/s", "devices", "compile, s", "peak memory", "command")
        parts += [
            _picture(group, f"steps/s by {group}", pictures_drawn),
            table(head, map(_bench_row, rows)),
            _measured_on(rows),
        ]
    costs = {name: figures for name, figures in bench.items() if "group" not in figures}
    if costs:
        parts += [
            table(("overhead", "measured", "target"), map(_cost_row, costs.items())),
            _measured_on(costs.values()),
        ]
    return "\n\n".join(part for part in parts if part)


def _bench_row(figures: Figures) -> Sequence[str]:
    value = figures["value"]
    return (
        f"{value:,}" if isinstance(value, int) else value,
        f"{figures['steps_per_s']:,.0f}",
        str(figures["devices"]),
        f"{figures['compile_seconds']:.1f}",
        f"{figures['peak_bytes'] / 2**20:,.0f} MiB",
        f"`python -m fdg.train {_quoted(figures['flags'])}`",
    )


def _cost_row(item: tuple[str, Figures]) -> Sequence[str]:
    """The row of a measurement in `test_costs.py`: a ratio of times, a growth of memory, or seconds."""
    name, figures = item
    at_most = figures["at_most"]
    if "ratio" in figures:
        low, high = figures["ratio_middle_half"]
        description, figure = f"time of {name}", f"{figures['ratio']:.3f} ({low:.3f} to {high:.3f})"
        value, target = figures["ratio"], f"{at_most:g}"
    elif "growth_bytes" in figures:
        before, value = figures["before_bytes"] / 2**20, figures["growth_bytes"]
        description, figure = f"growth of peak {name}", f"{value / 2**20:+.1f} MiB on {before:,.0f} MiB"
        target = f"none beyond {at_most / 2**20:g} MiB"
    else:
        value = figures["again_seconds"]
        description, target = f"seconds to the {name}", f"{at_most:g} s"
        figure = f"{value:.1f} s; {figures['first_seconds']:.1f} s where it never ran before"
    return description, figure, f"at most {target}: {'met' if value <= at_most else 'not met'}"


def _picture(name: str, text: str, pictures_drawn: Sequence[Path]) -> str:
    """The Markdown of the picture with a name; empty if it was not drawn."""
    path = next((path for path in pictures_drawn if path.stem == name), None)
    return f"![{text}](images/performance/{path.name})" if path else ""


def _measured_on(rows: Iterable[Figures]) -> str:
    """The dates and machines of the measurements in these rows."""
    lines = {
        f"{m['date']}, commit {m['commit']}, {m['cores']} cores of {m['processor']}, Python {m['python']},"
        f" JAX {m['jax']}": None
        for m in (row["machine"] for row in rows)
    }
    return "Measured " + "; ".join(lines) + "."


if __name__ == "__main__":
    main()
