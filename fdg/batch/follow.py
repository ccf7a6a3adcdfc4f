"""Following the batch axis through a jaxpr: where it goes, and where devices have to talk.

The border of a fragment says which axis of each input is the batch. From there on each operation does
one of three things with an axis that is split over devices:

- it carries the axis along, and every device works on its part;
- it consumes the axis (a sum over it, a matrix product that contracts it, a look-up of its rows): each
  device has a share of the result, and all of them add up, an *all-reduce* of the result;
- it depends on positions along the axis (a slice, a flip, a sort), or no rule is known for it: the
  operand is made whole on every device first, an *all-gather* of the operand.

So what is exchanged, and how many bytes, is known without compiling. The same steps are what `sharding`
turns into constraints, so that the partitioner finds nothing left to choose.

Values that the batch shares (axis None) are the same on every device, so taking a part of one is free.
Where all that reads such a value takes it split along one axis (random keys made for a batch), it is
made split.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fdg import jaxprs, keys
from fdg.batch.rules import RULES, Axis, Taken, creates, first, shape_of
from fdg.fragment import FragmentMark, boundary_p


@dataclasses.dataclass(frozen=True)
class Communication:
    """What the devices of one program exchange at one place.

    Attributes:
      fragment: the name that the innermost fragment around it is marked with; None between fragments.
      kind: "all-reduce" or "all-gather", as in `hlo.Collective`.
      bytes: of its result on one device, each time.
      calls: how often, each time that the program runs (loops of unknown length counted once).
    """

    fragment: str | None
    kind: str
    bytes: int
    calls: int


def communication(
    jaxpr: Any,
    input_axes: Sequence[Axis] = (),
    devices: int | None = None,
    output_axes: Sequence[Axis] | None = None,
) -> tuple[Communication, ...]:
    """What devices exchange when a jaxpr runs once, the bodies of fragments called in it included.

    Args:
      jaxpr: open or closed: a whole iteration, a piece of one, or a fragment's body.
      input_axes: the batch axes of its first inputs, None for those that are left out.
      devices: how many; None for any number that divides all batches.
      output_axes: what its outputs are brought to; None for whatever they have.

    Returns:
      One row for each fragment, kind and number of calls, in program order.
    """
    flow = follow(jaxpr, input_axes, devices, output_axes)
    read, _ = _Pruner().flow(flow, frozenset(range(len(flow.outputs))))
    return _merged(_exchanges(read, None, ()))


def axes(jaxpr: Any, input_axes: Sequence[Axis] = ()) -> list[Axis]:
    """The batch axes of a jaxpr's outputs, given those of its first inputs."""
    return list(follow(jaxpr, input_axes).outputs)


def equation_axes(eqn: Any, operand_axes: Sequence[Axis], devices: int | None = None) -> list[Axis]:
    """The batch axes of one equation's results, given those of its operands."""
    unit = devices or math.gcd(*_sizes(eqn.invars, operand_axes), *_border_sizes_of(eqn)) or 1
    operands = zip(eqn.invars, operand_axes, strict=True)
    taken = tuple((_divisible(v, axis, unit), 0) for v, axis in operands)
    return list(_Follower(unit)._step(eqn, taken, 0).results)


# ---------------------------------------------------------------------------------------------------
# What following a jaxpr finds
# ---------------------------------------------------------------------------------------------------

# The axis of a value, and its level: how many of the loops around it, from the outermost, it changes
# in. XLA moves what does not change in a loop out of it, and we count it accordingly.
Value = tuple[Axis, int]


@dataclasses.dataclass(frozen=True)
class Step:
    """What one equation does with the batch axis.

    Attributes:
      operands: axes of its operands as it takes them, after `gathered` and `parted`.
      results: axes of its results.
      gathered: positions of operands that are made whole on every device first.
      parted: (position, axis) of shared operands that each device takes its part of.
      reduced: whether devices add up the results.
      local: whether each device runs it on its own part, out of the partitioner's sight.
      reads: the level of each operand.
      bodies: the jaxprs inside it, as in `jaxprs.bodies`.
      trips: how often the bodies run each time, None for what is no loop.
      agreed: whether devices agree before each trip if there is another one, by a reduction of one byte.
    """

    eqn: Any
    operands: tuple[Axis, ...]
    results: tuple[Axis, ...]
    gathered: tuple[int, ...] = ()
    parted: tuple[tuple[int, int], ...] = ()
    reduced: bool = False
    local: bool = False
    reads: tuple[int, ...] = ()
    bodies: tuple["Flow", ...] = ()
    trips: int | None = None
    agreed: bool = False


