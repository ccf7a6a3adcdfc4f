"""`auto:measure`: the candidates that are predicted best, compiled and timed for some iterations each."""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import jax

from fdg.costs.choosing import Choice, Row
from fdg.engine import compile as compile_engine
from fdg.errors import FdgError
from fdg.placing.policy import with_host
from fdg.processes import distributed

_SECONDS = 0.5  # of iterations, about, in a round
_ROUNDS = 3


def measured(
    choice: Choice, devices: Sequence[jax.Device], most: int = 3, num_seeds: int | None = None
) -> Choice:
    """The choice among the best few by what they take, and not by what was predicted.

    Args:
      choice: from `policies.auto`.
      devices: those that it chose from. Of several processes, all have to call this.
      most: candidates to time.
      num_seeds: as of `fdg.compile`.

    Raises:
      FdgError: none of them could be compiled.
    """
    begun = time.perf_counter()
    takeable = [row for row in choice.rows if row.prediction is not None and not row.candidate.asks]
    timed: list[Row] = []
    for row in takeable[:most]:
        algorithm = choice.algorithm
        if row.candidate.variant:
            algorithm = dataclasses.replace(algorithm, **dict(row.candidate.variant))
        try:
            seconds = iteration_seconds(
                algorithm, row.candidate.policy, devices[: row.candidate.devices], num_seeds
            )
            timed.append(dataclasses.replace(row, measured=seconds))
        except FdgError as error:
            timed.append(dataclasses.replace(row, prediction=None, refused=str(error)))
    good = sorted((row for row in timed if row.prediction is not None), key=lambda row: row.seconds)
    if not good:
        raise FdgError(f"none of the best {len(timed)} candidates could be compiled: {timed[0].refused}")
    best = good[0]
    rest = [row for row in choice.rows if row not in takeable[:most]]
    refused = [row for row in timed if row.prediction is None]
    assert best.prediction is not None
    return dataclasses.replace(
        choice,
        policy=best.candidate.policy,
        devices=best.candidate.devices,
        algorithm=dataclasses.replace(choice.algorithm, **dict(best.candidate.variant))
        if best.candidate.variant
        else choice.algorithm,
        prediction=best.prediction,
        rows=(*good, *rest, *refused),
        took=choice.took + time.perf_counter() - begun,
    )


def iteration_seconds(
    algorithm: Any, policy: Any, devices: Sequence[jax.Device], num_seeds: int | None = None
) -> float:
    """Seconds of an iteration: the best of some rounds, the first call not counted."""
    engine = compile_engine(algorithm, policy, with_host(policy, devices), num_seeds)
    state, metrics = engine.run(engine.init(0), 2)
    jax.block_until_ready((state, metrics))
    begun = time.perf_counter()
    state, metrics = engine.run(state, 2)
    jax.block_until_ready((state, metrics))
    once = (time.perf_counter() - begun) / 2
    count = distributed.exchange(max(2, min(1000, math.ceil(_SECONDS / max(once, 1e-6)))))[0]
    best = math.inf
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        state, metrics = engine.run(state, count)
        jax.block_until_ready((state, metrics))
        best = min(best, (time.perf_counter() - begun) / count)
    return max(distributed.exchange(best))
