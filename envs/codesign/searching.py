"""Searches designs by training on a problem's environment; returns the best evaluated design."""

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import algos
import envs
import policies
from envs.codesign import environment, pictures, report
from envs.codesign.environment import CoDesign
from envs.codesign.found import Designs, Results
from envs.codesign.problem import Costs, Problem, Specs, costs_of, positions, repair, tables
from fdg.arguments import quoted
from fdg.errors import FdgError
from fdg.placing.policy import checked_devices
from fdg.processes import distributed
from fdg.training.fit import make_job
from fdg.training.job import Job
from fdg.training.loading import StoredRun
from fdg.training.loop import carry_out
from fdg.training.recorder import Report
from fdg.training.run_directory import read_metrics
from fdg.training.settings import flatten_config

SAMPLES = 5_000  # default number of designs to evaluate


@dataclasses.dataclass(frozen=True)
class Search(report.Outcome):
    """Results of a search, which also writes files."""

    def write(self, folder: str | Path | None = None) -> list[Path]:
        """Writes report, designs, pictures and files for other tools; returns their paths.

        Args:
          folder: None for the run directory.

        Raises:
          FdgError: no design is complete, or the folder cannot be written.
        """
        target = self.path if folder is None else Path(folder)
        if not math.isfinite(self.best.violation):
            raise FdgError(report.text(self))
        try:
            target.mkdir(parents=True, exist_ok=True)
            return [*report.write(self, target, pictures.NAMES), *pictures.draw(self, target)]
        except OSError as error:
            raise FdgError(f"{error.filename}: cannot be written ({error.strerror}): give another") from error


def search(
    of: str | Problem | CoDesign,
    *,
    algo: str = "ppo",
    samples: int = SAMPLES,
    policy: Any = None,
    devices: int | Sequence[jax.Device] | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    **hyperparameters: Any,
) -> Search:
    """Searches designs by reinforcement learning, as `fdg codesign` does; an ordinary training run.

    Args:
      of: a problem, its environment, or a name: `w1`, `w2`, `w3` or a TOML file, such as `w1?specs=tight`.
      algo: name of the algorithm.
      samples: designs to evaluate, rounded up to whole iterations of the algorithm.
      policy: the distribution policy; None for `policies.GPUOnly()`.
      devices: as in `fdg.fit`.
      seed: the seed of all random numbers.
      out: the run directory; None for one in `runs/`.
      resume: continue the run in `out`, if there is one.
      progress: print the best design so far.
      **hyperparameters: the algorithm's hyperparameters.

    Raises:
      FdgError: an invalid argument.

    Example::

        found = envs.codesign.search("w1?specs=tight", samples=5_000)
        print(found)
        found.write("w1")
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise FdgError(f"samples={samples!r}: give a whole number of designs, at least 1")
    if isinstance(of, str):
        name, parameters = envs.parse(f"{environment.PREFIX}{of}")
        of = envs.make(name, **parameters)
    if not isinstance(of, CoDesign | Problem):
        raise FdgError(
            f"{quoted(of)} is not a co-design problem: give one, its environment, or a name such as 'w1'"
        )
    env = of if isinstance(of, CoDesign) else CoDesign(of)
    algorithm = algos.make(algo, env, **hyperparameters)
    job, start = make_job(
        algorithm,
        policies.GPUOnly() if policy is None else policy,
        total_steps=total_steps_of(samples, algorithm),
        seed=seed,
        out=out,
        resume=resume,
        eval_episodes=0,
    )
    return run(job, start, None if devices is None else checked_devices(devices), progress)


def total_steps_of(samples: int, algorithm: Any) -> int:
    """Environment steps in which an algorithm evaluates at least this many designs, in whole iterations."""
    num_envs = getattr(algorithm, "num_envs", 1)
    steps = num_envs * -(-samples // num_envs) * _environment_of(algorithm).max_episode_steps
    return -(-steps // algorithm.steps_per_iteration) * algorithm.steps_per_iteration


def _environment_of(algorithm: Any) -> CoDesign:
    """The algorithm's environment; raises an `FdgError` if it is not a `CoDesign`."""
    env = getattr(algorithm, "env", None)
    if not isinstance(env, CoDesign):
        raise FdgError(f"{getattr(env, 'name', env)} is not a co-design problem: give a TOML file of one")
    return env


def check(job: Job) -> None:
    """Refuses to resume a run that is not a search.

    Raises:
      FdgError: the run has another environment.
    """
    env = getattr(job.algorithm, "env", None)
    if job.resumes and not isinstance(env, CoDesign):
        kind = f"{job.described['algo']} on {job.described['env']}" if env else f"{job.described['algo']}"
        raise FdgError(f"{job.out} is a run of {kind}, not a search: fdg train --resume {job.out}")


def run(
    job: Job,
    start_from: StoredRun | None = None,
    devices: Sequence[jax.Device] | None = None,
    progress: bool = True,
) -> Search:
    """Runs a job whose environment is a `CoDesign`; for the arguments see `carry_out`."""
    check(job)
    env = _environment_of(job.algorithm)
    if job.agents is not None:
        raise FdgError("a search has one controller: leave out --num-seeds and --sweep, and use fdg train")
    start = time.perf_counter()
    callback = [_Progress(job.algorithm, start)] if progress else []
    searched = dataclasses.replace(job, algorithm=WithBest(job.algorithm))
    outcome = carry_out(searched, start_from, devices, callback, quiet=True)
    if outcome.state is not None:
        state: Any = outcome.engine.algorithm_state(outcome.state)
        state = state if distributed.count() == 1 else distributed.gather(state)
    elif distributed.is_first():  # already complete
        stored = StoredRun.open(outcome.run.path, flatten_config(job.config), algorithm=job.algorithm)
        state = stored.restore().state
    else:
        state = None
    designs = _shared_results(env, state)
    is_met = bool(designs.best.violation == 0)
    return Search(
        problem=env.problem,
        best=designs.best,
        front=designs.front,
        samples=_completed(job.algorithm, outcome.iteration),
        seconds=time.perf_counter() - start,
        curve=tuple(
            (_completed(job.algorithm, row["iteration"]), row["best_score"], row["best_violation"])
            for row in (read_metrics(outcome.run.path / "metrics.jsonl") if distributed.is_first() else ())
            if row.get("best_score") is not None
        ),
        least=None if is_met else least_of_each(env.problem),
        path=outcome.run.path,
        caught=outcome.caught,
    )


