"""`auto:measure`: compiles and times the candidates with the best predictions."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax

from fdg.agents import of_seeds
from fdg.costs.choosing import Choice, Row
from fdg.engine import compile as compile_engine
from fdg.errors import FdgError
from fdg.placing.policy import with_host
from fdg.processes import distributed
from fdg.profiling.measuring import Iterations

_SECONDS = 0.5  # approximate seconds of a round of iterations
_ROUNDS = 3
_TIMED = 3  # candidates


def choose_by_timing(choice: Choice, devices: Sequence[jax.Device], num_seeds: int | None = None) -> Choice:
    """Chooses among the best three candidates by measured time.

    `choice` is from `policies.auto`, and `devices` those that it chose from. A collective: all processes call
    this.
    """
    begun = time.perf_counter()
    takeable = [row for row in choice.rows if row.prediction is not None and not row.candidate.asks]
    timed: list[Row] = []
    for row in takeable[:_TIMED]:
        algorithm = choice.algorithm
        if row.candidate.variant:
            algorithm = dataclasses.replace(algorithm, **dict(row.candidate.variant))
        try:
            several = of_seeds(algorithm, num_seeds)
            seconds = iteration_seconds(several, row.candidate.policy, devices[: row.candidate.devices])
            timed.append(dataclasses.replace(row, measured=seconds))
        except FdgError as error:
            timed.append(dataclasses.replace(row, prediction=None, refused=str(error)))
    good = sorted((row for row in timed if row.prediction is not None), key=lambda row: row.seconds)
    if not good:
        raise FdgError(f"none of the best {len(timed)} candidates could be compiled: {timed[0].refused}")
    variant = dict(good[0].candidate.variant)
    rest = [row for row in choice.rows if row not in takeable[:_TIMED]]
    refused = [row for row in timed if row.prediction is None]
    return dataclasses.replace(
        choice,
        algorithm=dataclasses.replace(choice.algorithm, **variant) if variant else choice.algorithm,
        rows=(*good, *rest, *refused),
        took=choice.took + time.perf_counter() - begun,
    )


def iterations_of(algorithm: Any, policy: Any, devices: Sequence[jax.Device]) -> Iterations:
    """A job's iterations, compiled and ready to be timed; at least two, so that groups overlap."""
    engine = compile_engine(algorithm, policy, with_host(policy, devices))
    return Iterations(engine, engine.init(0), _SECONDS, least=2)


def iteration_seconds(algorithm: Any, policy: Any, devices: Sequence[jax.Device]) -> float:
    """Seconds of an iteration in the best round; with several processes, in the slowest one."""
    iterations = iterations_of(algorithm, policy, devices)
    for _ in range(_ROUNDS):
        iterations.measure()
    return max(distributed.exchange(iterations.seconds))
