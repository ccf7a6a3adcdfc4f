"""Formats numbers, names and tables as text."""

import math
from collections.abc import Sequence
from typing import Any

from fdg.errors import escape_unprintable
from fdg.tracing.graph import FDG, Fragment

COLOURS = {  # fill of a node by role: Okabe & Ito's colour-blind safe palette, lightened
    "environment": "#cfe8d5",
    "actor": "#cfe0f3",
    "buffer": "#f3e6cf",
    "learner": "#f6d3c4",
    "gradient": "#fbe6de",
    "update": "#fbe6de",
}
OTHER_COLOUR = "#e4e4e4"  # fill of a node with any other role


def quantity(number: float, unit: str = "") -> str:
    """A number with three significant digits and a decimal prefix.

    >>> quantity(12_345_678, "B")
    '12.3 MB'
    >>> quantity(999, "B")
    '999 B'
    """
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 999.5 or prefix == "P":
            return f"{number:.3g} {prefix}{unit}".strip()
        number /= 1000
    raise AssertionError


def duration(seconds: float | None) -> str:
    """Seconds with three significant digits, in a unit that suits them; "-" for None.

    >>> duration(2.5e-6), duration(0.0343), duration(2.0), duration(600.0), duration(math.inf)
    ('2.5 us', '34.3 ms', '2 s', '10 min', 'never')
    """
    if seconds is None:
        return "-"
    if math.isinf(seconds):
        return "never"
    if seconds >= 120:
        return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
    sizes = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
    unit, size = next((entry for entry in sizes if seconds >= 0.9995 * entry[1]), ("ns", 1e-9))
    return f"{seconds / size:.3g} {unit}"


def escape_markdown(value: Any) -> str:
    """Escapes a value for a line or table cell of Markdown, since it may come from an untrusted file.

    >>> escape_markdown("a | <b>\\n c")
    'a \\\\| &lt;b> c'
    """
    text = escape_unprintable(" ".join(str(value).split()))
    return text.replace("|", "\\|").replace("<", "&lt;")


def table(header: Sequence[str], rows: Sequence[tuple[str, ...]], numeric: Sequence[int] = ()) -> list[str]:
    """Lines of an aligned table; columns in `numeric` are right-aligned."""
    columns = [
        [cell.rjust(width) if i in numeric else cell.ljust(width) for cell in column]
        for i, column in enumerate(zip(header, *rows, strict=True))
        for width in [max(map(len, column))]
    ]
    return [("  " + "  ".join(cells)).rstrip() for cells in zip(*columns, strict=True)]


def calls(fragment: Fragment) -> str:
    """The number of calls per iteration, with a tilde if it depends on the data."""
    return f"{'' if fragment.calls_exact else '~'}{fragment.calls_per_iteration}"


def ancestors(graph: FDG, name: str) -> list[str]:
    """The enclosing fragments of a fragment, from the inside out."""
    parent = graph.fragment(name).parent
    return [] if parent is None else [parent, *ancestors(graph, parent)]


def clip(text: str, width: int) -> str:
    """The text, shortened to at most `width` characters."""
    return text if len(text) <= width else text[: width - 3] + "..."


def listed_within(names: Sequence[str], width: int, separator: str = ", ") -> str:
    """Lists names in at most `width` characters, and counts the remaining names.

    >>> listed_within(["act", "step", "judge", "learn"], 18)
    'act, step, +2 more'
    """
    for count in range(len(names), 0, -1):
        rest = [f"+{len(names) - count} more"] * (count < len(names))
        text = separator.join([*names[:count], *rest])
        if len(text) <= width:
            return text
    if not names:
        return ""
    others = f" +{len(names) - 1}" if len(names) > 1 else ""
    return clip(names[0], width - len(others)) + others


def joined_by_and(names: Sequence[str], width: int = 40) -> str:
    """Joins names by commas and "and"; uses `listed_within` if that is too long."""
    if len(names) < 2 or len(" and ".join(names)) > width:
        return listed_within(names, width)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def device_ranges(devices: Sequence[int], width: int = 16) -> str:
    """Positions as ranges: (0, 1, 2, 5) is "0-2, 5"; a long text is shortened, with the count."""
    runs: list[list[int]] = []  # the first and last position of each range
    for device in devices:
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    ranges = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    text = ", ".join(ranges)
    return text if len(text) <= width else f"{ranges[0]}, ..., {ranges[-1]} ({len(devices)})"
