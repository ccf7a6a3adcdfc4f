"""A schedule: the programs of each group, the transfers between groups, and the loops that the host runs.

`partition` makes it, and the engine runs it. Its steps are plain values that refer to arrays by `Value`. A
printed schedule has donated inputs in brackets:

    actors: act+step(a, [b]) -> c, d
    actors -> learners: d
    learners: learn([e], d) -> f
    learners -> actors: f, for the next iteration
    carry f to a on actors, c to b on actors, f to e on learners

`lends to` in place of `->` frees the source's copy, which comes back after its last use (`unsharding`).
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from jax.extend import core

from fdg import jaxprs
from fdg.jax_internals import ClosedJaxpr
from fdg.placing.layout import Layout
from fdg.placing.resharding import Change


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A variable on one group: the operands and results of programs and transfers."""

    variable: core.Var
    group: str
    axis: int | None  # its batch axis; None if the value is replicated
    layout: Layout | None = None  # its layout on the group's devices; None until `sharded.lay_out`

    @property
    def bytes(self) -> int:
        """The bytes of the global array."""
        return jaxprs.bytes_of(self.variable.aval)

    @property
    def dtype(self) -> Any:
        """The dtype of its elements."""
        return self.variable.aval.dtype  # type: ignore[attr-defined]

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(self.variable.aval.shape)  # type: ignore[attr-defined]

    @property
    def laid_out(self) -> Layout:
        """The layout; only for values of a schedule to which `sharded.lay_out` has added layouts."""
        assert self.layout is not None
        return self.layout


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A run of a program on a group."""

    name: str
    group: str
    fragments: tuple[str, ...]  # the names of its fragments in program order
    equations: tuple[core.JaxprEqn, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    freed: frozenset[int] = frozenset()  # positions of the inputs that are not used afterwards
    donated: frozenset[int] = frozenset()  # freed inputs whose memory a result can reuse

    @functools.cached_property
    def jaxpr(self) -> ClosedJaxpr:
        """The program as a function of its inputs, for printing and analysis."""
        inputs, outputs = (
            tuple(value.variable for value in values) for values in (self.inputs, self.outputs)
        )
        return _shared_jaxpr(inputs, outputs, self.equations)


@functools.lru_cache(maxsize=256)
def _shared_jaxpr(
    inputs: tuple[core.Var, ...], outputs: tuple[core.Var, ...], equations: tuple[core.JaxprEqn, ...]
) -> ClosedJaxpr:
    """One jaxpr for all plans with the same program, because other caches use the identity of jaxprs."""
    return jaxprs.build(inputs, outputs, equations, checked=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """A transfer of values from one group to another."""

    source: str  # the name of a group, as `target`
    target: str
    pairs: tuple[tuple[Value, Value], ...]  # (value on the source, its copy on the target)
    sources: tuple[str, ...]  # the fragments that compute the values
    targets: tuple[str, ...]  # the fragments that use the values
    # when the target uses the values; "": in this trip; "step": in the loop's next trip; "iteration": in the
    # next iteration
    delay: str = ""
    freed: frozenset[int] = frozenset()  # positions of the values that the source does not use afterwards
    # the resharding of each pair if both groups are on the same devices; else empty
    changes: tuple[Change, ...] = ()
    donates: bool = False  # True if each source value is freed as soon as the target has it


@dataclasses.dataclass(frozen=True, eq=False)
class Repeat:
    """A loop that the host runs."""

    trips: int
    enter: tuple[tuple[Value, Value], ...]  # (outer, inner): initial values and constants
    # positions in `enter` of values to copy, because the body donates them and they are also used elsewhere
    copied: frozenset[int]
    steps: tuple["Step", ...]
    carry: tuple[tuple[Value, Value], ...]  # (end of a trip, start of the next)
    leave: tuple[tuple[Value, Value], ...]  # (inner, outer): the loop's results, from the last trip


Step: TypeAlias = Call | Move | Repeat
Fact = TypeVar("Fact")  # see `ScheduleWalk`


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The steps of one iteration in order."""

    steps: tuple[Step, ...]
    # for each leaf of the state, its values between iterations on the groups that keep it; the first is the
    # primary copy
    leaves: tuple[tuple[Value, ...], ...]
    # (position in `SteppedPlan.constants`, the value that is initialised with this constant)
    constants: tuple[tuple[int, Value], ...]
    carry: tuple[tuple[Value, Value], ...]  # (end of an iteration, start of the next)
    metrics: tuple[Value, ...]  # the value of each metric

    def calls(self) -> Iterable[tuple[Call, int]]:
        """Every program with its runs per iteration."""
        return ((step, times) for step, times in all_steps(self.steps) if isinstance(step, Call))

    def moves(self) -> Iterable[tuple[Move, int]]:
        """Every transfer with its runs per iteration."""
        return ((step, times) for step, times in all_steps(self.steps) if isinstance(step, Move))

    def __str__(self) -> str:
        names = VariableNames()
        return "\n".join([*_lines(self.steps, names), *_carry_line(self.carry, names)])


