"""Compares the cost model (`fdg.costs`) with measured seconds per iteration.

    python -m bench.costs measure        measures each cell in its own process; resumes
    python -m bench.costs report         prints errors and choices by machine, for the cells left out of `fit`
    python -m bench.costs fit            fits the model's constants to one half of the cells
    python -m bench.costs fit --machines also fits each machine's calibration to its jobs
    python -m bench.costs memory         compares estimated peak memory with XLA's (`costs_memory`)
    python -m bench.costs search         times the choice of a policy among 245 candidates

A cell is an algorithm, an environment, settings, a policy (with its staleness) and a number of host devices.
Cells of `--of processes` have two processes with one device each. Cells of `--of streaming` have a lag, in
micro-batches; the model chooses the smallest lag whose predicted time is within 5% of the shortest.
`bench/machines/` has the measured seconds and the calibration of each machine. Measure on a quiet machine,
after `python -m fdg.calibrate`.
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
from bench import harness, results
from bench.harness import ROOT, run_module
from fdg.costs import machine
from fdg.costs.choosing import TIE
from fdg.costs.fitting import JobSample
from fdg.training.reference_jobs import ReferenceJob

MACHINES = ROOT / "bench" / "machines"
_TIMEOUT = 300  # seconds in which a cell must be measured

# Policies: name of the class, and fields.
_GPU_ONLY: tuple[str, Any] = ("GPUOnly", ())
_COARSE: list[tuple[str, Any]] = [("SingleLearnerCoarse", (("staleness", i),)) for i in (0, 1, 2)]


class Cell(ReferenceJob):
    """A job to predict and measure."""

    @property
    def job_name(self) -> str:
        """The cell without its policy. Cells of the same job compete: the model chooses one policy."""
        return json.dumps([self.algorithm, self.env, self.fields, self.devices])

    @property
    def is_fitted(self) -> bool:
        """Whether the model is fitted to this cell; a hash chooses half of the jobs."""
        return hashlib.sha256(self.job_name.encode()).digest()[0] % 2 == 0


class Machine:
    """The folder of a machine: its calibration, and a file of measured seconds for each kind of cells."""

    def __init__(self, name: str):
        self.name = name
        self.calibration_file = MACHINES / name / "calibration.json"

    @functools.cached_property
    def calibration(self) -> machine.Calibration:
        return machine.read(self.calibration_file)

    def file(self, kind: str) -> Path:
        return MACHINES / self.name / f"{kind}.json"

    def measured_cells(self, kind: str = "cells") -> list[tuple[Cell, float]]:
        """Cells of a kind, each with its measured seconds per iteration."""
        cells = results.read(self.file(kind)).get("cells", {})
        return [(Cell.of_key(key), result["seconds"]) for key, result in cells.items() if "seconds" in result]


def this_machine() -> Machine:
    """This machine; its name consists of the processor's name and a hash of the processor's features."""
    name = results.machine_facts()["processor"].lower().replace("(r)", "").replace("(tm)", "")
    parts = "".join(c if c.isalnum() else " " for c in name).split()
    return Machine("-".join([*parts[:2], machine.fingerprint("cpu")["processor"][:6]]))


def machines(kind: str = "cells") -> list[Machine]:
    """All machines with measured cells of a kind."""
    return [Machine(path.parent.name) for path in sorted(MACHINES.glob(f"*/{kind}.json"))]


def cells() -> list[Cell]:
    """Cells of one process: each job on one device, and on several devices under several policies."""
    jobs = [  # algorithm, environment, fields of the algorithm
        ("PPO", "CartPole-v1", (("num_envs", 16), ("num_steps", 32))),
        ("PPO", "CartPole-v1", (("num_envs", 256), ("num_steps", 32))),
        ("PPO", "Acrobot-v1", (("num_envs", 1024), ("num_steps", 16), ("hidden", (128, 128)))),
        ("PPO", "Pendulum-v1", (("num_envs", 128), ("num_steps", 64), ("hidden", (256, 256)))),
        ("A2C", "CartPole-v1", (("num_envs", 512), ("num_steps", 8))),
        ("IMPALA", "Acrobot-v1", (("num_envs", 256), ("num_steps", 32))),
        ("PQN", "CartPole-v1", (("num_envs", 128), ("num_steps", 32))),
        ("DQN", "CartPole-v1", (("num_envs", 64), ("learning_starts", 1000))),
    ]
    more_jobs = [
        ("PPO", "MountainCar-v0", (("num_envs", 512), ("num_steps", 64))),
        ("A2C", "Acrobot-v1", (("num_envs", 2048), ("num_steps", 8), ("hidden", (128, 128)))),
        ("A2C", "Pendulum-v1", (("num_envs", 64), ("num_steps", 32), ("hidden", (256, 256)))),
        ("IMPALA", "CartPole-v1", (("num_envs", 64), ("num_steps", 64))),
        ("PQN", "Acrobot-v1", (("num_envs", 1024), ("num_steps", 16))),
        ("SAC", "Pendulum-v1", (("num_envs", 16), ("learning_starts", 1000))),
        ("IPPO", "MPE_simple_spread_v3", (("num_envs", 64), ("num_steps", 25))),
    ]
    result = []
    for job_list, counts in ((jobs, (1, 2, 4, 8)), (more_jobs, (1, 2, 4))):
        for job, devices in itertools.product(job_list, counts):
            placements = [*_COARSE, ("SingleLearnerFine", ()), ("Central", ())] if devices > 1 else []
            result += [Cell(*job, name, arguments, devices) for name, arguments in [_GPU_ONLY, *placements]]
    return result


def cells_of_processes() -> list[Cell]:
    """Cells of three jobs: every role on both processes, or actors on one and the learner on the other."""
    jobs = [
        ("PPO", "CartPole-v1", (("num_envs", 256), ("num_steps", 32))),
        ("PPO", "Pendulum-v1", (("num_envs", 128), ("num_steps", 64), ("hidden", (256, 256)))),
        ("PQN", "CartPole-v1", (("num_envs", 128), ("num_steps", 32))),
    ]
    return [Cell(*job, name, arguments, 2) for job in jobs for name, arguments in (_GPU_ONLY, *_COARSE)]


def cells_of_lags() -> list[Cell]:
    """Five lags for each of eight jobs: four language models, and four with one step per micro-batch."""
    model = (("group_size", 4), ("hidden_size", 32), ("num_layers", 2), ("num_heads", 4))
    jobs: list[tuple] = [  # algorithm, environment, fields, policy, micro-batches per iteration
        ("GRPO", f"text:{task}", (("num_prompts", prompts), ("micro_batches", count), *model), "Split", count)
        for task, prompts, count in (
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
        for name, env, fields, policy, micro_batches in jobs
        for lag in (0, 1, micro_batches // 2, micro_batches, 2 * micro_batches)
    ]


KINDS = {"cells": cells, "processes": cells_of_processes, "streaming": cells_of_lags}  # values of `--of`
PROCESSES = {"processes": 2}  # processes of a kind of cells; other kinds have one


def measure_one(key: str, address: str, process: int) -> float:
    """Seconds per iteration of the cell with a key, in this process.

    With an address, this process is number `process` (0 or 1) of two. `measure_in_processes` starts it.
    """
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


def measure_in_processes(cell: Cell, processes: int) -> float:
    """Seconds per iteration, measured in one or two new processes."""
    from fdg.processes.ports import free_port

    if processes == 1:
        return run_module("bench.costs", "one", cell.key, seconds=_TIMEOUT)
    address = f"localhost:{free_port('localhost')}"

    def run(process: int) -> float:
        arguments = ("one", cell.key, "--address", address, "--process", str(process))
        return run_module("bench.costs", *arguments, seconds=_TIMEOUT, JAX_NUM_CPU_DEVICES="1")

    with ThreadPoolExecutor(processes) as pool:
        return next(pool.map(run, range(processes)))


def measure(kind: str, only: str, again: bool, seconds: float) -> None:
    """Measures cells of a kind, and saves each result at once.

    A cell keeps its shortest time, because a shared machine can be slow for minutes.

    Args:
      kind: a key of `KINDS`.
      only: a text that the cells' names contain; if empty, all cells.
      again: whether to measure measured cells again.
      seconds: no cell starts after this time.
    """
    calibration = machine.path_of("cpu")
    if calibration is None or not calibration.exists():
        raise SystemExit("error: this machine has no calibration: run python -m fdg.calibrate first")
    machine_here = this_machine()
    machine_here.calibration_file.parent.mkdir(parents=True, exist_ok=True)
    machine_here.calibration_file.write_bytes(calibration.read_bytes())
    stored = results.read(machine_here.file(kind)) or {"cells": {}}
    end = time.monotonic() + seconds
    for cell in KINDS[kind]():
        if only not in str(cell) or (cell.key in stored["cells"] and not again):
            continue
        if time.monotonic() > end:
            print("time is up: run it again to continue")
            return
        before = stored["cells"].get(cell.key, {}).get("seconds", math.inf)
        try:
            seconds_now = measure_in_processes(cell, PROCESSES.get(kind, 1))
            stored["cells"][cell.key] = {"seconds": min(before, seconds_now)}
        except subprocess.SubprocessError as problem:
            if before == math.inf:
                stored["cells"][cell.key] = {"error": str(problem)}
        stored["machine"] = results.machine_facts()
        machine_here.file(kind).write_text(json.dumps(stored, indent=1) + "\n")
        print(f"{cell}: {stored['cells'][cell.key]}", flush=True)


def is_in_half(half: str, cell: Cell) -> bool:
    """Whether a cell belongs to "fitted", "other" or "all"."""
    return half == "all" or cell.is_fitted == (half == "fitted")


def report(kind: str, half: str) -> None:
    """Prints rank correlation, errors and choices of the cost model, by machine, for a half of the cells."""
    from scipy.stats import spearmanr

    from fdg.costs.choosing import break_ties
    from fdg.costs.prediction import predict

    processes = PROCESSES.get(kind, 1)
    for host in machines(kind):
        print(f"{host.name}:")
        rows, num_groups = [], {}  # (cell, measured s, predicted s); groups of each cell's plan
        for cell, seconds in host.measured_cells(kind):
            if is_in_half(half, cell):
                plan = fdg.place(*cell.build(), cell.devices)
                cluster = host.calibration.cluster(cell.devices // processes, processes)
                rows.append((cell, seconds, predict(plan, cluster).seconds))
                num_groups[cell] = len(plan.groups)
        if len(rows) < 3:
            print(f"only {len(rows)} cells are measured: python -m bench.costs measure --of {kind}")
            continue
        rank = spearmanr([s for _, s, _ in rows], [p for _, _, p in rows]).statistic
        print(f"{len(rows)} cells ({half}): Spearman {rank:.3f}, median error {median_error(rows)}")
        for cell, seconds, predicted in sorted(rows, key=lambda row: -abs(math.log(row[2] / row[1]))):
            print(
                f"  {predicted / seconds:6.2f}  measured {seconds * 1e3:9.3f} ms"
                f"  predicted {predicted * 1e3:9.3f} ms  {cell}"
            )
        jobs: dict[str, list[tuple[Cell, float, float]]] = {}  # the rows of each job
        for row in rows:
            if dict(row[0].policy_fields).get("staleness", 0) == 0:
                jobs.setdefault(row[0].job_name, []).append(row)
        slowdowns = []
        for job_rows in (job_rows for job_rows in jobs.values() if len(job_rows) > 1):
            if kind == "streaming":
                chosen = seconds_of_chosen_lag(job_rows)
            else:
                ranks = [(p, num_groups[cell], cell.devices) for cell, _, p in job_rows]
                chosen = job_rows[break_ties(ranks)][1]
            slowdowns.append(chosen / min(row[1] for row in job_rows))
        if slowdowns:
            limit = TIE if kind == "streaming" else 1.1
            good, worst = sum(slowdown <= limit for slowdown in slowdowns) / len(slowdowns), max(slowdowns)
            print(
                f"{len(slowdowns)} choices: {good:.0%} within {limit - 1:.0%} of the best; the worst takes"
                f" {worst:.2f} times as long as the best"
            )
        coarse = [row for row in rows if "staleness" in dict(row[0].policy_fields)]  # also staleness 0
        if coarse:
            print(f"{len(coarse)} cells with actors and learners: median error {median_error(coarse)}")


def seconds_of_chosen_lag(rows: Sequence[tuple[Cell, float, float]]) -> float:
    """Measured seconds with the smallest lag whose prediction is within 5% of the best."""
    threshold = TIE * min(p for *_, p in rows)
    return next(
        s for _, s, p in sorted(rows, key=lambda row: dict(row[0].policy_fields)["lag"]) if p <= threshold
    )


def median_error(rows: Sequence[tuple[Any, float, float]]) -> str:
    """The median relative error of predictions."""
    return f"{statistics.median(abs(predicted / seconds - 1) for _, seconds, predicted in rows):.1%}"


def fit(half: str, with_calibrations: bool) -> None:
    """Fits the model, and prints new values of `program_time.SHARES_AFTER_FUSION` and `overheads.OVERHEADS`.

    A machine without a calibration uses these values, and a calibration starts from them.

    Args:
      half: "fitted"; "all" shows the best possible fit, whose values do not belong in the code.
      with_calibrations: whether to fit each machine's calibration as `python -m fdg.calibrate` does. If a
        calibration has no reference jobs, the times of the machine's cells replace them.
    """
    from fdg.costs.fitting import fit_overheads
    from fdg.training.reference_jobs import REFERENCE_JOBS, fit_to_jobs

    samples = [
        JobSample(fdg.place(*cell.build(), cell.devices), host.calibration.cluster(cell.devices), seconds)
        for host in machines()
        for cell, seconds in host.measured_cells()
        if is_in_half(half, cell)
    ]
    # `prior_weight` keeps a constant near a plausible value if few cells have its operation.
    fits = fit_overheads(samples, prior_weight=0.4)
    print(f"fitted to {len(samples)} cells: median error {fits.before:.1%} before, {fits.after:.1%} after")
    print(f"fdg/costs/program_time.py: {json.dumps(fits.shares_after_fusion)}")
    print(f"fdg/costs/overheads.py: {fits.overheads}")
    for host in machines() if with_calibrations else ():
        cells = {cell.key: seconds for cell, seconds in host.measured_cells()}
        jobs = {job.key: cells[job.key] for job in REFERENCE_JOBS if job.key in cells}
        old = host.calibration
        new = fit_to_jobs(old if old.jobs else dataclasses.replace(old, jobs=jobs))
        host.calibration_file.write_text(json.dumps(new.as_json(), indent=1) + "\n")
        print(f"{host.name}, {len(new.jobs)} jobs: {new.kind.shares_after_fusion}, {new.kind.overheads}")


def search() -> None:
    """Prints the CPU seconds for choosing a policy of PPO with 4,096 environments on 64 H100s."""
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
    parser.add_argument("cell", nargs="?", default="", help="one: the cell (`measure` starts `one`)")
    parser.add_argument("--of", choices=KINDS, default="cells", help="measure, report: kind of cells")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--again", action="store_true", help="measure all again; the shorter time is kept")
    parser.add_argument(
        "--half",
        choices=("other", "fitted", "all"),
        help="half of the cells; fit: fitted; report: other, or all if --of is not cells",
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no cell after these seconds")
    parser.add_argument("--machines", action="store_true", help="fit: calibrations of machines, too")
    parser.add_argument("--address", default="", help="one: address of process 0, if there are two")
    parser.add_argument("--process", type=int, default=0, help="one: number of this process")
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
