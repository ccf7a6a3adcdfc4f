"""`auto:measure`: the candidates that are predicted best, compiled and timed for some iterations each."""

import dataclasses
import math
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
            several = of_seeds(algorithm, num_seeds)
            seconds = iteration_seconds(several, row.candidate.policy, devices[: row.candidate.devices])
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


class Iterations:
    """Iterations of a job, timed in rounds.

    Attributes:
      seconds: of an iteration, in the best round so far.
    """

    def __init__(self, algorithm: Any, policy: Any, devices: Sequence[jax.Device]):
        """Compiles it, and finds out how many iterations make a round; the first ones are not counted."""
        self._engine = compile_engine(algorithm, policy, with_host(policy, devices))
        self._state: Any = self._engine.init(0)
        self.seconds = math.inf
        self._run(2)
        once = self._run(2)
        self._count = distributed.exchange(max(2, min(1000, math.ceil(_SECONDS / max(once, 1e-6)))))[0]

    def round(self) -> None:
        """One more."""
        self.seconds = min(self.seconds, self._run(self._count))

    def _run(self, count: int) -> float:
        begun = time.perf_counter()
        self._state, metrics = self._engine.run(self._state, count)
        jax.block_until_ready((self._state, metrics))
        return (time.perf_counter() - begun) / count


def iteration_seconds(algorithm: Any, policy: Any, devices: Sequence[jax.Device]) -> float:
    """Seconds of an iteration: the best of some rounds; of several processes, in the slowest."""
    iterations = Iterations(algorithm, policy, devices)
    for _ in range(_ROUNDS):
        iterations.round()
    return max(distributed.exchange(iterations.seconds))
