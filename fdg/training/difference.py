"""`fdg.diff` finds where two runs differ; `fdg.record` records a run for a comparison on another machine."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fdg.agents import first_start, of_seeds
from fdg.arguments import check_at_least, checked
from fdg.errors import FdgError, escape_unprintable, host_errors, listed
from fdg.kinds import to_json
from fdg.running.xla_options import jit
from fdg.training.checkpoint import Checkpoints
from fdg.training.loading import load
from fdg.training.recording import (
    ArrayDifference,
    Recording,
    array_difference,
    read_recording,
    write_recording,
)
from fdg.training.replaying import Replay
from fdg.training.run import Run
from fdg.training.run_directory import CHECKPOINTS, read_config, read_metrics, read_summary, to_json_types
from fdg.training.settings import flatten_config
from fdg.training.space import parse_grid, points_of
from fdg.training.stepping import OLDER, Border
from fdg.training.summary import versions

# Entries of `config.json` that differ between any two runs.
_NOT_COMPARED = ("id", "out", "command", "resumes")
_MAX_LISTED = 4  # maximum number of settings or versions in a message


@dataclasses.dataclass(frozen=True)
class Difference:
    """The result of `fdg.diff`: where two runs differ. Prints as a report.

    Attributes:
      a, b: the compared runs.
      iteration: the first iteration whose values differ; None if no difference was found. Iteration n ends
        with the state after n iterations; 0 is the initial state.
      fragment: the fragment that computed the first differing value; None if no fragment did.
      call: the number of that fragment's call in the iteration, from 1; for a value computed between nested
        calls, the number of the call that reads it.
      where: the border at which the difference was found.
      arrays: the arrays that differ at this border, in their order.
      start: the state that both runs were replayed from; "" without a replay.
      compared: the number of arrays that were compared and equal before the first difference.
      notes: differences in metrics, settings and versions, and limits of the comparison.
    """

    a: str
    b: str
    iteration: int | None = None
    fragment: str | None = None
    call: int | None = None
    where: str = ""
    arrays: tuple[ArrayDifference, ...] = ()
    start: str = ""
    compared: int = 0
    notes: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether a difference was found."""
        return self.iteration is not None

    @property
    def array(self) -> ArrayDifference | None:
        """The first array that differs."""
        return self.arrays[0] if self.arrays else None

    def __str__(self) -> str:
        lines = [f"{self.a} and {self.b}: {self._heading()}", *(f"  {line}" for line in self.notes)]
        if self.start:
            lines.append(f"  replayed: from {self.start}; {self.compared:,} arrays were equal")
        if self.where:
            lines.append(f"  at: {self.where}")
        if array := self.array:
            kinds = " and ".join(dict.fromkeys(array.kinds))
            lines += [f"  array: {array.name} {kinds}", f"  by: {_size_text(array)}"]
        if names := [array.name for array in self.arrays[1:4]]:
            suffix = f" and {len(self.arrays) - 4} more" if len(self.arrays) > 4 else ""
            lines.append(f"  also: {', '.join(names)}{suffix}")
        return "\n".join(map(escape_unprintable, lines))  # names may come from untrusted files

    def _heading(self) -> str:
        if self.iteration is None:
            return "no difference"
        if self.iteration == 0:
            return "they differ in the initial state"
        place = ", between fragments" if self.where else ""
        if self.fragment is not None:
            place = f", in fragment `{self.fragment}`"
        return f"they first differ in iteration {self.iteration:,}{place}"


