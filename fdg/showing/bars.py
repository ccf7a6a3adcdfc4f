"""Draws timelines of program runs: as SVG with one row per group of devices, and as traces for Perfetto."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fdg.running.timeline import Bar
from fdg.showing.canvas import PALETTE, Canvas
from fdg.showing.words import clip, quantity

_LABEL_WIDTH, _PLOT_WIDTH = 150, 1100  # pixels
_ROW_HEIGHT, _BAR_HEIGHT, _HEADER_HEIGHT = 46, 30, 40  # pixels
_MAX_BARS = 20_000  # if there are more bars, only the latest are drawn
_TICKS = 8  # intervals between the labels of the time axis


def timeline_svg(bars: Sequence[Bar]) -> str:
    """An SVG with one row per group and one bar per run of a program; hovering shows its name and seconds."""
    bars = bars[-_MAX_BARS:]
    begin, end = _span(bars)
    scale = _PLOT_WIDTH / max(end - begin, 1e-9)
    groups = list(dict.fromkeys(bar.group for bar in sorted(bars)))
    colors = dict(zip(dict.fromkeys(bar.name for bar in bars), itertools.cycle(PALETTE), strict=False))
    rows_end = _HEADER_HEIGHT + _ROW_HEIGHT * len(groups)
    canvas = Canvas()
    for tick in range(_TICKS + 1):
        x, seconds = _LABEL_WIDTH + _PLOT_WIDTH * tick / _TICKS, (end - begin) * tick / _TICKS
        canvas.line(f"M{x:g} {_HEADER_HEIGHT - 8} V{rows_end}", "#ddd", 1)
        canvas.text(x, _HEADER_HEIGHT - 14, quantity(seconds, "s"), text_anchor="middle")
    for row, group in enumerate(groups):
        y = _HEADER_HEIGHT + _ROW_HEIGHT * row
        share = busy_seconds(bars, group) / max(end - begin, 1e-9)
        canvas.text(8, y + _BAR_HEIGHT / 2 + 4, f"{clip(group, 14)} {100 * share:.0f}%")
        for bar in (other for other in bars if other.group == group):
            x, width = _LABEL_WIDTH + (bar.begin - begin) * scale, max((bar.end - bar.begin) * scale, 0.4)
            duration = quantity(bar.end - bar.begin, "s")
            tooltip = f"{bar.name}, iteration {bar.iteration}, part {bar.part}: {duration}"
            canvas.box(
                x, y, width, _BAR_HEIGHT, colors[bar.name], "white", stroke_width=0.3,
                fill_opacity=0.9 if bar.iteration % 2 else 0.55, tooltip=tooltip,
            )  # fmt: skip
    for i, (name, color) in enumerate(colors.items()):
        y = rows_end + 24 * i
        canvas.box(_LABEL_WIDTH, y, 14, 14, color, "none")
        canvas.text(_LABEL_WIDTH + 22, y + 12, clip(name, 120))
    width, height = _LABEL_WIDTH + _PLOT_WIDTH + 30, rows_end + 24 * len(colors) + 20
    return canvas.picture(width, height, f"timeline of {', '.join(groups)}")


def timeline_trace(bars: Sequence[Bar]) -> dict[str, Any]:
    """The timeline in the trace format of https://ui.perfetto.dev, with one track per group, in microseconds.

    >>> bars = [Bar("actors", "act", 0, 0, 10.0, 10.5), Bar("learners", "learn", 0, 0, 10.5, 10.75)]
    >>> events = [event for event in timeline_trace(bars)["traceEvents"] if event["ph"] == "X"]
    >>> [(event["tid"], event["name"], event["ts"], event["dur"]) for event in events]
    [(0, 'act', 0.0, 500000.0), (1, 'learn', 500000.0, 250000.0)]
    """
    begin, _ = _span(bars)

    def spans(group: str) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
        for bar in (other for other in bars if other.group == group):
            start, duration = round(1e6 * (bar.begin - begin), 1), round(1e6 * (bar.end - bar.begin), 1)
            yield bar.name, start, duration, {"iteration": bar.iteration, "part": bar.part}

    groups = dict.fromkeys(bar.group for bar in sorted(bars))
    return {"traceEvents": [e for i, name in enumerate(groups) for e in track(0, i, name, spans(name))]}


def track(
    process: int, thread: int, title: str, spans: Iterable[tuple[str, float, float, Mapping[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """The events of one track, given its numbers of process and thread, and its title.

    A span is (name, start, duration, arguments); times are in microseconds.
    """
    ids = {"pid": process, "tid": thread}
    yield {"ph": "M", **ids, "name": "thread_name", "args": {"name": title}}
    for name, start, duration, arguments in spans:
        yield {"ph": "X", **ids, "name": name, "ts": start, "dur": duration, "args": arguments}


def busy_seconds(bars: Sequence[Bar], group: str) -> float:
    """The seconds for which a group runs programs."""
    return sum(bar.end - bar.begin for bar in bars if bar.group == group)


def _span(bars: Sequence[Bar]) -> tuple[float, float]:
    """The first start and the last end."""
    return min((bar.begin for bar in bars), default=0.0), max((bar.end for bar in bars), default=0.0)
