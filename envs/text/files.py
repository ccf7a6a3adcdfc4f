"""Reads data files (JSON lines, a JSON list, or CSV) as rows, each with its location for error messages."""

import csv
import io
import json
import os
from typing import Any, NamedTuple

from fdg.errors import FdgError, one_line
from fdg.reading import EncodingError, check_encoding, json_object, read_bytes, read_text

_MAX_BYTES = 1 << 30  # maximum size of a file
_SEPARATORS = {".csv": ",", ".tsv": "\t"}  # of columns, by suffix


class Record(NamedTuple):
    """A row of a file."""

    where: str  # the start of messages: "data.jsonl, line 3"
    columns: dict[str, Any]


def read(path: str, example: str = '{"prompt": "1+1=", "answer": "2"}') -> list[Record]:
    """The rows of a UTF-8 file: one JSON object a line, a list of objects, or CSV (`.csv`, `.tsv`).

    Empty lines are skipped. Error messages show the object `example`.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _SEPARATORS:
        return _read_csv(path, _SEPARATORS[suffix])
    content = read_bytes(path, _MAX_BYTES)
    if suffix == ".parquet" or content[:4] == b"PAR1":
        raise FdgError(
            f"{path}: Parquet is not read: convert it,"
            f" pandas.read_parquet({path!r}).to_json('data.jsonl', orient='records', lines=True)"
        )
    check_encoding(content, path)
    if content.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        return _read_list(path, content)
    # Not `splitlines`, which also splits at carriage returns alone.
    lines = enumerate(content.split(b"\n"), 1)
    return [
        Record(f"{path}, line {i}", _parse_line(f"{path}, line {i}", line, example))
        for i, line in lines
        if line.strip()
    ]


def _parse_line(where: str, line: bytes, example: str) -> dict[str, Any]:
    """The object in a line of JSON; `where` begins errors, and `example` ends them."""
    try:
        return json_object(line, where, any_number=True)  # `columns` checks the numbers that are used
    except EncodingError:
        raise
    except FdgError as error:
        raise FdgError(f"{error}: write one object a line, in double quotes: {example}") from None


def _read_list(path: str, content: bytes) -> list[Record]:
    """The rows of a JSON list of objects."""
    content = b'{"rows":' + content.removeprefix(b"\xef\xbb\xbf") + b"}"
    rows, *rest = json_object(content, path, any_number=True).values()
    if rest:
        raise FdgError(f"{path}: is not JSON: a comma follows the list of rows: end the file with its ]")
    for i, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise FdgError(
                f'{path}, row {i}: is {json.dumps(row):.60}, not an object: write {{"prompt": ...}}'
            )
    return [Record(f"{path}, row {i}", row) for i, row in enumerate(rows, 1)]


def _read_csv(path: str, separator: str) -> list[Record]:
    """The rows of a file with a line of column names; empty fields are None.

    If the column names have blanks after their separators, the fields have them too, and they are left out.
    """
    text = read_text(path, _MAX_BYTES)

    def reader(skips_blanks: bool) -> Any:
        source = io.StringIO(text, newline="")
        return csv.reader(source, delimiter=separator, strict=True, skipinitialspace=skips_blanks)

    rows = reader(skips_blanks=False)
    records: list[Record] = []
    earlier_limit = csv.field_size_limit(_MAX_BYTES)  # for the whole process; 131,072 unless something set it
    try:
        names: list[str] = next(filter(None, rows), [])
        if any(name.startswith(" ") for name in names):
            rows = reader(skips_blanks=True)
            names = next(filter(None, rows))
        other_separator = next((mark for mark in ";\t|," if len(names) == 1 and mark in names[0]), None)
        if other_separator is not None:
            raise FdgError(f"{path}, line 1: columns are separated by {other_separator!r}: use {separator!r}")
        if duplicates := [name for i, name in enumerate(names) if name and name in names[:i]]:
            raise FdgError(f"{path}, line 1: column {duplicates[0]!r} occurs twice: rename one")
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if row and len(row) != len(names):
                raise FdgError(
                    f"{where}: has {len(row)} fields, and the first line names {len(names)} columns: put"
                    ' texts with separators into "quotes"'
                )
            if row:
                records.append(Record(where, {n: v or None for n, v in zip(names, row, strict=True)}))
    except csv.Error as error:
        raise FdgError(f"{path}, line {rows.line_num}: is not CSV: {one_line(error)}") from None
    finally:
        csv.field_size_limit(earlier_limit)
    return records