@checked
def diff(
    a: Run | str | Path,
    b: Run | str | Path,
    *,
    iterations: int | None = None,
    checkpoint: int | None = None,
    tolerance: float = 0.0,
    agent: int = 0,
    trust: bool = False,
) -> Difference:
    """Finds the first iteration, and in it the first fragment, whose values differ between two runs.

    For two run directories, metrics and checkpoints are compared first. If they differ, both runs are
    replayed from the last equal checkpoint (or from `init`), each with as many devices as in its training, if
    this machine has them. A recording (`fdg.record`) is compared with a replay from its first state. A `Run`
    without a directory is replayed from its state.

    Args:
      a: a run directory, a recording, or a `Run`.
      b: a second run directory, recording or `Run`.
      iterations: the maximum number of iterations to replay; None: all iterations of a recording, else the
        iterations up to the first row of metrics that differs, else 1.
      checkpoint: the iteration to replay from, 0 for `init`; None: the last equal checkpoint.
      tolerance: floats x and y are equal if |x - y| <= tolerance * (1 + |y|); 0 compares bits.
      agent: the position of the agent to replay.
      trust: import your own modules that the runs name.

    Raises:
      FdgError: a run or a recording cannot be read, or there is nothing to replay.

    Example::

        print(fdg.diff("runs/before", "runs/after"))
    """
    if not 0 <= tolerance < float("inf"):
        raise FdgError(f"tolerance={tolerance!r}: give a number from 0 on")
    check_at_least(1, iterations=iterations)
    check_at_least(0, checkpoint=checkpoint)
    sides = _Side.read(a), _Side.read(b)
    names = sides[0].name, sides[1].name
    if not all(side.recording for side in sides):
        for side in sides:
            side.check_agent(agent)
    notes = _describe_unequal_settings(*sides)
    if any(side.recording for side in sides):
        return _compare_recordings(sides, iterations, tolerance, agent, trust, notes)
    start = checkpoint
    first_unequal: int | None = None
    if checkpoint is None and sides[0].agents != sides[1].agents:
        start = None if any(side.path is None for side in sides) else 0
    elif checkpoint is None:
        first_unequal, metric_notes = _compare_metrics(*sides, tolerance)
        notes = [*metric_notes, *notes]
        start, unequal = _compare_checkpoints(*sides, first_unequal, tolerance)
        first_unequal = min((n for n in (first_unequal, unequal) if n is not None), default=None)
        has_compared = bool(start or (metric_notes and start is not None))
        if has_compared and first_unequal is None and iterations is None:
            return Difference(*names, notes=tuple(notes))
        if start is not None and sides[0].delay != sides[1].delay:
            start = 0  # the checkpoints have different older parameters
    runs = [side.load(start, trust) for side in sides]
    # Either both replays are placed by their policies or neither is, so that both are compiled alike.
    may_place = all(run.agents is None for run in runs)
    replays = [Replay(run, agent, trust, may_place) for run in runs]
    notes += dict.fromkeys(line for replay in replays for line in replay.notes)
    start_iteration = runs[0].iteration
    end = start_iteration + (iterations or max((first_unequal or 0) - start_iteration, 1))
    source = "the states in memory" if start is None else f"checkpoint {start:,}" if start else "init"
    with host_errors():
        start_iteration = _skip_equal_iterations(replays, start_iteration, end, tolerance)
        borders = [replay.borders(start_iteration, end) for replay in replays]
        found = Difference(*names, start=source, notes=tuple(notes))
        found = _first_difference(found, borders, tolerance)
    if not found.differs and first_unequal is not None:
        kinds = [line.partition(":")[0] for line in notes if line.startswith(("settings:", "versions:"))]
        cause = f"the {listed(kinds, 'and')} above" if kinds else "code, versions or devices"
        verb = "explain it" if kinds else "differed"
        fix = "to see where, record each run where it was trained"
        if (runs[0].agents or 1) > 1:
            fix = f"give another agent than {agent}, or {fix}"
        notes.append(f"replay: no difference on this machine, so {cause} {verb}: {fix}")
        return dataclasses.replace(found, iteration=first_unequal, notes=tuple(notes))
    return found