def uses(step: Step) -> tuple[Value, ...]:
    """The values that a step reads."""
    if isinstance(step, Call):
        return step.inputs
    return tuple(a for a, _ in (step.pairs if isinstance(step, Move) else step.enter))


def defs(step: Step) -> tuple[Value, ...]:
    """The values that a step defines."""
    if isinstance(step, Call):
        return step.outputs
    return tuple(b for _, b in (step.pairs if isinstance(step, Move) else step.leave))


def all_steps(steps: Sequence[Step], times: int = 1) -> Iterable[tuple[Step, int]]:
    """All steps, including those in loops, each with its number of runs, if `steps` run `times` times."""
    for step in steps:
        yield step, times
        if isinstance(step, Repeat):
            yield from all_steps(step.steps, times * step.trips)


class VariableNames:
    """Short names of variables in order of use: a, b, ..., z, ba, ..."""

    def __init__(self) -> None:
        self._names: dict[core.Var, str] = {}

    def __call__(self, variable: core.Var) -> str:
        """The name of a variable."""
        if variable not in self._names:
            number, name = len(self._names), ""
            while number or not name:
                number, digit = divmod(number, 26)
                name = chr(ord("a") + digit) + name
            self._names[variable] = name
        return self._names[variable]

    def listed(self, variables: Iterable[core.Var]) -> str:
        """Several names, separated by commas."""
        return ", ".join(map(self, variables))


def _lines(steps: Sequence[Step], names: VariableNames) -> Iterable[str]:
    """The lines that describe steps."""
    for step in steps:
        if isinstance(step, Call):
            reads = [(i in step.donated, names(value.variable)) for i, value in enumerate(step.inputs)]
            operands = ", ".join(f"[{name}]" if donated else name for donated, name in reads)
            yield f"{step.group}: {step.name}({operands}) -> {names.listed(v.variable for v in step.outputs)}"
        elif isinstance(step, Move):
            delay = f", for the next {step.delay}" if step.delay else ""
            values = names.listed(a.variable for a, _ in step.pairs)
            verb = " lends to " if step.donates else " -> "
            yield f"{step.source}{verb}{step.target}: {values}{delay}"
        else:
            initial = (f"{names(b.variable)}={names(a.variable)}" for a, b in step.enter if a is not b)
            yield f"{step.trips} trips of ({', '.join(dict.fromkeys(initial))}):"
            body_lines = [*_lines(step.steps, names), *_carry_line(step.carry, names)]
            yield from ("  " + line for line in body_lines)
            results = (f"{names(b.variable)}={names(a.variable)}" for a, b in step.leave)
            yield f"  out come {', '.join(dict.fromkeys(results))}"


def _carry_line(pairs: Sequence[tuple[Value, Value]], names: VariableNames) -> list[str]:
    carried = (f"{names(a.variable)} to {names(b.variable)} on {b.group}" for a, b in pairs)
    return [f"carry {', '.join(carried)}"] if pairs else []


class ScheduleWalk(Generic[Fact]):
    """Walks over the steps of a schedule in the engine's order, and derives a fact about each value.

    A subclass defines what a fact is, such as the time at which the value is available.
    """

    def __init__(self, missing: Fact):
        # The fact about each value; `missing` for a value that no step has defined.
        self.facts: dict[Value, Fact] = collections.defaultdict(lambda: missing)

    def call(self, call: Call) -> None:
        """Adds the facts about a program's results."""
        raise NotImplementedError

    def move(self, move: Move) -> None:
        """Adds the facts about values that arrive."""
        self.rebind(move.pairs)

    def trips(self, repeat: Repeat) -> int:
        """The number of trips of a loop to walk over."""
        return repeat.trips

    def walk(self, steps: Iterable[Step]) -> None:
        """Walks over steps, and over the trips of loops."""
        for step in steps:
            if isinstance(step, Call):
                self.call(step)
            elif isinstance(step, Move):
                self.move(step)
            else:
                self.rebind(step.enter)
                for trip in range(trips := self.trips(step)):
                    self.walk(step.steps)
                    if trip < trips - 1:
                        self.rebind(step.carry)
                self.rebind(step.leave)

    def rebind(self, pairs: Iterable[tuple[Value, Value]]) -> None:
        """Copies the fact about the first value of each pair to the second, for all pairs at once."""
        self.facts.update([(b, self.facts[a]) for a, b in pairs])
