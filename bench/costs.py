"""Predicted and measured: seconds of an iteration by the cost model of `fdg.costs`, and by the clock.

    python -m bench.costs measure        each cell in a process of its own; continues where it was stopped
    python -m bench.costs report         the other half, of every machine: rank, median error, choices
    python -m bench.costs fit            the model's own numbers, from the first halves
    python -m bench.costs fit --machines and each machine's calibration to its jobs
    python -m bench.costs memory         estimated peak by XLA's own, of jobs of its own (`costs_memory`)
    python -m bench.costs search         CPU seconds of a choice among 244 candidates

A cell is an algorithm, an environment, sizes, a policy, a number of host devices and a staleness; with
`--of processes` two processes with a device each; with `--of streaming` a lag in micro-batches, where the
smallest lag that is predicted to be within 5% of the best is compared with the fastest. What was measured is
kept by machine (`bench/machines/`), with the machine's calibration. Measure on a quiet machine, after
`python -m fdg.calibrate` on the same.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fdg
from bench import harness
from bench.harness import ROOT, run_module
from bench.results import machine_facts
from fdg.costs import machine
from fdg.costs.choosing import TIE
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
    """What was measured of one, in a folder: its calibration, and a file for each kind of cells."""

    def __init__(self, name: str):
        self.name = name
        self.calibration_file = MACHINES / name / "calibration.json"

    @functools.cached_property
    def calibration(self) -> machine.Calibration:
        """That its predictions go by."""
        return machine.read(self.calibration_file)

    def file(self, kind: str) -> Path:
        """Of a kind of cells."""
        return MACHINES / self.name / f"{kind}.json"

    def stored(self, kind: str) -> dict[str, Any]:
        """What the file of a kind has so far."""
        file = self.file(kind)
        return json.loads(file.read_text()) if file.exists() else {"cells": {}}

    def measured(self, kind: str = "cells") -> list[tuple[Cell, float]]:
        """Cells of a kind, with seconds of an iteration."""
        cells = self.stored(kind)["cells"]
        return [(Cell.of_key(key), result["seconds"]) for key, result in cells.items() if "seconds" in result]


def this_machine() -> Machine:
    """By its processor: what it is called, and its features."""
    called = machine_facts()["processor"].lower().replace("(r)", "").replace("(tm)", "")
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
    result = []
    for some, counts in ((jobs, (1, 2, 4, 8)), (others, (1, 2, 4))):
        for (algorithm, env, fields), devices in itertools.product(some, counts):
            ways: list[tuple[str, tuple[tuple[str, Any], ...]]] = [("GPUOnly", ())]
            if devices > 1:
                ways += [("SingleLearnerCoarse", (("staleness", k),)) for k in (0, 1, 2)]
                ways += [("SingleLearnerFine", ()), ("Central", ())]
            result += [Cell(algorithm, env, fields, policy, sizes, devices) for policy, sizes in ways]
    return result


def cells_of_processes() -> list[Cell]:
    """Three algorithms, all on both processes, or actors on one and the learner on the other."""
    jobs = [
        ("PPO", "CartPole-v1", (("num_envs", 256), ("num_steps", 32))),
        ("PPO", "Pendulum-v1", (("num_envs", 128), ("num_steps", 64), ("hidden", (256, 256)))),
        ("PQN", "CartPole-v1", (("num_envs", 128), ("num_steps", 32))),
    ]
    ways: list[tuple[str, Any]] = [("GPUOnly", ())]
    ways += [("SingleLearnerCoarse", (("staleness", k),)) for k in (0, 1, 2)]
    return [Cell(*job, policy, sizes, 2) for job in jobs for policy, sizes in ways]


def cells_of_lags() -> list[Cell]:
    """Five lags of each of eight jobs: language models in micro-batches; rollouts, whose steps are these."""
    sizes = (("group_size", 4), ("hidden_size", 32), ("num_layers", 2), ("num_heads", 4))
    jobs: list[tuple] = [
        ("GRPO", f"text:{task}", (("num_prompts", prompts), ("micro_batches", parts), *sizes), "Split", parts)
        for task, prompts, parts in (
            ("sorting", 16, 4), ("sorting", 64, 8), ("addition", 32, 4), ("addition", 128, 8),
        )
    ] + [
        (name, env, (("num_envs", envs), ("num_steps", steps)), "SingleLearnerCoarse", steps)
        for name, env, envs, steps in (
            ("PPO", "CartPole-v1", 256, 32), ("PPO", "Acrobot-v1", 512, 16),
            ("IMPALA", "CartPole-v1", 256, 32), ("IMPALA", "Acrobot-v1", 128, 64),
        )
    ]  # fmt: skip
    return [
        Cell(name, env, fields, policy, (("lag", lag),), 2)
        for name, env, fields, policy, parts in jobs
        for lag in (0, 1, parts // 2, parts, 2 * parts)
    ]


KINDS = {"cells": cells, "processes": cells_of_processes, "streaming": cells_of_lags}
PROCESSES = {"processes": 2}  # one for cells of other kinds


# --- measuring ---


def measure_one(key: str, address: str, process: int) -> float:
    """In a process of its own, or one of two of them with an address: seconds of an iteration."""
    import jax

    from fdg.costs.candidate_times import iteration_seconds
    from fdg.processes import distributed

    cell = Cell.of_key(key)
    if address:
        distributed.initialize(address, 2, process)
    else:
        fdg.host_devices(cell.devices)
    seconds = iteration_seconds(*cell.build(), jax.devices("cpu")[: cell.devices])
    if address:
        distributed.leave()
    return seconds


def measured_apart(cell: Cell, processes: int) -> float:
    """Seconds of an iteration, in one or two processes of their own."""
    from fdg.processes.ports import free_port

    if processes == 1:
        return run_module("bench.costs", "one", cell.key, seconds=_TIMEOUT)
    address = f"localhost:{free_port('localhost')}"

    def said(process: int) -> float:
        words = ("one", cell.key, "--address", address, "--process", str(process))
        return run_module("bench.costs", *words, seconds=_TIMEOUT, JAX_NUM_CPU_DEVICES="1")

    with ThreadPoolExecutor(processes) as pool:
        return next(pool.map(said, range(processes)))


def measure(kind: str, only: str = "", again: bool = False, seconds: float = math.inf) -> None:
    """Every cell that was not measured here yet, or all once more; of two passes the better one is kept, for
    a shared machine is slow for minutes. Saved one by one.
    """
    calibration = machine.path_of("cpu")
    if calibration is None or not calibration.exists():
        raise SystemExit("error: this machine has no calibration: run python -m fdg.calibrate first")
    here = this_machine()
    here.calibration_file.parent.mkdir(parents=True, exist_ok=True)
    here.calibration_file.write_bytes(calibration.read_bytes())
    stored = here.stored(kind)
    end = time.monotonic() + seconds
    for cell in KINDS[kind]():
        if only not in str(cell) or (cell.key in stored["cells"] and not again):
            continue
        if time.monotonic() > end:
            print("time is up: run it again to go on")
            return
        before = stored["cells"].get(cell.key, {}).get("seconds", math.inf)
        try:
            seconds_now = measured_apart(cell, PROCESSES.get(kind, 1))
            stored["cells"][cell.key] = {"seconds": min(before, seconds_now)}
        except subprocess.SubprocessError as problem:
            if before == math.inf:
                stored["cells"][cell.key] = {"error": str(problem)}
        stored["machine"] = machine_facts()
        here.file(kind).write_text(json.dumps(stored, indent=1) + "\n")
        print(f"{cell}: {stored['cells'][cell.key]}", flush=True)


# --- reporting ---


def is_of(half: str, cell: Cell) -> bool:
    """Whether a cell is of a half: "fitted", "other" or "all"."""
    return half == "all" or cell.is_fitted == (half == "fitted")


def report(kind: str, half: str) -> None:
    """Of every machine, with the model as it is now: rank, errors and choices of cells of a half."""
    from scipy.stats import spearmanr

    from fdg.costs.choosing import break_ties
    from fdg.costs.prediction import predict

    processes = PROCESSES.get(kind, 1)
    for one in machines():
        print(f"{one.name}:")
        rows, of_groups = [], {}
        for cell, seconds in one.measured(kind):
            if is_of(half, cell):
                plan = fdg.place(*cell.build(), cell.devices)
                cluster = one.calibration.cluster(cell.devices // processes, processes)
                rows.append((cell, seconds, predict(plan, cluster).seconds))
                of_groups[cell] = len(plan.groups)
        if len(rows) < 3:
            print(f"{len(rows)} cells ({kind}) were measured: python -m bench.costs measure --of {kind}")
            continue
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
            if kind == "streaming":
                chosen = lag_taken(some)
            else:
                chosen = some[break_ties([(p, of_groups[cell], cell.devices) for cell, _, p in some])][1]
            losses.append(chosen / min(row[1] for row in some))
        if losses:
            within = TIE if kind == "streaming" else 1.1
            good, worst = sum(loss <= within for loss in losses) / len(losses), max(losses)
            print(
                f"{len(losses)} choices: {good:.0%} within {within - 1:.0%} of the best, the worst"
                f" {worst:.2f} times it"
            )
        stale = [row for row in rows if "staleness" in dict(row[0].sizes)]
        if stale:
            print(f"{len(stale)} cells of actors and learners: median error {median_error(stale)}")


def lag_taken(rows: Sequence[tuple[Cell, float, float]]) -> float:
    """Measured seconds with the smallest lag that is predicted to be within 5% of the best."""
    enough = TIE * min(p for *_, p in rows)
    return next(s for _, s, p in sorted(rows, key=lambda row: dict(row[0].sizes)["lag"]) if p <= enough)


def median_error(rows: Sequence[tuple[Any, float, float]]) -> str:
    """Of predictions beside what was measured."""
    return f"{statistics.median(abs(predicted / seconds - 1) for _, seconds, predicted in rows):.1%}"


def fit(half: str, of_machines: bool) -> None:
    """Prints the numbers to enter in `program_time.JOINED` and `overheads.OVERHEADS`: what a machine has that
    was not calibrated, and what a calibration starts from.

    Args:
      half: "fitted"; "all" says how well the model can do at best, and is not to be entered.
      of_machines: whether each kept calibration is fitted as `python -m fdg.calibrate` would. A machine that
        was calibrated before there were jobs has the times of its cells for them.
    """
    from fdg.costs.fitting import fit_overheads
    from fdg.training.reference_jobs import REFERENCE_JOBS, fit_to_jobs

    samples = [
        JobSample(fdg.place(*cell.build(), cell.devices), one.calibration.cluster(cell.devices), seconds)
        for one in machines()
        for cell, seconds in one.measured()
        if is_of(half, cell)
    ]
    # Of two hundred cells a few classes would end far from what a program can lose.
    fits = fit_overheads(samples, known=0.4)
    print(f"fitted to {len(samples)} cells: median error {fits.before:.1%} before, {fits.after:.1%} after")
    print(f"fdg/costs/program_time.py: {json.dumps(fits.joined)}")
    print(f"fdg/costs/overheads.py: {fits.overheads}")
    for one in machines() if of_machines else ():
        cells = {cell.key: seconds for cell, seconds in one.measured()}
        jobs = {job.key: cells[job.key] for job in REFERENCE_JOBS if job.key in cells}
        kept = one.calibration if one.calibration.jobs else dataclasses.replace(one.calibration, jobs=jobs)
        kept = fit_to_jobs(kept)
        one.calibration_file.write_text(json.dumps(kept.as_json(), indent=1) + "\n")
        print(f"{one.name}: fitted to {len(kept.jobs)} jobs: {kept.kind.joined}, {kept.kind.overheads}")


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
    parser.add_argument("what", choices=("measure", "one", "report", "fit", "memory", "search"))
    parser.add_argument("cell", nargs="?", default="", help="of `one`, which `measure` starts")
    parser.add_argument("--of", choices=KINDS, default="cells", help="measure, report: which cells")
    parser.add_argument("--only", default="", help="cells whose name holds this")
    parser.add_argument(
        "--again", action="store_true", help="once more what was already; the better of both is kept"
    )
    parser.add_argument("--half", choices=("other", "fitted", "all"), help="of cells; report: other")
    parser.add_argument("--seconds", type=float, default=math.inf, help="to measure for at most")
    parser.add_argument("--machines", action="store_true", help="fit: the calibrations of machines, too")
    parser.add_argument("--address", default="", help="one: of two processes")
    parser.add_argument("--process", type=int, default=0, help="one: its number")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from bench.costs_memory import memory

    {
        "measure": lambda: measure(args.of, args.only, args.again, args.seconds),
        "one": lambda: print(json.dumps(measure_one(args.cell, args.address, args.process))),
        "report": lambda: report(args.of, args.half or ("other" if args.of == "cells" else "all")),
        "fit": lambda: fit(args.half or "fitted", args.machines),
        "memory": lambda: memory(args.only, args.again),
        "search": search,
    }[args.what]()


if __name__ == "__main__":
    main()
