"""Describes schedules as text, and checks that they are valid."""

from collections.abc import Iterable

from fdg.placing.scheduling.schedule import Call, Move, Repeat, Schedule, Step, Value


def _names(values: Iterable[Value]) -> str:
    return " ".join(value.variable.aval.str_short(short_dtypes=True) for value in values)


def described(schedule: Schedule) -> list[str]:
    """One line per step: a group and its fragments, or source, target and values; loop bodies are indented.

    "later:" marks a move whose values are read in the next trip or iteration.
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
    """Checks that values are written before they are read and not freed, and that no move is redundant.

    Raises:
      AssertionError: with the step and the value.
    """
    live = {value for places in schedule.leaves for value in places}
    live |= {value for _, value in schedule.constants}
    constants = {value for _, value in schedule.constants}
    _walk(schedule.steps, live, constants)
    for a, b in schedule.carry:
        assert (a.group, a.axis, a.shape) == (b.group, b.axis, b.shape), f"{a} is carried over as {b}"
    ends = {b: a for a, b in schedule.carry}
    for places in schedule.leaves:
        for value in places:
            assert ends.get(value, value) in live, f"leaf {value} is missing at the end"
    for value in schedule.metrics:
        assert value in live, f"metric {value} is missing at the end"


def _walk(steps: Iterable[Step], live: set[Value], pinned: set[Value]) -> None:
    moved: set[tuple] = set()
    for step in steps:
        if isinstance(step, Call):
            assert step.equations, f"{step.name} does nothing"
            for value in step.inputs:
                assert value.group == step.group, (
                    f"{step.name} on {step.group} reads {value} of {value.group}"
                )
                assert value in live, f"{step.name} reads {value}, which is not available"
            assert step.donated <= step.freed
            for i in step.freed:
                assert step.inputs[i] not in pinned, f"{step.name} frees the constant {step.inputs[i]}"
                live.discard(step.inputs[i])
            for value in step.outputs:
                assert value.group == step.group and value not in live, f"{step.name} writes {value} again"
            live |= set(step.outputs)
        elif isinstance(step, Move):
            for a, b in step.pairs:
                assert a.variable is b.variable and a.axis == b.axis
                assert (a.group, b.group) == (step.source, step.target) and a.group != b.group
                assert a in live, f"{a} is moved to {b.group} before it is computed"
                assert b not in live, f"{b} is moved to a group that holds it"
                assert (b.variable, b.group) not in moved, f"{b} is moved twice"
                moved.add((b.variable, b.group))
            for i in step.freed:
                assert step.pairs[i][0] not in pinned
                live.discard(step.pairs[i][0])
            live |= {b for _, b in step.pairs}
        else:
            _walk_loop(step, live, pinned)


def _walk_loop(loop: Repeat, live: set[Value], pinned: set[Value]) -> None:
    for a, b in (*loop.enter, *loop.carry, *loop.leave):
        assert (a.group, a.axis, a.shape) == (b.group, b.axis, b.shape), f"{a} is carried over as {b}"
    carried = {b for _, b in loop.carry}
    for i, (outer, inner) in enumerate(loop.enter):
        assert outer in live, f"a loop starts from {outer}, which is not available"
        if inner in carried and i not in loop.copied:  # the first trip may free it
            assert outer not in pinned, f"a loop frees the constant {outer}"
            live.discard(outer)
    # A trip frees only carried values or copies; each trip reads the constants.
    inside = {b for _, b in loop.enter}
    constants = inside - carried
    for _ in range(2):
        _walk(loop.steps, inside, constants)
        for a, _ in (*loop.carry, *loop.leave):
            assert a in inside, f"{a} is missing at the end of a trip"
        inside = {b for _, b in loop.carry} | (inside & {b for _, b in loop.enter} - carried)
    live |= {b for _, b in loop.leave}
