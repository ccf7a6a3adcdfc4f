"""Delays transfers of new values to where they are first needed, so that no program waits behind them.

A device runs its programs and transfers in the order of their dispatch. In a schedule from `grouping`, new
parameters move at the end of an iteration. Actors that read older ones would then wait for the learners:

    actors: act(h) -> d                              actors: act(h) -> d
    actors -> learners: d                            actors -> learners: d
    learners: learn([w], d) -> v           becomes   learners -> actors: w
    learners -> actors: v                            learners: learn([w], d) -> v
    carry v to w on both, w to h on actors           carry v to w on learners, w to h on actors
"""

import dataclasses

from fdg.placing.scheduling.schedule import Call, Move, Schedule, Step, Value, all_steps, uses


def with_late_moves(schedule: Schedule) -> Schedule:
    """Delays transfers for the next iteration to the first step that needs the values or frees the source.

    Values that a transfer brings to a group later need no copy on that group between iterations. A transfer
    stays where it is if no program of its target would run before it, or if one of its source would, since
    the source's lane (`running.lanes`) would start the transfer after that program.
    """
    start_of = dict(schedule.carry)
    for move in [step for step in schedule.steps if isinstance(step, Move) and step.delay]:
        if not all(a in start_of and b in start_of for a, b in move.pairs):
            continue
        pairs = tuple((start_of[a], start_of[b]) for a, b in move.pairs)
        sources, arrivals = map(set, zip(*pairs, strict=True))
        if any(values[0] in arrivals for values in schedule.leaves):
            continue
        steps = [step for step in schedule.steps if step is not move]
        end = next((i for i, step in enumerate(steps) if _needs(step, sources, arrivals)), len(steps))
        if _has_program(steps[:end], move.target) and not _has_program(steps[:end], move.source):
            delay = "" if move.targets else move.delay  # without a target: kept for the next iteration
            late = dataclasses.replace(move, pairs=pairs, delay=delay, freed=frozenset())
            schedule = dataclasses.replace(
                schedule,
                steps=(*steps[:end], late, *steps[end:]),
                leaves=tuple(tuple(v for v in values if v not in arrivals) for values in schedule.leaves),
                carry=tuple((b, start) for b, start in schedule.carry if start not in arrivals),
            )
    return schedule


def _needs(step: Step, sources: set[Value], arrivals: set[Value]) -> bool:
    """Whether a step reads values that arrive, or may free their sources."""
    operands = uses(step)
    freed = {operands[i] for i in step.freed} if isinstance(step, Call | Move) else set(operands)
    return not (arrivals.isdisjoint(operands) and sources.isdisjoint(freed))


def _has_program(steps: list[Step], group: str) -> bool:
    return any(isinstance(step, Call) and step.group == group for step, _ in all_steps(steps))
