"""Live ranges: each program's inputs and outputs, when a value is freed, and which inputs are donated.

One backward pass over the steps of a draft, with the set of values that are needed later:

    actors: act        takes w, x (x is not needed afterwards: freed); gives a (needed: it crosses)
    actors -> learners: a            a is not needed on the actors afterwards: freed
    learners: learn    takes a, w; gives w' of w's shape: w is freed and donated, w' is written over it
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from fdg.placing.scheduling.drafts import CrossingDraft, Draft, LoopDraft, ProgramDraft, StepDraft
from fdg.placing.scheduling.naming import Origins
from fdg.placing.scheduling.schedule import Call, Move, Repeat, Step, Value


@dataclasses.dataclass(frozen=True)
class Lifetimes:
    """Makes the steps of a schedule from those of a draft.

    Attributes:
      names: the name of each program.
      origins: the fragments that each variable comes from.
    """

    names: Mapping[ProgramDraft, str]
    origins: Origins

    def steps(self, draft: Draft, next_trip: str) -> tuple[Step, ...]:
        """The steps of an ordered draft; `next_trip` is what it repeats: "iteration", or "step" of a loop."""
        needed_later: set[Value] = set(draft.kept)
        steps: list[Step] = []
        for step in reversed(draft.steps):
            reads = _reads(step, draft)
            kept = needed_later | draft.constants
            freed = frozenset(i for i, value in enumerate(reads) if value not in kept)
            if isinstance(step, ProgramDraft):
                steps.append(self._call(step, draft, reads, needed_later, freed))
            elif isinstance(step, CrossingDraft):
                steps.append(self._move(step, freed, next_trip))
            else:
                steps.append(self._repeat(step, kept))
            needed_later.update(reads)
        return tuple(reversed(steps))

    def _call(
        self,
        program: ProgramDraft,
        draft: Draft,
        inputs: Sequence[Value],
        needed_later: set[Value],
        freed: frozenset[int],
    ) -> Call:
        made = dict.fromkeys(v for op in program.operations for v in op.outputs)
        outputs = [value for v in made if (value := draft.values(v, program.group)) in needed_later]
        return Call(
            self.names[program],
            program.group,
            program.fragments,
            tuple(op.eqn for op in program.operations),
            tuple(inputs),
            tuple(outputs),
            freed,
            _donated(inputs, outputs, freed),
        )

    def _move(self, crossing: CrossingDraft, freed: frozenset[int], next_trip: str) -> Move:
        arrivals = crossing.arrivals
        sources = [name for a in arrivals for name in self.origins.get(a.source.variable, ())]
        targets = [name for a in arrivals for name in a.users]
        return Move(
            crossing.source,
            crossing.target,
            tuple((a.source, a.target) for a in arrivals),
            tuple(dict.fromkeys(sources)),
            tuple(dict.fromkeys(targets)),
            next_trip if crossing.for_next_trip else "",
            freed,
        )

    def _repeat(self, loop: LoopDraft, kept: set[Value]) -> Repeat:
        """A loop that the host steps; carried inputs are copied if they are needed again.

        The body may donate what it carries. So an input is copied if it is read after the loop, or enters it
        in two places.
        """
        entries = collections.Counter(outer for outer, _ in loop.enter)
        copied = frozenset(
            i
            for i, (outer, inside) in enumerate(loop.enter)
            if inside in loop.carried and (entries[outer] > 1 or outer in kept)
        )
        steps = self.steps(loop.body, "step")
        return Repeat(loop.loop.trips, loop.enter, copied, steps, loop.carry, loop.leave)


def _reads(step: StepDraft, draft: Draft) -> list[Value]:
    if isinstance(step, CrossingDraft):
        return [arrival.source for arrival in step.arrivals]
    if isinstance(step, LoopDraft):
        return [outer for outer, _ in step.enter]
    inner = {v for op in step.operations for v in op.outputs}
    outside = dict.fromkeys(v for op in step.operations for v in op.inputs if v not in inner)
    return [draft.values(v, step.group) for v in outside]


def _donated(inputs: Sequence[Value], outputs: Sequence[Value], freed: frozenset[int]) -> frozenset[int]:
    """The freed inputs to donate: at most one for each output of the same shape, dtype and batch axis."""
    room = collections.Counter(_kind(value) for value in outputs)
    donated = set()
    for i in sorted(freed):
        if room[_kind(inputs[i])]:
            room[_kind(inputs[i])] -= 1
            donated.add(i)
    return frozenset(donated)


def _kind(value: Value) -> tuple:
    return value.shape, value.dtype, value.axis
