"""`fdg.diff` finds where two runs differ; `fdg.record` records a run for a comparison on another machine."""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax

import fdg
from fdg import jaxprs, keys
from fdg.agents import first_start, of_seeds
from fdg.arguments import check_at_least, checked
from fdg.errors import FdgError, host_errors, listed
from fdg.kinds import to_json
from fdg.lowering import host_calls
from fdg.training.checkpoint import Checkpoints
from fdg.training.description import rebuild_policy
from fdg.training.loading import device_count, load
from fdg.training.name_resolver import NameResolver
from fdg.training.recording import (
    ArrayDifference,
    BorderDifference,
    Recording,
    array_difference,
    describe_border,
    dtype_and_shape,
    first_difference,
    read_recording,
    until,
    write_recording,
)
from fdg.training.run import Run
from fdg.training.run_directory import CHECKPOINTS, plain, read_config, read_metrics, read_summary
from fdg.training.settings import flat
from fdg.training.stepping import Border, Stepper
from fdg.training.summary import versions

Comparable: TypeAlias = Run | str | Path
_NOT_COMPARED = ("id", "out", "command", "resumes")
_SHOWN = 4  # settings, versions


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two runs differ; `print` it. The result of `fdg.diff`.

    Attributes:
      a, b: the compared runs.
      iteration: the first iteration whose values differ; None if no difference was found. Iteration n ends
        with the state after n iterations; 0 is the initial state.
      fragment: the fragment that computed the first differing value; None if it was outside of fragments.
      call: the call of that fragment in the iteration, from 1; for a value computed between nested calls,
        that of the fragment that reads it.
      where: the border at which the difference was seen.
      arrays: the arrays that differ there, the first one first.
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
        for each in self.arrays[:1]:
            lines += [f"  array: {each.name} {' and '.join(dict.fromkeys(each.kinds))}", f"  by: {_by(each)}"]
        if len(self.arrays) > 1:
            lines.append(f"  also: {', '.join(each.name for each in self.arrays[1:4])}" + (
                f" and {len(self.arrays) - 4} more" if len(self.arrays) > 4 else ""))  # fmt: skip
        return "\n".join(lines)

    def _heading(self) -> str:
        if self.iteration is None:
            return "no difference"
        if self.iteration == 0:
            return "they part in the first state"
        if self.fragment is not None:
            return f"they part in iteration {self.iteration:,}, in fragment `{self.fragment}`"
        between = ", between fragments" if self.where else ""
        return f"they part in iteration {self.iteration:,}{between}"


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
    replayed from the last equal checkpoint (or from `init`), each with the devices of its plan if this
    machine has as many. A recording (`fdg.record`) is compared with a replay from its first state. A `Run`
    without a directory is replayed from its state.

    Args:
      a: a run directory, a recording, or a `Run`.
      b: another one.
      iterations: the most iterations to replay; None for those of a recording, those up to the first row of
        metrics that differs, or 1.
      checkpoint: the iteration to replay from, 0 for `init`; None to choose.
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
    sides = _Side.of(a), _Side.of(b)
    names = sides[0].name, sides[1].name
    notes = _settings_and_versions(*sides)
    if any(one.recording for one in sides):
        return _compare_recordings(sides, iterations, tolerance, agent, trust, notes)
    first, more = (None, []) if checkpoint is not None else _by_metrics(*sides, tolerance)
    notes = [*more, *notes]
    start, equal = checkpoint, False
    if start is None:
        start, unequal = _by_checkpoints(*sides, first, tolerance)
        first = min((n for n in (first, unequal) if n is not None), default=None)
        equal = first is None and bool(start or (more and start is not None))  # rows or a checkpoint are
    if equal and iterations is None:
        return Difference(*names, start="", notes=tuple(notes))
    runs = [one.at(start, trust) for one in sides]
    steppers = [_Replay(run, agent, trust) for run in runs]
    notes += dict.fromkeys(line for each in steppers for line in each.notes)
    begin = runs[0].iteration
    last = begin + (iterations or max((first or 0) - begin, 1))
    with host_errors():
        begun = _forward(steppers, begin, last, tolerance)
        one, two = (each.borders(begun, last) for each in steppers)
        found, compared = first_difference(one, two, tolerance)
    of = "the states held" if start is None else f"checkpoint {start:,}" if start else "init"
    if found is None and first is not None:
        kinds = [line.partition(":")[0] for line in notes if line.startswith(("settings:", "versions:"))]
        cause = f"the {listed(kinds, 'and')} above" if kinds else "code, versions or devices"
        how = "explain it" if kinds else "differed"
        notes.append(f"replay: finds none here, so {cause} {how}: to see where, record each where it ran")
        return Difference(*names, first, start=of, compared=compared, notes=tuple(notes))
    return _difference(names, found, of, compared, notes)


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
      limit_mb: the most MiB of arrays to store besides the state; of further arrays only digests are stored.
      trust: import your own modules that the run names.

    Returns:
      The file.

    Raises:
      FdgError: there is no such run or checkpoint, or the file cannot be written.
    """
    check_at_least(1, iterations=iterations)
    check_at_least(0, limit_mb=limit_mb)
    side = _Side.of(run)
    if side.recording is not None:
        raise FdgError(f"{run} is a recording: give a run directory")
    begun = side.at(checkpoint, trust)
    replay = _Replay(begun, agent, trust)
    facts = {
        "of": side.name,
        "iteration": begun.iteration,
        "iterations": iterations,
        "versions": versions(),
        "settings": plain(dict(begun.config)),
    }
    last = begun.iteration + iterations
    with host_errors():
        return write_recording(Path(path), facts, replay.borders(begun.iteration, last), limit_mb << 20)


@dataclasses.dataclass(frozen=True)
class _Side:
    """A compared run: of a directory, in memory, or recorded."""

    name: str
    config: Mapping[str, Any]
    path: Path | None = None  # its directory
    run: Run | None = None  # in memory
    recording: Recording | None = None

    @classmethod
    def of(cls, one: Comparable) -> "_Side":
        if isinstance(one, Run):
            return cls(
                str(one.path or f"the run of {type(one.algorithm).__name__}"), one.config, one.path, one
            )
        path = Path(one)
        if os.path.isdir(path):
            return cls(str(one), read_config(path, prefix=""), path)
        if not os.path.exists(path):
            raise FdgError(f"{path}: there is no run directory and no recording: give the path of one")
        recording = read_recording(path)
        return cls(str(one), recording.facts["settings"], recording=recording)

    def versions(self, replayed_here: bool) -> Mapping[str, Any]:
        """The versions that computed its values: of the recording, of this process, or of the training."""
        if self.recording is not None:
            return self.recording.facts["versions"]
        trained = self.path if self.run is None and not replayed_here else None
        said_there = None if trained is None else (read_summary(trained) or {}).get("versions")
        return said_there if isinstance(said_there, dict) else versions()

    def at(self, start: int | None, trust: bool) -> Run:
        """The run with the state of a checkpoint, or the initial state."""
        if self.run is not None and (self.path is None or start is None):
            return self.run
        given = None if self.run is None else self.run.algorithm
        run = load(str(self.path), algorithm=given, checkpoint=start or "last", trust=trust)
        if start == 0:
            several = of_seeds(run.algorithm, run.agents)
            run.state, run.iteration = jax.jit(several.init)(first_start(several, run.seed)), 0
        return run


class _Replay:
    """A run to be replayed: one agent's state, and its iteration fragment by fragment."""

    def __init__(self, run: Run, agent: int, trust: bool):
        self.notes: list[str] = []
        graph, plan, devices = fdg.trace(run.algorithm), None, list(jax.devices())
        state = run._state_of(agent)
        if run.path is not None and run.agents is None and run.config.get("policy"):
            policy = rebuild_policy(
                run.config, NameResolver(run.path / "config.json", None, trust), str(run.path)
            )
            count = device_count(run.path, run.config)
            if count <= len(devices):
                devices = devices[:count]
                plan = fdg.place(graph, policy, devices)
            else:
                self.notes.append(
                    f"devices: {run.path} had {count}, and was replayed on one of the {len(devices)} here"
                )
        if plan is not None:
            graph = plan.graph
            state = state if plan.delayed is None else plan.delayed.start(state)
        if host_calls.calls_host(jaxprs.open_jaxpr(graph.jaxpr).eqns):
            self.notes.append(
                "host: environments on the host begin again in a replay, and may be what differs"
            )
        graph = dataclasses.replace(graph, jaxpr=host_calls.guard(graph.jaxpr))
        plan = None if plan is None else dataclasses.replace(plan, graph=graph)
        self.leaves: list[Any] = jax.tree.leaves(state)
        self.stepper, self._shapes = Stepper(graph, plan, devices), jax.tree.leaves(graph.state)

    def borders(self, begin: int, last: int) -> Iterator[Border]:
        """The arrays at every border of the iterations after `begin`, up to `last`."""
        return until(self.stepper.borders(begin, self.leaves), last)

    def take(self, recorded: Border) -> None:
        """Continues from a recorded state."""
        found, mine = recorded.arrays, self.stepper.state(recorded.iteration, self.leaves).arrays
        for name in [*found, *mine]:
            there, here = (dtype_and_shape(x[name]) if name in x else "absent" for x in (found, mine))
            if there != here:
                raise FdgError(
                    f"the recording is of another state: {name} is {there} there and {here} here: give a run"
                    " with the same algorithm and sizes"
                )
        recorded_leaves = zip(found.values(), self._shapes, strict=True)
        self.leaves = [keys.from_words(value.array, leaf) for value, leaf in recorded_leaves]


