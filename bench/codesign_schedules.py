"""Compares our schedules with optimal schedules by OR-tools' CP-SAT, which runs in its own environment.

    python -m venv build/venvs/ortools
    build/venvs/ortools/bin/pip install ortools
    python -m bench.codesign_schedules --python build/venvs/ortools/bin/python

It prints by how much our latencies exceed CP-SAT's, and writes CP-SAT's to tests/codesign/cpsat.json, which
a test reads.
"""

import json
import subprocess

import jax.numpy as jnp
import numpy as np

from bench import harness
from envs.codesign import schedule

RESULTS = harness.ROOT / "tests/codesign/cpsat.json"
NUM_INSTANCES = {12: 100, 24: 60}  # number of instances, by number of layers
_SOLVER = """
import json, sys
from ortools.sat.python import cp_model

optima = []
for instance in json.load(sys.stdin):
    cycles, transfer = instance["latency"], instance["transfer"]
    layers, subs = range(len(cycles)), range(len(cycles[0]))
    horizon = sum(map(max, cycles)) + sum(transfer)
    model = cp_model.CpModel()
    start = [model.new_int_var(0, horizon, "") for _ in layers]
    end = [model.new_int_var(0, horizon, "") for _ in layers]
    runs = [[model.new_bool_var("") for _ in subs] for _ in layers]
    for i in layers:
        model.add_exactly_one(runs[i])
    for a in subs:
        interval = model.new_optional_interval_var
        model.add_no_overlap(interval(start[i], cycles[i][a], end[i], runs[i][a], "") for i in layers)
    for i, j in instance["before"]:
        model.add(start[j] >= end[i])
        for a in subs:
            model.add(start[j] >= end[i] + transfer[i]).only_enforce_if([runs[i][a], runs[j][a].negated()])
    last = model.new_int_var(0, horizon, "")
    model.add_max_equality(last, end)
    model.minimize(last)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = 60, 4
    if solver.solve(model) != cp_model.OPTIMAL:
        sys.exit("no optimum within a minute")
    optima.append(int(solver.objective_value))
print(json.dumps(optima))
"""


def instance(seed: int, num_layers: int, num_subs: int | None = None) -> dict:
    """A random scheduling problem: two or three chains of layers, or two networks with branches.

    There are two or three sub-accelerators, unless `num_subs` is set. Cycles differ by up to 64 times between
    layers and 8 times between sub-accelerators; a transfer takes at most half as long as its layer.
    """
    random = np.random.default_rng(seed)
    num_subs = num_subs or int(random.integers(2, 4))
    base = 2 ** random.uniform(8, 14, num_layers)
    cycles = np.maximum(1, base[:, None] * 2 ** random.uniform(-1.5, 1.5, (num_layers, num_subs))).astype(int)
    transfer = (base * random.uniform(0, 0.5) * random.uniform(0, 1, num_layers)).astype(int)
    if seed % 3 < 2:
        cuts = set(random.choice(np.arange(1, num_layers), 1 + seed % 3, replace=False).tolist())
        before = [[i, i + 1] for i in range(num_layers - 1) if i + 1 not in cuts]
    else:
        before = []
        for low, high in ((0, num_layers // 2), (num_layers // 2, num_layers)):
            for j in range(low + 1, high):
                predecessors = random.integers(max(low, j - 3), j, random.integers(1, 3))
                before += [[i, j] for i in sorted(set(predecessors.tolist()))]
    return {"latency": cycles.tolist(), "transfer": transfer.tolist(), "before": before}


def arrays_of(problem: dict) -> schedule.Work:
    """An instance as arrays; its energies equal its cycles."""
    cycles = np.asarray(problem["latency"], np.int32)
    before = np.zeros((len(cycles), len(cycles)), bool)
    before[tuple(np.transpose(problem["before"]))] = True
    transfer = jnp.asarray(problem["transfer"], jnp.int32)
    return schedule.Work(jnp.asarray(cycles), jnp.asarray(cycles, jnp.float32), transfer, jnp.asarray(before))


def gaps(optima: list[int], num_layers: int, count: int | None = None) -> list[float]:
    """Relative excess of our latencies over the optima, for the first `count` (None: all) instances."""
    schedules = [
        schedule.schedule(arrays_of(instance(seed, num_layers))) for seed in range(len(optima))[:count]
    ]
    return [int(x.latency_cycles) / optimum - 1 for x, optimum in zip(schedules, optima, strict=False)]


def main() -> None:
    parser = harness.parser("bench.codesign_schedules", __doc__)
    parser.add_argument(
        "--python", type=harness.interpreter, required=True, help="an interpreter with OR-tools"
    )
    python, optima_by_layers = parser.parse_args().python, {}
    for num_layers, count in NUM_INSTANCES.items():
        instances = json.dumps([instance(seed, num_layers) for seed in range(count)])
        solved = subprocess.run(
            [python, "-c", _SOLVER], input=instances, check=True, capture_output=True, text=True
        )
        optima_by_layers[str(num_layers)] = json.loads(solved.stdout)
        gap = gaps(optima_by_layers[str(num_layers)], num_layers)
        print(f"{count} instances of {num_layers} layers: mean {np.mean(gap):.2%}, worst {np.max(gap):.2%}")
    RESULTS.write_text(json.dumps(optima_by_layers) + "\n")


if __name__ == "__main__":
    main()