@dataclasses.dataclass(frozen=True)
class Flow:
    """A jaxpr with the batch axes of everything in it.

    Attributes:
      inputs: axis and level of its inputs.
      steps: one for each equation.
      outputs: axes of its outputs, after those of `gathered` and `parted`, which are as in `Step`.
      levels: of the outputs.
      wishes: for each shared input, the one axis along which all that reads it would take it split.
    """

    jaxpr: Any
    inputs: tuple[Value, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Axis, ...]
    levels: tuple[int, ...]
    wishes: tuple[Axis, ...]
    gathered: tuple[int, ...] = ()
    parted: tuple[tuple[int, int], ...] = ()


def follow(
    jaxpr: Any,
    input_axes: Sequence[Axis] = (),
    devices: int | None = None,
    output_axes: Sequence[Axis] | None = None,
) -> Flow:
    """Follows the batch axes of a jaxpr's first inputs (and those of the borders in it) to its outputs.

    Arguments are those of `communication`; an axis that does not divide by the devices is none.
    """
    jaxpr = jaxprs.open_jaxpr(jaxpr)
    inputs = [*input_axes, *[None] * (len(jaxpr.invars) - len(input_axes))]
    unit = devices or math.gcd(*_sizes(jaxpr.invars, inputs), *_border_sizes(jaxpr)) or 1
    taken = tuple((_divisible(v, axis, unit), 0) for v, axis in zip(jaxpr.invars, inputs, strict=True))
    wanted = None
    if output_axes is not None:
        wanted = tuple(_divisible(v, axis, unit) for v, axis in zip(jaxpr.outvars, output_axes, strict=True))
    return _Follower(unit).flow(jaxpr, taken, 0, wanted)


def _divisible(atom: Any, axis: Axis, unit: int) -> Axis:
    return None if axis is None or shape_of(atom)[axis] % unit else axis


def _exchanges(flow: Flow, fragment: str | None, trips: tuple[int, ...]) -> Iterator[Communication]:
    """What devices exchange in a jaxpr that runs inside loops of so many trips."""
    gathered: set[Any] = set()  # once, and at hand from then on

    def gather(atoms: Sequence[Any], positions: Sequence[int], levels: Sequence[int]):
        for i in positions:
            if atoms[i] not in gathered:
                gathered.add(atoms[i])
                yield exchange("all-gather", [atoms[i]], levels[i])

    def exchange(kind: str, atoms: Sequence[Any], level: int) -> Communication:
        size = sum(jaxprs.bytes_of(v.aval) for v in atoms)
        return Communication(fragment, kind, size, math.prod(trips[:level]))

    for step in flow.steps:
        yield from gather(step.eqn.invars, step.gathered, step.reads)
        if step.reduced:
            yield exchange("all-reduce", step.eqn.outvars, max(step.reads, default=0))
        around = trips if step.trips is None else (*trips, step.trips)
        if step.agreed:
            yield Communication(fragment, "all-reduce", 1, math.prod(around))
        mark = FragmentMark.of(step.eqn)
        for body in step.bodies:
            yield from _exchanges(body, fragment if mark is None else mark.name, around)
    yield from gather(flow.jaxpr.outvars, flow.gathered, flow.levels)