@checked
def record(
    run: Run | str | Path,
    path: str | Path,
    *,
    iterations: int = 1,
    checkpoint: int | None = None,
    agent: int = 0,
    limit_mb: int = 64,
    trust: bool = False,
) -> Path:
    """Replays iterations of a run and records every fragment's inputs and results for `fdg.diff`.

    Args:
      run: a run directory, or a `Run`, which is replayed from its state.
      path: the file to write, an .npz of arrays and JSON.
      iterations: the number of iterations.
      checkpoint: the iteration to start from, 0 for `init`; None for the newest checkpoint.
      agent: the position of the agent.
      limit_mb: maximum MiB of arrays to store besides the state; only digests of further arrays are stored.
      trust: import your own modules that the run names.

    Returns:
      The file.

    Raises:
      FdgError: there is no such run or checkpoint, or the file cannot be written.
    """
    check_at_least(1, iterations=iterations)
    check_at_least(0, limit_mb=limit_mb)
    side = _Side.read(run)
    if side.recording is not None:
        raise FdgError(f"{run} is a recording: give a run directory")
    start = side.load(checkpoint, trust)
    replay = Replay(start, agent, trust)
    metadata = {
        "of": side.name,
        "iteration": start.iteration,
        "iterations": iterations,
        "versions": versions(),
        "settings": to_json_types(dict(start.config)),
    }
    end = start.iteration + iterations
    with host_errors():
        return write_recording(Path(path), metadata, replay.borders(start.iteration, end), limit_mb << 20)


@dataclasses.dataclass(frozen=True)
class _Side:
    """One of the two compared runs: in a directory, in memory, or recorded."""

    name: str
    config: Mapping[str, Any]
    path: Path | None = None  # the run directory
    run: Run | None = None  # a run in memory
    recording: Recording | None = None

    @classmethod
    def read(cls, run: Run | str | Path) -> "_Side":
        if isinstance(run, Run):
            name = str(run.path or f"the run of {type(run.algorithm).__name__}")
            return cls(name, run.config, run.path, run)
        path = Path(run)
        if os.path.isdir(path):
            return cls(str(run), read_config(path, prefix=""), path)
        if not os.path.exists(path):
            raise FdgError(f"{path}: is neither a run directory nor a recording: give the path of one")
        recording = read_recording(path)
        return cls(str(run), recording.facts["settings"], recording=recording)

    @property
    def agents(self) -> int | None:
        """The number of agents; None if the state has no axis of agents."""
        if self.run is not None:
            return self.run.agents
        sweep, num_seeds = self.config.get("sweep"), self.config.get("num_seeds")
        if sweep is None:
            return num_seeds
        return len(points_of(parse_grid(str(sweep)))) * (num_seeds or 1)

    @property
    def delay(self) -> tuple[Any, Any]:
        """The staleness in iterations, and the lag in micro-batches."""
        return self.config.get("staleness") or 0, self.config.get("lag") or 0

    def check_agent(self, agent: int) -> None:
        """Raises `FdgError` if there is no agent at this position."""
        count = self.agents or 1
        if self.recording is None and not 0 <= agent < count:
            agents = "one agent, 0" if count == 1 else f"{count} agents, 0 to {count - 1}"
            raise FdgError(f"agent={agent}: {self.name} has {agents}")

    def versions(self, replayed_here: bool) -> Mapping[str, Any]:
        """The package versions that computed the values: from the recording, this process or the training."""
        if self.recording is not None:
            return self.recording.facts["versions"]
        trained_path = self.path if self.run is None and not replayed_here else None
        stored = None if trained_path is None else (read_summary(trained_path) or {}).get("versions")
        return stored if isinstance(stored, dict) else versions()

    def load(self, start: int | None, trust: bool) -> Run:
        """Loads the run at a checkpoint; `start=0` gives the initial state, None the newest state."""
        if self.run is not None and (self.path is None or start is None):
            return self.run
        algorithm = None if self.run is None else self.run.algorithm
        run = load(str(self.path), algorithm=algorithm, checkpoint=start or "last", trust=trust)
        if start == 0:
            agents = of_seeds(run.algorithm, run.agents)
            run.state, run.iteration = jit(agents.init)(first_start(agents, run.seed)), 0
            run._history = None
        return run


