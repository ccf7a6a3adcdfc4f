"""Predicted against measured: what the cost model of `fdg.costs` says of an iteration, and what it takes.

    python -m bench.costs measure        each cell in a process of its own; goes on where it was stopped
    python -m bench.costs report         the other half, of every machine: rank, median error, choices
    python -m bench.costs memory         estimated peak by XLA's own, of jobs of its own (`costs_memory`)
    python -m bench.costs search         CPU seconds of a choice among 244 candidates
    python -m bench.costs paper          MSRL's two clusters, and 4,096 H100s: figures and pictures

`python -m bench.costs_fit` fits the model's own numbers to the first halves; `bench.costs_processes` does the
same as `measure` and `report` for two processes, `bench.costs_streaming` for lags in micro-batches.

A cell is an algorithm, an environment, sizes, a policy, a number of host devices and a staleness. What was
measured is kept by machine (`bench/machines/`), with the machine's calibration. Measure on a quiet machine,
after `python -m fdg.calibrate` on the same.
"""

import functools
import hashlib
import itertools
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fdg
from bench import harness
from bench.harness import ROOT, said_by
from bench.results import described
from fdg.costs import machine
from fdg.costs.fitting import JobSample
from fdg.training.reference_jobs import ReferenceJob

MACHINES = ROOT / "bench" / "machines"
_TIMEOUT = 300


class Cell(ReferenceJob):
    """One thing to predict and measure."""

    @property
    def group(self) -> str:
        """What a policy is chosen for: all but the policy."""
        return json.dumps([self.algorithm, self.env, self.fields, self.devices])

    @property
    def is_fitted(self) -> bool:
        """Which half: by the cell's own name, so that neither order nor number of cells moves it."""
        return hashlib.sha256(self.group.encode()).digest()[0] % 2 == 0


class Machine:
    """What was measured of one, in a folder: its calibration, its cells, those of two processes, of lags."""

    def __init__(self, name: str):
        self.name = name
        self.calibration_file, self.cells_file, self.processes_file, self.streaming_file = (
            MACHINES / name / f"{file}.json" for file in ("calibration", "cells", "processes", "streaming")
        )

    @functools.cached_property
    def calibration(self) -> machine.Calibration:
        """That its predictions go by."""
        return machine.read(self.calibration_file)

    def stored(self, file: Path) -> dict[str, Any]:
        """What a file has so far."""
        return json.loads(file.read_text()) if file.exists() else {"cells": {}}

    def store(self, file: Path, content: dict[str, Any]) -> None:
        """With what machine it was."""
        content["machine"] = described()
        file.write_text(json.dumps(content, indent=1) + "\n")

    def measured(self) -> list[tuple[Cell, float]]:
        """Its cells, with seconds of an iteration."""
        return self.found(self.cells_file)

    def found(self, file: Path) -> list[tuple[Cell, float]]:
        """Those of a file, with seconds of an iteration."""
        cells = self.stored(file)["cells"]
        return [(Cell.of_key(key), found["seconds"]) for key, found in cells.items() if "seconds" in found]

    def samples(self, half: str) -> list[JobSample]:
        """Its cells of a half ("fitted", "other" or "all"), to fit to."""
        return [
            JobSample(fdg.place(*cell.build(), cell.devices), self.calibration.cluster(cell.devices), seconds)
            for cell, seconds in self.measured()
            if half == "all" or cell.is_fitted == (half == "fitted")
        ]


def this_machine() -> Machine:
    """By its processor: what it is called, and its features."""
    called = described()["processor"].lower().replace("(r)", "").replace("(tm)", "")
    words = "".join(c if c.isalnum() else " " for c in called).split()
    return Machine("-".join([*words[:2], machine.fingerprint("cpu")["processor"][:6]]))


def machines() -> list[Machine]:
    """All that have cells."""
    return [Machine(path.parent.name) for path in sorted(MACHINES.glob("*/cells.json"))]