class _Pruner:
    """Drops from a flow what nothing reads, as XLA does."""

    def __init__(self):
        self.known: dict[tuple, tuple[Flow, frozenset[int]]] = {}

    def flow(self, flow: Flow, outputs: frozenset[int]) -> tuple[Flow, frozenset[int]]:
        """What some of a flow's outputs need of it: of its steps, and which of its inputs."""
        key = (id(flow), outputs)
        if key not in self.known:
            read = {flow.jaxpr.outvars[j] for j in outputs if not hasattr(flow.jaxpr.outvars[j], "val")}
            steps = []
            for step in reversed(flow.steps):
                used = frozenset(k for k, v in enumerate(step.eqn.outvars) if v in read)
                if used or step.eqn.effects:
                    kept, operands = self._step(step, used)
                    steps.append(kept)
                    read.update(
                        v for v in map(step.eqn.invars.__getitem__, operands) if not hasattr(v, "val")
                    )
            inputs = frozenset(i for i, v in enumerate(flow.jaxpr.invars) if v in read)
            gathered = tuple(i for i in flow.gathered if i in outputs)
            self.known[key] = (
                dataclasses.replace(flow, steps=tuple(reversed(steps)), gathered=gathered),
                inputs,
            )
        return self.known[key]

    def _step(self, step: Step, used: frozenset[int]) -> tuple[Step, set[int]]:
        """A step for the sake of some of its results, and the operands that it then needs."""
        if not step.bodies or step.eqn.effects:
            return step, set(range(len(step.eqn.invars)))
        operands = {0} if step.eqn.primitive.name == "cond" else set()
        while True:
            before, kept = len(operands), []
            for body, inner in zip(jaxprs.bodies(step.eqn), step.bodies, strict=True):
                wanted = (
                    {body.results[k] for k in used} if body.results else {0}
                )  # a loop's test: its predicate
                operands |= {body.operands[i] for i, j in body.carry if j in wanted}
                wanted |= {j for i, j in body.carry if body.operands[i] in operands}
                pruned, inputs = self.flow(inner, frozenset(wanted))
                kept.append(pruned)
                operands |= {body.operands[i] for i in inputs}
            if len(operands) == before:
                gathered = tuple(i for i in step.gathered if i in operands)
                return dataclasses.replace(step, bodies=tuple(kept), gathered=gathered), operands


def _merged(rows: Iterator[Communication]) -> tuple[Communication, ...]:
    total: dict[tuple, int] = {}
    for row in rows:
        if row.bytes and row.calls:
            key = (row.fragment, row.kind, row.calls)
            total[key] = total.get(key, 0) + row.bytes
    return tuple(Communication(f, kind, size, calls) for (f, kind, calls), size in total.items())


def _sizes(atoms: Sequence[Any], its_axes: Sequence[Axis]) -> list[int]:
    return [shape_of(v)[axis] for v, axis in zip(atoms, its_axes, strict=False) if axis is not None]


def _border_sizes(jaxpr: Any) -> set[int]:
    """The lengths of all batch axes that borders declare, at any depth."""
    sizes: set[int] = set()
    seen: set[int] = set()

    def visit(jaxpr):
        if id(jaxpr) not in seen:
            seen.add(id(jaxpr))
            for eqn in jaxpr.eqns:
                sizes.update(_border_sizes_of(eqn, visit))

    visit(jaxpr)
    return sizes


def _border_sizes_of(eqn: Any, visit: Callable | None = None) -> set[int]:
    if eqn.primitive is boundary_p and eqn.params["axis"] is not None:
        return {shape_of(eqn.outvars[0])[eqn.params["axis"]]}
    found: set[int] = set()
    for body in jaxprs.bodies(eqn):
        if visit is None:
            found |= _border_sizes(body.jaxpr)
        else:
            visit(body.jaxpr)
    return found


# ---------------------------------------------------------------------------------------------------
# Following
# ---------------------------------------------------------------------------------------------------

_WHOLE = object()  # among what reads a value: it needs all of it