def _shared_results(env: CoDesign, state: Any) -> Results:
    """The results of process 0, in every process; `state` is None on the others."""
    leaves = [] if state is None else [np.asarray(x) for x in jax.tree.leaves(env.designs(state))]
    shared = distributed.exchange([(str(x.dtype), x.shape, x.ravel().tolist()) for x in leaves])[0]
    arrays: list[Any] = [np.asarray(x, dtype).reshape(shape) for dtype, shape, x in shared]
    num_fields = len(Designs._fields)
    return Results(Designs(*arrays[:num_fields]), Designs(*arrays[num_fields:]))


def _completed(algorithm: Any, iterations: int) -> int:
    """The number of complete designs after this many iterations."""
    num_envs, episode_steps = getattr(algorithm, "num_envs", 1), algorithm.env.max_episode_steps
    return num_envs * (iterations * algorithm.steps_per_iteration // num_envs // episode_steps)


@dataclasses.dataclass(frozen=True)
class WithBest:
    """An algorithm with two more metrics of the best design so far: `best_score` and `best_violation`.

    `best_violation` is the total excess over the specs. Both are NaN before the first design.
    """

    algorithm: Any

    def init(self, key: jax.Array) -> Any:
        """The algorithm's initial state."""
        return self.algorithm.init(key)

    def iterate(self, state: Any) -> tuple[Any, dict[str, jax.Array]]:
        """The algorithm's iteration, with the two metrics."""
        state, metrics = self.algorithm.iterate(state)
        leaves = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, environment.State))
        best = next(leaf for leaf in leaves if isinstance(leaf, environment.State)).best
        violation = best.violation.min()
        score = jnp.where(best.violation == violation, best.score, -jnp.inf).max()
        has_design = jnp.isfinite(violation)
        best_design = {
            "best_score": jnp.where(has_design, score, jnp.nan),
            "best_violation": jnp.where(has_design, violation, jnp.nan),
        }
        return state, {**metrics, **best_design}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "algorithm":
            raise AttributeError(name)
        return getattr(self.algorithm, name)


class _Progress:
    """Prints the best design so far: ten times a run, and at other reports if five seconds have passed."""

    def __init__(self, algorithm: Any, start: float):
        self._algorithm, self._start = algorithm, start
        self._last_print = (-math.inf, -1.0)  # the time, and the tenth of the run, of the last print

    def __call__(self, recorded: Report) -> None:
        now = time.perf_counter()
        tenth = 10 * recorded.iteration // recorded.num_iterations
        if tenth == self._last_print[1] and now - self._last_print[0] < 5:
            return
        self._last_print = now, tenth
        row = recorded.rows[-1]
        done, total = (
            _completed(self._algorithm, count) for count in (recorded.iteration, recorded.num_iterations)
        )
        score, violation = row["best_score"], row["best_violation"]
        if not math.isfinite(violation):
            text = "no design is complete yet"
        elif violation == 0:
            text = f"the best meets the specs, score {score:.4f}"
        else:
            over = report.as_percent(violation)
            text = f"none meets the specs yet; the nearest exceeds them by {over} in all"
        print(f"{done:>9,} of {total:,} designs, {now - self._start:5.1f} s: {text}", flush=True)


_POPULATION, _SURVIVORS, _GENERATIONS = 1024, 128, 12  # of the evolutionary search


def least_of_each(problem: Problem, seed: int = 0) -> Specs:
    """The least latency, energy and area that designs reach, each minimised alone by an evolutionary search.

    Each of the three searches tries about 12,000 designs. The specs are ignored.
    """
    random = np.random.default_rng(seed)
    counts = np.asarray([len(one.options) for one in problem.decisions()])
    population = random.integers(0, counts, (_POPULATION, len(counts)))
    least = []
    for cost_index in range(3):
        designs, costs = _costs(problem, jnp.asarray(population, jnp.int32))
        for _ in range(_GENERATIONS):
            survivors = np.asarray(designs)[
                np.argsort(np.asarray(costs[cost_index]), kind="stable")[:_SURVIVORS]
            ]
            offspring = survivors[random.integers(0, _SURVIVORS, _POPULATION - _SURVIVORS)]
            is_mutated = random.random(offspring.shape) < 2 / len(counts)  # two of a design, on average
            offspring = np.where(is_mutated, random.integers(0, counts, offspring.shape), offspring)
            designs, costs = _costs(problem, jnp.asarray(np.concatenate([survivors, offspring]), jnp.int32))
        least.append(float(costs[cost_index].min()))
    return Specs(*least)


@functools.partial(jax.jit, static_argnames="problem")
def _costs(problem: Problem, population: jax.Array) -> tuple[jax.Array, Costs]:
    """Repairs designs `[designs, decisions]`; returns them and their costs."""
    cost_tables = tables(problem)

    def evaluate(choices: jax.Array) -> tuple[jax.Array, Costs]:
        design = repair(problem, choices)
        return design, costs_of(problem, cost_tables, *positions(problem, design))

    return jax.vmap(evaluate)(population)