def cells() -> list[Cell]:
    """All of them."""
    jobs = [
        ("PPO", "CartPole-v1", (("num_envs", 16), ("num_steps", 32))),
        ("PPO", "CartPole-v1", (("num_envs", 256), ("num_steps", 32))),
        ("PPO", "Acrobot-v1", (("num_envs", 1024), ("num_steps", 16), ("hidden", (128, 128)))),
        ("PPO", "Pendulum-v1", (("num_envs", 128), ("num_steps", 64), ("hidden", (256, 256)))),
        ("A2C", "CartPole-v1", (("num_envs", 512), ("num_steps", 8))),
        ("IMPALA", "Acrobot-v1", (("num_envs", 256), ("num_steps", 32))),
        ("PQN", "CartPole-v1", (("num_envs", 128), ("num_steps", 32))),
        ("DQN", "CartPole-v1", (("num_envs", 64), ("learning_starts", 1000))),
    ]
    others = [
        ("PPO", "MountainCar-v0", (("num_envs", 512), ("num_steps", 64))),
        ("A2C", "Acrobot-v1", (("num_envs", 2048), ("num_steps", 8), ("hidden", (128, 128)))),
        ("A2C", "Pendulum-v1", (("num_envs", 64), ("num_steps", 32), ("hidden", (256, 256)))),
        ("IMPALA", "CartPole-v1", (("num_envs", 64), ("num_steps", 64))),
        ("PQN", "Acrobot-v1", (("num_envs", 1024), ("num_steps", 16))),
        ("SAC", "Pendulum-v1", (("num_envs", 16), ("learning_starts", 1000))),
        ("IPPO", "MPE_simple_spread_v3", (("num_envs", 64), ("num_steps", 25))),
    ]
    found = []
    for some, counts in ((jobs, (1, 2, 4, 8)), (others, (1, 2, 4))):
        for (algorithm, env, fields), devices in itertools.product(some, counts):
            ways: list[tuple[str, tuple[tuple[str, Any], ...]]] = [("GPUOnly", ())]
            if devices > 1:
                ways += [("SingleLearnerCoarse", (("staleness", k),)) for k in (0, 1, 2)]
                ways += [("SingleLearnerFine", ()), ("Central", ())]
            found += [Cell(algorithm, env, fields, policy, sizes, devices) for policy, sizes in ways]
    return found


# --- measuring ---


def measure_one(key: str) -> dict[str, float]:
    """In a process of its own: seconds of an iteration."""
    import jax

    from fdg.costs.candidate_times import iteration_seconds

    cell = Cell.of_key(key)
    fdg.host_devices(cell.devices)
    return {"seconds": iteration_seconds(*cell.build(), jax.devices("cpu")[: cell.devices])}


def measured_apart(cell: Cell) -> float:
    """Seconds of an iteration, in a process of its own."""
    return said_by("bench.costs", "one", cell.key, seconds=_TIMEOUT)["seconds"]


def measure(
    some: Sequence[Cell],
    file: Path,
    measured: Callable[[Cell], float] = measured_apart,
    only: str = "",
    again: bool = False,
    seconds: float = math.inf,
) -> None:
    """Every cell that was not measured here yet, or all once more; of two passes the better one is kept, for
    a shared machine is slow for minutes. Saved one by one.
    """
    calibration = machine.path_of("cpu")
    if calibration is None or not calibration.exists():
        raise SystemExit("error: this machine has no calibration: run python -m fdg.calibrate first")
    here = this_machine()
    here.calibration_file.parent.mkdir(parents=True, exist_ok=True)
    here.calibration_file.write_bytes(calibration.read_bytes())
    stored = here.stored(file)
    end = time.monotonic() + seconds
    for cell in some:
        if only not in str(cell) or (cell.key in stored["cells"] and not again):
            continue
        if time.monotonic() > end:
            print("time is up: run it again to go on")
            return
        before = stored["cells"].get(cell.key, {}).get("seconds", math.inf)
        try:
            stored["cells"][cell.key] = {"seconds": min(before, measured(cell))}
        except subprocess.SubprocessError as problem:
            if before == math.inf:
                stored["cells"][cell.key] = {"error": str(problem)}
        here.store(file, stored)
        print(f"{cell}: {stored['cells'][cell.key]}", flush=True)