def _describe_unequal_settings(a: _Side, b: _Side) -> list[str]:
    """Messages about settings and versions that differ."""
    lines = []
    if a.config and b.config:
        unequal_settings = _unequal_items(flatten_config(a.config), flatten_config(b.config))
        if compared := {name: pair for name, pair in unequal_settings.items() if name not in _NOT_COMPARED}:
            lines.append(f"settings: {_list_pairs(compared)}")
    replayed_here = a.recording is not None or b.recording is not None
    if unequal_versions := _unequal_items(a.versions(replayed_here), b.versions(replayed_here)):
        lines.append(f"versions: {_list_pairs(unequal_versions)}")
    if a.agents != b.agents:
        counts = ["one" if side.agents is None else str(side.agents) for side in (a, b)]
        lines.append(
            f"agents: {' and '.join(counts)}: metrics (means over agents) and checkpoints are not compared;"
            " programs of one and of several agents differ by rounding"
        )
    return lines


def _unequal_items(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    pairs = {name: [to_json(a.get(name)), to_json(b.get(name))] for name in (*a, *b)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _list_pairs(pairs: Mapping[str, Any]) -> str:
    texts = [f"{name} {old!s:.40} and {new!s:.40}" for name, (old, new) in [*pairs.items()][:_MAX_LISTED]]
    num_unlisted = len(pairs) - _MAX_LISTED
    return ", ".join(texts) + (f" and {num_unlisted} more" if num_unlisted > 0 else "")


def _compare_metrics(a: _Side, b: _Side, tolerance: float) -> tuple[int | None, list[str]]:
    """The first iteration whose metrics differ (or None), and a message."""
    metrics = [[] if side.path is None else read_metrics(side.path / "metrics.jsonl") for side in (a, b)]
    rows = [{row["iteration"]: row for row in run_rows} for run_rows in metrics]
    common = sorted(rows[0].keys() & rows[1].keys())
    for iteration in common:
        row_a, row_b = rows[0][iteration], rows[1][iteration]
        for name, x in row_a.items():
            if name in row_b and not name.endswith("_s") and not _is_close(x, y := row_b[name], tolerance):
                place = f"metrics: row {iteration:,} is the first that differs"
                return iteration, [f"{place}: {name} {x!s:.40} and {y!s:.40}"]
    return None, [f"metrics: {len(common):,} rows are equal"] if common else []


def _is_close(a: Any, b: Any, tolerance: float) -> bool:
    """Whether two metrics (numbers or lists) are equal within a tolerance."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_is_close(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if a is None or b is None or isinstance(a, list) or isinstance(b, list):
        return a is b
    return a == b or abs(a - b) <= tolerance * (1 + abs(b))


def _compare_checkpoints(
    a: _Side, b: _Side, limit: int | None, tolerance: float
) -> tuple[int | None, int | None]:
    """The iterations of the last equal checkpoint and of the first unequal one after it.

    Checkpoints from iteration `limit` on are skipped. The last equal one is 0 (init) if none is equal. Both
    are None for runs without directories.
    """
    if a.path is None or b.path is None:
        return None, None
    checkpoints_a, checkpoints_b = (Checkpoints(path / CHECKPOINTS) for path in (a.path, b.path))
    first_unequal = None
    for iteration in sorted({*checkpoints_a.iterations()} & {*checkpoints_b.iterations()}, reverse=True):
        is_damaged = checkpoints_a.damage(iteration) or checkpoints_b.damage(iteration)
        if is_damaged or (limit is not None and iteration >= limit):
            continue
        arrays_a, arrays_b = checkpoints_a.arrays(iteration), checkpoints_b.arrays(iteration)
        if a.delay != b.delay:
            arrays_a, arrays_b = _algorithm_arrays(a, arrays_a), _algorithm_arrays(b, arrays_b)
        if arrays_a.keys() == arrays_b.keys() and all(
            array_difference(name, arrays_a[name], arrays_b[name], tolerance) is None for name in arrays_a
        ):
            return iteration, first_unequal
        first_unequal = iteration
    return 0, first_unequal


def _algorithm_arrays(side: _Side, arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays of the algorithm's state in a checkpoint, without older parameters."""
    if not any(side.delay):
        return arrays
    return {name.removeprefix("state/"): x for name, x in arrays.items() if name.startswith("state/")}


def _skip_equal_iterations(replays: list[Replay], start: int, end: int, tolerance: float) -> int:
    """Replays iterations up to `end - 1`, or until states differ; returns the last with equal states."""
    for iteration in range(start, end - 1):
        results = [list(r.stepper.run_iteration(*r.leaves))[: len(r.leaves)] for r in replays]
        states = [r.stepper.state(iteration + 1, x) for r, x in zip(replays, results, strict=True)]
        pairs = ((name, value, states[1].arrays.get(name)) for name, value in states[0].arrays.items())
        if any(
            not name.startswith(OLDER) if b is None else array_difference(name, a, b, tolerance)
            for name, a, b in pairs
        ):
            return iteration
        for replay, leaves in zip(replays, results, strict=True):
            replay.leaves = leaves
    return max(start, end - 1)


def _compare_recordings(
    sides: tuple[_Side, _Side],
    iterations: int | None,
    tolerance: float,
    agent: int,
    trust: bool,
    notes: list[str],
) -> Difference:
    """Compares two recordings, or a recording with a replay from the recording's first state."""
    recording = next(side.recording for side in sides if side.recording is not None)
    start_iteration, count = recording.facts["iteration"], recording.facts["iterations"]
    end = start_iteration + min(iterations or count, count)
    borders: list[Iterable[Border]] = []
    for side in sides:
        if side.recording is not None:
            borders.append(border for border in side.recording.borders if border.iteration <= end)
            continue
        replay = Replay(side.load(None, trust), agent, trust)
        replay.replace_state(recording.borders[0])
        notes += replay.notes
        borders.append(replay.borders(start_iteration, end))
    start = f"the state after iteration {start_iteration:,} of {recording.facts['of']:.80}"
    found = Difference(sides[0].name, sides[1].name, start=start, notes=tuple(notes))
    with host_errors():
        return _first_difference(found, borders, tolerance)


def _first_difference(found: Difference, borders: Iterable[Iterable[Border]], tolerance: float) -> Difference:
    """`found` with the first of these borders at which two programs differ; `compared` is set in any case.

    Skips arrays that only one program has, since JAX versions pass different constants to fragments.
    """
    compared = 0
    for a, b in zip_longest(*borders):
        if a is None or b is None or a.place != b.place:
            border, other = (b, None) if a is None else (a, b)
            fragment, arrays = border.fragment, []
            where = f"{border}, where the other has {other or 'its end'}: their programs differ"
            break
        pairs = [(name, x, b.arrays[name]) for name, x in a.arrays.items() if name in b.arrays]
        arrays = [x for pair in pairs if (x := array_difference(*pair, tolerance)) is not None]
        if arrays:
            # The inputs of a fragment were computed in the enclosing fragment, if any.
            border, fragment = a, {"result": a.fragment, "input": a.parent, "state": ""}[a.side]
            is_end = a.side == "state" and compared
            where = "the state and metrics at the end of the iteration" if is_end else str(a)
            break
        compared += len(pairs)
    else:
        return dataclasses.replace(found, compared=compared)
    return dataclasses.replace(
        found,
        iteration=border.iteration,
        fragment=fragment or None,
        call=border.call or None,
        where=where,
        arrays=tuple(arrays),
        compared=compared,
    )


def _size_text(array: ArrayDifference) -> str:
    """The size of an array's difference, as text."""
    if array.kinds[0] != array.kinds[1]:
        return "its dtype or shape"
    if array.count is None:
        return "its bits (the recording has no room for its elements: raise the limit)"
    ulps = "" if array.ulps is None else f" ({array.ulps:,} in units in the last place)"
    return (
        f"{array.max_abs:.3g} at most{ulps}, in {array.count:,} of {array.size:,} elements;"
        f" {array.values[0]!r} and {array.values[1]!r} at {list(array.at)}"
    )
