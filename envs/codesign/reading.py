"""Reads co-design problems from TOML files. Unknown keys are errors; a file by itself imports no code."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.codesign import accuracy, given, networks, space
from envs.codesign.graph import Network
from envs.codesign.problem import Problem, Specs
from envs.codesign.space import Chips, Task
from envs.codesign.technology import Technology
from fdg.errors import FdgError, listed, nearest, unknown_name
from fdg.kinds import number_fix
from fdg.reading import read_toml

WORKLOADS = ("w1", "w2", "w3")  # shipped problems
LEVELS = ("tight", "medium", "loose")  # of specs: tables [specs.LEVEL]

NETWORK_KEYS = ("space", "network", "onnx", "module")  # a task has exactly one of them

# key -> (index in Specs, factor to the unit of Specs). Factors of latencies convert to seconds, which the
# clock rate then converts to cycles; None: the value is in cycles already.
UNITS: dict[str, tuple[int, float | None]] = {
    "latency_cycles": (0, None),
    "latency_ms": (0, 1e-3),
    "latency_us": (0, 1e-6),
    "energy_pj": (1, 1.0),
    "energy_nj": (1, 1e3),
    "energy_uj": (1, 1e6),
    "energy_mj": (1, 1e9),
    "area_mm2": (2, 1.0),
    "area_um2": (2, 1e-6),
}


def get(name: str, modules: Sequence[str] = (), copy: str = "") -> Problem:
    """The problem of a shipped workload, or of a TOML file.

    Args:
      name: `w1`, `w2`, `w3`, or a path that ends in `.toml`.
      modules: values of `module = "MODULE:NAME"` in the file that may be imported.
      copy: path of a copy of the file, which is read in its place; "" if there is none.

    Raises:
      FdgError: there is no such problem, or the file cannot be read or has a mistake.

    >>> len(get("w1").decisions())
    19
    """
    if name in WORKLOADS:
        return from_dict(read_toml(Path(__file__).with_name("workloads") / f"{name}.toml", ""), name)
    if not name.endswith(".toml"):
        raise unknown_name("workload", name, WORKLOADS, suggested=("w1", "FILE.toml"))
    return read(name, modules, copy)


def read(path: str | Path, modules: Sequence[str] = (), copy: str | Path = "") -> Problem:
    """Reads a problem from a TOML file.

    `copy` is the path of a copy of the file, as in a run directory. Files that the problem names are read
    from the copy's folder, under the names of `Problem.files`. A file that is not there is read from its own
    path. `modules` are as in `from_dict`.
    """
    file = str(copy or path)
    content, copies = read_toml(file, "correct the file"), Path(copy).parent if copy else None
    problem = from_dict(content, str(path), Path(path).parent, modules, copies)
    return dataclasses.replace(problem, read_from=(("path", file), *problem.read_from))


def modules(path: str) -> tuple[str, ...]:
    """Values of `module =` in a TOML file, neither checked nor imported; empty if it is unreadable."""
    try:
        tasks = read_toml(path, "").get("task")
    except FdgError:
        return ()
    names = [x.get("module") for x in tasks if isinstance(x, Mapping)] if isinstance(tasks, list) else []
    return tuple(x for x in names if isinstance(x, str))


def from_dict(
    content: Mapping[str, Any],
    name: str = "codesign",
    folder: Path | None = None,
    modules: Sequence[str] = (),
    copies: Path | None = None,
) -> Problem:
    """The problem in a dictionary with the keys of the TOML format.

    Args:
      content: the tables `[budget]`, `[chip]`, `[technology]`, `[specs]`, `[bounds]`, `[accuracy]` and
        `[[task]]`.
      name: of the problem, in messages.
      folder: the base of relative paths.
      modules: values of `module = "MODULE:NAME"` that may be imported; a file by itself cannot cause an
        import.
      copies: a folder with copies of files that the problem names, which are read in their place.

    Raises:
      FdgError: a mistake in the content, or in a file that it names.
    """
    files = _Files(folder or Path(), copies)
    root = _Table(name, "", content, "budget chip technology specs bounds accuracy task")
    technology = _technology(root.table("technology"))
    chips = _chips(root, technology)
    limits, levels = _specs(root.table("specs"), technology)
    accuracy_table = root.table("accuracy", "source table")
    source = accuracy_table.text("source", "table")
    if source not in accuracy.SOURCES:
        raise accuracy_table.unknown_value("source", source, accuracy.SOURCES)
    tasks = content.get("task", ())
    if not isinstance(tasks, list | tuple) or not tasks or not all(isinstance(x, Mapping) for x in tasks):
        raise FdgError(f"{name}: there is no task: write one [[task]] for each network")
    if len(tasks) > 8:
        raise FdgError(f"{name}: {len(tasks)} tasks; give at most 8")
    read_tasks = [_task(name, i, table, len(tasks), files, modules) for i, table in enumerate(tasks)]
    names = [task.name for task in read_tasks]
    for task_name in names:
        if names.count(task_name) > 1:
            raise FdgError(f"{name}: two tasks are called '{task_name}': give each a name of its own")
    table = accuracy_table.text("table", "")
    problem = Problem(
        tuple(read_tasks),
        chips,
        technology,
        levels=levels,
        bounds=_limits(root.table("bounds"), technology),
        accuracy=source,
        table=files.find("table", table) if table else "",
        name=name,
        read_from=tuple(files.paths_read.items()),
    )
    if limits != Specs():
        return dataclasses.replace(problem, specs=limits)
    return problem.at("medium") if "medium" in dict(levels) else problem


class _Files:
    """Finds the files that a problem names, and records which were read.

    Paths are relative to `folder`; the folder of `copies` is searched first.
    """

    def __init__(self, folder: Path, copies: Path | None):
        self._folder, self._copies = folder, copies
        self.paths_read: dict[str, str] = {}

    def find(self, key: str, path: str) -> str:
        """The path of a file: its copy (KEY plus the extension) if there is one, else `path`."""
        copy = self._copies and self._copies / (key + os.path.splitext(path)[1])
        self.paths_read[key] = str(copy if copy and os.path.lexists(copy) else self._folder / path)
        return self.paths_read[key]


class _Table:
    """A table with known keys. Mistakes raise one-line errors that name the table.

    `name` is the problem's, `table` the table's ("" for the whole file). `known` are its keys, separated by
    spaces; "" permits any.
    """

    def __init__(self, name: str, table: str, content: Any, known: str = ""):
        self.where, self.table_name, self.file = f"{name}: [{table}]" if table else name, table, name
        if not isinstance(content, Mapping):
            raise FdgError(f"{self.where} is {content!r:.60}; write a table of keys, KEY = VALUE")
        self.content, self.known = content, known.split()
        for key in content if known else ():
            if key not in self.known:
                close = nearest(str(key), self.known)
                hint = f": did you mean {close[0]}?" if close else ""
                raise FdgError(
                    f"{self.where} has an unknown key '{key}'{hint} (known: {', '.join(self.known)})"
                )

    def unknown_value(self, key: str, value: Any, known: Any) -> FdgError:
        return unknown_name(f"{self.where} {key}", value, known)

    def invalid_value(self, key: str, value: Any, wanted: str) -> FdgError:
        return FdgError(f"{self.where}: {key} is {value!r:.60}; give {wanted}{number_fix(value, float, key)}")

    def table(self, key: str, known: str = "") -> "_Table":
        return _Table(self.file, key, self.content.get(key, {}), known)

    def text(self, key: str, default: str) -> str:
        value = self.content.get(key, default)
        if not isinstance(value, str):
            raise self.invalid_value(key, value, "a text in quotation marks")
        return value

    def number(self, key: str, default: float, least: float = 0.0, strict: bool = True) -> float:
        """A finite number of at most 10^15: above `least`, or also equal to it if not `strict`."""
        value = self.content.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < least or (strict and value == least) or value > 1e15:
            raise self.invalid_value(key, value, f"a number {'above' if strict else 'of at least'} {least:g}")
        return value

    def integer(self, key: str, default: int, least: int, most: int) -> int:
        value = self.content.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.invalid_value(key, value, f"a whole number from {least} to {most:,}")
        return value

    def options(self, key: str, default: tuple, kind: type | tuple[type, ...], wanted: str) -> tuple:
        """A list of options; numbers may be given as a range `{ from = 0, to = 512, step = 32 }`."""
        value = self.content.get(key, default)
        if isinstance(value, Mapping) and kind is not str:
            span = _Table(self.file, f"{self.table_name}.{key}", value, "from to step")
            start, end, step = (
                span.integer(x, d, int(x == "step"), 2**20) for x, d in _DEFAULT_RANGE.items()
            )
            value = list(range(start, end + 1, step))
        is_list = isinstance(value, list | tuple) and 0 < len(value) <= 4096
        if not is_list or not all(isinstance(x, kind) and not isinstance(x, bool) for x in value):
            raise self.invalid_value(key, value, f"a list of {wanted}")
        if any(isinstance(x, int | float) and not 0 <= x <= 2**30 for x in value):
            raise self.invalid_value(key, value, f"a list of {wanted}, none below 0 or above 2^30")
        return tuple(value)


_DEFAULT_RANGE = {"from": 0, "to": 512, "step": 32}  # for keys that a range leaves out
_SPACE_KEYS = "size width classes channels"  # of a task with a space: parameters of `space.SPACES`
_NUMBERS = (int, float)


def _technology(table: _Table) -> Technology:
    """The constants in the table `[technology]`."""
    fields = [field.name for field in dataclasses.fields(Technology)]
    table = _Table(table.file, "technology", table.content, " ".join(fields))
    try:
        return Technology(**table.content)
    except FdgError as error:
        raise FdgError(f"{table.where}: {error}") from None


def _chips(root: _Table, technology: Technology) -> Chips:
    """The chips in the tables `[budget]` and `[chip]`."""
    budget = root.table("budget", "pes bandwidth_gb_s subaccelerators templates")
    chip = root.table("chip", "pes bandwidth_gb_s buffer_kb dram_gb_s")
    bytes_per_cycle = 1e9 / technology.clock_hz  # of 1 GB/s
    names = budget.options("templates", Chips.templates, str, "names, such as ['dla', 'shi']")
    pes = budget.integer("pes", Chips.budget_pes, 1, 2**20)
    bandwidth = budget.number("bandwidth_gb_s", Chips.budget_noc_bytes_per_cycle)
    # The default options are multiples of an eighth of the budget.
    default_pes = tuple(sorted({pes * eighths // 8 for eighths in range(9)}))
    default_bandwidths = tuple(_int_if_whole(bandwidth * eighths / 8) for eighths in range(1, 8))
    bandwidths = chip.options("bandwidth_gb_s", default_bandwidths, _NUMBERS, "numbers of GB/s")
    try:
        return Chips(
            budget.integer("subaccelerators", Chips.subaccelerators, 1, 8),
            names,
            chip.options("pes", default_pes, int, "whole numbers; 0 leaves a sub-accelerator out"),
            tuple(_int_if_whole(x * bytes_per_cycle) for x in bandwidths),
            chip.options("buffer_kb", Chips.buffer_kb, int, "whole numbers of KB"),
            pes,
            _int_if_whole(bandwidth * bytes_per_cycle),
            chip.number("dram_gb_s", Chips.dram_bytes_per_cycle) * bytes_per_cycle,
        )
    except FdgError as error:
        message = str(error)
        raise error if message.startswith(root.file) else FdgError(f"{root.file}: {message}") from None


def _int_if_whole(x: float) -> float:
    return int(x) if x == int(x) else x


def _specs(table: _Table, technology: Technology) -> tuple[Specs, tuple[tuple[str, Specs], ...]]:
    """The specs that a file sets directly, and those of its levels."""
    levels = {key: x for key, x in table.content.items() if isinstance(x, Mapping) and key not in UNITS}
    _Table(table.file, "specs", levels, " ".join(LEVELS))
    flat = _Table(table.file, "specs", {key: x for key, x in table.content.items() if key not in levels})
    read = [
        (level, _limits(_Table(table.file, f"specs.{level}", levels[level]), technology))
        for level in LEVELS
        if level in levels
    ]
    return _limits(flat, technology), tuple(read)


def _limits(table: _Table, technology: Technology) -> Specs:
    """The specs in a table whose keys are in `UNITS`."""
    limits = [math.inf] * 3
    for key in table.content:
        if key not in UNITS:
            units = [unit for unit in UNITS if unit.startswith(f"{key}_")]
            hint = f"its unit is missing: write {' or '.join(units)}" if units else None
            close = nearest(str(key), UNITS)
            hint = hint or (f"did you mean {close[0]}?" if close else f"known: {', '.join(UNITS)}")
            raise FdgError(f"{table.where} has an unknown key '{key}': {hint}")
        index, factor = UNITS[key]
        if limits[index] < math.inf:
            others = [x for x in table.content if x != key and UNITS.get(x, (None,))[0] == index]
            raise FdgError(
                f"{table.where}: {key} is a second value of {Specs._fields[index]}: leave one out of {key}"
                f" and {others[0]}"
            )
        value = table.number(key, 0)
        limits[index] = value * (factor * (technology.clock_hz if index == 0 else 1) if factor else 1)
    return Specs(*limits)


def _task(
    name: str, index: int, content: Mapping[str, Any], tasks: int, files: _Files, modules: Sequence[str]
) -> Task:
    """Reads task `index` of `tasks` tasks, and its network, unless the task has a space of networks."""
    known = f"name space weight data accuracy input {_SPACE_KEYS} network onnx module"
    table = _Table(name, f"task {index + 1}", content, known)
    title = table.text("name", f"task{index + 1}")
    if not title or len(title) > 64 or not title.isprintable():
        raise table.invalid_value("name", title, "a short name")
    fields: dict[str, Any] = {
        "weight": float(table.number("weight", 1 / tasks, strict=False)),
        "data": table.text("data", ""),
    }
    if fields["data"].endswith(".npz"):
        fields["data"] = files.find(f"data{index + 1}", fields["data"])
    sources = [key for key in NETWORK_KEYS if key in content]
    if len(sources) != 1:
        count = listed(sources, "and") if sources else "no network"
        raise FdgError(f"{table.where} has {count}: write one of {', '.join(NETWORK_KEYS)}")
    (source,) = sources
    value = table.text(source, "")
    shape: tuple[int, ...] = ()
    if "input" in content:
        shape = table.options("input", (), int, "whole numbers, such as [1, 224, 224, 3]")
        if source != "module":
            raise FdgError(f"{table.where}: input is for a module, and {source} is given: leave input out")
    if source != "space":
        if misplaced := next((key for key in _SPACE_KEYS.split() if key in content), None):
            raise FdgError(
                f"{table.where}: {misplaced} is for a space, and {source} is given: leave {misplaced} out"
            )
        if source == "module" and value not in modules:
            raise FdgError(
                f"{table.where}: module '{value}' would import code, and a file cannot do that by itself: "
                f"also pass --module {value} (module={value!r}), or --trust"
            )
        try:
            if source == "network":
                network = Network(tuple(networks.get(value)), None)
            elif source == "onnx":
                network = given.from_onnx(files.find(f"onnx{index + 1}", value))
            else:
                network = given.from_module(value, shape)
        except FdgError as error:
            raise FdgError(f"{table.where}: {error}") from None
        accuracy = table.number("accuracy", 0.0, strict=False) if "accuracy" in content else None
        if accuracy is not None and accuracy > 1:
            raise table.invalid_value("accuracy", accuracy, "a number from 0 to 1")
        return space.given(
            title, list(network.layers), accuracy=accuracy, branches=network.branches, **fields
        )
    if "accuracy" in content:
        raise FdgError(
            f"{table.where}: the key accuracy is for a fixed network, and a space is given: leave the key out"
            " (the table [accuracy] says where the accuracies of a space come from)"
        )
    if value not in space.SPACES:
        raise table.unknown_value("space", value, space.SPACES)
    sizes = {key: table.integer(key, 1, 1, 4096) for key in _SPACE_KEYS.split() if key in content}
    try:
        return space.SPACES[value](title, **sizes, **fields)
    except TypeError:
        raise FdgError(f"{table.where}: space '{value}' has no classes: leave them out") from None
    except FdgError as error:
        raise FdgError(f"{table.where}: {error}") from None


def specs(name: str, content: Mapping[str, Any], technology: Technology) -> Specs:
    """Specs from a table such as {"latency_ms": 0.8}; `name` begins the messages of errors."""
    return _limits(_Table(name, "", content), technology)