# --- reporting ---


def report(half: str) -> None:
    """Of every machine, with the model as it is now: rank, errors and choices of cells of a half."""
    from scipy.stats import spearmanr

    from fdg.costs.choosing import preferred
    from fdg.costs.prediction import predict

    for one in machines():
        print(f"{one.name}:")
        rows, of_groups = [], {}
        for cell, seconds in one.measured():
            if half == "all" or cell.is_fitted == (half == "fitted"):
                plan = fdg.place(*cell.build(), cell.devices)
                rows.append((cell, seconds, predict(plan, one.calibration.cluster(cell.devices)).seconds))
                of_groups[cell] = len(plan.groups)
        if len(rows) < 3:
            raise SystemExit(f"error: {len(rows)} cells were measured: python -m bench.costs measure first")
        rank = spearmanr([s for _, s, _ in rows], [p for _, _, p in rows]).statistic
        print(f"{len(rows)} cells ({half}): Spearman {rank:.3f}, median error {median_error(rows)}")
        for cell, s, p in sorted(rows, key=lambda row: -abs(math.log(row[2] / row[1]))):
            print(f"  {p / s:6.2f}  measured {s * 1e3:9.3f} ms  predicted {p * 1e3:9.3f} ms  {cell}")
        groups: dict[str, list[tuple[Cell, float, float]]] = {}
        for row in rows:
            if dict(row[0].sizes).get("staleness", 0) == 0:
                groups.setdefault(row[0].group, []).append(row)
        losses = []
        for some in (some for some in groups.values() if len(some) > 1):
            chosen = some[preferred([(p, of_groups[cell], cell.devices) for cell, _, p in some])]
            losses.append(chosen[1] / min(row[1] for row in some))
        if losses:
            good, worst = sum(loss <= 1.1 for loss in losses) / len(losses), max(losses)
            print(f"{len(losses)} choices: {good:.0%} within 10% of the best, the worst {worst:.2f} times it")
        stale = [row for row in rows if "staleness" in dict(row[0].sizes)]
        if stale:
            print(f"{len(stale)} cells of actors and learners: median error {median_error(stale)}")


def median_error(rows: Sequence[tuple[Any, float, float]]) -> str:
    """Of predictions beside what was measured."""
    return f"{statistics.median(abs(predicted / seconds - 1) for _, seconds, predicted in rows):.1%}"


def search() -> None:
    """CPU seconds of a choice among more than two hundred: PPO with 4,096 environments on 64 H100s."""
    import algos
    import envs
    import policies
    from fdg.costs import published
    from fdg.costs.hardware import Cluster

    cluster = Cluster(published.kind("H100"), 8, 8, *published.usual_links("H100"))
    algorithm = algos.PPO(env=envs.make("CartPole-v1"), num_envs=4096)
    begun = time.process_time()
    choice = policies.auto(algorithm, cluster, max_staleness=2)
    print(f"{len(choice.rows)} candidates: {time.process_time() - begun:.2f} CPU seconds; {choice.reason}")


def main() -> None:
    parser = harness.parser("bench.costs", __doc__)
    parser.add_argument("what", choices=("measure", "one", "report", "memory", "search", "paper"))
    parser.add_argument("cell", nargs="?", default="")
    parser.add_argument("--only", default="", help="cells whose name holds this")
    parser.add_argument(
        "--again", action="store_true", help="once more what was already; the better of both is kept"
    )
    parser.add_argument("--half", choices=("other", "fitted", "all"), default="other")
    parser.add_argument("--seconds", type=float, default=math.inf, help="to measure for at most")
    given = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from bench.costs_memory import memory
    from bench.costs_paper import paper

    {
        "measure": lambda: measure(
            cells(), this_machine().cells_file, measured_apart, given.only, given.again, given.seconds
        ),
        "one": lambda: print(json.dumps(measure_one(given.cell))),
        "report": lambda: report(given.half),
        "memory": lambda: memory(given.only, given.again),
        "search": search,
        "paper": paper,
    }[given.what]()


if __name__ == "__main__":
    main()
