"""Predicts a program's collectives from the batch axes of its values (its `Flow`). Ignores dead code.

Also lists the operations that every device repeats because they have no rule.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fdg import jaxprs
from fdg.batch.collective import Collective
from fdg.batch.equation import must_be_whole
from fdg.batch.flow import Flow
from fdg.batch.follow import follow
from fdg.batch.rules import RULES
from fdg.batch.rules.result import Axis
from fdg.fragment import FragmentMark, boundary_p


class WithoutRule(NamedTuple):
    """An operation on a split batch without a rule: its operands are gathered, and every device repeats it.

    >>> print(WithoutRule("ragged_dot_general", "learn", 384, 3))
    no rule for ragged_dot_general in fragment 'learn': gathered (384 B x 3), and run whole on every device
    """

    primitive: str  # the operation's name
    fragment: str | None  # the innermost enclosing fragment; None between fragments
    bytes: int  # gathered bytes per run
    calls: int  # runs in one run of the program; a loop of unknown length counts as one trip

    def __str__(self) -> str:
        where = f"in fragment '{self.fragment}'" if self.fragment else "between fragments"
        return (
            f"no rule for {self.primitive} {where}: gathered ({self.bytes} B x {self.calls}),"
            f" and run whole on every device"
        )


def predict_exchanges(
    jaxpr: Any,
    input_axes: Sequence[Axis] = (),
    devices: int | None = None,
    output_axes: Sequence[Axis] | None = None,
) -> tuple[tuple[Collective, ...], tuple[WithoutRule, ...]]:
    """The collectives in one run of a jaxpr, including those within its fragments.

    The jaxpr is an iteration, a part of an iteration, or a fragment's body. `input_axes` are the batch axes
    of its first inputs. Outputs are resharded to the batch axes `output_axes`, or left as they are if it is
    None. `devices` is the number of devices that split the batch; None stands for any number that divides
    every batch axis.

    Returns:
      1. The collectives in program order. Those with the same enclosing fragments, kind and number of calls
        are one entry.
      2. The operations without a rule (`batch.rules`), except those that must not be split (`must_be_whole`).
    """
    flow = follow(jaxprs.without_dead_code(jaxpr), input_axes, devices, output_axes)
    totals: dict[Collective | WithoutRule, int] = collections.defaultdict(int)
    for entry, size in _walk_flow(flow, (), ()):
        totals[entry] += size
    return (
        tuple(
            dataclasses.replace(entry, bytes=size)
            for entry, size in totals.items()
            if isinstance(entry, Collective) and size and entry.calls
        ),
        tuple(entry._replace(bytes=size) for entry, size in totals.items() if isinstance(entry, WithoutRule)),
    )


def operations_across_rows(jaxpr: Any, input_axes: Sequence[Axis]) -> tuple[str, ...]:
    """Names of the operations whose result for a row depends on other rows, such as a mean over the batch.

    `input_axes` are the batch axes of the first inputs. Operations without a rule are left out.
    """

    def walk(flow: Flow) -> Iterator[str]:
        for step in flow.equations:
            name = step.eqn.primitive.name
            if not step.bodies and (step.reduced or (step.gathered and name in RULES)):
                yield name
            for body in step.bodies:
                yield from walk(body)

    return tuple(dict.fromkeys(walk(follow(jaxprs.without_dead_code(jaxpr), input_axes))))


def _walk_flow(
    flow: Flow, fragments: tuple[str, ...], trips: tuple[int, ...]
) -> Iterator[tuple[Collective | WithoutRule, int]]:
    """Yields (entry, bytes) for each collective and each operation without a rule.

    `fragments` and `trips` are those of the enclosing fragments and loops, outermost first.
    """
    gathered: set[Any] = set()  # values that an earlier gather has replicated

    def all_gathers(atoms: Sequence[Any], positions: Sequence[int], loop_depths: Sequence[int]):
        """Yields the all-gathers of the values at `positions` that no earlier gather has replicated."""
        for i in positions:
            if atoms[i] not in gathered:
                gathered.add(atoms[i])
                yield make_collective("all-gather", trips[: loop_depths[i]]), _bytes([atoms[i]])

    def make_collective(kind: str, inner_trips: tuple[int, ...]) -> Collective:
        return Collective(kind, 0, math.prod(inner_trips), fragments)

    for step in flow.equations:
        eqn, name = step.eqn, step.eqn.primitive.name
        yield from all_gathers(eqn.invars, step.gathered, step.levels)
        if step.reduced:
            yield make_collective("all-reduce", trips[: max(step.levels, default=0)]), _bytes(eqn.outvars)
        inner_trips = trips if step.trips is None else (*trips, step.trips)
        if step.agrees_on_predicate:
            yield make_collective("all-reduce", inner_trips), 1
        is_leaf = not step.bodies and eqn.primitive is not boundary_p
        if is_leaf and step.gathered and name not in RULES and not must_be_whole(eqn):
            fragment = fragments[-1] if fragments else None
            operands = [eqn.invars[i] for i in step.gathered]
            yield WithoutRule(name, fragment, 0, math.prod(trips)), _bytes(operands)
        mark = FragmentMark.of(eqn)
        enclosing = fragments if mark is None else (*fragments, mark.name)
        for body in step.bodies:
            yield from _walk_flow(body, enclosing, inner_trips)
    yield from all_gathers(flow.jaxpr.outvars, flow.gathered, flow.levels)


def _bytes(atoms: Sequence[Any]) -> int:
    return sum(jaxprs.bytes_of(v.aval) for v in atoms)