def _settings_and_versions(a: _Side, b: _Side) -> list[str]:
    """Messages about settings and versions that differ."""
    lines = []
    if a.config and b.config:
        different = _unequal(flat(a.config), flat(b.config))
        if compared := {name: pair for name, pair in different.items() if name not in _NOT_COMPARED}:
            lines.append(f"settings: {_listed(compared)}")
    replayed_here = a.recording is not None or b.recording is not None
    if other := _unequal(a.versions(replayed_here), b.versions(replayed_here)):
        lines.append(f"versions: {_listed(other)}")
    return lines


def _unequal(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, list[Any]]:
    pairs = {name: [to_json(one.get(name)), to_json(two.get(name))] for name in (*one, *two)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _listed(different: Mapping[str, Any]) -> str:
    shown = [f"{name} {old!s:.40} and {new!s:.40}" for name, (old, new) in [*different.items()][:_SHOWN]]
    more = len(different) - _SHOWN
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _by_metrics(a: _Side, b: _Side, tolerance: float) -> tuple[int | None, list[str]]:
    """The first iteration whose metrics differ, or None, and a message about it."""
    files = [[] if side.path is None else read_metrics(side.path / "metrics.jsonl") for side in (a, b)]
    rows = [{row["iteration"]: row for row in found} for found in files]
    common = sorted(rows[0].keys() & rows[1].keys())
    for iteration in common:
        one, two = rows[0][iteration], rows[1][iteration]
        for name in one:
            if name in two and not name.endswith("_s") and not _nearly_equal(one[name], two[name], tolerance):
                what = f"metrics: row {iteration:,} is the first that differs"
                return iteration, [f"{what}: {name} {one[name]!s:.40} and {two[name]!s:.40}"]
    return None, [f"metrics: {len(common):,} rows are equal"] if common else []


def _nearly_equal(one: Any, two: Any, tolerance: float) -> bool:
    """Whether two metrics (numbers or lists) are equal within a tolerance."""
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(
            _nearly_equal(x, y, tolerance) for x, y in zip(one, two, strict=True)
        )
    if one is None or two is None or isinstance(one, list) or isinstance(two, list):
        return one is two
    return one == two or abs(one - two) <= tolerance * (1 + abs(two))


def _by_checkpoints(a: _Side, b: _Side, first: int | None, tolerance: float) -> tuple[int | None, int | None]:
    """The last checkpoint that is equal in both runs, and the first that differs.

    The former is 0 (init) if none is equal, and None for runs without directories.
    """
    if a.path is None or b.path is None:
        return None, None
    here, there = (Checkpoints(path / CHECKPOINTS) for path in (a.path, b.path))
    unequal = None
    try:
        common = sorted({*here.iterations()} & {*there.iterations()}, reverse=True)
        for iteration in common:
            is_damaged = here.damage(iteration) or there.damage(iteration)
            if is_damaged or (first is not None and iteration >= first):
                continue
            one, two = here.arrays(iteration), there.arrays(iteration)
            if one.keys() == two.keys() and all(
                array_difference(n, one[n], two[n], tolerance) is None for n in one
            ):
                return iteration, unequal
            unequal = iteration
    finally:
        here.close()
        there.close()
    return 0, unequal


def _forward(replays: list[_Replay], begin: int, last: int, tolerance: float) -> int:
    """Replays whole iterations up to the one before the last, or to the first that differs."""
    for iteration in range(begin, last - 1):
        ends = [list(each.stepper.whole(*each.leaves))[: len(each.leaves)] for each in replays]
        states = [each.stepper.state(iteration + 1, end) for each, end in zip(replays, ends, strict=True)]
        pairs = ((name, value, states[1].arrays.get(name)) for name, value in states[0].arrays.items())
        if any(two is None or array_difference(name, one, two, tolerance) for name, one, two in pairs):
            return iteration
        for each, end in zip(replays, ends, strict=True):
            each.leaves = end
    return max(begin, last - 1)


def _compare_recordings(
    sides: tuple[_Side, _Side],
    iterations: int | None,
    tolerance: float,
    agent: int,
    trust: bool,
    notes: list[str],
) -> Difference:
    recording = next(side.recording for side in sides if side.recording is not None)
    begin, of = recording.facts["iteration"], recording.facts["of"]
    last = begin + min(iterations or recording.facts["iterations"], recording.facts["iterations"])
    borders = []
    for side in sides:
        if side.recording is not None:
            borders.append(until(iter(side.recording.recorded), last))
            continue
        replay = _Replay(side.at(None, trust), agent, trust)
        replay.take(recording.start)
        notes += replay.notes
        borders.append(replay.borders(begin, last))
    with host_errors():
        found, compared = first_difference(borders[0], borders[1], tolerance)
    names, start = (sides[0].name, sides[1].name), f"the state after iteration {begin:,} of {of:.80}"
    return _difference(names, found, start, compared, notes)


def _difference(
    names: tuple[str, str], found: BorderDifference | None, start: str, compared: int, notes: list[str]
) -> Difference:
    if found is None:
        return Difference(*names, start=start, compared=compared, notes=tuple(notes))
    border, where = found.border, describe_border(found.border)
    # The inputs of a fragment were computed in the enclosing fragment, if any.
    fragment = {"result": border.fragment, "input": border.inside, "state": ""}[border.side] or None
    if found.other is not None:
        where = f"{where}, where the other has {found.other}: their programs differ"
        fragment = border.fragment or None
    elif border.side == "state" and compared:
        where = "the state and metrics at the end of the iteration"
    return Difference(*names, border.iteration, fragment, border.call or None, where, found.arrays, start,
                      compared, tuple(notes))  # fmt: skip


def _by(each: ArrayDifference) -> str:
    """The size of an array's difference as text."""
    if each.kinds[0] != each.kinds[1]:
        return "its dtype or shape"
    if each.count is None:
        return "its bits (the recording has no room for its elements: raise the limit)"
    ulps = "" if each.ulps is None else f" ({each.ulps:,} in units in the last place)"
    return (
        f"{each.max_abs:.3g} at most{ulps}, in {each.count:,} of {each.size:,} elements;"
        f" {each.values[0]!r} and {each.values[1]!r} at {list(each.at)}"
    )
