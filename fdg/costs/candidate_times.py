"""`--policy auto:measure`: times the policies with the best predictions, and chooses the fastest of them."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax

from fdg import jaxprs
from fdg.costs.choosing import Choice, Row, feasible_rows
from fdg.engine import compile as compile_engine
from fdg.errors import FdgError
from fdg.fragment import fragments_in
from fdg.placing.policy import with_host
from fdg.processes import distributed
from fdg.profiling.measuring import Iterations
from fdg.tracing.trace import trace

_ROUND_SECONDS = 0.5  # the approximate duration of a timing round, which has several iterations
_NUM_ROUNDS = 3  # timing rounds of each candidate
_MAX_TIMED = 3  # the number of candidates that are timed


def choose_by_timing(choice: Choice, devices: Sequence[jax.Device], num_seeds: int | None = None) -> Choice:
    """Times the three candidates with the best predictions, and returns a `Choice` of the fastest.

    `choice` is the result of `policies.auto` for the devices `devices`; `num_seeds` is as in `place`. Raises
    `FdgError` if none of them can be compiled. All processes must call this.
    """
    start_time = time.perf_counter()
    feasible = feasible_rows(choice.rows)
    timed_rows: list[Row] = []
    for row in feasible[:_MAX_TIMED]:
        try:
            algorithm, policy = _with_variant(choice.algorithm, row), row.candidate.policy
            seconds = iteration_seconds(algorithm, policy, devices[: row.candidate.devices], num_seeds)
            timed_rows.append(dataclasses.replace(row, measured=seconds))
        except FdgError as error:
            timed_rows.append(dataclasses.replace(row, prediction=None, refused=str(error)))
    ranked = sorted((row for row in timed_rows if row.prediction is not None), key=lambda row: row.seconds)
    if not ranked:
        raise FdgError(
            f"none of the best {len(timed_rows)} candidates could be compiled: {timed_rows[0].refused}"
        )
    untimed = [row for row in choice.rows if row not in feasible[:_MAX_TIMED]]
    refused = [row for row in timed_rows if row.prediction is None]
    return dataclasses.replace(
        choice,
        algorithm=_with_variant(choice.algorithm, ranked[0]),
        rows=(*ranked, *untimed, *refused),
        search_seconds=choice.search_seconds + time.perf_counter() - start_time,
    )


def _with_variant(algorithm: Any, row: Row) -> Any:
    """The algorithm with the fields that the candidate changes (`Candidate.variant`)."""
    variant = dict(row.candidate.variant)
    return dataclasses.replace(algorithm, **variant) if variant else algorithm


def iterations_of(
    algorithm: Any, policy: Any, devices: Sequence[jax.Device], num_seeds: int | None = None
) -> Iterations:
    """A job's iterations, compiled and ready to be timed; a round has at least two, so that groups overlap.

    Of a `cond` around fragments, all branches run, because early iterations may skip what later ones compute.
    """
    graph = trace(algorithm)
    graph = dataclasses.replace(graph, jaxpr=jaxprs.rewrite(graph.jaxpr, _run_all_branches))
    engine = compile_engine(algorithm, policy, with_host(policy, devices), num_seeds, graph)
    return Iterations(engine, engine.init(0), _ROUND_SECONDS, min_iterations=2)


def _run_all_branches(eqn: Any, inside: jaxprs.Inside) -> Any:
    """The rule of `jaxprs.rewrite` that makes each `cond` around fragments run all its branches."""
    eqn = inside(eqn)
    return jaxprs.all_branches(eqn) if jaxprs.may_run_all_branches(eqn) and fragments_in([eqn]) else eqn


def iteration_seconds(
    algorithm: Any, policy: Any, devices: Sequence[jax.Device], num_seeds: int | None = None
) -> float:
    """Seconds per iteration of the slowest process, in its fastest round."""
    iterations = iterations_of(algorithm, policy, devices, num_seeds)
    for _ in range(_NUM_ROUNDS):
        iterations.measure()
    return max(distributed.exchange(iterations.seconds))
