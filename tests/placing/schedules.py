"""Schedules in words, and whether one can be carried out."""

from collections.abc import Iterable

from fdg.placing.scheduling.schedule import Call, Move, Repeat, Schedule, Step, Value


def _names(values: Iterable[Value]) -> str:
    return " ".join(value.variable.aval.str_short(short_dtypes=True) for value in values)


def described(schedule: Schedule) -> list[str]:
    """One line a step: what runs where, what moves where; a loop's steps indented.

    A move whose values are only for the next trip or iteration has a "later:" in front.
    """

    def lines(steps: Iterable[Step], indent: str) -> Iterable[str]:
        for step in steps:
            if isinstance(step, Call):
                yield f"{indent}{step.group}: {'+'.join(step.fragments) or 'glue'}"
            elif isinstance(step, Move):
                later = "later: " if step.delay else ""
                yield f"{indent}{later}{step.source} -> {step.target}: {_names(a for a, _ in step.pairs)}"
            else:
                yield f"{indent}{step.trips} times:"
                yield from lines(step.steps, indent + "  ")

    return list(lines(schedule.steps, ""))


def assert_valid(schedule: Schedule) -> None:
    """What is read was written, and not yet given up; nothing is moved twice, or to where it is already.

    Raises:
      AssertionError: naming the step and the value.
    """
    there = {value for places in schedule.leaves for value in places}
    there |= {value for _, value in schedule.constants}
    constants = {value for _, value in schedule.constants}
    _walk(schedule.steps, there, constants)
    for a, b in schedule.carry:
        assert (a.group, a.axis, a.shape) == (b.group, b.axis, b.shape), f"{a} is handed on as {b}"
    ends = {b: a for a, b in schedule.carry}
    for places in schedule.leaves:
        for value in places:
            assert ends.get(value, value) in there, f"leaf {value} is missing at the end"
    for value in schedule.metrics:
        assert value in there, f"metric {value} is missing at the end"


def _walk(steps: Iterable[Step], there: set[Value], kept: set[Value]) -> None:
    moved: set[tuple] = set()
    for step in steps:
        if isinstance(step, Call):
            assert step.equations, f"{step.name} does nothing"
            for value in step.inputs:
                assert value.group == step.group, (
                    f"{step.name} on {step.group} reads {value} of {value.group}"
                )
                assert value in there, f"{step.name} reads {value}, which is not there"
            assert step.donated <= step.freed
            for i in step.freed:
                assert step.inputs[i] not in kept, f"{step.name} gives up the constant {step.inputs[i]}"
                there.discard(step.inputs[i])
            for value in step.outputs:
                assert value.group == step.group and value not in there, f"{step.name} makes {value} again"
            there |= set(step.outputs)
        elif isinstance(step, Move):
            for a, b in step.pairs:
                assert a.variable is b.variable and a.axis == b.axis
                assert (a.group, b.group) == (step.source, step.target) and a.group != b.group
                assert a in there, f"{a} is moved to {b.group} before it is there"
                assert b not in there, f"{b} is moved to where it is"
                assert (b.variable, b.group) not in moved, f"{b} is moved twice"
                moved.add((b.variable, b.group))
            for i in step.freed:
                assert step.pairs[i][0] not in kept
                there.discard(step.pairs[i][0])
            there |= {b for _, b in step.pairs}
        else:
            _walk_loop(step, there, kept)


def _walk_loop(loop: Repeat, there: set[Value], kept: set[Value]) -> None:
    for a, b in (*loop.enter, *loop.carry, *loop.leave):
        assert (a.group, a.axis, a.shape) == (b.group, b.axis, b.shape), f"{a} is handed on as {b}"
    for outer, _ in loop.enter:
        assert outer in there, f"a loop starts from {outer}, which is not there"
    # What a trip gives up is what it carries, or a copy; constants are read in every trip.
    carried = {b for _, b in loop.carry}
    inside = {b for _, b in loop.enter}
    constants = inside - carried
    for _ in range(2):
        _walk(loop.steps, inside, {b for b in constants if b not in _passing(loop)})
        for a, _ in (*loop.carry, *loop.leave):
            assert a in inside, f"{a} is missing at the end of a trip"
        inside = {b for _, b in loop.carry} | (inside & {b for _, b in loop.enter} - carried)
    there |= {b for _, b in loop.leave}


def _passing(loop: Repeat) -> set[Value]:
    """What the loop leaves with as it came in."""
    return {a for a, _ in loop.leave}
