"""Writes records of measurements as Markdown."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.gpu.measuring import ROWS, Part, Record, Settings, columns_of
from bench.harness import table

NOT_MEASURED = "Not measured yet: no GPU was available."


def markdown(part: Part, number: int, folder: Path) -> Iterator[str]:
    """The lines of a part's tables, with missing measurements and their reasons."""
    yield f"### Part {number}: {part.title}"
    yield ""
    path = record_of(folder, number)
    if not path.exists():
        yield NOT_MEASURED
        yield ""
    record = Record(path, path.exists() and '"tiny": true' in path.read_text())
    if record.content["machine"]:
        yield ", ".join(f"{name} {value}" for name, value in record.content["machine"].items())
        yield ""
    tables: dict[str, list[Mapping[str, str]]] = {}
    for item in part.measurements(Settings(folder, record.content["tiny"])):
        tables.setdefault(item.table, []).extend(_rows(item.row, record.measured.get(item.name)))
    for name, rows in tables.items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        cells = ([row.get(column, "-") for column in columns] for row in rows)
        yield from (table([name, *columns[1:]], cells), "")
    for kind in ("failed", "left out"):
        for name, reason in record.content[kind].items():
            yield f"- {kind}: {name}: {reason}"
        if record.content[kind]:
            yield ""


def _rows(name: str, figures: Mapping[str, Any] | None) -> list[Mapping[str, str]]:
    """The rows of a measurement, each from column to text; the column "" has its name."""
    if figures is None:
        return [{"": name}]
    return [{"": name, **columns_of(row)} for row in figures.get(ROWS, [figures])]


def record_of(folder: Path, number: int) -> Path:
    """The file of a part's figures."""
    return folder / f"part-{number}.json"
