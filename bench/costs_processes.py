"""Predicted against measured for two processes of this machine, a CPU device each.

    python -m bench.costs_processes            # or --again, to measure what was already; or report

Of two measurements of a cell the better one is kept, as of two passes of `bench.costs measure`.

Rates are those of this machine's calibration, the sockets between the processes among them.
"""

import os
import subprocess
import sys
from typing import Any

import fdg
from bench import costs
from bench.costs import Cell, Machine

_TIMEOUT = 300


def cells() -> list[Cell]:
    """Three algorithms, all on both processes, or actors on one and the learner on the other."""
    jobs = [
        ("PPO", "CartPole-v1", (("num_envs", 256), ("num_steps", 32))),
        ("PPO", "Pendulum-v1", (("num_envs", 128), ("num_steps", 64), ("hidden", (256, 256)))),
        ("PQN", "CartPole-v1", (("num_envs", 128), ("num_steps", 32))),
    ]
    ways: list[tuple[str, Any]] = [("GPUOnly", ())]
    ways += [("SingleLearnerCoarse", (("staleness", k),)) for k in (0, 1, 2)]
    return [Cell(*job, policy, sizes, 2) for job in jobs for policy, sizes in ways]


def predicted(cell: Cell, one: Machine) -> float:
    """Seconds of an iteration, with the calibration that is kept beside the cells."""
    from fdg.costs.prediction import predict

    return predict(fdg.place(*cell.build(), 2), one.calibration.cluster(1, processes=2)).seconds


def measured(cell: Cell) -> float:
    """Seconds of an iteration, from two children."""
    from fdg.processes.ports import free_port

    words = [sys.executable, "-m", "bench.costs_processes", f"localhost:{free_port('localhost')}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "env": environment, "cwd": costs.ROOT}
    children = [subprocess.Popen([*words, index, cell.key], **pipes) for index in ("0", "1")]
    try:
        said = [child.communicate(timeout=_TIMEOUT)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    return float(said[0].splitlines()[-1])


def report() -> None:
    """Of every machine."""
    for one in costs.machines():
        rows = [(cell, seconds, predicted(cell, one)) for cell, seconds in one.found(one.processes_file)]
        for cell, s, p in rows:
            print(f"{p / s:6.2f}  measured {s * 1e3:9.3f} ms  predicted {p * 1e3:9.3f} ms  {cell}")
        if rows:
            print(f"{one.name}: {len(rows)} cells of two processes: median error {costs.median_error(rows)}")


def main(address: str, index: int, key: str) -> None:
    """One of the two children: the first prints seconds of an iteration."""
    import jax

    from fdg.costs.candidate_times import iteration_seconds
    from fdg.processes import distributed

    distributed.initialize(address, 2, index)
    seconds = iteration_seconds(*Cell.of_key(key).build(), jax.devices())
    if distributed.is_first():
        print(seconds, flush=True)
    distributed.leave()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        if "report" not in sys.argv:
            file = costs.this_machine().processes_file
            costs.measure(cells(), file, measured, again="--again" in sys.argv)
        report()