class _Follower:
    """Follows axes; `unit` divides the length of every batch axis, and is what devices surely divide."""

    def __init__(self, unit: int):
        self.unit = unit
        self.known: dict[tuple, Flow] = {}  # a helper is called from many places with the same axes

    def flow(
        self,
        jaxpr: Any,
        inputs: tuple[Value, ...],
        depth: int,
        wanted: tuple[Axis | object, ...] | None = None,
    ) -> Flow:
        """Follows one jaxpr.

        Args:
          jaxpr: an open one.
          inputs: axis and level of each input.
          depth: how many loops are around it.
          wanted: what its outputs are to be brought to; `_WHOLE` (and all, if None): whatever they are.
        """
        wanted = wanted or (_WHOLE,) * len(jaxpr.outvars)
        key = (id(jaxpr), inputs, depth, wanted)
        if key not in self.known:
            flow, values = self._forward(jaxpr, inputs, depth, wanted, {})
            split, wishes = self._backward(flow, values, depth, wanted)
            if split:
                flow, _ = self._forward(jaxpr, inputs, depth, wanted, split)
            self.known[key] = dataclasses.replace(flow, wishes=wishes)
        return self.known[key]

    def _forward(self, jaxpr, inputs, depth, wanted, split) -> tuple[Flow, dict[Any, Value]]:
        values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))

        def value_of(atom: Any) -> Value:  # a literal, or a constant of the jaxpr, has no axis
            return (None, 0) if hasattr(atom, "val") else values.get(atom, (None, 0))

        steps = []
        for eqn in jaxpr.eqns:
            operands = tuple(map(value_of, eqn.invars))
            step = self._step(eqn, operands, depth, split)
            if not step.bodies and any(v in split for v in eqn.outvars):
                results = tuple(split.get(v, a) for v, a in zip(eqn.outvars, step.results, strict=True))
                step = dataclasses.replace(step, results=results, parted=())
            if not step.bodies:
                step = self._part(step)
            steps.append(step)
            level = max(step.reads, default=0)
            values.update((v, (axis, level)) for v, axis in zip(eqn.outvars, step.results, strict=True))
        outputs, gathered, parted = [], [], []
        for i, (atom, want) in enumerate(zip(jaxpr.outvars, wanted, strict=True)):
            axis, _ = value_of(atom)
            if want is not _WHOLE and axis != want:
                if axis is not None:
                    gathered.append(i)
                if want is not None:
                    parted.append((i, want))
                axis = want
            outputs.append(axis)
        levels = tuple(value_of(atom)[1] for atom in jaxpr.outvars)
        return Flow(
            jaxpr, inputs, tuple(steps), tuple(outputs), levels, (None,) * len(inputs),
            tuple(gathered), tuple(parted),
        ), values  # fmt: skip

    def _step(
        self, eqn: Any, operands: tuple[Value, ...], depth: int, split: Mapping[Any, int] | None = None
    ) -> Step:
        reads = tuple(level for _, level in operands)
        inner = () if eqn.primitive.name in RULES else jaxprs.bodies(eqn)
        if inner:
            return self._step_into(eqn, inner, operands, depth, split or {})
        taken = self._rule(eqn, [axis for axis, _ in operands])
        taking = tuple(None if i in taken.gathered else axis for i, (axis, _) in enumerate(operands))
        return Step(eqn, taking, taken.axes, taken.gathered, (), taken.reduced, taken.local, reads)

    def _rule(self, eqn: Any, operands: list[Axis]) -> Taken:
        """What a single operation does with its operands' axes."""
        if eqn.primitive is boundary_p:
            (axis,), declared = operands, eqn.params["axis"]
            return Taken((declared,), () if axis is None or axis == declared else (0,))
        whole = Taken(
            (None,) * len(eqn.outvars), tuple(i for i, axis in enumerate(operands) if axis is not None)
        )
        if not whole.gathered or eqn.effects or keys.draws_from_the_batch(eqn):
            return whole
        rule = RULES.get(eqn.primitive.name)
        taken = rule(eqn, operands) if rule else None
        if taken is None:
            return whole
        made = [(v, axis) for v, axis in zip(eqn.outvars, taken.axes, strict=True) if axis is not None]
        if any(shape_of(v)[axis] % self.unit for v, axis in made):
            return whole  # cut so short that devices may not divide it
        return taken._replace(axes=tuple(None if a is None else int(a) for a in taken.axes))

    def _part(self, step: Step) -> Step:
        """Has the step take parts of shared operands, where these do as well as the whole."""
        if all(axis is None for axis in (*step.operands, *step.results)):
            return step
        parted = {}
        for i, atom in enumerate(step.eqn.invars):
            if step.operands[i] is None:
                axis = self._takes(step, i, shape_of(atom))
                if axis is not None:
                    parted[i] = axis
        operands = tuple(parted.get(i, axis) for i, axis in enumerate(step.operands))
        return dataclasses.replace(step, operands=operands, parted=tuple(parted.items()))

    def _takes(self, step: Step, position: int, shape: tuple[int, ...]) -> Axis:
        """The axis along which an operand could be split without a change to anything else."""
        for axis, size in enumerate(shape):
            if size % self.unit == 0:
                trial = self._rule(
                    step.eqn, [axis if i == position else a for i, a in enumerate(step.operands)]
                )
                if not trial.gathered and trial.axes == step.results and trial.reduced == step.reduced:
                    return axis
        return None

    # --- backwards: which shared values may be made split ---

    def _backward(self, flow, values, depth, wanted) -> tuple[dict[Any, int], tuple[Axis, ...]]:
        """The axes of shared values that everything takes split along that axis, and wishes for inputs."""
        readers: dict[Any, set] = {}
        split: dict[Any, int] = {}

        def read(atom: Any, axis: Any) -> None:
            if not hasattr(atom, "val"):
                readers.setdefault(atom, set()).add(_WHOLE if axis is None else axis)

        def wish(v: Any) -> Axis:
            found = readers.get(v, set())
            only = next(iter(found)) if len(found) == 1 else _WHOLE
            return None if only is _WHOLE or values.get(v, (None, 0))[0] is not None else only  # type: ignore[return-value]

        for atom, want in zip(flow.jaxpr.outvars, wanted, strict=True):
            read(atom, want)
        for step in reversed(flow.steps):
            eqn = step.eqn
            if step.bodies:
                asked = self._asked(self._call_split(step, depth, wish, split))
            else:
                asked = dict(step.parted)
                if all(axis is None for axis in step.results) and not step.gathered and not step.reduced:
                    asked = self._make_split(eqn, wish, split)
            for i, atom in enumerate(eqn.invars):
                read(atom, asked.get(i))
        return split, tuple(wish(v) for v in flow.jaxpr.invars)

    def _make_split(self, eqn: Any, wish: Callable, split: dict[Any, int]) -> dict[int, int]:
        """Makes the results of an operation on shared values split, if that is what their readers take.

        Returns:
          The axes along which its operands are then taken.
        """
        target = tuple(map(wish, eqn.outvars))
        if all(axis is None for axis in target) or eqn.primitive is boundary_p or eqn.effects:
            return {}
        shapes = [shape_of(atom) for atom in eqn.invars]
        for shape in dict.fromkeys(shapes):
            for axis, size in enumerate(shape):
                if size % self.unit == 0:
                    asked = {i: axis for i, s in enumerate(shapes) if s == shape}
                    trial = self._rule(eqn, [asked.get(i) for i in range(len(shapes))])
                    if not trial.gathered and not trial.reduced and trial.axes == target:
                        split.update(
                            (v, a) for v, a in zip(eqn.outvars, trial.axes, strict=True) if a is not None
                        )
                        return asked
        if creates(eqn, target[0]) and len(target) == 1:
            split[eqn.outvars[0]] = target[0]
        return {}

    def _call_split(self, step: Step, depth: int, wish: Callable, split: dict[Any, int]) -> Step:
        """Makes results of a call split, if that is what their readers take and its body can make them so."""
        target = {v: axis for v in step.eqn.outvars if (axis := wish(v)) is not None}
        if not target or step.trips is not None or step.eqn.primitive.name == "cond":
            return step
        (body,), (inner,) = jaxprs.bodies(step.eqn), step.bodies
        wanted: list[Any] = [_WHOLE] * len(inner.outputs)
        for v, j in zip(step.eqn.outvars, body.results, strict=True):
            wanted[j] = target.get(v, _WHOLE)
        made = self.flow(inner.jaxpr, inner.inputs, depth, tuple(wanted))
        if made.parted or made.gathered:
            return step
        split.update(target)
        return dataclasses.replace(step, bodies=(made,))

    def _asked(self, step: Step) -> dict[int, int]:
        """The axes along which the bodies of an equation take its shared operands, where they agree."""
        found: dict[int, set] = {}
        for body, inner in zip(jaxprs.bodies(step.eqn), step.bodies, strict=True):
            carried = {i for i, _ in body.carry}
            for i, operand in enumerate(body.operands):
                axis = inner.wishes[i]
                if axis is not None and i in body.sliced:
                    axis += 1
                found.setdefault(operand, set()).add(None if i in carried else axis)
        found.update({i: {axis} for i, axis in step.parted})
        return {i: next(iter(s)) for i, s in found.items() if len(s) == 1 and None not in s}

    # --- through loops, branches and calls ---

    def _step_into(
        self, eqn: Any, inner: tuple, operands: tuple[Value, ...], depth: int, split: Mapping[Any, int]
    ) -> Step:
        """A slice of a loop's input has one axis less, a stack of results one more."""
        name = eqn.primitive.name
        loop = name in ("scan", "while")
        depth += loop
        gathered = {
            operand
            for body in inner
            for i, operand in enumerate(body.operands)
            if i in body.sliced and operands[operand][0] == 0  # sliced along the batch: a row a trip
        }
        current = [
            (None, level) if i in gathered else (axis, level) for i, (axis, level) in enumerate(operands)
        ]
        if name == "cond":
            current = [(axis, depth) for axis, _ in current]  # nothing moves out of a branch
            flows, results = self._branches(inner, current, depth)
        else:
            self._grow(inner, current, depth)
            if name == "while" and (axis := self._predicate_axis(inner, current, depth)) is not None:
                for i, _ in inner[1].carry:  # such a loop has a row of everything for each predicate
                    operand = inner[1].operands[i]
                    if current[operand][0] is None:
                        current[operand] = axis, current[operand][1]
                self._grow(inner, current, depth)
            flows, results = [], [None] * len(eqn.outvars)
            for body in inner:
                inputs = _inputs(body, inner, current, depth)
                wanted: list[Any] = [_WHOLE] * len(body.jaxpr.outvars)
                for i, previous in body.carry:
                    wanted[previous] = inputs[i][0]
                for v, j in zip(eqn.outvars, body.results, strict=False):
                    wanted[j] = split.get(v, wanted[j])  # of a call, what its readers take split
                flow = self.flow(body.jaxpr, inputs, depth, tuple(wanted))
                flows.append(flow)
                for k, j in enumerate(body.results):
                    axis = flow.outputs[j]
                    results[k] = axis + 1 if axis is not None and k in body.stacked else axis
        # A carried value that a trip makes split is split from the start.
        parted = [
            (i, now[0])
            for i, (now, before) in enumerate(zip(current, operands, strict=True))
            if before[0] is None and now[0] is not None
        ]
        step = Step(
            eqn, tuple(axis for axis, _ in current), tuple(results), tuple(sorted(gathered)), tuple(parted),
            reads=tuple(level for _, level in operands), bodies=tuple(flows),
            trips=inner[0].trips if loop else None,
        )  # fmt: skip
        return self._while(step) if name == "while" else step

    def _grow(self, inner: tuple, current: list[Value], depth: int) -> None:
        """Lets axes reach carried values, one more a round at least, until nothing changes."""
        changed = True
        while changed:
            changed = False
            for body in inner:
                outputs = self.flow(body.jaxpr, _inputs(body, inner, current, depth), depth).outputs
                for i, previous in body.carry:
                    operand = body.operands[i]
                    if current[operand][0] is None and outputs[previous] is not None:
                        current[operand], changed = (outputs[previous], current[operand][1]), True

    def _predicate_axis(self, inner: tuple, current: list[Value], depth: int) -> Axis:
        test = inner[0]
        return self.flow(test.jaxpr, _inputs(test, inner, current, depth), depth).outputs[0]

    def _branches(self, inner: tuple, current: list[Value], depth: int) -> tuple[list[Flow], list[Axis]]:
        """All branches bring each result to the same axis."""
        free = [self.flow(body.jaxpr, _inputs(body, inner, current, depth), depth) for body in inner]
        results: list[Axis] = [first(found) for found in zip(*(flow.outputs for flow in free), strict=True)]
        return [
            self.flow(body.jaxpr, _inputs(body, inner, current, depth), depth, tuple(results)) for body in inner
        ], results

    def _while(self, step: Step) -> Step:
        """A loop that `vmap` made has a predicate for each row, and rows that are done stay as they are.

        So devices whose rows need no other trip may stop, if rows do not depend on each other; otherwise
        all of them agree before each trip.
        """
        test, body = step.bodies
        axis = test.outputs[0]
        carried = body.inputs[len(body.inputs) - len(step.results) :]
        if axis is None:
            return step
        if all(a == axis for a, _ in carried) and is_local(test) and is_local(body):
            return dataclasses.replace(step, local=True)
        return dataclasses.replace(step, agreed=True)


def is_local(flow: Flow) -> bool:
    """Whether devices can run a jaxpr each on its own part."""
    return not flow.gathered and all(
        not (step.gathered or step.reduced or step.agreed or step.eqn.effects) and all(map(is_local, step.bodies))
        for step in flow.steps
    )


def _inputs(body: Any, inner: Sequence[Any], current: Sequence[Value], depth: int) -> tuple[Value, ...]:
    """Axis and level of a body's inputs: what a loop slices or carries changes in it, also for its test."""
    changing = {
        each.operands[i]
        for each in inner
        for i, j in each.carry
        if each.jaxpr.outvars[j] is not each.jaxpr.invars[i]
    }
    inputs = []
    for i, operand in enumerate(body.operands):
        axis, level = current[operand]
        if i in body.sliced and axis is not None:
            axis -= 1
        inputs.append((axis, depth if operand in changing or i in body.sliced else level))
    return tuple(inputs)
