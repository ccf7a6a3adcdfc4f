"""Records as Markdown."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.gpu.measuring import ROWS, Part, Record, Settings, shown
from bench.harness import table

NOT_MEASURED = "Not measured yet: no GPU was available."


def markdown(part: Part, number: int, folder: Path) -> Iterator[str]:
    """Lines: the tables of a part, and what is missing from them."""
    yield f"### Part {number}: {part.title}"
    yield ""
    path = record_of(folder, number)
    if not path.exists():
        yield NOT_MEASURED
        yield ""
    record = Record(path, is_rehearsal(path))
    if record.content["machine"]:
        yield ", ".join(f"{name} {value}" for name, value in record.content["machine"].items())
        yield ""
    tables: dict[str, list[Mapping[str, str]]] = {}
    for one in part.measurements(Settings(folder, record.content["tiny"])):
        tables.setdefault(one.table, []).extend(_rows(one.row, record.measured.get(one.name)))
    for name, rows in tables.items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        cells = ([row.get(column, "-") for column in columns] for row in rows)
        yield from (table([name, *columns[1:]], cells), "")
    for kind in ("failed", "left out"):
        for name, why in record.content[kind].items():
            yield f"- {kind}: {name}: {why}"
        if record.content[kind]:
            yield ""


def _rows(name: str, figures: Mapping[str, Any] | None) -> list[Mapping[str, str]]:
    if figures is None:
        return [{"": name}]
    return [{"": name, **shown(row)} for row in figures.get(ROWS, [figures])]


def record_of(folder: Path, number: int) -> Path:
    """The file of a part."""
    return folder / f"part-{number}.json"


def is_rehearsal(path: Path) -> bool:
    """Whether a record has the figures of one."""
    return path.exists() and '"tiny": true' in path.read_text()
